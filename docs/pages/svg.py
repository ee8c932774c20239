"""Writes pictures as SVG text, which is the same on every machine and shows what changed in a diff.

Colours stand on a light page and on a dark one.
"""

from collections.abc import Iterable

INK, FAINT = "#7a8794", "#8a97a4"
MAIN, SECOND, THIRD, FOURTH = "#2a9d8f", "#5b8db8", "#d08c46", "#a678b4"
TILE_COLOURS = ("#f4a259", "#e9d985", "#8ac48a", "#2a9d8f", "#1b7a9e", "#3b5a9a")

FONT = "font-family='system-ui, sans-serif'"


def number(value: float) -> str:
    """A coordinate with at most two digits after the point."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def text(x: float, y: float, words: str, anchor: str = "start", size: int = 12) -> str:
    """Words at a point; `anchor` is start, middle or end."""
    place = f"x='{number(x)}' y='{number(y)}' text-anchor='{anchor}' font-size='{size}'"
    return f"<text {place} fill='{INK}'>{words}</text>"


def boxes(
    corners: Iterable[tuple[float, float, float, float]], colour: str, opacity: float = 1.0
) -> str:
    """Rectangles (left, top, width, height) of one colour, as one path."""
    path = "".join(
        f"M{number(x)} {number(y)}h{number(w)}v{number(h)}h{number(-w)}z" for x, y, w, h in corners
    )
    shade = "" if opacity == 1 else f" fill-opacity='{number(opacity)}'"
    return f"<path fill='{colour}'{shade} d='{path}'/>"


def line(points: Iterable[tuple[float, float]], colour: str, width: float = 1.0) -> str:
    """A line through points."""
    path = " ".join(f"{number(x)},{number(y)}" for x, y in points)
    return (
        f"<polyline fill='none' stroke='{colour}' stroke-width='{number(width)}' points='{path}'/>"
    )


def picture(width: float, height: float, title: str, parts: Iterable[str]) -> str:
    """A whole SVG file."""
    size = f"width='{number(width)}' height='{number(height)}'"
    view = f"viewBox='0 0 {number(width)} {number(height)}'"
    head = f"<svg xmlns='http://www.w3.org/2000/svg' {size} {view} role='img' {FONT}>"
    return "\n".join([head, f"<title>{title}</title>", *parts, "</svg>\n"])
