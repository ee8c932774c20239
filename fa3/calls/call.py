"""A call: its tensors by name, described and checked.

A call's values are in one dictionary, the tensors by the names of `TENSORS`. An `AttentionCall`
says what each tensor is like, and what follows from that. Repeated calls share it, so it has no
total of packed rows and, where keys are packed too, no number of sequences: these differ from step
to step. They are looked at in each call (`check_totals`, `have_one_batch`), and so are the numbers
in int32 tensors (`values`).
"""

from collections import namedtuple
from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

import torch

from fa3.calls.modifiers import standard_scores
from fa3.calls.operands import (
    ALIGNMENT,
    DIMENSIONS,
    DTYPES,
    FP8_DTYPE,
    PACKED_DIMENSIONS,
    CheckOfAddresses,
    check_of_addresses,
    describe,
    dtype_of_output,
)
from fa3.calls.options import CACHED, DENSE, ON_CACHE, PACKED, PAGED, Options
from fa3.kernels.forward_launch import FEWEST_ROWS
from fa3.planning.decode import Sizes
from fa3.planning.routes import MOST_OF_DECODE
from fa3.primitives.arithmetic import LARGEST
from fa3.primitives.cache_blocks import CacheLayout
from fa3.primitives.query_tiles import number_of_packed_tiles
from fa3.primitives.ragged_lengths import key_groups
from fa3.problem import (
    FP8,
    FP8_HEAD_DIM_UNIT,
    FP8_UNIT,
    HEAD_DIM_UNIT,
    KEYS_OF_GROUP,
    AttentionSpec,
    Problem,
    Window,
)
from fa3.schedules.sequences import LONGEST, capacity_of
from fa3.scores.masks import Band, Intersection

QKV = "q", "k", "v"
NEW_TOKENS = "k_new", "v_new", "rotary_cos", "rotary_sin"
ALL_KINDS = DENSE, PACKED, PAGED, CACHED


class TensorRule(NamedTuple):
    """What one tensor of a call must be like."""

    kinds: tuple[str, ...]  # of calls that may have it
    dimensions: str  # see `AttentionCall.dimensions`
    dtypes: str = "int32"  # see `accepted_dtypes`
    name_on_cache: str | None = None  # what `flash_attn_with_kvcache` calls it, if otherwise


TENSOR_RULES = {
    "q": TensorRule(ALL_KINDS, "{queries}, heads_q, head_dim", "q"),
    "k": TensorRule(ALL_KINDS, "{keys}, heads_kv, head_dim", "keys", "k_cache"),
    "v": TensorRule(ALL_KINDS, "{values}", "keys", "v_cache"),
    "k_new": TensorRule((CACHED,), "{new}, heads_kv, head_dim", "new", "k"),
    "v_new": TensorRule((CACHED,), "{new}, heads_kv, head_dim_v", "new", "v"),
    "rotary_cos": TensorRule((CACHED,), "positions, rotary_dim / 2", "rotary"),
    "rotary_sin": TensorRule((CACHED,), "positions, rotary_dim / 2", "rotary"),
    "cu_seqlens_q": TensorRule((PACKED, *ON_CACHE), "batch + 1"),
    "cu_seqlens_k": TensorRule((PACKED,), "batch + 1"),
    "cu_seqlens_k_new": TensorRule((CACHED,), "batch + 1"),
    "seqused_q": TensorRule((PACKED, PAGED), "batch"),
    "seqused_k": TensorRule((PACKED, *ON_CACHE), "batch", name_on_cache="cache_seqlens"),
    "batch_idx": TensorRule((CACHED,), "batch", name_on_cache="cache_batch_idx"),
    "leftpad": TensorRule((CACHED,), "batch", name_on_cache="cache_leftpad"),
    "page_table": TensorRule(ON_CACHE, "sequences, max_pages"),
    "rotary_seqlens": TensorRule((CACHED,), "batch"),
    "q_descale": TensorRule(ALL_KINDS, "batch, heads_kv", "float32"),
    "k_descale": TensorRule(ALL_KINDS, "batch, heads_kv", "float32"),
    "v_descale": TensorRule(ALL_KINDS, "batch, heads_kv", "float32"),
    "alibi_slopes": TensorRule(ALL_KINDS, "batch, heads_q", "float32"),
    "sinks": TensorRule(ALL_KINDS, "heads_q", "sinks"),
    "out": TensorRule(ALL_KINDS, "{queries}, heads_q, head_dim_v", "out"),
}
"""All tensors of a call, except the tensors of the user's functions. k and v are the cache of a
call on one, and k_new and v_new the tokens that it gets."""

