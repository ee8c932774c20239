"""Objects with tensors in kernels: what of them shapes the code, and what comes with a call.

A score or a mask is a frozen dataclass. Its plain fields are compiled into the kernel; its tensors
are arguments of the kernel, of which only dtype and rank matter to the code. `Template` is the
former half: two objects with equal templates share a kernel.
"""

import dataclasses
import math
from collections.abc import Hashable, Iterator
from typing import NamedTuple


class TensorType(NamedTuple):
    """What the code knows of a tensor field."""

    name: str
    dtype: str
    rank: int


def is_tensor(value: object) -> bool:
    """Whether it is a tensor of torch's, or a bound one."""
    return hasattr(value, "__dlpack__") and not hasattr(value, "__array_interface__")


def types_of(value: object) -> object:
    """The types in a constant: 1, 1.0 and True compare equal, and compute otherwise."""
    if isinstance(value, tuple):
        return type(value), *map(types_of, value)
    if isinstance(value, frozenset):
        return type(value), frozenset((one, types_of(one)) for one in value)
    if isinstance(value, float):
        return type(value), math.copysign(1.0, value)
    return type(value)


def tensors_of(instance: object) -> Iterator[tuple[str, object]]:
    """The tensor fields of a dataclass, by name, in the order of their declaration."""
    for field in dataclasses.fields(instance):
        value = getattr(instance, field.name)
        if is_tensor(value):
            yield field.name, value


@dataclasses.dataclass(frozen=True, slots=True)
class Template:
    """An object without its tensors.

    Fields:
        kind: the object's class.
        constants: names and values of its plain fields.
        constant_types: their types.
        tensors: names and types of its tensor fields.
    """

    kind: type
    constants: tuple[tuple[str, Hashable], ...]
    constant_types: tuple[object, ...]
    tensors: tuple[TensorType, ...]

    @classmethod
    def of(cls, instance: object) -> "Template":
        """The template of a dataclass.

        Raises:
            TypeError: it is no dataclass, or a field is no argument of its class, or a plain field
                cannot be hashed.
        """
        kind = type(instance)
        if not dataclasses.is_dataclass(kind):
            raise TypeError(f"{kind.__name__} must be a frozen dataclass")
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
                hash(value)
            except TypeError as error:
                raise TypeError(
                    f"{kind.__name__}.{name} must be a tensor or hashable, got {value!r}"
                ) from error
        types = (
            TensorType(name, str(tensor.dtype).removeprefix("torch."), tensor.ndim)
            for name, tensor in tensors.items()
        )
        return cls(kind, constants, tuple(types_of(v) for _, v in constants), tuple(types))

    def bind(self, tensors) -> object:
        """An object of this template with its tensors: the next ones of an iterator."""
        bound = object.__new__(self.kind)
        for name, value in self.constants:
            object.__setattr__(bound, name, value)
        for field in self.tensors:
            # Past the class's own checks, which the object that was given has passed.
            object.__setattr__(bound, field.name, next(tensors))
        return bound
