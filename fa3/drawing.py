"""A picture of a plan: one row for every SM, one bar for every tile, in microseconds."""

from pathlib import Path

from fa3.explanation import counted, describe_problem
from fa3.planner import Plan
from fa3.timeline import Timeline

INK, FAINT, IDLE = "#1b2733", "#66727f", "#eef1f4"
TILE_COLOURS = ("#0d2c54", "#1b5e82", "#2a9d8f", "#8ac48a", "#e9d985", "#f4a259", "#d1495b")


def draw_tile_order(plan: Plan, timeline: Timeline, path: Path) -> None:
    """Write a PNG of the tiles of every SM over time.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    try:
        from matplotlib.collections import PolyCollection
        from matplotlib.colors import LinearSegmentedColormap
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("drawing needs matplotlib: pip install 'fa3[bench]'") from error

    order, config = plan.schedule.order, plan.config
    length, mean = timeline.us, timeline.mean
    lanes = "SM" if config.cluster == 1 else f"cluster of {config.cluster} SMs"

    figure = Figure(figsize=(13, 7.6), dpi=160, facecolor="white")
    axes = figure.add_axes((0.058, 0.09, 0.83, 0.765), facecolor=IDLE)
    gap = 0.12 if timeline.num_lanes < 200 else 0
    seam = length / 1500
    corners = [
        (
            (span.start + seam, span.lane + gap / 2),
            (span.start + seam, span.lane + 1 - gap / 2),
            (span.end - seam, span.lane + 1 - gap / 2),
            (span.end - seam, span.lane + gap / 2),
        )
        for span in timeline.spans
    ]
    tiles = PolyCollection(
        corners,
        array=[span.tile.m_block for span in timeline.spans],
        cmap=LinearSegmentedColormap.from_list("tiles", TILE_COLOURS[::-1]),
        linewidths=0,
        snap=False,
    )
    tiles.set_clim(0, max(1, order.num_m_blocks - 1))
    axes.add_collection(tiles)
    axes.axvline(mean, color=INK, linewidth=1.1, linestyle=(0, (4, 3)))
    axes.set_xlim(0, length * 1.01)
    axes.set_ylim(timeline.num_lanes, 0)
    axes.set_xlabel("predicted time, microseconds", color=INK, fontsize=11)
    axes.set_ylabel(lanes, color=INK, fontsize=11)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=(1, 2, 5, 10)))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, steps=(1, 2, 5, 10)))
    axes.tick_params(colors=FAINT, labelsize=9, length=3)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.annotate(
        f"mean {mean:,.1f} us",
        (mean, 0),
        (-4, 5),
        xycoords="data",
        textcoords="offset points",
        annotation_clip=False,
        ha="right",
        fontsize=9,
        color=INK,
    )

    bar = figure.colorbar(tiles, cax=figure.add_axes((0.91, 0.09, 0.016, 0.765)))
    bar.outline.set_visible(False)
    rows = config.tile_m * config.cluster_m
    marks = sorted({round(i * (order.num_m_blocks - 1) / 4) for i in range(5)})
    bar.set_ticks(marks, labels=[f"{mark * rows:,}" for mark in marks])
    bar.ax.tick_params(colors=FAINT, labelsize=9, length=0)
    bar.set_label("first query row of the tile", color=INK, fontsize=11)

    figure.text(
        0.058, 0.945, f"Tile order on {plan.gpu.name}, {type(plan.schedule).__name__}",
        fontsize=17, fontweight="bold", color=INK,
    )  # fmt: skip
    figure.text(0.058, 0.907, describe_problem(plan.problem), fontsize=11, color=FAINT)
    figure.text(
        0.888, 0.945,
        f"{counted(order.num_tiles, 'tile')}   {counted(timeline.blocks, 'key block')}   "
        f"balance {timeline.balance:.1%}",
        fontsize=11, color=INK, ha="right",
    )  # fmt: skip
    figure.savefig(path)