TENSORS = tuple(TENSOR_RULES)
OF_INT32 = [name for name, rule in TENSOR_RULES.items() if rule.dtypes == "int32"]
INTEGERS = tuple([name for name in OF_INT32 if name != "cu_seqlens_k"])
"""The int32 tensors that a call on a cache may have."""

DESCALES = {"q_descale": "q", "k_descale": "k", "v_descale": "v"}
"""What elements of FP8 tensors are multiplied by."""

NO_VALUES: dict[str, Any] = dict.fromkeys(TENSORS) | {
    "softmax_scale": None, "score": None, "mask": None, "rng_state": None, "max_seqlen_q": None,
    "max_seqlen_k": None, "cache_length": None,
    "lse": None, "address_of_lse": 0, "seqlen_new": 0, "descales": None, "dropout": None,
    "longest": None,  # max_seqlen_q and max_seqlen_k of packed keys
}  # fmt: skip
"""What a call copies, and stores its arguments in: a new dictionary takes twice as long."""

LENGTHS_OF_PACKED = "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"
lengths_of = itemgetter(*LENGTHS_OF_PACKED)  # picks them from a call's values

REQUIRED = dict.fromkeys((DENSE, PAGED, CACHED), QKV)
REQUIRED[PACKED] = (*QKV, "cu_seqlens_q", "cu_seqlens_k")
"""The tensors that each kind of calls must have."""

WITH_GRADIENT = {DENSE: (*QKV, "sinks"), PACKED: (*QKV, "sinks"), PAGED: (), CACHED: ()}
"""The tensors that may require grad."""

READ_BY_NUMBER = {*OF_INT32, *DESCALES, "alibi_slopes", "sinks"}
"""The tensors that may begin at any address."""

ALIGNMENTS = {
    kind: {
        name: 1 if name in READ_BY_NUMBER else ALIGNMENT
        for name, rule in TENSOR_RULES.items()
        if kind in rule.kinds
    }
    for kind in ALL_KINDS
}
"""The tensors of each kind of calls, with bytes to which they must be aligned."""

PER_SEQUENCE = "seqused_q", "seqused_k", *DESCALES
"""The tensors that have a row for each sequence, if keys are packed."""
pick_per_sequence = itemgetter(*PER_SEQUENCE)

ANY_NUMBER = 2
"""In a description, rows of a tensor that may have another number of them in each call."""

LENGTHS = "an integer or an int32 torch.Tensor"  # what cache_seqlens may be
ROTARY_UNIT = 16  # A rotary embedding turns a multiple of this many columns

SPARE = 1024  # positions beyond the last key that kernels count, in blocks
MOST_FORWARD_TILES = 1 << 24  # tiles at most: 32 bits count their marks and log-sum-exps

MOST_RAGGED_ROWS = 1 << 29
"""Rows of a tensor at most: 32 bits hold the sum of two rows' numbers and a bound of a window."""

Made = TypeVar("Made")


def public_name(kind: str, tensor: str) -> str:
    """What a function calls one of the `TENSORS`, or another argument."""
    rule = TENSOR_RULES.get(tensor) if kind == CACHED else None
    return (rule and rule.name_on_cache) or tensor


