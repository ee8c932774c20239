"""The forward kernel's tiling, chosen by `fa3.planning`, and arguments of launches."""

from dataclasses import MISSING, dataclass, fields, replace
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32, Int64

from fa3.complaints import check_type
from fa3.primitives import arguments, fp8_compute
from fa3.primitives.dropout import DropoutArguments
from fa3.primitives.shared_memory import check_fits, padded
from fa3.primitives.wgmma import (
    REGISTERS,
    REGISTERS_OF_CONVERTERS,
    REGISTERS_OF_PAGES,
    ROWS,
    WARPGROUP,
)
from fa3.problem import ELEMENT_BYTES, FP8, KEYS_OF_GROUP, AttentionSpec

FEWEST_ROWS = ROWS * min(REGISTERS)  # query rows of a tile, at least
OTHER_REGISTERS = 24  # registers that a consumer thread needs besides its fragments of S, P and O
DROPOUT_REGISTERS = 8  # what of these must be free with dropout
FP8_KEYS = 32  # A block has a multiple of so many keys in FP8: what one WGMMA sums over

BOUNDED = 60.0
"""Largest natural logit of bounded scores for which `fixed_row_max` takes 0 as the row max.
Rows for which that fails are computed again."""


@dataclass(frozen=True)
class ForwardConfig:
    """Tiling of the forward kernel."""

    tile_m: int  # query rows of a CTA's tile, 64 for each consumer warpgroup
    tile_n: int  # keys of a block
    q_stages: int = 1  # Q tiles in shared memory; with two, the next tile's Q is loaded early
    kv_stages: int = 2  # blocks of K, and of V, in shared memory
    cluster_m: int = 1  # CTAs along M that share K and V by multicast (1 or 2)
    # Whether O has its own shared memory. If not, each warpgroup stages its rows in a stage of V,
    # which gets the next tile's V when O has been stored. With an FP8 cache it is Q's buffer, and
    # the next Q is loaded then. With out in float32 each thread stores its rows.
    own_o: bool = True
    # CTAs of neighbouring query heads that share K and V by multicast (1 or 2); it divides the
    # query heads of a key/value head. They walk the same key blocks, even under a mask.
    cluster_h: int = 1
    # Whether the softmax subtracts a fixed number instead of the running maximum: the maximum of a
    # row's first block of visible keys, or 0 if scores are bounded. In fp16 it may still rise
    # (`fa3.primitives.softmax.RowMax`). Rows for which that fails are marked; a second launch with
    # the config `recompute` computes them.
    fixed_row_max: bool = False
    # Blocks of K, and of V, that warps make of an FP8 cache's, of which there are `kv_stages`. 0
    # without such warps.
    converted_stages: int = 0
    # In FP8, whether the WGMMAs add P V to O, with fewer bits than two levels of sums.
    one_level: bool = False
    # In FP8, whether P has exponentials, instead of codes that are linear in the score.
    exact: bool = False

    @property
    def cluster(self) -> int:
        """CTAs of a cluster."""
        return self.cluster_m * self.cluster_h

    @property
    def consumers(self) -> int:
        return self.tile_m // ROWS

    @property
    def threads(self) -> int:
        return WARPGROUP * (1 + self.consumers)

    def thread_registers(self, has_cache: bool) -> tuple[int, int]:
        """Registers of a thread of the producer warpgroup, and of a consumer."""
        table = REGISTERS_OF_PAGES if has_cache else REGISTERS
        if self.converted_stages:
            table = REGISTERS_OF_CONVERTERS
        return table[self.consumers]

    def fragment_registers(self) -> int:
        """Registers of a consumer thread for fragments of S, P and O."""
        return self.thread_registers(False)[1] - OTHER_REGISTERS

    @property
    def recompute(self) -> "ForwardConfig":
        """The config of the second launch, which computes marked rows again."""
        return replace(self, cluster_m=1, cluster_h=1, fixed_row_max=False)

    def registers(self, spec: AttentionSpec) -> int:
        """Registers that a consumer thread needs for fragments and drawn numbers."""
        if spec.is_fp8:
            return fp8_compute.attention_of(self, padded(spec.head_dim_v))[1]
        fragments = self.tile_n // 2 + self.tile_n // 4 + padded(spec.head_dim_v) // 2
        return fragments + (DROPOUT_REGISTERS if spec.has_dropout else 0)

    def smem_bytes(self, spec: AttentionSpec) -> int:
        """Bytes of shared memory for the kernel's buffers and barriers."""
        head_dim, head_dim_v = padded(spec.head_dim), padded(spec.head_dim_v)
        q = self.q_stages * self.tile_m * head_dim
        loaded = self.kv_stages * self.tile_n * (head_dim + head_dim_v)
        converted = self.converted_stages * self.tile_n * (head_dim + head_dim_v)
        o = self.tile_m * head_dim_v if self.own_o and not spec.has_float32_out else 0
        element, out = spec.element_bytes, spec.out_bytes
        loaded *= ELEMENT_BYTES[FP8] if self.converted_stages else element
        return element * (q + converted) + loaded + out * o + 1024

    def validate(self, spec: AttentionSpec, has_fp8_cache: bool = False) -> None:
        """Check that the kernel can run this config for this spec.

        Raises:
            TypeError: a field has the wrong type.
            ValueError: the kernel cannot run a field's value.
        """
        for field in fields(self):
            kind = int if field.default is MISSING else type(field.default)
            check_type(field.name, getattr(self, field.name), kind)
        for name in ("q_stages", "kv_stages"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, got {getattr(self, name)}")
        if self.consumers not in REGISTERS or self.tile_m % ROWS:
            raise ValueError(f"tile_m must be 128 or 192, got {self.tile_m}")
        if not (16 <= self.tile_n <= 256 and self.tile_n % 16 == 0):
            raise ValueError(f"tile_n must be a multiple of 16 up to 256, got {self.tile_n}")
        if self.cluster_m not in (1, 2):
            raise ValueError(f"cluster_m must be 1 or 2, got {self.cluster_m}")
        if self.cluster_h not in (1, 2) or self.cluster > 2:
            raise ValueError(
                f"cluster_h must be 1, or 2 with cluster_m=1, got cluster_h={self.cluster_h} and "
                f"cluster_m={self.cluster_m}"
            )
        if self.cluster_h > 1 and spec.mask.templates:
            raise ValueError("cluster_h must be 1 with a mask of your own: its blocks may differ")
        if has_fp8_cache != (self.converted_stages > 0):
            raise ValueError(
                f"converted_stages must be 1 or more with an FP8 cache, and 0 elsewhere, got "
                f"{self.converted_stages}"
            )
        for name in ("one_level", "exact"):
            if getattr(self, name) and not spec.is_fp8:
                raise ValueError(f"{name} must be False in 16 bits")
        if spec.is_fp8 and self.tile_n % FP8_KEYS:
            raise ValueError(f"tile_n must be a multiple of {FP8_KEYS} in FP8, got {self.tile_n}")
        if not self.own_o:
            if spec.other_out is not None:
                raise ValueError(f"own_o must be True with {spec.dtype} in, {spec.out_dtype} out")
            if has_fp8_cache and padded(spec.head_dim) != padded(spec.head_dim_v):
                raise ValueError(
                    f"own_o=False stages O in Q's place with an FP8 cache and needs their columns "
                    f"to be equal, got head_dim {spec.head_dim} and head_dim_v {spec.head_dim_v}"
                )
            if not has_fp8_cache and self.tile_n < ROWS:
                raise ValueError(
                    f"own_o=False stages {ROWS} rows of O in a stage of V and needs tile_n to be "
                    f"{ROWS} or more, got {self.tile_n}"
                )
        if self.fixed_row_max and spec.is_fp8:
            raise ValueError("fixed_row_max must be False in FP8: its range is small")
        if self.fixed_row_max and any(score.kind.hides for score in spec.scores):
            raise ValueError("fixed_row_max must be False with a score of your own")
        check_fits(self.smem_bytes(spec), self, spec)
        if self.registers(spec) > self.fragment_registers():
            drawn = " and random numbers" if spec.has_dropout else ""
            raise ValueError(
                f"tile_n={self.tile_n} with head_dim_v={spec.head_dim_v} takes "
                f"{self.registers(spec)} registers a thread for S, P and O{drawn}, there are "
                f"{self.fragment_registers()} with tile_m={self.tile_m}"
            )


class ForwardArguments(NamedTuple):
    """The arguments of a launch, in this order; the stream comes last."""

    # (batch, seqlen_q, heads_q, head_dim); packed sequences have no batch, here and below:
    # (total_q, heads_q, head_dim). Equally many queries have one in q and o.
    q: object
    k: object  # (batch, seqlen_k, heads_kv, head_dim)
    v: object  # (batch, seqlen_k, heads_kv, head_dim_v); in FP8 V^T, see `TransposeArguments`
    o: object  # (batch, seqlen_q, heads_q, head_dim_v), receives the output
    # Address of (batch, heads_q, seqlen_q) float32, which receives the log-sum-exp; 0 for none.
    # (heads_q, total_q) if packed.
    lse: Int64
    modifiers: tuple | None  # the tensors of the spec's scores, mask and sinks; None without any
    softmax_scale: float  # factor of Q K^T
    # window_left, window_right: keys seen before and after a query's own; where they are bounded.
    window_left: int
    window_right: int
    heads_per_group: int  # of `TileOrder`; with a table, its `RaggedOrder.rows_of_group`
    num_clusters: int  # clusters to launch
    schedule_state: object = None  # int32; the schedule's table, counters or marks
    # (`numbers_of_parts`,) float32; None if the schedule does not split tiles.
    part_buffer: object = None
    part_counters: object = None  # (slots * warps,) int32, zero
    num_slots: int = 0  # parts of all tiles
    marks: object = None  # (`RecomputeMask.size`,) int32, zero; None if no row can be marked
    recording: object = None  # int64; None except in an instrumented kernel
    # Int32, the tiles of packed sequences (`fa3.schedules.ragged`); None without them.
    table: object = None
    # (batch, pages) int32, where k and v are a cache with pages: then they are (num_pages,
    # page_size, heads_kv, ...), and (batch, seqlen, heads_kv, ...) in a cache without pages.
    page_table: object = None
    # 1 if the kernel before is the decode kernel, which takes other sequences of the same call and
    # lets this one overlap it; else 0. None without a table.
    overlaps_decode: object = None
    dropout: DropoutArguments | None = None  # see `DropoutArguments`; None without
    descales: tuple | None = None  # see `symbolic_descales`; None in 16 bits

    @classmethod
    def symbolic(cls, kernel) -> "ForwardArguments":
        """Types of a `Forward`'s arguments without sizes; equal sizes share a symbol."""
        spec, schedule, cache = kernel.spec, kernel.schedule_type, kernel.cache
        batch, seqlen_q, seqlen_k, heads_q, heads_kv = (cute.sym_int() for _ in range(5))
        batches = () if schedule.is_ragged else (batch,)
        query_rows = *((batch,) if kernel.has_equal_queries else batches), seqlen_q, heads_q
        key_rows, has_pages, dtype_k = (*batches, seqlen_k), False, spec.dtype
        if cache is not None:
            key_rows, has_pages = (cute.sym_int(), cache.page_size or seqlen_k), cache.page_size > 0
            dtype_k = FP8 if cache.is_fp8 else spec.dtype
        vector, can_mark = arguments.int32_vector, kernel.config.fixed_row_max
        shape_v = *key_rows, heads_kv, spec.head_dim_v
        if spec.is_fp8:  # V^T
            shape_v = batch, heads_kv, spec.head_dim_v, cute.sym_int(), KEYS_OF_GROUP
        return cls(
            **arguments.scalars(cls),
            q=arguments.tma_tensor(spec.dtype, (*query_rows, spec.head_dim)),
            k=arguments.tma_tensor(dtype_k, (*key_rows, heads_kv, spec.head_dim)),
            v=arguments.tma_tensor(dtype_k, shape_v),
            o=arguments.tma_tensor(spec.out_dtype, (*query_rows, spec.head_dim_v)),
            modifiers=arguments.symbolic_modifiers(spec),
            schedule_state=vector(exists=schedule.reads_state),
            part_buffer=arguments.float32_buffer(schedule.splits),
            part_counters=vector(exists=schedule.splits),
            marks=vector(exists=can_mark or kernel.packs_sequences),
            recording=vector(exists=kernel.is_recorded, dtype="int64"),
            table=vector(exists=schedule.is_ragged),
            overlaps_decode=Int32(0) if schedule.is_ragged else None,
            page_table=arguments.strided_tensor("int32", 2, has_pages),
            dropout=DropoutArguments.symbolic() if spec.has_dropout else None,
            descales=arguments.symbolic_descales(2 + spec.is_fp8) if dtype_k == FP8 else None,
        )
