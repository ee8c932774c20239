"""Append new keys and values to a cache.

A rotary embedding, if there is one, turns new keys and queries.

`fa3.calls.prepare` launches it before the attention kernel, which reads the cache, the new
lengths and the rotated queries. Each thread makes one 16-byte vector: it finds its row (one head of
a token), loads the vector and, if it rotates, the vector's partner, and stores the result. Lengths
are read on the device, so a captured graph appends further at every replay.

    blocks (x, 0)   vectors of k into the cache; also the sequences' new lengths, if asked for
    blocks (x, 1)   vectors of v into the cache
    blocks (x, 2)   vectors of q into a separate tensor, if there is a rotary embedding

The next kernel may be launched early; it calls `griddepcontrol_wait` before it reads these results.

Source: Su et al., RoFormer (arXiv 2104.09864), section 3.4.2, for the rotary embedding.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from fa3.kernels.kernel_base import KernelBase
from fa3.primitives import arguments
from fa3.primitives.arithmetic import LARGEST, Divisor
from fa3.primitives.ragged_lengths import read_early, sequence_of
from fa3.primitives.vectors import VECTOR, row_and_vector, vector_of
from fa3.problem import FP8
from fa3.schedules.sequences import capacity_of

THREADS = 256

QUOTIENT = (
    "{.reg .f32 r, q, e, n, x, a; .reg .pred p; rcp.approx.ftz.f32 r, {$r1}; neg.f32 n, {$r1}; "
    "fma.rn.f32 e, n, r, 0f3F800000; fma.rn.f32 r, r, e, r; mul.rn.f32 q, {$r0}, r; "
    "neg.f32 x, {$r0}; fma.rn.f32 e, {$r1}, q, x; neg.f32 n, r; fma.rn.f32 n, n, e, q; "
    "abs.f32 a, q; setp.lt.f32 p, a, 0f4B000000; selp.f32 {$w0}, n, q, p;}"
)
"""PTX of a division: by a reciprocal, after a step of Newton's method. Up to 2^23 the quotient is
corrected by the remainder, so it has a division's bits. -0 stays -0."""

MOST_VECTORS = LARGEST - THREADS
"""Most vectors of k, of v or of q: thread numbers, rounded up to whole blocks, have 32 bits."""


@dataclass(frozen=True)
class Rotary:
    """A rotary embedding of the first `dim` columns of a head."""

    dim: int  # a multiple of 16
    # Whether neighbouring columns are a pair; otherwise columns i and i + dim / 2 are (GPT-NeoX).
    interleaved: bool
    dtype: str  # element type of the tables of cosines and sines


