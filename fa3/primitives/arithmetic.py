"""`smaller`, `larger` and `either` for code that runs both on the host and inside a kernel.

The DSL's own `min` and `max` take 20 us for Python integers and do not accept arrays.
"""

import cutlass
import numpy as np
from cutlass import Int32

HOST_TYPES = (int, np.integer, np.ndarray)

LARGEST = 2**31 - 1
"""The largest 32-bit integer. Kernels use 32-bit sizes and indices, and 64-bit strides."""


def smaller(a, b):
    """The smaller of two integers, two arrays (element by element) or two values in a kernel."""
    if isinstance(a, HOST_TYPES) and isinstance(b, HOST_TYPES):
        return min(a, b) if isinstance(a, int) and isinstance(b, int) else np.minimum(a, b)
    return cutlass.min(a, b)


def larger(a, b):
    """The larger of two integers, two arrays (element by element) or two values in a kernel."""
    if isinstance(a, HOST_TYPES) and isinstance(b, HOST_TYPES):
        return max(a, b) if isinstance(a, int) and isinstance(b, int) else np.maximum(a, b)
    return cutlass.max(a, b)


def either(condition, a, b):
    """`a` if a condition holds, else `b`: integers, or values in a kernel."""
    if isinstance(condition, bool):
        return a if condition else b
    return Int32(cutlass.select_(condition, Int32(a), Int32(b)))
