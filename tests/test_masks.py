"""Key blocks and key ranges against a mask that is written out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from problems import windows
from reference import visible

from fa3.masks import Band, KeyBlocks, Sequence
from fa3.problem import NO_BOUND, Window


@st.composite
def tiles(draw):
    """Draw (row_begin, num_rows, tile_n, sequence) with at least one row inside."""
    sequence = Sequence(
        draw(st.integers(1, 150)), draw(st.integers(0, 150)), draw(windows(largest=160))
    )
    row_begin = draw(st.integers(0, sequence.seqlen_q - 1))
    return row_begin, draw(st.integers(1, 64)), draw(st.sampled_from([16, 32, 48])), sequence


def key_blocks(row_begin: int, num_rows: int, tile_n: int, sequence: Sequence) -> KeyBlocks:
    return Band.of(sequence.window).key_blocks(row_begin, num_rows, tile_n, sequence)


def seen_by(row_begin: int, num_rows: int, sequence: Sequence):
    return visible(*sequence)[row_begin : row_begin + num_rows]


@given(tiles())
def test_ranges_are_nested_and_a_tile_always_has_a_block(tile):
    blocks = key_blocks(*tile)
    assert 0 <= blocks.begin <= blocks.full_begin <= blocks.full_end <= blocks.end
    assert blocks.begin < blocks.end


@given(tiles())
def test_every_visible_key_is_in_a_touched_block(tile):
    row_begin, num_rows, tile_n, sequence = tile
    blocks = key_blocks(*tile)
    seen = seen_by(row_begin, num_rows, sequence)
    assert not seen[:, : blocks.begin * tile_n].any()
    assert not seen[:, blocks.end * tile_n :].any()


@given(tiles())
def test_full_blocks_are_visible_throughout(tile):
    row_begin, num_rows, tile_n, sequence = tile
    blocks = key_blocks(*tile)
    full = slice(blocks.full_begin * tile_n, blocks.full_end * tile_n)
    assert full.stop <= sequence.seqlen_k or full.start == full.stop
    assert seen_by(row_begin, num_rows, sequence)[:, full].all()


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


@given(tiles())
def test_key_range_is_the_visible_row(tile):
    _, _, _, sequence = tile
    mask = Band.of(sequence.window)
    for row, seen in enumerate(visible(*sequence).tolist()):
        begin, end = mask.key_range(row, sequence)
        assert [begin <= key < end for key in range(sequence.seqlen_k)] == seen


@pytest.mark.parametrize(
    ("window", "row_begin", "expected"),
    [
        (Window(), 0, KeyBlocks(0, 0, 4, 4)),
        (Window(right=0), 0, KeyBlocks(0, 0, 0, 1)),
        (Window(right=0), 384, KeyBlocks(0, 0, 3, 4)),
        (Window(left=128, right=0), 384, KeyBlocks(2, 3, 3, 4)),
        (Window(left=255, right=0), 384, KeyBlocks(1, 2, 3, 4)),
        (Window(left=0), 384, KeyBlocks(3, 4, 4, 4)),
    ],
)
def test_blocks_of_well_known_masks(window, row_begin, expected):
    assert key_blocks(row_begin, 128, 128, Sequence(512, 512, window)) == expected


def test_more_queries_than_keys_hide_the_first_rows():
    sequence = Sequence(300, 100, Window(right=0))
    assert key_blocks(0, 128, 64, sequence) == KeyBlocks(0, 0, 0, 1)
    begin, end = Band.of(sequence.window).key_range(199, sequence)
    assert end <= begin


def test_only_the_presence_of_bounds_is_compile_time():
    assert Band.of(Window(5, 7)) == Band.of(Window(0, 0)) == Band(left=True, right=True)
    assert Band.of(Window(NO_BOUND, 0)) == Band(left=False, right=True)
