"""Draws the pictures of the start page: speed by the committed records, and the tiles of a plan.

    python -m docs.pages.start

The start page is README with these pictures (docs/pages/site.py).
"""

import json
from collections.abc import Iterator
from pathlib import Path

import fa3
from benchmarks.report import providers_of
from benchmarks.results import CSV_NAME, OK, Row, read
from benchmarks.shapes import size
from docs.pages import svg
from docs.pages.performance import GRID, NAMES, RECORDS
from fa3.planning.costs import H200
from fa3.scores.masks import Band

IMAGES = Path(__file__).parents[1] / "images"

HEAD_DIM, IS_CAUSAL, REGIME = 128, True, "steady"
"""The cells that the chart of speed shows."""

COLOURS = dict(zip(NAMES, (svg.MAIN, svg.SECOND, svg.THIRD, svg.FOURTH), strict=True))

BAR, GAP, HEAD, LEFT, WIDTH = 12, 12, 94, 82, 480
"""Pixels: a bar's height, between two groups, above and left of the bars, of the whole picture."""

CAUSAL = fa3.Window(right=0)
LLAMA = fa3.Problem(
    fa3.AttentionSpec("bfloat16", 128, 128, Band.of(CAUSAL)), 1, 4096, 4096, 8, 4, CAUSAL
)
"""The attention of a prompt of 4,096 tokens in Llama 3 8B."""

LANE, LEFT_OF_LANES = 3, 41
"""Pixels: a cluster's row in the picture of tiles, and left of it."""


def cells(record: str) -> dict[int, list[Row]]:
    """The rows of a record that are shown, by sequence length."""
    shown: dict[int, list[Row]] = {}
    for row in read(RECORDS / record / CSV_NAME):
        is_cell = (row.group, row.regime, row.data) == ("grid", REGIME, "normal")
        is_shown = (row.head_dim, row.causal) == (HEAD_DIM, IS_CAUSAL) and row.provider in NAMES
        if is_cell and is_shown and row.status == OK:
            shown.setdefault(row.seqlen_q, []).append(row)
    return dict(sorted(shown.items()))


RECORD = next(record for record in GRID if cells(record))  # the newest one that has such rows


def speed_parts(shown: dict[int, list[Row]]) -> Iterator[str]:
    """Bars for every length and provider, ours on top."""
    said = json.loads((RECORDS / RECORD / "environment.json").read_text())
    mask = "causal" if IS_CAUSAL else "no mask"
    yield svg.text(0, 14, f"TFLOP/s, forward pass, bf16, {mask}, head size {HEAD_DIM}", size=13)
    yield svg.text(0, 32, f"{said['gpu']}, {REGIME} load, {said['date'][:10]}")
    providers = providers_of([row for rows in shown.values() for row in rows])
    for i, name in enumerate(providers):
        x, y = WIDTH / 2 * (i % 2), 46 + 17 * (i // 2)
        yield svg.boxes([(x, y, 10, 10)], COLOURS[name])
        yield svg.text(x + 15, y + 9, NAMES[name])
    most = max(row.tflops for rows in shown.values() for row in rows)
    top = HEAD
    for seqlen, rows in shown.items():
        yield svg.text(0, top + BAR * len(rows) / 2 + 4, f"{size(seqlen)} tokens")
        for row in sorted(rows, key=lambda row: providers.index(row.provider)):
            length = (WIDTH - LEFT - 34) * row.tflops / most
            yield svg.boxes([(LEFT, top, length, BAR - 1)], COLOURS[row.provider])
            yield svg.text(LEFT + length + 4, top + BAR - 3, f"{row.tflops:.0f}", size=11)
            top += BAR
        top += GAP


def speed() -> str:
    shown = cells(RECORD)
    height = HEAD + sum(BAR * len(rows) + GAP for rows in shown.values())
    return svg.picture(WIDTH, height, "Speed of the forward pass", speed_parts(shown))


def tile_parts(plan: fa3.Plan) -> Iterator[str]:
    """A row for every cluster, and in it a bar for every tile, coloured by its queries."""
    timeline = plan.simulate()
    yield svg.text(0, 14, "Which SMs work on which tile, and when, by the planner's model", size=13)
    yield svg.text(0, 32, f"Llama 3 8B, prompt of 4,096 tokens, causal, {plan.gpu.name}")
    num_m_blocks = plan.schedule.order.num_m_blocks
    bars: dict[int, list] = {}
    scale, top = (WIDTH - LEFT_OF_LANES - 9) / timeline.us, 46
    for span, end in zip(timeline.spans, timeline.ends, strict=True):
        shade = span.segment.tile.m_block * len(svg.TILE_COLOURS) // num_m_blocks
        left = LEFT_OF_LANES + span.start * scale
        width = max(0.4, (end - span.start) * scale - 0.4)
        bars.setdefault(shade, []).append((left, top + LANE * span.lane, width, LANE - 0.4))
    for shade, corners in sorted(bars.items()):
        yield svg.boxes(corners, svg.TILE_COLOURS[shade])
    bottom = top + LANE * timeline.num_lanes
    yield f"<g transform='translate(14 {(top + bottom) // 2}) rotate(-90)'>"
    yield svg.text(0, 0, f"{timeline.num_lanes} clusters of {plan.config.cluster} SMs", "middle")
    yield "</g>"
    yield svg.text(LEFT_OF_LANES, bottom + 15, "0")
    yield svg.text(WIDTH - 9, bottom + 15, f"{timeline.us:.0f} &#956;s", "end")
    yield svg.text(LEFT_OF_LANES, bottom + 36, "first queries")
    for shade, colour in enumerate(svg.TILE_COLOURS):
        yield svg.boxes([(LEFT_OF_LANES + 84 + 22 * shade, bottom + 26, 20, 11)], colour)
    yield svg.text(LEFT_OF_LANES + 90 + 22 * len(svg.TILE_COLOURS), bottom + 36, "last queries")


def tile_order() -> str:
    plan = fa3.plan_forward(LLAMA, H200)
    height = 46 + LANE * plan.simulate().num_lanes + 44
    return svg.picture(WIDTH, height, "Tile order of a plan", tile_parts(plan))


def pictures() -> dict[str, str]:
    """The pictures of the start page, by the names of their files."""
    return {"speed.svg": speed(), "tile-order.svg": tile_order()}


def main() -> None:
    for name, drawn in pictures().items():
        (IMAGES / name).write_text(drawn)


if __name__ == "__main__":
    main()
