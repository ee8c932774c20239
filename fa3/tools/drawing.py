"""A picture of a plan: one row for every SM, one bar for every tile, in microseconds."""

from pathlib import Path

from fa3.planning.explanation import counted, describe_problem, duration
from fa3.planning.plan import Plan
from fa3.planning.timeline import Timeline

INK, FAINT, IDLE, HATCH = "#1b2733", "#66727f", "#eef1f4", "#ffffff70"
TILE_COLOURS = ("#d1495b", "#f4a259", "#e9d985", "#8ac48a", "#2a9d8f", "#1b5e82", "#0d2c54")

NARROWEST_SEAM = 0.1  # most of a tile's width that the seams to its neighbours take


def draw_tile_order(
    plan: Plan, timeline: Timeline, path: Path, recorded: Timeline | None = None
) -> None:
    """Write a PNG of the tiles of every SM over time, of a simulation `plan.simulate()`.
    What was `recorded` on the GPU is drawn below, on the same scale. Needs matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("drawing needs matplotlib: pip install matplotlib") from error

    panels = {"predicted under steady load": timeline}
    if recorded is not None:
        panels["recorded"] = recorded
    figure = Figure((13, 2 + 5.5 * len(panels)), dpi=160, facecolor="white", layout="constrained")
    all_axes = figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
    for axes, (name, shown) in zip(all_axes, panels.items(), strict=True):
        tiles = draw_lanes(axes, plan, shown)
        clusters = plan.config.cluster > 1 and shown is timeline
        axes.set_ylabel(f"cluster of {plan.config.cluster} SMs" if clusters else "SM", color=INK)
        axes.set_title(
            f"{name}: {duration(shown.us)}, balance {shown.balance:.1%}, mean (dashed) "
            f"{duration(shown.mean)}",
            loc="left", fontsize=11, color=INK,
        )  # fmt: skip
    all_axes[-1].set_xlabel("microseconds", color=INK)

    rows, last = plan.config.tile_m * plan.config.cluster_m, plan.schedule.order.num_m_blocks - 1
    marks = sorted({round(i * last / 4) for i in range(5)})
    bar = figure.colorbar(tiles, ax=all_axes, fraction=0.02, pad=0.02, aspect=50)
    bar.outline.set_visible(False)
    bar.set_ticks(marks, labels=[f"{mark * rows:,}" for mark in marks])
    bar.set_label("first query row of the tile", color=INK)

    work = f"{counted(plan.schedule.order.num_tiles, 'tile')}, "
    work += counted(timeline.blocks, "key block")
    if parts := sum(not span.segment.is_whole for span in timeline.spans):
        work += f", {counted(parts, 'part')} of tiles (hatched)"
    schedule = type(plan.schedule).__name__
    figure.suptitle(
        f"Tile order on {plan.gpu.name}, {schedule}\n{describe_problem(plan.problem)}\n{work}",
        x=0.01, ha="left", fontsize=13, color=INK,
    )  # fmt: skip
    figure.savefig(path)


def draw_lanes(axes, plan: Plan, timeline: Timeline):
    """Draw a timeline into one panel; the tiles, for a colour bar."""
    from matplotlib.collections import PolyCollection
    from matplotlib.colors import LinearSegmentedColormap

    gap = 0.06 if timeline.num_lanes < 200 else 0
    corners, parts = [], []
    for span, end in zip(timeline.spans, timeline.ends, strict=True):
        seam = min(timeline.us / 1500, NARROWEST_SEAM * (end - span.start))
        left, right = span.start + seam, end - seam
        top, bottom = span.lane + gap, span.lane + 1 - gap
        corners.append(((left, top), (left, bottom), (right, bottom), (right, top)))
        if not span.segment.is_whole:
            parts.append(corners[-1])
    tiles = PolyCollection(
        corners,
        array=[span.segment.tile.m_block for span in timeline.spans],
        cmap=LinearSegmentedColormap.from_list("tiles", TILE_COLOURS),
        linewidths=0,
        snap=False,
    )
    tiles.set_clim(0, max(1, plan.schedule.order.num_m_blocks - 1))
    axes.add_collection(tiles)
    axes.add_collection(
        PolyCollection(parts, facecolors="none", edgecolors=HATCH, hatch="/////", linewidths=0)
    )
    axes.axvline(timeline.mean, color=INK, linewidth=1.1, linestyle="--")
    axes.margins(x=0.01)
    axes.autoscale_view()
    axes.set_ylim(timeline.num_lanes, 0)
    axes.set_facecolor(IDLE)
    axes.tick_params(colors=FAINT, labelsize=9, length=3)
    axes.spines[:].set_visible(False)
    return tiles
