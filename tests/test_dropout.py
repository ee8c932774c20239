"""Dropout: its random numbers, its mask, and what is refused. Kernels: test_dropout_attention."""

import numpy as np
import pytest
import torch
from problems import make_operands, make_problem
from reference import check_attention
from score_problems import Recipe
from varlen_problems import VarlenProblem

import fa3
from fa3.primitives.dropout import (
    PHILOX_ROUNDS,
    key_steps,
    philox,
    threshold_of,
)
from fa3.reference.dropout import Dropout

SEED = 0x3A1F_5C77_90AB_CDEF
STATE = torch.tensor([SEED])

DROPPED = {"dropout_p": 0.3, "rng_state": STATE}

PACKED = (
    VarlenProblem((70, 0, 130), (90, 20, 130), heads_kv=2, group=2, head_dim=32),
    VarlenProblem((100, 50), (100, 80), (90, 50), (64, 70), 7, causal=True),
    VarlenProblem((33, 150), (150, 33), head_dim=64, window=(30, 5), recipe=Recipe(sinks="q")),
)


def leaves(heads: int = 2) -> list[torch.Tensor]:
    """Return q, k and v that require grad."""
    return [x.requires_grad_() for x in make_operands(make_problem(2, 70, 90, heads, head_dim=32))]


# ------------------------------------------------------------------------------------- Philox

KNOWN = {
    7: (
        ("00000000 00000000 00000000 00000000", "00000000 00000000"),
        ("5f6fb709 0d893f64 4f121f81 4f730a48",),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff"),
        ("5207ddc2 45165e59 4d8ee751 8c52f662",),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0"),
        ("4dfccaba 190a87f0 c47362ba b6b5242a",),
    ),
    10: (
        ("00000000 00000000 00000000 00000000", "00000000 00000000"),
        ("6627e8d5 e169c58d bc57ac4c 9b00dbd8",),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff"),
        ("408f276d 41c83b0e a20bc7c6 6d5451fd",),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0"),
        ("d16cfe09 94fdcceb 5001e420 24126ea1",),
    ),
}
"""Rounds -> counter and key, then what comes of them, of Random123's `kat_vectors`."""


def known_answers():
    """Yield (rounds, counter, key, answer)."""
    for rounds, lines in KNOWN.items():
        for (counter, key), (answer,) in zip(lines[::2], lines[1::2], strict=True):
            yield rounds, *([int(word, 16) for word in x.split()] for x in (counter, key, answer))


def philox_of_numpy(counter: list, key: list, rounds: int) -> list:
    """Compute Philox4x32 as its paper writes it down, on arrays of uint64."""
    c0, c1, c2, c3 = (np.asarray(word, dtype=np.uint64) for word in counter)
    k0, k1 = (np.uint64(word) for word in key)
    low = np.uint64(0xFFFFFFFF)
    for _ in range(rounds):
        p0, p1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (
            (p1 >> np.uint64(32)) ^ c1 ^ k0,
            p1 & low,
            (p0 >> np.uint64(32)) ^ c3 ^ k1,
            p0 & low,
        )
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & low, (k1 + np.uint64(0xBB67AE85)) & low
    return [c0, c1, c2, c3]


@pytest.mark.parametrize(("rounds", "counter", "key", "answer"), list(known_answers()))
def test_known_answers(rounds, counter, key, answer):
    assert [int(word) for word in philox_of_numpy(counter, key, rounds)] == answer
    keys = [
        tuple((k + s) % 2**32 for k, s in zip(key, steps, strict=True))
        for steps in key_steps(rounds)
    ]
    found = philox(tuple(counter), keys, lambda word, factor: divmod(word * factor, 2**32))
    assert list(found) == answer


