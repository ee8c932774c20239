"""A call: its tensors by name, what they are like, and whether they fit together.

All functions hand on their tensors in one order, `TENSORS`. An `AttentionCall` says what each of
them is like, and what follows from that. Repeated calls share it, so it has no number that differs
from step to step: no total of packed rows, and of packed keys no number of sequences. These are
looked at in each call (`check_sizes`), and so are the numbers in int32 tensors (`values`).
"""

from collections import namedtuple
from dataclasses import replace

import torch

from fa3.calls.eager import check_resolved
from fa3.calls.modifiers import (
    ModifierSpec,
    check_alibi_slopes,
    check_sinks,
    structure_of,
)
from fa3.calls.operands import (
    ALIGNMENT,
    DIMENSIONS,
    DTYPES,
    FP8_DTYPE,
    PACKED_DIMENSIONS,
    Description,
    Operand,
    check_contiguous,
    check_device,
    check_dtype,
    check_head_dim,
    check_heads_divide,
    check_kind,
    check_layout,
    check_like_q,
    check_no_overlap,
    check_output,
    check_rank,
    check_same_kind,
    check_shape,
    check_stride,
    describe,
    dtype_of_output,
    operand_of,
)
from fa3.calls.options import (
    CACHED,
    DENSE,
    PACKED,
    PAGED,
    Options,
)
from fa3.kernels.forward_launch import FEWEST_ROWS
from fa3.planning.decode import Sizes
from fa3.primitives.arithmetic import LARGEST
from fa3.primitives.cache_blocks import CacheLayout
from fa3.problem import FP8, FP8_HEAD_DIM_UNIT, FP8_UNIT, AttentionSpec, Problem, Window
from fa3.schedules.sequences import LONGEST, capacity_of

TENSORS = (
    "q", "k", "v", "k_new", "v_new", "rotary_cos", "rotary_sin", "seqused_k", "cache_batch_idx",
    "cache_leftpad", "page_table", "cu_seqlens_k_new", "cu_seqlens_q", "rotary_seqlens",
    "seqused_q", "cu_seqlens_k", "q_descale", "k_descale", "v_descale", "alibi_slopes", "sinks",
    "out",
)  # fmt: skip
"""All tensors of a call, except the tensors of the user's functions. Calls hand them on in plain
tuples, which take the host less time. k and v are the cache of a call on one, and k_new and v_new
the tokens that it gets. From seqused_k to cu_seqlens_k they are int32."""

OF_INTEGERS = slice(7, 15)
INTEGERS = TENSORS[OF_INTEGERS]
"""The int32 tensors that a call on a cache may have: where they are, and their names."""

DESCALE_NAMES = "q_descale", "k_descale", "v_descale"
"""What elements of FP8 tensors are multiplied by."""

TENSORS_OF_DENSE = "q", "k", "v", "alibi_slopes", "sinks", *DESCALE_NAMES  # of a dense call

NAMES_ON_CACHE = {
    "k": "k_cache", "v": "v_cache", "k_new": "k", "v_new": "v", "seqused_k": "cache_seqlens",
}  # fmt: skip
NAMES_BY_KIND = dict.fromkeys((DENSE, PACKED, PAGED), TENSORS)
NAMES_BY_KIND[CACHED] = tuple(NAMES_ON_CACHE.get(name, name) for name in TENSORS)
"""What functions call the tensors."""

ALIGNMENTS = tuple(
    1 if name in (*INTEGERS, "cu_seqlens_k", *DESCALE_NAMES, "alibi_slopes", "sinks") else ALIGNMENT
    for name in TENSORS
)
"""Bytes to which each of the tensors must be aligned."""


def indices_of(*names: str) -> tuple[int, ...]:
    """Where tensors are in `TENSORS`."""
    return tuple(map(TENSORS.index, names))


PACKED_ALIGNMENTS = (ALIGNMENT,) * 3 + (1,) * 9
"""Of q, k, v, the `LENGTHS_OF_PACKED`, alibi_slopes, sinks and descales."""

PLACES_WITH_GRADIENT = indices_of("q", "k", "v", "sinks")
"""The tensors of calls on packed keys that may require grad."""