def describe_tensors(values: Mapping[str, Any], options: Options) -> "AttentionCall":
    """Describe a call's tensors; raise for one that no call takes."""
    kind, operands = options.kind, {}
    for name, alignment in ALIGNMENTS[kind].items():
        tensor = values.get(name)
        if tensor is not None or name in REQUIRED[kind]:
            has_backward = name in WITH_GRADIENT[kind]
            operands[name] = describe(public_name(kind, name), tensor, alignment, has_backward)
    functions = tuple([describe(name, values[name], 1) for name in options.functions.names])
    return AttentionCall(
        **operands, functions=functions, kind=kind, max_seqlen_q=options.max_seqlen_q
    )


def have_one_batch(tensors: Mapping[str, Any]) -> bool:
    """Whether all tensors have rows for equally many packed sequences."""
    shape, slopes = tensors["cu_seqlens_q"].shape, tensors["alibi_slopes"]
    if len(shape) != 1 or not shape[0] or tensors["cu_seqlens_k"].shape != shape:
        return False
    batch = shape[0] - 1
    for one in pick_per_sequence(tensors):
        if one is not None and one.shape[:1] != (batch,):
            return False
    return slopes is None or len(slopes.shape) != 2 or slopes.shape[0] == batch


class AttentionCall(
    namedtuple(
        "AttentionCall",
        (*TENSORS, "functions", "kind", "max_seqlen_q"),
        defaults=(*[None] * len(TENSORS), (), CACHED, None),
    )
):
    """What each of the `TENSORS` is like (`Operand`), and what follows.

    Fields:
        functions: what the tensors of the user's score and mask are like.
        kind: which function has them.
        max_seqlen_q: the most queries of a sequence, if they are packed on a cache.
    """

    __slots__ = ()

    @property
    def is_packed(self) -> bool:
        """Whether the queries of sequences are packed."""
        return self.cu_seqlens_q is not None

    @property
    def has_cache(self) -> bool:
        return self.kind in ON_CACHE

    @property
    def batch(self) -> int:
        return self.cu_seqlens_q.shape[0] - 1 if self.is_packed else self.q.shape[0]

    @property
    def seqlen_q(self) -> int:
        """Queries of a sequence; of packed ones on a cache the most."""
        return self.max_seqlen_q if self.is_packed else self.q.shape[1]

    @property
    def may_be_packed(self) -> bool:
        """Whether the forward kernel may take cache calls' q as packed rows."""
        batch, rows = self.batch, self.batch * self.seqlen_q
        lie_packed = all(
            x is None or batch == 1 or x.stride[0] == x.shape[1] * x.stride[1]
            for x in (self.q, self.out)
        )
        tiles = self.heads_q * number_of_packed_tiles(rows, batch, FEWEST_ROWS)
        are_counted = rows <= MOST_RAGGED_ROWS and tiles <= MOST_FORWARD_TILES
        has_many = self.seqlen_q > MOST_OF_DECODE
        return not self.is_packed and lie_packed and has_many and are_counted

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
        return self.v.shape[2 if self.has_transposed_v else -1]

    @property
    def num_sequences(self) -> int:
        """Sequences that the cache has room for."""
        return (self.page_table or self.k).shape[0]

    @property
    def page_size(self) -> int:
        """Tokens of a page; in caches without pages, of a whole sequence."""
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
            self.batch_idx is not None,
            self.leftpad is not None,
            is_fp8=self.has_fp8_cache,
        )

    @property
    def has_fp8_cache(self) -> bool:
        """Whether keys and values are FP8."""
        return self.has_cache and self.k.dtype == FP8_DTYPE

    @property
    def is_fp8(self) -> bool:
        """Whether queries, keys and values are multiplied in FP8."""
        return not self.has_cache and self.q.dtype == FP8_DTYPE

    @property
    def has_transposed_v(self) -> bool:
        """Whether v is V^T of `fa3.quantize`: it has one dimension more."""
        return self.kind == DENSE and self.is_fp8 and len(self.v.shape) == len(DIMENSIONS) + 1

    def dimensions(self, tensor: str) -> list[str]:
        """The dimensions of one of the `TENSORS`; equal names mean equal sizes."""
        keys = "num_pages, page_size" if self.page_table else "batch_cache, seqlen_cache"
        keys = {DENSE: "batch, seqlen_k", PACKED: "total_k"}.get(self.kind, keys)
        transposed = f"batch, heads_kv, head_dim_v, groups, {KEYS_OF_GROUP}"
        groups = {
            "queries": "total_q" if self.is_packed else "batch, seqlen_q",
            "keys": keys,
            "values": transposed if self.has_transposed_v else f"{keys}, heads_kv, head_dim_v",
            "new": "total_new" if self.cu_seqlens_k_new else "batch, seqlen_new",
        }
        dimensions = TENSOR_RULES[tensor].dimensions.format(**groups).split(", ")
        is_same = tensor == "alibi_slopes" and len(self.alibi_slopes.shape) == 1
        return dimensions[1:] if is_same else dimensions

    @property
    def out_shape(self) -> tuple[int, ...]:
        return *self.q.shape[:-1], self.head_dim_v

    @property
    def seqlen_new(self) -> int:
        """Tokens that a sequence gets; of all sequences with cu_seqlens_k_new."""
        return 0 if self.k_new is None else self.k_new.shape[-3]

    @property
    def lse_shape(self) -> tuple[int, ...]:
        heads = self.heads_q
        return (heads, self.q.shape[0]) if self.is_packed else (self.batch, heads, self.seqlen_q)

    def name(self, tensor: str) -> str:
        """What the function calls one of the `TENSORS`."""
        return public_name(self.kind, tensor)

    def spec(self, options: Options, window: Window, is_causal: bool) -> AttentionSpec:
        """What is compiled.
        The bounds of `window` may hide a key. If `is_causal`, no key after a query's own position
        is visible."""
        if self.is_fp8 and options.has_dropout:
            raise NotImplementedError(f"dropout_p must be 0 with q in {FP8_DTYPE}")
        (scores, mask, _), band = options.functions, Band.of(window)
        dtype = FP8 if self.is_fp8 else DTYPES[dtype_of_output(self.q.dtype)]
        out = self.out.dtype if self.out else dtype_of_output(self.q.dtype)
        out_dtype = str(out).removeprefix("torch.")
        return AttentionSpec(
            dtype,
            self.head_dim,
            self.head_dim_v,
            Intersection(band, mask) if mask else band,
            (*standard_scores(options.softcap, self.alibi_slopes, is_causal), *scores),
            None if self.sinks is None else str(self.sinks.dtype).removeprefix("torch."),
            options.has_dropout,
            None if out_dtype == dtype else out_dtype,
        )

    @property
    def names_by_rows(self) -> tuple[tuple[str, ...], ...]:
        """Tensors whose number of rows may change between calls, by this number.
        Those with the rows of packed q, and with the rows of packed k; those with a row for each
        packed sequence, and with one more."""
        rows_of_q = ("q", "out") if self.is_packed else ()
        if self.kind != PACKED:
            return rows_of_q, (), (), ()
        has_slopes = self.alibi_slopes is not None and len(self.alibi_slopes.shape) == 2
        per_sequence = *PER_SEQUENCE, *["alibi_slopes"] * has_slopes
        return rows_of_q, ("k", "v"), per_sequence, ("cu_seqlens_q", "cu_seqlens_k")

    def without_lengths(self) -> "AttentionCall":
        """What calls share that differ in totals and packed sequences only.

        Where tensors have rows for different numbers of sequences, these numbers stay.
        """
        changed, (*totals, per_sequence, per_end) = {}, self.names_by_rows
        for name in sum(totals, ()):
            operand = getattr(self, name)
            if operand is not None and len(operand.shape) == len(PACKED_DIMENSIONS):
                changed[name] = operand._replace(shape=(ANY_NUMBER, *operand.shape[1:]))
        if self.kind == PACKED and have_one_batch(self._asdict()):
            for name in per_sequence + per_end:
                operand = getattr(self, name)
                if operand is not None:
                    # The stride of a single number may be anything.
                    stride = (1,) if tuple(operand.shape) in ((0,), (1,)) else operand.stride
                    shape = ANY_NUMBER + (name in per_end), *operand.shape[1:]
                    changed[name] = operand._replace(shape=shape, stride=stride)
        return self._replace(**changed)

    def overlaps(self, options: Options, appends: bool) -> CheckOfAddresses | None:
        """Return the check that written tensors share no memory, or None.
        `appends` says whether the caches are written."""
        if self.out is None and not appends:
            return None
        tensors, functions = ALIGNMENTS[self.kind], options.functions.names
        operands = *[getattr(self, name) for name in tensors], *self.functions
        written = "out", *[self.name("k"), self.name("v")] * appends
        names = *map(self.name, tensors), *functions
        growing = tuple(tuple(map(self.name, group)) for group in self.names_by_rows)
        return check_of_addresses(names, operands, written, growing)

    def problem(self, options: Options) -> Problem:
        """The problem of a call without a cache.
        Packed sequences may have any lengths: of these it has a window for all, and sizes 0."""
        sizes, longest = (0, 0, 0), (MOST_RAGGED_ROWS, MOST_RAGGED_ROWS)
        if not self.is_packed:
            sizes = _, *longest = self.batch, self.seqlen_q, self.k.shape[1]
        window = options.window.tighten(*longest)
        spec = self.spec(options, window, options.window.right == 0)
        group = self.heads_q // max(1, self.heads_kv)
        return Problem(spec, *sizes, self.heads_kv, group, window)


