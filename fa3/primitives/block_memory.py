"""K or V blocks in shared memory, as loaded and for WGMMAs."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float8E4M3FN, Int64
from cutlass.utils import hopper_helpers as sm90

from fa3.primitives.fp8_blocks import CONVERTED, ConvertedPipeline
from fa3.primitives.pipelines import thread_pipeline
from fa3.primitives.shared_memory import LayoutEnum
from fa3.primitives.wgmma import ROWS


class BlockRing(NamedTuple):
    """Stages of blocks of K or V in shared memory, with pipelines."""

    blocks: cute.Tensor  # (keys, columns, stages) for WGMMAs; with products in FP8, V^T
    pipe: object  # to the MMA warpgroups
    # loaded, loading: blocks as they are loaded, and the pipeline from the producer; the same
    # unless warps convert blocks.
    loaded: cute.Tensor
    loading: object


class BlockFields(NamedTuple):
    """Types of fields of shared memory, for blocks and loaded blocks.
    Loaded blocks, and their mbarriers, are empty unless warps convert blocks."""

    blocks: Any
    barriers: Any
    loaded: Any
    loaded_barriers: Any


@dataclass(frozen=True)
class BlockMemory:
    """The shared memory of blocks of K or V, perhaps converted."""

    # layout, dtype: of blocks (keys, columns, stages) for WGMMAs, or (columns, keys, stages).
    layout: cute.ComposedLayout
    dtype: type
    # loaded_layout, loaded_type: of blocks as they are loaded; the same unless warps convert them.
    loaded_layout: cute.ComposedLayout
    loaded_type: type
    converters: int = 0  # warps that convert blocks

    @classmethod
    def of(cls, tile_n: int, columns: int, dtype: type, stages: int) -> "BlockMemory":
        """Blocks of keys that WGMMAs read as loaded, swizzled for both."""
        shape = ROWS, tile_n, columns
        layout = sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, shape, dtype, stages)
        return cls(layout, dtype, layout, dtype)

    @classmethod
    def converted(
        cls, tile_n: int, columns: int, loaded_stages: int, stages: int, warps: int
    ) -> "BlockMemory":
        """Blocks of an FP8 cache that a few warps convert."""
        loaded = cls.of(tile_n, columns, Float8E4M3FN, loaded_stages)
        converted = cls.of(tile_n, columns, CONVERTED, stages)
        layout, kind = loaded.layout, loaded.dtype
        return replace(converted, loaded_layout=layout, loaded_type=kind, converters=warps)

    def transposed(self, tile_n: int, columns: int) -> "BlockMemory":
        """The same blocks in V^T; as loaded they are (keys, columns, stages) there, too."""
        sizes = self.dtype, self.stages
        by_keys = sm90.make_smem_layout_b(LayoutEnum.COL_MAJOR, (ROWS, tile_n, columns), *sizes)
        return replace(self.of(columns, tile_n, *sizes), loaded_layout=by_keys)

    @property
    def stages(self) -> int:
        """Blocks that WGMMAs can read."""
        return cute.size(self.layout, mode=[2])

    @property
    def fields(self) -> BlockFields:
        """Types of the fields that the blocks need."""
        loaded = self.converters > 0
        loaded_stages = loaded * cute.size(self.loaded_layout, mode=[2])
        loaded_elements = loaded * cute.cosize(self.loaded_layout)
        return BlockFields(
            smem_field(self.dtype, cute.cosize(self.layout)),
            cute.struct.MemRange[Int64, 2 * self.stages],
            smem_field(self.loaded_type, loaded_elements),
            cute.struct.MemRange[Int64, 2 * loaded_stages],
        )

    def ring(self, storage, name: str, new_pipeline: Callable, readers: int) -> BlockRing:
        """The blocks of `name` in shared memory, read by so many warps.

        Args:
            storage: has the `fields` as NAME, barriers_NAME, loaded_NAME and loaded_barriers_NAME.
            new_pipeline: (barriers, type, layout, readers) -> the producer's pipeline.
        """
        kinds = "", "barriers_", "loaded_", "loaded_barriers_"
        fields = BlockFields(*(getattr(storage, kind + name) for kind in kinds))
        kind, layout = self.loaded_type, self.loaded_layout
        blocks = fields.blocks.get_tensor(self.layout.outer, swizzle=self.layout.inner)
        field = fields.loaded if self.converters else fields.blocks
        loaded = field.get_tensor(layout.outer, swizzle=layout.inner)
        if not self.converters:
            pipe = new_pipeline(fields.barriers, kind, layout, readers)
            return BlockRing(blocks, pipe, loaded, pipe)
        loading = new_pipeline(fields.loaded_barriers, kind, layout, self.converters)
        pipe = thread_pipeline(fields.barriers, self.stages, self.converters, readers)
        # The DSL's `create` makes no subclasses.
        return BlockRing(blocks, ConvertedPipeline(**vars(pipe)), loaded, loading)


def smem_field(dtype: type, elements: int):
    """A shared memory field for so many elements, aligned as swizzles need."""
    return cute.struct.Align[cute.struct.MemRange[dtype, elements], 1024]
