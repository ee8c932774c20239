"""Attention to a cache from batches of prompts and of sequences that decode: both kernels share it.

`fa3.calls.kvcache` has calls prepared here. Where packed sequences may have many queries,
the forward kernel attends for those that do, and the decode kernel for the others: each reads the
lengths on the device and leaves out what is the other's (`fa3.planning.short_queries`). All other
calls are the decode kernel's alone (`fa3.calls.decode`).
"""

from dataclasses import dataclass

import torch

from fa3.calls import decode
from fa3.calls.call import AttentionCall
from fa3.calls.decode import PreparedDecode
from fa3.calls.devices import gpu_of
from fa3.calls.known_lengths import HostSeqlens
from fa3.calls.options import Options
from fa3.calls.packed_calls import DecodeLaunch, PreparedVarlen, prepare_alone
from fa3.planning.gpu import H200
from fa3.planning.ragged import RaggedPlan
from fa3.planning.short_queries import (
    FEWEST_EARLIER_KEYS,
    leaves_sms_idle,
    most_queries_of_few,
    short_queries,
)
from fa3.primitives.cache_blocks import CacheTables
from fa3.problem import Window
from fa3.reference.varlen import RaggedOperands, execute_varlen


@dataclass(frozen=True, slots=True)
class PreparedMixed:
    """How calls run that have sequences with few queries and sequences with many.

    Fields:
        short: attends for sequences with up to `most_short` queries.
        plan: how the forward kernel attends for the others.
        window: of the plan.
        capacity: keys that a sequence has room for.
        long: the plan's kernels; None on the CPU.
        alone: attends for all sequences where the forward kernel would have few tiles. Steps in
            which no sequence has many queries run this kernel too, so they need not wait for it.
    """

    short: PreparedDecode
    plan: RaggedPlan
    window: Window
    most_short: int
    capacity: int
    long: PreparedVarlen | None
    alone: PreparedDecode

    def attend(
        self,
        operands: RaggedOperands,
        tables: CacheTables,
        modifiers: tuple[torch.Tensor, ...] | None,
        softmax_scale: float,
        seqlen_new: int = 0,
        known: HostSeqlens | None = None,
    ) -> None:
        """As `PreparedDecode.attend`, but `seqused_k` says all keys: `seqlen_new` is 0.

        Args:
            known: the lengths, if the host knows them; they fit the call.
        """
        total_q, heads, _ = operands.q.shape
        batch, capacity = operands.cu_seqlens_q.shape[0] - 1, self.capacity
        given = operands, tables, modifiers, softmax_scale
        if capacity >= FEWEST_EARLIER_KEYS and leaves_sms_idle(
            total_q, batch, heads, self.plan.gpu.num_sms
        ):
            self.alone.attend(*given)
            return
        has_short = known is None or known.fewest_q <= self.most_short
        page_table = tables.page_table
        if self.long is None:
            execute_varlen(
                self.plan, self.window, operands, softmax_scale, modifiers,
                short_queries=self.most_short, page_table=page_table,
            )  # fmt: skip
            if has_short:
                self.short.attend(*given)
            return
        short = None
        if has_short:
            short = DecodeLaunch(
                self.most_short, lambda table: self.short.start(*given, 0, capacity, table)
            )
        self.long.launch(
            operands, capacity, capacity, modifiers, softmax_scale, short, page_table, None, known
        )


def prepare_attention(call: AttentionCall, options: Options) -> PreparedDecode | PreparedMixed:
    """Choose how calls of a description run, and load their kernels.

    Args:
        call: of `fa3.calls.decode.prepare_decode`.
    """
    most_short = short_queries(call.heads_q // call.heads_kv)
    is_short = not call.is_packed or call.seqlen_q <= most_short
    # Two kernels beside each other would take the SMs that are reserved.
    if is_short or options.num_splits or options.batch_invariant or options.sm_margin:
        return decode.prepare_decode(call, options)
    on_gpu = call.q.device.type == "cuda"
    tight = options.window.tighten(call.seqlen_q, call.capacity)
    gpu = gpu_of(call.q.device) if on_gpu else H200
    spec, has_used_q = call.spec(options, tight, tight.right == 0), call.seqused_q is not None
    plan = RaggedPlan(spec, has_used_q, False, gpu, call.cache_layout)
    if not plan.finds_keys:
        return decode.prepare_decode(call, options)
    few = call._replace(max_seqlen_q=most_short)
    most = min(call.seqlen_q, most_queries_of_few(call.heads_q, gpu.num_sms))
    return PreparedMixed(
        decode.prepare_decode(few, options, overlaps_forward=True),
        plan,
        tight,
        most_short,
        call.capacity,
        prepare_alone(plan, tight) if on_gpu else None,
        decode.prepare_decode(call._replace(max_seqlen_q=most), options),
    )