# ------------------------------------------------------------------------------------ tensors


def prepare_without_lengths(prepare: Callable[..., Made], call: AttentionCall, *rest: Any) -> Made:
    """What `prepare` makes of a call `without_lengths`; its complaints have them."""
    try:
        return prepare(call.without_lengths(), *rest)
    except ValueError:  # a TypeError says nothing of lengths
        check_tensors(call)
        raise


def check_tensors(call: AttentionCall) -> None:
    """Raise if the tensors do not describe one call."""
    sizes: dict[str, tuple[int, str]] = {}
    if call.is_packed:
        ends = call.cu_seqlens_q
        if len(ends.shape) != 1 or not ends.shape[0]:
            raise ValueError(f"cu_seqlens_q must have shape (batch + 1,), got {tuple(ends.shape)}")
        sizes["batch"] = call.batch, "cu_seqlens_q"
        if call.has_cache and call.max_seqlen_q is None:
            raise ValueError("max_seqlen_q must be given with cu_seqlens_q")
    if call.k_new is not None and call.q.dtype == FP8_DTYPE:
        raise ValueError(
            f"k and v must be None with q in {FP8_DTYPE}: tokens are appended from 16 bits"
        )
    check_tensor(call, "q", sizes)
    sizes["batch + 1"] = call.batch + 1, sizes["batch"][1]
    for name in TENSORS[1:]:
        check_tensor(call, name, sizes)
    heads_q, heads_kv = call.heads_q, call.heads_kv
    if (heads_kv == 0 and heads_q != 0) or (heads_kv and heads_q % heads_kv):
        raise ValueError(
            f"q must have a multiple of {call.name('k')}'s heads, got {heads_q} query heads "
            f"and {heads_kv} key/value heads"
        )
    if call.has_cache:
        check_cache(call)
    elif call.kind == DENSE:
        check_forward_counts(call.batch, call.seqlen_q, call.k.shape[1], call.heads_q)
    if call.out is not None:
        call.out.check_no_overlap("out")


