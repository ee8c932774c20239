"""Smaller and larger of two numbers, on the host and inside a kernel.

The DSL's own `min` and `max` take 20 us for Python integers, and no arrays.
"""

import cutlass
import numpy as np

HOST_TYPES = (int, np.integer, np.ndarray)

LARGEST = 2**31 - 1
"""The largest 32-bit integer. Sizes and indices in kernels are such; strides have 64 bits."""


def smaller(a, b):
    """The smaller of two: integers, arrays of them element by element, or values in a kernel."""
    if isinstance(a, HOST_TYPES) and isinstance(b, HOST_TYPES):
        return min(a, b) if isinstance(a, int) and isinstance(b, int) else np.minimum(a, b)
    return cutlass.min(a, b)


def larger(a, b):
    """The larger of two: integers, arrays of them element by element, or values in a kernel."""
    if isinstance(a, HOST_TYPES) and isinstance(b, HOST_TYPES):
        return max(a, b) if isinstance(a, int) and isinstance(b, int) else np.maximum(a, b)
    return cutlass.max(a, b)
