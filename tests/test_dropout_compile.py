"""Kernels with dropout, compiled for sm_90a and read back as machine code; no GPU is needed.

Nothing may spill, although numbers are drawn where most registers are taken; and a score may cost
only so many instructions.
"""

from dataclasses import replace

import pytest
from machine_code import report_of
from test_backward_compile import check_wgmma as check_backward_wgmma
from test_backward_compile import loops
from test_compile import (
    MODIFIERS,
    check_overlap,
    check_wgmma,
    comparisons,
    config_of,
    forward_report,
    modified,
    spec_of,
)

from benchmarks.cubin import CubinReport
from fa3.kernels.backward import Backward
from fa3.kernels.forward import Forward
from fa3.planning.backward import BackwardPlan, backward_pass, choose_backward_config
from fa3.primitives.dropout import SQUARE
from fa3.primitives.wgmma import ROWS, WARPGROUP
from fa3.problem import AttentionSpec, Problem, Window
from fa3.schedules import Dynamic, TileList

MOST_ADDED, MOST_ADDED_BACKWARD = 4.6, 8.1
"""Instructions that dropout may add for each score, in the loop without a mask and in all steps."""

PRODUCTS = 10
"""Wide products for each counter, one of two squares: rounds of Philox have two, but the first one
and half of the next two are the same for all counters of a tile."""


def dropped(spec: AttentionSpec) -> AttentionSpec:
    return replace(spec, has_dropout=True)


@pytest.mark.compiles
def test_forward():
    spec = dropped(spec_of(256, "causal"))
    config = config_of(spec)
    report = forward_report(Forward(spec, config, TileList))
    check_wgmma(report, spec, config)
    check_overlap(report, spec, config)
    # Numbers are drawn while P V is in flight, and compared there.
    unmasked = min(report.under_wgmma(), key=comparisons)
    counters = -(-config.tile_n // (2 * SQUARE))
    assert unmasked["IMAD.WIDE.U32"] <= PRODUCTS * counters
    compared = sum(n for name, n in unmasked.items() if name.startswith("HSET2.BF16"))
    assert compared == ROWS * config.tile_n // WARPGROUP // 2


@pytest.mark.compiles
def test_what_a_score_costs_in_the_forward_kernel():
    """In the kernel that calls with heads of 128 load."""
    plain, counts = spec_of(128, "full"), []
    for spec in (plain, dropped(plain)):
        config = replace(config_of(spec), cluster_m=1, cluster_h=2)
        report = forward_report(Forward(spec, config, TileList))
        counts.append(sum(min(report.under_wgmma(), key=comparisons).values()))
    assert (counts[1] - counts[0]) / (ROWS * config.tile_n // WARPGROUP) < MOST_ADDED


PACKED = backward_pass(dropped(spec_of(64, "causal")), False, False, True, True, True).main
WIDE = dropped(spec_of(256, "causal"))
ORDERED = Backward(WIDE, choose_backward_config(WIDE), Dynamic, is_ordered=True)


@pytest.mark.compiles
@pytest.mark.parametrize("kernel", [PACKED, ORDERED], ids=["d64-packed", "d256-ordered"])
def test_backward(kernel):
    check_backward(kernel)


def check_backward(kernel: Backward) -> CubinReport:
    """Return a kernel's machine code, in which nothing is wrong."""
    spec, config = kernel.spec, kernel.config
    report = report_of(kernel)
    check_backward_wgmma(report, spec, config, kernel.may_alternate)
    pairs = loops(spec, kernel.may_alternate) * ROWS * config.queries // WARPGROUP // 2
    assert report.count("MOVM.16.MT88") == report.count("HSET2.BF16") == pairs
    return report


@pytest.mark.compiles
def test_what_a_score_costs_in_the_backward_kernel():
    """Each with its own tiling, as calls load them."""
    plain = spec_of(128, "full")
    spec = dropped(plain)
    report = report_of(Backward(plain, choose_backward_config(plain), Dynamic))
    config = choose_backward_config(spec)
    reports = report, check_backward(Backward(spec, config, Dynamic))
    plain, with_dropout = (len(report.instructions) for report in reports)
    scores = loops(spec) * ROWS * config.queries // WARPGROUP
    assert (with_dropout - plain) / scores < MOST_ADDED_BACKWARD


@pytest.mark.compiles
def test_the_kernel_before_the_backward_kernel():
    problem = Problem(dropped(spec_of(256, "full")), 1, 100, 100, 1, 1, Window())
    entry = BackwardPlan.of(problem).kernels
    begin = entry.preprocess
    assert begin.main.spec.has_dropout
    # The logarithm of what is kept, for the one row whose statistics a thread writes.
    assert report_of(begin).count("MUFU.LG2") == 1


def test_tilings_leave_registers_for_random_numbers():
    """At head size 96 those with three consumers do not."""
    for head_dim in range(8, 257, 8):
        for mask in ("full", "causal"):
            config_of(dropped(spec_of(head_dim, mask))).validate(dropped(spec_of(head_dim, mask)))
    spec = spec_of(96, "causal")
    assert config_of(spec).consumers == 3 and config_of(dropped(spec)).consumers == 2
    softcap = modified(64, "causal", *MODIFIERS["softcap"])
    assert config_of(softcap).consumers == 3 and config_of(dropped(softcap)).consumers == 2
    with pytest.raises(ValueError, match="for S, P and O and random numbers, there are 136"):
        config_of(spec).validate(dropped(spec))
