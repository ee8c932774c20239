"""Measure what scores, masks and sinks cost: `python -m benchmarks.bench_scores`.

In the cells of the group "cost" each modifier alone stands beside the plain kernel; in those of
"peers" the plain kernel beside peers that run the same mask. All are timed in the same rounds, and
the figure is a call's time over that of the plain kernel, paired inside of each round.
"""

import argparse
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
from rich.console import Console

import fa3
from benchmarks import harness, peers, results, runs
from benchmarks.harness import Errors, Reference
from benchmarks.peers import Call, Provider, Tensors
from benchmarks.ratios import paired_speedup
from benchmarks.results import Measurement
from benchmarks.runs import Run, Timed, Verdict
from benchmarks.shapes import Cell, named, window_size
from docs.examples.documents import Documents
from docs.examples.prefix_lm import PrefixLM
from docs.examples.relative_bias import RelativeBias
from fa3.scores.scores import Alibi, Softcap

CSV_NAME = "scores.csv"
PLAIN = "fa3"
PEERS = ["fa3-cpp", "fa4-cute", "cudnn"]
K = 1024

COST_CELLS = [
    replace(named("cost", 4, (4 * K, 4 * K), (16, 16), (d, d), causal), name=f"cost-d{d}-{mask}-4k")
    for d, (mask, causal) in product((128, 64), (("full", False), ("causal", True)))
]

PEER_CELLS = [
    *(named("peers", 1, (16 * K, 16 * K), (16, 16), window_left=window) for window in (K, 4 * K)),
    named("peers-d192.128", 4, (4 * K, 4 * K), (16, 16), (192, 128)),
    *(named("peers-d96", 4, (s, s), (21, 21), (96, 96)) for s in (K, 4 * K)),
    *(
        replace(cell, softcap=50.0)
        for window in (-1, 4 * K)
        for cell in [named("gemma2-9b", 1, (8 * K, 8 * K), (16, 8), (256, 256), window_left=window)]
    ),
]

