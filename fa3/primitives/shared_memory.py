"""Shared memory of a CTA: its capacity, and the columns that a head takes in it."""

CAPACITY = 232_448  # bytes that a CTA may use on sm_90
COLUMN_UNIT = 32  # columns of Q, K, V and O in shared memory come in multiples of this


def padded(head_dim: int) -> int:
    """Columns that a head takes. TMA loads fill the padding with 0, and TMA stores skip it."""
    return -(-head_dim // COLUMN_UNIT) * COLUMN_UNIT


def check_fits(smem_bytes: int, config: object, spec: object) -> None:
    """Raise a ValueError if a config needs more shared memory for a spec than a CTA has."""
    if smem_bytes > CAPACITY:
        raise ValueError(
            f"{config} needs {smem_bytes} bytes of shared memory for {spec}, a CTA has {CAPACITY}"
        )
