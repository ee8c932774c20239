"""Dropout: which probabilities are dropped, drawn where needed and kept nowhere.

A score's random number follows from the seed, batch, head, query and key alone. So no tiling and
no order of the work changes it, and the backward pass draws it again. A warp draws numbers of
squares of 16 queries and 16 keys, of two neighbours at once. A lane has 8 numbers of a square. It
encrypts one counter (`fa3.primitives.dropout`), of one of the two squares, and gives half of the
four words to the lane next to it, which encrypts the other square's. A word makes four numbers of
16 bits: its halves, and the halves of the word times `FACTOR`.

    counter   head, 16 (key // 16) + lane // 2, batch, query // 16
    lane      4 (query % 8) + key % 8 // 2
    words     0 and 1 if lane + key // 16 + query // 16 is even, 2 and 3 if it is odd
    word      key % 16 // 8 of these two
    number    the word's lower half for even keys; of the product if query % 16 // 8 is 1

That is what a lane holds of an accumulator (queries, keys), so the forward kernel draws each number
once. The backward kernel holds (keys, queries): its lanes draw the same words, and `movmatrix`
transposes them, 8 queries and 8 keys at once.

A number is read as a bfloat16. It drops its score if it is less than a threshold below which the
right share of all bit patterns lies. So one instruction compares two numbers.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, Uint64

from fa3.primitives import arguments
from fa3.primitives.fragments import PACKED_TYPES, ScoreCoords, TransposedCoords, words_of

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
    `multiply` gives the upper and the lower word of a word times one of `MULTIPLIERS`."""
    a, b, c, d = counter
    for first, second in round_keys:
        (high_a, low_a), (high_c, low_c) = map(multiply, (a, c), MULTIPLIERS)
        # The inner exclusive-or first: in a kernel it may be the same for all counters.
        a, b, c, d = high_c ^ (b ^ first), low_c, high_a ^ (d ^ second), low_a
    return a, b, c, d


SQUARE = 16  # queries, and keys, of a square
COUNTERS = 16  # counters of a square
WORDS = 4  # words with two numbers each that a lane has of a square

FACTOR = 0x915F77F5
"""What makes two numbers more of a word. It is odd, so each of them is any pattern equally often;
and a word's four numbers are as good as independent: of the comparisons with a threshold no two are
correlated by more than 0.0011 for a dropout of 0.05 to 0.95, and by 0.006 for any."""

NUMBER_BITS = 16
PATTERNS = 1 << NUMBER_BITS  # bit patterns of a number

NEGATIVE = 0x7F80
"""Patterns of numbers below 0, which begin at NEGATIVE_INFINITY; as many stand for those above."""

NEGATIVE_INFINITY = 0xFF80

MOST_DROPPED = 2 * NEGATIVE + 1
"""Patterns that a threshold can drop: infinity is not less than any, nor is NaN."""

COUNTERS_IN_FLIGHT = 1
"""Counters that a thread of the forward kernel encrypts at once. More would take registers that are
not there."""


def threshold_of(dropout_p: float) -> tuple[int, float]:
    """Return the bits of the threshold, and the share that is kept.
    That is 1 - dropout_p to 16 bits, at least 0.4%."""
    dropped = min(max(round(dropout_p * PATTERNS), 1), MOST_DROPPED)
    # Patterns less than a negative number are those from infinity up to it. Then come two zeros,
    # neither of which is less than the other.
    dropped += dropped == NEGATIVE + 1
    bits = NEGATIVE_INFINITY - dropped if dropped <= NEGATIVE else dropped - (NEGATIVE + 1)
    return bits, 1.0 - dropped / PATTERNS


