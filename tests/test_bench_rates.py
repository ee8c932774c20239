"""Rates of instructions beside each other: the kernel compiles, and runs on a GPU."""

import pytest
from cutlass import Float8E4M3FN

from benchmarks.bench_rates import PAIRS, Rates, clocks_of, compiled


@pytest.mark.compiles
def test_kernel_compiles():
    compiled(Rates(Float8E4M3FN, ("WGMMA RS", "softmax")))


@pytest.mark.gpu
def test_clocks():
    assert ("WGMMA", "FFMA") in PAIRS
    wgmma, ffma = clocks_of(Rates(Float8E4M3FN, ("WGMMA", "FFMA")))
    # At best 64 clocks for 64 x 128 x 32 products, and one of each instruction in a clock.
    assert wgmma >= 64 and ffma >= 128
