"""Draws the pictures of docs/gallery.md from the page's own calls.

    python -m docs.pages.gallery

The code of the page runs on the CPU, where a mask or a score is its `reference`, and the pictures
show what it returns: visible keys, weights, the bias that is added, and the curve of a softcap.
"""

import linecache
import re
from collections.abc import Iterator
from pathlib import Path

import torch

import fa3
from docs.pages import svg
from fa3.scores.scores import Alibi, Softcap

PAGE = Path(__file__).parents[1] / "gallery.md"
IMAGES = PAGE.parent / "images"

MASKS = ("Causal", "Sliding window", "Prefix LM", "Documents")
"""Sections whose picture shows which keys have weight."""

CELL, LEFT, TOP = 10, 22, 22
"""Pixels of a cell, and left of and above the first one."""


def run_page() -> dict[str, dict]:
    """Run the page's code; by section, the names that are defined after it.

    The compiler of kernels finds the source in `linecache`.
    """
    names: dict = {}
    after = {}
    for section in PAGE.read_text().split("\n## "):
        title = section.partition("\n")[0]
        for code in re.findall(r"```python\n(.*?)```", section, re.DOTALL):
            name = f"{PAGE.name}, {title}"
            linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
            exec(compile(code, name, "exec"), names)
        after[title] = dict(names)
    return after


def positions(seqlen: int) -> fa3.Position:
    """Queries (rows) and keys (columns) of the first sequence and head."""
    places = torch.arange(seqlen)
    return fa3.Position(0, 0, places[:, None], places[None], seqlen, seqlen)


def grid(strengths: torch.Tensor, columns: tuple[str, ...] = ()) -> Iterator[str]:
    """Cells of queries by keys, the more opaque the stronger in [0, 1], with words at both axes.

    Args:
        columns: names of columns that stand before the keys.
    """
    rows, first = len(strengths), len(columns)
    cells: dict[tuple[str, float], list] = {}
    for row, values in enumerate(strengths.tolist()):
        for column, strength in enumerate(values):
            left = LEFT + CELL * column + (4 if column >= first > 0 else 0)
            box = (left, TOP + CELL * row, CELL - 1, CELL - 1)
            colour = svg.THIRD if column < first else svg.MAIN if strength else svg.FAINT
            cells.setdefault((colour, round(strength, 2) or 0.15), []).append(box)
    for (colour, opacity), corners in sorted(cells.items()):
        yield svg.boxes(corners, colour, opacity)
    yield svg.text(LEFT + CELL * first + (4 if first else 0), TOP - 7, "keys &#8594;")
    for column, words in enumerate(columns):
        yield svg.text(LEFT + CELL * column + 5, TOP + CELL * rows + 13, words, "middle", 10)
    yield f"<g transform='translate({LEFT - 7} {TOP}) rotate(-90)'>"
    yield svg.text(0, 0, "&#8592; queries", "end") + "</g>"


def grid_picture(title: str, strengths: torch.Tensor, columns: tuple[str, ...] = ()) -> str:
    rows, keys = strengths.shape
    width, height = LEFT + CELL * keys + 10, TOP + CELL * rows + 18
    return svg.picture(width, height, title, grid(strengths, columns))


def softcap_picture(cap: float) -> str:
    """The curve of a softcap, and the line that it leaves."""
    reach, size = 4 * cap, 240
    logits = torch.linspace(-reach, reach, 81, dtype=torch.float64)
    capped = Softcap(cap).reference(logits, None)

    def place(logit: float, result: float) -> tuple[float, float]:
        return size / 2 * (1 + logit / reach), size / 2 * (1 - result / (2 * cap))

    curve = [place(*pair) for pair in zip(logits.tolist(), capped.tolist(), strict=True)]
    parts = [
        svg.line([(0, size / 2), (size, size / 2)], svg.FAINT, 0.5),
        svg.line([(size / 2, 0), (size / 2, size)], svg.FAINT, 0.5),
        *(svg.line([place(-reach, y), place(reach, y)], svg.FAINT, 0.5) for y in (-cap, cap)),
        svg.line([place(-2 * cap, -2 * cap), place(2 * cap, 2 * cap)], svg.SECOND),
        svg.line(curve, svg.MAIN, 2.5),
        svg.text(4, place(0, cap)[1] - 5, f"{cap:g}"),
        svg.text(size / 2 + 6, place(0, -cap)[1] + 15, f"{-cap:g}"),
        svg.text(size - 2, size / 2 + 15, f"logit {reach:g}", "end"),
    ]
    return svg.picture(size, size, "Softcap", parts)


def pictures() -> dict[str, str]:
    """The pictures of the page, by the names of their files."""
    after = run_page()
    drawn = {}
    for title in MASKS:
        name = title.removeprefix("Sliding ").lower().replace(" ", "-")
        visible = (after[title]["out"][0, :, 0] > 0).double()
        drawn[f"{name}.svg"] = grid_picture(title, visible)
    seqlen = len(visible)
    slopes = after["ALiBi"]["slopes"]
    zeros = torch.zeros(seqlen, seqlen, dtype=torch.float64)
    bias = Alibi(slopes, is_causal=True).reference(zeros, positions(seqlen)).tril()
    shade = (1 + 0.85 * bias / (slopes[0] * seqlen)).tril()
    drawn["alibi.svg"] = grid_picture("ALiBi", shade)
    drawn["softcap.svg"] = softcap_picture(after["Softcap"]["cap"])
    sinks, out, lse = (after["Sinks"][name] for name in ("sinks", "out", "lse"))
    of_sink = (sinks[0] - lse[0, 0]).exp()[:, None]
    weights = torch.cat([of_sink, out[0, :, 0].float()], dim=1)
    drawn["sinks.svg"] = grid_picture("Sinks", (weights / weights.max()).sqrt(), ("sink",))
    return drawn


def main() -> None:
    for name, drawn in pictures().items():
        (IMAGES / name).write_text(drawn)


if __name__ == "__main__":
    main()
