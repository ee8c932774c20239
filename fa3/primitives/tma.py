"""TMA (tensor memory accelerator): descriptors of global tensors, and a head's tiles to copy."""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync


class TmaTensor(NamedTuple):
    """A TMA descriptor of a tensor (rows, head_dim, heads, batch), and its coordinates."""

    atom: cute.CopyAtom
    coords: cute.Tensor

    @classmethod
    def of(cls, op, tensor: cute.Tensor, smem_layout, num_multicast: int = 1) -> "TmaTensor":
        """The descriptor for copies to or from one stage of a layout (rows, head_dim, stages)."""
        stage = cute.slice_(smem_layout, (None, None, 0))
        tile = tuple(cute.size(stage.outer, mode=[i]) for i in range(2))
        info = cpasync.make_tiled_tma_atom(op, tensor, stage, tile, num_multicast=num_multicast)
        return cls(info[0], info[1])

    def tiles_of_head(
        self, smem: cute.Tensor, head, rows, rank=0, num_multicast: int = 1, column=0
    ):
        """Both sides of a copy of one head: shared memory by stage, global memory by tile.

        With multicast, only the share that the CTA of rank `rank` copies.

        Args:
            rows: where the rows of the head's sequence lie (`fa3.primitives.rows_of_sequence`).
            column: which tile of columns; a Python int.

        Raises:
            ValueError: the head has no such tile of columns. CuTe would wrap to the first one.
        """
        tile = tuple(cute.size(smem, mode=[i]) for i in range(2))
        of_head = rows.of_head(self.coords, head)
        columns = cute.size(of_head, mode=[1])
        if column * tile[1] >= columns:
            raise ValueError(
                f"column must be below {-(-columns // tile[1])}, the head's tiles of {tile[1]} "
                f"columns, got {column}"
            )
        gmem = cute.local_tile(of_head, tile, (None, column))
        return cpasync.tma_partition(
            self.atom,
            rank,
            cute.make_layout(num_multicast),
            cute.group_modes(smem, 0, 2),
            cute.group_modes(gmem, 0, 2),
        )
