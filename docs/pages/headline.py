"""Writes the table of speed in README, from the committed records of benchmarks.

python -m docs.pages.headline
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from benchmarks import bench_backward, bench_decode, bench_varlen
from benchmarks.results import CSV_NAME, OK, Row, read
from docs.pages.performance import BACKWARD, DECODE, GRID, NAMES, PACKED, RECORDS, ROOT
from docs.pages.support import table

PAGE = ROOT / "README.md"
TABLE = re.compile(r"^\| workload.*?\n(?!\|)\n?", re.MULTILINE | re.DOTALL)


class Kind(NamedTuple):
    """Records of one kind of call.

    Fields:
        records: the newest first.
        name: of the file in each record.
        rows: the type of its rows.
        regime: "burst" or "steady".
        in_rates: whether the table shows TFLOP/s; otherwise microseconds.
    """

    records: tuple[str, ...]
    name: str
    rows: type[Row]
    regime: str
    in_rates: bool


FORWARD = Kind(GRID, CSV_NAME, Row, "steady", True)
GRADIENTS = Kind(BACKWARD, bench_backward.CSV_NAME, bench_backward.GradientRow, "burst", True)
PACKING = Kind(PACKED, bench_varlen.CSV_NAME, Row, "burst", False)
DECODING = Kind(DECODE, "decode.csv", bench_decode.DecodeRow, "burst", False)

CELLS = (
    ("forward, causal, 4 x 4k, 64", FORWARD, "d64-causal-4096"),
    ("forward, causal, 4 x 4k, 128", FORWARD, "d128-causal-4096"),
    ("forward, causal, 4 x 4k, 256", FORWARD, "d256-causal-4096"),
    ("backward, causal, 4 x 4k, 64", GRADIENTS, "backward-d64-causal-4096"),
    ("backward, causal, 4 x 4k, 128", GRADIENTS, "backward-d128-causal-4096"),
    ("backward, causal, 4 x 4k, 256", GRADIENTS, "backward-d256-causal-4096"),
    ("packed, 500 chat prompts, heads 32/8", PACKING, "chat-500"),
    ("packed, 7 chunks of 512 + 64 decoding, 32/8", PACKING, "chunks-7x512+64x1"),
    ("packed, one chunk of 512 on 32k keys, 8/1", PACKING, "few-512of32k"),
    ("decode, 1 x 8k, 32/8", DECODING, "decode-h32.8-1x1x8k"),
    ("decode, 64 x 8k, 32/8", DECODING, "decode-h32.8-64x1x8k"),
)
"""What the table shows: label, where it is recorded, name of the cell."""


def find(kind: Kind, cell: str) -> tuple[str, dict[str, Row]]:
    """Return the newest record that has a cell, and its rows by provider."""
    for record in kind.records:
        rows = {
            row.provider: row
            for row in read(RECORDS / record / kind.name, kind.rows)
            if (row.cell, row.data, row.regime, row.status) == (cell, "normal", kind.regime, OK)
        }
        if "fa3" in rows:
            return record, rows
    raise LookupError(f"no record has the cell {cell!r}")


def lines() -> Iterator[list[str]]:
    """Yield the lines of the table."""
    for label, kind, cell in CELLS:
        record, rows = find(kind, cell)
        ours, peer = rows["fa3"], rows[rows["fa3"].best_peer]
        gpu, date = record[:4].upper(), record[5:15]
        speeds = [
            f"{row.tflops:.0f} TFLOP/s" if kind.in_rates else f"{row.us:,.1f} us"
            for row in (ours, peer)
        ]
        yield [
            label, speeds[0], speeds[1], NAMES[ours.best_peer], f"{ours.vs_best_peer:.2f}",
            f"{gpu} {date}",
        ]  # fmt: skip


def speed_table() -> str:
    """Return the table."""
    head = ("workload, head size 128 unless said", "fa3", "best peer", "which", "ratio", "measured")
    return table(head, lines())


def page() -> str:
    """Return README as it should be."""
    text, tables = TABLE.subn(lambda _: speed_table() + "\n", PAGE.read_text())
    if tables != 1:
        raise LookupError(f"README must have one table of speed, got {tables}")
    return text


if __name__ == "__main__":
    PAGE.write_text(page())
