"""The table of results: one row per cell, provider and regime, kept as CSV."""

import csv
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import NamedTuple, TypeVar

CSV_NAME = "forward.csv"

OK = "ok"
UNSUPPORTED = "unsupported"
WRONG = "wrong"
FAILED = "failed"


class Key(NamedTuple):
    """What makes a row the row it is; a later row with the same key replaces it."""

    cell: str
    data: str
    regime: str
    provider: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What one provider did on one cell in one regime. Numbers that were not taken are None.

    Fields:
        data: how the inputs were drawn, see `harness.DATA`.
        choice: the alternative that a provider with several ran as.
        launch: "graph" where a captured CUDA graph was replayed, else "eager".
        status: "ok", "unsupported", "wrong" (not timed) or "failed"; `reason` says why.
        us, us_q1, us_q3: median and quartiles over the rounds of one call's time.
        tflops: credited TFLOP/s. gbps: K and V bytes over time, in GB/s.
        sm_mhz, power_w, throttle: the GPU's clock, power draw and reasons for a lower clock.
        joules: energy of one call.
        max_error, allowed_error: largest difference from float32, and the most that passes.
        rounds_us: one call's time in each round, in order, so that any pair can be recomputed.
    """

    cell: str
    group: str
    data: str
    regime: str
    provider: str
    status: str
    reason: str
    version: str
    choice: str
    launch: str
    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    causal: bool
    window_left: int
    dtype: str
    us: float | None = None
    us_q1: float | None = None
    us_q3: float | None = None
    tflops: float | None = None
    gbps: float | None = None
    sm_mhz: float | None = None
    power_w: float | None = None
    throttle: str = ""
    joules: float | None = None
    max_error: float | None = None
    allowed_error: float | None = None
    rounds_us: tuple[float, ...] = ()

    @property
    def key(self) -> Key:
        return Key(self.cell, self.data, self.regime, self.provider)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row(Measurement):
    """A provider beside its peers.

    Fields:
        vs_fa3_cpp, vs_best_peer: paired speed ratio, above 1 is faster than that peer.
        best_peer: the peer with the shortest median time of this cell and regime.
    """

    vs_fa3_cpp: float | None = None
    vs_fa3_cpp_q1: float | None = None
    vs_fa3_cpp_q3: float | None = None
    best_peer: str = ""
    vs_best_peer: float | None = None
    vs_best_peer_q1: float | None = None
    vs_best_peer_q3: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow(Measurement):
    """A plan beside other plans of the same problem; the provider is the plan's name.

    Fields:
        schedule: its name in `fa3.schedules.SCHEDULES`.
        tile_m ... fixed_reference: the fields of its `Config`; the last is now
            `fixed_row_max` there.
        predicted_us: the cost model's time for this regime when this was measured.
    """

    schedule: str
    tile_m: int
    tile_n: int
    q_stages: int
    kv_stages: int
    cluster_m: int
    own_o: bool
    cluster_h: int
    fixed_reference: bool
    predicted_us: float | None = None


Kind = TypeVar("Kind", bound=Measurement)


def to_text(value: object) -> str:
    """Write one value of a row."""
    if value is None:
        return ""
    if isinstance(value, tuple):
        return ";".join(to_text(item) for item in value)
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def from_text(kind: object, text: str) -> object:
    """Read one value of a row of the given type."""
    if kind == float | None:
        return float(text) if text else None
    if kind == tuple[float, ...]:
        return tuple(float(item) for item in text.split(";") if item)
    if kind is bool:
        return text == "True"
    return kind(text)


def append(path: Path, rows: Sequence[Measurement]) -> None:
    """Add rows of one kind to the file, with its header if it is new, and flush them to disk."""
    if not rows:
        return
    new = not path.exists()
    columns = header_of(type(rows[0])) if new else header(path)
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns)
        if new:
            writer.writeheader()
        for row in rows:
            writer.writerow({name: to_text(value) for name, value in asdict(row).items()})
        file.flush()
        os.fsync(file.fileno())


def header_of(kind: type[Measurement]) -> list[str]:
    """The columns of a new file of such rows."""
    return [field.name for field in fields(kind)]


def header(path: Path) -> list[str]:
    """The columns of a file, in its order."""
    with path.open(newline="") as file:
        return next(csv.reader(file))


def read(path: Path, kind: type[Kind] = Row) -> list[Kind]:
    """Read a file's rows; of several with one key the last counts. No file is no rows."""
    if not path.exists():
        return []
    types = {field.name: field.type for field in fields(kind)}
    with path.open(newline="") as file:
        rows = [
            kind(**{name: from_text(types[name], record[name]) for name in types})
            for record in csv.DictReader(file)
        ]
    return list({row.key: row for row in rows}.values())


def is_done(
    rows: Iterable[Measurement], cell: str, data: str, regime: str, providers: Iterable[str]
) -> bool:
    """Whether every provider has a row of this cell and regime, whatever it says."""
    keys = {row.key for row in rows}
    return all(Key(cell, data, regime, provider) in keys for provider in providers)
