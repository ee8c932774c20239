"""A plan in words and in numbers: what it does, its predicted time and bottleneck, and the
candidates (`Candidate`) that the planner compared.

`Plan.explain` gives an `Explanation`, other plans a `PlanDescription`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from fa3.kernels.forward_launch import ForwardConfig
from fa3.planning.costs import Costs, least_gain
from fa3.planning.gpu import Gpu
from fa3.planning.kernel_names import describe_config, head_dims, names_of_modifiers
from fa3.planning.prediction import Prediction
from fa3.planning.timeline import Timeline
from fa3.primitives.shared_memory import CAPACITY
from fa3.problem import NO_BOUND, Problem, Window
from fa3.schedules import Schedule


class Candidate(NamedTuple):
    """A tiling and a schedule for a problem, with the predicted time.

    Fields:
        schedule: a name in `fa3.schedules.SCHEDULES`.
        measured: whether its tile and its schedule were measured; otherwise the prediction is a
            guess, and the planner takes it only for a gain above `fa3.planning.costs.UNSURE`.
    """

    config: ForwardConfig
    schedule: str
    prediction: Prediction
    measured: bool

    @property
    def name(self) -> str:
        return f"{self.schedule} {describe_config(self.config)}"


@dataclass(frozen=True)
class PlanDescription:
    """A plan in words and in numbers. `print` it.

    Fields:
        sentences: by what they are about.
        facts: the same for programs; JSON can hold them.
    """

    sentences: dict[str, str]
    facts: dict[str, Any]

    def __str__(self) -> str:
        return in_lines(self.sentences)


@dataclass(frozen=True)
class Explanation:
    """Everything there is to say about a plan of the forward kernel. `print` it.

    Fields:
        kernels: what is launched, one line for each.
        is_arranged: whether the caller gave the order of the tiles.
        chosen: the plan itself.
        candidates: what the planner compares for this problem, fastest first.
        packing: the same problem in the decode kernel, in a sentence; empty if that cannot run it.
    """

    problem: Problem
    gpu: Gpu
    kernels: tuple[str, ...]
    schedule: Schedule
    is_arranged: bool
    chosen: Candidate
    candidates: tuple[Candidate, ...]
    timeline: Timeline
    costs: Costs
    packing: str

    def __str__(self) -> str:
        return in_lines(self.sentences)

    @property
    def sentences(self) -> dict[str, str]:
        """What there is to say, by what it is about."""
        return {
            **sentences_of(self.problem, self.problem.flops, self.gpu, self.kernels),
            "CTA": self.cta,
            "Memory": self.memory,
            "Grid": self.grid,
            "Order": self.order,
            "Work": self.work,
            "Softmax": self.softmax,
            "Balance": self.balance,
            "Time": self.time,
            "Bound": self.bound,
            "Choice": self.choice,
            "Packing": self.packing,
        }

    @property
    def facts(self) -> dict[str, Any]:
        """The same for programs; JSON can hold them."""
        config, schedule = self.config, self.schedule
        return {
            **facts_of("dense", self.problem, self.problem.flops, self.gpu, self.kernels),
            "tile": [config.tile_m, config.tile_n],
            "cluster": config.cluster,
            "ctas": schedule.num_clusters * config.cluster,
            "tiles": schedule.order.num_tiles * config.cluster,
            "schedule": schedule.name,
            "shared_memory_bytes": config.smem_bytes(self.problem.spec),
            "prediction": facts_of_prediction(self.chosen.prediction),
            "candidates": facts_of_candidates(self.candidates),
        }

    def trace(self, recorded: Timeline | None = None) -> dict:
        """The timeline in the Trace Event Format that Perfetto and chrome://tracing open.

        Args:
            recorded: a recording on the GPU (`fa3.record_timeline`), shown next to the prediction.
        """
        lanes = "SM" if self.config.cluster == 1 else "cluster"
        return self.timeline.trace_events(describe_problem(self.problem), lanes, recorded)

    @property
    def config(self) -> ForwardConfig:
        return self.chosen.config

    @property
    def lane(self) -> str:
        """What one cluster occupies: an SM or several."""
        return "SM" if self.config.cluster == 1 else f"cluster of {self.config.cluster} SMs"

    @property
    def cta(self) -> str:
        config = self.config
        return (
            f"{config.tile_m} query rows against blocks of {config.tile_n} keys; "
            f"{config.threads} threads in 1 producer and {config.consumers} consumer warpgroups."
        )

    @property
    def memory(self) -> str:
        config = self.config
        o_buffer = "O in a buffer of its own" if config.own_o else "O staged where Q was"
        return (
            f"{counted(config.q_stages, 'stage')} of Q in shared memory, {config.kv_stages} of K "
            f"and of V, {o_buffer}: {config.smem_bytes(self.problem.spec):,} of {CAPACITY:,} bytes."
        )

    @property
    def grid(self) -> str:
        cluster = self.config.cluster
        kind = "persistent CTA" if self.schedule.is_persistent else "CTA"
        clusters = "" if cluster == 1 else f" in clusters of {cluster}"
        tiles = counted(self.schedule.order.num_tiles * cluster, "tile")
        return (
            f"{counted(self.schedule.num_clusters * cluster, kind)}{clusters} on "
            f"{self.gpu.num_sms} SMs, for {tiles}: {self.chosen.prediction.waves:,.2f} waves."
        )

    @property
    def order(self) -> str:
        order = self.schedule.order
        heads = self.problem.num_heads_q * self.problem.batch
        sections = -(-order.num_heads * order.batch // order.heads_per_section)
        together = counted(heads, "head") + " together"
        if sections > 1:
            together = f"{heads:,} heads in {sections} head groups, one after another"
        first = "in the caller's order" if self.is_arranged else self.schedule.direction
        return f"Schedule {self.schedule.name}: {together}, {first}."

    @property
    def work(self) -> str:
        """Key blocks, counted once for every CTA of a cluster."""
        timeline, cluster = self.timeline, self.config.cluster
        blocks, full = timeline.blocks * cluster, timeline.full_blocks * cluster
        return f"{counted(blocks, 'key block')}, {full:,} of them unmasked."

    @property
    def softmax(self) -> str:
        if not self.config.fixed_reference:
            return "Online: subtracts the running row max."
        return (
            "Subtracts a fixed row max instead of the running one; the recompute launch repeats "
            "rows for which it was too far off."
        )

    @property
    def balance(self) -> str:
        timeline = self.timeline
        return (
            f"{'An' if self.lane == 'SM' else 'A'} {self.lane} works for "
            f"{duration(min(timeline.busy, default=0.0))} to "
            f"{duration(max(timeline.busy, default=0.0))}, on average "
            f"{duration(timeline.mean)}: {timeline.balance:.1%} of the longest."
        )

    @property
    def time(self) -> str:
        prediction = self.chosen.prediction
        rate = self.problem.flops / prediction.us / 1e6
        where = "" if self.costs.measured else f" Not measured on an {self.gpu.name}."
        tile = "" if self.chosen.measured else " Its tile or schedule was not measured."
        return (
            f"{duration(prediction.us)} predicted under steady load, {rate:,.0f} TFLOP/s; "
            f"{duration(prediction.burst_us)} in a burst.{where}{tile}"
        )

    @property
    def bound(self) -> str:
        prediction = self.chosen.prediction
        return (
            f"By {prediction.bound}: compute {duration(prediction.compute_us)} with SMs "
            f"busy for {prediction.busy:.1%} of it, device memory "
            f"{duration(prediction.memory_us)}, launch {prediction.launch_us:.1f} us."
        )

    @property
    def choice(self) -> str:
        """The candidates with their predicted times."""
        others = [candidate for candidate in self.candidates if candidate.name != self.chosen.name]
        return choice_of(self.chosen.name, self.chosen.prediction, others)


# ------------------------------------------------------------------------- of all kinds of plans


def sentences_of(problem: Problem, flops: int, gpu: Gpu, kernels: Iterable[str]) -> dict[str, str]:
    """What there is to say of any plan.

    Args:
        flops: useful floating-point operations.
        kernels: what is launched, in this order.
    """
    return {
        "Problem": f"{describe_problem(problem)}: {quantity(flops, 'FLOP')}; q, k, v "
        f"and out have {quantity(problem.bytes, 'B')}.",
        "GPU": f"{gpu.name}, {gpu.num_sms} SMs.",
        "Kernels": BELOW.join(kernels),
    }


def facts_of(
    call: str, problem: Problem, flops: int, gpu: Gpu, kernels: Iterable[str]
) -> dict[str, Any]:
    """The facts that all plans have.

    Args:
        call: what is planned: "dense", "packed", "cache" or "backward".
    """
    spec = problem.spec
    return {
        "call": call,
        "gpu": {"name": gpu.name, "sms": gpu.num_sms},
        "problem": {
            "batch": problem.batch,
            "seqlen_q": problem.seqlen_q,
            "seqlen_k": problem.seqlen_k,
            "heads_q": problem.num_heads_q,
            "heads_kv": problem.num_heads_kv,
            "head_dim": spec.head_dim,
            "head_dim_v": spec.head_dim_v,
            "dtype": spec.dtype,
            "window": list(problem.window),
            "modifiers": names_of_modifiers(spec),
        },
        "flop": flops,
        "bytes": problem.bytes,
        "kernels": list(kernels),
    }


def facts_of_prediction(prediction: Prediction) -> dict[str, Any]:
    """A predicted time and what it is made of."""
    return {
        "us": round(prediction.us, 3),
        "burst_us": round(prediction.burst_us, 3),
        "compute_us": round(prediction.compute_us, 3),
        "memory_us": round(prediction.memory_us, 3),
        "launch_us": round(prediction.launch_us, 3),
        "bound": prediction.bound,
    }


def facts_of_candidates(candidates: Iterable[Candidate]) -> list[dict[str, Any]]:
    """Plans of the forward kernel that were compared."""
    return [
        {"name": one.name, "us": round(one.prediction.us, 3), "measured": one.measured}
        for one in candidates
    ]


def choice_of(name: str, prediction: Prediction, others: Iterable[Candidate]) -> str:
    """What was chosen, and the other candidates with their predicted times."""
    us = prediction.us
    lines = [f"{name}: {duration(us)}."]
    for other in others:
        difference = other.prediction.us / us - 1 if us else 0.0
        remark = "" if other.measured else ", not measured"
        if 0 < us - other.prediction.us <= least_gain(us):
            remark += ", less than the model can tell"
        lines.append(f"{other.name}: {duration(other.prediction.us)}, {difference:+.1%}{remark}.")
    return BELOW.join(lines)


# ------------------------------------------------------------------------------------ in words

BELOW = "\n" + " " * 9
"""Begins another line of a sentence."""


def in_lines(sentences: dict[str, str]) -> str:
    """Sentences with what they are about before them, one line each."""
    return "\n".join(f"{name:8} {sentence}" for name, sentence in sentences.items() if sentence)


def quantity(number: float, unit: str) -> str:
    """A number with the prefix that suits it: "137.5 GFLOP", "83.9 MB"."""
    prefixes = ["", "k", "M", "G", "T", "P", "E"]
    while number >= 1000 and len(prefixes) > 1:
        number /= 1000
        del prefixes[0]
    return f"{number:,.1f} {prefixes[0]}{unit}" if prefixes[0] else f"{number:,.0f} {unit}"


def duration(us: float) -> str:
    """A time in three digits or more: "12.3 us", "1,234 us", "393.9 ms", "13.7 s"."""
    if us >= 10_000_000:
        return f"{us / 1_000_000:,.1f} s"
    if us >= 10_000:
        return f"{us / 1000:,.1f} ms"
    return f"{us:,.0f} us" if us >= 100 else f"{us:.1f} us"


def counted(number: int, noun: str) -> str:
    """A number of things: "1 tile", "1,024 tiles"."""
    return f"{number:,} {noun}" + "s" * (number != 1)


def describe_problem(problem: Problem) -> str:
    """A problem in one line."""
    spec = problem.spec
    heads = counted(problem.num_heads_q, "head")
    if problem.qhead_per_kvhead > 1:
        shared = counted(problem.num_heads_kv, "key/value head")
        heads = f"{problem.num_heads_q} query heads on {shared}"
    queries = "1 query" if problem.seqlen_q == 1 else f"{problem.seqlen_q:,} queries"
    modifiers = "".join(f", {name}" for name in names_of_modifiers(spec))
    return (
        f"{problem.batch:,} x {queries} on {counted(problem.seqlen_k, 'key')}, {heads}, "
        f"{head_dims(spec.head_dim, spec.head_dim_v)}, {spec.dtype}, "
        f"{describe_window(problem.window)}{modifiers}"
    )


def describe_window(window: Window) -> str:
    """A window in a few words."""
    if window == (NO_BOUND, NO_BOUND):
        return "no mask"
    if window == (NO_BOUND, 0):
        return "causal"
    left, right = ("all" if bound == NO_BOUND else f"{bound:,}" for bound in window)
    return f"window of {left} keys to the left and {right} to the right"
