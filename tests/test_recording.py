"""From the notes of an instrumented kernel to a timeline; no GPU."""

import random
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest
import score_problems
import torch
from problems import CAUSAL, make_problem, plan_of

import fa3
from fa3.planning.costs import H200
from fa3.planning.planner import Plan, plan_forward
from fa3.planning.prediction import Span, Timeline
from fa3.primitives.recorder import Note
from fa3.problem import FP8
from fa3.schedules import SCHEDULES, Segment, Tile
from fa3.scores.masks import Band, Intersection
from fa3.scores.scores import Alibi
from fa3.scores.templates import Template
from fa3.tools.recording import random_operands, run_recorded, timeline_of

PROBLEM = make_problem(1, 1000, 3000, 2, 4, 128, CAUSAL)
LARGER = make_problem(2, 1500, 3100, 2, 2, 128, CAUSAL)
NARROW = make_problem(1, 3000, 3000, 2, 4, 64, CAUSAL)
PLANS = {schedule: plan_of(LARGER, schedule) for schedule in SCHEDULES} | {
    "pairs of rows": plan_of(PROBLEM, "list", cluster_m=2),
    "pairs of heads": plan_of(PROBLEM, "static", cluster_h=2),
    "parts in pairs": plan_of(PROBLEM, "split", cluster_m=2),
    "parts in pairs of three": plan_of(NARROW, "split", cluster_m=2),
    "in FP8": plan_of(fa3.Problem.of(*[(2, 700, 2, 128)] * 3, causal=True, dtype=FP8)),
}
every_plan = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)


@every_plan
def test_every_unit_is_a_span_of_every_cta_of_its_cluster(plan):
    recorded = timeline_of(made_up_notes(plan), plan)
    planned = {span.segment: span for span in plan.simulate().spans}
    lanes = defaultdict(set)
    for span in recorded.spans:
        assert span[4:] == planned[span.segment][4:]
        lanes[span.segment].add(span.lane)
    assert lanes.keys() == planned.keys()
    assert all(len(sms) == plan.config.cluster for sms in lanes.values())
    assert len(recorded.spans) == len(planned) * plan.config.cluster
    assert recorded.blocks == plan.simulate().blocks * plan.config.cluster
    assert recorded.num_lanes == H200.num_sms
    assert min(span.start for span in recorded.spans) == 0.0
    assert recorded.us == max(span.end for span in recorded.spans)


def note(sm, warpgroup, tile, began, ended, blocks=(0, 2)) -> Note:
    return Note(sm, warpgroup, *tile, *blocks, began, began + 1, ended - 1, ended)


def test_warpgroups_are_merged_and_gaps_stay():
    problem = make_problem(1, 256, 256, 1, 1, 128)
    plan = plan_forward(problem, replace(H200, num_sms=3), replace(PLANS["list"].config), "static")
    early, late = Tile(1, 0, 0), Tile(0, 0, 0)
    notes = [
        note(2, 1, late, 20_900, 30_000),
        note(2, 0, early, 5_000, 15_000),
        note(2, 0, late, 20_000, 29_000),
        note(2, 1, early, 5_500, 15_500),
    ]
    recorded = timeline_of(notes, plan)
    assert recorded.spans == (
        Span(2, 0.0, Segment(early), 10.5, 2, 2),
        Span(2, 15.0, Segment(late), 10.0, 2, 2),
    )
    assert recorded.num_lanes == 3
    assert recorded.busy == (0.0, 0.0, 20.5)
    assert (recorded.us, recorded.mean, recorded.balance) == (25.0, 20.5, 20.5 / 25)


def test_a_lane_is_never_busy_twice():
    """The next tile of one warpgroup begins before the other warpgroup's tile has ended."""
    first, second = Segment(Tile(1, 0, 0)), Segment(Tile(0, 0, 0))
    spans = (Span(0, 0.0, first, 10.0, 1, 1), Span(0, 9.0, second, 10.0, 1, 1))
    timeline = Timeline(spans, 1)
    assert timeline.ends == (9.0, 19.0)
    assert timeline.busy == (19.0,)
    assert timeline.balance == 1.0


@pytest.mark.parametrize("device", ["cpu", "cuda:99", torch.device("cpu")])
def test_other_devices_are_rejected(device):
    with pytest.raises(ValueError, match=r"compute capability 9\.0\); got device"):
        fa3.record_timeline(PLANS["list"], device)


def test_what_cannot_be_recorded_is_rejected(monkeypatch):
    monkeypatch.setattr("fa3.tools.recording.hopper_device", torch.device)
    problem = PLANS["list"].problem
    slopes = Template.of(Alibi(torch.zeros(8), True))
    hidden = Template.of(score_problems.Span(*torch.zeros(2, 8).int()))
    for spec in (
        replace(problem.spec, scores=(slopes,)),
        replace(problem.spec, sinks="float32"),
        replace(problem.spec, mask=Intersection(Band(right=True), hidden)),
    ):
        plan = plan_forward(replace(problem, spec=spec), schedule="list")
        with pytest.raises(NotImplementedError, match="cannot be recorded: a plan"):
            fa3.record_timeline(plan)
    for size in ("batch", "seqlen_q", "seqlen_k", "num_heads_kv"):
        plan = plan_forward(replace(problem, **{size: 0}))
        with pytest.raises(ValueError, match="nothing to record"):
            fa3.record_timeline(plan)


SECOND = 10**9  # in nanoseconds


@pytest.mark.gpu
@every_plan
def test_what_a_plan_notes(plan, device):
    operands = random_operands(plan.problem, device)
    out, notes = run_recorded(plan, *operands)
    check_units(plan, notes)
    check_times(notes, device)
    plain, _ = fa3.flash_attn_func(*operands, causal=True, return_lse=True, plan=plan)
    assert torch.equal(out, plain)
    assert timeline_of(notes, plan).us > 0


def check_units(plan: Plan, notes: list[Note]) -> None:
    """Assert that every warpgroup notes every unit once."""
    cluster, consumers = plan.config.cluster, plan.config.consumers
    segments = {span.segment: span.blocks for span in plan.simulate().spans}
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


def check_times(notes: list[Note], device) -> None:
    """Assert that a warpgroup does one thing after the other."""
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


# --------------------------------------------------------------------------- notes that are made up

START = 1_700_000_000_000_000_000  # nanoseconds; the GPU's clock counts from 1970

TURN = 400
"""Nanoseconds that a warpgroup is behind the one before it: they take turns."""

PAUSE = 100  # nanoseconds between two tiles of a warpgroup


def made_up_notes(plan: Plan, seed: int = 0) -> list[Note]:
    """Notes of every segment in any order: the simulation's times with noise, on shuffled SMs."""
    chance, config = random.Random(seed), plan.config
    sms = chance.sample(range(plan.gpu.num_sms), plan.gpu.num_sms)
    free, notes = {}, []
    for span in sorted(plan.simulate().spans, key=lambda span: span.start):
        (tile, first, end, *_), us = span.segment, span.us
        first, end = (first, end) if plan.schedule.splits else (0, span.blocks)
        for rank in range(config.cluster):
            sm = sms[span.lane * config.cluster + rank]
            length = round(1000 * us * chance.gauss(1, 0.02))
            for warpgroup in range(config.consumers):
                began = free.get((sm, warpgroup), START + TURN * warpgroup) + PAUSE
                free[sm, warpgroup] = ended = began + length
                times = (began, began + length // 4, ended - length // 4, ended)
                notes.append(Note(sm, warpgroup, *tile, first, end, *times))
    chance.shuffle(notes)
    return notes
