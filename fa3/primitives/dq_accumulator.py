"""The dQ accumulator: sums in global memory, to which key tiles add.

The dQ warpgroup puts its accumulators into shared memory piece by piece (`stage_piece`). The reduce
warp adds each piece to global memory in bulk (`DqReduction`). Only the dQ conversion reads the
accumulator (`fa3.kernels.backward_queries`), so its layout is free: a warp's elements of a piece
are one run, with 4 elements of each lane after another.

What an accumulator starts with, and the order in which key tiles add, is one of three modes:

    zeroed        Preprocessing writes zeros. Key tiles add in any order.
    first store   There are no zeros. A flag for each query tile says whether it has a value. A
                  reduce warp claims the query tile by an atomic. The first one stores, the others
                  wait until the value has arrived, and add. A CTA that holds a claim waits for no
                  other CTA before it has stored, so there is no deadlock.
    ordered       Key tiles add in a fixed order, so that the bits never change. A semaphore for
                  each query tile counts the key tiles that have added. The first one in the order
                  stores. CTAs take key tiles in the same order, so each tile that is waited for is
                  done or runs. A warp other than the reduce warp raises semaphores: a release takes
                  long.

Without a fixed order, short sequences have no zeros: writing and reading them took up to a fifth of
the backward pass. In long sequences key tiles keep step, and the first one would hold up the others
(docs/experiments.md).
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.utils import hopper_helpers as sm90

from fa3.primitives import wgmma
from fa3.primitives.arithmetic import LARGEST
from fa3.primitives.gradient_mmas import KeyTileStep, columns_of_keys, operand_a, operand_b
from fa3.primitives.key_line import rank_at
from fa3.primitives.query_tiles import PackedQueryTiles, QueryTiles
from fa3.primitives.tma import ADD, STORE, send_run
from fa3.primitives.vectors import QUAD
from fa3.primitives.wgmma import ROWS, WARP, WARPGROUP, WARPS

UNIT_OF_PIECE = 16  # columns of a piece are a multiple of this, which is the smallest swizzled unit

NOTHING, CLAIMED, STORED = 0, 1, 3
"""Values of a query tile's flag for its first store. Bits are only added, also by later claims."""


