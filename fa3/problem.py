"""What is asked: the compile key (`AttentionSpec`), and with run-time sizes `Problem`."""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

REMEMBERED = 4096
"""Calls of different shapes, strides or options of which it is remembered what they lead to. One
takes some 3 KB, and with a tile order 4 KB of the GPU. When it is forgotten nothing is lost but
time: what launches and captured graphs still read lives on."""

NO_BOUND = -1
"""A window bound that is not there, in FlashAttention's convention."""


class Window(NamedTuple):
    """Keys that a query sees on either side; `NO_BOUND` for all."""

    left: int = NO_BOUND
    right: int = NO_BOUND

    def tighten(self, seqlen_q: int, seqlen_k: int) -> "Window":
        """The window without bounds that hide nothing at these lengths.

        The bound of a causal call stays: it costs a single query nothing, and kernels of its own
        would have to be compiled for it.
        """
        left, right = self
        return Window(
            NO_BOUND if left >= seqlen_k - 1 else left,
            NO_BOUND if right >= max(seqlen_q - 1, 1) else right,
        )


LEAST_FLOAT, MOST_FLOAT = 2.0**-126, 2.0**127 * (2.0 - 2.0**-23)
"""The least and the largest positive float32 of full precision."""

HEAD_DIM_UNIT, FP8_UNIT, MAX_HEAD_DIM = 8, 16, 256
"""Head sizes are multiples of 16 bytes, in 16 bits and in FP8, as TMA wants; a WGMMA has at most
256 columns of O."""

FP8_HEAD_DIM_UNIT = 32
"""Head sizes are multiples of so many where queries are multiplied in FP8, as a WGMMA wants."""


FP8 = "float8_e4m3fn"
"""What q, k and v may be made of in a forward pass whose out is in 16 bits; and caches."""

ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, FP8: 1}
"""What q, k, v and, except for FP8, out may be made of; bytes of an element."""