LENGTHS_OF_PACKED = "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"
PLACES_OF_LENGTHS = indices_of(*LENGTHS_OF_PACKED)
PLACES_OF_BATCH = indices_of("alibi_slopes", *DESCALE_NAMES)
PLACES_OF_ANY_LENGTH = (*indices_of("q", "k", "v"), *PLACES_OF_LENGTHS)
"""The tensors of a call on packed keys whose rows or entries may be more or fewer in each call."""

REQUIRED_OF_PACKED = indices_of("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")

PLACES_OF_TOTAL = indices_of("q", "out")
"""The tensors that have as many rows as there are packed queries."""

ANY_NUMBER = 1  # in a description, what may be another number in each call

PAGED_DIMENSIONS = ("num_pages", "page_size", "heads", "head_dim")
RAGGED_DIMENSIONS = ("total_new", "heads", "head_dim")

LENGTHS = "an integer or an int32 torch.Tensor"  # what cache_seqlens may be
ROTARY_UNIT = 16  # A rotary embedding turns a multiple of this many columns

SPARE = 1024  # positions beyond the last key that kernels count, in blocks
MOST_FORWARD_TILES = 1 << 24  # tiles at most: 32 bits count their marks and log-sum-exps

MOST_RAGGED_ROWS = 1 << 29
"""Rows of a tensor at most: 32 bits hold the sum of two rows' numbers and a bound of a window."""

Integers = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]
"""The tensors that `LENGTHS_OF_PACKED` names."""

Described = tuple[Description | None, ...]
"""What each of the `TENSORS` is like; None where none is given."""


def describe_tensors(kind: str, tensors: tuple[torch.Tensor | None, ...]) -> Described:
    """Describe each of the `TENSORS` that is given."""
    required, with_gradient = (0, 1, 2), ()
    if kind == PACKED:
        required, with_gradient = REQUIRED_OF_PACKED, PLACES_WITH_GRADIENT
    described = tuple([
        None if tensor is None and i not in required
        else describe(name, tensor, alignment, i in with_gradient)
        for i, (name, tensor, alignment) in enumerate(
            zip(NAMES_BY_KIND[kind], tensors, ALIGNMENTS, strict=True)
        )
    ])  # fmt: skip
    # Kernels read memory, where a lazy negation or conjugation is not done yet.
    names = *DESCALE_NAMES, "alibi_slopes", "sinks"
    for name, tensor in zip(names, tensors[-6:-1], strict=True):
        if tensor is not None:
            check_resolved(name, tensor)
    return described


def packed_tensors(
    q, k, v, ends_q, ends_k, used_q, used_k, slopes, sinks, *descales
) -> tuple[torch.Tensor | None, ...]:
    """The `TENSORS` of a call on packed keys."""
    return (
        q, k, v, *[None] * 4, used_k, *[None] * 4, ends_q, None, used_q, ends_k, *descales,
        slopes, sinks, None,
    )  # fmt: skip


def without_total(described: Described) -> Described:
    """What calls with packed queries on a cache have in common that differ in their total only: no
    output, and of q all but its rows. Strides do not depend on them."""
    shape, *rest = described[0]
    if len(shape) != len(PACKED_DIMENSIONS):
        # It is refused, as it is.
        return described
    return (((ANY_NUMBER, *shape[1:]), *rest), *described[1:-1], None)


def without_lengths(described: Described) -> Described:
    """What calls on packed keys have in common that differ in their lengths and strides only."""
    found = list(described)
    for place in PLACES_OF_ANY_LENGTH:
        if found[place] is not None:
            (_, *sizes), _, *kind = found[place]
            strides = (*[0] * len(sizes), 1)
            found[place] = ((ANY_NUMBER, *sizes), strides, *kind)
    for place in PLACES_OF_BATCH:
        if found[place] is not None:
            shape, *rest = found[place]
            found[place] = ((ANY_NUMBER,) * (len(shape) - 1) + shape[-1:], *rest)
    return (*found[:-1], None)


