"""What `fa3 info` says of the planner's costs for the GPU that is here."""

from fa3.planning.gpu import H200
from fa3.tools.plan_times import digest_of_sources
from fa3.tools.warmup import known_gpus


def describe_costs() -> str:
    """Where the planner's costs for this machine's Hopper GPU are from."""
    gpu = known_gpus()[0]
    if gpu.tuned is None:
        others = "" if gpu.costs.measured else f", of an {H200.name}: `fa3 tune` measures"
        return f"those that come with fa3{others}"
    is_old = gpu.tuned.source.get("sources") != digest_of_sources()
    remark = "; fa3 has changed since, so tune again" if is_old else ""
    return f"tuned to the {gpu.name}: {gpu.tuned.when}{remark}"
