"""The backward kernels' tiling, chosen by `fa3.planning.backward`, and arguments of launches."""

from dataclasses import dataclass, fields
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32

from fa3.complaints import shown
from fa3.primitives import arguments
from fa3.primitives.dropout import DropoutArguments
from fa3.primitives.query_tiles import PAIR, STATISTICS, QueryPieces
from fa3.primitives.rows_of_sequence import in_batch
from fa3.primitives.shared_memory import check_fits, padded
from fa3.primitives.vectors import FLOAT_BYTES, QUAD
from fa3.primitives.wgmma import ROWS, WARPGROUP, WARPS
from fa3.problem import AttentionSpec

MMA_GROUPS = 2
"""MMA warpgroups."""


class Registers(NamedTuple):
    """Registers of a thread after setmaxnreg; four warpgroups have 512 between them."""

    producer: int
    mma: int
    dq: int


SPARE_REGISTERS = {QUAD: 16, PAIR: 0}
"""Registers of a thread of an MMA warpgroup that its fragments must leave, by
`statistics_at_once`."""

MANY_GRADIENTS = 144
"""Registers of dK and dV beside which what hides or changes scores takes some more."""

STAGES = 2
"""Blocks of Q and of dS in shared memory, and of P if there."""

REGISTERS_BY_PARTS = {1: Registers(32, 208, 64), 2: Registers(24, 216, 56)}
"""Those of the roles, by the parts of a block's queries."""

WIDEST_PIECE = {1: 64, 2: 48}
"""Columns at most of a piece of dQ, which takes half as many registers of dQ's warpgroup."""

TO_BEGIN, TO_END, FIRST_OF_SECTIONS = 2, 3, 4
"""Words of the counters after the schedule's two: how often CTAs have asked for queries to begin,
how often warps have for pieces of dQ to write, and from which on each section has two."""

BEGUN, ADDED, WORDS_OF_SECTION = 0, 1, 2
"""Words of a section: how much of its queries is begun, and how many of its tiles of keys have
added all that they add to dQ."""

LISTENING_WARPS = WARPS * (1 + MMA_GROUPS) + 2
"""Warps that are told which tile comes next: all but the producer's that fetches them, and those
that have nothing to do."""


def place_of_word(section, which: int):
    """The place of a section's word among the counters."""
    return FIRST_OF_SECTIONS + WORDS_OF_SECTION * section + which


