"""dQ of a tile of queries, from its sums: scaled, in 16 bits, in rows.

The sums lie as the warpgroup for dQ held them (`fa3.primitives.query_tiles`): a lane's quad is two
neighbouring columns of two rows, 8 apart. Four lanes exchange so that each has 8 columns of a row,
which it writes at once.

Of two quads, what of row i (and of row i + 8) lanes 4 i to 4 i + 3 have, in pairs of columns:
    as loaded                               0, 4 (0, 4) | 1, 5 (1, 5) | 2, 6 (2, 6) | 3, 7 (3, 7)
    after the exchange of neighbours        0, 1, 4, 5  |(0, 1, 4, 5) | 2, 3, 6, 7  |(2, 3, 6, 7)
    after the one with the second next      0, 1, 2, 3  |(0, 1, 2, 3) | 4, 5, 6, 7  |(4, 5, 6, 7)
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint32

from fa3.primitives.fragments import convert_words, words_of
from fa3.primitives.query_tiles import PAIR, QueryGradients, QueryPieces
from fa3.primitives.vectors import QUAD, VECTOR, vector_of
from fa3.primitives.wgmma import ROWS, ROWS_OF_WARP, WARP, WARPS

LOADED_AT_ONCE = 2
"""Of the four times 16 rows of a piece, how many a warp loads at once."""


@dataclass(frozen=True)
class QueryEnd:
    """Writes dQ of tiles of queries, each a `fa3.schedules.query_work.QueryTile`; one warp's.

    Fields:
        pieces: of a tile.
        tile_m: its rows.
        sums: of all tiles.
        dq: (batch, rows, heads, head_dim); packed sequences in a batch of one.
        scale: factor of the sums.
        values: (4, quads, parts, 2), what a lane has loaded; twice, so that the next rows are on
            their way while these are written.
    """

    pieces: QueryPieces
    tile_m: int
    sums: cute.Tensor
    dq: cute.Tensor
    scale: Float32
    values: cute.Tensor

    @classmethod
    def of(cls, pieces: QueryPieces, tile_m: int, sums, dq, scale) -> "QueryEnd":
        halves = WARPS // LOADED_AT_ONCE
        values = cute.make_rmem_tensor((QUAD, pieces.quads, LOADED_AT_ONCE, halves), Float32)
        return cls(pieces, tile_m, sums, dq, scale, values)

    @cute.jit
    def load(self, own, piece, half: cutlass.Constexpr):
        """Load half of a piece, all of it in flight at once."""
        sums, lane = QueryGradients(self.sums, own.tiles), cute.arch.lane_idx()
        for i in cutlass.range_constexpr(LOADED_AT_ONCE):
            thread = (half * LOADED_AT_ONCE + i) * WARP + lane
            source = sums.quads_of(self.pieces, thread, piece, own.tile)
            for j in cutlass.range_constexpr(self.pieces.quads):
                cute.autovec_copy(source[None, j], self.values[None, j, i, half])

    @cute.jit
    def write(self, own, piece, has_sums, half: cutlass.Constexpr):
        """Write the half of a piece that was loaded, as far as it has rows; zeros without sums."""
        for i in cutlass.range_constexpr(LOADED_AT_ONCE):
            part, values = half * LOADED_AT_ONCE + i, self.values[None, None, i, half]
            self.write_part(own, piece, part, values, has_sums)

    @cute.jit
    def write_part(self, own, piece, part: cutlass.Constexpr, values: cute.Tensor, has_sums):
        """Write 16 rows of a piece."""
        lane = cute.arch.lane_idx()
        is_lower, is_right = lane % 2 == 1, lane // 2 % 2 == 1
        down, right = (piece, 0) if self.pieces.rows > 1 else (0, piece)
        row = down * ROWS + part * ROWS_OF_WARP + lane // QUAD + (8 if is_lower else 0)
        query = own.tile.m_block * self.tile_m + row
        words = self.words(values)
        for i in cutlass.range_constexpr(cute.size(words)):
            words[i] = words[i] if has_sums else Uint32(0)
        for i in cutlass.range_constexpr(0, self.pieces.quads, PAIR):
            pairs = [four_columns(words, j, is_lower) for j in (i, i + 1)]
            vector = eight_columns(*pairs, is_right)
            column = right * (self.pieces.width // VECTOR) + i + (1 if is_right else 0)
            if query >= 0 and query < own.owned and column * VECTOR < cute.size(self.dq, mode=[3]):
                target = vector_of(
                    self.dq[own.batch, own.begin + query, own.tile.head, None], column
                )
                place = cute.recast_ptr(target.iterator.align(16), dtype=Uint32)
                cute.autovec_copy(vector, cute.make_tensor(place, cute.make_layout(QUAD)))

    def words(self, values: cute.Tensor) -> cute.Tensor:
        """What a lane has loaded of 16 rows, scaled and in 16 bits: of each quad a word of each of
        its rows."""
        scaled = cute.make_rmem_tensor((QUAD, self.pieces.quads), Float32)
        scaled.store(values.load() * self.scale)
        rounded = cute.make_rmem_tensor_like(scaled, self.dq.element_type)
        convert_words(scaled, rounded)
        return words_of(rounded)


@cute.jit
def four_columns(words: cute.Tensor, quad: cutlass.Constexpr, is_lower) -> tuple[Uint32, Uint32]:
    """Four columns of a row: those of this lane and of the one beside it.

    Of two lanes the second one gets the lower row.
    """
    upper, lower = words[2 * quad], words[2 * quad + 1]
    kept, given = (lower if is_lower else upper), (upper if is_lower else lower)
    got = cute.arch.shuffle_sync_bfly(given, offset=1)
    return (got if is_lower else kept), (kept if is_lower else got)


@cute.jit
def eight_columns(left: tuple, right: tuple, is_right) -> cute.Tensor:
    """Eight columns of a row, in words, given four of each of two quads.

    Of two lanes, two apart, the second one gets the right quad.
    """
    vector = cute.make_rmem_tensor(QUAD, Uint32)
    for i in cutlass.range_constexpr(PAIR):
        of_left, of_right = left[i], right[i]
        kept, given = (of_right if is_right else of_left), (of_left if is_right else of_right)
        got = cute.arch.shuffle_sync_bfly(given, offset=2)
        vector[i] = got if is_right else kept
        vector[i + PAIR] = kept if is_right else got
    return vector