class AppendArguments(NamedTuple):
    """The arguments of a launch, in this order; the stream comes last."""

    # k_cache, v_cache: (batch_cache, seqlen_cache, heads_kv, head_dim or head_dim_v), with pages
    # (num_pages, page_size, heads_kv, ...); written.
    k_cache: object
    v_cache: object
    page_table: object  # (batch, pages) int32; None without pages
    # (batch,) int32, a sequence's row in the cache; None for its index in the batch.
    batch_idx: object
    # k, v: new tokens, (batch, seqlen, heads_kv, ...); if ragged, all sequences' tokens one after
    # another, (total, heads_kv, ...).
    k: object
    v: object
    seqlens: object  # (batch,) int32, tokens in the cache before the append
    # (batch + 1,) int32, where the new tokens of each sequence begin; None if all sequences get
    # equally many.
    cu_seqlens: object
    # (batch,) int32, positions from which the embedding counts; None for seqlens.
    rotary_seqlens: object
    # (batch,) int32, receives the tokens after the append; None if no kernel reads them.
    new_seqlens: object
    q: object  # (batch, seqlen_q, heads_q, head_dim); None without a rotary embedding
    rotated: object  # like q, receives the rotated queries; None without a rotary embedding
    query_step: int  # positions from one query to the next, 0 or 1
    # (batch + 1,) int32, where the queries of each sequence begin and end, if q is (total_q,
    # heads_q, head_dim); None otherwise.
    cu_seqlens_q: object
    # cos, sin: (positions, rotary dim / 2); None without a rotary embedding.
    cos: object
    sin: object
    descales: tuple | None  # see `symbolic_descales`; None unless the cache is FP8

    @classmethod
    def symbolic(cls, kernel: "Append") -> "AppendArguments":
        """Types of a kernel's arguments without sizes; equal sizes share a symbol."""
        dtype, rotary = kernel.dtype, kernel.rotary
        cache_dtype = FP8 if kernel.fp8 else dtype
        batch, tokens, heads = (cute.sym_int() for _ in range(3))
        new = (tokens,) if kernel.ragged else (batch, tokens)
        cache = cute.sym_int(), cute.sym_int()
        rotation, vector = dict.fromkeys(("q", "rotated", "cos", "sin")), arguments.int32_vector
        if rotary is not None:
            rows = (cute.sym_int(),) if kernel.packed else (batch, cute.sym_int())
            queries = dtype, (*rows, cute.sym_int(), kernel.head_dim)
            table = rotary.dtype, (cute.sym_int(), rotary.dim // 2)
            kinds = {"q": queries, "rotated": queries, "cos": table, "sin": table}
            rotation = {name: arguments.tma_tensor(*kind) for name, kind in kinds.items()}
        return cls(
            **arguments.scalars(cls),
            **rotation,
            k=arguments.tma_tensor(dtype, (*new, heads, kernel.head_dim)),
            v=arguments.tma_tensor(dtype, (*new, heads, kernel.head_dim_v)),
            k_cache=arguments.tma_tensor(cache_dtype, (*cache, heads, kernel.head_dim)),
            v_cache=arguments.tma_tensor(cache_dtype, (*cache, heads, kernel.head_dim_v)),
            seqlens=vector(batch),
            new_seqlens=vector(batch, kernel.writes_lengths),
            cu_seqlens=vector(exists=kernel.ragged),
            batch_idx=vector(batch, kernel.batch_indexed),
            page_table=arguments.strided_tensor("int32", 2, kernel.paged),
            cu_seqlens_q=vector(exists=kernel.packed),
            rotary_seqlens=vector(batch, kernel.turned),
            descales=arguments.symbolic_descales(2) if kernel.fp8 else None,
        )


class NewTokens(NamedTuple):
    """The tokens to append, and where they go."""

    call: AppendArguments
    capacity: Int32  # most tokens of a sequence in the cache
    heads: Divisor  # key/value heads
    tokens: Divisor  # tokens of a sequence, if they are equally many

    @property
    def num_tokens(self):
        shape = self.call.k.shape
        return shape[0] if self.call.cu_seqlens is not None else shape[0] * shape[1]

    @cute.jit
    def seqlen(self, sequence) -> Int32:
        """Tokens of a sequence before the append, clamped to the capacity."""
        return cutlass.min(cutlass.max(self.call.seqlens[sequence], 0), self.capacity)

    @cute.jit
    def turn(self, sequence) -> Int32:
        """The position of a sequence's first new token for a rotary embedding."""
        if cutlass.const_expr(self.call.rotary_seqlens is None):
            return self.seqlen(sequence)
        return cutlass.max(self.call.rotary_seqlens[sequence], 0)

    @cute.jit
    def begin(self, sequence) -> Int32:
        """First new token of a sequence, from `cu_seqlens`, clamped to k's."""
        return cutlass.max(cutlass.min(self.call.cu_seqlens[sequence], self.num_tokens), 0)

    @cute.jit
    def count(self, sequence, room) -> Int32:
        """New tokens that a sequence gets, at most `room`."""
        if cutlass.const_expr(self.call.cu_seqlens is None):
            return cutlass.min(self.call.k.shape[1], room)
        count = self.begin(sequence + 1) - self.begin(sequence)
        return cutlass.max(cutlass.min(count, room), 0)

    @cute.jit
    def sequence(self, token) -> tuple:
        """The sequence of a new token, and its index among these."""
        if cutlass.const_expr(self.call.cu_seqlens is None):
            sequence = self.tokens.quotient(token)
            return sequence, token - sequence * self.tokens.value
        sequence = sequence_of(self.call.cu_seqlens, token, self.call.seqlens.shape[0])
        return sequence, token - self.begin(sequence)

    @cute.jit
    def place(self, sequence, nth) -> tuple:
        """Where a new token goes: two indices, and whether there is room."""
        cache, page_table, seqlen = self.call.k_cache, self.call.page_table, self.seqlen(sequence)
        is_kept = nth >= 0 and nth < self.count(sequence, self.capacity - seqlen)
        position, row = seqlen + nth, sequence
        if cutlass.const_expr(self.call.batch_idx is not None):
            row = self.call.batch_idx[sequence]
        num_rows = cache.shape[0] if page_table is None else page_table.shape[0]
        exists = is_kept and row >= 0 and row < num_rows
        outer, inner = row, position
        if cutlass.const_expr(page_table is not None):
            outer, inner = Int32(0), Int32(0)
            if exists:
                page = position // cache.shape[1]
                outer = page_table[row, page]
                inner = position - page * cache.shape[1]
            exists = exists and outer >= 0 and outer < cache.shape[0]
        return outer, inner, exists


@dataclass(frozen=True)
class Append(KernelBase):
    """The append kernel for one kind of cache and one rotary embedding."""

    dtype: str  # element type of q, k, v and, unless it is FP8, the cache
    head_dim: int  # columns of q and k
    head_dim_v: int  # columns of v
    paged: bool  # whether the cache has a page table
    batch_indexed: bool  # whether `batch_idx` maps sequences to rows of the cache
    ragged: bool  # whether sequences get different numbers of new tokens
    # The embedding of k and q; None without one, and then the kernel takes no q.
    rotary: Rotary | None
    # Whether it takes queries of sequences that have different numbers of them.
    packed: bool = False
    turned: bool = False  # whether the embedding counts from positions of its own
    writes_lengths: bool = False  # whether it writes the sequences' new lengths
    fp8: bool = False  # whether the cache is FP8

    entry_name: ClassVar[str] = "fa3_append"
    arguments_type: ClassVar[type] = AppendArguments

    @cute.jit
    def launch(self, call: AppendArguments, stream):
        pages = 1 if call.page_table is None else call.page_table.shape[1]
        capacity = capacity_of(call.k_cache.shape[1], pages)
        tokens = 1 if self.ragged else cutlass.max(call.k.shape[1], 1)
        new = NewTokens(call, capacity, *map(Divisor.of, (call.k_cache.shape[2], tokens)))
        rows = new.num_tokens * call.k_cache.shape[2]
        columns = max(self.head_dim, self.head_dim_v)
        vectors = cutlass.max(rows * (columns // VECTOR), call.seqlens.shape[0])
        if cutlass.const_expr(self.rotary is not None):
            queries = math.prod(call.q.shape[:-1])
            vectors = cutlass.max(vectors, queries * (self.head_dim // VECTOR))
        self.kernel(new).launch(
            grid=(cute.ceil_div(vectors, THREADS), 2 if self.rotary is None else 3, 1),
            block=(THREADS, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, new: NewTokens):
        cute.arch.griddepcontrol_launch_dependents()
        if cutlass.const_expr(self.ragged or self.packed):
            cute.arch.griddepcontrol_wait()  # It may write where sequences begin.
        block, part, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        index, call = block * THREADS + thread, new.call
        scale_k, scale_v = (None, None) if call.descales is None else call.descales
        tables = None if self.rotary is None else (call.cos, call.sin)
        if part == 0:
            self.append(index, new, call.k, call.k_cache, tables, scale_k)
            if cutlass.const_expr(self.writes_lengths):
                cute.arch.griddepcontrol_wait()
                if index < call.new_seqlens.shape[0]:
                    seqlen = new.seqlen(index)
                    call.new_seqlens[index] = seqlen + new.count(index, new.capacity - seqlen)
        elif part == 1:
            self.append(index, new, call.v, call.v_cache, None, scale_v)
        else:
            if cutlass.const_expr(self.rotary is not None):
                self.rotate_query(index, new, tables)
        # Also threads without a vector: the next kernel waits for this one only.
        cute.arch.griddepcontrol_wait()

    @cute.jit
    def append(self, index, new: NewTokens, tokens, cache, tables: tuple | None, scales):
        """Write vector `index` of the new keys or values into the cache."""
        row, vector = row_and_vector(index, cache.shape[3])
        token = new.heads.quotient(row)
        head = row - token * new.heads.value
        if token < new.num_tokens:
            sequence, nth = new.sequence(token)
            at = (token, head, None) if self.ragged else (sequence, nth, head, None)
            # Loaded before the place is found, so that all latencies pass at once.
            values = load_values(tokens[at], vector)
            scale = None if scales is None else read_early(scales, (sequence, head))
            outer, inner, exists = new.place(sequence, nth)
            if exists:
                ends = tokens[at], cache[outer, inner, head, None]
                self.move(values, *ends, vector, tables, new.turn(sequence) + nth, scale)

    @cute.jit
    def rotate_query(self, index, new: NewTokens, tables: tuple):
        """Write vector `index` of the rotated queries."""
        call = new.call
        heads, head_dim = call.q.shape[-2:]
        row, vector = row_and_vector(index, head_dim)
        token, head = row // heads, row % heads
        if cutlass.const_expr(self.packed):
            ends = call.cu_seqlens_q
            sequence = sequence_of(ends, token, ends.shape[0] - 1)
            nth = token - ends[sequence]
            is_query = token < call.q.shape[0] and nth >= 0 and token < ends[sequence + 1]
            at = token, head, None
        else:
            sequence = token // call.q.shape[1]
            nth = token - sequence * call.q.shape[1]
            # Without queries the division gives anything.
            is_query = token < call.q.shape[0] * call.q.shape[1]
            at = sequence, nth, head, None
        if is_query:
            values = load_values(call.q[at], vector)
            position = new.turn(sequence) + nth * call.query_step
            self.move(values, call.q[at], call.rotated[at], vector, tables, position)

    @cute.jit
    def move(
        self,
        values: cute.Tensor,  # the vector's, from `source`
        source: cute.Tensor,
        target: cute.Tensor,
        vector: Int32,
        tables: tuple | None,  # the tensors of cosines and sines
        position: Int32,
        scale: Float32 | None = None,
    ):
        """Write one vector of a row.
        It is rotated if there are tables, and divided by a scale for FP8."""
        if cutlass.const_expr(tables is not None):
            self.rotate(values, source, vector, tables, position)
        if cutlass.const_expr(scale is not None):
            values = divided(values, scale, target.element_type)
        cute.autovec_copy(values, vector_of(target, vector))

    @cute.jit
    def rotate(self, values: cute.Tensor, source: cute.Tensor, vector: Int32, tables, position):
        """Rotate vector `vector` of a row if the embedding has its columns."""
        if vector * VECTOR < self.rotary.dim:
            row = cutlass.min(position, tables[0].shape[0] - 1)
            cos, sin = (table[row, None] for table in tables)
            if cutlass.const_expr(self.rotary.interleaved):
                rotate_pairs(values, cos, sin, vector)
            else:
                rotate_halves(values, source, cos, sin, vector, self.rotary.dim // 2)


def load_values(row: cute.Tensor, index) -> cute.Tensor:
    """Load a vector of a row, when the previous kernel has ended.
    Until then that may write k, v or q, or read the cache; its address is worked out meanwhile. The
    compiler does not move such a load past a branch, as it would another one."""
    code = "ld.relaxed.gpu.global.v4.b32 { {$w0}, {$w1}, {$w2}, {$w3} }, [{$r0}];"
    values, address = cute.make_rmem_tensor(4, Uint32), vector_of(row, index).iterator.toint()
    cute.arch.griddepcontrol_wait()
    loaded = cute.arch.inline_ptx(code, write_only_types=[Uint32] * 4, read_only_args=[address])
    for i in range(4):
        values[i] = loaded[i]
    return cute.recast_tensor(values, row.element_type)


@cute.jit
def load(row: cute.Tensor, index, size: cutlass.Constexpr) -> cute.Tensor:
    """Load a vector of a row into registers, as float32."""
    widened = cute.make_rmem_tensor(size, Float32)
    widened.store(vector_of(row, index, size).load().to(Float32))
    return widened


def divided(values: cute.Tensor, scale: Float32, dtype) -> cute.Tensor:
    """Divide a vector and round it to FP8.
    Quotients have a division's bits, without its branches. Rounding limits what is too large."""
    # With scales beyond these there may be no reciprocal. They count as these.
    scale = cute.arch.fmin(cute.arch.fmax(scale, Float32(2.0**-100)), Float32(2.0**100))
    quotients, rounded = (cute.make_rmem_tensor(VECTOR, one) for one in (Float32, dtype))
    for i in range(VECTOR):
        both = {"write_only_types": [Float32], "read_only_args": [values[i].to(Float32), scale]}
        quotients[i] = cute.arch.inline_ptx(QUOTIENT, **both)
    rounded.store(quotients.load().to(dtype))
    return rounded


@cute.jit
def rotate_pairs(values: cute.Tensor, cos_row: cute.Tensor, sin_row: cute.Tensor, vector):
    """Rotate a vector in which neighbouring elements are pairs."""
    cos, sin = (load(row, vector, VECTOR // 2) for row in (cos_row, sin_row))
    x = cute.make_rmem_tensor(VECTOR, Float32)
    x.store(values.load().to(Float32))
    for i in cutlass.range_constexpr(VECTOR // 2):
        first, second = x[2 * i], x[2 * i + 1]
        x[2 * i] = first * cos[i] - second * sin[i]
        x[2 * i + 1] = second * cos[i] + first * sin[i]
    values.store(x.load().to(values.element_type))


@cute.jit
def rotate_halves(values, source, cos_row, sin_row, vector: Int32, half: cutlass.Constexpr):
    """Rotate a vector with its partner in the other half.
    The halves are of a row's first 2 * `half` columns."""
    is_first = vector * VECTOR < half
    steps = half // VECTOR
    angle = vector if is_first else vector - steps
    partner = load(source, vector + steps if is_first else angle, VECTOR)
    cos, sin = (load(row, angle, VECTOR) for row in (cos_row, sin_row))
    sign = Float32(-1.0) if is_first else Float32(1.0)
    x = cute.make_rmem_tensor(VECTOR, Float32)
    x.store(values.load().to(Float32))
    for i in cutlass.range_constexpr(VECTOR):
        x[i] = x[i] * cos[i] + sign * (partner[i] * sin[i])
    values.store(x.load().to(values.element_type))
