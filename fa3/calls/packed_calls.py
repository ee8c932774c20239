"""Launches for packed sequences: the kernel that makes the table of tiles, then the forward kernel,
and once more for rows whose fixed reference failed, or, where sequences share tiles, for rows that
are not finite. Few tiles may be split. Sequences with few queries may be the decode kernel's.

All that depends on lengths is in tensors that each call allocates, so calls in several threads, on
several streams and in captured graphs share nothing that is written. Marks of rows are among the
counters that every call has for itself (`fa3.running.counters`).
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from fa3.calls.decode import PreparedDecode
from fa3.calls.launcher import PartMemory, Tiles, lse_address, place_on, run_tiles, with_device
from fa3.calls.operands import hide_all_keys_of_packed
from fa3.kernels.joined_table import MultiSequenceTableArguments
from fa3.kernels.segment_table import SegmentTableArguments, segment_rows
from fa3.kernels.tile_table import TileTableArguments
from fa3.planning.launch import Launch, slots
from fa3.planning.ragged import RaggedPlan, capacity_of_table, shift_of_work, words_of_table
from fa3.planning.routes import SHARED, ZEROS, PackedSizes, Route, Signature
from fa3.primitives.dropout import DropoutArguments
from fa3.problem import AttentionSpec, Window
from fa3.reference.cache import NO_TABLES, execute_decode
from fa3.reference.dropout import Dropout
from fa3.reference.joined import execute_joined
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


class DecodeLaunch(NamedTuple):
    """How the decode kernel is launched for short sequences, overlapped with forward.

    Fields:
        most_queries: queries of a short sequence, at most.
        start: launches the decode kernel, given the tile table of the forward kernel; returns what
            merges its parts when both kernels have ended.
    """

    most_queries: int
    start: Callable[[torch.Tensor], Callable[[], None]]


@dataclass(frozen=True, slots=True)
class PreparedVarlen:
    """A plan for packed sequences with its kernels loaded.

    Fields:
        plan: what they were made by.
        tile_table: the kernel that makes the table of tiles.
        launches: the forward kernel, and recompute if rows can fail.
        split: loads the segment table, the forward kernel for its segments, and recompute, which
            most calls never have.
        tile_m, tile_n: of the forward kernel's config.
        num_ctas: CTAs of the forward kernel, one for each SM that it may use.
    """

    plan: RaggedPlan
    tile_table: Launch
    launches: tuple[Launch, ...]
    split: Callable[[], list[Launch]]
    tile_m: int
    tile_n: int
    num_ctas: int

    def launch(
        self,
        operands: RaggedOperands,
        total_k: int,
        max_seqlen_k: int,
        modifiers: tuple[torch.Tensor, ...] | None,
        scale: float,
        short: DecodeLaunch | None = None,
        page_table: torch.Tensor | None = None,
        dropout: DropoutArguments | None = None,
        splits: bool = False,
    ) -> None:
        """Run the kernels on the current stream of the tensors' GPU.

        Args:
            operands: k and v may be a cache.
            total_k: rows of k; of a cache, those that a sequence has room for.
            short: the sequences that are the decode kernel's.
            page_table: the pages of a cache that has some.
            dropout: where the plan's spec has it.
            splits: whether the GPU splits tiles.
        """
        q, k, v, out, lse, *integers = operands
        ends_q, (total_q, heads, _) = operands.cu_seqlens_q, q.shape
        place, launches = place_on(q.device), self.launches
        capacity = capacity_of_table(total_q, ends_q.shape[0] - 1, self.tile_m)
        num_tiles = capacity * heads
        num_ctas = num_recompute = min(self.num_ctas, num_tiles)
        # Of the lengths' dtype: to name another one takes torch 0.2 us.
        state = table = ends_q.new_empty(words_of_table(capacity))
        (kernel, template, _), parts = self.tile_table, None
        if splits:
            (kernel, template, _), *launches = self.split()
            num_ctas = self.num_ctas
            parts = PartMemory.of(
                most_slots(num_tiles, num_ctas), self.tile_m, self.plan.spec.head_dim_v
            )
            state = ends_q.new_empty(segment_rows(num_tiles) * num_ctas * FIELDS)
        arguments = template.copy()
        arguments[LENGTHS_AND_TABLE] = *integers, table
        arguments[TABLE_SIZES] = total_q, total_k, capacity
        arguments[SHIFT] = shift_of_work(max_seqlen_k, self.tile_n)
        arguments[SHORT_QUERIES] = 0 if short is None else short.most_queries
        arguments[QHEAD_PER_KVHEAD] = heads // k.shape[-2]
        if splits:
            arguments[SEGMENTS], arguments[HEADS] = state, heads
        num_marks = words_of_marks(num_tiles) if len(launches) > 1 else 0
        # In half the time that the class itself takes.
        tiles = tuple.__new__(
            Tiles, (num_ctas, num_recompute, num_marks, 0, parts, table, page_table)
        )
        tensors = q, k, v, out, lse_address(lse), modifiers, scale
        start = None if short is None else short.start
        run_tiles(launches, tiles, tensors, state, place, dropout, (kernel, arguments), start)


@dataclass(frozen=True, slots=True)
class PreparedMultiSequence:
    """A plan for packed sequences that share tiles with its kernels loaded.

    Fields:
        tile_m: rows of a shared tile.
        num_ctas: as in `PreparedVarlen`.
    """

    joined_table: Launch
    launches: tuple[Launch, ...]
    tile_m: int
    num_ctas: int

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


class PackedKernels(NamedTuple):
    """The kernels for packed sequences.

    Fields:
        alone: for tiles with rows of one sequence.
        joined: for tiles that sequences share; None if they cannot.
        short: for sequences with so many queries or fewer, loaded when asked for; no number of
            queries changes what is compiled. None if the decode kernel cannot.
    """

    alone: PreparedVarlen
    joined: PreparedMultiSequence | None
    short: Callable[[int, bool], PreparedDecode] | None


def prepare(signature: Signature) -> PackedKernels:
    """Load the kernels of all routes that a call may take, whatever its lengths are; the decode
    kernel once a call has more keys than queries, which most never have."""
    plan, window = signature.plan, signature.window
    alone = prepare_alone(plan, window)
    shared = short_kernels = None
    if signature.shared_tiling is not None:
        table, *launches = (one.loaded(load_kernel) for one in plan.shared_launches(window))
        shared = PreparedMultiSequence(
            table, tuple(launches), signature.shared_tiling.tile_m, alone.num_ctas
        )
    if signature.may_decode:
        short_kernels = functools.cache(
            lambda most, overlaps: PreparedDecode.on_gpu(signature.decode_plan(most, overlaps))
        )
    return PackedKernels(alone, shared, short_kernels)


def prepare_alone(plan: RaggedPlan, window: Window) -> PreparedVarlen:
    """Load the kernels of a plan."""
    config = plan.config
    tile_table, *launches = (one.loaded(load_kernel) for one in plan.launches(window))
    split = functools.cache(
        lambda: [one.loaded(load_kernel) for one in plan.split_launches(window)]
    )
    return PreparedVarlen(
        plan, tile_table, tuple(launches), split, config.tile_m, config.tile_n, plan.gpu.num_sms
    )


@dataclass(frozen=True, slots=True)
class RaggedCall:
    """What a call leads to, whatever its lengths are.

    Fields:
        signature, with_gradients: what routes depend on, without and with gradients. The window has
            bounds that any lengths may have.
        gpu: the kernels; None on the CPU.
    """

    signature: Signature
    with_gradients: Signature
    gpu: PackedKernels | None

    @classmethod
    def of(cls, signature: Signature, gpu: PackedKernels | None = None) -> "RaggedCall":
        """What calls of a signature lead to, with or without gradients."""
        return cls(signature, replace(signature, has_gradients=True), gpu)

    @property
    def plan(self) -> RaggedPlan:
        return self.signature.plan

    @property
    def window(self) -> Window:
        return self.signature.window

    @property
    def spec(self) -> AttentionSpec:
        return self.signature.spec

    def attend(
        self,
        operands: RaggedOperands,
        sizes: PackedSizes,
        tensors: tuple[torch.Tensor, ...] | None,
        scale: float,
        dropout: Dropout | None,
        has_gradients: bool = False,
    ) -> None:
        """Write the rows of out and lse that belong to queries that are used.

        Args:
            sizes: of the call, which bound the lengths.
            tensors: of the spec's scores, mask and sinks.
            dropout: where the spec has it.
            has_gradients: whether gradients may be asked for. Then no sequence is the decode
                kernel's, so that its bits do not depend on other sequences.
        """
        if 0 in (sizes.batch, sizes.total_q, sizes.heads):
            return
        route = (self.with_gradients if has_gradients else self.signature).route(sizes)
        if route.name == ZEROS:
            query_lengths = operands.cu_seqlens_q, operands.seqused_q
            sinks = tensors[-1] if self.spec.sinks else None
            hide_all_keys_of_packed(operands.out, operands.lse, *query_lengths, sinks)
        elif route.name != SHARED:
            longest_k = sizes.max_seqlen_k
            self.attend_one_by_one(operands, route, longest_k, tensors, scale, dropout)
        elif self.gpu is None:
            execute_joined(self.plan, self.window, operands, scale, tensors)
        else:
            launch = self.gpu.joined.launch
            with_device(operands.q.device, launch, operands, sizes, tensors, scale)

    def attend_one_by_one(
        self,
        operands: RaggedOperands,
        route: Route,
        longest_k: int,
        tensors: tuple[torch.Tensor, ...] | None,
        scale: float,
        dropout: Dropout | None,
    ) -> None:
        """Attend in tiles with rows of one sequence, of the decode kernel and of the forward
        kernel."""
        most, has_long = route.most_queries, route.has_forward
        if self.gpu is None:
            if most:
                plan = self.signature.decode_plan(most, has_long)
                execute_decode(plan, operands, longest_k, scale, tensors)
            if has_long:
                execute_varlen(self.plan, self.window, operands, scale, tensors, dropout, most)
        elif has_long:
            short = None
            if most:
                given = operands, NO_TABLES, tensors, scale, 0, longest_k
                kernels = self.gpu.short(most, True)
                short = DecodeLaunch(most, lambda table: kernels.start(*given, table))
            drawn = None if dropout is None else dropout.arguments
            with_device(
                operands.q.device, self.gpu.alone.launch, operands, operands.k.shape[0], longest_k,
                tensors, scale, short, None, drawn, route.splits_on_gpu,
            )  # fmt: skip
        elif most:
            kernels = self.gpu.short(most, False)
            kernels.start(operands, NO_TABLES, tensors, scale, 0, longest_k)()
