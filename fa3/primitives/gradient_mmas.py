"""The WGMMAs of the backward kernel except dQ: layouts, operands, accumulators.

Every buffer in shared memory is read in two ways. Q, K and dO are rows of a head for S and dP, and
columns of it for dK, dQ and dV; dS (keys, queries) is an operand of dK as it is and of dQ
transposed. A transposed view moves nothing: WGMMA takes 16-bit operands either way.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.utils import hopper_helpers as sm90

from fa3.primitives.wgmma import ROWS, smem_layout


class GradientLayouts(NamedTuple):
    """Swizzled layouts (rows, columns, count)."""

    q: cute.ComposedLayout  # queries, counted in stages, like d_out
    # Slabs of 64 keys; of K all slabs of a stage, then of the next stage.
    k: cute.ComposedLayout
    v: cute.ComposedLayout
    d_out: cute.ComposedLayout
    # Of dS, and of P: slabs of 64 keys with queries as columns, by stage as K.
    scores: cute.ComposedLayout
    dk: cute.ComposedLayout  # what each warpgroup writes at the end, in the place of K
    dv: cute.ComposedLayout  # the same in the place of V

    @classmethod
    def of(cls, dtype, config, columns: int, columns_v: int) -> "GradientLayouts":
        """Layouts for a `BackwardConfig`, padded head sizes."""
        tile_m, slabs, shares = config.tile_m, config.slabs, config.column_splits
        dk, dv = columns // shares, columns_v // shares
        # K is an operand of a piece of dQ, and dK's memory.
        width_k = math.gcd(config.pieces(columns).width, dk)
        return cls(
            smem_layout(dtype, tile_m, columns, config.stages, dk),
            smem_layout(dtype, ROWS, columns, slabs * config.k_stages, width_k),
            smem_layout(dtype, ROWS, columns_v, slabs, dv),
            smem_layout(dtype, tile_m, columns_v, config.do_stages, dv),
            smem_layout(dtype, ROWS, tile_m, slabs * config.stages, ROWS),
            smem_layout(dtype, ROWS, dk, slabs * shares * config.k_stages, width_k),
            smem_layout(dtype, ROWS, dv, slabs * shares, dv),
        )


@dataclass(frozen=True)
class KeyTileStep:
    """A warpgroup's steps of one key tile and one query head."""

    config: object  # a `fa3.kernels.backward_launch.BackwardConfig`
    # smem, pipelines: the kernel's buffers and pipelines.
    smem: object
    pipelines: object
    k_stage: Int32  # the stage of the tile's K
    thread: Int32  # of the warpgroup


