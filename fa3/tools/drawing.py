"""A picture of a plan: one row for every SM, one bar for every tile, in microseconds."""

from pathlib import Path

from fa3.planning.explanation import counted, describe_problem, duration
from fa3.planning.plan import Plan
from fa3.planning.timeline import Timeline

INK, FAINT, IDLE, HATCH = "#1b2733", "#66727f", "#eef1f4", "#ffffff70"
TILE_COLOURS = ("#0d2c54", "#1b5e82", "#2a9d8f", "#8ac48a", "#e9d985", "#f4a259", "#d1495b")

WIDTH, LEFT, RIGHT = 13.0, 0.754, 11.544
"""Of the picture, in inches, and where its panels begin and end."""

HEAD, FOOT = 1.352, 0.684
"""Inches above and below the panels."""

ALONE, TOGETHER = 5.814, 4.6
"""Inches that one panel is high, and each of two."""

TITLE, BETWEEN = 0.24, 1.25
"""Inches above each of two panels for its title, and between them."""

LONG_US = 10_000
"""From here on the axis is in milliseconds."""

NARROWEST_SEAM = 0.1
"""Most of a tile's width that the seams to its neighbours take."""


def draw_tile_order(
    plan: Plan, timeline: Timeline, path: Path, recorded: Timeline | None = None
) -> None:
    """Write a PNG of the tiles of every SM over time.

    Args:
        timeline: the simulation, `plan.simulate()`.
        recorded: what the GPU did, from `fa3.record_timeline`; drawn below, on the same scale.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("drawing needs matplotlib: pip install matplotlib") from error

    if recorded is None:
        head, panel, panels, us = HEAD, ALONE, ALONE, timeline.us
    else:
        head, panel, panels = HEAD + TITLE, TOGETHER, TOGETHER + BETWEEN + TOGETHER
        us = max(timeline.us, recorded.us)
    height = head + panels + FOOT
    figure = Figure(figsize=(WIDTH, height), dpi=160, facecolor="white")

    def place(left: float, top: float, right: float, bottom: float) -> tuple:
        """A rectangle for `add_axes`; inches from the left and from the top of the panels."""
        up = height - head - bottom
        return left / WIDTH, up / height, (right - left) / WIDTH, (bottom - top) / height

    cluster = plan.config.cluster
    lanes = "SM" if cluster == 1 else f"cluster of {cluster} SMs"
    axes = figure.add_axes(place(LEFT, 0, RIGHT, panel))
    tiles = draw_lanes(axes, plan, timeline, us)
    unit = "milliseconds" if us >= LONG_US else "microseconds"
    axes.set_xlabel(f"predicted time, {unit}", color=INK, fontsize=11)
    axes.set_ylabel(lanes, color=INK, fontsize=11)
    work = f"{counted(plan.schedule.order.num_tiles, 'tile')}   "
    work += counted(timeline.blocks, "key block")
    if parts := sum(not span.segment.is_whole for span in timeline.spans):
        work += f"   {counted(parts, 'part')} of tiles, hatched"
    if recorded is None:
        work += f"   balance {timeline.balance:.1%}"
    else:
        below = figure.add_axes(place(LEFT, panel + BETWEEN, RIGHT, panels))
        draw_lanes(below, plan, recorded, us)
        below.set_xlabel(f"recorded time, {unit}", color=INK, fontsize=11)
        below.set_ylabel("SM", color=INK, fontsize=11)
        entitle(axes, "Predicted under steady load", timeline)
        entitle(below, "Recorded", recorded)

    bar = figure.colorbar(tiles, cax=figure.add_axes(place(11.83, 0, 12.038, panels)))
    bar.outline.set_visible(False)
    rows, last = plan.config.tile_m * plan.config.cluster_m, plan.schedule.order.num_m_blocks - 1
    marks = sorted({round(i * last / 4) for i in range(5)})
    bar.set_ticks(marks, labels=[f"{mark * rows:,}" for mark in marks])
    bar.ax.tick_params(colors=FAINT, labelsize=9, length=0)
    bar.set_label("first query row of the tile", color=INK, fontsize=11)

    title, subtitle, totals = (1 - inches / height for inches in (0.418, 0.707, 0.96))
    figure.text(
        LEFT / WIDTH, title, f"Tile order on {plan.gpu.name}, {type(plan.schedule).__name__}",
        fontsize=17, fontweight="bold", color=INK,
    )  # fmt: skip
    figure.text(LEFT / WIDTH, subtitle, describe_problem(plan.problem), fontsize=11, color=FAINT)
    figure.text(LEFT / WIDTH, totals, work, fontsize=11, color=INK)
    figure.savefig(path)


def draw_lanes(axes, plan: Plan, timeline: Timeline, us: float):
    """Draw a timeline into one panel that is `us` long; the tiles, for a colour bar."""
    from matplotlib.collections import PolyCollection
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.set_facecolor(IDLE)
    gap = 0.12 if timeline.num_lanes < 200 else 0
    corners = []
    for span, end in zip(timeline.spans, timeline.ends, strict=True):
        seam = min(us / 1500, NARROWEST_SEAM * (end - span.start))
        left, right = span.start + seam, end - seam
        top, bottom = span.lane + gap / 2, span.lane + 1 - gap / 2
        corners.append(((left, top), (left, bottom), (right, bottom), (right, top)))
    tiles = PolyCollection(
        corners,
        array=[span.segment.tile.m_block for span in timeline.spans],
        cmap=LinearSegmentedColormap.from_list("tiles", TILE_COLOURS[::-1]),
        linewidths=0,
        snap=False,
    )
    tiles.set_clim(0, max(1, plan.schedule.order.num_m_blocks - 1))
    axes.add_collection(tiles)
    parts = [
        corner
        for corner, span in zip(corners, timeline.spans, strict=True)
        if not span.segment.is_whole
    ]
    axes.add_collection(
        PolyCollection(parts, facecolors="none", edgecolors=HATCH, hatch="/////", linewidths=0)
    )
    axes.axvline(timeline.mean, color=INK, linewidth=1.1, linestyle=(0, (4, 3)))
    axes.set_xlim(0, us * 1.01)
    axes.set_ylim(timeline.num_lanes, 0)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True, steps=(1, 2, 5, 10)))
    if us >= LONG_US:
        axes.xaxis.set_major_formatter(FuncFormatter(lambda at, _: f"{at / 1000:,g}"))
    axes.tick_params(colors=FAINT, labelsize=9, length=3)
    for spine in axes.spines.values():
        spine.set_visible(False)
    is_late = timeline.mean > us / 4
    axes.annotate(
        f"mean {duration(timeline.mean)}",
        (timeline.mean, 0),
        (-4 if is_late else 4, 5),
        xycoords="data",
        textcoords="offset points",
        annotation_clip=False,
        ha="right" if is_late else "left",
        fontsize=9,
        color=INK,
    )
    return tiles


def entitle(axes, name: str, timeline: Timeline) -> None:
    """Put a line over a panel, above the label of its mean."""
    axes.annotate(
        f"{name}: {duration(timeline.us)}, balance {timeline.balance:.1%}",
        (0, 1),
        (0, 72 * TITLE),
        xycoords="axes fraction",
        textcoords="offset points",
        fontsize=11,
        color=INK,
    )
