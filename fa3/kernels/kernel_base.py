"""What kernels have in common: their arguments, and how a launch begins."""

from typing import Any, ClassVar

import cutlass.cute as cute

from fa3.primitives import arguments
from fa3.primitives.arguments import ELEMENT_TYPES
from fa3.primitives.shared_memory import padded
from fa3.problem import AttentionSpec


class KernelBase:
    """Base of kernels: hashable; fields and repr determine the machine code."""

    entry_name: ClassVar[str]  # name of the host function
    arguments_type: ClassVar[Any]  # names the arguments of a launch, in their order

    @property
    def is_storable(self) -> bool:
        """Whether the kernel may be kept on disk."""
        return True

    def arguments(self) -> list:
        """Symbolic arguments of a launch, and the stream.
        Equal sizes share a symbol."""
        return [*self.arguments_type.symbolic(self), arguments.symbolic_stream()]

    @cute.jit
    def __call__(self, *call):
        """Launch on arguments in the order of `arguments_type`, and a stream."""
        *call, stream = call
        self.kernel.set_name_prefix(self.entry_name, remove_cutlass_symbol=True)
        self.launch(self.arguments_type(*call), stream)

    def launch(self, call, stream) -> None:
        """Launch the kernel on its arguments."""
        raise NotImplementedError


class AttentionKernel(KernelBase):
    """Base of the attention kernels: properties that follow from the `spec`."""

    spec: AttentionSpec

    @property
    def is_storable(self) -> bool:
        """Whether the kernel may be kept on disk: without users' functions."""
        return not self.spec.has_user_functions

    @property
    def dtype(self):
        return ELEMENT_TYPES[self.spec.dtype]

    @property
    def out_type(self):
        """Element type of O."""
        return ELEMENT_TYPES[self.spec.out_dtype]

    @property
    def columns(self) -> int:
        """Columns of Q and K in shared memory."""
        return padded(self.spec.head_dim)

    @property
    def columns_v(self) -> int:
        """Columns of V and O in shared memory and in registers."""
        return padded(self.spec.head_dim_v)
