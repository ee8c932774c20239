"""Calls with packed queries, on packed keys or on a cache: their routes and their launches.

`fa3.planning.routes` decides which kernels serve a call. The forward kernel walks a table of tiles,
which a kernel before it makes from the lengths; few tiles may be split. A kernel more recomputes
rows whose fixed reference failed, or, where sequences share tiles, rows that are not finite.
Sequences with few queries may be the decode kernel's, which then overlaps the forward kernel.

All that depends on lengths is in tensors that each call allocates, so calls in several threads, on
several streams and in captured graphs share nothing that is written. Marks of rows are among the
counters that every call has for itself (`fa3.running.counters`).
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from fa3.calls.call import MOST_RAGGED_ROWS, AttentionCall
from fa3.calls.decode import PreparedDecode, prepare_decode
from fa3.calls.devices import gpu_of
from fa3.calls.launcher import PartMemory, Tiles, lse_address, place_on, run_tiles, with_device
from fa3.calls.operands import hide_all_keys_of_packed
from fa3.calls.options import Options
from fa3.kernels.joined_table import MultiSequenceTableArguments
from fa3.kernels.segment_table import SegmentTableArguments, segment_rows
from fa3.kernels.tile_table import (
    TileTableArguments,
    capacity_of_table,
    shift_of_work,
    words_of_table,
)
from fa3.planning.gpu import H200
from fa3.planning.launch import Launch, slots
from fa3.planning.routes import (
    CACHE,
    DECODE,
    PACKED,
    SHARED,
    ZEROS,
    PackedSizes,
    Route,
    Signature,
    choose_route,
)
from fa3.primitives.cache_blocks import CacheTables
from fa3.primitives.dropout import DropoutArguments
from fa3.reference.cache import NO_TABLES
from fa3.reference.dropout import Dropout
from fa3.reference.varlen import RaggedOperands, execute_varlen
from fa3.running.compiler import load_kernel
from fa3.schedules.marked import words_of_marks
from fa3.schedules.split import FIELDS
from fa3.schedules.stretches import most_slots
from fa3.scores.intervals import ROW_RECORD

LENGTHS_AND_TABLE = slice(*slots(TileTableArguments, "cu_seqlens_q", "total_q"))
TABLE_SIZES = slice(*slots(TileTableArguments, "total_q", "shift"))
SHIFT, SHORT_QUERIES, QHEAD_PER_KVHEAD = slots(
    TileTableArguments, "shift", "short_queries", "qhead_per_kvhead"
)
"""The first arguments of a `SegmentTable` are the same, in the same order."""

SEGMENTS, HEADS = slots(SegmentTableArguments, "segments", "heads")
SHARED_TILE_LENGTHS = slice(*slots(MultiSequenceTableArguments, "cu_seqlens_q", "rows"))
SHARED_TILE_TABLES = slice(*slots(MultiSequenceTableArguments, "rows", "total_q"))
SHARED_TILE_SIZES = slice(*slots(MultiSequenceTableArguments, "total_q", "window_left"))


@dataclass(frozen=True, slots=True)
class PreparedVarlen:
    """A plan for packed sequences with its kernels loaded."""

    signature: Signature  # what they were made by
    # Gives the table kernel, the forward kernel, and recompute if rows can fail. It loads the
    # kernels for split tiles, which most calls never have, when it is asked for them.
    launches: Callable[[bool], list[Launch]]
    # tile_m, tile_n: of the forward kernel's config.
    tile_m: int
    tile_n: int
    num_ctas: int  # CTAs of the forward kernel, one for each SM that it may use

    @classmethod
    def of(cls, signature: Signature) -> "PreparedVarlen":
        """Load the kernels of calls with this signature."""
        launches = functools.cache(
            lambda splits: [one.loaded(load_kernel) for one in signature.launches(splits)]
        )
        launches(False)
        config = signature.config
        return cls(signature, launches, config.tile_m, config.tile_n, signature.gpu.num_sms)

    def launch(
        self,
        operands: RaggedOperands,  # k and v may be a cache
        sizes: PackedSizes,
        modifiers: tuple[torch.Tensor, ...] | None,
        scale: float,
        # short_queries, start_decode: queries of a sequence that is the decode kernel's, at most,
        # and how `run_tiles` starts that kernel.
        short_queries: int = 0,
        start_decode: Callable[[torch.Tensor], Callable[[], None]] | None = None,
        page_table: torch.Tensor | None = None,  # the pages of a cache that has some
        dropout: DropoutArguments | None = None,  # where the plan's spec has it
        splits: bool = False,  # whether the GPU splits tiles
        descales: tuple[torch.Tensor, ...] | None = None,  # of FP8 tensors
    ) -> None:
        """Run the kernels on the current stream of the tensors' GPU."""
        q, k, v, out, lse, *integers = operands
        batch, heads, total_q, total_k, _, most_keys = sizes
        place = place_on(q.device)
        (kernel, template, _), *launches = self.launches(splits)
        capacity = capacity_of_table(total_q, batch, self.tile_m)
        num_tiles = capacity * heads
        num_ctas = num_recompute = min(self.num_ctas, num_tiles)
        # Of the lengths' dtype: to name another one takes torch 0.2 us.
        state = table = operands.cu_seqlens_q.new_empty(words_of_table(capacity))
        parts = None
        if splits:
            num_ctas = self.num_ctas
            num_slots = most_slots(num_tiles, num_ctas)
            parts = PartMemory.of(num_slots, self.tile_m, self.signature.spec.head_dim_v)
            state = table.new_empty(segment_rows(num_tiles) * num_ctas * FIELDS)
        arguments = template.copy()
        arguments[LENGTHS_AND_TABLE] = *integers, table
        # Of a cache, each sequence has room for so many keys.
        total_k = total_k if self.signature.cache is None else most_keys
        arguments[TABLE_SIZES] = total_q, total_k, capacity
        arguments[SHIFT] = shift_of_work(most_keys, self.tile_n)
        arguments[SHORT_QUERIES] = short_queries
        arguments[QHEAD_PER_KVHEAD] = heads // k.shape[-2]
        if splits:
            arguments[SEGMENTS], arguments[HEADS] = state, heads
        num_marks = words_of_marks(num_tiles) if len(launches) > 1 else 0
        # In half the time that the class itself takes.
        tiles = tuple.__new__(
            Tiles, (num_ctas, num_recompute, num_marks, 0, parts, table, page_table)
        )
        tensors = q, k, v, out, lse_address(lse), modifiers, scale
        table_launch = kernel, arguments
        run_tiles(
            launches, tiles, tensors, state, place, dropout, table_launch, start_decode,
            descales=descales,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class PreparedMultiSequence:
    """A plan for packed sequences that share tiles with its kernels loaded."""

    joined_table: Launch
    launches: tuple[Launch, ...]
    tile_m: int  # rows of a shared tile
    num_ctas: int  # as in `PreparedVarlen`

    @classmethod
    def of(cls, signature: Signature) -> "PreparedMultiSequence":
        """Load the kernels of calls with this signature."""
        launches = (one.loaded(load_kernel) for one in signature.shared_launches())
        table, *launches = launches
        return cls(table, tuple(launches), signature.shared_config.tile_m, signature.gpu.num_sms)

    def launch(
        self,
        operands: RaggedOperands,
        sizes: PackedSizes,
        modifiers: tuple[torch.Tensor, ...] | None,
        scale: float,
    ) -> None:
        """Run the kernels on the current stream of the tensors' GPU."""
        q, k, v, out, lse, *lengths = operands
        ends_q, place = operands.cu_seqlens_q, place_on(q.device)
        batch, heads, total_q, total_k, *_ = sizes
        num_tiles = -(-total_q // self.tile_m)
        # Of the lengths' dtype: to name another one takes torch 0.2 us.
        rows = ends_q.new_empty(num_tiles * self.tile_m, ROW_RECORD)
        shared_tiles = ends_q.new_empty(words_of_table(num_tiles))
        table = ends_q.new_empty(words_of_table(batch))
        arguments = self.joined_table.template.copy()
        arguments[SHARED_TILE_LENGTHS] = lengths
        arguments[SHARED_TILE_TABLES] = rows, shared_tiles, table
        arguments[SHARED_TILE_SIZES] = total_q, total_k, num_tiles
        table_launch = self.joined_table.kernel, arguments
        num_ctas, num_recompute = (
            min(self.num_ctas, num_tiles * heads),
            min(self.num_ctas, batch * heads),
        )
        num_marks = words_of_marks(batch * heads)
        tiles = Tiles(num_ctas, num_recompute, num_marks, 0, None, table)
        plain = q, k, v, out, lse_address(lse), modifiers, scale
        # Softcaps have no tensors, so the mask's comes first.
        tensors = *plain[:5], (rows, *(modifiers or ())), scale
        run_tiles(
            self.launches, tiles, tensors, shared_tiles, place, table_launch=table_launch,
            recompute_tensors=plain,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class PackedCall:
    """What a call with packed queries leads to, whatever its lengths are."""

    # signature, with_gradients: what routes depend on, without and with gradients. The window has
    # bounds that any lengths may have.
    signature: Signature
    with_gradients: Signature
    # Gives the decode kernel for sequences with so many queries or fewer, alone or overlapped with
    # the forward kernel.
    decode: Callable[[int, bool], PreparedDecode]
    # The kernels for tiles with rows of one sequence; None on the CPU.
    alone: PreparedVarlen | None = None
    # Those for tiles that sequences share; None if they cannot, and on the CPU.
    shared: PreparedMultiSequence | None = None

    @classmethod
    def of(
        cls,
        signature: Signature,
        on_gpu: bool = False,
        # See the field; of packed keys, one that loads its kernels once a call has more keys than
        # queries, which most never have.
        decode: Callable[[int, bool], PreparedDecode] | None = None,
    ) -> "PackedCall":
        """Load the kernels of all routes that a call may take, whatever its lengths are."""

        def of_packed(most: int, overlaps: bool) -> PreparedDecode:
            return PreparedDecode.of(signature.decode_plan(most, overlaps), on_gpu)

        both = signature, replace(signature, has_gradients=True)
        decode = functools.cache(decode or of_packed)
        if not on_gpu:
            return cls(*both, decode)
        alone = PreparedVarlen.of(signature)
        has_shared = signature.shared_tiling is not None
        shared = PreparedMultiSequence.of(signature) if has_shared else None
        return cls(*both, decode, alone, shared)

    def attend(
        self,
        operands: RaggedOperands,  # of a cache, `seqused_k` says all keys
        sizes: PackedSizes,  # of the call, which bound the lengths
        tensors: tuple[torch.Tensor, ...] | None,  # of the spec's scores, mask and sinks
        scale: float,
        dropout: Dropout | None = None,  # where the spec has it
        # Whether gradients may be asked for. Then no sequence is the decode kernel's, so that its
        # bits do not depend on other sequences.
        has_gradients: bool = False,
        tables: CacheTables = NO_TABLES,  # where sequences are in a cache
        descales: tuple[torch.Tensor, ...] | None = None,  # of packed keys in FP8
    ) -> None:
        """Write the rows of out and lse that belong to queries that are used."""
        if 0 in (sizes.batch, sizes.total_q, sizes.heads):
            return
        signature = self.with_gradients if has_gradients else self.signature
        route = signature.route(sizes)
        if route.name == ZEROS:
            query_lengths = operands.cu_seqlens_q, operands.seqused_q
            sinks = tensors[-1] if signature.spec.sinks else None
            hide_all_keys_of_packed(operands.out, operands.lse, *query_lengths, sinks)
        elif route.name == SHARED and self.shared is not None:
            with_device(operands.q.device, self.shared.launch, operands, sizes, tensors, scale)
        else:
            self.attend_one_by_one(
                operands, sizes, route, tensors, scale, dropout, tables, descales
            )

    def attend_one_by_one(
        self,
        operands: RaggedOperands,
        sizes: PackedSizes,
        route: Route,
        tensors: tuple[torch.Tensor, ...] | None,
        scale: float,
        dropout: Dropout | None,
        tables: CacheTables,
        descales: tuple[torch.Tensor, ...] | None,
    ) -> None:
        """Attend in tiles with rows of one sequence, of the decode kernel and of the forward
        kernel."""
        most, has_long, start = route.most_queries, route.has_forward, None
        if most:
            # Alone, the decode kernel knows the capacity of a cache.
            needs_bound = has_long or self.signature.call == PACKED
            most_keys = sizes.max_seqlen_k if needs_bound else 0
            start = functools.partial(
                self.decode(most, has_long).start, operands, tables, tensors, scale, 0, most_keys
            )
        on_gpu = self.alone is not None
        if start is not None and not (on_gpu and has_long):
            start()()
        if not on_gpu and (has_long or route.name == SHARED):
            pages = tables.page_table
            execute_varlen(self.signature, operands, scale, tensors, dropout, most, pages, descales)
        elif has_long:
            drawn = None if dropout is None else dropout.arguments
            with_device(
                operands.q.device, self.alone.launch, operands, sizes, tensors, scale, most, start,
                tables.page_table, drawn, route.splits_on_gpu, descales,
            )  # fmt: skip


def prepare_on_cache(call: AttentionCall, options: Options) -> PreparedDecode | PackedCall:
    """Choose how calls on a cache run, and load their kernels.

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
        return prepare_decode(call, options)

    def decode_up_to(most_queries: int, overlaps_forward: bool) -> PreparedDecode:
        few = call._replace(max_seqlen_q=min(call.seqlen_q, most_queries))
        return prepare_decode(few, options, overlaps_forward)

    made = PackedCall.of(signature, on_gpu, decode_up_to)
    # Now, since no length may cause a compilation.
    made.decode(signature.short_limit, True)
    made.decode(signature.most_queries_of_few, False)
    return made
