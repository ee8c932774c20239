"""Attention to a cache from batches of prompts and of sequences that decode: both kernels share it.

`fa3.calls.kvcache` has calls prepared here. Where packed sequences may have many queries,
the forward kernel attends for those that do, and the decode kernel for the others
(`fa3.planning.routes`). All other calls are the decode kernel's alone (`fa3.calls.decode`).
"""

from dataclasses import dataclass

import torch

from fa3.calls import decode
from fa3.calls.call import MOST_RAGGED_ROWS, AttentionCall
from fa3.calls.decode import PreparedDecode
from fa3.calls.devices import gpu_of
from fa3.calls.launcher import with_device
from fa3.calls.options import Options
from fa3.calls.packed_calls import DecodeLaunch, PreparedVarlen, prepare_alone
from fa3.planning.gpu import H200
from fa3.planning.routes import CACHE, DECODE, PackedSizes, Signature, choose_route
from fa3.primitives.cache_blocks import CacheTables
from fa3.reference.varlen import RaggedOperands, execute_varlen


@dataclass(frozen=True, slots=True)
class PreparedMixed:
    """How calls run that have sequences with few queries and sequences with many.

    Fields:
        signature: what routes depend on besides lengths.
        longest: the most queries that a sequence may have, and keys that it has room for.
        short: attends for short sequences, with up to `signature.short_limit` queries.
        long: kernels that attend for the others; None on the CPU.
        alone: attends for all sequences where the forward kernel would have few tiles. Steps in
            which no sequence has many queries run this kernel too, so they need not wait for it.
    """

    signature: Signature
    longest: tuple[int, int]
    short: PreparedDecode
    long: PreparedVarlen | None
    alone: PreparedDecode

    def attend(
        self,
        operands: RaggedOperands,
        tables: CacheTables,
        modifiers: tuple[torch.Tensor, ...] | None,
        softmax_scale: float,
        seqlen_new: int = 0,
        descales: None = None,
    ) -> None:
        """As `PreparedDecode.attend`, but `seqused_k` says all keys: `seqlen_new` is 0.

        Args:
            descales: none, as the decode kernel alone serves FP8 caches.
        """
        total_q, heads, _ = operands.q.shape
        batch, (_, capacity) = operands.cu_seqlens_q.shape[0] - 1, self.longest
        route = self.signature.route(PackedSizes(batch, heads, total_q, 0, *self.longest))
        given = operands, tables, modifiers, softmax_scale
        if route.name == DECODE:
            self.alone.attend(*given)
            return
        page_table, most_short = tables.page_table, route.most_queries
        if self.long is None:
            execute_varlen(
                self.signature.plan, self.signature.window, operands, softmax_scale, modifiers,
                short_queries=most_short, page_table=page_table,
            )  # fmt: skip
            if most_short:
                self.short.attend(*given)
            return
        short = None
        if most_short:
            short = DecodeLaunch(
                most_short, lambda table: self.short.start(*given, 0, capacity, table)
            )
        with_device(
            operands.q.device, self.long.launch, operands, capacity, capacity, modifiers,
            softmax_scale, short, page_table, None, route.splits_on_gpu,
        )  # fmt: skip


def prepare_attention(call: AttentionCall, options: Options) -> PreparedDecode | PreparedMixed:
    """Choose how calls of a description run, and load their kernels.

    Args:
        call: of `fa3.calls.decode.prepare_decode`.
    """
    longest, on_gpu = (call.seqlen_q, call.capacity), call.q.device.type == "cuda"
    gpu = gpu_of(call.q.device) if on_gpu else H200
    tight = options.window.tighten(*longest)
    signature = Signature(
        CACHE, call.spec(options, tight, tight.right == 0), tight, call.heads_q, call.heads_kv, gpu,
        options.sm_margin, call.cache_layout, call.is_packed, call.seqused_q is not None,
        num_splits=options.num_splits, batch_invariant=options.batch_invariant,
    )  # fmt: skip
    most_rows = PackedSizes(call.batch, call.heads_q, MOST_RAGGED_ROWS, 0, *longest)
    if choose_route(signature, most_rows).name == DECODE:
        return decode.prepare_decode(call, options)

    def decode_up_to(most_queries: int, overlaps_forward: bool) -> PreparedDecode:
        few = call._replace(max_seqlen_q=min(call.seqlen_q, most_queries))
        return decode.prepare_decode(few, options, overlaps_forward=overlaps_forward)

    long = prepare_alone(signature.plan, tight) if on_gpu else None
    short = decode_up_to(signature.short_limit, True)
    return PreparedMixed(
        signature, longest, short, long, decode_up_to(signature.most_queries_of_few, False)
    )