@dataclass(frozen=True)
class BackwardConfig:
    """Tiling of the backward kernel.

    Either each MMA warpgroup has 64 keys of the tile, and P and dS are operands from registers;
    or, with `shares_keys`, both have the same 64 keys: they share the queries of S and dP and the
    columns of dK and dV, and P goes through shared memory as dS does.

    With `parts` a block's queries go through S and dP some at a time: what is live beside dK and dV
    is less, so groups have keys of their own at larger heads; but a product is narrower, and reads
    K and V from shared memory once for each part.

    Fields:
        tile_m: queries of a block.
        tile_n: keys of a CTA's tile.
        do_stages: blocks of dO in shared memory.
        k_stages: tiles of K in shared memory; with 2 the next one's comes before this one is done.
        shares_keys: see above.
        parts: see above; 1, or 2 where groups have keys of their own.
        statistics_at_once: of how many rows a thread reads the statistics at once: 4, all before
            they are needed, or 2, which takes fewer registers.
    """

    tile_m: int
    tile_n: int
    do_stages: int = STAGES
    k_stages: int = STAGES
    shares_keys: bool = False
    parts: int = 1
    statistics_at_once: int = QUAD

    @property
    def threads(self) -> int:
        return WARPGROUP * (2 + MMA_GROUPS)

    @property
    def stages(self) -> int:
        """Blocks of Q and of dS in shared memory."""
        return STAGES

    @property
    def slabs(self) -> int:
        """Times 64 keys."""
        return self.tile_n // ROWS

    @property
    def shares(self) -> int:
        """Groups that share a slab's columns of dK and dV."""
        return MMA_GROUPS if self.shares_keys else 1

    @property
    def queries(self) -> int:
        """Queries of a block that are at once in a group's S and dP."""
        return self.tile_m // self.shares // self.parts

    def pieces(self, columns: int) -> QueryPieces:
        """The pieces of a tile of dQ, which are computed one after another."""
        return QueryPieces.of(self.tile_m, columns, WIDEST_PIECE[self.parts])

    @property
    def takes_turns(self) -> bool:
        """Whether the MMA warpgroups compute S and P in turns: where P takes them long.

        At head size 64 it takes as long as a product. Where it takes half of that turns gained
        nothing (docs/experiments.md).
        """
        return self.queries > ROWS

    @property
    def registers_of_roles(self) -> Registers:
        return REGISTERS_BY_PARTS[self.parts]

    def smem_bytes(self, spec: AttentionSpec) -> int:
        """Bytes of shared memory for the kernel's buffers and barriers."""
        head_dim, head_dim_v = padded(spec.head_dim), padded(spec.head_dim_v)
        kv = self.tile_n * (self.k_stages * head_dim + head_dim_v)
        queries = self.tile_m * (self.stages * head_dim + self.do_stages * head_dim_v)
        scores = self.tile_m * self.tile_n * self.stages * (2 if self.shares_keys else 1)
        sums = self.pieces(head_dim).numbers_in_flight
        numbers = STATISTICS * self.tile_m * self.stages + sums
        return spec.element.bytes * (kv + queries + scores) + FLOAT_BYTES * numbers + 1024

    def registers(self, spec: AttentionSpec) -> int:
        """Registers of a thread of an MMA warpgroup for its fragments, where most are live."""
        element = spec.element.bytes
        gradients = (padded(spec.head_dim) + padded(spec.head_dim_v)) // 2 // self.shares
        scores = ROWS * self.queries // WARPGROUP
        rounded = scores * element // FLOAT_BYTES
        factors = sum(score.kind.bends for score in spec.scores) * rounded
        # Beside dP: P and dS in 16 bits. With dropout also what dV takes of P, of which half is
        # counted: by what spills, not all of it is live at once.
        beside = 2 * rounded + (rounded // 2 if spec.has_dropout else 0)
        # What a user's mask computes with beside S, or what dropout does with what hides scores.
        beside += scores if spec.mask.templates else 0
        hides = spec.scores or spec.mask.templates or spec.mask.left
        beside += rounded if hides and (spec.has_dropout or gradients >= MANY_GRADIENTS) else 0
        # With 64 scores or more, what is added to them takes another one.
        beside += scores // ROWS if spec.scores else 0
        if self.parts > 1:
            # The part's number, and what hides or changes scores, which is found anew for each.
            beside += rounded * (2 if hides else 1) + (scores if spec.scores else 0)
        return gradients + scores + beside + factors

    def validate(self, spec: AttentionSpec) -> None:
        """Check that the kernel can run this config for this spec.

        Raises:
            TypeError: a field has the wrong type.
            ValueError: the kernel cannot run a field's value.
        """
        for field in fields(self):
            value, kind = getattr(self, field.name), field.type
            if type(value) is not kind:
                raise TypeError(f"{field.name} must be of type {kind.__name__}, got {shown(value)}")
        for name in ("do_stages", "k_stages"):
            if getattr(self, name) not in (1, STAGES):
                raise ValueError(f"{name} must be 1 or {STAGES}, got {getattr(self, name)}")
        keys = ROWS if self.shares_keys else ROWS * MMA_GROUPS
        if self.tile_n != keys:
            raise ValueError(
                f"tile_n must be {keys} with shares_keys={self.shares_keys}, got {self.tile_n}"
            )
        parts = (1,) if self.shares_keys else tuple(REGISTERS_BY_PARTS)
        if self.parts not in parts:
            raise ValueError(
                f"parts must be one of {parts} with shares_keys={self.shares_keys}, got "
                f"{self.parts}"
            )
        if self.statistics_at_once not in (PAIR, QUAD):
            raise ValueError(
                f"statistics_at_once must be {PAIR} or {QUAD}, got {self.statistics_at_once}"
            )
        self.pieces(padded(spec.head_dim))  # raises if dQ has none
        check_fits(self.smem_bytes(spec), self, spec)
        registers = self.registers_of_roles.mma - SPARE_REGISTERS[self.statistics_at_once]
        if self.registers(spec) > registers:
            raise ValueError(
                f"{self} takes {self.registers(spec)} registers a thread for the fragments of "
                f"{spec}, there are {registers}"
            )


class BackwardArguments(NamedTuple):
    """The arguments of a launch of the backward kernel, in this order; the stream comes last.

    Tensors of packed sequences are (total, heads, head_dim).

    Fields:
        q: (batch, seqlen_q, heads_q, head_dim).
        k: (batch, seqlen_k, heads_kv, head_dim).
        v: (batch, seqlen_k, heads_kv, head_dim_v).
        d_out: (batch, seqlen_q, heads_q, head_dim_v).
        dq, dk, dv: like q, k and v, receive the gradients.
        statistics: of `RowStatistics`.
        sums: of `QueryGradients`, receives the sums of dQ.
        modifiers: the tensors of the spec's scores, mask and sinks; None without any.
        softmax_scale: factor of Q K^T.
        window_left, window_right: keys seen before and after a query's own; where they are bounded.
        heads_per_section: key/value heads of a section, see `TileOrder` and `RaggedKeyOrder`. Parts
            of key tiles count as heads.
        num_clusters: the number of CTAs to launch.
        schedule_state: int32; the schedule's table.
        table: int32, the tiles of packed sequences; None without.
        num_sequences: how many are packed; None without.
        dropout: see `DropoutArguments`; None without.
        begin: what it takes to begin queries, see `BeginArguments`.
        split: how CTAs share key tiles; None if each has its own.
    """

    q: object
    k: object
    v: object
    d_out: object
    dq: object
    dk: object
    dv: object
    statistics: object
    sums: object
    modifiers: tuple | None
    softmax_scale: float
    window_left: int
    window_right: int
    heads_per_section: int
    num_clusters: int
    schedule_state: object = None
    table: object = None
    num_sequences: int | None = None
    dropout: DropoutArguments | None = None
    begin: "BeginArguments | None" = None
    split: "SplitArguments | None" = None

    @classmethod
    def symbolic(cls, kernel, sizes: "CallSizes") -> "BackwardArguments":
        """Types of a `Backward`'s arguments without sizes; equal sizes share a symbol."""
        spec, schedule = kernel.spec, kernel.schedule_type
        modifiers = tuple(arguments.strided_tensor(*types) for types in spec.modifier_types)
        keys, values = sizes.of_keys(spec, spec.head_dim), sizes.of_keys(spec, spec.head_dim_v)
        return cls(
            q=sizes.of_queries(spec, spec.head_dim),
            k=keys,
            v=values,
            d_out=sizes.of_queries(spec, spec.head_dim_v),
            dq=sizes.of_queries(spec, spec.head_dim),
            dk=sizes.of_keys(spec, spec.head_dim),
            dv=sizes.of_keys(spec, spec.head_dim_v),
            statistics=numbers(),
            sums=numbers(),
            modifiers=modifiers or None,
            softmax_scale=Float32(0.0),
            window_left=Int32(0),
            window_right=Int32(0),
            heads_per_section=Int32(0),
            num_clusters=Int32(0),
            schedule_state=arguments.compact_tensor("int32", (cute.sym_int(),))
            if schedule.reads_state
            else None,
            table=arguments.compact_tensor("int32", (cute.sym_int(),))
            if schedule.is_ragged
            else None,
            num_sequences=Int32(0) if schedule.is_ragged else None,
            dropout=DropoutArguments.symbolic() if spec.has_dropout else None,
            begin=BeginArguments.symbolic(
                spec, sizes, kernel.has_words, schedule.is_ragged, kernel.has_used_q
            ),
            split=SplitArguments.symbolic() if kernel.splits else None,
        )


class SplitArguments(NamedTuple):
    """How CTAs share key tiles, see `KeySplit` and `GradientParts`.

    Fields:
        head_parts: CTAs among which a key tile's query heads are divided equally.
        block_parts: CTAs among which the query blocks of these heads are divided.
        parts: float32, the sums of dK and dV.
        part_counters: int32, 0 before the kernel.
    """

    head_parts: int
    block_parts: int
    parts: object
    part_counters: object

    @classmethod
    def symbolic(cls) -> "SplitArguments":
        return cls(Int32(0), Int32(0), numbers(), words_of_tiles())


class BeginArguments(NamedTuple):
    """The arguments of a launch of `BackwardBegin`, in this order; the stream comes last.

    Fields:
        out, d_out: (batch, seqlen_q, heads_q, head_dim_v).
        lse: (batch, heads_q, seqlen_q) float32, natural logarithm.
        d_lse: like lse; anything if there is no gradient of the log-sum-exp, lse say.
        has_d_lse: 1 if there is one, else 0.
        statistics: receives `RowStatistics`.
        sums: of `QueryGradients`, receives zeros if they begin with them.
        counters: of the backward kernel, int32: its schedule's, unless a table has them, then those
            from `TO_BEGIN` on; receives zeros.
        num_tiles: how many tiles of queries to begin, the first ones.
        has_zeros: 1 if sums begin with zeros, else 0; 1 if there are no words, or a fixed order.
        cu_seqlens_q, seqused_q: of packed sequences, whose tensors are (total_q, heads_q, ...) and
            (heads_q, total_q); None without.
        words: of `SumWords`, receives zeros; None without `has_words`, see `Backward`.
        kept: the share of P that dropout keeps; None without.
    """

    out: object
    d_out: object
    lse: object
    d_lse: object
    has_d_lse: int
    statistics: object
    sums: object
    counters: object
    num_tiles: int
    has_zeros: int
    cu_seqlens_q: object = None
    seqused_q: object = None
    words: object = None
    kept: float | None = None

    @classmethod
    def symbolic(
        cls,
        spec: AttentionSpec,
        sizes: "CallSizes",
        has_words: bool,
        is_ragged: bool = False,
        has_used_q: bool = False,
    ) -> "BeginArguments":
        """Types of a kernel's arguments without sizes; equal sizes share a symbol."""
        rows = *sizes.of_batch, sizes.heads_q, sizes.seqlen_q
        return cls(
            out=sizes.of_queries(spec, spec.head_dim_v),
            d_out=sizes.of_queries(spec, spec.head_dim_v),
            lse=arguments.compact_tensor("float32", rows),
            d_lse=arguments.compact_tensor("float32", rows),
            has_d_lse=Int32(0),
            statistics=numbers(),
            sums=numbers(),
            counters=words_of_tiles(),
            num_tiles=Int32(0),
            has_zeros=Int32(0),
            cu_seqlens_q=lengths() if is_ragged else None,
            seqused_q=lengths() if has_used_q else None,
            words=words_of_tiles() if has_words else None,
            kept=Float32(0.0) if spec.has_dropout else None,
        )

    def in_batch(self) -> "BeginArguments":
        """Those of packed sequences, with tensors in a batch of one."""
        out, d_out, lse, d_lse = map(in_batch, self[:4])
        return self._replace(out=out, d_out=d_out, lse=lse, d_lse=d_lse)


class CallSizes(NamedTuple):
    """Symbols for the sizes of a call.

    Fields:
        of_batch: (batch,), or () of packed sequences, whose rows are all in one line.
    """

    of_batch: tuple
    seqlen_q: object
    seqlen_k: object
    heads_q: object
    heads_kv: object

    @classmethod
    def symbolic(cls, is_ragged: bool) -> "CallSizes":
        of_batch = () if is_ragged else (cute.sym_int(),)
        return cls(of_batch, *(cute.sym_int() for _ in cls._fields[1:]))

    def of_queries(self, spec: AttentionSpec, columns: int) -> object:
        shape = *self.of_batch, self.seqlen_q, self.heads_q, columns
        return arguments.tma_tensor(spec.dtype, shape)

    def of_keys(self, spec: AttentionSpec, columns: int) -> object:
        shape = *self.of_batch, self.seqlen_k, self.heads_kv, columns
        return arguments.tma_tensor(spec.dtype, shape)


def numbers() -> object:
    """A buffer of float32."""
    return arguments.compact_tensor("float32", (cute.sym_int64(),))


def words_of_tiles() -> object:
    """A buffer of int32."""
    return arguments.compact_tensor("int32", (cute.sym_int64(),))


def lengths() -> object:
    """Lengths of packed sequences, or where they end."""
    return arguments.compact_tensor("int32", (cute.sym_int(),))