KEYS_OF_GROUP = 16  # keys of a group in V^T, see `fa3.primitives.fp8_compute`


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """All that changes generated code except tiling: the compile key.

    Attributes:
        dtype: element type of q, k and v: one of `ELEMENT_BYTES`, which out has too but for
            `FP8`.
        head_dim: columns of q and k.
        head_dim_v: columns of v and out.
        mask: a mask of `fa3.scores.masks`, which is not imported here; its compile-time half.
        scores: what is done to the scores before the softmax, in this order: templates of
            objects of `fa3.scores.scores`.
        sinks: dtype of the heads' sinks, "float32" or `dtype`; None without sinks.
        has_dropout: whether probabilities are dropped.
        other_out: element type of out, and of dQ, if it is not `dtype`: of 16 bits if `dtype` is
            `FP8`, else "float32"; or None.
    """

    dtype: str
    head_dim: int
    head_dim_v: int
    mask: Any
    scores: tuple[Any, ...] = ()
    sinks: str | None = None
    has_dropout: bool = False
    other_out: str | None = None

    @property
    def is_fp8(self) -> bool:
        """Whether q, k and v are FP8."""
        return self.dtype == FP8

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of q, k and v."""
        return ELEMENT_BYTES[self.dtype]

    @property
    def out_dtype(self) -> str:
        """Element type of out."""
        return self.other_out or self.dtype

    @property
    def has_float32_out(self) -> bool:
        """Whether out and dQ are in float32."""
        return self.other_out == "float32"

    @property
    def out_bytes(self) -> int:
        """Bytes of an element of out."""
        return 4 if self.has_float32_out else ELEMENT_BYTES[self.out_dtype]

    @property
    def key_bytes(self) -> int:
        """Bytes of one key and its value."""
        return self.element_bytes * (self.head_dim + self.head_dim_v)

    @property
    def modifier_types(self) -> tuple[tuple[str, int], ...]:
        """(dtype, rank) of the tensors of scores, mask and sinks, in this order."""
        templates = (*self.scores, *self.mask.templates)
        sinks = ((self.sinks, 1),) if self.sinks else ()
        return (*((f.dtype, f.rank) for template in templates for f in template.tensors), *sinks)

    @property
    def has_user_functions(self) -> bool:
        """Whether a score or the mask comes from outside of this package."""
        package = __name__.partition(".")[0]
        templates = (*self.scores, *self.mask.templates)
        return any(template.kind.__module__.partition(".")[0] != package for template in templates)


@dataclass(frozen=True, slots=True)
class Problem:
    """A spec and the sizes of one call.

    Attributes:
        qhead_per_kvhead: query heads that share one key/value head (1 is MHA).
        window: the run-time half of `spec.mask`.
    """

    spec: AttentionSpec
    batch: int
    seqlen_q: int
    seqlen_k: int
    num_heads_kv: int
    qhead_per_kvhead: int = 1
    window: Window = Window()

    @classmethod
    def of(
        cls,
        q: Any,
        k: Any,
        v: Any,
        *,
        causal: bool = False,
        window_size: Sequence[int] = (NO_BOUND, NO_BOUND),
        dtype: str | None = None,
        softcap: float = 0.0,
        alibi_slopes: Any = None,
        sinks: Any = None,
        score: Any = None,
        mask: Any = None,
        dropout_p: float = 0.0,
    ) -> "Problem":
        """The problem of a call `flash_attn_func(q, k, v, ...)`.

        Args:
            q, k, v: tensors, or their shapes (batch, seqlen, heads, head_dim).
            dtype: "bfloat16", "float16" or "float8_e4m3fn" where q, k and v are shapes; bfloat16 by
                default.
            causal, window_size, softcap, alibi_slopes, sinks, score, mask, dropout_p: as
                `flash_attn_func` takes them. Where q is a shape, their tensors are on the CPU.

        Raises:
            TypeError, ValueError, NotImplementedError: the call would raise the same error.
        """
        # By its name, since it is on a floor above: the checks of a call need torch, and the rest
        # of this module does not.
        prepare = importlib.import_module("fa3.calls.prepare")
        return prepare.problem_posed_by(
            (q, k, v), dtype, (alibi_slopes, sinks, score, mask), causal, window_size, softcap,
            dropout_p,
        )  # fmt: skip

    @property
    def num_heads_q(self) -> int:
        return self.num_heads_kv * self.qhead_per_kvhead

    @property
    def flops(self) -> int:
        """Useful floating-point operations: QK^T and PV on the visible pairs."""
        pairs = visible_pairs(self.seqlen_q, self.seqlen_k, self.window)
        per_pair = 2 * (self.spec.head_dim + self.spec.head_dim_v)
        return self.batch * self.num_heads_q * pairs * per_pair

    @property
    def bytes(self) -> int:
        """Bytes of q, k, v and out; windows may read fewer."""
        rows_q = self.batch * self.seqlen_q * self.num_heads_q
        rows_k = self.batch * self.seqlen_k * self.num_heads_kv
        spec = self.spec
        out_bytes = spec.out_bytes * spec.head_dim_v
        return rows_q * (spec.element_bytes * spec.head_dim + out_bytes) + rows_k * spec.key_bytes


def visible_pairs(seqlen_q: int, seqlen_k: int, window: Window) -> int:
    """(query, key) pairs of one head that a window lets through."""

    def keys_up_to(bound: int) -> int:
        """Sum over rows i of clamp(i + offset + bound + 1, 0, seqlen_k)."""
        first = seqlen_k - seqlen_q + bound + 1
        # Rows below `low` see none, rows from `high` on see all; in between one more each.
        low = min(max(0, 1 - first), seqlen_q)
        high = min(max(low, seqlen_k - first), seqlen_q)
        ramp = (high - low) * (2 * first + low + high - 1) // 2
        return ramp + (seqlen_q - high) * seqlen_k

    left, right = window
    upper = seqlen_q * seqlen_k if right == NO_BOUND else keys_up_to(right)
    lower = 0 if left == NO_BOUND else keys_up_to(-left - 1)
    return upper - lower
