"""Plans of calls that have no plan of the forward kernel alone, in words: packed and backward.

No time is predicted for them: fa3 has no cost model of these calls.
"""

from dataclasses import replace

from fa3.calls.ragged import MOST_RAGGED_ROWS
from fa3.planning.backward import BackwardPlan
from fa3.planning.explanation import PlanDescription, counted, quantity
from fa3.planning.gpu import Gpu
from fa3.planning.routes import (
    DECODE,
    PACKED,
    PackedSizes,
    Signature,
    choose,
    kernels_of_packed,
)
from fa3.primitives.vectors import FLOAT_BYTES
from fa3.problem import Problem, Window
from fa3.scores.masks import Band

BACKWARD_PRODUCTS = 2.5
"""Matrix products of the backward pass over the forward pass's: five instead of two."""

NOT_PREDICTED = "Not predicted: fa3 has no cost model of such calls."


def explain_packed(problem: Problem, window: Window, gpu: Gpu) -> PlanDescription:
    """How `flash_attn_varlen_func` attends to sequences that are all equally long.

    Args:
        problem: the sequences as a dense call.
        window: of the call; its kernels have all bounds that hide something at some length.
    """
    batch, heads = problem.batch, (problem.num_heads_q, problem.num_heads_kv)
    longest = problem.seqlen_q, problem.seqlen_k
    window = window.tighten(MOST_RAGGED_ROWS, MOST_RAGGED_ROWS)
    spec = replace(problem.spec, mask=Band.of(window))
    signature = Signature(PACKED, spec, window, *heads, gpu)
    rows = batch * longest[0], batch * longest[1]
    route = choose(signature, PackedSizes(batch, heads[0], *rows, *longest))
    kernels = kernels_of_packed(signature, route)
    sentence = route.explain()
    if route.name == DECODE:
        merge = "Combine" if len(kernels) > 1 else "The decode kernel"
        sentence = f"{sentence} {merge} merges the parts of split tiles."
    sentences = {
        "Route": sentence,
        "Rule": f"{route.reason} (docs/kernels.md, Packed sequences).",
        "Lengths": "Read on the GPU. Planned for equal lengths; a batch of different lengths may "
        "run other kernels.",
        "Time": NOT_PREDICTED,
    }
    facts = {"route": sentence, "rule": route.reason}
    return PlanDescription.of("packed", problem, gpu, kernels, sentences, facts)


def explain_backward(problem: Problem, gpu: Gpu) -> PlanDescription:
    """How the gradients of a dense call are computed."""
    plan = BackwardPlan.of(problem, num_sms=gpu.num_sms)
    flops, entry = int(BACKWARD_PRODUCTS * problem.flops), plan.kernels.entry
    config, shares = plan.config, plan.shares
    workspace = FLOAT_BYTES * plan.sizes.layout.end
    parts = f", each shared by {shares.parts} CTAs" * (shares.parts > 1)
    sums = "parts of dK and dV, " * (shares.parts > 1)
    groups = counted(plan.num_head_groups, "head group")
    one_by_one = " one after another" * (plan.num_head_groups > 1)
    sentences = {
        "CTA": f"A tile of {config.tile_n} keys of one key/value head, against blocks of "
        f"{config.tile_m} queries of {counted(plan.query_heads_of_cta, 'query head')}; "
        f"{config.threads} threads.",
        "Grid": f"{counted(plan.num_key_tiles, 'tile')} of keys{parts}, "
        f"{counted(plan.num_query_tiles, 'tile')} of queries, on {gpu.num_sms} SMs.",
        "Order": f"{counted(plan.query_heads_of_group, 'query head')} together, whose Q, dO and dQ "
        f"stay in L2; {groups}{one_by_one}.",
        "Memory": f"{quantity(workspace, 'B')} of device memory for the fp32 dQ accumulator, "
        f"{sums}and row statistics, besides dQ, dK and dV.",
        "Time": NOT_PREDICTED,
    }
    facts = {
        "tile": [config.tile_m, config.tile_n],
        "key_tiles": plan.num_key_tiles,
        "query_tiles": plan.num_query_tiles,
        "parts_of_key_tile": shares.parts,
        "workspace_bytes": workspace,
    }
    kernels = entry.preprocess, entry.main
    return PlanDescription.of("backward", problem, gpu, kernels, sentences, facts, flops)
