"""TMA (tensor memory accelerator): descriptors, loads of tiles, copies of runs.

`DenseRows` and `RaggedRows` say where the rows of one sequence lie, for loads and stores.
"""

from collections.abc import Callable
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync

from fa3.primitives.vectors import FLOAT_BYTES

RANK = 4
"""Dimensions of a tensor: batch, rows, heads, columns. Packed ones have no batch."""

ROWS_END = 2**30  # the row after the last one of every sequence, in a tensor of `ragged_tma_view`
WRAP = 2**34  # WRAP * ROWS_END elements are 2**64: as much as nothing, since addresses have 64 bits


class DenseRows(NamedTuple):
    """The place of a sequence's rows in (rows, head_dim, heads, batch)."""

    batch: int

    def of_head(self, tensor: cute.Tensor, head) -> cute.Tensor:
        """(rows, head_dim) of the sequence."""
        return tensor[None, None, head, self.batch]


class RaggedRows(NamedTuple):
    """The place of a sequence's rows in a tensor of `ragged_tma_view`."""

    # begin, length: its first unit and the number of its units.
    begin: int
    length: int
    unit: int = 1  # rows of a unit; in V^T the keys of a group

    def of_head(self, tensor: cute.Tensor, head) -> cute.Tensor:
        """(rows, head_dim) of the sequence, which end where the tensor's rows end."""
        rows = tensor[None, None, head, self.begin + self.length, ROWS_END // self.unit]
        return cute.domain_offset((ROWS_END - self.length * self.unit, 0), rows)


def ragged_tma_view(tensor: cute.Tensor) -> cute.Tensor:
    """A view of (total, heads, head_dim) where sequences end with the rows.

    (rows, head_dim, heads, ends, back): element (r, c, h, e, ROWS_END) is in row
    r + e - ROWS_END. So row ROWS_END - length + i with e = begin + length is row i of a sequence,
    and the rows after its last one are out of bounds: TMA loads zeros for them and does not store
    them. The last mode goes back by ROWS_END rows, which needs addresses that wrap around. A
    pointer so far before the tensor would do without it, but then TMA faults: for boxes
    that are out of bounds it touches memory where the tensor begins.

    Source of the idea: ragged TMA descriptors of Triton (triton/tools/ragged_tma.py).
    """
    total, heads, head_dim = tensor.shape
    row_stride, head_stride, _ = tensor.layout.stride
    layout = cute.make_layout(
        (ROWS_END, head_dim, heads, total + 1, ROWS_END + 1),
        stride=(row_stride, 1, head_stride, row_stride, WRAP - Int64(row_stride)),
    )
    return cute.make_tensor(tensor.iterator, layout)


def ragged_view_of_transposed(tensor: cute.Tensor) -> cute.Tensor:
    """A `ragged_tma_view` of V^T, (1, heads, head_dim, groups, keys of a group).
    Sequences end, and rows go back, by whole groups: TMA wants strides of 16 bytes."""
    (_, heads, head_dim, groups, keys), stride = tensor.shape, tensor.stride
    layout = cute.make_layout(
        (ROWS_END, head_dim, heads, groups + 1, ROWS_END // keys + 1),
        stride=(1, stride[2], stride[1], keys, WRAP * keys - Int64(keys)),
    )
    return cute.make_tensor(tensor.iterator, layout)


def packed_rows(tensor: cute.Tensor) -> cute.Tensor:
    """A view of (batch, seqlen, heads, head_dim) as (total, heads, head_dim).
    Sequences follow each other without gaps."""
    batch, seqlen, *sizes = tensor.shape
    layout = cute.make_layout((batch * seqlen, *sizes), stride=tensor.layout.stride[1:])
    return cute.make_tensor(tensor.iterator, layout)


def in_batch(tensor: cute.Tensor | None, rank: int = RANK) -> cute.Tensor | None:
    """A tensor of `rank`; packed sequences are in a batch of one."""
    if tensor is None or cute.rank(tensor) == rank:
        return tensor
    layout = cute.prepend(tensor.layout, cute.make_layout(1))
    return cute.make_tensor(tensor.iterator, layout)


def rows_first(tensor: cute.Tensor) -> cute.Tensor:
    """(rows, head_dim, heads, batch) of a tensor (batch, rows, heads, head_dim).
    Packed sequences, in (rows, heads, head_dim), get a batch of one."""
    tensor = in_batch(tensor)
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=[1, 3, 2, 0]))


