"""What a plan launches, and where the arguments of a launch are, by name.

A call copies a launch's template and puts its tensors into their slots: this takes a third of the
time of a new `NamedTuple`, and the names stand next to the values.
"""

from collections.abc import Callable
from typing import Any, NamedTuple


class Launch(NamedTuple):
    """One kernel of a plan; a plan is a list of them, in the order in which they run."""

    kernel: Any  # of `fa3.kernels`, what it is compiled for; its compiled entry once it is loaded
    template: list[Any]  # its arguments, in order; None where a call fills them in
    num_counters: int = 0  # counters that its schedule finds at zero

    def loaded(self, load: Callable) -> "Launch":
        """Return the same launch with its kernel's entry, which `load` gives."""
        return self._replace(kernel=load(self.kernel))


def template_of(arguments: type[NamedTuple], **filled: Any) -> list[Any]:
    """Return the arguments of a launch, in order: what is filled in, defaults, and None."""
    template = dict.fromkeys(arguments._fields) | arguments._field_defaults
    assert filled.keys() <= template.keys()
    return list((template | filled).values())


def slots(arguments: type[NamedTuple], *names: str) -> tuple[int, ...]:
    """Return the indices of these arguments of a launch."""
    return tuple(map(arguments._fields.index, names))