class DqPieces(NamedTuple):
    """A tile of dQ in pieces of 64 rows, computed in turn."""

    # rows, columns: pieces below and next to one another; one of the two is 1.
    rows: int
    columns: int
    width: int  # columns of a piece

    @classmethod
    def of(cls, tile_m: int, columns: int, widest: int) -> "DqPieces":
        """Return the fewest pieces of a (tile_m, columns) tile.
        If `tile_m` is more than 64 rows, it must have no more than `widest` columns."""
        units = columns // UNIT_OF_PIECE
        fits = (n for n in range(1, units + 1) if units % n == 0)
        in_row = next(n for n in fits if columns // n <= widest)
        return cls(tile_m // ROWS, in_row, columns // in_row)

    @property
    def count(self) -> int:
        return self.rows * self.columns

    @property
    def quads(self) -> int:
        """Groups of 4 elements that a thread has of a piece."""
        return ROWS * self.width // WARPGROUP // QUAD

    @property
    def numbers(self) -> int:
        """Elements of a tile."""
        return self.count * ROWS * self.width

    @property
    def in_flight(self) -> int:
        """Pieces in shared memory at once, on their way to the accumulator.
        It divides the number of pieces; other numbers would do, and have not been measured."""
        return next(n for n in (3, 2, 1) if self.count % n == 0)

    @property
    def numbers_in_flight(self) -> int:
        """Elements of these pieces."""
        return self.in_flight * ROWS * self.width

    def place(self, piece) -> tuple:
        """The row and the column of a piece among the pieces."""
        return (piece, 0) if self.rows > 1 else (0, piece)


class DqAccumulator(NamedTuple):
    """dQ of all query tiles."""

    buffer: cute.Tensor  # (tiles * pieces.numbers,), float32
    tiles: QueryTiles | PackedQueryTiles  # numbers the query tiles of the present sequence
    # (tiles,), int32, for first stores, or the semaphores of a fixed order; else None.
    flags: cute.Tensor | None

    def at(self, tile_m: int, segment) -> "DqAccumulator":
        """The accumulator for a segment's sequence."""
        return self._replace(tiles=self.tiles.at(tile_m, segment))

    def one_of(self, pieces: DqPieces, count: int, which) -> "DqAccumulator":
        """One of several accumulators, which lie one after another in the buffer."""
        if count == 1:
            return self
        first_tile = self.buffer.shape[0] // (pieces.numbers * count) * which
        buffer = cute.make_tensor(
            self.buffer.iterator + first_tile * pieces.numbers, self.buffer.layout
        )
        flags = cute.make_tensor(self.flags.iterator + first_tile, self.flags.layout)
        return self._replace(buffer=buffer, flags=flags)

    def quads_of(self, pieces: DqPieces, thread, piece, tile) -> cute.Tensor:
        """(4, quads): a thread's elements of one piece of a tile."""
        begin = self.tiles.number(tile) * pieces.numbers
        run = (piece * WARPS + thread // WARP) * (pieces.quads * WARP * QUAD)
        return quads_of_lane(self.buffer.iterator + (begin + run), thread % WARP, pieces.quads)

    @cute.jit
    def reduce(self, pieces: cutlass.Constexpr, piece, tile, place, memory, is_first):
        """Add a piece to the accumulator, or store it if `is_first`.
        One thread calls this. It returns at once; the thread's bulk groups say when it is done."""
        numbers = pieces.numbers // pieces.count
        source = (memory.iterator + place * numbers).align(16)
        target = self.quads_of(pieces, 0, piece, tile).iterator
        run = cute.make_tensor(source, cute.make_layout(numbers))
        if is_first:
            send_run(STORE, run, target)
        else:
            send_run(ADD, run, target)

    @cute.jit
    def clear(self, pieces: cutlass.Constexpr, thread, threads: cutlass.Constexpr, tile):
        """Set a tile to zero; `threads` threads share the work."""
        quads = pieces.numbers // QUAD
        begin = self.quads_of(pieces, 0, 0, tile).iterator
        target = cute.make_tensor(begin, cute.make_layout((QUAD, quads)))
        zeros = cute.make_rmem_tensor(QUAD, Float32)
        zeros.fill(0.0)
        for i in cutlass.range_constexpr(-(-quads // threads)):
            quad = thread + i * threads
            if quad < quads:
                cute.autovec_copy(zeros, target[None, quad])

    def flag_of(self, tile) -> cute.Pointer:
        """The flag or the semaphore of a tile."""
        return self.flags.iterator + self.tiles.number(tile)

    @cute.jit
    def clear_flag(self, tile, thread):
        """Set a tile's flag to zero."""
        if thread == 0:
            cute.arch.store(self.flag_of(tile), Int32(0))

    @cute.jit
    def claim(self, tile, is_zeroed: Int32) -> Boolean:
        """Claim, as one thread, the first store, or wait for a value.
        Returns whether this thread must store; otherwise it may add."""
        is_first = Boolean(False)
        if is_zeroed == 0:
            flag = self.flag_of(tile)
            value = cute.arch.atomic_or(flag, Int32(CLAIMED), sem="acquire", scope="gpu")
            is_first = value == NOTHING
            while value == CLAIMED:
                value = cute.arch.load(flag, Int32, sem="acquire", scope="gpu")
            # Bulk additions follow a bulk store.
            cute.arch.fence_proxy("async.global")
        return is_first

    def publish_first_store(self, tile):
        """Say that a tile has the value that this thread has stored."""
        cute.arch.atomic_or(self.flag_of(tile), Int32(STORED), sem="release", scope="gpu")

    @cute.jit
    def has_value(self, tile, is_zeroed: Int32) -> Boolean:
        """Whether a tile has a value after all key tiles have added."""
        has_value = Boolean(True)
        if is_zeroed == 0:
            flag = cute.arch.load(self.flag_of(tile), Int32, sem="relaxed", scope="gpu")
            has_value = flag != NOTHING
        return has_value


@dataclass(frozen=True)
class DqSemaphore:
    """A key tile's and a query head's turn in a fixed order.
    With two accumulators, every other key tile in the order adds to the same one. The key tiles
    that visit a query block are neighbours in the order, with any mask."""

    dq: DqAccumulator  # of the tile's sequence; the one to which the key tile adds
    rank: Int32  # 1 + the number of key tiles that add to it before this one
    # begin, end: the query blocks of the key tile that adds to it before.
    begin: Int32
    end: Int32

    def at(self, place) -> "DqSemaphore":
        """The turn at a place of the walk: everywhere the same."""
        return self

    @cute.jit
    def wait(self, tile, rank: Int32):
        """Wait until all earlier key tiles have added to a query tile.
        `rank` is the value of the semaphore that was loaded before."""
        if self.has_predecessor(tile):
            semaphore = self.dq.flag_of(tile)
            while rank < self.rank - 1:
                rank = cute.arch.load(semaphore, Int32, sem="acquire", scope="gpu")

    @cute.jit
    def load(self, tile) -> Int32:
        """Load a semaphore without waiting; the later comparison waits for the value.
        No acquire, which would wait. An addition is issued only after a branch on the value, and
        made in L2, where the additions that it counts have been made."""
        rank = Int32(0)
        if self.has_predecessor(tile):
            rank = cute.arch.load(self.dq.flag_of(tile), Int32, sem="relaxed", scope="gpu")
        return rank

    @cute.jit
    def has_predecessor(self, tile) -> Boolean:
        """Whether another key tile adds to a query tile before this one."""
        return tile[0] >= self.begin and tile[0] < self.end

    def signal(self, tile):
        """Say, as one thread, that this key tile has added.
        By a maximum, so that a semaphore never falls."""
        cute.arch.atomic_max(self.dq.flag_of(tile), self.rank, sem="release", scope="gpu")


@dataclass(frozen=True)
class LineSemaphore:
    """A part's turns on a `KeyLine`, which differ from unit to unit.
    With two accumulators, every other part that comes to a unit adds to the same one."""

    dq: DqAccumulator
    pieces: DqPieces
    accumulators: int
    before: tuple  # of `KeyLine.before`

    def at(self, unit) -> DqSemaphore:
        """The turn at a unit."""
        rank = rank_at(self.before, unit)
        dq = self.dq.one_of(self.pieces, self.accumulators, rank % self.accumulators)
        rank = rank // self.accumulators
        # A first part waits for no other one.
        return DqSemaphore(dq, rank + 1, Int32(0), LARGEST * Int32(rank > 0))


@dataclass(frozen=True)
class DqReduction:
    """The reduce warp's additions of one key tile and one query head.
    The warp does nothing else. With additions, too, the dQ warpgroup waited twice as long at the
    fence that hands a piece over (docs/experiments.md)."""

    pieces: DqPieces  # of a tile
    dq: DqAccumulator  # the accumulator of the key tile's sequence
    memory: cute.Tensor  # pieces in shared memory, one for each stage of `pipelines.staged`
    pipelines: object  # `staged` delivers pieces; `added` tells of blocks that have been added
    semaphore: DqSemaphore | LineSemaphore | None  # of a fixed order; else None
    is_zeroed: Int32  # 1 if the accumulator starts with zeros, 0 if not

    @property
    def has_first_store(self) -> bool:
        return self.dq.flags is not None and self.semaphore is None

    @property
    def adds_two(self) -> bool:
        """Whether two pieces may be on their way at once.
        With short sequences at head size 128, and at 256, this gains 3 to 8%."""
        pieces = self.pieces
        return self.semaphore is None and pieces.in_flight == 2 and pieces.rows == 1

    def at(self, place) -> "DqReduction":
        """The addition at a place of the walk."""
        if not isinstance(self.semaphore, LineSemaphore):
            return self
        semaphore = self.semaphore.at(place)
        return replace(self, semaphore=semaphore, dq=semaphore.dq)

    @cute.jit
    def all(self, walk, head, batch, state, added_state, pending):
        """Add query blocks of a walk, each when it may be added.
        `pending` is 1 if the stage before the present one is not released yet."""
        rank = Int32(0)
        for i in cutlass.range(walk.blocks.begin, walk.blocks.end, unroll=1):
            here, after = self.at(i), self.at(i + 1)
            tile, following = (*walk.place(i, head), batch), (*walk.place(i + 1, head), batch)
            is_first = here.wait(tile, rank, state)
            for piece in cutlass.range(self.pieces.count, unroll=1):
                self.pipelines.staged.consumer_wait(state)
                # Before lane 0 releases a stage: a lane that polls late could see the barrier two
                # phases on with equal parity, and hang.
                cute.arch.sync_warp()
                if cute.arch.lane_idx() == 0:
                    here.dq.reduce(self.pieces, piece, tile, state.index, self.memory, is_first)
                    if cutlass.const_expr(self.adds_two):
                        pending = self.release(state, pending)
                    else:
                        cute.arch.cp_async_bulk_wait_group(0, read=True)
                        self.pipelines.staged.consumer_release(state)
                cute.arch.sync_warp()
                state.advance()
            if cutlass.const_expr(self.has_first_store):  # noqa: SIM102
                if is_first:
                    cute.arch.cp_async_bulk_wait_group(0)
                    self.dq.publish_first_store(tile)
            if cutlass.const_expr(self.semaphore is not None):
                # It arrives while the warp waits for dQ.
                rank = after.semaphore.load(following)
                self.pipelines.added.producer_acquire(added_state)
                cute.arch.sync_warp()
                if cute.arch.lane_idx() == 0:
                    cute.arch.cp_async_bulk_wait_group(0)
                    self.pipelines.added.producer_commit(added_state)
                added_state.advance()
        return state, added_state, pending

    @cute.jit
    def release(self, state, pending) -> Int32:
        """Release stages that their pieces have left; one thread calls this.
        Returns 1 if it leaves the present stage to the next call."""
        staged, other = self.pipelines.staged, state.clone()
        other.advance()
        if pending != 0:
            cute.arch.cp_async_bulk_wait_group(1, read=True)
            staged.consumer_release(other)
        if cutlass.const_expr(self.pieces.count > self.pieces.in_flight):
            pending = Int32(1)
        else:
            # A block has few pieces: the dQ warpgroup needs the stage if the next one is not there.
            is_there = staged.sync_object_full.test_wait(other.index, other.phase)
            pending = Int32(is_there)
            if not is_there:
                cute.arch.cp_async_bulk_wait_group(0, read=True)
                staged.consumer_release(state)
        return pending

    @cute.jit
    def wait(self, tile, rank, state) -> Boolean:
        """Wait until a block may be added; return whether it is stored.
        Not before dQ is there, as flags may not be zero yet. In a fixed order `rank` is the tile's
        semaphore as it was loaded before."""
        is_first = Boolean(False)
        if cutlass.const_expr(self.semaphore is not None):
            self.pipelines.staged.consumer_wait(state)
            self.semaphore.wait(tile, rank)
            is_first = self.is_zeroed == 0 and not self.semaphore.has_predecessor(tile)
        if cutlass.const_expr(self.has_first_store):
            self.pipelines.staged.consumer_wait(state)
            cute.arch.sync_warp()
            if cute.arch.lane_idx() == 0:
                is_first = self.dq.claim(tile, self.is_zeroed)
        return is_first


@cute.jit
def stage_piece(pieces: cutlass.Constexpr, acc: cute.Tensor, thread, place, memory: cute.Tensor):
    """Write a warp's accumulators of a piece to shared memory, for `DqAccumulator.reduce`."""
    first = cute.arch.make_warp_uniform(place * WARPS + thread // WARP) * (WARP * QUAD)
    run = (memory.iterator + first * pieces.quads).align(16)
    cute.autovec_copy(in_quads(acc), quads_of_lane(run, thread % WARP, pieces.quads))


def quads_of_lane(first: cute.Pointer, lane, quads: int) -> cute.Tensor:
    """(4, quads): a lane's elements of a warp's run from `first`."""
    layout = cute.make_layout((QUAD, quads), stride=(1, QUAD * WARP))
    return cute.make_tensor((first + lane * QUAD).align(16), layout)


def in_quads(acc: cute.Tensor) -> cute.Tensor:
    """View an accumulator as (4, quads); a quad is 2 x 2."""
    return cute.logical_divide(cute.flatten(acc), cute.make_layout(QUAD))


class DqOperands(NamedTuple):
    """Views of shared memory, and the WGMMA of a piece of dQ."""

    mma: cute.TiledMma
    kt: cute.Tensor  # (width, pieces in a row, keys, stages), columns of K
    dst: cute.Tensor  # (64, pieces in a column, keys, stages), columns of dS^T

    @classmethod
    def of(cls, dtype, config, smem) -> "DqOperands":
        """The operands for a `BackwardConfig`; `smem` has the buffers of `GradientLayouts`."""
        pieces = config.pieces(cute.size(smem.k, mode=[1]))
        major, shape = OperandMajorMode.MN, (ROWS, pieces.width)
        mma = sm90.make_trivial_tiled_mma(
            dtype, dtype, major, major, Float32, (1, 1, 1), shape, warpgroup.OperandSource.SMEM
        )
        kt = columns_of_keys(smem.k, pieces.width, config.k_stages)
        return cls(mma, kt, columns_of_keys(smem.ds, ROWS, config.stages))


@dataclass(frozen=True)
class DqStep(KeyTileStep):
    """The steps of the dQ warpgroup."""

    operands: DqOperands

    @property
    def pieces(self) -> DqPieces:
        return self.config.pieces(cute.size(self.smem.k, mode=[1]))

    @cute.jit
    def next(self, ds_state, staged_state):
        """dQ of one query block."""
        ds, staged, mma = self.pipelines.ds, self.pipelines.staged, self.operands.mma
        ds.consumer_wait(ds_state)
        for piece in cutlass.range(self.pieces.count, unroll=1):
            row, column = self.pieces.place(piece)
            dst = operand_a(mma, self.operands.dst[None, row, None, ds_state.index])
            kt = operand_b(mma, self.operands.kt[None, column, None, self.k_stage])
            acc = cute.make_rmem_tensor(mma.partition_shape_C((ROWS, self.pieces.width)), Float32)
            wgmma.issue(mma.op, acc, dst, kt, accumulate=False)
            warpgroup.wait_group(0)
            if piece == self.pieces.count - 1:
                # dS has been read: its buffer is free before the last piece is written.
                with cute.arch.elect_one():
                    ds.consumer_release(ds_state)
            staged.producer_acquire(staged_state)
            stage_piece(self.pieces, acc, self.thread, staged_state.index, self.smem.staged)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                staged.producer_commit(staged_state)
            staged_state.advance()
        ds_state.advance()
        return ds_state, staged_state
