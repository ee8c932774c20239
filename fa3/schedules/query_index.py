"""Query tiles by number, in head groups: for preprocessing and dQ conversion.

The preprocess kernel does the query tiles of the first head groups. A few CTAs of the backward
kernel do the others, while the rest already work on key tiles, and join them afterwards. Key tiles
come head group by head group, and wait until all queries of their head group are preprocessed. dQ
of a head group is converted as soon as all its key tiles have added to it. So a few head groups are
exposed, not all heads.

Where queries see few keys, a head group is done sooner than a few CTAs preprocess the next one.
Then the preprocess kernel does all of them (`fa3.planning.backward`).

The CTAs that run first preprocess queries. Each takes a share, and another one when it is done,
until none is left, before it comes to key tiles. So no CTA waits for a CTA that does not run,
however few SMs other kernels leave.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from fa3.primitives.arithmetic import Divisor, PlainDivisor, smaller
from fa3.primitives.query_tiles import PackedQueryTiles, QueryTiles, number_of_packed_tiles
from fa3.primitives.ragged_lengths import RaggedLengths
from fa3.primitives.wgmma import WARP
from fa3.schedules.order import KernelOrder, Tile

PREPROCESS_SHARES = 24
"""Shares of the preprocessing inside the backward kernel, and CTAs that take one at first."""


class QueryHeadGroups(NamedTuple):
    """Query tiles of all heads, numbered head by head, in head groups.
    Plain arithmetic: it runs on Python ints, and on Int32 values inside of kernels."""

    num_tiles: int  # tiles of all head groups
    tiles_per_group: Divisor | PlainDivisor  # the last head group may have fewer

    def tiles_before(self, group):
        """Tiles before a head group; all if there is no such group."""
        return smaller(group * self.tiles_per_group.value, self.num_tiles)

    def group_of(self, number):
        """The head group of a tile."""
        return self.tiles_per_group.quotient(number)

    def tiles_in(self, group):
        """How many tiles a head group has."""
        per_group = self.tiles_per_group.value
        return smaller(self.num_tiles - group * per_group, per_group)


class QueryTile(NamedTuple):
    """A query tile."""

    tile: Tile  # its m_block inside the sequence, its head and its sequence
    tiles: QueryTiles | PackedQueryTiles  # numbers it
    # batch, begin: the place of the sequence's first row in tensors (batch, rows, ...).
    batch: Int32
    begin: Int32
    seqlen_q: Int32  # queries of the sequence
    owned: Int32  # rows of the sequence, used or not


class DenseQueryIndex(NamedTuple):
    """The query tiles of sequences of equal lengths, by number."""

    order: KernelOrder
    seqlen_q: Int32

    @classmethod
    def of(cls, rows: cute.Tensor, tile_m: int) -> "DenseQueryIndex":
        """The tiles of a tensor (batch, seqlen_q, heads, ...)."""
        batch, seqlen_q, heads, _ = rows.shape
        return cls(KernelOrder.of(cute.ceil_div(seqlen_q, tile_m), heads, batch, 1), seqlen_q)

    def at(self, number, tile_m: int) -> QueryTile:
        """The tile with a number."""
        tile = self.order.tile(number)
        tiles = QueryTiles(self.order.num_m_blocks, self.order.num_heads)
        return QueryTile(tile, tiles, tile.batch, Int32(0), self.seqlen_q, self.seqlen_q)


class PackedQueryIndex(NamedTuple):
    """The query tiles of packed sequences, by number, head by head."""

    lengths: RaggedLengths
    tiles: PackedQueryTiles  # numbers them; some numbers have no row, past the `owned` ones
    heads: Int32  # of all sequences

    @classmethod
    def of(
        cls, rows: cute.Tensor, cu: cute.Tensor, used: cute.Tensor | None, tile_m: int
    ) -> "PackedQueryIndex":
        """The tiles of a tensor (1, total_q, heads, ...) with these lengths."""
        _, total_q, heads, _ = rows.shape
        lengths = RaggedLengths(cu, used, total_q)
        return cls(lengths, PackedQueryTiles.of(total_q, lengths.num_sequences, tile_m), heads)

    def at(self, number, tile_m: int) -> QueryTile:
        """The tile with a number."""
        head = number // self.tiles.tiles_per_head
        in_head = number - head * self.tiles.tiles_per_head
        batch = find_sequence(self.lengths, in_head, tile_m)
        begin, seqlen_q = self.lengths.read(batch)
        owned = self.lengths.owned(batch)
        tiles = self.tiles.of_sequence(tile_m, begin, batch)
        tile = Tile(in_head - tiles.first, head, batch)
        return QueryTile(tile, tiles, Int32(0), begin, seqlen_q, owned)


@cute.jit
def find_sequence(lengths: RaggedLengths, number: Int32, tile_m: cutlass.Constexpr) -> Int32:
    """The last sequence whose first tile is at or before a number.
    All lanes of a warp call this.
    A 32-way search: each lane looks at a sequence, and the range between two of them is searched
    again. Wrong lengths lead to some sequence."""
    lane = cute.arch.lane_idx()
    first, end = Int32(0), lengths.num_sequences
    while end - first > 1:
        step = (end - first + WARP - 1) // WARP
        looked_at = cutlass.min(first + lane * step, end - 1)
        begins = number_of_packed_tiles(lengths.begin(looked_at), looked_at, tile_m)
        is_before = first + lane * step < end and begins <= number
        count = cute.arch.popc(cute.arch.vote_ballot_sync(is_before))
        first += (cutlass.max(count, 1) - 1) * step
        end = cutlass.min(end, first + step)
    return first
