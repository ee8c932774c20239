"""Calls with packed queries, on packed keys or on a cache: their routes and their launches.

`fa3.planning.routes` decides which kernels serve a call. The forward kernel walks a table of tiles,
which a kernel before it makes from the lengths; tiles may be split. A kernel more recomputes
rows whose fixed reference failed, or, where sequences share tiles, rows that are not finite.
Sequences with few queries may be the decode kernel's, which then overlaps the forward kernel.

All that depends on lengths is in tensors that each call allocates, so calls in several threads, on
several streams and in captured graphs share nothing that is written. Marks of rows are among the
counters that every call has for itself (`fa3.running.counters`).
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fa3.calls.call import MOST_RAGGED_ROWS, AttentionCall
from fa3.calls.decode import PreparedDecode, plan_decode, values_of_decode
from fa3.calls.devices import gpu_of, reserve_sms
from fa3.calls.launcher import Prepared
from fa3.calls.operands import hide_all_keys
from fa3.calls.options import Options
from fa3.kernels.segment_table import segment_rows
from fa3.kernels.tile_table import capacity_of_table, shift_of_work, words_of_table
from fa3.planning.decode import DecodePlan, Sizes
from fa3.planning.gpu import H200
from fa3.planning.launch import NO_MEMORY, Memory
from fa3.planning.routes import (
    BOTH,
    BOTH_SPLIT,
    CACHE,
    DECODE,
    FORWARD,
    PACKED,
    SHARED,
    ZEROS,
    PackedSizes,
    Route,
    Signature,
    choose_route,
    launches_of_route,
)
from fa3.primitives.arithmetic import LARGEST
from fa3.primitives.cache_blocks import CacheTables
from fa3.problem import REMEMBERED
from fa3.reference.dropout import Dropout
from fa3.reference.steps import NO_TABLES, execute_decode, execute_packed
from fa3.reference.walker import RaggedOperands
from fa3.schedules.marked import words_of_marks
from fa3.schedules.split import FIELDS
from fa3.schedules.stretches import most_slots
from fa3.scores.intervals import ROW_RECORD


@dataclass(frozen=True, slots=True)
class PackedCall:
    """What a call with packed queries leads to, whatever its lengths are."""

    signature: Signature  # what routes depend on; bounds of the window that any lengths may have
    # `Signature.decode_plan`, remembered.
    decode_plan: Callable[[int, bool], DecodePlan]
    # Gives the launches of a route with so many queries of the decode kernel. It loads kernels when
    # they are first asked for: those for many keys, or for split tiles, most calls never have.
    prepared: Callable[[str, int], Prepared] | None  # None on the CPU
    # tile_m, tile_n: of tiles of one sequence.
    tile_m: int
    tile_n: int

    @classmethod
    def of(cls, signature: Signature, on_gpu: bool = False) -> "PackedCall":
        """Load the kernels that a call is likely to have, whatever its lengths are."""
        decode_plan = functools.lru_cache(maxsize=REMEMBERED)(signature.decode_plan)

        @functools.lru_cache(maxsize=REMEMBERED)
        def prepared(name: str, most_queries: int) -> Prepared:
            launches = launches_of_route(signature, name, most_queries, decode_plan)
            memory = decode_plan(most_queries, name != DECODE).memory if most_queries else NO_MEMORY
            return Prepared.of(launches, memory)

        if on_gpu and signature.call == PACKED:
            prepared(FORWARD, 0)
            if signature.shared_tiling is not None:
                prepared(SHARED, 0)
        config = signature.config
        return cls(
            signature, decode_plan, prepared if on_gpu else None, config.tile_m, config.tile_n
        )

    def attend(
        self,
        operands: RaggedOperands,  # of a cache, `seqused_k` says all keys
        sizes: PackedSizes,  # of the call, which bound the lengths
        tensors: tuple[torch.Tensor, ...] | None,  # of the spec's scores, mask and sinks
        scale: float,
        dropout: Dropout | None = None,  # where the spec has it
        tables: CacheTables = NO_TABLES,  # where sequences are in a cache
        seqlen_new: int = 0,  # the lengths of packed queries have the new keys
        descales: tuple[torch.Tensor, ...] | None = None,  # of packed keys in FP8
    ) -> None:
        """Write the rows of out and lse that belong to queries that are used."""
        if 0 in (sizes.batch, sizes.total_q, sizes.heads):
            return
        signature = self.signature
        route = signature.route(sizes)
        if route.name == ZEROS:
            query_lengths = operands.cu_seqlens_q, operands.seqused_q
            sinks = tensors[-1] if signature.spec.sinks else None
            hide_all_keys(operands.out, operands.lse, sinks, *query_lengths)
            return
        # Alone, the decode kernel knows the capacity of a cache.
        needs_bound = route.has_forward or signature.call == PACKED
        most_keys = sizes.max_seqlen_k if needs_bound else 0
        if self.prepared is not None:
            values = values_of_decode(operands, tables, tensors, scale, 0, most_keys, descales)
            values["dropout"] = None if dropout is None else dropout.arguments
            prepared = self.prepared(route.name, route.most_queries)
            if route.name == SHARED:
                memory = self.share_tiles(values, sizes)
            elif route.has_forward:
                memory = self.make_tiles(values, sizes, route, prepared)
            else:
                memory = prepared.memory
            prepared.run(values, memory)
            return
        most, pages = route.most_queries, tables.page_table
        if most:
            plan = self.decode_plan(most, route.has_forward)
            most_keys = most_keys or plan.sizes.capacity
            execute_decode(plan, operands, most_keys, scale, tensors, tables, 0, descales)
        if route.has_forward or route.name == SHARED:
            execute_packed(signature, operands, scale, tensors, dropout, most, pages, descales)

    def make_tiles(
        self, values: dict[str, Any], sizes: PackedSizes, route: Route, prepared: Prepared
    ) -> Memory:
        """Add what launches take for tiles with rows of one sequence; return the memory."""
        signature = self.signature
        batch, heads, total_q, total_k, _, most_keys = sizes
        capacity = capacity_of_table(total_q, batch, self.tile_m)
        num_tiles, num_sms = capacity * heads, signature.gpu.num_sms
        num_ctas = min(num_sms, num_tiles)
        # Of the lengths' dtype: to name another one takes torch 0.2 us.
        table = values["cu_seqlens_q"].new_empty(words_of_table(capacity))
        values |= {
            "table": table,
            "total_q": total_q,
            # Of a cache, each sequence has room for so many keys.
            "total_k": total_k if signature.cache is None else most_keys,
            "capacity": capacity,
            "shift": shift_of_work(most_keys, self.tile_n),
            "short_queries": route.most_queries,
            "qhead_per_kvhead": heads // signature.heads_kv,
            "num_clusters": num_ctas,
            "num_recompute": num_ctas,
        }
        counters, parts = [], list(prepared.memory.parts)
        if route.splits_on_gpu:
            num_slots = most_slots(num_tiles, num_sms)
            of_parts = Memory.of_parts(num_slots, self.tile_m, signature.spec.head_dim_v)
            counters, parts = [*of_parts.counters], [*parts, *of_parts.parts]
            segments = table.new_empty(segment_rows(num_tiles) * num_sms * FIELDS)
            values |= {"segments": segments, "heads": heads}
            values |= {"num_slots": num_slots, "num_clusters": num_sms}
        if "marks" in prepared.names:
            counters.append(("marks", words_of_marks(num_tiles)))
        return Memory(tuple(counters), tuple(parts))

    def share_tiles(self, values: dict[str, Any], sizes: PackedSizes) -> Memory:
        """Add what launches take for tiles that sequences share; return the memory."""
        batch, heads, total_q, total_k, *_ = sizes
        tile_m, num_sms = self.signature.shared_tiling.tile_m, self.signature.gpu.num_sms
        num_tiles = -(-total_q // tile_m)
        # Of the lengths' dtype: to name another one takes torch 0.2 us.
        new_empty = values["cu_seqlens_q"].new_empty
        rows = new_empty(num_tiles * tile_m, ROW_RECORD)
        values |= {
            "rows": rows,
            "tiles": new_empty(words_of_table(num_tiles)),
            "table": new_empty(words_of_table(batch)),
            "total_q": total_q,
            "total_k": total_k,
            "num_tiles": num_tiles,
            # Softcaps have no tensors, so the mask's comes first.
            "shared_modifiers": (rows, *(values["modifiers"] or ())),
            "num_clusters": min(num_sms, num_tiles * heads),
            "num_recompute": min(num_sms, batch * heads),
        }
        return Memory((("marks", words_of_marks(batch * heads)),))


@functools.lru_cache(maxsize=REMEMBERED)
def packed_call(signature: Signature, on_gpu: bool) -> PackedCall:
    """What calls with packed queries lead to, whatever the number of their sequences is."""
    return PackedCall.of(signature, on_gpu)


def prepare_on_cache(call: AttentionCall, options: Options) -> PreparedDecode | PackedCall:
    """Choose how calls on a cache run, and load their kernels.

    Args:
        call: of `fa3.calls.decode.plan_decode`.
    """
    on_gpu = call.q.device.type == "cuda"
    if not call.is_packed or options.num_splits or options.batch_invariant or call.has_fp8_q:
        return PreparedDecode.of(plan_decode(call, options), on_gpu)
    # Neither the number of sequences nor their most queries counts: both change in every step.
    window = options.window.tighten(MOST_RAGGED_ROWS, call.capacity)
    gpu = reserve_sms(gpu_of(call.q.device) if on_gpu else H200, options.sm_margin)
    group = call.heads_q // call.heads_kv
    sizes = Sizes(call.batch, call.seqlen_q, call.heads_kv, group, call.capacity)
    fits = 2 * sizes.num_tiles * sizes.most_blocks(window) <= LARGEST
    # A single query stands at the last key.
    spec = call.spec(options, window, window.right == 0 or call.seqlen_q == 1)
    signature = Signature(
        CACHE, spec, window, call.heads_q, call.heads_kv, gpu, options.sm_margin,
        call.cache_layout, call.capacity, 1 if fits else call.batch,
        has_used_q=call.seqused_q is not None,
    )  # fmt: skip
    most_rows = PackedSizes(
        call.batch, call.heads_q, MOST_RAGGED_ROWS, 0, call.seqlen_q, call.capacity
    )
    name, most_queries, _ = choose_route(signature, most_rows)
    if name == DECODE and call.has_fp8_cache:
        # How many CTAs serve an FP8 cache depends on the number of sequences.
        return PreparedDecode.of(plan_decode(call, options), on_gpu)
    made = packed_call(signature, on_gpu)
    if name == DECODE:
        # Without a route to look up in each call.
        loaded = made.prepared and made.prepared(DECODE, most_queries)
        return PreparedDecode(made.decode_plan(most_queries, False), loaded)
    if made.prepared is not None:
        # Now, since no length may cause a compilation.
        for name in (BOTH, *[BOTH_SPLIT] * signature.can_split):
            made.prepared(name, signature.short_limit)
        made.prepared(DECODE, signature.most_queries_of_few)
    return made