def rows_of_transposed(tensor: cute.Tensor) -> cute.Tensor:
    """`rows_first` of V^T, (batch, heads, head_dim, groups, keys of a group)."""
    (batch, heads, head_dim, groups, keys), stride = tensor.shape, tensor.stride
    shape = groups * keys, head_dim, heads, batch
    layout = cute.make_layout(shape, stride=(1, stride[2], stride[1], stride[0]))
    return cute.make_tensor(tensor.iterator, layout)


class TmaTensor(NamedTuple):
    """A TMA descriptor of (rows, head_dim, heads, batch), and its coordinates."""

    atom: cute.CopyAtom
    coords: cute.Tensor

    @classmethod
    def of(cls, op, tensor: cute.Tensor, smem_layout, num_multicast: int = 1) -> "TmaTensor":
        """The descriptor for copies of a stage of (rows, head_dim, stages)."""
        stage = cute.slice_(smem_layout, (None, None, 0))
        tile = tuple(cute.size(stage.outer, mode=[i]) for i in range(2))
        info = cpasync.make_tiled_tma_atom(op, tensor, stage, tile, num_multicast=num_multicast)
        return cls(info[0], info[1])

    def tiles_of_head(
        self, smem: cute.Tensor, head, rows, rank=0, num_multicast: int = 1, column=0
    ):
        """Return both sides of a copy: stages in shared memory, global tiles.

        With multicast, only the share that the CTA of rank `rank` copies. `rows` says where the
        rows of the sequence are (`DenseRows`, `RaggedRows`), `column` which tile of columns.
        """
        tile = tuple(cute.size(smem, mode=[i]) for i in range(2))
        head_rows = rows.of_head(self.coords, head)
        columns = cute.size(head_rows, mode=[1])
        if column * tile[1] >= columns:
            raise ValueError(
                f"column must be below {-(-columns // tile[1])}, the head's tiles of {tile[1]} "
                f"columns, got {column}"
            )
        gmem = cute.local_tile(head_rows, tile, (None, column))
        return cpasync.tma_partition(
            self.atom,
            rank,
            cute.make_layout(num_multicast),
            cute.group_modes(smem, 0, 2),
            cute.group_modes(gmem, 0, 2),
        )


def tile_loader(
    tma: TmaTensor,
    smem: cute.Tensor,  # (rows, columns, stages * copies), the stages of the pipeline `pipe`
    pipe,
    head,
    rows,  # where the rows of the head's sequence lie
    copies: int = 1,  # TMA copies that fill one stage, from neighbouring tiles in global memory
    rank=0,  # this CTA's rank in the cluster. It loads its share of each tile for all CTAs.
    cluster: int = 1,
    load_more: Callable | None = None,  # (index, state), loads what else belongs to the stage
) -> Callable:
    """A function (index, state) -> next state that loads a tile.
    It waits until the stage is free. The loads signal the stage's mbarrier."""
    to_smem, from_gmem = tma.tiles_of_head(smem, head, rows, rank, cluster)
    multicast = {} if cluster == 1 else {"mcast_mask": cutlass.Int16((1 << cluster) - 1)}

    def load(index, state):
        pipe.producer_acquire(state)
        for i in range(copies):
            cute.copy(
                tma.atom,
                from_gmem[None, index * copies + i],
                to_smem[None, state.index * copies + i],
                tma_bar_ptr=pipe.producer_get_barrier(state),
                **multicast,
            )
        if load_more is not None:
            load_more(index, state)
        state.advance()
        return state

    return load


@cute.jit
def load_run(source: cute.Tensor, target: cute.Tensor, barrier):
    """Copy contiguous fp32 numbers to shared memory; an mbarrier counts their bytes.
    One warp calls it; the addresses and the size are multiples of 16 bytes."""
    size = Int32(cute.size(source) * FLOAT_BYTES)
    with cute.arch.elect_one():
        cute.arch.inline_ptx(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
            "[{$r0}], [{$r1}], {$r2}, [{$r3}];",
            read_only_args=[
                Int32(target.iterator.toint()),
                source.iterator.toint(),
                size,
                Int32(barrier.toint()),
            ],
        )


STORE = "cp.async.bulk.global.shared::cta.bulk_group"
ADD = "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32"
"""Instructions of `send_run`: a copy, and an addition to what is in global memory."""


def send_run(instruction: str, source: cute.Tensor, target: cute.Pointer):
    """Copy or add contiguous fp32 numbers to global memory; a bulk group.
    One thread calls it, which also waits for the group; alignment is as for `load_run`."""
    cute.arch.inline_ptx(
        f"{instruction} [{{$r0}}], [{{$r1}}], {{$r2}};",
        read_only_args=[
            target.toint(),
            Int32(source.iterator.toint()),
            Int32(cute.size(source) * FLOAT_BYTES),
        ],
    )
    cute.arch.cp_async_bulk_commit_group()
