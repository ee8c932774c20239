"""The options of calls: one table for all public functions.

Options are checked the first time that a function is called with them. Repeated calls find what was
made of them, by value and type.
"""

import functools
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np

from fa3.calls.latest import FastPath, shapes_of
from fa3.complaints import shown
from fa3.planning.planner import Plan
from fa3.problem import LEAST_FLOAT, MOST_FLOAT, NO_BOUND, REMEMBERED, Window
from fa3.scores.templates import Template

Value = TypeVar("Value")

DENSE, PACKED = "flash_attn_func", "flash_attn_varlen_func"
CACHED, PAGED = "flash_attn_with_kvcache", "flash_attn_varlen_func with page_table"
ON_CACHE = CACHED, PAGED
"""The kinds of calls: the public functions, and packed queries with keys on pages."""

NOTE_ON_ORDER = (
    ". If it was passed by position: arguments have the order of FlashAttention-3, with "
    "softmax_scale and causal, not FlashAttention-2's dropout_p. Pass them by name"
)
"""What is added to complaints about arguments in the places of others in FlashAttention-2."""

OPTION_DEFAULTS: dict[str, Any] = {
    "attention_chunk": 0, "batch_invariant": False, "causal": False, "deterministic": False,
    "dropout_p": 0.0, "num_splits": 0, "pack_gqa": None, "plan": None, "qv": None,
    "return_attn_probs": False, "return_lse": False, "return_softmax_lse": False,
    "rotary_interleaved": True, "schedule": None, "sm_margin": 0, "softcap": 0.0,
}  # fmt: skip
"""The options of public functions: bool, int from 0 on, float, or None where there is none; and
what holds for functions without them."""

OF_ALL = (
    "causal", "softcap", "attention_chunk", "num_splits", "sm_margin", "return_lse", "pack_gqa",
    "qv",
)  # fmt: skip
OF_TRAINING = (*OF_ALL, "return_attn_probs", "deterministic", "dropout_p")
OF_DENSE = (*OF_TRAINING, "schedule", "plan")
OF_PACKED = (*OF_TRAINING, "return_softmax_lse")
OF_CACHE = (*OF_ALL, "return_softmax_lse", "rotary_interleaved", "batch_invariant")
OPTIONS_OF = {DENSE: OF_DENSE, PACKED: OF_PACKED, PAGED: OF_PACKED, CACHED: OF_CACHE}
"""The options of each kind of calls, in the order in which the function hands them on."""


class UserFunctions(NamedTuple):
    """What is compiled of a score and a mask of the user's."""

    scores: tuple[Template, ...] = ()
    mask: Template | None = None
    names: tuple[str, ...] = ()  # what a call knows their tensors as, in their order


NO_FUNCTIONS = UserFunctions()


class Options(NamedTuple):
    """The options that calls are prepared by, in their types."""

    window: Window = Window()  # with causal folded in
    softcap: float = 0.0
    num_splits: int = 0
    sm_margin: int = 0
    # Of dense calls; False where a gradient is wanted and the caller leaves it open.
    pack_gqa: bool | None = None
    has_dropout: bool = False
    rotary_interleaved: bool = True
    batch_invariant: bool = False
    has_gradient: bool = False  # whether one is wanted
    functions: UserFunctions = NO_FUNCTIONS
    max_seqlen_q: int | None = None  # of packed queries on a cache
    scheduler_metadata: Any = None  # of a call on a cache or on packed sequences
    # schedule, plan: that a dense call asks for.
    schedule: Any = None
    plan: Any = None
    kind: str = CACHED  # of calls


PREPARED_BY: dict[str, Any] = {
    "has_gradient": False, "functions": NO_FUNCTIONS, "max_seqlen_q": None,
    "scheduler_metadata": None,
}  # fmt: skip
"""Fields of `Options` that follow from a call's other arguments, and what they are if a call does
not say."""


@dataclass(frozen=True, slots=True)
class Checked:
    """What a call makes of its options."""

    options: Options  # what it is prepared by
    returns_lse: bool
    deterministic: bool
    dropout_p: float
    latest: FastPath  # the latest calls with these options
    # Whether these are the objects that the first call with these options passed.
    are_same: Callable[..., bool] = lambda *asked: False


LATEST: dict[str, Checked] = {}  # of each kind of calls