Make = Callable[[Cell, torch.device], dict]
"""Makes arguments of `fa3.flash_attn_func` for a cell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRow(Measurement):
    """A provider beside the plain kernel.

    Fields:
        vs_plain: its time over that of the plain kernel, paired; above 1 is slower.
    """

    vs_plain: float | None = None
    vs_plain_q1: float | None = None
    vs_plain_q3: float | None = None


def softcap(cell: Cell, device: torch.device) -> dict:
    return {"softcap": 5.0}


def alibi(cell: Cell, device: torch.device) -> dict:
    """The slopes of Press et al.: 2^(-8 h / heads) for h from 1."""
    heads = torch.arange(1, cell.heads_q + 1, device=device)
    return {"alibi_slopes": 2.0 ** (-8.0 * heads / cell.heads_q)}


def sinks(cell: Cell, device: torch.device) -> dict:
    return {"sinks": torch.linspace(4, 6, cell.heads_q, device=device)}


def window(cell: Cell, device: torch.device) -> dict:
    """A window as wide as the sequence, less one key: all that it costs to look."""
    return {"window_size": (cell.seqlen_k - 2, 0 if cell.causal else cell.seqlen_q - 2)}


def relative(cell: Cell, device: torch.device) -> dict:
    table = torch.linspace(-1, 1, 257, device=device).expand(cell.heads_q, -1)
    return {"score": RelativeBias(table, reach=128)}


def documents(cell: Cell, device: torch.device) -> dict:
    """Four documents of equal length."""
    ids = (torch.arange(cell.seqlen_k, device=device) * 4 // cell.seqlen_k).int()
    return {"mask": Documents(ids.expand(cell.batch, -1), ids.expand(cell.batch, -1))}


def prefix(cell: Cell, device: torch.device) -> dict:
    """No prefix, which leaves the causal mask."""
    return {"mask": PrefixLM(torch.zeros(cell.batch, dtype=torch.int32, device=device))}


BUILT_IN: dict[str, list[Make]] = {
    PLAIN: [],
    "window": [window],
    "softcap": [softcap],
    "alibi": [alibi],
    "sinks": [sinks],
    "softcap+alibi+sinks": [softcap, alibi, sinks],
}
"""By name, what is added to the plain kernel."""

FUNCTIONS: dict[str, list[Make]] = {
    "score": [relative],
    "documents": [documents],
    "prefix": [prefix],
}
"""The examples of the documentation, whose kernels are compiled in this process."""


class Modified:
    """Ours with modifiers."""

    version = fa3.__version__
    is_peer = False

    def __init__(self, name: str, makes: list[Make]) -> None:
        self.name = name
        self.makes = makes

    def supports(self, cell: Cell) -> str | None:
        return None

    def arguments(self, cell: Cell, device: torch.device) -> dict:
        """What the cell and the modifiers ask of `fa3.flash_attn_func`."""
        arguments = {"causal": cell.causal, "window_size": window_size(cell)}
        if cell.softcap:
            arguments["softcap"] = cell.softcap
        for make in self.makes:
            arguments |= make(cell, device)
        return arguments

    def prepare(self, cell: Cell, tensors: Tensors) -> dict[str, Call]:
        arguments = self.arguments(cell, tensors.q.device)
        return {"": functools.partial(fa3.flash_attn_func, *tensors, **arguments)}


class ModifiedReference(Reference):
    """What a modified call should give, on some heads."""

    def __init__(self, cell: Cell, tensors: Tensors, arguments: dict) -> None:
        self.heads = harness.checked_heads(cell)
        self.expected = []
        largest = 0.0
        for batch, head in self.heads:
            head_kv = head // (cell.heads_q // cell.heads_kv)
            q, k, v = (
                tensor[batch, :, h]
                for tensor, h in zip(tensors, (head, head_kv, head_kv), strict=True)
            )
            exact, rounded = (
                attend_head(cell, arguments, batch, head, *(t.to(dtype) for t in (q, k, v)))
                for dtype in (torch.float32, q.dtype)
            )
            largest = max(largest, (rounded - exact).abs().max().item())
            self.expected.append(exact)
        self.allowed = harness.ERROR_FACTOR * largest + harness.ERROR_FLOOR


def attend_head(
    cell: Cell, arguments: dict, batch: int, head: int, q: torch.Tensor, k, v
) -> torch.Tensor:
    """Attention of one head, both products in the dtype of q, what is between them in float32."""
    scores: list[fa3.Score] = []
    if "softcap" in arguments:
        scores.append(Softcap(arguments["softcap"]))
    if "alibi_slopes" in arguments:
        scores.append(Alibi(arguments["alibi_slopes"], cell.causal))
    if "score" in arguments:
        scores.append(arguments["score"])
    left, right = arguments["window_size"]
    windowed = replace(cell, window_left=left)
    parts = []
    for first in range(0, cell.seqlen_q, harness.REFERENCE_ROWS):
        rows = torch.arange(
            first, min(first + harness.REFERENCE_ROWS, cell.seqlen_q), device=q.device
        )
        keys = torch.arange(cell.seqlen_k, device=q.device)
        at = fa3.Position(batch, head, rows[:, None], keys, cell.seqlen_q, cell.seqlen_k)
        logits = (q[rows] @ k.T).float() * cell.head_dim**-0.5
        for score in scores:
            logits = score.reference(logits, at)
        hidden = harness.hidden(windowed, rows)
        if right > 0:
            hidden = hidden | (keys > rows[:, None] + cell.seqlen_k - cell.seqlen_q + right)
        if "mask" in arguments:
            hidden = hidden | ~arguments["mask"].reference(at)
        logits.masked_fill_(hidden, -torch.inf)
        if "sinks" in arguments:
            sink = arguments["sinks"][head].float().expand(len(rows), 1)
            logits = torch.cat([logits, sink], dim=1)
        probabilities = logits.softmax(-1)[:, : cell.seqlen_k]
        parts.append(probabilities.to(q.dtype) @ v)
    return torch.cat(parts)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bench_scores",
        description="Measure what scores, masks and sinks cost over the plain kernel.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    runs.add_options(parser)
    return parser.parse_args(arguments)


def providers_of(cell: Cell, found: list[Provider], quick: bool) -> list[Provider]:
    """Who is measured on a cell, the plain kernel first.

    A quick run leaves functions of the user's to one cell: each takes seconds to compile.
    """
    if cell in PEER_CELLS:
        return [Modified(PLAIN, BUILT_IN[PLAIN]), *found]
    with_functions = not quick or (cell.head_dim == 128 and cell.causal)
    makes = BUILT_IN | FUNCTIONS if with_functions else BUILT_IN
    return [Modified(name, added) for name, added in makes.items()]


def check_cell(run: Run, job: runs.Job) -> dict[str, Verdict]:
    """Check a cell for every provider, each against what it is asked for."""
    (tensors,) = harness.draw_inputs(job.cell, run.data, sets=1)
    device = tensors.q.device
    plain = Modified(PLAIN, BUILT_IN[PLAIN])

    def check(provider: Provider) -> Errors:
        asked = provider if isinstance(provider, Modified) else plain
        reference = ModifiedReference(job.cell, tensors, asked.arguments(job.cell, device))
        return harness.check_provider(provider, job.cell, tensors, reference)

    return runs.check_providers(job, check)


def make_rows(timed: Timed) -> list[ScoreRow]:
    """Turn the blocks of one cell and regime into rows, one for every provider."""
    rows = []
    for provider in timed.job.providers:
        row = ScoreRow(**timed.columns(provider))
        if row.us and PLAIN in timed.blocks:
            ratio = paired_speedup(timed.times(PLAIN), timed.times(provider.name))
            row = replace(row, vs_plain=ratio.median, vs_plain_q1=ratio.q1, vs_plain_q3=ratio.q3)
        rows.append(row)
    return rows


def summary_line(rows: Sequence[ScoreRow]) -> str:
    """One line on a cell and regime that is done."""
    parts = [f"{row.provider} {row.vs_plain:.3f}" for row in rows if row.vs_plain]
    return f"{rows[0].cell} {rows[0].regime}: " + ", ".join(parts) + runs.clock_text(rows)


def markdown(rows: Sequence[ScoreRow]) -> str:
    """A table of the rows of one group and regime: a line for each cell."""
    names = [name for name in dict.fromkeys(row.provider for row in rows) if name != PLAIN]
    by_cell: dict[str, dict[str, ScoreRow]] = {}
    for row in rows:
        by_cell.setdefault(row.cell, {})[row.provider] = row
    lines = [
        f"| cell | {PLAIN}, us (TFLOP/s) | {' | '.join(names)} |",
        "|---" * (2 + len(names)) + "|",
    ]
    for cell, found in by_cell.items():
        plain = found.get(PLAIN)
        first = f"{plain.us:.1f} ({plain.tflops:.0f})" if plain and plain.us else ""
        cells = (ratio_text(found.get(name)) for name in names)
        lines.append(f"| {cell} | {first} | {' | '.join(cells)} |")
    return "\n".join(lines)


def ratio_text(row: ScoreRow | None) -> str:
    """A row's time over that of the plain kernel, with quartiles."""
    if row is None:
        return ""
    if row.vs_plain is None:
        return row.status
    return f"{row.vs_plain:.3f} ({row.vs_plain_q1:.3f}-{row.vs_plain_q3:.3f})"


