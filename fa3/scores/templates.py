"""Templates of scores and masks: what is compiled, without tensors.

A score or a mask is a frozen dataclass. Its plain fields are compiled in; its tensors are kernel
arguments, of which the code knows only dtype and rank. `fa3.calls.modifiers` makes the `Template`
of a user's object for the spec; objects with equal templates share a kernel, which binds tensors.
"""

import dataclasses
import math
from collections.abc import Hashable, Iterator
from typing import NamedTuple


class TensorType(NamedTuple):
    """What the compiled code knows of a tensor field."""

    name: str
    dtype: str
    rank: int


def is_tensor(value: object) -> bool:
    """Whether a value is a tensor, of torch or inside a kernel."""
    return hasattr(value, "__dlpack__") and not hasattr(value, "__array_interface__")


def types_of(value: object) -> object:
    """The types in a constant, since 1, 1.0 and True compare equal."""
    if is_tensor(value):
        raise TypeError("a tensor must be a field of its own")  # else it would be kept for good
    if isinstance(value, tuple):
        return type(value), *map(types_of, value)
    if isinstance(value, frozenset):
        return type(value), frozenset((one, types_of(one)) for one in value)
    if isinstance(value, float):
        return type(value), math.copysign(1.0, value)
    return type(value)


def tensors_of(instance: object) -> Iterator[tuple[str, object]]:
    """A dataclass's tensor fields, by name, in the order of declaration."""
    for field in dataclasses.fields(instance):
        value = getattr(instance, field.name)
        if is_tensor(value):
            yield field.name, value


@dataclasses.dataclass(frozen=True, slots=True)
class Template:
    """An object without its tensors."""

    kind: type  # the object's class
    constants: tuple[tuple[str, Hashable], ...]  # names and values of its plain fields
    constant_types: tuple[object, ...]  # their types
    tensors: tuple[TensorType, ...]  # names and types of its tensor fields

    @classmethod
    def of(cls, instance: object) -> "Template":
        """Return the template of a dataclass.

        Raises TypeError if a field is not an argument of its class's constructor, or a plain field
        cannot be hashed.
        """
        kind = type(instance)
        for field in dataclasses.fields(kind):
            if not field.init:
                raise TypeError(f"{kind.__name__}.{field.name} must be an argument of its class")
        tensors = dict(tensors_of(instance))
        constants = tuple(
            (field.name, getattr(instance, field.name))
            for field in dataclasses.fields(instance)
            if field.name not in tensors
        )
        for name, value in constants:
            try:
                hash((value, types_of(value)))
            except TypeError as error:
                came = type(value).__name__
                raise TypeError(
                    f"{kind.__name__}.{name} must be a tensor or hashable, got {came}: {error}"
                ) from error
        types = (
            TensorType(name, str(tensor.dtype).removeprefix("torch."), tensor.ndim)
            for name, tensor in tensors.items()
        )
        return cls(kind, constants, tuple(types_of(v) for _, v in constants), tuple(types))

    def bind(self, tensors) -> object:
        """An object of this template, with tensors from the iterator `tensors`."""
        bound = object.__new__(self.kind)
        for name, value in self.constants:
            object.__setattr__(bound, name, value)
        for field in self.tensors:
            # Skips the class's own checks: the user's object has passed them.
            object.__setattr__(bound, field.name, next(tensors))
        return bound
