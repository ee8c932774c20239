"""The table of tiles of packed sequences in numpy, which tables of the GPU are compared with."""

from typing import Any, NamedTuple

import numpy as np

from fa3.kernels.tile_table import (
    BLOCKS_OF_ENDS,
    DECODE_TILE_N,
    KEYS_OF_DECODING,
    MORE_BESIDE,
    MOST_BESIDE,
)
from fa3.primitives.ragged_lengths import CacheLengths, RaggedLengths
from fa3.primitives.wgmma import ROWS
from fa3.problem import Window
from fa3.schedules.ragged import CTAS_BESIDE, NUM_RECORDS, RECORD, TABLE_HEADER, TileRecord
from fa3.scores.masks import Band, Sequence


class TableKind(NamedTuple):
    """What a table depends on besides lengths.

    Fields:
        tile_m, tile_n, band: of a `fa3.kernels.tile_table.TileTable`.
        window, short_queries, qhead_per_kvhead, num_ctas: of `TileTableArguments`.
    """

    tile_m: int
    tile_n: int
    band: Band
    window: Window
    short_queries: int
    qhead_per_kvhead: int
    num_ctas: int
    more_beside: float = MORE_BESIDE

    def table(self, queries: RaggedLengths, keys: RaggedLengths | CacheLengths) -> np.ndarray:
        """Return the table, with room for one record at least.

        Sequences are in order of the key blocks of their longest tile, and of their number where
        that is the same. The kernel on the GPU tells fewer amounts of work apart, and puts equal
        ones in any order.
        """
        at = np.arange(queries.num_sequences)
        begin_q, seqlen_q = queries.read(at)
        begin_k, seqlen_k = keys.read(at)
        num_tiles = (seqlen_q + self.tile_m - 1) // self.tile_m
        num_tiles[seqlen_q <= self.short_queries] = 0
        sequence = Sequence(seqlen_q, seqlen_k, self.window)
        # Of the first and of the last tile of each sequence, at once: numpy takes its time by call.
        rows = np.zeros((2, len(at)), np.int64)
        rows[1] = np.maximum(num_tiles - 1, 0) * self.tile_m
        blocks = self.blocks(rows, self.tile_m, self.tile_n, sequence)
        order = np.argsort(-blocks.max(0), kind="stable")
        order = order[num_tiles[order] > 0]
        tiles = num_tiles[order]
        end = np.cumsum(tiles)
        number = int(end[-1]) if len(end) else 0
        owner = np.repeat(order, tiles)
        table = np.zeros(TABLE_HEADER + RECORD * max(number, 1), np.int32)
        records = table[TABLE_HEADER:].reshape(-1, RECORD)[:number].T
        left = np.repeat(end, tiles) - 1 - np.arange(number)
        owner_values = (
            values[owner] for values in (begin_q, seqlen_q, begin_k, seqlen_k, num_tiles)
        )
        # In the order of `TileRecord`, which has a word less than its place.
        for row, values in zip(records, (left, owner, *owner_values), strict=False):
            row[:] = values
        table[NUM_RECORDS] = number
        table[CTAS_BESIDE] = self.ctas_beside(num_tiles, seqlen_q, seqlen_k, blocks)
        return table

    def blocks(self, row: np.ndarray, num_rows, tile_n: int, sequence: Sequence) -> np.ndarray:
        """Return how many key blocks rows touch, sequence by sequence."""
        found = self.band.key_blocks(row, num_rows, tile_n, sequence)
        return np.broadcast_to(found.end - found.begin, row.shape)

    def ctas_beside(
        self, num_tiles: np.ndarray, seqlen_q: Any, seqlen_k: Any, blocks: np.ndarray
    ) -> int:
        """Return the CTAs of the decode kernel, as `DecodeShare.ctas_beside` does.

        Args:
            blocks: of the first and of the last tile of each sequence.
        """
        is_short = (num_tiles == 0) & (seqlen_q > 0)
        if not is_short.any():
            return 0
        ratio = self.qhead_per_kvhead
        long = float((num_tiles * ratio * (blocks.sum(0) / 2 + BLOCKS_OF_ENDS)).sum())
        short = self.short_work(seqlen_q[is_short], seqlen_k[is_short])
        share = short / max(long + short, 1.0)
        if MORE_BESIDE * share >= MOST_BESIDE:
            return self.num_ctas
        return int(self.num_ctas * min(self.more_beside * share, MOST_BESIDE)) + 1

    def short_work(self, seqlen_q: np.ndarray, seqlen_k: np.ndarray) -> float:
        """Return the work of these sequences, which are the decode kernel's, for each key/value
        head, in key blocks of the forward kernel."""
        row_blocks = (seqlen_q * self.qhead_per_kvhead + ROWS - 1) // ROWS
        sequence = Sequence(seqlen_q, seqlen_k, self.window)
        read = self.blocks(0 * row_blocks, seqlen_q, DECODE_TILE_N, sequence)
        return float((row_blocks * read).sum()) * (KEYS_OF_DECODING / self.tile_n)


def records_of(table: np.ndarray) -> list[TileRecord]:
    """Return the records of a table."""
    words = table[TABLE_HEADER:].reshape(-1, RECORD)[: table[NUM_RECORDS]].tolist()
    return [TileRecord(*one[: len(TileRecord._fields)]) for one in words]
