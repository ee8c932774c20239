"""What `fa3 plan` does: plan a call, explain the plan, draw it.

In the picture rows are SMs, and bars are tiles.
"""

import argparse
from dataclasses import replace
from pathlib import Path

from fa3.calls.call import MOST_RAGGED_ROWS
from fa3.calls.options import check_window, integer
from fa3.calls.tuned_plans import plan_call, tuned_plans, tuning_key
from fa3.planning.backward import BackwardPlan
from fa3.planning.costs import Gpu, as_gpu
from fa3.planning.decode import DecodePlan
from fa3.planning.explanation import (
    NOT_PREDICTED,
    counted,
    describe_plan,
    describe_problem,
    duration,
)
from fa3.planning.planner import Plan, plan_forward
from fa3.planning.routes import (
    CACHE,
    DECODE,
    MOST_OF_DECODE,
    PACKED,
    PackedSizes,
    Signature,
    choose_route,
    launches_of_route,
)
from fa3.primitives.cache_blocks import CacheLayout
from fa3.problem import Problem, Window
from fa3.scores.masks import Band
from fa3.tools.arguments import SHAPE
from fa3.tools.models import SHORT_DTYPES
from fa3.tools.warmup import known_gpus

GOES_WITH = {"schedule": "dense", "png": "dense", "page_size": "cache", "append": "cache"}
"""Options that say something of one kind of calls only."""

TILE_COLOURS = ("#d1495b", "#f4a259", "#e9d985", "#8ac48a", "#2a9d8f", "#1b5e82", "#0d2c54")
SEAM = 0.1  # most of a tile's width that the seam to its neighbour takes


def show_plan(options: argparse.Namespace) -> None:
    """Print how a call would run, by the command line's options."""
    for name, call in GOES_WITH.items():
        if getattr(options, name) and options.call != call:
            option = name.replace("_", "-")
            raise ValueError(f"--{option} goes with --call {call}, got --call {options.call}")
    gpu = as_gpu(options.gpu) if options.gpu else known_gpus()[0]
    problem = problem_of(options.shape, options)
    plan, text = plan_and_text(options, problem, gpu)
    if options.png:
        if not isinstance(plan, Plan):
            raise ValueError(
                "--png shows the forward kernel, but this call runs in another one; with "
                "--schedule list a dense call runs in the forward kernel"
            )
        draw_tile_order(plan, options.png)
        text += f"\nPicture  {options.png}"
    print(text)
    is_planned = options.call == "dense" and not options.schedule
    if is_planned and tuning_key(problem, gpu) in tuned_plans(gpu.name):
        print("Tuned    The fastest plan that `fa3 tune` measured on this GPU.")


def plan_and_text(
    options: argparse.Namespace, problem: Problem, gpu: Gpu
) -> tuple[Plan | DecodePlan | None, str]:
    """How the options' call runs, without gradients: plan and words."""
    if problem.spec.is_fp8 and options.call in ("cache", "backward"):
        raise ValueError(f"--dtype e4m3 goes with --call dense or packed, got {options.call}")
    if options.call == "backward":
        return None, BackwardPlan.of(problem, gpu).explain()
    window = check_window(options.window, options.causal)
    if options.call == "packed":
        return None, explain_packed(problem, window, gpu)
    if options.call == "cache":
        cache = CacheLayout(integer("--page-size", options.page_size, 0))
        has_many = problem.seqlen_q > MOST_OF_DECODE
        if has_many and (text := explain_packed(problem, window, gpu, cache, options.append)):
            return None, text
        decode = DecodePlan.of(problem, gpu, cache, appends=options.append)
        return decode, decode.explain()
    name = options.schedule
    plan = plan_forward(problem, gpu, schedule=name) if name else plan_call(problem, gpu)
    return plan, plan.explain()


def problem_of(shape: tuple[int, ...], options: argparse.Namespace) -> Problem:
    """A shape's problem, with the options' dtype, columns of v and mask."""
    if len(shape) != 6 or min(shape) < 1:
        raise ValueError(f"a shape must be six positive integers {SHAPE}, got {shape}")
    batch, seqlen_q, seqlen_k, heads_q, heads_kv, head_dim = shape
    head_dim_v = head_dim if options.head_dim_v is None else options.head_dim_v
    return Problem.of(
        (batch, seqlen_q, heads_q, head_dim),
        (batch, seqlen_k, heads_kv, head_dim),
        (batch, seqlen_k, heads_kv, head_dim_v),
        causal=options.causal,
        window_size=options.window,
        dtype=SHORT_DTYPES[options.dtype],
    )


