"""Plot results: TFLOP/s over sequence length, a panel per head dimension and mask.

    python -m benchmarks.plot DIR [DIR ...]

Several directories are drawn together (a peer that needs a process of its own has its own); the
pictures go to the first.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.report import is_peer, providers_of
from benchmarks.results import CSV_NAME, OK, Row, read
from benchmarks.shapes import size

PEER_STYLES = {
    "fa3-cpp": ("#0072b2", "s"),
    "fa4-cute": ("#009e73", "^"),
    "cudnn": ("#cc79a7", "D"),
    "tilelang": ("#999999", "v"),
}
OUR_COLOURS = ("#d55e00", "#e69f00", "#8c510a", "#56b4e9", "#000000")


def styles(providers: Sequence[str]) -> dict[str, dict[str, object]]:
    """How each provider's line looks: ours thick, a colour each."""
    ours = [name for name in providers if not is_peer(name)]
    looks = {}
    for name in providers:
        if is_peer(name):
            colour, marker = PEER_STYLES[name]
            looks[name] = {"color": colour, "marker": marker, "linewidth": 1.4, "markersize": 4.5}
        else:
            colour = OUR_COLOURS[ours.index(name) % len(OUR_COLOURS)]
            looks[name] = {
                "color": colour,
                "marker": "o",
                "linewidth": 2.4,
                "markersize": 6,
                "zorder": 3,
            }
    return looks


def draw_panel(axes: Axes, rows: Sequence[Row], looks: dict[str, dict[str, object]]) -> None:
    """Draw one head dimension and mask."""
    for name, look in looks.items():
        line = sorted((row for row in rows if row.provider == name), key=lambda row: row.seqlen_q)
        axes.plot([row.seqlen_q for row in line], [row.tflops for row in line], label=name, **look)
    seqlens = sorted({row.seqlen_q for row in rows})
    for seqlen in seqlens:
        # Ours as numbers, one above the other over the highest line.
        rates = {row.provider: row.tflops for row in rows if row.seqlen_q == seqlen}
        ours = [name for name in looks if name in rates and not is_peer(name)]
        for line, name in enumerate(reversed(ours)):
            axes.annotate(
                f"{rates[name]:.0f}", (seqlen, max(rates.values())), (0, 7 + 9 * line),
                textcoords="offset points", ha="center", fontsize=8, color=looks[name]["color"],
            )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xticks(seqlens, [size(seqlen) for seqlen in seqlens])
    axes.minorticks_off()
    axes.set_ylim(0, 1.12 * max(row.tflops for row in rows))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def draw(rows: Sequence[Row], regime: str, title: str, path: Path) -> bool:
    """Draw the grid cells of one regime to a PNG; False if there are none."""
    rows = [
        row
        for row in rows
        if (row.group, row.regime, row.status, row.data) == ("grid", regime, OK, "normal")
    ]
    if not rows:
        return False
    head_dims = sorted({row.head_dim for row in rows})
    masks = sorted({row.causal for row in rows})
    looks = styles(providers_of(rows))
    figure = Figure(figsize=(1 + 4.2 * len(head_dims), 1 + 3.3 * len(masks)), layout="constrained")
    panels = figure.subplots(len(masks), len(head_dims), squeeze=False)
    for line, causal in zip(panels, masks, strict=True):
        for axes, head_dim in zip(line, head_dims, strict=True):
            chosen = [row for row in rows if (row.head_dim, row.causal) == (head_dim, causal)]
            if not chosen:
                axes.set_axis_off()
                continue
            draw_panel(axes, chosen, looks)
            axes.set_title(f"head_dim {head_dim}, {'causal' if causal else 'full'}", fontsize=11)
        line[0].set_ylabel("TFLOP/s")
    for axes in panels[-1]:
        axes.set_xlabel("sequence length (16k tokens in all)")
    handles, labels = next(
        found for axes in panels.flat if (found := axes.get_legend_handles_labels())[0]
    )
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.suptitle(f"{title}, bf16, {regime}", fontsize=13)
    figure.savefig(path, dpi=150)
    return True


def draw_all(
    rows: Sequence[Row], directory: Path, name: str = "forward", title: str = "Attention forward"
) -> list[Path]:
    """Draw every regime that has grid cells; return the pictures."""
    with mpl.rc_context({"font.size": 10}):
        paths = {
            regime: directory / f"{name}-{regime}.png"
            for regime in dict.fromkeys(row.regime for row in rows)
        }
        return [path for regime, path in paths.items() if draw(rows, regime, title, path)]


def draw_bars(
    labels: dict[str, str],
    providers: Sequence[str],
    values: dict[tuple[str, str], float],
    meaning: str,
    path: Path,
) -> None:
    """Draw a bar for every cell and provider.

    Args:
        labels: what to call each cell.
        values: by cell and provider; there is no bar where there is none.
        meaning: what the values are.
    """
    looks, step = styles(providers), 0.8 / len(providers)
    height = 1.5 + 0.11 * len(labels) * len(providers)
    figure = Figure(figsize=(9, height), layout="constrained")
    axes = figure.subplots()
    for i, name in enumerate(providers):
        places = [place + (i - (len(providers) - 1) / 2) * step for place in range(len(labels))]
        widths = [values.get((cell, name), 0) for cell in labels]
        axes.barh(places, widths, 0.94 * step, label=name, color=looks[name]["color"])
    axes.set_yticks(range(len(labels)), list(labels.values()))
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.set_xlabel(meaning)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=len(providers), frameon=False)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.plot", description=__doc__.split("\n")[0])
    parser.add_argument("directories", nargs="+", type=Path, metavar="DIR")
    directories = parser.parse_args().directories
    # The first directory that has a row wins.
    rows = {
        row.key: row for directory in reversed(directories) for row in read(directory / CSV_NAME)
    }
    for path in draw_all(list(rows.values()), directories[0]):
        print(path)


if __name__ == "__main__":
    main()
