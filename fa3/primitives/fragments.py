"""WGMMA register fragments: views, which move no data, conversions, and coordinates.

Coordinates are the query, key, head and batch of a thread's scores, for masks, score functions and
epilogues.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32, Uint32
from cutlass.cute.nvgpu import warp

from fa3.primitives.wgmma import ROWS


def as_rows_and_columns(acc: cute.Tensor) -> cute.Tensor:
    """View an accumulator ((2, 2, N/8), 1, 1) as (2 rows, N/4 columns) of this thread."""
    (two, rows, chunks), m, n = acc.layout.shape
    (s_two, s_rows, s_chunks), s_m, s_n = acc.layout.stride
    return cute.make_tensor(
        acc.iterator,
        cute.make_layout(
            ((rows, m), (two, chunks, n)), stride=((s_rows, s_m), (s_two, s_chunks, s_n))
        ),
    )


def as_operand_a(acc: cute.Tensor) -> cute.Tensor:
    """View 16-bit accumulator `((2, 2, N/8), m, n)` as A operand `((2, 2, 2), m, (N/16, n))`."""
    layout = cute.logical_divide(acc.layout, ((None, None, 2), None, None))
    (two, rows, (pair, chunks)), m, n = layout.shape
    (s_two, s_rows, (s_pair, s_chunks)), s_m, s_n = layout.stride
    return cute.make_tensor(
        acc.iterator,
        cute.make_layout(
            ((two, rows, pair), m, (chunks, n)),
            stride=((s_two, s_rows, s_pair), s_m, (s_chunks, s_n)),
        ),
    )


def words_as_operand_a(words: cute.Tensor) -> cute.Tensor:
    """View words of e4m3, four values each, as the A operand `((4, 2, 2), 1, N/32)`."""
    values = cute.recast_ptr(words.iterator, dtype=Float8E4M3FN)
    return cute.make_tensor(values, cute.make_layout(((4, 2, 2), 1, cute.size(words) // 4)))


BYTES_OF_WORD = 4  # values of e4m3 in a register

PACKED_TYPES = {"BFloat16": "bf16x2", "Float16": "f16x2"}
"""A 16-bit type -> what PTX calls two of it in a word."""

WIDENING = {
    "BFloat16": "{.reg .b32 l, h; shl.b32 l, {$r0}, 16; and.b32 h, {$r0}, 0xffff0000; "
    "mov.b32 {$w0}, l; mov.b32 {$w1}, h;}",
    "Float16": "{.reg .b16 l, h; mov.b32 {l, h}, {$r0}; cvt.f32.f16 {$w0}, l; "
    "cvt.f32.f16 {$w1}, h;}",
}
"""A 16-bit type -> PTX that makes two fp32 numbers of a word."""


@cute.jit
def convert(source: cute.Tensor, target: cute.Tensor):
    """Convert registers to the target's 16-bit type; both have the same layout.
    Converts eight at a time. Converting a whole fragment whose size is not a power of two takes
    three times the instructions: elements are converted one by one and packed afterwards."""
    source, target = (
        cute.logical_divide(cute.flatten(t), cute.make_layout(8)) for t in (source, target)
    )
    for i in cutlass.range_constexpr(cute.size(source, mode=[1])):
        target[None, i].store(source[None, i].load().to(target.element_type))


def convert_words(source: cute.Tensor, target: cute.Tensor) -> None:
    """Convert fp32 registers to a 16-bit type, two at once; layouts agree."""
    packed = PACKED_TYPES[target.element_type.__name__]
    source, words = cute.flatten(source), words_of(target)
    for i in range(cute.size(words)):
        both = source[2 * i], source[2 * i + 1]
        words[i] = word_from(f"cvt.rn.{packed}.f32 {{$w0}}, {{$r1}}, {{$r0}};", *both)


def widen_words(source: cute.Tensor, target: cute.Tensor) -> None:
    """Convert registers of 16 bits to fp32, two at once; layouts agree."""
    code = WIDENING[source.element_type.__name__]
    words, target = words_of(source), cute.flatten(target)
    for i in range(cute.size(words)):
        target[2 * i], target[2 * i + 1] = cute.arch.inline_ptx(
            code, write_only_types=[Float32, Float32], read_only_args=[words[i]]
        )


def word_from(code: str, *operands) -> Uint32:
    """The word that PTX makes of some registers."""
    return cute.arch.inline_ptx(code, write_only_types=[Uint32], read_only_args=[*operands])


def words_of(fragment: cute.Tensor) -> cute.Tensor:
    """View registers of a 16-bit type as words of two."""
    return cute.recast_tensor(cute.flatten(fragment), Uint32)


def float_bits(value: Float32) -> Int32:
    """The bits of a float32."""
    register = cute.make_rmem_tensor(1, Float32)
    register[0] = value
    return cute.recast_tensor(register, Int32)[0]


def float_of(bits: Int32) -> Float32:
    """The float32 of these bits."""
    register = cute.make_rmem_tensor(1, Int32)
    register[0] = bits
    return cute.recast_tensor(register, Float32)[0]


@cute.jit
def write_fragment(fragment: cute.Tensor, tiled_mma: cute.TiledMma, thread, target: cute.Tensor):
    """Write a thread's part of a 16-bit accumulator to shared memory."""
    atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), fragment.element_type)
    copy = cute.make_tiled_copy_C(atom, tiled_mma).get_slice(thread)
    cute.copy(atom, copy.retile(fragment), copy.partition_D(target))


