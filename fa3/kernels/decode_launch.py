"""The decode kernel's tiling, chosen by `fa3.planning`, and arguments of launches."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int64

from fa3.primitives import arguments
from fa3.primitives.shared_memory import check_fits, padded
from fa3.primitives.vectors import FLOAT_BYTES
from fa3.primitives.warp_attention import MMA_COLUMNS, MMA_ROWS
from fa3.primitives.wgmma import ROWS
from fa3.problem import ELEMENT_BYTES, FP8, AttentionSpec

TILE_N = 64  # keys of a key block


@dataclass(frozen=True)
class DecodeConfig:
    """Tiling of the decode kernel."""

    kv_stages: int  # blocks of K, and of V, in shared memory, as they are loaded
    # Q tiles in shared memory. With two, or with Q in registers, the next Q is loaded early.
    q_stages: int
    # CTAs for which an SM has room; with two, CTAs of the next call come early. With an FP8 cache
    # both are of one call.
    ctas_of_sm: int = 1
    # Blocks of K, and of V, that are converted from an FP8 cache; 0 otherwise.
    converted_stages: int = 0
    # Whether each warp has some keys of an FP8 cache's blocks. A tile has up to 16 rows then.
    keys_by_warp: bool = False

    def smem_bytes(self, spec: AttentionSpec) -> int:
        """Bytes of shared memory for the kernel's buffers and barriers."""
        head_dim, head_dim_v = padded(spec.head_dim), padded(spec.head_dim_v)
        kv, is_fp8 = TILE_N * (head_dim + head_dim_v), self.converted_stages or self.keys_by_warp
        loaded = self.kv_stages * (ELEMENT_BYTES[FP8] if is_fp8 else spec.element_bytes)
        converted = spec.element_bytes * self.converted_stages
        q = spec.element_bytes * self.q_stages * self.rows_of_q(head_dim) * head_dim
        sums = self.keys_by_warp * ROWS * (head_dim_v + MMA_COLUMNS) * FLOAT_BYTES
        return q + (loaded + converted) * kv + sums + 1024

    def rows_of_q(self, columns: int) -> int:
        """Rows of Q in shared memory.
        All threads of a warpgroup have equally many of their vectors."""
        if not self.keys_by_warp:
            return ROWS
        return MMA_ROWS if columns % 64 == 0 else 2 * MMA_ROWS

    def validate(self, spec: AttentionSpec) -> None:
        """Raise a ValueError if the kernel cannot run this config."""
        if self.kv_stages < 2:
            raise ValueError(f"kv_stages must be at least 2, got {self.kv_stages}")
        check_fits(self.ctas_of_sm * self.smem_bytes(spec), self, spec)


class DecodeArguments(NamedTuple):
    """The arguments of a launch, in this order; the stream comes last."""

    # (batch, seqlen_q, heads_q, head_dim); packed queries have no batch, here and below: (total_q,
    # heads_q, head_dim).
    q: object
    # k, v: the cache, (batch_cache, seqlen_cache, heads_kv, head_dim or head_dim_v); with pages
    # (num_pages, page_size, heads_kv, ...), packed (total_k, heads_kv, ...).
    k: object
    v: object
    o: object  # (batch, seqlen_q, heads_q, head_dim_v), receives the output
    # Address of (batch, heads_q, seqlen_q) float32, which receives the log-sum-exp; 0 for none.
    # (heads_q, total_q) if packed.
    lse: Int64
    cu_seqlens_q: object  # (batch + 1,) int32, where packed queries begin and end; None without
    seqused_q: object  # (batch,) int32, packed queries that count; None for all
    cu_seqlens_k: object  # (batch + 1,) int32, where packed keys begin and end; None without
    # (batch,) int32, keys of the sequences, padding included; None if the cache is full. Of packed
    # ones how many count, or None for all.
    seqlens: object
    seqlen_new: int  # keys that each has beyond these, if there is room; packed ones have none
    # batch_idx, leftpad: (batch,) int32; None if the cache's layout has none.
    batch_idx: object
    leftpad: object
    page_table: object  # (batch, pages) int32; None without pages
    modifiers: tuple | None  # the tensors of the spec's scores, mask and sinks; None without any
    descales: tuple | None  # see `symbolic_descales`; None unless the cache is FP8
    workspace: object  # float32, receives parts of tiles; None if tiles are never cut
    # Address of (slots,) int32, zero, and left at zero; 0 if `kernels.combine` merges.
    counters: Int64
    softmax_scale: float  # factor of Q K^T
    # window_left, window_right: keys seen before and after a query's own; where they are bounded.
    window_left: int
    window_right: int
    # num_splits, unit_blocks, max_parts, longest_unit: see `FixedSplit`.
    num_splits: int
    unit_blocks: int
    max_parts: int
    longest_unit: int
    max_seqlen_q: int  # most queries of a sequence. A packed sequence with more is left out.
    num_ctas: int  # CTAs to launch
    width: int  # see `CtaGroups`; 1 with other cuts
    max_seqlen_k: int  # most keys of a sequence, if they are packed
    # Int32, the tiles of the forward kernel that overlaps this one, whose header says how many CTAs
    # this one has; None without.
    table: object

    @classmethod
    def symbolic(cls, kernel) -> "DecodeArguments":
        """Types of a `Decode`'s arguments without sizes; equal sizes share a symbol."""
        spec, cache = kernel.spec, kernel.cache
        batch, seqlen_q, heads_q, heads_kv = (cute.sym_int() for _ in range(4))
        rows = cute.sym_int(), cache.page_size or cute.sym_int()
        rows = rows[:1] if cache.is_packed else rows
        queries = (seqlen_q,) if kernel.is_packed else (batch, seqlen_q)
        ends, kv_dtype = cute.sym_int(), FP8 if cache.is_fp8 else spec.dtype
        q_dtype = FP8 if kernel.has_fp8_q else spec.dtype
        vector = arguments.int32_vector
        return cls(
            **arguments.scalars(cls),
            q=arguments.tma_tensor(q_dtype, (*queries, heads_q, spec.head_dim)),
            k=arguments.tma_tensor(kv_dtype, (*rows, heads_kv, spec.head_dim)),
            v=arguments.tma_tensor(kv_dtype, (*rows, heads_kv, spec.head_dim_v)),
            o=arguments.tma_tensor(spec.dtype, (*queries, heads_q, spec.head_dim_v)),
            cu_seqlens_q=vector(ends, kernel.is_packed),
            seqused_q=vector(batch, kernel.has_used_q),
            cu_seqlens_k=vector(ends, cache.is_packed),
            seqlens=vector(batch, cache.has_seqlens),
            batch_idx=vector(batch, cache.batch_indexed),
            leftpad=vector(batch, cache.left_padded),
            page_table=arguments.strided_tensor("int32", 2, cache.page_size > 0),
            modifiers=arguments.symbolic_modifiers(spec),
            descales=arguments.symbolic_descales(2 + kernel.has_fp8_q) if cache.is_fp8 else None,
            workspace=arguments.float32_buffer(kernel.cut_type.has_parts),
            table=vector(exists=kernel.overlaps_forward),
        )