class AttentionCall(
    namedtuple(
        "AttentionCall", (*TENSORS, "kind", "max_seqlen_q"), defaults=(*[None] * 10, CACHED, None)
    )
):
    """What each of the `TENSORS` is like, an `Operand`, and what follows from that.

    Fields:
        kind: which function has them.
        max_seqlen_q: the most queries of a sequence, if they are packed on a cache.
    """

    __slots__ = ()

    @classmethod
    def of(
        cls, described: Described, kind: str, max_seqlen_q: int | None = None
    ) -> "AttentionCall":
        """The call whose tensors are described."""
        return cls(*map(operand_of, described), kind, max_seqlen_q)

    @classmethod
    def dense(cls, *operands: Operand | None) -> "AttentionCall":
        """A dense call: q, k, v, alibi_slopes, sinks and, if there are any, descales."""
        named = dict(zip(TENSORS_OF_DENSE, operands, strict=False))
        return cls(**dict.fromkeys(TENSORS) | named, kind=DENSE)

    @property
    def is_packed(self) -> bool:
        """Whether the queries of sequences are packed."""
        return self.cu_seqlens_q is not None

    @property
    def has_cache(self) -> bool:
        return self.kind in (CACHED, PAGED)

    @property
    def batch(self) -> int:
        return self.cu_seqlens_q.shape[0] - 1 if self.is_packed else self.q.shape[0]

    @property
    def seqlen_q(self) -> int:
        """Queries of a sequence; of packed ones the most."""
        return self.max_seqlen_q if self.is_packed else self.q.shape[1]

    @property
    def heads_q(self) -> int:
        return self.q.shape[-2]

    @property
    def heads_kv(self) -> int:
        return self.k.shape[-2]

    @property
    def head_dim(self) -> int:
        return self.q.shape[-1]

    @property
    def head_dim_v(self) -> int:
        return self.v.shape[-1]

    @property
    def num_sequences(self) -> int:
        """Sequences that the cache has room for."""
        return (self.page_table or self.k).shape[0]

    @property
    def page_size(self) -> int:
        """Tokens of a page; of a whole sequence in a cache without pages."""
        return self.k.shape[1]

    @property
    def capacity(self) -> int:
        """Tokens that a sequence can have."""
        return capacity_of(self.page_size, self.page_table.shape[1] if self.page_table else 1)

    @property
    def cache_layout(self) -> CacheLayout:
        """How keys are laid out in the cache."""
        return CacheLayout(
            0 if self.page_table is None else self.page_size,
            self.cache_batch_idx is not None,
            self.cache_leftpad is not None,
            is_fp8=self.has_fp8_cache,
        )

    @property
    def has_fp8_cache(self) -> bool:
        """Whether keys and values are FP8."""
        return self.has_cache and self.k.dtype == FP8_DTYPE

    @property
    def has_fp8_q(self) -> bool:
        """Whether queries are FP8, as the cache is."""
        return self.has_fp8_cache and self.q.dtype == FP8_DTYPE

    @property
    def is_fp8(self) -> bool:
        """Whether queries, keys and values are multiplied in FP8."""
        return not self.has_cache and self.q.dtype == FP8_DTYPE

    @property
    def q_in_16_bits(self) -> Operand:
        """q, with the dtype that its output has."""
        return self.q._replace(dtype=dtype_of_output(self.q.dtype))

    @property
    def out_shape(self) -> tuple[int, ...]:
        return *self.q.shape[:-1], self.head_dim_v

    @property
    def seqlen_new(self) -> int:
        """Tokens that a sequence gets; of all sequences with cu_seqlens_k_new."""
        return 0 if self.k_new is None else self.k_new.shape[-3]

    def name(self, tensor: str) -> str:
        """What the function calls one of the `TENSORS`."""
        return NAMES_BY_KIND[self.kind][TENSORS.index(tensor)]

    def modifiers(self, options: Options, is_causal: bool) -> ModifierSpec:
        """What is compiled of scores, mask, sinks and dropout.

        Args:
            is_causal: no key after a query's own position is visible.
        """
        slopes, sinks = self.alibi_slopes, self.sinks
        structure = structure_of(
            options.softcap,
            None if slopes is None else len(slopes.shape),
            None if sinks is None else sinks.dtype,
            is_causal,
        )
        if options.functions is not None:
            structure = structure.joined(options.functions)
        return structure._replace(has_dropout=options.has_dropout)

    def spec(self, options: Options, window: Window, is_causal: bool) -> AttentionSpec:
        """What is compiled.

        Args:
            window: the bounds that may hide a key.
        """
        modifiers, out_dtype = self.modifiers(options, is_causal), self.q_in_16_bits.dtype
        spec = modifiers.spec(out_dtype, self.head_dim, self.head_dim_v, window)
        if not self.is_fp8:
            return spec
        if options.has_dropout:
            raise NotImplementedError(f"dropout_p must be 0 with q in {FP8_DTYPE}")
        return replace(spec, dtype=FP8, fp8_out=options.fp8_out)

    def packed_spec(self, options: Options) -> tuple[AttentionSpec, Window]:
        """What is compiled for packed sequences, and the bounds that any lengths may have."""
        window = options.window.tighten(MOST_RAGGED_ROWS, MOST_RAGGED_ROWS)
        return self.spec(options, window, window.right == 0), window

    def problem(self, options: Options) -> Problem:
        """The problem of a dense call; raises unless the tensors pose one."""
        check_tensors(self)
        (batch, seqlen_q, heads_q, _), seqlen_k = self.q.shape, self.k.shape[1]
        window = options.window.tighten(seqlen_q, seqlen_k)
        spec = self.spec(options, window, options.window.right == 0)
        group = heads_q // max(1, self.heads_kv)
        return Problem(spec, batch, seqlen_q, seqlen_k, self.heads_kv, group, window)


