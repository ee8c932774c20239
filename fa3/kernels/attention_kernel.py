"""What the kernels of attention have in common."""

from fa3.primitives.arguments import ELEMENT_TYPES
from fa3.primitives.shared_memory import padded
from fa3.problem import AttentionSpec


class AttentionKernel:
    """Base of the attention kernels: properties that follow from the `spec`."""

    spec: AttentionSpec

    @property
    def is_storable(self) -> bool:
        """Whether the kernel may be kept on disk. Users' functions may use their modules' names."""
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
