"""The backward kernels' tiling, chosen by `fa3.planning.backward`, and arguments of launches."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from fa3.primitives import arguments
from fa3.primitives.dq_accumulator import DqAccumulator, DqPieces
from fa3.primitives.dropout import DropoutArguments
from fa3.primitives.query_tiles import PAIR, STATISTICS
from fa3.primitives.shared_memory import CAPACITY, padded
from fa3.primitives.tma import in_batch
from fa3.primitives.vectors import FLOAT_BYTES, QUAD
from fa3.primitives.wgmma import ROWS, WARPGROUP, WARPS
from fa3.problem import AttentionSpec
from fa3.schedules.query_index import DenseQueryIndex, PackedQueryIndex

MMA_GROUPS = 2  # MMA warpgroups


class Registers(NamedTuple):
    """Registers of a thread after setmaxnreg; four warpgroups have 512 between them."""

    producer: int
    mma: int
    dq: int


SPARE_REGISTERS = {QUAD: 16, PAIR: 0}
"""Registers of an MMA thread that its fragments must leave, by `stats_vector`."""

MANY_GRADIENTS = 144
"""From so many registers of dK and dV on, what hides or changes scores takes some more."""

STAGES = 2  # blocks of Q and of dS in shared memory, and of P if there

REGISTERS_BY_SPLITS = {1: Registers(32, 208, 64), 2: Registers(24, 216, 56)}
"""Registers of the roles, by `q_splits`."""

WIDEST_PIECE = {1: 64, 2: 48}
"""Most columns of a piece of dQ, which takes half as many registers, by `q_splits`."""

PREPROCESS_TICKET, CONVERT_TICKET, FIRST_GROUP_FLAG = 2, 3, 4
"""Counters after the two of the schedule: the next share of the preprocessing; the next piece of dQ
to convert; the first of the flags of head groups."""

PREPROCESSED, ACCUMULATED, FLAGS_OF_GROUP = 0, 1, 2
"""Flags of a head group: how much of its queries is preprocessed, and how many of its key tiles
have added all their dQ."""

LISTENING_WARPS = WARPS * (1 + MMA_GROUPS) + 2
"""Warps that are told the next tile: all but the producer warp that fetches it, and idle warps."""


def place_of_group_flag(group, which: int):
    """The place of a head group's flag among the counters."""
    return FIRST_GROUP_FLAG + FLAGS_OF_GROUP * group + which


