"""Where the arguments of a launch are, by name.

A call copies a list of a kernel's arguments in which all that does not change is filled in, and
puts its tensors into their slots: this takes a third of the time of a new `NamedTuple`.
"""

from typing import NamedTuple


def slots(arguments: type[NamedTuple], *names: str) -> tuple[int, ...]:
    """Return the indices of these arguments of a launch.

    Args:
        arguments: all arguments of the launch, in order.
    """
    return tuple(map(arguments._fields.index, names))
