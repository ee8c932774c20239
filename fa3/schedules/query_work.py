"""Query tiles: what is done before key tiles add to their dQ, and after that.

What one must know of a tile is the same for sequences of equal lengths and for packed ones;
only how it finds out is not: `DenseQueryWork` computes it, `PackedQueryWork` searches for the
sequence.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from fa3.primitives.query_tiles import PackedQueryTiles, QueryTiles, first_packed_tile
from fa3.primitives.ragged_lengths import RaggedLengths
from fa3.primitives.wgmma import WARP
from fa3.schedules.order import KernelOrder
from fa3.schedules.segment import Tile


class QueryTile(NamedTuple):
    """A tile of queries.

    Fields:
        tile: its m_block inside of the sequence, its head and its sequence.
        tiles: numbers it.
        batch, begin: where the sequence's first row lies in tensors (batch, rows, ...).
        seqlen_q: queries of the sequence.
        owned: its rows, also those that are not used.
    """

    tile: Tile
    tiles: QueryTiles | PackedQueryTiles
    batch: Int32
    begin: Int32
    seqlen_q: Int32
    owned: Int32


class DenseQueryWork(NamedTuple):
    """The tiles of sequences of equal lengths."""

    order: KernelOrder
    seqlen_q: Int32

    @classmethod
    def of(cls, rows: cute.Tensor, tile_m: int) -> "DenseQueryWork":
        """The tiles of a tensor (batch, seqlen_q, heads, ...)."""
        batch, seqlen_q, heads, _ = rows.shape
        return cls(KernelOrder.of(cute.ceil_div(seqlen_q, tile_m), heads, batch, 1), seqlen_q)

    @property
    def grid(self) -> tuple:
        return self.order.num_tiles, 1, 1

    def at(self, number, tile_m: int) -> QueryTile:
        """The tile with a number."""
        tile = self.order.tile(number)
        tiles = QueryTiles(self.order.num_m_blocks, self.order.num_heads)
        return QueryTile(tile, tiles, tile.batch, Int32(0), self.seqlen_q, self.seqlen_q)


class PackedQueryWork(NamedTuple):
    """The tiles of packed sequences, one for each of their numbers, head by head.

    A grid's first dimension alone takes more than 65,535 of anything, heads or tiles.

    Fields:
        tiles: numbers them; there are numbers without a row, beyond the `owned` ones.
    """

    lengths: RaggedLengths
    tiles: PackedQueryTiles
    heads: Int32

    @classmethod
    def of(
        cls, rows: cute.Tensor, cu: cute.Tensor, used: cute.Tensor | None, tile_m: int
    ) -> "PackedQueryWork":
        """The tiles of a tensor (total_q, heads, ...) with these lengths."""
        total_q, heads, _ = rows.shape
        lengths = RaggedLengths(cu, used, total_q)
        tiles = PackedQueryTiles.of(total_q, lengths.num_sequences, tile_m)
        return cls(lengths, tiles, heads)

    @property
    def grid(self) -> tuple:
        return self.tiles.of_head * self.heads, 1, 1

    def at(self, number, tile_m: int) -> QueryTile:
        """The tile with a number."""
        head = number // self.tiles.of_head
        of_head = number - head * self.tiles.of_head
        batch = find_sequence(self.lengths, of_head, tile_m)
        begin, seqlen_q = self.lengths.read(batch)
        owned = self.lengths.owned(batch)
        tiles = self.tiles.of_sequence(tile_m, begin, batch)
        tile = Tile(of_head - tiles.first, head, batch)
        return QueryTile(tile, tiles, Int32(0), begin, seqlen_q, owned)


@cute.jit
def find_sequence(lengths: RaggedLengths, number: Int32, tile_m: cutlass.Constexpr) -> Int32:
    """The last sequence whose tiles begin at a number or before it. All lanes of a warp call this.

    A 32-way search: each lane looks at a sequence, and the range between two of them is searched
    again. Lengths that are wrong lead to some sequence.
    """
    lane = cute.arch.lane_idx()
    first, end = Int32(0), lengths.num_sequences
    while end - first > 1:
        step = (end - first + WARP - 1) // WARP
        looked_at = cutlass.min(first + lane * step, end - 1)
        begins = first_packed_tile(tile_m, lengths.begin(looked_at), looked_at)
        is_before = first + lane * step < end and begins <= number
        count = cute.arch.popc(cute.arch.vote_ballot_sync(is_before))
        first += (cutlass.max(count, 1) - 1) * step
        end = cutlass.min(end, first + step)
    return first