# ------------------------------------------------------------------------------------ tensors


def check_tensors(call: AttentionCall) -> None:
    """Raise if the tensors do not describe one call."""
    if call.is_packed:
        check_rank("q", call.q, PACKED_DIMENSIONS)
    else:
        check_rank("q", call.q)
    is_narrow = 1 in (call.k.dtype.itemsize, call.v.dtype.itemsize)
    if (call.has_cache and is_narrow) or call.q.dtype == FP8_DTYPE:
        check_fp8(call)
    check_kind(call.q_in_16_bits)
    check_layout("q", call.q)
    check_descales(call)
    if call.kind == PACKED:
        check_packed_keys(call)
    else:
        check_keys(call)
    check_heads_divide(call.q, call.name("k"), call.k)
    if call.has_cache:
        check_cache(call)
    elif call.kind == DENSE:
        check_forward_counts(call.batch, call.seqlen_q, call.k.shape[1], call.heads_q)
    if call.alibi_slopes is not None and call.kind != PACKED:
        check_alibi_slopes(call.alibi_slopes, call.q, call.batch)
    if call.sinks is not None:
        check_sinks(call.sinks, call.q_in_16_bits)
    if call.out is not None:
        check_output(call.out, call.out_shape, call.q)


def check_fp8(call: AttentionCall) -> None:
    """Raise unless keys and values in FP8 go with q."""
    name_k, name_v = call.name("k"), call.name("v")
    check_dtype(name_k, call.k, FP8_DTYPE)
    check_dtype(name_v, call.v, FP8_DTYPE)
    check_dtype("q", call.q, *DTYPES, FP8_DTYPE)
    unit, reason = (FP8_HEAD_DIM_UNIT, "q in FP8") if call.is_fp8 else (FP8_UNIT, "an FP8 cache")
    for name, operand in (("q", call.q), (name_v, call.v)):
        if operand.shape[-1] % unit:
            raise ValueError(
                f"{name} has head_dim {operand.shape[-1]}, supported with {reason} are multiples "
                f"of {unit}"
            )
    if call.has_fp8_q and call.k_new is not None:
        raise ValueError(
            f"k and v must be None with q in {FP8_DTYPE}: tokens are appended from 16 bits"
        )


def check_descales(call: AttentionCall) -> None:
    """Raise unless each descale goes with a tensor in FP8."""
    for name, of_call in zip(DESCALE_NAMES, ("q", "k", "v"), strict=True):
        descale, operand = getattr(call, name), getattr(call, of_call)
        if descale is None:
            continue
        if operand.dtype != FP8_DTYPE:
            raise ValueError(
                f"{name} must be None unless {call.name(of_call)} is {FP8_DTYPE}, got "
                f"{call.name(of_call)} in {operand.dtype}"
            )
        check_dtype(name, descale, torch.float32)
        check_device(name, descale, "q", call.q)
        if call.kind != PACKED:  # there `check_sizes` does it, for each number of sequences
            check_shape(name, descale, (call.batch, call.heads_kv), "q and " + call.name("k"))