class DropoutArguments(NamedTuple):
    """What a launch takes for dropout."""

    rng_state: object  # (1,) int64, the seed
    threshold: int  # its bits, see `threshold_of`
    kept: float  # the share that is kept

    @classmethod
    def symbolic(cls) -> "DropoutArguments":
        """Types of the arguments."""
        return cls(arguments.strided_tensor("int64", 1), Int32(0), Float32(0.0))

    def seed(self) -> tuple[Uint32, Uint32]:
        """Read the lower and the upper word of the seed."""
        seed = self.rng_state[0]
        return Uint32(seed), Uint32(seed >> WORD_BITS)


@dataclass(frozen=True)
class RandomWords:
    """The random words of one head."""

    round_keys: tuple[tuple[Uint32, Uint32], ...]  # of `philox`
    threshold: Uint32  # twice in a word
    zero: Uint32  # 0, but the compiler does not know
    batch: Uint32
    head: Uint32

    @classmethod
    def of(cls, call: DropoutArguments, seed: tuple, batch, head) -> "RandomWords":
        threshold = Uint32(call.threshold)
        return cls(
            tuple(tuple(map(Uint32.__add__, seed, map(Uint32, steps))) for steps in key_steps()),
            threshold | threshold << NUMBER_BITS,
            threshold >> NUMBER_BITS,
            Uint32(batch),
            Uint32(head),
        )

    def draw(
        self, places: Sequence[tuple], slot: Uint32, count: int, in_flight: int
    ) -> Iterator[tuple[Uint32, ...]]:
        """Yield a lane's words in a row or a column of squares.

        Each place has, for a counter that the lane encrypts, 16 (key // 16) + lane // 2 and query
        // 16. `slot` is the lane's `slot_of`. There are two squares for each place; one may be left
        over.
        """
        last = []
        for i, (key_word, query_word) in enumerate(places):
            if len(last) == in_flight:
                # Wait for an earlier one: the compiler would have them all in flight.
                key_word = key_word ^ (last.pop(0) & self.zero)
            counter = self.head, key_word, self.batch, query_word
            *kept, third, fourth = philox(counter, self.round_keys, product_of_words)
            received = [cute.arch.shuffle_sync_bfly(word, 1) for word in (third, fourth)]
            last.append(kept[-1])
            # A last square that is left over has no neighbour in the block.
            for one, other in ((kept, received), (received, kept))[: count - 2 * i]:
                both = zip(one, other, strict=True)
                words = [cutlass.select_(slot < COUNTERS, *word) for word in both]
                yield tuple(number for word in words for number in (word, word * FACTOR))


def product_of_words(word: Uint32, factor: int) -> tuple[Uint32, Uint32]:
    """The upper and the lower word of a product."""
    product = Uint64(word) * Uint64(factor)
    return Uint32(product >> WORD_BITS), Uint32(product)


def slot_of(keys, queries) -> Uint32:
    """Return the counter that a lane encrypts of each two squares.
    16 more means the second square.
    `keys` and `queries` are key // 16 and query // 16 in the first square."""
    lane = Uint32(cute.arch.lane_idx())
    return (lane + Uint32(keys) + Uint32(queries)) % 2 * COUNTERS + lane // 2


@dataclass(frozen=True)
class TileDropout:
    """Dropout in a tile of the forward kernel."""

    words: RandomWords
    coords: ScoreCoords
    factor: Float32  # what O is multiplied by at the end, for what is dropped of it

    @classmethod
    def of(cls, call: DropoutArguments, coords: ScoreCoords) -> "TileDropout":
        words = RandomWords.of(call, call.seed(), coords.batch, coords.head)
        return cls(words, coords, cute.arch.rcp_approx(call.kept))

    def of_pairs(self, n_block) -> Iterator[Uint32]:
        """Yield a key block's words in the order of an accumulator's pairs."""
        squares = self.coords.width // SQUARE
        keys, queries = n_block * squares, self.coords.row // SQUARE
        slot = slot_of(keys, queries)
        queries = Uint32(cute.arch.make_warp_uniform(queries))
        places = [(Uint32(keys + i) * COUNTERS + slot, queries) for i in range(0, squares, 2)]
        for square in self.words.draw(places, slot, squares, COUNTERS_IN_FLIGHT):
            yield from square

    def draw(self, acc_P: cute.Tensor, dtype, n_block) -> list[list[Uint32]]:
        """Round P of a block of keys, and draw what is kept.
        Returns pairs of words: two of P in 16 bits with nothing dropped yet, and their masks."""
        source, drawn = cute.flatten(acc_P), []
        packed = PACKED_TYPES[dtype.__name__]
        for i, word in enumerate(self.of_pairs(n_block)):
            # In one, which keeps ptxas from rounding P when the masks are used.
            pair = cute.arch.inline_ptx(
                f"{{.reg .b32 p; cvt.rn.{packed}.f32 p, {{$r3}}, {{$r2}}; "
                "set.geu.u32.bf16x2 {$w1}, {$r0}, {$r1}; mov.b32 {$w0}, p;}",
                write_only_types=[Uint32, Uint32],
                read_only_args=[word, self.words.threshold, source[2 * i], source[2 * i + 1]],
            )
            drawn.append(pair)
        return drawn


