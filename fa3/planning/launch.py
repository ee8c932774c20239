"""What a plan launches: a plan is a list of these, in the order in which they run."""

from collections.abc import Callable
from typing import Any, NamedTuple


class Launch(NamedTuple):
    """One kernel of a plan.

    Fields:
        kernel: of `fa3.kernels`, what it is compiled for; its compiled entry once it is loaded.
        integers: what it takes after the tensors and the softmax scale.
        num_counters: counters that its schedule finds at zero.
    """

    kernel: Any
    integers: tuple[int, ...]
    num_counters: int = 0

    def loaded(self, load: Callable) -> "Launch":
        """The same with its kernel's entry, which `load` gives."""
        return self._replace(kernel=load(self.kernel))
