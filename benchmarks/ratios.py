"""What repeated timings say: medians with quartiles, paired ratios, ties, geometric means."""

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

TIE = 0.015
"""Ratios closer to 1 than this are no difference."""


class Summary(NamedTuple):
    """A median and its quartiles."""

    median: float
    q1: float
    q3: float


def summarise(values: Sequence[float]) -> Summary:
    """Give the median and the quartiles of at least one value."""
    if len(values) == 1:
        return Summary(values[0], values[0], values[0])
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return Summary(median, q1, q3)


def paired_speedup(times: Sequence[float], base: Sequence[float]) -> Summary:
    """How many times faster than `base`: the ratio is taken inside each round.

    Raises:
        ValueError: if the two were not measured in the same number of rounds.
    """
    return summarise([b / t for t, b in zip(times, base, strict=True)])


def is_tie(ratio: float) -> bool:
    """Whether a ratio is too close to 1 to be called a difference."""
    return abs(ratio - 1) < TIE


def geometric_mean(values: Iterable[float]) -> float:
    """The geometric mean of positive numbers; NaN of none."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan
