"""The options of a call: which types they may have, and what is made of them.

Calls are remembered by their options, and True, 1 and 1.0 are the same to a dictionary. So an
option gets its type before anything is looked up by it.
"""

import math
import numbers
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from fa3.complaints import shown
from fa3.problem import LEAST_FLOAT, MOST_FLOAT, NO_BOUND, Window

Value = TypeVar("Value")

FROM_FLASH_ATTENTION_2 = (
    ". If it was passed by position: the fourth and fifth argument are softmax_scale and causal, "
    "as in FlashAttention-3, not FlashAttention-2's dropout_p and softmax_scale. Pass them by name"
)

VARLEN_FROM_FLASH_ATTENTION_2 = (
    ". If it was passed by position: the eighth to eleventh argument are seqused_q, seqused_k, "
    "softmax_scale and causal, as in FlashAttention-3; FlashAttention-2's are dropout_p, "
    "softmax_scale, causal and window_size. Pass them by name"
)


def note_on_order(of_flash_attention_2: object, note: str) -> str:
    """The note, if a call may have FlashAttention-2's order of arguments.

    Args:
        of_flash_attention_2: what came where FlashAttention-2 has a dropout probability.
    """
    if isinstance(of_flash_attention_2, int | float) and 0 <= of_flash_attention_2 < 1:
        return note
    return ""


class Option(NamedTuple):
    """An option of public functions.

    Fields:
        kind: bool, int from 0 on, or float; None for what must be None.
        default: its default in FlashAttention-3; `flash_attn_varlen_func` and
            `flash_attn_with_kvcache` have 0 for num_splits.
        complaint: what an error adds where the option is not supported.
    """

    kind: type | None
    default: object = None
    complaint: str = "it is not supported"


OPTION_TABLE = {
    "attention_chunk": Option(int, 0),
    "batch_invariant": Option(bool, False),
    "causal": Option(bool, False),
    "deterministic": Option(bool, False),
    "dropout_p": Option(float, 0.0),
    "has_softcap": Option(bool, False),
    "k_descale": Option(None, complaint="only FP8 tensors need it"),
    "num_splits": Option(int, 1),
    "q_descale": Option(None, complaint="only FP8 tensors need it"),
    "qv": Option(None),
    "return_attn_probs": Option(bool, False),
    "return_lse": Option(bool, False),
    "return_softmax_lse": Option(bool, False),
    "rotary_interleaved": Option(bool, True),
    "sm_margin": Option(int, 0),
    "softcap": Option(float, 0.0),
    "v_descale": Option(None, complaint="only FP8 tensors need it"),
}
"""The options that public functions share."""


class Options:
    """Options that a function takes, in the order in which they are checked.

    Nearly all calls give them in their types. Functions see that themselves, all at one look at
    `types`, in a third of the time that it would take here.
    """

    def __init__(self, *names: str) -> None:
        self.names = names
        self.types = tuple(OPTION_TABLE[name].kind for name in names)

    def converted(self, *values: object, note: str = "") -> tuple:
        """The values of a call in their types; attention_chunk is 0 for None.

        Args:
            note: what is added to a complaint about `causal`.

        Raises:
            TypeError, ValueError: an option has another type, and its value does not fit this one.
        """
        return tuple(
            0
            if name == "attention_chunk" and value is None
            else converted(name, value, note if name == "causal" else "")
            for name, value in zip(self.names, values, strict=True)
        )


def converted(name: str, value: object, note: str = "") -> bool | int | float:
    """The value of an option in its type."""
    kind = OPTION_TABLE[name].kind
    if kind is bool:
        return flag(name, value, note)
    return integer(name, value, 0) if kind is int else real(name, value)


def flag(name: str, value: object, note: str = "") -> bool:
    """An option that is on or off; `note` is added to the complaint."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be a bool, got {shown(value)}{note}")
    return bool(value)


def integer(name: str, value: object, least: int | None = None, kind: str = "an integer") -> int:
    """A number without fraction; `kind` says what else the option may be."""
    if type(value) is int and (least is None or value >= least):
        return value
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be {kind}, got {shown(value)}")
    if least is not None and value < least:
        raise ValueError(f"{name} must be {least} or more, got {value}")
    return int(value)


def real(name: str, value: object) -> float:
    """A number. No tensor, which could be on a GPU: the host would wait for it."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a float, got {shown(value)}")
    try:
        return float(value)
    except OverflowError:
        return math.inf