def options_of(kind: str, window_size: Any, prepared_by: tuple, passed: tuple) -> Checked:
    """Check options, or look up equal ones.
    `prepared_by` is what `PREPARED_BY` names, and `passed` what `OPTIONS_OF` names."""
    try:
        window = window_size if type(window_size) is tuple else as_pair(window_size)
        asked = window + prepared_by + passed
        latest = LATEST.get(kind)
        # To look them up takes 0.3 us more.
        if latest is None or not latest.are_same(*asked):
            latest = LATEST[kind] = remembered_options(kind, *asked)
        return latest
    except (TypeError, ValueError):
        # Also what has no hash, and a window that is no pair.
        return checked_options(kind, window_size, by_name(kind, prepared_by + passed))


# Typed, since True, 1 and 1.0 are the same to a dictionary.
@functools.lru_cache(maxsize=REMEMBERED, typed=True)
def remembered_options(kind: str, left: int, right: int, *asked: Any) -> Checked:
    checked = checked_options(kind, (left, right), by_name(kind, asked))
    return replace(checked, are_same=comparison_of_objects((left, right, *asked)))


def comparison_of_objects(known: tuple) -> Callable[..., bool]:
    """Return a function that says whether its arguments are the same objects.
    It is compiled. To `==`, True, 1 and 1.0 are the same, and a loop takes as long as a look-up."""
    names = [f"x{i}" for i in range(len(known))]
    same = " and ".join(f"{name} is known_{name}" for name in names)
    objects = {f"known_{name}": one for name, one in zip(names, known, strict=True)}
    return eval(f"lambda {', '.join(names)}: {same}", objects)


def by_name(kind: str, asked: tuple) -> dict[str, Any]:
    """What `PREPARED_BY` and `OPTIONS_OF` name, by name."""
    return dict(zip((*PREPARED_BY, *OPTIONS_OF[kind]), asked, strict=True))


def checked_options(kind: str, window_size: Sequence[int], asked: Mapping[str, Any]) -> Checked:
    """What a call makes of its options, each of them checked.
    `asked` is by name what is not as `OPTION_DEFAULTS` and `PREPARED_BY` say."""
    named = PREPARED_BY | named_options(kind, asked)
    schedule = named["schedule"]
    try:
        hash(schedule)
    except TypeError as error:
        message = f"schedule must be hashable, to be remembered, got {shown(schedule)}: {error}"
        raise TypeError(message) from None
    if not isinstance(named["plan"], Plan | None):
        raise TypeError(f"plan must come from fa3.plan_forward, got {shown(named['plan'])}")
    dropout_p = named["dropout_p"]
    check_probability(dropout_p)
    check_softcap(named["softcap"])
    if kind == DENSE and named["has_gradient"] and named["pack_gqa"] is None:
        named["pack_gqa"] = False
    options = Options(
        check_window(as_pair(window_size), named["causal"]),
        has_dropout=dropout_p > 0,
        kind=kind,
        **{name: named[name] for name in Options._fields if name in named},
    )
    latest: FastPath = FastPath() if kind == PACKED else FastPath(shapes_of)
    return Checked(options, named["return_lse"], named["deterministic"], dropout_p, latest)


