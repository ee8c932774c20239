"""Attention of a few queries to the keys and values of a cache: loads kernels and runs them.

What follows from shapes and options is worked out once and remembered, so that a repeated call
costs a look-up, the allocation of the workspace and the launches. Lengths are read on the device
only: a captured graph stays right while they grow.
"""

import functools
from dataclasses import dataclass

import torch

from fa3.calls.modifiers import UNMODIFIED, Modifiers, Structure
from fa3.planning.decode import DecodePlan, Sizes, check_workspace, choose_cut
from fa3.planning.gpu import H200
from fa3.planning.launch import Launch
from fa3.primitives.cache_blocks import CacheLayout
from fa3.problem import REMEMBERED, Window
from fa3.reference.cache import CacheOperands, execute_decode
from fa3.running.compiler import load_kernel
from fa3.schedules.sequences import capacity_of


@dataclass(frozen=True, slots=True)
class PreparedDecode:
    """What a call's shapes and options lead to.

    Fields:
        launches: those of the plan with their kernels loaded; none on the CPU.
        workspace: numbers of 32 bits that parts take.
        cleared: how many of them, the first ones, must be zero before the launches.
    """

    plan: DecodePlan
    launches: tuple[Launch, ...] = ()
    workspace: int = 0
    cleared: int = 0

    @classmethod
    def on_gpu(cls, plan: DecodePlan) -> "PreparedDecode":
        """Load the kernels of a plan."""
        launches = tuple(one.loaded(load_kernel) for one in plan.launches)
        size = plan.workspace
        cleared = size.numbers_of_records if plan.clears_records else 0
        return cls(plan, launches, size.numbers(plan.spec.head_dim_v), cleared)


def attend_with_cache(
    operands: CacheOperands,
    softmax_scale: float,
    window: Window,
    softcap: float = 0.0,
    num_splits: int = 0,
    batch_invariant: bool = False,
    sm_margin: int = 0,
    max_seqlen_q: int | None = None,
) -> None:
    """Attend to a cache: on the current stream of the tensors' GPU, or on the CPU.

    Args:
        operands: tensors on one device, already validated; none is empty.
        softmax_scale: factor of the scores.
        window: keys that a query sees beside its own position, aligned bottom-right.
        softcap: see `fa3.scores.scores.Softcap`; 0 for none.
        num_splits, batch_invariant: see `fa3.planning.decode.choose_cut`.
        sm_margin: SMs to leave to other kernels.
        max_seqlen_q: the most queries that a sequence may have, if they are packed.
    """
    q, k, v, out, lse, seqlens, batch_idx, leftpad, page_table, slopes, sinks, ends = operands
    modifiers, batch = UNMODIFIED, seqlens.shape[0]
    seqlen_q = q.shape[1] if ends is None else max_seqlen_q
    if softcap or slopes is not None or sinks is not None:
        is_causal = window.right == 0 or seqlen_q == 1
        modifiers = Modifiers.of(q, batch, softcap, slopes, sinks, None, None, is_causal)
    call = prepare_decode(
        q.shape if ends is None else (batch, seqlen_q, *q.shape[1:]),
        k.shape, v.shape[-1], q.dtype, q.device,
        None if page_table is None else page_table.shape[1],
        (batch_idx is not None, leftpad is not None),
        modifiers.structure, window, num_splits, batch_invariant, sm_margin, ends is not None,
    )  # fmt: skip
    if not call.launches:
        execute_decode(call.plan, operands, softmax_scale, modifiers.tensors)
        return
    lse = 0 if lse is None else lse.data_ptr()
    (kernel, integers, _), *merges = call.launches
    workspace = None
    if merges:
        workspace = torch.empty(call.workspace, dtype=torch.float32, device=q.device)
        if call.cleared:
            workspace[: call.cleared].zero_()
    # In the order of `DecodeArguments`; to make one of them would take the host 0.5 us.
    kernel(
        q, k, v, out, lse, ends, seqlens, batch_idx, leftpad, page_table, modifiers.tensors,
        workspace, softmax_scale, *integers,
    )  # fmt: skip
    for combine, sizes, _ in merges:
        combine(out, lse, sinks, None, None, workspace, *sizes)


@functools.lru_cache(maxsize=REMEMBERED)
def prepare_decode(
    q: tuple[int, ...],
    k: tuple[int, ...],
    head_dim_v: int,
    dtype: torch.dtype,
    device: torch.device,
    pages: int | None,
    given: tuple[bool, bool],
    structure: Structure,
    window: Window,
    num_splits: int,
    batch_invariant: bool,
    sm_margin: int,
    is_packed: bool = False,
) -> PreparedDecode:
    """Choose how a call runs, and load its kernels.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim), also of packed queries.
        k: the cache's shape.
    """
    batch, seqlen_q, heads_q, head_dim = q
    _, rows_of_cache, heads_kv, _ = k
    batch_indexed, left_padded = given
    capacity = capacity_of(rows_of_cache, 1 if pages is None else pages)
    sizes = Sizes(batch, seqlen_q, heads_kv, heads_q // heads_kv, capacity)
    window = window.tighten(seqlen_q, capacity)
    spec = structure.spec(dtype, head_dim, head_dim_v, window)
    cache = CacheLayout(0 if pages is None else rows_of_cache, batch_indexed, left_padded)
    on_gpu = device.type == "cuda"
    properties = torch.cuda.get_device_properties(device) if on_gpu else None
    num_ctas = (properties.multi_processor_count if on_gpu else H200.num_sms) - sm_margin
    cut = choose_cut(sizes, window, num_ctas, num_splits, batch_invariant, is_packed)
    plan = DecodePlan(spec, cache, sizes, window, cut, num_ctas, is_packed)
    if not on_gpu:
        return PreparedDecode(plan)
    if cut.has_parts:
        check_workspace(plan.workspace, head_dim_v, capacity, properties.total_memory)
    return PreparedDecode.on_gpu(plan)