def check_packed_keys(call: AttentionCall) -> None:
    """Raise unless packed k and v go with q."""
    check_same_kind("k", call.k, call.q)
    check_same_kind("v", call.v, call.q)
    check_head_dim("v", call.v)
    if call.k.shape[2] != call.head_dim:
        raise ValueError(f"k must have head_dim {call.head_dim} like q, got {call.k.shape[2]}")
    if call.v.shape[1] != call.heads_kv:
        raise ValueError(f"v must have {call.heads_kv} heads like k, got {call.v.shape[1]}")


def check_steps(name: str, operand: Operand) -> None:
    """Raise unless kernels can step to where other sequences would be, also along a single row."""
    check_stride(name, operand, 0)
    check_stride(name, operand, 1)


def check_keys(call: AttentionCall) -> None:
    """Raise unless k and v, or the pages of a cache, go with q."""
    name_k, name_v = call.name("k"), call.name("v")
    if call.is_packed:
        check_packed_queries(call)
    dimensions = DIMENSIONS if call.page_table is None else PAGED_DIMENSIONS
    kind = call.q._replace(dtype=FP8_DTYPE) if call.has_fp8_cache else call.q
    check_like_q(name_k, call.k, kind, dimensions)
    check_like_q(name_v, call.v, kind, dimensions)
    check_head_dim(name_v, call.v)
    outer, inner, heads_kv, _ = call.k.shape
    if call.page_table is not None and inner == 0:
        raise ValueError(
            f"{name_k} must have pages of 1 token or more to go with page_table, got shape "
            f"{tuple(call.k.shape)}"
        )
    sequences = outer if call.has_cache else call.batch
    check_shape(name_k, call.k, (sequences, inner, heads_kv, call.head_dim), "q")
    check_shape(name_v, call.v, (outer, inner, heads_kv, call.head_dim_v), name_k)


def check_packed_queries(call: AttentionCall) -> None:
    """Raise unless packed queries can be cut into sequences."""
    ends = call.cu_seqlens_q
    if len(ends.shape) != 1 or not ends.shape[0]:
        raise ValueError(f"cu_seqlens_q must have shape (batch + 1,), got {tuple(ends.shape)}")
    if call.max_seqlen_q is None:
        raise ValueError("max_seqlen_q must be given with cu_seqlens_q")
    check_steps("q", call.q)