@dataclass(frozen=True)
class TransposedDropout:
    """Dropout in a tile of the backward kernel, for one query head."""

    call: DropoutArguments  # of the launch
    seed: tuple[Uint32, Uint32]  # its two words
    coords: TransposedCoords  # name batch and head

    def of_pairs(
        self, words: RandomWords, m_block, count: int, in_flight: int
    ) -> Iterator[tuple[int, Uint32]]:
        """Yield the words of a query block, each with an accumulator's pair.
        The accumulator is (keys, queries).

        The word has the pair's numbers when `movmatrix` has transposed it. `count` are the pairs.
        """
        squares = count // WORDS
        keys, queries = self.coords.row // SQUARE, self.coords.first_column(m_block) // SQUARE
        slot = slot_of(keys, queries)
        keys, queries = (Uint32(cute.arch.make_warp_uniform(x)) for x in (keys, queries))
        key_word = keys * COUNTERS + slot % COUNTERS
        places = [(key_word, queries + slot // COUNTERS + i) for i in range(0, squares, 2)]
        drawn = words.draw(places, slot, squares, in_flight)
        for i, square in enumerate(drawn):
            for j, word in enumerate(square):
                query_half, key_half = j % 2, j // 2
                yield WORDS * i + 2 * query_half + key_half, word

    def masks(self, m_block, count: int, parts: int) -> list[Uint32]:
        """Draw masks of what is kept, for the words of P^T.

        All counters are encrypted at once, but in turn where the block has two parts, which leave
        fewer registers free.
        """
        coords, masks = self.coords, [None] * count
        words = RandomWords.of(self.call, self.seed, coords.batch, coords.head)
        in_flight = max(1, count // WORDS // 2 // parts)
        for pair, word in self.of_pairs(words, m_block, count, in_flight):
            masks[pair] = cute.arch.inline_ptx(
                "{.reg .b32 word; movmatrix.sync.aligned.m8n8.trans.b16 word, {$r0}; "
                "set.geu.u32.bf16x2 {$w0}, word, {$r1};}",
                write_only_types=[Uint32],
                read_only_args=[word, words.threshold],
            )
        return masks


def split_probabilities(rP: cute.Tensor, kept: cute.Tensor, masks: list[Uint32]) -> None:
    """Write what is kept of P; turn the sign of the rest."""
    p, kept = words_of(rP), words_of(kept)
    for i, mask in enumerate(masks):
        # The second is p | ~mask & 0x80008000. Both are read before either is written, since the
        # compiler may give what is written a register that is read.
        kept[i], p[i] = cute.arch.inline_ptx(
            "{.reg .b32 kept; and.b32 kept, {$r0}, {$r1}; "
            "lop3.b32 {$w1}, {$r0}, {$r1}, 0x80008000, 0xf2; mov.b32 {$w0}, kept;}",
            write_only_types=[Uint32, Uint32],
            read_only_args=[p[i], mask],
        )
