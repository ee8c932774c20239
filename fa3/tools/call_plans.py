"""Plans of calls that have no plan of the forward kernel alone, in words: packed and backward.

No time is predicted for them: fa3 has no cost model of these calls.
"""

from dataclasses import replace
from typing import Any

from fa3.calls.call import MOST_RAGGED_ROWS
from fa3.calls.packed_calls import RaggedCall, plan_varlen
from fa3.planning.backward import BackwardPlan
from fa3.planning.explanation import PlanDescription, counted, facts_of, quantity, sentences_of
from fa3.planning.gpu import Gpu
from fa3.planning.joined import PackedSizes
from fa3.planning.kernel_names import describe_kernel
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
    heads_q, heads_kv = problem.num_heads_q, problem.num_heads_kv
    window = window.tighten(MOST_RAGGED_ROWS, MOST_RAGGED_ROWS)
    spec = replace(problem.spec, mask=Band.of(window))
    call = plan_varlen(spec, window, heads_q, heads_kv, False, False, gpu, 0)
    sizes = PackedSizes(
        problem.batch,
        heads_q,
        problem.batch * problem.seqlen_q,
        problem.batch * problem.seqlen_k,
        problem.seqlen_q,
        problem.seqlen_k,
    )
    route, kernels = route_of(call, sizes)
    names = [describe_kernel(kernel) for kernel in kernels]
    sentences = {
        **sentences_of(problem, problem.flops, gpu, names),
        "Route": route,
        "Lengths": "Read on the GPU. Planned for equal lengths; a batch of different lengths may "
        "run other kernels (docs/kernels.md, Packed sequences).",
        "Time": NOT_PREDICTED,
    }
    facts = facts_of("packed", problem, problem.flops, gpu, names)
    return PlanDescription(sentences, {**facts, "route": route})


def route_of(call: RaggedCall, sizes: PackedSizes) -> tuple[str, list[Any]]:
    """Which kernels serve the sequences of a call, in a sentence and in the order of launches."""
    packs_sequences, _, most, has_long = call.route(sizes, False, None, splits=True)
    if packs_sequences and call.joined is not None:
        route = "Sequences are short, so several share a tile of the forward kernel."
        return route, [call.joined.joined_table(), *call.joined.kernels()]
    long = [call.plan.tile_table(), *call.plan.kernels()] if has_long else []
    if not most or call.short is None:
        return "The forward kernel attends; each tile has rows of one sequence.", long
    plan = call.short.plan(most, has_long, call.window)
    combine = None if plan.merges_inside else plan.combine()
    short = [plan.kernel(), *([] if combine is None else [combine])]
    if not has_long:
        merge = "Combine" if combine else "The decode kernel"
        route = f"The decode kernel attends. {merge} merges the parts of split tiles."
        return route, short
    return (
        f"Sequences of up to {most} queries are the decode kernel's, others the forward kernel's. "
        "Both run at the same time.",
        [long[0], short[0], *long[1:], *short[1:]],
    )


def explain_backward(problem: Problem, gpu: Gpu) -> PlanDescription:
    """How the gradients of a dense call are computed."""
    plan = BackwardPlan.of(problem, num_sms=gpu.num_sms)
    flops, entry = int(BACKWARD_PRODUCTS * problem.flops), plan.kernels.entry
    names = [describe_kernel(kernel) for kernel in (entry.preprocess, entry.main)]
    config, shares = plan.config, plan.shares
    workspace = FLOAT_BYTES * plan.sizes.layout.end
    parts = f", each shared by {shares.parts} CTAs" * (shares.parts > 1)
    sums = "parts of dK and dV, " * (shares.parts > 1)
    groups = counted(plan.num_head_groups, "head group")
    one_by_one = " one after another" * (plan.num_head_groups > 1)
    sentences = {
        **sentences_of(problem, flops, gpu, names),
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
        **facts_of("backward", problem, flops, gpu, names),
        "tile": [config.tile_m, config.tile_n],
        "key_tiles": plan.num_key_tiles,
        "query_tiles": plan.num_query_tiles,
        "parts_of_key_tile": shares.parts,
        "workspace_bytes": workspace,
    }
    return PlanDescription(sentences, facts)
