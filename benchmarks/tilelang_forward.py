"""Forward attention in TileLang, tuned over a few configs: what the language reaches on Hopper.

One tile of queries per CTA; the compiler makes a producer warpgroup, TMA copies and a pipeline of
`num_stages` out of the loop. Causal tiles run longest first.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import tilelang
import tilelang.language as T

from benchmarks.shapes import Cell

ACCUMULATE = "float32"


@dataclass(frozen=True, slots=True)
class Config:
    """How the kernel is cut."""

    tile_m: int
    tile_n: int
    num_stages: int
    threads: int

    @property
    def name(self) -> str:
        return f"{self.tile_m}x{self.tile_n}, {self.num_stages} stages"


def unsupported(cell: Cell) -> str | None:
    """The reason why the kernel cannot run a cell; None if it can."""
    if cell.window_left >= 0:
        return "the kernel here has no sliding window"
    if cell.seqlen_q % 128 or cell.seqlen_k % 128:
        return "the kernel here wants lengths that are multiples of 128"
    return None


def configs(cell: Cell) -> list[Config]:
    """The configs to try on a cell: those whose accumulators and stages fit."""
    if cell.head_dim > 128:
        return [Config(128, 64, stages, 256) for stages in (1, 2)]
    return [Config(128, 128, stages, 256) for stages in (1, 2)]


def build(cell: Cell, config: Config) -> Callable:
    """Compile the kernel for a cell: a function of q, k and v that returns the output."""
    return compile_kernel(
        config,
        cell.head_dim,
        cell.head_dim_v,
        cell.heads_q,
        cell.heads_kv,
        cell.causal,
        cell.dtype,
    )


@functools.cache
def compile_kernel(
    config: Config,
    head_dim: int,
    head_dim_v: int,
    heads_q: int,
    heads_kv: int,
    causal: bool,
    dtype: str,
) -> Callable:
    """Compile a kernel that takes any batch and lengths (compiling takes some ten seconds)."""
    tile_m, tile_n = config.tile_m, config.tile_n
    group = heads_q // heads_kv
    scale_log2 = head_dim**-0.5 * math.log2(math.e)
    batch, seqlen_q, seqlen_k = (T.dynamic(name) for name in ("batch", "seqlen_q", "seqlen_k"))

    @T.prim_func
    def forward(
        q: T.Tensor((batch, seqlen_q, heads_q, head_dim), dtype),
        k: T.Tensor((batch, seqlen_k, heads_kv, head_dim), dtype),
        v: T.Tensor((batch, seqlen_k, heads_kv, head_dim_v), dtype),
        out: T.Tensor((batch, seqlen_q, heads_q, head_dim_v), dtype),
    ):
        num_m_blocks = T.ceildiv(seqlen_q, tile_m)
        offset = seqlen_k - seqlen_q
        with T.Kernel(num_m_blocks, heads_q, batch, threads=config.threads) as (x, head, item):
            s_q = T.alloc_shared((tile_m, head_dim), dtype)
            s_k = T.alloc_shared((tile_n, head_dim), dtype)
            s_v = T.alloc_shared((tile_n, head_dim_v), dtype)
            s_out = T.alloc_shared((tile_m, head_dim_v), dtype)
            scores = T.alloc_fragment((tile_m, tile_n), ACCUMULATE)
            weights = T.alloc_fragment((tile_m, tile_n), dtype)
            acc = T.alloc_fragment((tile_m, head_dim_v), ACCUMULATE)
            row_max = T.alloc_fragment((tile_m,), ACCUMULATE)
            old_max = T.alloc_fragment((tile_m,), ACCUMULATE)
            rescale = T.alloc_fragment((tile_m,), ACCUMULATE)
            block_sum = T.alloc_fragment((tile_m,), ACCUMULATE)
            row_sum = T.alloc_fragment((tile_m,), ACCUMULATE)

            first_row = (num_m_blocks - 1 - x) * tile_m
            T.copy(q[item, first_row : first_row + tile_m, head, :], s_q)
            T.fill(acc, 0)
            T.fill(row_sum, 0)
            T.fill(row_max, -T.infinity(ACCUMULATE))
            num_n_blocks = (
                T.ceildiv(first_row + tile_m + offset, tile_n)
                if causal
                else T.ceildiv(seqlen_k, tile_n)
            )
            for n_block in T.Pipelined(num_n_blocks, num_stages=config.num_stages):
                first_key = n_block * tile_n
                T.copy(k[item, first_key : first_key + tile_n, head // group, :], s_k)
                if causal:
                    for i, j in T.Parallel(tile_m, tile_n):
                        scores[i, j] = T.if_then_else(
                            first_key + j > first_row + i + offset, -T.infinity(ACCUMULATE), 0
                        )
                else:
                    T.clear(scores)
                T.gemm(s_q, s_k, scores, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                T.copy(row_max, old_max)
                T.reduce_max(scores, row_max, dim=1, clear=False)
                for i in T.Parallel(tile_m):
                    rescale[i] = T.exp2((old_max[i] - row_max[i]) * scale_log2)
                for i, j in T.Parallel(tile_m, tile_n):
                    scores[i, j] = T.exp2(scores[i, j] * scale_log2 - row_max[i] * scale_log2)
                T.reduce_sum(scores, block_sum, dim=1)
                for i in T.Parallel(tile_m):
                    row_sum[i] = row_sum[i] * rescale[i] + block_sum[i]
                T.copy(scores, weights)
                for i, j in T.Parallel(tile_m, head_dim_v):
                    acc[i, j] *= rescale[i]
                T.copy(v[item, first_key : first_key + tile_n, head // group, :], s_v)
                T.gemm(weights, s_v, acc, policy=T.GemmWarpPolicy.FullRow)
            for i, j in T.Parallel(tile_m, head_dim_v):
                acc[i, j] /= row_sum[i]
            T.copy(acc, s_out)
            T.copy(s_out, out[item, first_row : first_row + tile_m, head, :])

    return tilelang.compile(
        forward, out_idx=[3], pass_configs={tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: True}
    )