def check_tensor(call: AttentionCall, name: str, sizes: dict[str, tuple[int, str]]) -> None:
    """Raise unless a tensor, if given, fits the tensors before it.
    `sizes` are those that dimensions have so far, see `check_sizes`."""
    operand, shown = getattr(call, name), call.name(name)
    if operand is None:
        return
    dimensions, dtypes = call.dimensions(name), accepted_dtypes(call, name)
    if name in DESCALES and getattr(call, DESCALES[name]).dtype != FP8_DTYPE:
        scaled = call.name(DESCALES[name])
        raise ValueError(
            f"{name} must be None unless {scaled} is {FP8_DTYPE}, got {scaled} in "
            f"{getattr(call, DESCALES[name]).dtype}"
        )
    operand.check_rank(shown, dimensions)
    operand.check_dtype(shown, *dtypes, like_q=name != "q" and dtypes == (call.q.dtype,))
    if name == "q" and operand.device.type not in ("cpu", "cuda"):
        raise ValueError(f"q must be a CPU or CUDA tensor, got {operand.device}")
    # With packed keys, kernels read the lengths where they are.
    operand.check_device(shown, "q", call.q, call.has_cache and dtypes == (torch.int32,))
    if name in ("q", "v"):
        unit = (FP8_HEAD_DIM_UNIT, " with q in FP8") if call.is_fp8 else (HEAD_DIM_UNIT, "")
        unit = (FP8_UNIT, " with an FP8 cache") if call.has_fp8_cache else unit
        columns = call.head_dim if name == "q" else call.head_dim_v
        operand._replace(shape=(columns,)).check_head_dim(shown, *unit)
    if name == "v" and call.has_transposed_v:
        groups = key_groups(call.k.shape[1])
        sizes |= {"groups": (groups, "k"), str(KEYS_OF_GROUP): (KEYS_OF_GROUP, "k")}
    operand.check_sizes(shown, dimensions, sizes)
    if "groups" in dimensions and operand.shape[3] > 1 and operand.stride[3] != KEYS_OF_GROUP:
        raise ValueError(
            f"v must have its groups of {KEYS_OF_GROUP} keys side by side, got stride "
            f"{operand.stride[3]} in dimension 3"
        )
    if name not in READ_BY_NUMBER:
        # Kernels step to where other sequences would be, also along a single row.
        operand.check_layout(shown, dimensions[0] in ("total_q", "total_k"))
    elif dtypes == (torch.int32,):
        operand.check_contiguous(shown)


