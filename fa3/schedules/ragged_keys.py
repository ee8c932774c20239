"""The schedule of the keys of packed sequences: a table of key tiles, a CTA for each and head.

`fa3.kernels.tile_table` writes the table on the GPU, the backward kernel walks it: sequence by
sequence, as `fa3.schedules.ragged` says, in sections of heads whose Q, dO and dQ fit in L2
together. The GPU starts CTAs in the order of their numbers. How many tiles there are the host does
not know: it launches CTAs for all that the table has room for, and those without one end at once.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from fa3.schedules.order import Planned
from fa3.schedules.ragged import RaggedOrder
from fa3.schedules.segment import Segment, Tile


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


class KeyTileCursor(NamedTuple):
    """The CTA's tile.

    Fields:
        index: its number.
        end: number of all tiles.
        head: key/value head.
        record: a `KeyTileRecord`; anything if `index` is not below `end`.
    """

    index: int
    end: int
    head: int
    record: tuple


@dataclass(frozen=True)
class RaggedKeyTiles(Planned):
    """Each CTA works on the key tile of its number, if there is one, and exits."""

    order: RaggedKeyOrder

    name: ClassVar[str] = "ragged keys"
    is_persistent: ClassVar[bool] = False
    is_ragged: ClassVar[bool] = True

    @classmethod
    def on_device(cls, order: RaggedKeyOrder, num_clusters, state) -> "RaggedKeyTiles":
        return cls(order)

    def first(self, cluster):
        return cluster

    def begin(self, index) -> KeyTileCursor:
        """Ask for the record and for the number of records at once."""
        return KeyTileCursor(index, self.order.num_used, *self.order.tile(index))

    def next(self, cursor: KeyTileCursor) -> KeyTileCursor:
        return cursor._replace(index=cursor.end)

    def is_valid(self, cursor: KeyTileCursor):
        return cursor.index < cursor.end

    def segment(self, cursor: KeyTileCursor) -> Segment:
        record = cursor.record
        tile = Tile(record.m_block, cursor.head, record.batch)
        return Segment(tile, record=record, number=cursor.index)