def explain_packed(
    problem: Problem,
    window: Window,
    gpu: Gpu,
    cache: CacheLayout | None = None,
    appends: bool = False,
) -> str:
    """Say how a call attends to packed sequences of equal lengths.

    `problem` has the sequences as a dense call. Kernels have all bounds of the call's `window` that
    hide something at some length. Returns nothing for a cache that the decode kernel serves alone.
    """
    window = window.tighten(MOST_RAGGED_ROWS, problem.seqlen_k if cache else MOST_RAGGED_ROWS)
    kernels_for = replace(problem, spec=replace(problem.spec, mask=Band.of(window)), window=window)
    signature = Signature.of(PACKED, kernels_for, gpu)
    if cache:
        signature = replace(
            signature, call=CACHE, cache=cache, capacity=problem.seqlen_k, has_equal_queries=True
        )
    route = choose_route(signature, PackedSizes.of(problem))
    if cache and route.name == DECODE:
        return ""
    launches = launches_of_route(signature, route.name, route.most_queries)
    kernels = ["append"] * appends + [launch.kernel for launch in launches]
    sentence, page = route.explain(), "Calls on a cache" if cache else "Packed sequences"
    if route.name == DECODE:
        merge = "Combine" if len(kernels) > 1 else "The decode kernel"
        sentence = f"{sentence} {merge} merges the parts of split tiles."
    sentences = {
        "Route": sentence,
        "Rule": f"The first that holds of docs/kernels.md, {page}: {route.reason}.",
        "Lengths": "Read on the GPU. Planned for equal lengths; a batch of different lengths may "
        "run other kernels.",
        "Time": NOT_PREDICTED,
    }
    return describe_plan(problem, gpu, kernels, sentences, problem.flops)


def draw_tile_order(plan: Plan, path: Path) -> None:
    """Write a PNG of SMs and tiles over time; needs matplotlib."""
    try:
        from matplotlib.collections import PolyCollection
        from matplotlib.colors import LinearSegmentedColormap
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("drawing needs matplotlib: pip install matplotlib") from error

    timeline, order, config = plan.simulate(), plan.schedule.order, plan.config
    rows = config.tile_m * config.cluster_m
    corners, parts = [], []
    for span, end in zip(timeline.spans, timeline.ends, strict=True):
        left, right = span.start, end - min(timeline.us / 750, SEAM * (end - span.start))
        top, bottom = span.lane, span.lane + 1
        corners.append(((left, top), (left, bottom), (right, bottom), (right, top)))
        if not span.segment.is_whole:
            parts.append(corners[-1])
    figure = Figure((13, 7.5), dpi=160, layout="constrained")
    axes = figure.subplots()
    tiles = PolyCollection(
        corners,
        array=[span.segment.tile.m_block * rows for span in timeline.spans],
        cmap=LinearSegmentedColormap.from_list("tiles", TILE_COLOURS),
    )
    axes.add_collection(tiles)
    axes.add_collection(PolyCollection(parts, facecolors="none", edgecolors="white", hatch="///"))
    axes.axvline(timeline.mean, color="black", linestyle="--")
    axes.autoscale_view()
    axes.set_ylim(timeline.num_lanes, 0)
    axes.set_xlabel("microseconds")
    axes.set_ylabel("SM" if config.cluster == 1 else f"cluster of {config.cluster} SMs")
    figure.colorbar(tiles, ax=axes, label="first query row of the tile")
    hatched = f", {counted(len(parts), 'part')} of tiles (hatched)" if parts else ""
    axes.set_title(
        f"Tile order on {plan.gpu.name}, {type(plan.schedule).__name__}\n"
        f"{describe_problem(plan.problem)}\n"
        f"{counted(order.num_tiles, 'tile')}, {counted(timeline.blocks, 'key block')}{hatched}; "
        f"predicted under steady load: {duration(timeline.us)}, balance {timeline.balance:.1%}, "
        f"mean (dashed) {duration(timeline.mean)}",
        loc="left",
    )
    figure.savefig(path)