def accepted_dtypes(call: AttentionCall, name: str) -> tuple[torch.dtype, ...]:
    """The dtypes that one of the `TENSORS` may have."""
    q, in_16_bits = call.q.dtype, dtype_of_output(call.q.dtype)
    has_fp8_keys = q == FP8_DTYPE or (call.has_cache and call.k.dtype.itemsize == 1)
    outs = tuple(DTYPES) if q == FP8_DTYPE else (in_16_bits, torch.float32)
    return {
        "q": (*DTYPES, FP8_DTYPE),
        "keys": (FP8_DTYPE if has_fp8_keys else q,),
        "new": (q,),
        "rotary": (q, torch.float32),
        "int32": (torch.int32,),
        "float32": (torch.float32,),
        "sinks": (torch.float32, in_16_bits),
        "out": (in_16_bits,) if call.has_cache else outs,
    }[TENSOR_RULES[name].dtypes]


def check_forward_counts(batch: int, seqlen_q: int, seqlen_k: int, heads: int) -> None:
    """Raise unless 32 bits can count queries, keys and tiles."""
    most_keys = LARGEST - SPARE - 2 * seqlen_q
    if seqlen_k > most_keys:
        if most_keys < 1:
            most_queries = (LARGEST - SPARE - 1) // 2
            raise ValueError(f"q must have at most {most_queries} queries, got {seqlen_q}")
        raise ValueError(
            f"k must have at most {most_keys} keys with {seqlen_q} queries, got {seqlen_k}"
        )
    if batch * heads * number_of_packed_tiles(seqlen_q, 1, FEWEST_ROWS) > MOST_FORWARD_TILES:
        raise ValueError(
            f"q must have at most {MOST_FORWARD_TILES} tiles of {FEWEST_ROWS} rows, got batch "
            f"{batch}, {seqlen_q} queries and {heads} heads"
        )


