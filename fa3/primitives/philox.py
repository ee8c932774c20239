"""Philox4x32, a block cipher that makes four random words of a counter and a key.

The arithmetic is the same on the host and in kernels: `fa3.primitives.dropout` runs it on GPUs,
`fa3.reference.dropout` in torch.

Source: Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3 (SC 2011).
"""

from collections.abc import Callable, Sequence

PHILOX_ROUNDS = 7  # the fewest rounds that passed all of the authors' tests

WORD_BITS = 32

MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
"""What a round multiplies the first and the third word of the counter by."""

WEYL = 0x9E3779B9, 0xBB67AE85  # what the key's words grow by from round to round


def key_steps(rounds: int = PHILOX_ROUNDS) -> list[tuple[int, int]]:
    """What the key's words have grown by in each round, modulo 2**32."""
    return [tuple(i * step % (1 << WORD_BITS) for step in WEYL) for i in range(rounds)]


def philox(counter: tuple, round_keys: Sequence[tuple], multiply: Callable) -> tuple:
    """Encrypt a counter of four words.

    Args:
        round_keys: the key's two words in each round.
        multiply: gives the upper and the lower word of a word times one of `MULTIPLIERS`.
    """
    a, b, c, d = counter
    for first, second in round_keys:
        (high_a, low_a), (high_c, low_c) = map(multiply, (a, c), MULTIPLIERS)
        # The inner exclusive-or first: in a kernel it may be the same for all counters.
        a, b, c, d = high_c ^ (b ^ first), low_c, high_a ^ (d ^ second), low_a
    return a, b, c, d
