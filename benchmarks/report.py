"""Tables of results: for the terminal, and in markdown."""

from collections.abc import Iterable, Sequence
from itertools import product
from typing import NamedTuple

from rich import box
from rich.table import Table

from benchmarks.peers import PROVIDERS
from benchmarks.ratios import Summary, geometric_mean, is_tie, paired_speedup
from benchmarks.results import OK, UNSUPPORTED, Measurement, Row
from benchmarks.shapes import is_decode


class Standing(NamedTuple):
    """How a provider stands against peers over several cells."""

    vs_fa3_cpp: float
    vs_best_peer: float
    wins: int
    ties: int
    losses: int


def is_peer(provider: str) -> bool:
    return provider in PROVIDERS and PROVIDERS[provider].is_peer


def providers_of(rows: Iterable[Row]) -> list[str]:
    """The providers in rows: ours, variants of ours, then peers."""
    known = list(PROVIDERS)

    def place(name: str) -> tuple[bool, int]:
        return is_peer(name), known.index(name) if name in known else len(known)

    return sorted(dict.fromkeys(row.provider for row in rows), key=place)


def standing(rows: Iterable[Row]) -> Standing:
    """Sum up one provider's rows; wins and losses are against the best peer of each cell."""
    rows = [row for row in rows if row.status == OK]
    against_best = [row.vs_best_peer for row in rows if row.vs_best_peer]
    ties = sum(is_tie(ratio) for ratio in against_best)
    wins = sum(ratio > 1 and not is_tie(ratio) for ratio in against_best)
    return Standing(
        geometric_mean(row.vs_fa3_cpp for row in rows if row.vs_fa3_cpp),
        geometric_mean(against_best),
        wins,
        ties,
        len(against_best) - ties - wins,
    )


def rate_text(row: Row | None) -> str:
    """TFLOP/s of a row, or GB/s where few queries read many keys."""
    if row is None:
        return ""
    if row.status == UNSUPPORTED:
        return "[dim]-[/]"
    if row.status != OK:
        return f"[bold red]{row.status}[/]"
    return f"{row.gbps:.0f} GB/s" if is_decode(row.seqlen_q, row.seqlen_k) else f"{row.tflops:.0f}"


def ratio_text(ratio: float | None, q1: float | None, q3: float | None) -> str:
    """A ratio with its quartiles, coloured by who is faster."""
    if ratio is None:
        return ""
    colour = "yellow" if is_tie(ratio) else "green" if ratio > 1 else "red"
    tie = " tie" if is_tie(ratio) else ""
    return f"[{colour}]{ratio:.3f}[/] [dim]{q1:.3f}-{q3:.3f}{tie}[/]"


def cells_table(rows: Sequence[Row], title: str) -> Table:
    """One line per cell: each provider's rate, then each of ours against the peers."""
    providers = providers_of(rows)
    ours = [name for name in providers if not is_peer(name)]
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("cell", no_wrap=True)
    for name in providers:
        table.add_column(name, justify="right", no_wrap=True)
    for name in ours:
        table.add_column(f"{name} / fa3-cpp", no_wrap=True)
        table.add_column(f"{name} / best peer", no_wrap=True)
    by_cell: dict[str, dict[str, Row]] = {}
    for row in rows:
        by_cell.setdefault(row.cell, {})[row.provider] = row
    for cell, found in by_cell.items():
        line = [cell, *(rate_text(found.get(name)) for name in providers)]
        for name in ours:
            row = found.get(name)
            if row is None or row.status != OK:
                line += ["", ""]
                continue
            line.append(ratio_text(row.vs_fa3_cpp, row.vs_fa3_cpp_q1, row.vs_fa3_cpp_q3))
            best = ratio_text(row.vs_best_peer, row.vs_best_peer_q1, row.vs_best_peer_q3)
            line.append(f"{best} {row.best_peer}")
        table.add_row(*line)
    return table


def standings_table(rows: Sequence[Row], title: str) -> Table:
    """Geometric means of ours against the peers, by head dimension and mask over the grid."""
    table = Table(
        "provider", "head_dim", "mask", "cells", title=title, title_justify="left",
        box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0),
    )  # fmt: skip
    for name in ("/ fa3-cpp", "/ best peer", "win-tie-loss"):
        table.add_column(name, justify="right")
    grid = [row for row in rows if row.group == "grid" and row.status == OK]
    head_dims = [*sorted({row.head_dim for row in grid}), None]
    for name in providers_of(grid):
        if is_peer(name):
            continue
        for head_dim, causal in product(head_dims, (False, True, None)):
            chosen = [
                row
                for row in grid
                if row.provider == name
                and head_dim in (None, row.head_dim)
                and causal in (None, row.causal)
            ]
            if not chosen:
                continue
            result = standing(chosen)
            table.add_row(
                name,
                "all" if head_dim is None else str(head_dim),
                {False: "full", True: "causal", None: "all"}[causal],
                str(len(chosen)),
                f"{result.vs_fa3_cpp:.3f}",
                f"{result.vs_best_peer:.3f}",
                f"{result.wins}-{result.ties}-{result.losses}",
            )
    return table


def markdown_table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table in markdown."""
    lines = [header, ["---"] * len(header), *lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def time_text(row: Row | None) -> str:
    """Microseconds and the rate of a row; or why there are none."""
    if row is None or row.us is None:
        return row.status if row else ""
    return f"{row.us:.1f} ({rate_text(row)})"


def speed_text(speed: Summary | None) -> str:
    """A ratio of speeds with its quartiles."""
    if speed is None:
        return ""
    text = f"{speed.median:.2f} ({speed.q1:.2f}-{speed.q3:.2f})"
    return f"{text} tie" if is_tie(speed.median) else text


def column_text(row: Row | None, name: str) -> str:
    """One of a row's ratios with its quartiles."""
    if row is None or getattr(row, name) is None:
        return ""
    return speed_text(Summary(*(getattr(row, f"{name}{end}") for end in ("", "_q1", "_q3"))))


def best_peer_text(row: Row | None) -> str:
    """A row's speed over the fastest peer, and who that is."""
    return f"{column_text(row, 'vs_best_peer')} {row.best_peer}".strip() if row else ""


def speed_over(row: Measurement | None, base: Measurement | None) -> Summary | None:
    """How many times faster a row is than another of the same cell and regime; None if unknown."""
    if not (row and base and row.rounds_us and len(row.rounds_us) == len(base.rounds_us)):
        return None
    return paired_speedup(row.rounds_us, base.rounds_us)


def failures(rows: Iterable[Measurement]) -> list[str]:
    """Who was not timed and why, a line for each reason with its cells."""
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row.status != OK:
            reason = f"{row.provider} {row.status}, {row.reason}"
            reasons.setdefault(reason, []).append(row.cell)
    return [f"{reason}: {', '.join(cells)}" for reason, cells in reasons.items()]
