"""Key blocks and ranges against a mask that is written out; templates of masks and scores."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import windows
from reference import visible
from score_problems import Span, kernel_of

import fa3
from fa3.problem import Window
from fa3.scores.masks import Band, Blocks, Intersection, Rows, Sequence
from fa3.scores.scores import Alibi, Softcap
from fa3.scores.templates import Template


@st.composite
def tiles(draw):
    """Draw (row_begin, num_rows, tile_n, sequence) with at least one row inside."""
    sequence = Sequence(
        draw(st.integers(1, 150)), draw(st.integers(0, 150)), draw(windows(largest=160))
    )
    row_begin = draw(st.integers(0, sequence.seqlen_q - 1))
    return row_begin, draw(st.integers(1, 64)), draw(st.sampled_from([16, 32, 48])), sequence


def key_blocks(row_begin: int, num_rows: int, tile_n: int, sequence: Sequence) -> Blocks:
    return Band.of(sequence.window).key_blocks(row_begin, num_rows, tile_n, sequence)


def seen_by(row_begin: int, num_rows: int, sequence: Sequence):
    return visible(*sequence)[row_begin : row_begin + num_rows]


@given(tiles(), st.integers(0, 12), st.integers(1, 12))
def test_blocks_between_bounds_are_what_is_left_of_each_kind(tile, first, count):
    blocks, bounds = key_blocks(*tile), range(first, first + count)
    between = blocks.between(bounds.start, bounds.stop)
    assert bounds.start <= between.begin < between.end <= bounds.stop
    assert between.begin <= between.full_begin <= between.full_end <= between.end
    touched = set(range(blocks.begin, blocks.end)) & set(bounds)
    full = set(range(blocks.full_begin, blocks.full_end)) & set(bounds)
    assert set(range(between.full_begin, between.full_end)) == full
    found = set(range(between.begin, between.end))
    assert found == touched or (not touched and len(found) == 1)


@given(tiles())
def test_query_blocks_are_those_of_the_transposed_mask(tile):
    """What a tile of keys has to look at: all queries that see one, none in vain."""
    _, num_keys, tile_m, sequence = tile
    if not sequence.seqlen_k:
        return
    key_begin = tile[0] % sequence.seqlen_k
    mask = Band.of(sequence.window)
    begin, full_begin, full_end, end = mask.query_blocks(key_begin, num_keys, tile_m, sequence)
    assert 0 <= begin <= full_begin <= full_end <= end and begin < end
    seen = visible(*sequence)[:, key_begin : key_begin + num_keys]
    assert not seen[: begin * tile_m].any() and not seen[end * tile_m :].any()
    assert seen[full_begin * tile_m : full_end * tile_m].all()
    for m_block in range(begin, end):
        block = seen[m_block * tile_m : (m_block + 1) * tile_m]
        assert block.any() or end - begin == 1
        if not full_begin <= m_block < full_end:
            assert len(block) < tile_m or not block.all()
    ours = Intersection(mask, Template.of(Table(torch.zeros(1, 1))))
    assert ours.query_blocks(key_begin, num_keys, tile_m, sequence) == (begin, begin, begin, end)


@given(tiles())
def test_no_block_is_touched_or_masked_in_vain(tile):
    row_begin, num_rows, tile_n, sequence = tile
    blocks = key_blocks(*tile)
    seen = seen_by(row_begin, num_rows, sequence)
    for n_block in range(blocks.begin, blocks.end):
        block = seen[:, n_block * tile_n : (n_block + 1) * tile_n]
        assert block.any() or blocks.end - blocks.begin == 1
        if not blocks.full_begin <= n_block < blocks.full_end:
            assert block.shape[1] < tile_n or not block.all()


# --------------------------------------------------------------------------- a mask of the user's


@dataclass(frozen=True)
class Table(fa3.Mask):
    """Any mask: which keys each query sees, with ranges that hold as little as they may.

    Fields:
        seen: (seqlen_q, seqlen_k), bool.
        slack: keys by which the ranges are too careful.
    """

    seen: torch.Tensor
    slack: int = 0

    def reference(self, at):
        return self.seen[at.query, at.key]

    def key_range(self, rows: Rows):
        keys = self.seen[rows.first : rows.last + 1].any(dim=0).nonzero().flatten().tolist()
        return (keys[0] - self.slack, keys[-1] + 1 + self.slack) if keys else (0, 0)

    def open_range(self, rows: Rows):
        """The longest run of keys that all rows see."""
        begin, end = 0, 0
        run = 0
        for key, is_open in enumerate(self.seen[rows.first : rows.last + 1].all(dim=0).tolist()):
            run = run + 1 if is_open else 0
            if run > end - begin:
                begin, end = key + 1 - run, key + 1
        return begin + self.slack, end - self.slack


@st.composite
def tables(draw):
    """Draw a tile and a mask of a few rectangles for it."""
    tile = draw(tiles())
    sequence = tile[-1]
    seen = torch.zeros(sequence.seqlen_q, sequence.seqlen_k, dtype=torch.bool)
    for is_seen in draw(st.lists(st.booleans(), max_size=4)):
        rows, keys = (
            slice(*sorted((draw(st.integers(0, size)), draw(st.integers(0, size)))))
            for size in seen.shape
        )
        seen[rows, keys] = is_seen
    return tile, Table(seen, draw(st.sampled_from([0, 0, 7, 100])))


@settings(max_examples=200)
@given(tiles() | tables())
def test_blocks_are_those_that_a_tile_sees(drawn):
    """Without a mask of the user's, and with one: all visible keys, and all of the full blocks."""
    tile, table = drawn if len(drawn) == 2 else (drawn, None)
    row_begin, num_rows, tile_n, sequence = tile
    blocks, seen = key_blocks(*tile), seen_by(row_begin, num_rows, sequence)
    if table is not None:
        blocks = Intersection(Band.of(sequence.window), table).at(0, 0).key_blocks(*tile)
        seen = seen & table.seen[row_begin : row_begin + num_rows]
    assert 0 <= blocks.begin <= blocks.full_begin <= blocks.full_end <= blocks.end
    assert blocks.begin < blocks.end
    assert not seen[:, : blocks.begin * tile_n].any()
    assert not seen[:, blocks.end * tile_n :].any()
    full = slice(blocks.full_begin * tile_n, blocks.full_end * tile_n)
    assert full.stop <= sequence.seqlen_k or full.start == full.stop
    assert seen[:, full].all()