class GradientMmas(NamedTuple):
    """The WGMMAs of a group."""

    scores: cute.TiledMma  # S^T = K Q^T and dP^T = V dO^T, from shared memory
    # dv, dk: dV += P^T dO and dK += dS^T Q; P and dS in registers unless groups share keys.
    dv: cute.TiledMma
    dk: cute.TiledMma

    @classmethod
    def of(cls, dtype, config, columns: int, columns_v: int) -> "GradientMmas":
        """The WGMMAs for a `BackwardConfig` and padded head sizes."""
        k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN
        source = warpgroup.OperandSource
        source_p = source.SMEM if config.warpgroups_share_keys else source.RMEM

        def mma(a_major, b_major, width: int, a_source=source.SMEM):
            return sm90.make_trivial_tiled_mma(
                dtype, dtype, a_major, b_major, Float32, (1, 1, 1), (ROWS, width), a_source
            )

        return cls(
            mma(k_major, k_major, config.queries),
            mma(k_major, mn_major, columns_v // config.column_splits, source_p),
            mma(k_major, mn_major, columns // config.column_splits, source_p),
        )


class GradientOperands(NamedTuple):
    """One thread's operands: descriptors of shared memory, and accumulators in registers."""

    # k, v: this group's keys, rows of S^T and dP^T; K by stage.
    k: cute.Tensor
    v: cute.Tensor
    # q, d_out: columns of S^T and dP^T, by part of a block and stage.
    q: cute.Tensor
    d_out: cute.Tensor
    # qt, d_out_t: columns of dK and dV, by part and stage.
    qt: cute.Tensor
    d_out_t: cute.Tensor
    # p, ds: rows of dV and dK, by stage, if they come from shared memory; else None.
    p: cute.Tensor | None
    ds: cute.Tensor | None
    acc_dK: cute.Tensor
    acc_dV: cute.Tensor

    @classmethod
    def of(cls, mmas: GradientMmas, config, smem, group) -> "GradientOperands":
        """The operands of a group; `smem` has the buffers of `GradientLayouts`."""
        slab, share = (0, group) if config.warpgroups_share_keys else (group, 0)
        k = cute.logical_divide(smem.k, (None, None, config.slabs))[None, None, (slab, None)]
        dk, dv = (
            cute.size(buffer, mode=[1]) // config.column_splits for buffer in (smem.k, smem.v)
        )
        rows = config.tile_m // config.q_splits
        qt, d_out_t = columns_of(smem.q, dk, rows), columns_of(smem.d_out, dv, rows)
        # A part of a block is a warpgroup's share; or all warpgroups compute part after part.
        q, d_out = (
            cute.logical_divide(rows_of(buffer, config.queries), (None, None, config.q_splits))[
                None, None, (None, share), None
            ]
            for buffer in (smem.q, smem.d_out)
        )
        return cls(
            operand_a(mmas.scores, k),
            operand_a(mmas.scores, smem.v[None, None, slab]),
            operand_b(mmas.scores, q),
            operand_b(mmas.scores, d_out),
            operand_b(mmas.dk, qt[None, share, None, None, None]),
            operand_b(mmas.dv, d_out_t[None, share, None, None, None]),
            operand_a(mmas.dv, smem.p) if config.warpgroups_share_keys else None,
            operand_a(mmas.dk, smem.ds) if config.warpgroups_share_keys else None,
            cute.make_rmem_tensor(mmas.dk.partition_shape_C((ROWS, dk)), Float32),
            cute.make_rmem_tensor(mmas.dv.partition_shape_C((ROWS, dv)), Float32),
        )


def operand_a(mma: cute.TiledMma, smem: cute.Tensor) -> cute.Tensor:
    """Descriptors of a buffer (M, K, ...) as operand A."""
    return mma.make_fragment_A(mma.get_slice(0).partition_A(smem))


def operand_b(mma: cute.TiledMma, smem: cute.Tensor) -> cute.Tensor:
    """Descriptors of a buffer (N, K, ...) as operand B."""
    return mma.make_fragment_B(mma.get_slice(0).partition_B(smem))


def rows_of(smem: cute.Tensor, size: int) -> cute.Tensor:
    """View (rows, columns, count) as (size, columns, rows / size, count)."""
    rows, columns, count = (cute.size(smem, mode=[i]) for i in range(3))
    layout = cute.make_layout(
        (size, columns, rows // size, count), stride=(1, rows, size, rows * columns)
    )
    return cute.composition(smem, layout)


def columns_of(smem: cute.Tensor, size: int, at_once: int) -> cute.Tensor:
    """View (rows, columns, count) as (size, columns / size, at_once, rows / at_once, count)."""
    rows, columns, count = (cute.size(smem, mode=[i]) for i in range(3))
    layout = cute.make_layout(
        (size, columns // size, at_once, rows // at_once, count),
        stride=(rows, rows * size, 1, at_once, rows * columns),
    )
    return cute.composition(smem, layout)


def columns_of_keys(smem: cute.Tensor, size: int, stages: int) -> cute.Tensor:
    """View (64, columns, slabs * stages) as (size, columns / size, all keys, stages)."""
    rows, columns, count = (cute.size(smem, mode=[i]) for i in range(3))
    slabs, slab = count // stages, rows * columns
    layout = cute.make_layout(
        (size, columns // size, (rows, slabs), stages),
        stride=(rows, rows * size, (1, slab), slab * slabs),
    )
    return cute.composition(smem, layout)