def print_report(console: Console, rows: Iterable[ScoreRow]) -> None:
    """Print a table for each regime and group."""
    tables: dict[tuple[str, str], list[ScoreRow]] = {}
    for row in rows:
        tables.setdefault((row.regime, "peers" if row.group != "cost" else "cost"), []).append(row)
    for (regime, group), found in tables.items():
        console.print(f"\n{regime}, {group}: time over that of {PLAIN}\n")
        console.print(markdown(found), markup=False, highlight=False, soft_wrap=True)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_arguments(arguments)
    console = runs.make_console()
    cells = runs.with_names_like(COST_CELLS + PEER_CELLS, options.cells)
    if options.list:
        console.print(runs.cells_listing(cells))
        return
    runs.need_gpu()
    found, missing = peers.find(PEERS)
    run = runs.open_run(options, console, CSV_NAME, found, missing)
    done = results.read(run.csv, ScoreRow) if options.resume else []
    jobs = runs.find_jobs(
        cells,
        runs.chosen_regimes(options),
        lambda cell: providers_of(cell, found, options.quick),
        options.data,
        done,
    )
    built_in = ((p, job.cell) for job in jobs for p in job.providers if p.name in BUILT_IN)
    runs.compile_all(built_in, console)
    for job in jobs:
        if not run.has_time_for(0):
            console.print(f"left out: {job.cell.name}")
            continue
        verdicts = check_cell(run, job)
        runs.report_failures(console, job.cell, verdicts)
        runs.measure_and_keep(run, job, verdicts, make_rows, summary_line)
    names = [cell.name for cell in cells]
    rows = [row for row in results.read(run.csv, ScoreRow) if row.cell in names]
    print_report(console, sorted(rows, key=lambda row: names.index(row.cell)))
    console.print(run.csv)


if __name__ == "__main__":
    main()
