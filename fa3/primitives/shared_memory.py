"""What fits into a CTA's shared memory, and how many columns a head takes there."""

CAPACITY = 232_448
"""Bytes that a CTA may use on sm_90."""

COLUMN_UNIT = 32
"""Columns of Q, K, V and O in shared memory come in multiples of this."""


def padded(head_dim: int) -> int:
    """Columns that a head takes: TMA fills the rest with 0, and clips what it stores."""
    return -(-head_dim // COLUMN_UNIT) * COLUMN_UNIT


def check_fits(smem_bytes: int, config: object, spec: object) -> None:
    """Raise ValueError if a CTA has less shared memory than a config takes for a spec."""
    if smem_bytes > CAPACITY:
        raise ValueError(
            f"{config} needs {smem_bytes} bytes of shared memory for {spec}, a CTA has {CAPACITY}"
        )