def test_until_it_is_bound_an_intersection_has_the_band_s_blocks_all_masked():
    tile = (256, 128, 32, Sequence(512, 512, Window(right=0)))
    mask = Intersection(Band(right=True), Template.of(Table(torch.zeros(512, 512))))
    assert mask.key_blocks(*tile) == Blocks(0, 0, 0, 12)


# ----------------------------------------------- what objects must have in common to share a kernel


@dataclass(frozen=True)
class Scaled(fa3.Score):
    factor: Any


@dataclass(frozen=True)
class Biased(fa3.Score):
    """Two tensors with a plain field between them."""

    left: torch.Tensor
    reach: int
    right: torch.Tensor


def biased(left=(4,), reach=3, right=(2, 5), dtype=torch.float32) -> Biased:
    return Biased(torch.randn(left).to(dtype), reach, torch.randn(right))


# ---------------------------------------------------------------------------------- sameness


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Softcap(30.0), Softcap(30.0)),
        (Alibi(torch.zeros(4), True), Alibi(torch.ones(9), True)),
        (Scaled((1, "a")), Scaled((1, "a"))),
        (biased(), biased(left=(7,), right=(1, 1))),
        (biased(), Biased(torch.zeros(8)[::2], 3, torch.zeros(2, 5).T)),
    ],
)
def test_equal_objects_share_a_template(first, second):
    assert Template.of(first) == Template.of(second)
    assert hash(Template.of(first)) == hash(Template.of(second))
    assert kernel_of(first) == kernel_of(second)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Softcap(30.0), Softcap(50.0)),
        (Softcap(30.0), Scaled(30.0)),
        (Alibi(torch.zeros(4), True), Alibi(torch.zeros(4), False)),
        (Alibi(torch.zeros(4), True), Alibi(torch.zeros(2, 4), True)),
        (biased(), biased(dtype=torch.float64)),
        (biased(), biased(reach=4)),
        (biased(left=(4, 1)), biased()),
        (Scaled(1), Scaled(None)),
    ],
)
def test_what_shapes_the_code_tells_templates_apart(first, second):
    assert Template.of(first) != Template.of(second)
    assert repr(kernel_of(first)) != repr(kernel_of(second))


class Pair(NamedTuple):
    n: float


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (1, 1.0), (1, True), (0, False), ((1, 2), (1, 2.0)), (Pair(2), Pair(2.0)),
        (frozenset([2]), frozenset([2.0])), (0.0, -0.0), ((1, (2,)), (1, (2.0,))),
    ],
)  # fmt: skip
def test_constants_that_only_compare_equal_are_told_apart(first, second):
    """A kernel computes with integers where the constant is one: 7 // 2 is not 7 // 2.0."""
    assert first == second
    assert Template.of(Scaled(first)) != Template.of(Scaled(second))
    assert Template.of(Scaled(first)) == Template.of(Scaled(first))


def test_kernels_with_functions_of_the_user_s_are_not_kept_on_disk():
    """A method may use names of its module, of which the key says nothing."""
    assert kernel_of(Softcap(30.0)).is_storable
    assert kernel_of(Alibi(torch.zeros(4), True)).is_storable
    assert not kernel_of(biased()).is_storable
    assert not kernel_of(Span(*torch.zeros(2, 4).int())).is_storable


# ---------------------------------------------------------------------------- taking and giving
