"""Measure attention to a key/value cache beside its peers: `python -m benchmarks.bench_decode`.

Calls are replayed from CUDA graphs that go through sets of caches which together exceed four times
the L2 cache. What a stream of plain reads reaches is measured in the same rounds; the figures are
microseconds, GB/s of the keys and values that the lengths name, and their share of those reads.
"""

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path

from rich.console import Console

from benchmarks import bench_forward, harness, peers, plot, report, runs
from benchmarks.caches import (
    CELLS,
    DEFAULT,
    FP8,
    INVARIANT,
    NAMES,
    OURS,
    PAGE_SIZES,
    PAGED_CELL,
    PEERS,
    READ,
    READ_BYTES,
    CacheReference,
    DecodeCell,
    Ours,
    in_fp8,
    page_name,
    providers_of,
)
from benchmarks.harness import Errors
from benchmarks.peers import Provider
from benchmarks.ratios import Summary, paired_speedup, summarise
from benchmarks.results import Row
from benchmarks.runs import Run, Timed, Verdict
from benchmarks.shapes import K

CSV_NAME = "decode.csv"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRow(Row):
    """A provider beside its peers, ours by default, and a stream of reads; paired by round.

    Fields:
        vs_fa3: speed over ours by default, on a contiguous cache.
        share: GB/s over those of the stream of reads.
    """

    vs_fa3: float | None = None
    vs_fa3_q1: float | None = None
    vs_fa3_q3: float | None = None
    share: float | None = None
    share_q1: float | None = None
    share_q3: float | None = None


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bench_decode",
        description="Measure attention to a key/value cache beside its peers.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    runs.add_row_options(parser, NAMES)
    return parser.parse_args(arguments)


def shrink(cell: DecodeCell) -> DecodeCell:
    """A small cell that runs on the same kernels of ours."""
    queries = min(cell.seqlen_q, 2)
    return replace(
        cell, name="", group="", batch=1, seqlen_q=queries, seqlen_k=K, lengths=(K,)
    )  # fmt: skip


def check_cell(run: Run, job: runs.Job) -> dict[str, Verdict]:
    """Check a cell for every provider that computes attention."""
    (tensors,) = harness.draw_inputs(job.cell, run.data, sets=1)
    reference = CacheReference(job.cell, tensors)

    def check(provider: Provider) -> Errors | None:
        if provider.name == READ.name:
            return None
        if provider.name == FP8:
            held = in_fp8(tensors)
            return harness.check_provider(provider, job.cell, held, CacheReference(job.cell, held))
        return harness.check_provider(provider, job.cell, tensors, reference)

    return runs.check_providers(job, check)


def make_rows(timed: Timed) -> list[DecodeRow]:
    """Turn the blocks of one cell and regime into rows, one for every provider."""
    times = {name: timed.times(name) for name in timed.blocks}
    rows = []
    for provider, row in zip(timed.job.providers, bench_forward.make_rows(timed), strict=True):
        row_times, columns = times.get(row.provider), asdict(row)
        if row_times and row.provider == READ.name:
            columns = timed.columns(provider) | {"gbps": READ_BYTES / row.us / 1e3, "tflops": None}
        elif row_times:
            if DEFAULT in times:
                ratio = paired_speedup(row_times, times[DEFAULT])
                columns |= bench_forward.ratio_columns("vs_fa3", ratio)
            if READ.name in times:
                speed = paired_speedup(row_times, times[READ.name])
                share = Summary(*(x * timed.job.cell.kv_bytes / READ_BYTES for x in speed))
                columns |= bench_forward.ratio_columns("share", share)
        rows.append(DecodeRow(**columns))
    return rows


def summary_line(rows: Sequence[DecodeRow]) -> str:
    """One line on a cell and regime that is done."""
    parts = [f"{row.provider} {row.us:.1f} us ({row.gbps:.0f} GB/s)" for row in rows if row.us]
    return f"{rows[0].cell} {rows[0].regime}: " + ", ".join(parts) + runs.clock_text(rows)


def time_text(row: DecodeRow | None) -> str:
    """Microseconds, GB/s and the share of the stream of reads; or why there are none.

    An FP8 cache has half of the bytes that a cell counts, so only its time is told.
    """
    if row is None or row.us is None:
        return row.status if row else ""
    if row.provider == FP8:
        return f"{row.us:.1f}"
    share = f", {row.share:.0%}" if row.share else ""
    return f"{row.us:.1f} ({row.gbps:.0f}{share})"