@dataclass(frozen=True)
class BackwardConfig:
    """Tiling of the backward kernel.

    Either each MMA warpgroup has 64 keys of the tile, and P and dS are operands from registers. Or,
    with `warpgroups_share_keys`, both have the same 64 keys: they share the queries of S and dP and
    the columns of dK and dV, and P goes through shared memory as dS does.

    `q_splits=2` computes S and dP for half of the queries at a time. That halves the live
    accumulators, so warpgroups can have keys of their own at larger heads. But products are
    narrower, and read K and V from shared memory twice.
    """

    tile_m: int  # queries of a block
    tile_n: int  # keys of a CTA's tile
    do_stages: int = STAGES  # blocks of dO in shared memory
    # Tiles of K in shared memory; with 2 the next K arrives before this tile is done.
    k_stages: int = STAGES
    warpgroups_share_keys: bool = False  # see above
    q_splits: int = 1  # see above; 1, or 2 where warpgroups have keys of their own
    # Rows whose statistics a thread reads at once: 4, all before they are needed, or 2, which takes
    # fewer registers.
    stats_vector: int = QUAD

    threads: ClassVar[int] = WARPGROUP * (2 + MMA_GROUPS)
    stages: ClassVar[int] = STAGES

    @property
    def slabs(self) -> int:
        """Times 64 keys, a slab each."""
        return self.tile_n // ROWS

    @property
    def column_splits(self) -> int:
        """Warpgroups that share columns of dK and dV of the same keys."""
        return MMA_GROUPS if self.warpgroups_share_keys else 1

    @property
    def queries(self) -> int:
        """Columns of a warpgroup's S^T and dP^T."""
        return self.tile_m // self.column_splits // self.q_splits

    def pieces(self, columns: int) -> DqPieces:
        """The pieces of a tile of dQ, computed one after another."""
        return DqPieces.of(self.tile_m, columns, WIDEST_PIECE[self.q_splits])

    @property
    def registers_of_roles(self) -> Registers:
        return REGISTERS_BY_SPLITS[self.q_splits]

    def smem_bytes(self, spec: AttentionSpec) -> int:
        """Bytes of shared memory for the kernel's buffers and barriers."""
        head_dim, head_dim_v = padded(spec.head_dim), padded(spec.head_dim_v)
        kv = self.tile_n * (self.k_stages * head_dim + head_dim_v)
        queries = self.tile_m * (self.stages * head_dim + self.do_stages * head_dim_v)
        scores = self.tile_m * self.tile_n * self.stages * (2 if self.warpgroups_share_keys else 1)
        sums = self.pieces(head_dim).numbers_in_flight
        numbers = STATISTICS * self.tile_m * self.stages + sums
        return spec.element_bytes * (kv + queries + scores) + FLOAT_BYTES * numbers + 1024

    def registers(self, spec: AttentionSpec) -> int:
        """Registers of an MMA thread for fragments, where most are live."""
        element = spec.element_bytes
        gradients = (padded(spec.head_dim) + padded(spec.head_dim_v)) // 2 // self.column_splits
        scores = ROWS * self.queries // WARPGROUP
        rounded = scores * element // FLOAT_BYTES
        factors = sum(score.kind.bends for score in spec.scores) * rounded
        # Live with dP: P and dS in 16 bits. With dropout also what dV takes of P, of which half is
        # counted: by what spills, not all of it is live at once.
        live = 2 * rounded + (rounded // 2 if spec.has_dropout else 0)
        # What a user's mask computes with, or what dropout does with what hides scores.
        live += scores if spec.mask.templates else 0
        hides = spec.scores or spec.mask.templates or spec.mask.left
        live += rounded if hides and (spec.has_dropout or gradients >= MANY_GRADIENTS) else 0
        # With 64 scores or more, what is added to them takes another one.
        live += scores // ROWS if spec.scores else 0
        if self.q_splits > 1:
            # The number of the half, and what hides or changes scores, which is computed anew.
            live += rounded * (2 if hides else 1) + (scores if spec.scores else 0)
        return gradients + scores + live + factors

    def fits(self, spec: AttentionSpec) -> bool:
        """Whether the kernel can run this config for a spec."""
        columns, registers = padded(spec.head_dim), self.registers_of_roles.mma
        return (
            (self.tile_m == ROWS or columns <= WIDEST_PIECE[self.q_splits])
            and self.smem_bytes(spec) <= CAPACITY
            and self.registers(spec) <= registers - SPARE_REGISTERS[self.stats_vector]
        )


class PassArguments(NamedTuple):
    """The arguments of a backward pass, in this order; then the stream.
    Tensors of packed sequences are (total, heads, head_dim)."""

    q: object  # (batch, seqlen_q, heads_q, head_dim)
    k: object  # (batch, seqlen_k, heads_kv, head_dim)
    v: object  # (batch, seqlen_k, heads_kv, head_dim_v)
    out: object  # (batch, seqlen_q, heads_q, head_dim_v)
    lse: object  # (batch, heads_q, seqlen_q) float32, natural logarithm; (heads_q, total_q) packed
    d_out: object  # like out
    # Like lse; without a gradient of the log-sum-exp any such tensor, for example lse.
    d_lse: object
    # dq, dk, dv: like q, k and v, receive the gradients; dk and dv in fp32 with `writes_fp32`.
    dq: object
    dk: object
    dv: object
    # float32, for what the kernels write for each other: statistics, the dQ accumulator, the table
    # of packed sequences, counters, counters of shared key tiles, flags of the accumulator, sums
    # of shared key tiles.
    buffer: object
    modifiers: tuple | None  # the tensors of the spec's scores, mask and sinks; None without any
    softmax_scale: float  # factor of Q K^T
    has_d_lse: int  # 1 with a gradient of the log-sum-exp, else 0
    # 1 if the accumulator starts with zeros, as of packed sequences and long ones; else 0.
    dq_is_zeroed: int
    # window_left, window_right: keys seen before and after a query's own; where they are bounded.
    window_left: int
    window_right: int
    # Key/value heads of a head group, see `TileOrder` and `RaggedKeyOrder`, or sets of `KeySplit`.
    heads_per_group: int
    # head_parts, block_parts, rise: how CTAs share key tiles, see `KeySplit`.
    head_parts: int
    block_parts: int
    rise: int
    num_clusters: int  # the number of CTAs to launch
    # dq_at, table_at, counters_at, dq_flags_at: where these begin in the buffer, multiples of 4.
    # Without a table `table_at` is `counters_at`.
    dq_at: Int64
    table_at: Int64
    counters_at: Int64
    dq_flags_at: Int64
    dropout: DropoutArguments | None  # see `DropoutArguments`; None without
    groups_preprocessed: int  # head groups that `BackwardPreprocess` does
    # capacity to seqused_k: of packed sequences, see `TileTableArguments`; None without.
    capacity: int | None = None
    shift: int | None = None
    is_by_work: int | None = None
    cu_seqlens_q: object = None
    cu_seqlens_k: object = None
    seqused_q: object = None
    seqused_k: object = None
    # part_counters_at, parts_at: where the counters and sums of shared key tiles begin; None if
    # each CTA has key tiles alone.
    part_counters_at: object = None
    parts_at: object = None
    # 1 if odd head groups have the first keys first (`fa3.primitives.query_tiles`), 0 if not; None
    # for a kernel in which they never have.
    alternates: int | None = None
    # Units of a part, and parts of a key/value head, see `KeyLine`; None for other kernels.
    line_length: int | None = None
    parts_of_line: int | None = None

    @classmethod
    def symbolic(cls, kernel, table=None) -> "PassArguments":
        """Types of a pass's arguments without sizes; equal sizes share a symbol.

        Args:
            kernel: the `Backward`.
            table: the kernel that makes the table of packed sequences; None without.
        """
        spec, vector = kernel.spec, arguments.int32_vector
        batches = () if kernel.is_ragged else (cute.sym_int(),)
        seqlen_q, seqlen_k, heads_q, heads_kv = (cute.sym_int() for _ in range(4))
        queries, keys, lse_shape = (seqlen_q, heads_q), (seqlen_k, heads_kv), (heads_q, seqlen_q)
        gradient_type = "float32" if kernel.writes_fp32 else spec.dtype

        def tensor(rows: tuple, columns: int, dtype: str = spec.dtype):
            return arguments.tma_tensor(dtype, (*batches, *rows, columns))

        named = arguments.scalars(cls)
        if kernel.splits:
            named |= dict.fromkeys(("part_counters_at", "parts_at"), Int64(0))
        if kernel.has_lines:
            named |= dict.fromkeys(("line_length", "parts_of_line"), Int32(0))
        if table is not None:
            table_types = table.symbolic()._asdict()
            named |= {name: table_types[name] for name in cls._fields if name in table_types}
        elif kernel.is_ragged:
            named |= {"cu_seqlens_q": vector(), "seqused_q": vector(exists=kernel.has_used_q)}
        return cls(
            **named,
            q=tensor(queries, spec.head_dim),
            k=tensor(keys, spec.head_dim),
            v=tensor(keys, spec.head_dim_v),
            out=tensor(queries, spec.head_dim_v),
            lse=arguments.compact_tensor("float32", (*batches, *lse_shape)),
            d_out=tensor(queries, spec.head_dim_v),
            d_lse=arguments.compact_tensor("float32", (*batches, *lse_shape)),
            dq=tensor(queries, spec.head_dim, spec.out_dtype),
            dk=tensor(keys, spec.head_dim, gradient_type),
            dv=tensor(keys, spec.head_dim_v, gradient_type),
            buffer=arguments.float32_buffer(),
            modifiers=arguments.symbolic_modifiers(spec),
            dropout=DropoutArguments.symbolic() if spec.has_dropout else None,
            alternates=Int32(0) if kernel.may_alternate else None,
        )

    def numbers(self, begin, end) -> cute.Tensor:
        """The part [begin, end) of the buffer."""
        return cute.make_tensor(self.buffer.iterator + begin, cute.make_layout((end - begin,)))

    def integers(self, begin, end) -> cute.Tensor:
        """The same, as int32."""
        first = cute.recast_ptr(self.buffer.iterator + begin, dtype=Int32)
        return cute.make_tensor(first, cute.make_layout((Int32(end - begin),)))

    @property
    def counters(self) -> cute.Tensor:
        """What the kernels count in, and the counters of shared key tiles."""
        return self.integers(self.counters_at, self.dq_flags_at)

    @property
    def num_sequences(self):
        """The number of packed sequences; None without."""
        return None if self.cu_seqlens_q is None else self.cu_seqlens_q.shape[0] - 1

    def query_rows(self, kernel) -> "QueryRows":
        """What the preprocessing and the dQ conversion take, of a `Backward`."""
        groups, flags, kept = kernel.query_head_groups(self), None, None
        if kernel.dq_flags:
            flags = self.integers(self.dq_flags_at, self.buffer.shape[0])
        if kernel.spec.has_dropout:
            kept = DropoutArguments(*self.dropout).kept
        named = {name: in_batch(getattr(self, name)) for name in ("out", "d_out")}
        named |= {name: in_batch(getattr(self, name), rank=3) for name in ("lse", "d_lse")}
        named |= {"dq_flags": flags, "kept": kept, "statistics": self.numbers(0, self.dq_at)}
        named["dq_accumulator"] = self.numbers(self.dq_at, self.table_at)
        named["num_tiles"] = groups.tiles_before(self.groups_preprocessed)
        return arguments.operands_of(QueryRows, self, **named)


class QueryRows(NamedTuple):
    """The global tensors of the preprocessing and the dQ conversion.
    Packed sequences are in a batch of one."""

    # out, d_out: (batch, seqlen_q, heads_q, head_dim_v).
    out: cute.Tensor
    d_out: cute.Tensor
    # lse, d_lse: (batch, heads_q, seqlen_q) float32, see `PassArguments`.
    lse: cute.Tensor
    d_lse: cute.Tensor
    has_d_lse: Int32
    statistics: cute.Tensor  # receives `statistics_of_tile`
    dq_accumulator: cute.Tensor  # buffer of `DqAccumulator`, receives zeros if `dq_is_zeroed`
    # Of the backward kernel, int32: its schedule's, unless a table has them, then those from
    # `PREPROCESS_TICKET` on; receives zeros.
    counters: cute.Tensor
    num_tiles: Int32  # the number of query tiles that the preprocess kernel does, the first ones
    dq_is_zeroed: Int32
    # cu_seqlens_q, seqused_q: of packed sequences; None without.
    cu_seqlens_q: cute.Tensor | None
    seqused_q: cute.Tensor | None
    dq_flags: cute.Tensor | None  # flags of `DqAccumulator`, receives zeros; None without
    kept: Float32 | None  # the share of P that dropout keeps; None without

    def dq(self, tiles) -> DqAccumulator:
        """The dQ accumulator; `tiles` numbers the query tiles."""
        return DqAccumulator(self.dq_accumulator, tiles, self.dq_flags)

    def index(self, tile_m: int) -> DenseQueryIndex | PackedQueryIndex:
        """The query tiles by number; on the host."""
        if self.cu_seqlens_q is None:
            return DenseQueryIndex.of(self.out, tile_m)
        return PackedQueryIndex.of(self.out, self.cu_seqlens_q, self.seqused_q, tile_m)
