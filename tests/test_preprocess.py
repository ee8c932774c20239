"""What the lanes of a warp make of their rows: each row's statistics once, with all of its columns.

The lanes are threads here, which run the kernel's code on plain numbers; a shuffle is a meeting.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import FunctionType, SimpleNamespace

import cutlass
import cutlass.cute as cute
import numpy as np
import pytest

from fa3.kernels import backward_preprocess
from fa3.kernels.backward_launch import BackwardConfig
from fa3.kernels.backward_preprocess import (
    PREPROCESS_THREADS,
    TilePreprocess,
    lanes_of_row,
    warps_of_tile,
)
from fa3.primitives.vectors import VECTOR
from fa3.primitives.wgmma import WARP
from fa3.problem import AttentionSpec
from fa3.schedules import Tile
from fa3.scores.masks import Band

JITTED = TilePreprocess.totals_of_rows.__wrapped__
TOTALS_OF_ROWS = FunctionType(JITTED.__code__, JITTED.__globals__)
"""With the code as it is written, taken before any test runs: the DSL puts its own in the place of
it when it first compiles the function."""


class Vectors(np.ndarray):
    """What a lane has loaded, (8, rows, 2), or a vector of it."""

    def __getitem__(self, at):
        return super().__getitem__(tuple(slice(None) if n is None else n for n in at))

    def load(self):
        return self

    def to(self, dtype):
        return self

    def reduce(self, *how, **named):
        return float(self.sum())


class Lanes:
    """The lanes of a warp."""

    def __init__(self, monkeypatch, pool: ThreadPoolExecutor):
        self.pool = pool
        self.own, self.given = threading.local(), [0.0] * WARP
        self.barrier = threading.Barrier(WARP, timeout=60)
        monkeypatch.setattr(cute.arch, "lane_idx", lambda: self.own.lane)
        monkeypatch.setattr(cute.arch, "shuffle_sync_bfly", self.shuffle)
        monkeypatch.setattr(cutlass, "range_constexpr", range)
        monkeypatch.setattr(backward_preprocess, "Float32", float)

    def shuffle(self, number: float, offset: int) -> float:
        self.given[self.own.lane] = number
        self.barrier.wait()
        got = self.given[self.own.lane ^ offset]
        self.barrier.wait()
        return got

    def run(self, warp: int, function) -> list:
        """What a function of a thread's number gives in each lane of a warp."""

        def in_lane(lane: int):
            self.own.lane = lane
            return function(warp * WARP + lane)

        return list(self.pool.map(in_lane, range(WARP)))


@pytest.fixture(scope="module")
def pool():
    with ThreadPoolExecutor(WARP) as threads:
        yield threads


@pytest.mark.parametrize("tile_m", [64, 128])
@pytest.mark.parametrize("head_dim_v", [8, 16, 24, 40, 64, 96, 136, 256])
def test_each_row_has_its_statistics_once(head_dim_v, tile_m, monkeypatch, pool):
    spec, config = AttentionSpec("bfloat16", 64, head_dim_v, Band()), BackwardConfig(tile_m, 128)
    lanes, own = Lanes(monkeypatch, pool), SimpleNamespace(tile=Tile(0, 0, 0))
    products = np.random.default_rng(0).integers(0, 100, (tile_m, head_dim_v))
    for warps in {warps_of_tile(spec, tile_m), PREPROCESS_THREADS // WARP}:
        assert tile_m % warps == 0
        of_row = lanes_of_row(spec, tile_m // warps)
        count = tile_m // warps * of_row // WARP
        monkeypatch.setattr(TilePreprocess, "count", count)

        def statistics(number: int, warps=warps, of_row=of_row, count=count) -> list:
            """(row, sum) of what a lane of the tile's warps writes."""
            warp, lane = divmod(number, WARP)
            vectors = np.ones((VECTOR, count, 2)).view(Vectors)
            begin = TilePreprocess(spec, config, None, warps, vectors, None)
            column = min(lane % of_row * VECTOR, head_dim_v - VECTOR)
            for i in range(count):
                row = begin.query(own, warp, i)
                vectors[:, i, 0] = products[row, column : column + VECTOR]
            totals = TOTALS_OF_ROWS(begin)
            if lane % of_row >= count:
                return []
            rows = [begin.query(own, warp, begin.row_of_lane(i)) for i in range(len(totals))]
            return list(zip(rows, totals, strict=True))

        written = [
            row for warp in range(warps) for rows in lanes.run(warp, statistics) for row in rows
        ]
        assert sorted(written) == list(enumerate(products.sum(1).tolist()))
