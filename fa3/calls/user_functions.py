"""Names for scores and masks of the user's, by which operators of torch know them.

An operator takes tensors, numbers and strings. So an object of the user's goes to one as a name and
its tensors: the name stands for its class and its plain fields, and is given when a graph is
traced. Names are kept as long as the process lives, as graphs may. They mean nothing to another
process: one that loads an exported program has to name the same objects first, see `name_of`.
"""

import dataclasses
import threading
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch

from fa3.complaints import not_an_object
from fa3.scores.masks import Mask
from fa3.scores.scores import Score
from fa3.scores.templates import types_of


class Form(NamedTuple):
    """An object without its tensors."""

    kind: type
    constants: tuple[tuple[str, Hashable], ...]  # names and values of its plain fields
    constant_types: tuple[object, ...]  # their types, since 1, 1.0 and True are equal
    tensors: tuple[str, ...]  # names of its tensor fields


NAMES: dict[Form, str] = {}
FORMS: dict[str, Form] = {}
NAMING = threading.Lock()


def flatten_function(
    argument: str, function: object | None, base: type[Score] | type[Mask]
) -> tuple[str | None, list[torch.Tensor]]:
    """The name and the tensors of an object; torch.compile reads along.

    Args:
        argument: what the call knows it as.
    """
    if function is None:
        return None, []
    kind = type(function)
    if not isinstance(function, base):
        raise not_an_object(argument, function, base)
    if not dataclasses.is_dataclass(function):
        raise TypeError(f"{kind.__name__} must be a frozen dataclass")
    constants, names, tensors = [], [], []
    for field in dataclasses.fields(function):
        value = getattr(function, field.name)
        if isinstance(value, torch.Tensor):
            names.append(field.name)
            tensors.append(value)
        else:
            constants.append((field.name, value))
    return name_of(kind, tuple(constants), tuple(names)), tensors


def name_of(kind: type, constants: tuple[tuple[str, Hashable], ...], tensors: tuple[str, ...]):
    """The name of the objects of a class with these plain fields; the same one each time.
    It is the class's, with a number if the class has objects of other fields. So a process that
    asks for the names in the same order gets the same ones."""
    form = Form(kind, constants, tuple(types_of(value) for _, value in constants), tensors)
    with NAMING:
        name = NAMES.get(form)
        if name is None:
            name = base = f"{kind.__module__}.{kind.__qualname__}"
            count = 1
            while name in FORMS:
                count += 1
                name = f"{base}#{count}"
            NAMES[form], FORMS[name] = name, form
    return name


# What `torch._dynamo.assume_constant_result` does, without the second that its import takes:
# torch.compile calls the function instead of reading it.
name_of._dynamo_marked_constant = True


def unflatten_function(name: str | None, tensors: Sequence[torch.Tensor]) -> Score | Mask | None:
    """The object with this name and these tensors."""
    if name is None:
        return None
    if name not in FORMS:
        raise ValueError(
            f"{name} is not known here: the graph was traced in another process; trace a call with "
            "such a score or mask first"
        )
    form = FORMS[name]
    function = object.__new__(form.kind)
    # Past the class's own checks: the user's object has passed them.
    for field, value in (*form.constants, *zip(form.tensors, tensors, strict=True)):
        object.__setattr__(function, field, value)
    return function
