"""The schedule of the keys of packed sequences: a table of key tiles, which CTAs take in order.

`fa3.kernels.tile_table` writes the table on the GPU, the backward kernel walks it: sequence by
sequence, as `fa3.schedules.ragged` says, in sections of heads whose Q, dO and dQ fit in L2
together.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from cutlass import Int32

from fa3.schedules.dynamic import SLOTS
from fa3.schedules.ragged import (
    ProducerCursor,
    RaggedCursor,
    RaggedOrder,
    RaggedProducer,
    RaggedTiles,
)


class KeyTileRecord(NamedTuple):
    """A tile of keys of a packed sequence, for every key/value head.

    Fields:
        m_block, batch: the tile: `m_block` counts tiles of keys inside the sequence `batch`.
        begin_q, seqlen_q: the sequence's first row in q, and its number of queries.
        begin_k, seqlen_k: the sequence's first row in k and v, and its number of keys.
        num_m_blocks: tiles of the sequence.
        owned_k: its rows in k and v, also those that are not used.
    """

    m_block: int
    batch: int
    begin_q: int
    seqlen_q: int
    begin_k: int
    seqlen_k: int
    num_m_blocks: int
    owned_k: int


@dataclass(frozen=True)
class RaggedKeyOrder(RaggedOrder):
    """Numbers the key tiles of packed sequences; `heads` are those of keys."""

    record_type: ClassVar[type] = KeyTileRecord

    def walked(self, record: KeyTileRecord):
        return record.seqlen_q


@dataclass(frozen=True)
class RaggedKeyTiles(RaggedTiles):
    """Persistent CTAs take key tiles of packed sequences from a table in device memory."""

    order: RaggedKeyOrder

    name: ClassVar[str] = "ragged keys"
    told: ClassVar[int] = 12
    """The number, the head, the whole record, and two to spare: a multiple of 4."""

    shared_words: ClassVar[int] = (2 + told // 2) * SLOTS

    @property
    def num_given(self):
        """None: CTAs also ask for their first tile, see `fa3.schedules.dynamic.InTurn`."""
        return 0

    def begin(self, cursor: RaggedCursor) -> RaggedCursor:
        return self.next(cursor._replace(end=self.order.num_used))

    def for_producer(self) -> "RaggedKeyProducer":
        return RaggedKeyProducer(**vars(self))


@dataclass(frozen=True)
class RaggedKeyProducer(RaggedKeyTiles, RaggedProducer):
    """`RaggedKeyTiles` as the producer warp walks it."""

    asks_early: ClassVar[bool] = False
    """Sums in a fixed order wait for tiles with lower numbers."""

    def begin(self, cursor: RaggedCursor) -> ProducerCursor:
        return self.next(ProducerCursor(cursor._replace(end=self.order.num_used), Int32(0)))
