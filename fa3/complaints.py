"""What error messages say came in place of what was asked for."""

import numbers

import numpy as np


def shown(value: object) -> str:
    """What came, in a word or two; a tensor's type only."""
    if type(value).__name__ == "dtype":
        return str(value)
    if value is None or isinstance(value, str | numbers.Number | np.generic):
        return f"{value!r:.200}"
    return kind_of(value)


def kind_of(value: object) -> str:
    """The type of what came; users often pass classes for objects."""
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def check_type(name: str, value: object, kind: type) -> None:
    """Raise TypeError unless a value is a `kind`; bools are no int."""
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise TypeError(f"{name} must be of type {kind.__name__}, got {shown(value)}")


def not_an_object(name: str, value: object, base: type) -> TypeError:
    """The complaint about a score or a mask that is none."""
    advice = ""
    if isinstance(value, type) and issubclass(value, base):
        advice = f". Pass an object: {value.__name__}(...)"
        if value is base:
            advice = ". Pass an object of a class that is derived from it"
    return TypeError(f"{name} must be a fa3.{base.__name__}, got {kind_of(value)}{advice}")
