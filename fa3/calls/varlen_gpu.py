"""Launches for packed sequences: the kernel that makes the table of tiles, then the forward kernel,
and once more for rows whose fixed reference failed, or, where sequences share tiles, for rows that
are not finite. Sequences with few queries may be the decode kernel's instead.

All that depends on lengths is in tensors that each call allocates, so calls in several threads, on
several streams and in captured graphs share nothing that is written. Where the host knows the
lengths, calls read the same table, which was made before (`fa3.calls.known_lengths`): then the
kernel that makes one is not launched. Marks of rows, and what counts the tiles taken of a table
that calls share, are among the counters that every call has for itself (`fa3.running.counters`).
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fa3.calls.decode import PreparedDecode
from fa3.calls.known_lengths import KnownLengths, KnownTiles
from fa3.kernels.forward_launch import NO_PARTS
from fa3.planning.host_table import TableKind
from fa3.planning.joined import JoinedPlan, PackedSizes
from fa3.planning.ragged import (
    RaggedPlan,
    capacity_of_table,
    records_of_table,
    shift_of_work,
    words_of_table,
)
from fa3.planning.short_queries import ShortPlan
from fa3.primitives.dropout import DropoutArguments
from fa3.problem import Window
from fa3.reference.varlen import RaggedOperands
from fa3.running.compiler import load_kernel
from fa3.running.counters import counters_of
from fa3.running.graphs import Capture, capture_of, current_device, current_stream
from fa3.schedules.marked import words_of_marks
from fa3.schedules.ragged import RaggedTiles
from fa3.scores.intervals import ROW_RECORD


class Short(NamedTuple):
    """The sequences of a call that are the decode kernel's.

    Fields:
        most_queries: sequences with so many queries or fewer.
        start: launches it for them, given the tile table of the forward kernel, which runs at
            the same time; returns what merges its parts when both have ended.
    """

    most_queries: int
    start: Callable[[torch.Tensor], Callable[[], None]]


@dataclass(frozen=True, slots=True)
class PreparedVarlen:
    """A plan for packed sequences with its kernels loaded.

    Fields:
        plan: what they were made by.
        tile_table, forward, again: the kernels' entries; `again` is None if no row can fail.
        split: loads the forward kernel for tiles that are cut, which most calls never have.
        tile_m, tile_n: of the forward kernel's config.
        num_ctas: CTAs of the forward kernel, one for each SM that it may use.
        rows_of_section: see `fa3.schedules.ragged.RaggedOrder`.
    """

    plan: RaggedPlan
    tile_table: Callable
    forward: Callable
    again: Callable | None
    split: Callable[[], Callable]
    window: Window
    tile_m: int
    tile_n: int
    num_ctas: int
    rows_of_section: int

    def launch(
        self,
        operands: RaggedOperands,
        total_k: int,
        max_seqlen_k: int,
        modifiers: tuple[torch.Tensor, ...] | None,
        scale: float,
        short: Short | None = None,
        page_table: torch.Tensor | None = None,
        dropout: DropoutArguments | None = None,
        known: KnownLengths | None = None,
        may_cut: bool = False,
    ) -> None:
        """Run the kernels on the current stream of the tensors' GPU.

        Args:
            operands: k and v may be a cache.
            total_k: rows of k; of a cache, those that a sequence has room for.
            short: the sequences that are the decode kernel's.
            page_table: the pages of a cache that has some.
            dropout: where the plan's spec has it.
            known: the lengths, if the host knows them.
            may_cut: whether tiles may be cut then.
        """
        q, k, v, out, lse, *integers = operands
        device = q.device
        index = device.index
        if index != current_device():
            with torch.cuda.device(device):
                self.launch(
                    operands, total_k, max_seqlen_k, modifiers, scale, short, page_table, dropout,
                    known, may_cut,
                )  # fmt: skip
            return
        total_q, heads, _ = q.shape
        most_short, heads_kv = 0 if short is None else short.most_queries, k.shape[-2]
        marks = table = None
        # Those of `ForwardArguments` before `num_clusters`, in their order.
        given = (
            q, k, v, out, 0 if lse is None else lse.data_ptr(), modifiers, scale, *self.window,
            self.rows_of_section,
        )  # fmt: skip
        if self.again is not None or known is not None:
            stream = current_stream(index)
            capture = capture_of(stream)
            counters = counters_of(device, stream, capture)
        if known is not None:
            tiles = known.on(self, most_short, heads, heads_kv, may_cut, device, capture)
            if tiles is not None:
                if tiles.segments is not None:
                    self.launch_split(given, tiles, stream, capture)
                    return
                table = tiles.table.on(stream, capture)
        is_shared = table is not None
        if is_shared and known.longest_q <= most_short:
            # No sequence is the forward kernel's.
            short.start(table)()
            return
        if is_shared:
            capacity = records_of_table(table.shape[0])
            taken = counters.take(RaggedTiles.num_counters)
        else:
            capacity = capacity_of_table(total_q, operands.cu_seqlens_q.shape[0] - 1, self.tile_m)
            # Of the lengths' dtype: to name another one takes torch 0.2 us.
            taken = table = operands.cu_seqlens_q.new_empty(words_of_table(capacity))
        if self.again is not None:
            # Now: to zero new ones takes a kernel, and none may come between the two below.
            marks = counters.take(words_of_marks(capacity * heads))
        if not is_shared:
            # In the order of `TileTableArguments`.
            self.tile_table(
                *integers, table, total_q, total_k, capacity,
                shift_of_work(max_seqlen_k, self.tile_n), *self.window, most_short,
                heads // heads_kv, self.num_ctas,
            )  # fmt: skip
        # It must come before the forward kernel, which takes the SMs that it leaves.
        merge = None if short is None else short.start(table)
        num_ctas = min(self.num_ctas, capacity * heads)
        of_keys = page_table, 0 if merge is None else 1
        self.forward(
            *given, num_ctas, taken, *NO_PARTS, marks, None, table, *of_keys, dropout, None
        )
        if merge is not None:
            merge()
        # Counters do not go back if anything was raised: then they need not be zero.
        if self.again is not None:
            of_call = None, None, table, page_table, 0, dropout, None
            self.again(*given, num_ctas, marks, *NO_PARTS, *of_call)
            counters.give_back(marks)
        if is_shared:
            # Last, so that the next call takes the same for the same purpose.
            counters.give_back(taken)

    def launch_split(
        self, given: tuple, tiles: KnownTiles, stream: int, capture: Capture | None
    ) -> None:
        """Run the kernels for tiles that are cut: keys are packed, and no decode kernel runs.

        Args:
            given: the fields of `ForwardArguments` before `num_clusters`.
        """
        q = given[0]
        counters = counters_of(q.device, stream, capture)
        table, memory = tiles.table.on(stream, capture), tiles.memory
        num_tiles, marks = records_of_table(table.shape[0]) * q.shape[1], None
        of_parts = counters.take(memory.num_counters)
        if self.again is not None:
            marks = counters.take(words_of_marks(num_tiles))
        parts = memory.arguments(q, of_parts)
        of_call = None, table, None, 0, None, None
        segments = tiles.segments.on(stream, capture)
        self.split()(*given, tiles.num_ctas, segments, *parts, marks, *of_call)
        # Not if anything was raised, as above.
        if self.again is not None:
            num_ctas = min(self.num_ctas, num_tiles)
            self.again(*given, num_ctas, marks, *NO_PARTS, None, *of_call)
            counters.give_back(marks)
        counters.give_back(of_parts)

    def table_kind(
        self, short_queries: int, heads_q: int, heads_kv: int, may_cut: bool
    ) -> TableKind:
        """What tables of lengths that the host knows are made for."""
        return self.plan.table_kind(self.window, short_queries, heads_q, heads_kv, may_cut)


@dataclass(frozen=True, slots=True)
class PreparedJoined:
    """A plan for packed sequences that share tiles with its kernels loaded.

    Fields:
        joined_table, forward, again: the kernels' entries.
        num_ctas, rows_of_section: as in `PreparedVarlen`.
    """

    joined_table: Callable
    forward: Callable
    again: Callable
    plan: JoinedPlan
    window: Window
    num_ctas: int
    rows_of_section: int

    def launch(
        self,
        operands: RaggedOperands,
        sizes: PackedSizes,
        modifiers: tuple[torch.Tensor, ...] | None,
        scale: float,
    ) -> None:
        """Run the kernels on the current stream of the tensors' GPU."""
        q, k, v, out, lse, ends_q, ends_k, used_q, used_k = operands
        if q.device.index != current_device():
            with torch.cuda.device(q.device):
                self.launch(operands, sizes, modifiers, scale)
            return
        batch, heads, total_q, total_k, _, _ = sizes
        num_tiles = self.plan.num_tiles(total_q)
        # Of the lengths' dtype: to name another one takes torch 0.2 us.
        rows = ends_q.new_empty(num_tiles * self.plan.config.tile_m, ROW_RECORD)
        tiles = ends_q.new_empty(words_of_table(num_tiles))
        table = ends_q.new_empty(words_of_table(batch))
        # In the order of `JoinedTableArguments`.
        self.joined_table(
            ends_q, ends_k, used_q, used_k, rows, tiles, table, total_q, total_k, num_tiles,
            *self.window,
        )  # fmt: skip
        stream = current_stream(q.device.index)
        counters = counters_of(q.device, stream, capture_of(stream))
        marks = counters.take(words_of_marks(batch * heads))
        # In the order of `ForwardArguments`.
        tensors = q, k, v, out, 0 if lse is None else lse.data_ptr()
        options = scale, *self.window, self.rows_of_section
        # Softcaps have no tensors, so the mask's comes first.
        with_mask = rows, *(modifiers or ())
        self.forward(
            *tensors, with_mask, *options, min(self.num_ctas, num_tiles * heads), tiles,
            *NO_PARTS, marks, None, table, None, 0, None, None,
        )  # fmt: skip
        self.again(
            *tensors, modifiers, *options, min(self.num_ctas, batch * heads), marks,
            *NO_PARTS, None, None, table, None, 0, None, None,
        )  # fmt: skip
        # Not if anything was raised: then they need not be zero.
        counters.give_back(marks)


