"""What a plan's instrumented kernel did: segments, SMs and times."""

import torch

from fa3.calls.devices import gpu_of
from fa3.calls.execution import attend_by
from fa3.calls.prepare import scales_on
from fa3.complaints import shown
from fa3.planning.explanation import counted
from fa3.planning.planner import Plan, check_plan
from fa3.planning.prediction import Span, Timeline
from fa3.primitives.recorder import HEADER, Note
from fa3.problem import Problem
from fa3.reference.quantize import in_key_order
from fa3.schedules import Tile

RUNS = 5  # launches of a recording; the last one counts
NS_PER_US = 1000


def record_timeline(plan: Plan, device: torch.device | str = "cuda") -> Timeline:
    """Run a plan's instrumented kernel on random tensors; return its timeline.

    The kernel notes when each warpgroup turns to a unit of work, and when its output is on its way.
    A unit is a tile or a part of one. It is compiled on first use, like the kernel that ships.

    Args:
        plan: how to run, from `fa3.plan_forward` for the GPU at hand.
        device: a Hopper GPU.

    Returns:
        A timeline as from `plan.simulate()`, in microseconds from when the first warpgroup
        began; the clock ticks in steps of about 0.03. Lanes are the SMs by the GPU's numbers. A
        span is a CTA's work on a unit: from when the first of its warpgroups began until the last
        one was done. With clusters of two CTAs a unit has two spans, on two SMs.

    Raises:
        TypeError: plan is not a `Plan`, or a field of it has a wrong type.
        ValueError: the device is no Hopper GPU, there is nothing to compute, or the plan cannot
            run its problem.
        NotImplementedError: the plan's scores, mask or sinks have tensors.
    """
    if not isinstance(plan, Plan):
        raise TypeError(f"plan must come from fa3.plan_forward, got {shown(plan)}")
    device = hopper_device(device)
    check_recordable(plan.problem)
    check_plan(plan)
    _, notes = run_recorded(plan, *random_operands(plan.problem, device))
    return timeline_of(notes, plan)


def hopper_device(device: torch.device | str = "cuda") -> torch.device:
    """Return a device with its index; raise ValueError unless it is Hopper."""
    device, seen = torch.device(device), torch.cuda.device_count()
    if device.type != "cuda" or (device.index or 0) >= seen:
        raise ValueError(
            f"this needs a Hopper GPU (compute capability 9.0); got device {str(device)!r}, "
            f"and torch sees {counted(seen, 'GPU')}"
        )
    if device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    gpu_of(device)
    return device


def check_recordable(problem: Problem) -> None:
    """Raise unless kernels with q, k and v alone run the problem."""
    if problem.spec.modifier_types:
        raise NotImplementedError(
            "scores, masks and sinks with tensors cannot be recorded: a plan does not have them"
        )
    if problem.spec.has_dropout:
        raise NotImplementedError("dropout cannot be recorded: a plan has no seed")
    if 0 in (problem.batch, problem.seqlen_q, problem.seqlen_k, problem.num_heads_q):
        raise ValueError(f"there is nothing to record: {problem} has nothing to compute")


def random_operands(problem: Problem, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Draw q, k and v from the normal distribution."""
    spec, batch = problem.spec, problem.batch
    dtype, drawn = getattr(torch, spec.dtype), getattr(torch, spec.out_dtype)
    generator = torch.Generator(device).manual_seed(0)
    shapes = (
        (batch, problem.seqlen_q, problem.num_heads_q, spec.head_dim),
        (batch, problem.seqlen_k, problem.num_heads_kv, spec.head_dim),
        (batch, problem.seqlen_k, problem.num_heads_kv, spec.head_dim_v),
    )
    return tuple(
        torch.randn(shape, dtype=drawn, device=device, generator=generator).to(dtype)
        for shape in shapes
    )


def run_recorded(
    plan: Plan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, list[Note]]:
    """Run the instrumented kernel `RUNS` times; return output and last notes."""
    spec, head_dim, descales = plan.problem.spec, q.shape[-1], None
    out = q.new_empty(*q.shape[:3], v.shape[-1], dtype=getattr(torch, spec.out_dtype))
    if spec.is_fp8:
        descales = scales_on(q.device, k.shape[2], True)(k.shape[0])
        v = in_key_order(v.view(torch.uint8)).view(v.dtype)  # The kernel takes V^T.
    rows = len(planned_segments(plan)) * plan.config.cluster * plan.config.consumers
    width = len(Note._fields)
    recording = torch.empty(HEADER + rows * width, dtype=torch.int64, device=q.device)
    values = {
        "q": q, "k": k, "v": v, "o": out, "lse": None, "address_of_lse": 0, "modifiers": None,
        "softmax_scale": head_dim**-0.5, "descales": descales, "recording": recording,
    }  # fmt: skip
    attend = attend_by(plan, q.device, plan.launches(is_recorded=True))
    for _ in range(RUNS):
        recording.zero_()
        attend(dict(values))
    count, *numbers = recording.tolist()
    return out, [Note(*numbers[i * width : (i + 1) * width]) for i in range(count)]


def timeline_of(notes: list[Note], plan: Plan) -> Timeline:
    """What warpgroups noted, as a span for each segment of a CTA."""
    planned = planned_segments(plan)
    first = min((note.began for note in notes), default=0)
    by_cta: dict[tuple, list[Note]] = {}
    for note in notes:
        tile = Tile(note.m_block, note.head, note.batch)
        key = segment_key(plan, tile, note.first_block, note.end_block)
        by_cta.setdefault((note.sm, key), []).append(note)
    spans = []
    for (sm, key), group in by_cta.items():
        began, ended = min(note.began for note in group), max(note.ended for note in group)
        start, us = (began - first) / NS_PER_US, (ended - began) / NS_PER_US
        # A mask of the user's may touch fewer blocks than the plan can know.
        blocks = group[0].end_block - group[0].first_block
        spans.append(planned[key]._replace(lane=sm, start=start, us=us, blocks=blocks))
    spans.sort(key=lambda span: (span.start, span.lane))
    num_lanes = max((plan.gpu.num_sms, *(note.sm + 1 for note in notes)))
    return Timeline(tuple(spans), num_lanes)


def planned_segments(plan: Plan) -> dict[tuple, Span]:
    """The segments of a plan, as they should run."""
    return {
        segment_key(plan, span.segment.tile, span.segment.begin, span.segment.end): span
        for span in plan.simulate().spans
    }


def segment_key(plan: Plan, tile: Tile, begin: int, end: int) -> tuple:
    """What tells a segment of a plan from the others."""
    return (tile, begin, end) if plan.schedule.splits else (tile,)
