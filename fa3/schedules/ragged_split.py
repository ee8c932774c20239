"""Split schedule of packed sequences whose lengths the host knows: tiles cut as `SplitTiles` are.

`fa3.planning.ragged_cuts` cuts where few tiles leave SMs idle. A segment names its tile by the
number that it has in the table of all tiles (`fa3.schedules.ragged`), whose record says the rest.
Both tables were there before the launch.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from fa3.primitives.arithmetic import larger
from fa3.schedules.ragged import RaggedOrder, TileRecord
from fa3.schedules.segment import PackedPart, Segment, Tile
from fa3.schedules.split import SplitTiles


class RaggedSplitCursor(NamedTuple):
    """A CTA's position in the table of segments, the segment there, and what is known of its tile.

    Fields:
        position, index, first_block, end_block, part: of a `SplitCursor`.
        head: query head.
        record: the tile's record; anything at the end.
    """

    position: int
    index: int
    first_block: int
    end_block: int
    part: int
    head: int
    record: TileRecord


@dataclass(frozen=True, eq=False)
class RaggedSplit(SplitTiles):
    """Each CTA has a column of segments in a table, parts of tiles of packed sequences."""

    order: RaggedOrder

    name: ClassVar[str] = "ragged split"
    is_ragged: ClassVar[bool] = True

    def read(self, position) -> RaggedSplitCursor:
        found = super().read(position)
        head, record = self.order.tile(larger(found.index, 0))
        return RaggedSplitCursor(*found, head, record)

    def segment(self, cursor: RaggedSplitCursor) -> Segment:
        record = cursor.record
        return Segment(
            Tile(record.m_block, cursor.head, record.batch), cursor.first_block, cursor.end_block,
            PackedPart(cursor.part), record, cursor.index,
        )  # fmt: skip