def by_either_name(
    name: str, value: Value | None, other_name: str, other: Value | None
) -> Value | None:
    """An argument that goes by two names, of which a call uses one."""
    if other is None:
        return value
    if value is not None:
        raise ValueError(f"{other_name} must be None with {name}, for which it is another name")
    return other


def as_pair(window_size: Sequence[int]) -> tuple[int, ...]:
    """The bounds of a window as plain integers; `check_window` looks at what they are."""
    if type(window_size) is tuple and len(window_size) == 2:
        left, right = window_size
        if type(left) is type(right) is int:
            return window_size
    if not isinstance(window_size, Sequence):
        raise TypeError(f"window_size must be two integers (left, right), got {shown(window_size)}")
    return tuple(
        integer("window_size", bound, kind="two integers (left, right)") for bound in window_size
    )


def check_window(window_size: tuple[int, ...], causal: bool) -> Window:
    """The window with causal folded in: whatever its right bound, no key ahead is seen."""
    if len(window_size) != 2 or any(n < NO_BOUND for n in window_size):
        raise ValueError(
            f"window_size must be two integers (left, right), each -1 or more, got {window_size}"
        )
    left, right = window_size
    return Window(left, 0 if causal else right)


def check_scale(softmax_scale: float | None, head_dim: int, note: str = "") -> float:
    """The factor of the scores; `note` is added to a complaint about 0."""
    if softmax_scale is None:
        return head_dim**-0.5
    if type(softmax_scale) is not float:
        softmax_scale = real("softmax_scale", softmax_scale)
    if not LEAST_FLOAT <= softmax_scale <= MOST_FLOAT:
        note = note if softmax_scale == 0 else ""
        raise ValueError(
            f"softmax_scale must be positive and finite in float32, got {softmax_scale}{note}"
        )
    return softmax_scale


def check_hashable(name: str, value: object) -> None:
    """Raise unless calls can be remembered by a value."""
    try:
        hash(value)
    except TypeError as error:
        message = f"{name} must be hashable, to be remembered, got {shown(value)}: {error}"
        raise TypeError(message) from None


def reject_unsupported(
    attention_chunk: int | None,
    pack_gqa: bool | None = None,
    has_packing: bool = False,
    shares_heads: bool = True,
    num_splits: int = 0,
    **given: object,
) -> None:
    """Raise for arguments of FlashAttention's signature that would do nothing here.

    Args:
        attention_chunk: None or 0 for none.
        pack_gqa: the call's, if it is not its choice.
        has_packing: whether query heads share the reads of their key/value head, always or where
            the call chooses.
        shares_heads: whether a key/value head has several query heads. Otherwise `pack_gqa` changes
            nothing, and may be anything.
        num_splits: the call's, if it can be 0 or 1 only.
        given: what must be None.

    Raises:
        TypeError, ValueError: one of them has a wrong type, or is negative.
        NotImplementedError: one of them asks for what is not there.
    """
    if attention_chunk is not None and integer("attention_chunk", attention_chunk, 0):
        raise NotImplementedError(
            f"attention_chunk must be 0 or None, for no chunks, got {attention_chunk}: chunks are "
            "not supported"
        )
    if pack_gqa is not None and flag("pack_gqa", pack_gqa) != has_packing and shares_heads:
        how = "always share reads" if has_packing else "share tiles where queries are few"
        raise NotImplementedError(
            f"pack_gqa must be None or {has_packing} here, got {pack_gqa}: the query heads of a "
            f"key/value head {how}"
        )
    if integer("num_splits", num_splits, 0) > 1:
        raise NotImplementedError(
            f"num_splits must be 0 or 1 here, got {num_splits}: the planner decides into how many "
            "parts keys are cut"
        )
    for name, value in given.items():
        if value is not None:
            complaint = OPTION_TABLE[name].complaint
            raise NotImplementedError(f"{name} must be None, got {shown(value)}: {complaint}")


def share_heads(q: object, k: object) -> bool:
    """Whether several query heads may share a key/value head; both are not checked so far."""
    heads_q, heads_k = (getattr(one, "shape", ())[-2:-1] for one in (q, k))
    return heads_q != heads_k
