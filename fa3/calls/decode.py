"""Attention of a few queries to the keys and values of a cache: what is launched for it.

`fa3.calls.kvcache` validates a call and has it prepared here, once for all calls that are
described alike; `fa3.calls.packed_calls` has it done for sequences with few queries and packed
keys, and `fa3.calls.forward` hands over the plans of dense calls with few queries. A prepared call
allocates its workspace and launches the plan's kernels. Lengths are read on the device only: a
captured graph stays right while they grow.
"""

from typing import Any, NamedTuple

import torch

from fa3.calls.call import AttentionCall
from fa3.calls.devices import gpu_of, reserve_sms
from fa3.calls.launcher import Prepared, lse_address
from fa3.calls.options import Options
from fa3.planning.decode import DecodePlan, Sizes, check_workspace
from fa3.planning.gpu import H200
from fa3.primitives.cache_blocks import CacheTables
from fa3.problem import Problem
from fa3.reference.steps import execute_decode
from fa3.reference.walker import RaggedOperands


def values_of_decode(
    # See `fa3.reference.steps.execute_decode`; with packed queries, those sequences that the plan
    # has room for.
    operands: RaggedOperands,
    tables: CacheTables,  # where sequences are in the cache
    modifiers: tuple[torch.Tensor, ...] | None,  # of the spec's scores, mask and sinks
    softmax_scale: float,
    seqlen_new: int = 0,  # keys that each sequence has beyond `seqused_k`
    max_seqlen_k: int = 0,  # no sequence has more keys, if they are packed
    descales: tuple[torch.Tensor, ...] | None = None,  # see `DecodeArguments`
) -> dict[str, Any]:
    """Return what launches of the decode kernel, and of combine, take of a call."""
    q, k, v, out, lse, ends_q, ends_k, used_q, seqlens = operands
    batch_idx, leftpad, page_table = tables
    return {
        "q": q, "k": k, "v": v, "o": out, "lse": lse_address(lse), "cu_seqlens_q": ends_q,
        "cu_seqlens_k": ends_k, "seqused_q": used_q, "seqused_k": seqlens,
        "batch_idx": batch_idx, "leftpad": leftpad, "page_table": page_table,
        "modifiers": modifiers, "sinks": modifiers and modifiers[-1],
        "softmax_scale": softmax_scale, "seqlen_new": seqlen_new, "max_seqlen_k": max_seqlen_k,
        "descales": descales,
    }  # fmt: skip


class PreparedDecode(NamedTuple):
    """How calls of a description run in the decode kernel alone."""

    plan: DecodePlan
    prepared: Prepared | None  # its launches; None on the CPU

    @classmethod
    def of(cls, plan: DecodePlan, on_gpu: bool) -> "PreparedDecode":
        """Load the kernels of a plan, if it runs on a GPU."""
        return cls(plan, Prepared.of(plan.launches(), plan.memory) if on_gpu else None)

    def attend(
        self,
        operands: RaggedOperands,
        sizes: None,
        modifiers: tuple[torch.Tensor, ...] | None,
        scale: float,
        dropout: None,
        tables: CacheTables,
        seqlen_new: int,
        descales: tuple[torch.Tensor, ...] | None,
    ) -> None:
        """Attend; `values_of_decode` says what the arguments are.
        None of the tensors that have queries or keys is empty. Without lengths the cache is full.
        """
        if self.prepared is not None:
            self.prepared.run(
                values_of_decode(operands, tables, modifiers, scale, seqlen_new, 0, descales)
            )
            return
        execute_decode(
            self.plan, operands, self.plan.sizes.capacity, scale, modifiers, tables, seqlen_new,
            descales,
        )  # fmt: skip


def plan_decode(call: AttentionCall, options: Options) -> DecodePlan:
    """Choose how calls of a description run in the decode kernel.

    Args:
        call: valid, and with room for keys and queries.
    """
    on_gpu = call.q.device.type == "cuda"
    gpu = reserve_sms(gpu_of(call.q.device) if on_gpu else H200, options.sm_margin)
    sizes = call.batch, call.seqlen_q, call.heads_kv, call.heads_q // call.heads_kv, call.capacity
    window = Sizes(*sizes).bounds(options.window)
    batch, seqlen_q, *heads, capacity = sizes
    spec = call.spec(options, window, window.right == 0)
    plan = DecodePlan.of(
        Problem(spec, batch, seqlen_q, capacity, *heads, window), gpu, call.cache_layout,
        options.num_splits, options.batch_invariant, call.k_new is not None,
        is_packed=call.is_packed, has_used_q=call.seqused_q is not None, has_fp8_q=call.has_fp8_q,
    )  # fmt: skip
    if on_gpu and plan.cut.has_parts:
        memory = torch.cuda.get_device_properties(call.q.device).total_memory
        check_workspace(plan.workspace, call.head_dim_v, call.capacity, memory)
    return plan