def numbers(seed: int, batch: int, head: int, query: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Return the 16-bit numbers of scores, by numpy alone."""
    lane = query % 8 * 4 + key % 8 // 2
    counter = np.broadcast_arrays(head, key // 16 * 16 + lane // 2, batch, query // 16)
    words = np.stack(philox_of_numpy(list(counter), [seed % 2**32, seed >> 32], PHILOX_ROUNDS))
    index = (lane + key // 16 + query // 16) % 2 * 2 + key % 16 // 8
    word = np.take_along_axis(words, index[None], axis=0)[0]
    word = np.where(query % 16 < 8, word, word * np.uint64(0x915F77F5))
    return (word >> (key % 2 * 16).astype(np.uint64)).astype(np.uint32) & 0xFFFF


def is_kept(number: np.ndarray, dropout_p: float) -> np.ndarray:
    """Return which numbers drop nothing."""
    bits, _ = threshold_of(dropout_p)
    threshold = np.array([bits << 16], dtype=np.uint32).view(np.float32)
    return ~((number.astype(np.uint32) << 16).view(np.float32) < threshold)


# ----------------------------------------------------------------------------------- the mask


@pytest.mark.parametrize("dropout_p", [0.001, 0.1, 0.5, 0.75])
def test_the_mask_of_numpy(dropout_p):
    found = fa3.dropout_mask(STATE, dropout_p, 2, 3, 70, 90).numpy()
    query, key = np.broadcast_arrays(np.arange(70)[:, None], np.arange(90))
    for batch in range(2):
        for head in range(3):
            expected = is_kept(numbers(SEED, batch, head, query, key), dropout_p)
            assert np.array_equal(found[batch, head], expected)


@pytest.mark.parametrize(
    "dropout_p",
    [1e-9, 2**-16, 0.001, 0.1, 0.25, 0.4979, 0.4981, 0.5, 1 / 3, 0.9, 0.996, 0.9999, 1 - 2**-30],
)
def test_the_threshold_drops_its_share_of_all_numbers(dropout_p):
    dropped = np.count_nonzero(~is_kept(np.arange(2**16, dtype=np.uint32), dropout_p))
    _, kept = threshold_of(dropout_p)
    assert dropped == round((1 - kept) * 2**16)
    assert dropped == min(max(round(dropout_p * 2**16), 1), 0xFF01)


def test_a_threshold_between_the_zeros():
    """Neither zero is less than the other, so one share is not possible."""
    bits, kept = threshold_of(0x7F81 / 2**16)
    assert (bits, kept) == (1, 1 - 0x7F82 / 2**16)
    assert np.count_nonzero(~is_kept(np.arange(2**16, dtype=np.uint32), 0x7F81 / 2**16)) == 0x7F82


def test_positions_near_the_ends_of_32_bits():
    at = fa3.Position(
        2**31 - 1, 2**31 - 1, torch.tensor([2**31 - 2]), torch.tensor([2**31 - 2]), 0, 0
    )
    found = Dropout(STATE, 0.5).keeps(at)
    place = np.array([2**31 - 2])
    assert found.tolist() == is_kept(numbers(SEED, at.batch, at.head, place, place), 0.5).tolist()


# ------------------------------------------------------------------------------ what is refused


def test_the_kernel_of_decoding_has_no_dropout():
    """However few the queries are."""
    q, k, v = make_operands(make_problem(2, 1, 5000, 1, 8, 64))
    with pytest.raises(NotImplementedError, match="pack_gqa must be None or False with dropout_p"):
        fa3.flash_attn_func(q, k, v, pack_gqa=True, **DROPPED)
    out, lse = fa3.flash_attn_func(q, k, v, return_lse=True, **DROPPED)
    check_attention(out, lse, q, k, v, **DROPPED)
    lengths = torch.tensor([0, 1, 2], dtype=torch.int32), torch.tensor([0, 5000, 10000]).int()
    packed = (x.flatten(0, 1) for x in (q, k, v))
    found = fa3.flash_attn_varlen_func(*packed, *lengths, 1, 5000, **DROPPED)
    torch.testing.assert_close(found[:, None], out, atol=1e-2, rtol=1e-2)
