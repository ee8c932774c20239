"""Dropout in torch: what of a call's probabilities is kept.

The numbers are as in `fa3.primitives.dropout`, here drawn for each score by itself. Tensors may
be on any device, so that a kernel's mask can be looked at.
"""

import struct
from typing import NamedTuple

import torch

from fa3.primitives.dropout import (
    COUNTERS,
    FACTOR,
    SQUARE,
    WORD_BITS,
    DropoutArguments,
    key_steps,
    philox,
    threshold_of,
)
from fa3.primitives.fragments import Position

WORD_MASK = (1 << WORD_BITS) - 1


class Dropout(NamedTuple):
    """The dropout of a call."""

    rng_state: torch.Tensor  # (1,) int64, the seed
    p: float  # the probability that was asked for, above 0

    @property
    def arguments(self) -> DropoutArguments:
        """What kernels take."""
        return DropoutArguments(self.rng_state, *threshold_of(self.p))

    @property
    def kept(self) -> float:
        """The share that is kept, by which the rest is divided."""
        return self.arguments.kept

    def keeps(self, at: Position) -> torch.Tensor:
        """Return which scores are kept, bool.
        The fields of `at` broadcast against one another; tensors are int64, on one device."""
        word = word_of(self.rng_state[0], at)
        upper = (word >> at.key % 2 * (WORD_BITS // 2)) & 0xFFFF
        (threshold,) = struct.unpack("<f", struct.pack("<HH", 0, self.arguments.threshold))
        # A bfloat16 is the upper half of a float32.
        return ~((upper << 16).to(torch.int32).view(torch.float32) < threshold)


def word_of(seed: torch.Tensor, at: Position) -> torch.Tensor:
    """The random words that the scores' numbers are in."""
    halves = seed & WORD_MASK, seed >> WORD_BITS & WORD_MASK
    keys = [tuple(halves[i] + steps[i] & WORD_MASK for i in range(2)) for steps in key_steps()]
    lane = at.query % 8 * 4 + at.key % 8 // 2
    key_squares, query_squares = at.key // SQUARE, at.query // SQUARE
    words = philox(
        (at.head, key_squares * COUNTERS + lane // 2, at.batch, query_squares), keys, wide_product
    )
    is_left, is_upper = at.key % SQUARE < 8, at.query % SQUARE < 8
    word = torch.where(
        (lane + key_squares + query_squares) % 2 == 0,
        torch.where(is_left, words[0], words[1]),
        torch.where(is_left, words[2], words[3]),
    )
    return torch.where(is_upper, word, word * FACTOR & WORD_MASK)


def wide_product(word, factor: int) -> tuple:
    """The upper and the lower word of a product of 32-bit numbers."""
    product = word * factor
    return product >> WORD_BITS & WORD_MASK, product & WORD_MASK
