"""The instrumented kernel on a Hopper GPU: who worked on what when, and the same output."""

from collections import Counter, defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from problems import make_operands, make_problem

import fa3
from fa3.planning.gpu import H200
from fa3.planning.planner import plan_forward
from fa3.planning.tilings import choose_config
from fa3.problem import Window
from fa3.tools.recording import run_recorded, timeline_of

pytestmark = pytest.mark.gpu

CAUSAL = Window(right=0)
SHAPES = {
    "one sequence": (1, 2048, 2048, 2, 4, 128),
    "uneven": (2, 1500, 3100, 2, 2, 128),
    "three consumers": (1, 3000, 3000, 2, 4, 64),
}
PLANNED = (
    ("single", {}),
    ("static", {}),
    ("list", {}),
    ("dynamic", {}),
    ("split", {}),
    ("list", {"cluster_m": 2}),
    ("split", {"cluster_m": 2}),
    ("static", {"cluster_h": 2}),
)
CASES = (
    *(("uneven", *choice) for choice in PLANNED),
    ("one sequence", "static", {"cluster_h": 2}),
    ("three consumers", "split", {"cluster_m": 2}),
)
"""Shapes, schedules and clusters."""
SECOND = 10**9
"""In nanoseconds."""


@pytest.fixture(params=CASES, ids=lambda case: "-".join((*case[:2], *case[2])))
def plan(request):
    """A plan with the planner's tiling, without clusters unless told."""
    shape, schedule, changes = request.param
    problem = make_problem(*SHAPES[shape], CAUSAL)
    config = replace(choose_config(problem, H200), **({"cluster_m": 1} | changes))
    return plan_forward(problem, config=config, schedule=schedule)


@pytest.fixture
def operands(plan, device):
    return make_operands(plan.problem, device=device)


def test_every_warpgroup_notes_every_unit_once(plan, operands):
    _, notes = run_recorded(plan, *operands)
    cluster, consumers = plan.config.cluster, plan.config.consumers
    segments = {span.segment: span.cost.blocks for span in plan.simulate().spans}
    assert len(notes) == len(segments) * cluster * consumers
    ctas = {(note.sm, note[2:7]) for note in notes}
    assert Counter((note.sm, note[2:7], note.warpgroup) for note in notes) == Counter(
        (*cta, warpgroup) for cta in ctas for warpgroup in range(consumers)
    )
    assert Counter(segment for _, segment in ctas) == Counter(
        {
            (*one.tile, *((one.begin, one.end) if plan.schedule.splits else (0, blocks))): cluster
            for one, blocks in segments.items()
        }
    )


def test_key_blocks_cover_each_tile_once(plan, operands):
    """Under a causal mask a tile's blocks begin at 0."""
    _, notes = run_recorded(plan, *operands)
    whole = plan_forward(plan.problem, config=plan.config, schedule="single").simulate()
    ranges = defaultdict(set)
    for note in notes:
        ranges[note[2:5]].add((note.first_block, note.end_block))
    assert ranges.keys() == {span.segment.tile for span in whole.spans}
    for span in whole.spans:
        parts = sorted(ranges[span.segment.tile])
        assert (parts[0][0], parts[-1][1]) == (0, span.cost.blocks)
        assert all(end == begin for (_, end), (begin, _) in pairwise(parts))


def test_a_warpgroup_does_one_thing_after_the_other(plan, operands, device):
    _, notes = run_recorded(plan, *operands)
    first = min(note.began for note in notes)
    of_warpgroup = defaultdict(list)
    for note in notes:
        assert note.began <= note.started <= note.computed <= note.ended < first + SECOND
        assert note.began < note.ended
        of_warpgroup[note.sm, note.warpgroup].append((note.began, note.ended))
    for times in of_warpgroup.values():
        times.sort()
        assert all(ended <= began for (_, ended), (began, _) in pairwise(times))
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    assert all(0 <= note.sm < sms for note in notes)


def test_the_timeline_of_a_recording(plan, device):
    recorded = fa3.record_timeline(plan, device)
    assert recorded.num_lanes == plan.gpu.num_sms
    assert recorded.blocks == plan.simulate().blocks * plan.config.cluster
    assert min(span.start for span in recorded.spans) == 0.0
    assert 0 < recorded.balance <= 1
    # A call takes longer than what its CTAs do; the prediction is of the whole call.
    assert 0.2 < recorded.us / plan.predict().us < 2


def test_the_output_has_the_same_bits(plan, operands):
    out, notes = run_recorded(plan, *operands)
    plain, _ = fa3.flash_attn_func(*operands, causal=True, return_lse=True, plan=plan)
    assert torch.equal(out, plain)
    assert timeline_of(notes, plan).us > 0