def check_totals(
    tensors: Mapping[str, Any],  # by name
    batch: int,
    are_packed: bool,  # whether k and v are packed too
    most_queries: int = MOST_RAGGED_ROWS,  # rows of q at most
) -> None:
    """Raise unless packed tensors have equal totals that 32 bits can count."""
    (total_q, heads, _), out = tensors["q"].shape, tensors.get("out")
    if heads * number_of_packed_tiles(total_q, batch, FEWEST_ROWS) > MOST_FORWARD_TILES:
        tiles = MOST_FORWARD_TILES // heads - batch
        most_queries = min(most_queries, (tiles + 1) * FEWEST_ROWS - 1)
    if total_q > most_queries:
        raise ValueError(f"q must have at most {most_queries} rows, got {total_q}")
    if out is not None and out.shape[0] != total_q:
        raise ValueError(f"out must have {total_q} rows like q, got {out.shape[0]}")
    if not are_packed:
        return
    total_k, rows_v = tensors["k"].shape[0], tensors["v"].shape[0]
    if total_k > MOST_RAGGED_ROWS:
        raise ValueError(f"k must have at most {MOST_RAGGED_ROWS} rows, got {total_k}")
    if rows_v != total_k:
        raise ValueError(f"v must have {total_k} rows like k, got {rows_v}")


# ----------------------------------------------------------------------------- a call on a cache


def check_cache(call: AttentionCall) -> None:
    """Raise unless a call can attend and append to its cache."""
    if call.max_seqlen_q is not None and not call.is_packed:
        raise ValueError(f"max_seqlen_q must be None without cu_seqlens_q, got {call.max_seqlen_q}")
    if call.page_table is not None and call.page_size == 0:
        raise ValueError(
            f"{call.name('k')} must have pages of 1 token or more to go with page_table, got shape "
            f"{tuple(call.k.shape)}"
        )
    if call.batch_idx is None and call.num_sequences != call.batch:
        name = call.name("k") if call.page_table is None else "page_table"
        raise ValueError(
            f"{name} must have {call.batch} rows like q, or cache_batch_idx must say which are "
            f"meant, got {call.num_sequences}"
        )
    check_new_tokens(call._asdict())
    if call.k_new is not None:
        call.k.check_no_overlap("k_cache")
        call.v.check_no_overlap("v_cache")
    if call.rotary_cos is not None:
        check_rotary(call)
    elif call.rotary_seqlens is not None:
        raise ValueError("rotary_seqlens must be None without rotary_cos and rotary_sin")
    check_cache_counts(call)


def check_cache_counts(call: AttentionCall) -> None:
    """Raise unless 32 bits can count the sizes of a cache."""
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
    queries = "max_seqlen_q" if call.is_packed else "q"
    Sizes(call.batch, call.seqlen_q, call.heads_kv, group, call.capacity).check(queries)


def check_new_tokens(tensors: Mapping[str, Any]) -> None:
    """Raise unless k and v come together, and rotary tables with them."""
    is_passed = {public_name(CACHED, name): tensors[name] is not None for name in NEW_TOKENS}
    for name, other in ("kv", "vk", NEW_TOKENS[2:], NEW_TOKENS[:1:-1]):
        if is_passed[other] and not is_passed[name]:
            raise ValueError(f"{name} must be given with {other}")
        if is_passed[name] and not is_passed["k"]:
            raise ValueError(f"{name} must be None without k and v: nothing is appended")


def check_rotary(call: AttentionCall) -> None:
    """Raise unless the tables of a rotary embedding fit the heads."""
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