def markdown(rows: Sequence[DecodeRow]) -> str:
    """The tables of one regime: every cell beside its peers, then the page sizes."""
    found = {(row.cell, row.provider): row for row in rows}
    cells = [cell for cell in CELLS if any(row.cell == cell.name for row in rows)]
    lines, has_fp8 = [], any(row.provider == FP8 for row in rows)
    for cell in cells:
        ours, invariant, fp8 = (found.get((cell.name, name)) for name in (DEFAULT, INVARIANT, FP8))
        theirs = [time_text(found.get((cell.name, name))) for name in PEERS]
        invariant_ratio = report.column_text(invariant, "vs_fa3")
        fp8_columns = [time_text(fp8), report.column_text(fp8, "vs_fa3")]
        beside = report.best_peer_text(ours), invariant_ratio, *(fp8_columns if has_fp8 else ())
        lines.append([cell.label, time_text(ours), *theirs, *beside])
    header = ["heads q/kv, batch x keys", DEFAULT, *PEERS, "over the best peer", "invariant"]
    header += [FP8, f"over {DEFAULT}"] if has_fp8 else []
    text = report.markdown_table(header, lines)
    lines = []
    for page_size in PAGE_SIZES:
        names = page_name(page_size), page_name(page_size, batch_invariant=True)
        pair = [found.get((PAGED_CELL, name)) for name in names]
        if any(pair):
            paged = ((time_text(row), report.column_text(row, "vs_fa3")) for row in pair)
            lines.append([str(page_size), *chain.from_iterable(paged)])
    if lines:
        header = ["page size", DEFAULT, "over contiguous", "invariant", "over contiguous"]
        text += "\n\n" + report.markdown_table(header, lines)
    return text


def read_text(rows: Iterable[DecodeRow]) -> str:
    """What the streams of reads of one regime reached."""
    reads = [row for row in rows if row.provider == READ.name and row.gbps]
    if not reads:
        return "no stream of reads"
    rates = [row.gbps for row in reads]
    kernels = " or ".join(sorted({f"torch {row.choice}" for row in reads}))
    return (
        f"reads of {READ_BYTES >> 20} MiB by {kernels}: "
        f"{summarise(rates).median:.0f} GB/s ({min(rates):.0f}-{max(rates):.0f})"
    )


def draw(rows: Sequence[DecodeRow], path: Path) -> None:
    """Draw each cell's shares of the stream of reads as bars."""
    names = [DEFAULT, INVARIANT, *PEERS]
    labels = {cell.name: cell.label for cell in CELLS if any(row.cell == cell.name for row in rows)}
    shares = {(row.cell, row.provider): 100 * (row.share or 0) for row in rows}
    plot.draw_bars(labels, names, shares, "GB/s of K and V, % of a stream of reads", path)


def print_report(console: Console, rows: Sequence[DecodeRow], directory: Path) -> None:
    """Print the tables of each regime, and draw it."""
    for regime in dict.fromkeys(row.regime for row in rows):
        chosen = [row for row in rows if row.regime == regime]
        console.print(f"\n{regime}: us (GB/s, share of reads); {read_text(chosen)}\n")
        console.print(markdown(chosen), markup=False, highlight=False, soft_wrap=True)
        for line in report.failures(chosen):
            console.print(line, markup=False, soft_wrap=True)
        path = directory / f"decode-{regime}.png"
        draw(chosen, path)
        console.print(path)


def measure(options: argparse.Namespace, cells: Sequence[DecodeCell], console: Console) -> Path:
    """Measure what is not yet in the results directory; return it."""
    runs.need_gpu()
    wanted = [name for name in PEERS if not options.only or name in options.only]
    found, missing = peers.find(wanted, PEERS)
    run, jobs = runs.open_jobs(
        options, console, CSV_NAME, DecodeRow, cells, [*OURS, *found, READ], missing,
        lambda cell: providers_of(cell, found, options.only),
    )  # fmt: skip
    ours = (
        (one, shrink(job.cell)) for job in jobs for one in job.providers if isinstance(one, Ours)
    )
    runs.compile_all(ours, console)
    left = runs.check_and_measure(run, jobs, make_rows, summary_line, check_cell)
    if left:
        console.print(f"{left} cells left: run the same command again")
    return run.csv.parent


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_arguments(arguments)
    cells = runs.with_names_like(CELLS, options.cells)
    runs.list_or_report(options, cells, measure, CSV_NAME, DecodeRow, print_report)


if __name__ == "__main__":
    main()
