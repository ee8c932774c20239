"""The options of a call: which types they may have, and what is made of them.

Calls are remembered by their options, and True, 1 and 1.0 are the same to a dictionary. So an
option gets its type before anything is looked up by it.
"""

import math
import numbers

import numpy as np


def flag(name: str, value: object, note: str = "") -> bool:
    """An option that is on or off; `note` is added to the complaint."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be a bool, got {shown(value)}{note}")
    return bool(value)


def integer(name: str, value: object, least: int | None = None, kind: str = "an integer") -> int:
    """A number without fraction; `kind` says what else the option may be."""
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


def shown(value: object) -> str:
    """What came, in a word or two."""
    if value is None or isinstance(value, str | numbers.Number | np.generic):
        return repr(value)
    return type(value).__name__
