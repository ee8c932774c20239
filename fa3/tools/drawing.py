"""A picture of a plan: rows are SMs, bars are tiles."""

from pathlib import Path

from fa3.planning.explanation import counted, describe_problem, duration
from fa3.planning.planner import Plan

TILE_COLOURS = ("#d1495b", "#f4a259", "#e9d985", "#8ac48a", "#2a9d8f", "#1b5e82", "#0d2c54")
SEAM = 0.1  # most of a tile's width that the seam to its neighbour takes


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