@cute.jit
def read_fragment(source: cute.Tensor, tiled_mma: cute.TiledMma, thread, fragment: cute.Tensor):
    """Read a thread's 16-bit A operand from shared memory, (rows, columns)."""
    atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), source.element_type)
    copy = cute.make_tiled_copy_A(atom, tiled_mma).get_slice(thread)
    cute.copy(atom, copy.partition_S(source), copy.retile(fragment))


class Position(NamedTuple):
    """The position of a score, as a user's function sees it.

    `query` and `key` are always inside the sequence: in the padding of a tile they name the last
    one, and 0 if the sequence has none. Query i is aligned with key i + seqlen_k - seqlen_q.
    """

    batch: Int32
    head: Int32
    query: Int32
    key: Int32
    seqlen_q: Int32
    seqlen_k: Int32


@dataclass(frozen=True)
class BlockCoords:
    """Coordinates of a thread's scores in a block of keys or queries.

    Score (r, c) is in row `row + row_steps[r]`, and in column `column + column_steps[c]` of a block
    of `width` columns. Steps are compile-time integers.
    """

    row: Int32
    column: Int32
    row_steps: tuple[int, ...]
    column_steps: tuple[int, ...]
    width: int
    batch: Int32
    head: Int32

    @classmethod
    def of(cls, tiled_mma: cute.TiledMma, thread, shape: tuple[int, int], begins, width, tile):
        """The coordinates of `thread` in an accumulator of this shape.
        It begins at row `begins[0]`, and at column `begins[1]` of the block; `tile` names head and
        batch."""
        identity = cute.make_identity_tensor(shape)
        first = as_rows_and_columns(tiled_mma.get_slice(0).partition_C(identity))
        row, column = tiled_mma.get_slice(thread).partition_C(identity)[0]
        return cls(
            begins[0] + row,
            begins[1] + column,
            tuple(first[r, 0][0] for r in range(cute.size(first, mode=[0]))),
            tuple(first[0, c][1] for c in range(cute.size(first, mode=[1]))),
            width,
            tile.batch,
            tile.head,
        )

    def row_at(self, r: int):
        """Row r among all rows."""
        return self.row + self.row_steps[r]

    def first_column(self, block):
        """This thread's column 0 in a block; column c is `column_steps[c]` further."""
        return block * self.width + self.column


class ScoreCoords(BlockCoords):
    """Coordinates of a thread's part of S: rows are queries, columns keys."""

    def query(self, r: int):
        """The query of row r."""
        return self.row_at(r)

    def first_row(self):
        """The first row of this thread's WGMMA, uniform over the warp."""
        return cute.arch.make_warp_uniform(self.row // ROWS * ROWS)

    def queries(self):
        """The first and the last query among this WGMMA's rows."""
        first = self.first_row()
        return first, first + ROWS - 1

    def head_of(self, r: int):
        """The query head of row r."""
        return self.head

    def position(self, r: int, c: int, n_block, sequence) -> Position:
        """The position of score (r, c) of a block."""
        last_key = cutlass.max(sequence.seqlen_k, 1) - 1
        return Position(
            self.batch,
            self.head_of(r),
            cutlass.min(self.query(r), sequence.seqlen_q - 1),
            cutlass.min(self.first_column(n_block) + self.column_steps[c], last_key),
            sequence.seqlen_q,
            sequence.seqlen_k,
        )


class TransposedCoords(BlockCoords):
    """Coordinates of a thread's part of S^T: rows are keys, columns queries."""

    def shifted(self, columns: int) -> "TransposedCoords":
        """The coordinates of scores that many columns further in the block."""
        return replace(self, column=self.column + columns)

    def position(self, r: int, c: int, m_block, sequence) -> Position:
        """The position of score (r, c) of a block."""
        last_query, last_key = (
            cutlass.max(seqlen, 1) - 1 for seqlen in (sequence.seqlen_q, sequence.seqlen_k)
        )
        return Position(
            self.batch,
            self.head,
            cutlass.min(self.first_column(m_block) + self.column_steps[c], last_query),
            cutlass.min(self.row_at(r), last_key),
            sequence.seqlen_q,
            sequence.seqlen_k,
        )
