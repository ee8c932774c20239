"""A picture of a plan: one row for every SM, one bar for every tile, in microseconds."""

from pathlib import Path

from fa3.planning.explanation import counted, describe_problem, microseconds
from fa3.planning.plan import Plan
from fa3.planning.timeline import Timeline

INK, FAINT, IDLE = "#1b2733", "#66727f", "#eef1f4"
TILE_COLOURS = ("#0d2c54", "#1b5e82", "#2a9d8f", "#8ac48a", "#e9d985", "#f4a259", "#d1495b")

WIDTH, LEFT, RIGHT = 13.0, 0.754, 11.544
"""Of the picture, in inches, and where its panels begin and end."""

HEAD, FOOT = 1.102, 0.684
"""Inches above and below the panels."""

ALONE, TOGETHER = 5.814, 4.6
"""Inches that one panel is high, and each of two."""

TITLE, BETWEEN = 0.24, 1.25
"""Inches above each of two panels for its title, and between them."""


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
        raise ModuleNotFoundError("drawing needs matplotlib: pip install 'fa3[bench]'") from error

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
    axes.set_xlabel("predicted time, microseconds", color=INK, fontsize=11)
    axes.set_ylabel(lanes, color=INK, fontsize=11)
    work = f"{counted(plan.schedule.order.num_tiles, 'tile')}   "
    work += counted(timeline.blocks, "key block")
    if recorded is None:
        work += f"   balance {timeline.balance:.1%}"
    else:
        below = figure.add_axes(place(LEFT, panel + BETWEEN, RIGHT, panels))
        draw_lanes(below, plan, recorded, us)
        below.set_xlabel("recorded time, microseconds", color=INK, fontsize=11)
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

    title, subtitle = 1 - 0.418 / height, 1 - 0.707 / height
    figure.text(
        LEFT / WIDTH, title, f"Tile order on {plan.gpu.name}, {type(plan.schedule).__name__}",
        fontsize=17, fontweight="bold", color=INK,
    )  # fmt: skip
    figure.text(LEFT / WIDTH, subtitle, describe_problem(plan.problem), fontsize=11, color=FAINT)
    figure.text(RIGHT / WIDTH, title, work, fontsize=11, color=INK, ha="right")
    figure.savefig(path)


def draw_lanes(axes, plan: Plan, timeline: Timeline, us: float):
    """Draw a timeline into one panel that is `us` long; the tiles, for a colour bar."""
    from matplotlib.collections import PolyCollection
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.ticker import MaxNLocator

    axes.set_facecolor(IDLE)
    gap = 0.12 if timeline.num_lanes < 200 else 0
    seam = us / 1500
    corners = [
        (
            (span.start + seam, span.lane + gap / 2),
            (span.start + seam, span.lane + 1 - gap / 2),
            (end - seam, span.lane + 1 - gap / 2),
            (end - seam, span.lane + gap / 2),
        )
        for span, end in zip(timeline.spans, timeline.ends, strict=True)
    ]
    tiles = PolyCollection(
        corners,
        array=[span.segment.tile.m_block for span in timeline.spans],
        cmap=LinearSegmentedColormap.from_list("tiles", TILE_COLOURS[::-1]),
        linewidths=0,
        snap=False,
    )
    tiles.set_clim(0, max(1, plan.schedule.order.num_m_blocks - 1))
    axes.add_collection(tiles)
    axes.axvline(timeline.mean, color=INK, linewidth=1.1, linestyle=(0, (4, 3)))
    axes.set_xlim(0, us * 1.01)
    axes.set_ylim(timeline.num_lanes, 0)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True, steps=(1, 2, 5, 10)))
    axes.tick_params(colors=FAINT, labelsize=9, length=3)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.annotate(
        f"mean {timeline.mean:,.1f} us",
        (timeline.mean, 0),
        (-4, 5),
        xycoords="data",
        textcoords="offset points",
        annotation_clip=False,
        ha="right",
        fontsize=9,
        color=INK,
    )
    return tiles


def entitle(axes, name: str, timeline: Timeline) -> None:
    """Put a line over a panel, above the label of its mean."""
    axes.annotate(
        f"{name}: {microseconds(timeline.us)} us, balance {timeline.balance:.1%}",
        (0, 1),
        (0, 72 * TITLE),
        xycoords="axes fraction",
        textcoords="offset points",
        fontsize=11,
        color=INK,
    )
