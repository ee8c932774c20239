"""Shared memory of a CTA: capacity, columns of heads, the allocator."""

try:  # from version 4.8 on
    from cutlass.memory import SmemAllocator
    from cutlass.tensor_utils import LayoutEnum
except ModuleNotFoundError:
    from cutlass.utils import LayoutEnum, SmemAllocator

__all__ = ["CAPACITY", "COLUMN_UNIT", "LayoutEnum", "SmemAllocator", "check_fits", "padded"]

CAPACITY = 232_448  # bytes that a CTA may use on sm_90
COLUMN_UNIT = 32  # columns of Q, K, V and O in shared memory come in multiples of this


def padded(head_dim: int) -> int:
    """Columns of a head; TMA loads zeros as padding, stores skip it."""
    return -(-head_dim // COLUMN_UNIT) * COLUMN_UNIT


def check_fits(smem_bytes: int, config: object, spec: object) -> None:
    """Raise a ValueError if a config needs too much shared memory."""
    if smem_bytes > CAPACITY:
        raise ValueError(
            f"{config} needs {smem_bytes} bytes of shared memory for {spec}, a CTA has {CAPACITY}"
        )
