"""The order of tiles as kernels compute it, and their division, on the CPU: jit code runs there."""

import random

import cutlass
import cutlass.cute as cute
import pytest
import torch
from cutlass import Int32
from cutlass.cute.runtime import from_dlpack

from fa3.primitives.divisor import Divisor
from fa3.schedules.order import KernelOrder, TileOrder

pytestmark = pytest.mark.compiles

LARGEST = 2**31 - 1


@cute.jit
def write_tiles(tiles: cute.Tensor, num_m_blocks: Int32, heads: Int32, batch: Int32, most: Int32):
    order = KernelOrder.of(num_m_blocks, heads, batch, most)
    for i in cutlass.range(tiles.shape[0]):
        tile = order.tile(Int32(i))
        for field in cutlass.range_constexpr(3):
            tiles[i, field] = tile[field]


@cute.jit
def divide(numbers: cute.Tensor, divisors: cute.Tensor, quotients: cute.Tensor):
    for i in cutlass.range(numbers.shape[0]):
        quotients[i] = Divisor.of(divisors[i]).quotient(numbers[i])


@pytest.mark.parametrize(
    "sizes", [(5, 3, 4, 5), (4, 2, 2, 3), (1, 1, 1, 1), (7, 33, 1, 33), (3, 5, 2, 1), (9, 4, 8, 31)]
)
def test_tiles_are_those_of_the_plan(sizes):
    order = TileOrder(*sizes)
    found = torch.full((order.num_tiles, 3), -1, dtype=torch.int32)
    write_tiles(from_dlpack(found), *map(Int32, sizes))
    assert found.tolist() == [list(order.tile(i)) for i in range(order.num_tiles)]


def test_quotients_are_exact():
    draw = random.Random(0)
    sizes = [1, 2, 3, 7, 2**16 - 1, 2**16, 2**25, 2**30, 2**30 + 1, LARGEST - 1, LARGEST]
    sizes += [int(2 ** draw.uniform(0, 31)) for _ in range(2000)]
    numbers, divisors = [], []
    for divisor in sizes:
        multiple = draw.randint(0, LARGEST // divisor) * divisor
        for number in (0, divisor - 1, divisor, multiple - 1, multiple, LARGEST):
            numbers.append(max(0, number))
            divisors.append(divisor)
    found = torch.full((len(numbers),), -1, dtype=torch.int32)
    given = (torch.tensor(values, dtype=torch.int32) for values in (numbers, divisors))
    divide(*map(from_dlpack, (*given, found)))
    assert found.tolist() == [n // d for n, d in zip(numbers, divisors, strict=True)]
