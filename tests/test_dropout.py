"""Dropout: its random numbers, which of them a kernel's thread draws, and what is refused."""

from dataclasses import replace

import cutlass
import cutlass.cute as cute
import numpy as np
import pytest
import torch
from cutlass import Int32, Uint32
from cutlass.cute.runtime import from_dlpack
from problems import make_operands, make_problem
from reference import check_attention
from score_problems import Recipe
from test_compile import spec_of
from varlen_problems import VarlenProblem

import fa3
from fa3.kernels.backward import Backward
from fa3.kernels.backward_launch import MMA_GROUPS
from fa3.kernels.backward_roles import score_coords
from fa3.planning.backward import choose_backward_config
from fa3.primitives.attention import Mmas
from fa3.primitives.coords import ScoreCoords
from fa3.primitives.dropout import (
    PHILOX_ROUNDS,
    WORDS,
    DropoutArguments,
    RandomWords,
    TileDropout,
    TransposedDropout,
    key_steps,
    philox,
    threshold_of,
)
from fa3.primitives.gradient_mmas import GradientMmas
from fa3.primitives.wgmma import ROWS, WARP, WARPGROUP
from fa3.reference.dropout import Dropout
from fa3.schedules import Dynamic, Tile

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


OPTIONS = "--gpu-arch sm_90a"

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


@pytest.mark.parametrize("dropout_p", [0.01, 0.5, 0.9])
def test_the_share_that_is_kept(dropout_p):
    mask = fa3.dropout_mask(STATE, dropout_p, 2, 4, 512, 512).double()
    deviation = (dropout_p * (1 - dropout_p)) ** 0.5
    assert abs(mask.mean() - (1 - dropout_p)) < 5 * deviation / mask.numel() ** 0.5
    # Of each row, column and head too, and no score goes with a neighbour.
    for dim in range(4):
        means = mask.mean(dim=[d for d in range(4) if d != dim])
        count = mask.numel() / len(means)
        assert (means - (1 - dropout_p)).abs().max() < 6 * deviation / count**0.5
    centred = (mask - mask.mean()) / deviation
    for shift in [
        (0, 0, 0, 1),
        (0, 0, 0, 2),
        (0, 0, 0, 8),
        (0, 0, 1, 0),
        (0, 0, 8, 0),
        (0, 1, 0, 0),
    ]:
        moved = centred.roll(shift, dims=(0, 1, 2, 3))
        assert abs((centred * moved).mean()) < 5 / mask.numel() ** 0.5


def test_positions_near_the_ends_of_32_bits():
    at = fa3.Position(
        2**31 - 1, 2**31 - 1, torch.tensor([2**31 - 2]), torch.tensor([2**31 - 2]), 0, 0
    )
    found = Dropout(STATE, 0.5).keeps(at)
    place = np.array([2**31 - 2])
    assert found.tolist() == is_kept(numbers(SEED, at.batch, at.head, place, place), 0.5).tolist()


# ----------------------------------------------------------------- what threads of kernels draw


class Exchange:
    """Shuffles between lanes on the host, where threads run one after another.

    So they run twice: at first each writes what it gives, then each reads what it gets.
    """

    def begin(self, is_over: bool, given: cute.Tensor, thread, block):
        """The next shuffles are those of this thread. `given`: (shuffles, threads, blocks)."""
        self.is_over, self.given, self.thread, self.block = is_over, given, thread, block
        self.count = 0

    def lane(self) -> Int32:
        return self.thread % WARP

    def shuffle(self, word: Uint32, offset: int) -> Uint32:
        i, self.count = self.count, self.count + 1
        if not self.is_over:
            self.given[i, self.thread, self.block] = Int32(word)
            return word
        return Uint32(self.given[i, self.thread ^ offset, self.block])


@pytest.fixture
def exchange(monkeypatch) -> Exchange:
    """Run what kernels compute for a whole warp by each thread alone."""
    exchange = Exchange()
    monkeypatch.setattr(cute.arch, "make_warp_uniform", lambda value: value)
    monkeypatch.setattr(cute.arch, "lane_idx", exchange.lane)
    monkeypatch.setattr(cute.arch, "shuffle_sync_bfly", exchange.shuffle)
    return exchange


@cute.jit
def write_words(
    words: cute.Tensor,
    places: cute.Tensor,
    given: cute.Tensor,
    rng_state: cute.Tensor,
    tile_n: cutlass.Constexpr,
    exchange: cutlass.Constexpr,
    tile: tuple[Int32, ...],
):
    """Write what each thread of a warpgroup draws of a block of keys, and of which pair it is.

    Args:
        words: (pairs, threads, blocks), int32.
        places: (2, pairs, threads, blocks): the query and the first key.
        given: what threads give one another, see `Exchange`.
    """
    m_block, head, batch = tile
    mmas = Mmas.of(cutlass.BFloat16, tile_n, 64)
    for is_over in cutlass.range_constexpr(2):
        for thread in cutlass.range(WARPGROUP):
            coords = ScoreCoords.of(
                mmas.qk, thread, (ROWS, tile_n), m_block * ROWS, Tile(m_block, head, batch)
            )
            arguments = DropoutArguments(rng_state, Int32(0), 0.0)
            drawn = RandomWords.of(arguments, arguments.seed(), batch, head)
            for n_block in cutlass.range(words.shape[2]):
                of_thread = exchange, (is_over, given, thread, n_block)
                write_pairs(words, places, TileDropout(drawn, coords, None), *of_thread)


