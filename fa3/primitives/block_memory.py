"""Blocks of K or of V in shared memory, as they are loaded and as WGMMAs read them."""

from dataclasses import dataclass, replace

import cutlass.cute as cute
from cutlass import Float8E4M3FN
from cutlass.utils import hopper_helpers as sm90

from fa3.primitives.fp8_blocks import CONVERTED, ConvertedPipeline
from fa3.primitives.shared_memory import LayoutEnum
from fa3.primitives.wgmma import ROWS


@dataclass(frozen=True)
class BlockMemory:
    """The shared memory of blocks of K or of V, which warps may rewrite for WGMMAs."""

    # layout, dtype: of blocks (keys, columns, stages) for WGMMAs, or (columns, keys, stages).
    layout: cute.ComposedLayout
    dtype: type
    # loaded_layout, loaded_type: of blocks as they are loaded; the same unless warps rewrite them.
    loaded_layout: cute.ComposedLayout
    loaded_type: type
    rewriters: int = 0  # warps that rewrite blocks

    @classmethod
    def of(cls, tile_n: int, columns: int, dtype: type, stages: int) -> "BlockMemory":
        """Blocks of keys that WGMMAs read as they are loaded; swizzled for them and TMA."""
        shape = ROWS, tile_n, columns
        layout = sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, shape, dtype, stages)
        return cls(layout, dtype, layout, dtype)

    @classmethod
    def converted(
        cls, tile_n: int, columns: int, loaded_stages: int, stages: int, warps: int
    ) -> "BlockMemory":
        """Blocks of an FP8 cache that a few warps convert."""
        loaded = cls.of(tile_n, columns, Float8E4M3FN, loaded_stages)
        return cls.of(tile_n, columns, CONVERTED, stages).rewritten(loaded, warps)

    def rewritten(self, loaded: "BlockMemory", warps: int) -> "BlockMemory":
        """These blocks, made by a few warps of other ones, which are loaded."""
        layout, kind = loaded.layout, loaded.dtype
        return replace(self, loaded_layout=layout, loaded_type=kind, rewriters=warps)

    @property
    def stages(self) -> int:
        """Blocks that WGMMAs can read."""
        return cute.size(self.layout, mode=[2])

    @property
    def elements(self) -> int:
        """Elements of all blocks for WGMMAs."""
        return cute.cosize(self.layout)

    # loaded_stages, loaded_elements: the same of loaded blocks, if these are others.
    @property
    def loaded_stages(self) -> int:
        return cute.size(self.loaded_layout, mode=[2]) if self.rewriters else 0

    @property
    def loaded_elements(self) -> int:
        return cute.cosize(self.loaded_layout) if self.rewriters else 0

    def buffers(self, field, loaded_field) -> tuple[cute.Tensor, cute.Tensor]:
        """The tensors of blocks for WGMMAs, and as they are loaded, in fields of shared memory."""
        buffer = field.get_tensor(self.layout.outer, swizzle=self.layout.inner)
        if not self.rewriters:
            return buffer, buffer
        layout = self.loaded_layout
        return buffer, loaded_field.get_tensor(layout.outer, swizzle=layout.inner)

    @property
    def loaded(self) -> tuple:
        """Type and layout of blocks as they are loaded."""
        return self.loaded_type, self.loaded_layout

    def pipeline(self, loading, barriers, consumers: int):
        """The pipeline to so many consumer warps: `loading`, the producer's, or one of its own."""
        if not self.rewriters:
            return loading
        return ConvertedPipeline.create(barriers, self.stages, self.rewriters, consumers)