def named_options(kind: str, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Options in their types, and defaults of the others; torch.compile reads along.
    Raises for arguments of FlashAttention's signature that would do nothing here."""
    named: dict[str, Any] = {**OPTION_DEFAULTS, **asked}
    on_cache = kind in ON_CACHE
    if named["attention_chunk"] is None:
        named["attention_chunk"] = 0
    for name, default in OPTION_DEFAULTS.items():
        if default is None:
            continue
        # Of integers, whether they are 0 or more, too.
        if type(default) is int or type(named[name]) is not type(default):
            named[name] = converted(name, named[name])
    if named["attention_chunk"]:
        raise NotImplementedError(
            f"attention_chunk must be 0 or None, for no chunks, got {named['attention_chunk']}: "
            "chunks are not supported"
        )
    pack_gqa = named["pack_gqa"]
    if pack_gqa is not None:
        pack_gqa = flag("pack_gqa", pack_gqa)
    if kind != DENSE and pack_gqa not in (None, on_cache):
        how = "always share reads" if on_cache else "share tiles where queries are few"
        raise NotImplementedError(
            f"pack_gqa must be None or {on_cache} here, got {pack_gqa}: the query heads of "
            f"a key/value head {how}"
        )
    named["pack_gqa"] = pack_gqa if kind == DENSE else None
    if named["num_splits"] > 1 and not on_cache:
        raise NotImplementedError(
            f"num_splits must be 0 or 1 here, got {named['num_splits']}: the planner decides into "
            "how many parts keys are cut"
        )
    if named["qv"] is not None:
        raise NotImplementedError(f"qv must be None, got {shown(named['qv'])}: it is not supported")
    named["return_lse"] |= named["return_attn_probs"] | named["return_softmax_lse"]
    return named


def default_pack_gqa(pack_gqa: bool | None, q: Any, k: Any) -> bool | None:
    """A call's pack_gqa; None where no heads share a key/value head.
    Of q and k, tensors or shapes, nothing is checked so far."""
    heads_q, heads_kv = (getattr(one, "shape", one)[-2:-1] for one in (q, k))
    if pack_gqa is None or heads_q != heads_kv:
        return pack_gqa
    flag("pack_gqa", pack_gqa)
    return None


def converted(name: str, value: object) -> bool | int | float:
    """The value of an option in its type."""
    kind = type(OPTION_DEFAULTS[name])
    if kind is bool:
        return flag(name, value)
    return integer(name, value, 0) if kind is int else real(name, value)


def flag(name: str, value: object) -> bool:
    """An option that is on or off."""
    if not isinstance(value, bool | np.bool_):
        is_scale = name == "causal" and isinstance(value, int | float | None)
        note = NOTE_ON_ORDER if is_scale else ""
        raise TypeError(f"{name} must be a bool, got {shown(value)}{note}")
    return bool(value)


def integer(
    name: str,
    value: object,
    least: int | None = None,
    kind: str = "an integer",  # also what else the option may be
    most: int | None = None,
) -> int:
    """A number without fraction."""
    if type(value) is int and most is None and (least is None or value >= least):
        return value
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be {kind}, got {shown(value)}")
    if least is not None and value < least:
        raise ValueError(f"{name} must be {least} or more, got {value}")
    number = int(value)
    if most is not None and number > most:
        raise ValueError(f"{name} must be at most {most}, got {number}")
    return number


def real(name: str, value: object) -> float:
    """A number; no tensor, for which the host might wait."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a float, got {shown(value)}")
    try:
        return float(value)
    except OverflowError:
        return math.inf


def by_either_name(
    name: str, value: Value | None, other_name: str, other: Value | None
) -> Value | None:
    """An argument with two names, of which a call uses one."""
    if other is None:
        return value
    if value is not None:
        raise ValueError(f"{other_name} must be None with {name}, for which it is another name")
    return other


WINDOW_BOUNDS = "two integers (left, right), each -1 or more, where -1 is no bound"


def as_pair(window_size: Sequence[int]) -> tuple[int, ...]:
    """A window's bounds as plain integers; `check_window` looks at their values."""
    if type(window_size) is tuple and len(window_size) == 2:
        left, right = window_size
        if type(left) is type(right) is int:
            return window_size
    if not isinstance(window_size, Sequence):
        raise TypeError(f"window_size must be {WINDOW_BOUNDS}, got {shown(window_size)}")
    return tuple(integer("window_size", bound, kind=WINDOW_BOUNDS) for bound in window_size)


def check_window(window_size: tuple[int, ...], causal: bool) -> Window:
    """The window; with causal, no key ahead is seen."""
    if len(window_size) != 2 or any(n < NO_BOUND for n in window_size):
        raise ValueError(f"window_size must be {WINDOW_BOUNDS}, got {window_size}")
    left, right = window_size
    return Window(left, 0 if causal else right)


def check_scale(softmax_scale: float | None, head_dim: int) -> float:
    """The factor of the scores."""
    if softmax_scale is None:
        return head_dim**-0.5
    if type(softmax_scale) is not float:
        softmax_scale = real("softmax_scale", softmax_scale)
    if not LEAST_FLOAT <= softmax_scale <= MOST_FLOAT:
        note = NOTE_ON_ORDER if softmax_scale == 0 else ""
        raise ValueError(
            f"softmax_scale must be positive and finite in float32, got {softmax_scale}{note}"
        )
    return softmax_scale


def check_probability(dropout_p: float) -> None:
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p must be at least 0 and less than 1, got {dropout_p}")


def check_softcap(softcap: float) -> None:
    if softcap != 0 and not LEAST_FLOAT <= softcap <= MOST_FLOAT:
        raise ValueError(
            f"softcap must be 0 (none) or positive and finite in float32, got {softcap}"
        )