def write_pairs(words, places, dropout: TileDropout, exchange: Exchange, of_thread: tuple):
    exchange.begin(*of_thread)
    coords, (thread, n_block) = dropout.coords, of_thread[2:]
    for i, word in enumerate(dropout.of_pairs(n_block)):
        words[i, thread, n_block] = Int32(word)
        places[0, i, thread, n_block] = coords.query(i % 2)
        places[1, i, thread, n_block] = coords.first_key(n_block) + coords.column_steps[i // 2 * 2]


def to_write(pairs: int, threads: int, blocks: int) -> list[torch.Tensor]:
    """Return words, places and what is given; two words are, of a counter for two squares."""
    given = -(-pairs // (2 * WORDS)) * 2
    return [
        torch.zeros(*sizes, threads, blocks, dtype=torch.int32)
        for sizes in ((pairs,), (2, pairs), (given,))
    ]


def check_words(words: torch.Tensor, places: torch.Tensor, is_transposed: bool, tile: tuple):
    """Assert that pairs of 16-bit numbers are those of their places."""
    _, head, batch = tile
    for half in range(2):
        number = words.numpy() >> 16 * half & 0xFFFF
        query, key = places[0].numpy().astype(np.int64), places[1].numpy().astype(np.int64)
        query, key = (query + half, key) if is_transposed else (query, key + half)
        assert np.array_equal(number, numbers(SEED, batch, head, query, key))


@pytest.mark.compiles
@pytest.mark.parametrize("tile_n", [80, 128])
def test_what_threads_of_the_forward_kernel_draw(tile_n, exchange):
    tile, num_blocks = (5, 3, 7), 3
    words, places, given = to_write(ROWS * tile_n // WARPGROUP // 2, WARPGROUP, num_blocks)
    tensors = [from_dlpack(x) for x in (words, places, given, STATE)]
    sizes = tuple(map(Int32, tile))
    run = cute.compile(write_words, *tensors, tile_n, exchange, sizes, options=OPTIONS)
    run(*tensors, tuple(map(Int32, tile)))
    # Each pair of the tile has one thread.
    assert len(places.flatten(1).T.unique(dim=0)) == words.numel()
    assert (places[1] % 2 == 0).all() and places[1].max() == num_blocks * tile_n - 2
    check_words(words, places, False, tile)


@cute.jit
def write_transposed_words(
    words: cute.Tensor,
    places: cute.Tensor,
    given: cute.Tensor,
    rng_state: cute.Tensor,
    kernel: cutlass.Constexpr,
    exchange: cutlass.Constexpr,
    tile: tuple[Int32, ...],
):
    """As `write_words`, by all MMA warpgroups; before `movmatrix` has transposed the words.

    Args:
        words: (pairs, parts x threads, blocks).
        places: (2, pairs, parts x threads, blocks): the first query and the key of what comes of a
            word.
    """
    n_block, head, batch = tile
    config = kernel.config
    mmas = GradientMmas.of(kernel.dtype, config, kernel.columns, kernel.columns_v)
    for is_over in cutlass.range_constexpr(2):
        for i in cutlass.range_constexpr(config.q_splits * MMA_GROUPS):
            part, group = i // MMA_GROUPS, i % MMA_GROUPS
            for thread in cutlass.range(WARPGROUP):
                coords = score_coords(config, mmas, thread, group, Tile(n_block, head, batch))
                arguments = DropoutArguments(rng_state, Int32(0), 0.0)
                of_part = coords.shifted(part * config.queries)
                dropout = TransposedDropout(arguments, arguments.seed(), of_part)
                for m_block in cutlass.range(words.shape[2]):
                    of_thread = exchange, (is_over, given, i * WARPGROUP + thread, m_block)
                    write_transposed_pairs(words, places, dropout, *of_thread)


def write_transposed_pairs(
    words, places, dropout: TransposedDropout, exchange: Exchange, of_thread: tuple
):
    exchange.begin(*of_thread)
    coords, (thread, m_block) = dropout.coords, of_thread[2:]
    count = words.shape[0]
    for pair, word in dropout.of_pairs(dropout.words(), m_block, count, count // WORDS):
        words[pair, thread, m_block] = Int32(word)
        places[0, pair, thread, m_block] = (
            coords.first_query(m_block) + coords.column_steps[pair // 2 * 2]
        )
        places[1, pair, thread, m_block] = coords.key(pair % 2)


def movmatrix(words: torch.Tensor) -> torch.Tensor:
    """Transpose 8 x 8 numbers, two in the word of each of 32 lanes: (pairs, threads, blocks)."""
    lanes = words.view(len(words), -1, 8, 4, words.shape[2])
    halves = torch.stack((lanes & 0xFFFF, lanes >> 16 & 0xFFFF), dim=4)
    turned = halves.flatten(3, 4).transpose(2, 3).unflatten(3, (4, 2))
    return (turned[..., 0, :] | turned[..., 1, :] << 16).reshape(words.shape)


@pytest.mark.compiles
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_what_threads_of_the_backward_kernel_draw(head_dim, head_dim_v, exchange):
    spec = replace(spec_of(head_dim, "full", head_dim_v=head_dim_v), has_dropout=True)
    kernel = Backward(spec, choose_backward_config(spec), Dynamic)
    config, tile, num_blocks = kernel.config, (5, 3, 7), 3
    pairs = ROWS * config.queries // WARPGROUP // 2
    threads = config.q_splits * MMA_GROUPS * WARPGROUP
    words, places, given = to_write(pairs, threads, num_blocks)
    tensors = [from_dlpack(x) for x in (words, places, given, STATE)]
    sizes = tuple(map(Int32, tile))
    run = cute.compile(write_transposed_words, *tensors, kernel, exchange, sizes, options=OPTIONS)
    run(*tensors, sizes)
    assert words.shape[1] % WARP == 0 and len(places.flatten(1).T.unique(dim=0)) == words.numel()
    check_words(movmatrix(words), places, True, tile)


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