def check_forward_counts(batch: int, seqlen_q: int, seqlen_k: int, heads: int) -> None:
    """Raise unless kernels can count queries, keys and tiles in 32 bits; `heads` are q's."""
    most_keys = LARGEST - SPARE - 2 * seqlen_q
    if seqlen_k > most_keys:
        if most_keys < 1:
            most_queries = (LARGEST - SPARE - 1) // 2
            raise ValueError(f"q must have at most {most_queries} queries, got {seqlen_q}")
        raise ValueError(
            f"k must have at most {most_keys} keys with {seqlen_q} queries, got {seqlen_k}"
        )
    if batch * heads * (seqlen_q // FEWEST_ROWS + 1) > MOST_FORWARD_TILES:
        raise ValueError(
            f"q must have at most {MOST_FORWARD_TILES} tiles of {FEWEST_ROWS} rows, got batch "
            f"{batch}, {seqlen_q} queries and {heads} heads"
        )


# ----------------------------------------------------------------------- a call on packed keys


def check_sizes(described: Described) -> int:
    """Raise unless TMA can walk packed q, k and v, and lengths and slopes are of their sequences.

    Returns:
        the number of sequences.
    """
    for name, description in zip(("q", "k", "v"), described, strict=False):
        check_rows(name, description)
    ends = described[PLACES_OF_LENGTHS[0]]
    shape, device, q = ends[0], described[0][3], Operand(*described[0])
    if len(shape) != 1 or not shape[0]:
        raise ValueError(f"cu_seqlens_q must have shape (batch + 1,), got {tuple(shape)}")
    batch = shape[0] - 1
    for place in PLACES_OF_LENGTHS:
        name, description = TENSORS[place], described[place]
        entries = batch + name.startswith("cu_seqlens")
        # Nearly all are like this, and are spared the checks.
        if description not in (None, ((entries,), (1,), torch.int32, device)):
            operand = Operand(*description)
            check_dtype(name, operand, torch.int32)
            check_device(name, operand, "q", q)
            check_shape(name, operand, (entries,), "cu_seqlens_q")
            check_contiguous(name, operand)
    slopes = described[-3]
    if slopes is not None:
        check_alibi_slopes(Operand(*slopes), q, batch)
    for name in DESCALE_NAMES:
        descale = described[TENSORS.index(name)]
        if descale is not None and q.dtype == FP8_DTYPE:
            heads_kv = described[1][0][-2]
            check_shape(name, Operand(*descale), (batch, heads_kv), "cu_seqlens_q and k")
    return batch


def check_rows(name: str, description: Description) -> None:
    """Raise unless a tensor is (total, heads, head_dim), and TMA can read it without a copy."""
    shape, stride, dtype, *_ = description
    unit = ALIGNMENT // dtype.itemsize
    if len(shape) != 3 or stride[2] != 1 or stride[0] % unit or stride[1] % unit:
        operand = Operand(*description)
        check_rank(name, operand, PACKED_DIMENSIONS)
        check_contiguous(name, operand)
        check_steps(name, operand)


def are_of_batch(
    integers: Integers,
    slopes: torch.Tensor | None,
    batch: int,
    scale_q: torch.Tensor | None = None,
    scale_k: torch.Tensor | None = None,
    scale_v: torch.Tensor | None = None,
) -> bool:
    """Whether lengths, vectors all, slopes and descales have entries for so many sequences."""
    _, ends_k, used_q, used_k = integers
    return (
        ends_k.shape[0] == batch + 1 > 0
        and (used_q is None or used_q.shape[0] == batch)
        and (used_k is None or used_k.shape[0] == batch)
        and (slopes is None or slopes.ndim == 1 or slopes.shape[0] == batch)
        and (scale_q is None or scale_q.shape[0] == batch)
        and (scale_k is None or scale_k.shape[0] == batch)
        and (scale_v is None or scale_v.shape[0] == batch)
    )


def check_totals(
    q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], batch: int
) -> tuple[int, int]:
    """Raise unless k and v have the same rows, and kernels can count rows and tiles in 32 bits.

    Args:
        q, k, v: their shapes.

    Returns:
        the rows of q, and the rows of k.
    """
    (total_q, heads, _), total_k, total_v = q, k[0], v[0]
    if total_v != total_k:
        raise ValueError(f"v must have {total_k} rows like k, got {total_v}")
    if total_q > MOST_RAGGED_ROWS or total_k > MOST_RAGGED_ROWS:
        name, total = ("q", total_q) if total_q > MOST_RAGGED_ROWS else ("k", total_k)
        raise ValueError(f"{name} must have at most {MOST_RAGGED_ROWS} rows, got {total}")
    if heads * (total_q // FEWEST_ROWS + batch) > MOST_FORWARD_TILES:
        raise ValueError(
            f"q must have at most {MOST_FORWARD_TILES} tiles of {FEWEST_ROWS} rows, got {total_q} "
            f"rows of {batch} sequences and {heads} heads"
        )
    return total_q, total_k


# ----------------------------------------------------------------------------- a call on a cache


def check_cache(call: AttentionCall) -> None:
    """Raise unless a cache can be attended to and appended to like this."""
    if call.max_seqlen_q is not None and not call.is_packed:
        raise ValueError(f"max_seqlen_q must be None without cu_seqlens_q, got {call.max_seqlen_q}")
    check_indices(call)
    if call.k_new is not None or call.v_new is not None:
        check_new_tokens(call)
    if call.rotary_cos is not None or call.rotary_sin is not None:
        check_rotary(call)
    elif call.rotary_seqlens is not None:
        raise ValueError("rotary_seqlens must be None without rotary_cos and rotary_sin")
    check_cache_counts(call)


def check_cache_counts(call: AttentionCall) -> None:
    """Raise if 32 bits, in which kernels count, do not do for a size or what follows from it."""
    for name in TENSORS:
        operand = getattr(call, name)
        if operand is not None and max(operand.shape, default=0) > LARGEST:
            raise ValueError(
                f"{call.name(name)} must have sizes of at most {LARGEST}, got shape "
                f"{tuple(operand.shape)}"
            )
    if call.page_size > LONGEST:
        raise ValueError(
            f"{call.name('k')} must have at most {LONGEST} tokens of a sequence, or in a page, got "
            f"{call.page_size}"
        )
    group = call.heads_q // max(1, call.heads_kv)
    Sizes(call.batch, call.seqlen_q, call.heads_kv, group, call.capacity).check("q")


def check_indices(call: AttentionCall) -> None:
    """Raise unless the int32 tensors have one row for each sequence of q."""
    for name in INTEGERS:
        operand = getattr(call, name)
        if operand is None:
            continue
        shown = call.name(name)
        check_dtype(shown, operand, torch.int32)
        if operand.device not in (call.q.device, torch.device("cpu")):
            raise ValueError(
                f"{shown} must be on {call.q.device} like q, or on the CPU, got {operand.device}"
            )
        if name == "page_table":
            check_rank(shown, operand, ("batch", "pages"))
        else:
            entries = call.batch + name.startswith("cu_seqlens")
            check_shape(shown, operand, (entries,), "q")
        check_contiguous(shown, operand)
    if call.cache_batch_idx is None and call.num_sequences != call.batch:
        name = call.name("k") if call.page_table is None else "page_table"
        raise ValueError(
            f"{name} must have {call.batch} rows like q, or cache_batch_idx must say which are "
            f"meant, got {call.num_sequences}"
        )


def check_new_tokens(call: AttentionCall) -> None:
    """Raise unless tokens can be appended to the cache."""
    for name, operand, other in (("k", call.k_new, "v"), ("v", call.v_new, "k")):
        if operand is None:
            raise ValueError(f"{name} must be given with {other}")
    ragged = call.cu_seqlens_k_new is not None
    dimensions = RAGGED_DIMENSIONS if ragged else DIMENSIONS
    check_like_q("k", call.k_new, call.q, dimensions)
    check_like_q("v", call.v_new, call.q, dimensions)
    tokens = call.k_new.shape[:1] if ragged else (call.batch, call.seqlen_new)
    check_shape("k", call.k_new, (*tokens, call.heads_kv, call.head_dim), "q and k_cache")
    check_shape("v", call.v_new, (*tokens, call.heads_kv, call.head_dim_v), "k and v_cache")
    check_no_overlap("k_cache", call.k)
    check_no_overlap("v_cache", call.v)


def check_rotary(call: AttentionCall) -> None:
    """Raise unless the tables of a rotary embedding fit the heads."""
    for name, other in (("rotary_cos", "rotary_sin"), ("rotary_sin", "rotary_cos")):
        operand = getattr(call, name)
        if operand is None:
            raise ValueError(f"{name} must be given with {other}")
        if call.k_new is None:
            raise ValueError(f"{name} must be None without k and v: nothing is appended")
        check_rank(name, operand, ("positions", "rotary_dim / 2"))
        check_dtype(name, operand, call.q.dtype, torch.float32)
        check_device(name, operand, "q", call.q)
        check_layout(name, operand)
    check_shape("rotary_sin", call.rotary_sin, tuple(call.rotary_cos.shape), "rotary_cos")
    if call.rotary_sin.dtype != call.rotary_cos.dtype:
        raise TypeError(
            f"rotary_sin must be {call.rotary_cos.dtype} like rotary_cos, "
            f"got {call.rotary_sin.dtype}"
        )
    positions, half = call.rotary_cos.shape
    if positions == 0:
        raise ValueError("rotary_cos must have a position, got none")
    if 2 * half % ROTARY_UNIT or not 0 < 2 * half <= call.head_dim:
        raise ValueError(
            f"rotary_cos has {half} columns for a rotary_dim of {2 * half}, supported are "
            f"multiples of {ROTARY_UNIT} up to the head_dim of {call.head_dim}"
        )
