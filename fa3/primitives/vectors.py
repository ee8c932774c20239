"""Rows of 16-bit elements in vectors of 16 bytes, the most that a thread moves at once."""

import cutlass.cute as cute

VECTOR = 8
"""Elements of a vector."""


def vector_of(row: cute.Tensor, index, size: int = VECTOR) -> cute.Tensor:
    """Elements [index * size, index * size + size) of a row."""
    return cute.local_tile(row, (size,), (index,))


def row_and_vector(index, columns: int):
    """(row, vector in it) of the vector with this number, rows of `columns` elements."""
    return index // (columns // VECTOR), index % (columns // VECTOR)
