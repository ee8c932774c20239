"""Vectors of 16 bytes, which a thread moves at once; warp sums."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

VECTOR = 8  # 16-bit elements of a vector
QUAD = 4  # 32-bit elements of a vector
FLOAT_BYTES = 4  # bytes of a float32


def vector_of(row: cute.Tensor, index, size: int = VECTOR) -> cute.Tensor:
    """Elements [index * size, index * size + size) of a row."""
    return cute.local_tile(row, (size,), (index,))


def row_and_vector(index, columns: int, size: int = VECTOR):
    """(row, vector) of vector number `index`; rows have `columns` elements."""
    return index // (columns // size), index % (columns // size)


def as_elements(vector: cute.Tensor, dtype) -> cute.Tensor:
    """The first bytes of a vector as 8 elements of `dtype`."""
    if vector.element_type is dtype:
        return vector
    return vector_of(cute.recast_tensor(vector, dtype), 0)


@cute.jit
def store_words(words: tuple, target: cute.Pointer):
    """Write int32 words, multiples of 16 bytes, to global memory at once."""
    values = cute.make_rmem_tensor(len(words), Int32)
    for i in cutlass.range_constexpr(len(words)):
        values[i] = words[i]
    cute.autovec_copy(values, cute.make_tensor(target.align(16), cute.make_layout(len(words))))


@cute.jit
def sum_in_warp(number):
    """The sum of the numbers of all lanes up to this one."""
    lane, upto = cute.arch.lane_idx(), number
    for shift in cutlass.range_constexpr(5):
        below = cute.arch.shuffle_sync_up(upto, 1 << shift, mask_and_clamp=0)
        upto = upto + below if lane >= 1 << shift else upto
    return upto