class PackedKernels(NamedTuple):
    """The kernels for packed sequences.

    Fields:
        alone: for tiles with rows of one sequence.
        joined: for tiles that sequences share; None if they cannot.
        short: for sequences with so many queries or fewer, loaded when asked for; no number of
            queries changes what is compiled. None if the decode kernel cannot.
    """

    alone: PreparedVarlen
    joined: PreparedJoined | None
    short: Callable[[int, bool], PreparedDecode] | None


def prepare(
    plan: RaggedPlan, joined: JoinedPlan | None, short: ShortPlan | None, window: Window
) -> PackedKernels:
    """Load the kernels of all plans that a call may take, whatever its lengths are; the decode
    kernel once a call has more keys than queries, which most never have."""
    alone = prepare_alone(plan, window)
    of_joined = of_short = None
    if joined is not None:
        kernels = map(load_kernel, (joined.joined_table(), *joined.kernels()))
        of_joined = PreparedJoined(*kernels, joined, window, alone.num_ctas, plan.rows_of_section)
    if short is not None:
        of_short = functools.cache(
            lambda most, beside: PreparedDecode.on_gpu(short.plan(most, beside, window))
        )
    return PackedKernels(alone, of_joined, of_short)


def prepare_alone(plan: RaggedPlan, window: Window) -> PreparedVarlen:
    """Load the kernels of a plan."""
    config = plan.config
    forward, *again = map(load_kernel, plan.kernels())
    split = functools.cache(lambda: load_kernel(plan.split()))
    return PreparedVarlen(
        plan, load_kernel(plan.tile_table()), forward, again[0] if again else None, split, window,
        config.tile_m, config.tile_n, plan.gpu.num_sms, plan.rows_of_section,
    )  # fmt: skip
