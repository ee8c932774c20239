"""Every key block exactly once, in pieces of equal size, with parts where the merge looks."""

import itertools
from collections import Counter, defaultdict
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa3.primitives.divisor import PlainDivisor
from fa3.schedules.stream_k import (
    ONE_IDLE_IN,
    Chunks,
    CtaGroups,
    FixedSplit,
    HostLengths,
    NoSplit,
    StreamK,
    crew_width,
    locate_among_equals,
    records,
    segments,
    walks,
)


@st.composite
def calls(draw, cuts=("stream", "crews", "splits", "fixed", "whole")):
    """Draw (cut, blocks of each sequence, row blocks, heads, CTAs)."""
    num_blocks = st.integers(1, draw(st.sampled_from((1, 9, 150))))
    lengths = draw(st.lists(num_blocks, min_size=1, max_size=draw(st.sampled_from((1, 5, 80)))))
    if draw(st.booleans()):
        lengths = lengths[:1] * len(lengths)
    blocks = [(draw(st.integers(0, 3)), 0) for _ in lengths]
    blocks = [(begin, begin + length) for (begin, _), length in zip(blocks, lengths, strict=True)]
    num_m_blocks, num_heads = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    num_ctas = draw(st.sampled_from((1, 2, 7, 132)))
    kind = draw(st.sampled_from(cuts))
    num_tiles = len(lengths) * num_m_blocks * num_heads
    if kind == "stream":
        cut = StreamK(num_ctas, num_tiles)
    elif kind == "crews":
        widths = [n for n in range(1, num_heads + 1) if num_heads % n == 0 and n <= num_ctas]
        cut = CtaGroups(num_ctas, draw(st.sampled_from(widths)))
    elif kind == "whole":
        cut = NoSplit()
    elif kind == "splits":
        num_splits = draw(st.integers(2, 12))
        cut = FixedSplit(num_splits, 1, num_splits, num_tiles)
    else:
        segment = draw(st.integers(1, 12))
        longest = max(lengths)
        cut = FixedSplit(longest, segment, -(-longest // segment), num_tiles)
    return cut, blocks, num_m_blocks, num_heads, num_ctas


def tiles_of(call) -> set[tuple[int, int, int]]:
    _, blocks, num_m_blocks, num_heads, _ = call
    return {
        (m_block, head, batch)
        for batch in range(len(blocks))
        for head in range(num_heads)
        for m_block in range(num_m_blocks)
    }


@given(calls())
def test_every_block_is_worked_on_once(call):
    visits = Counter(
        (*segment.tile, block)
        for _, segment in segments(*call)
        for block in range(segment.begin, segment.end)
    )
    blocks = call[1]
    assert visits == Counter(
        (*tile, block) for tile in tiles_of(call) for block in range(*blocks[tile[2]])
    )


@given(calls(cuts=("stream",)))
def test_stream_k_gives_all_ctas_as_much(call):
    num_ctas, work = call[-1], Counter()
    for cta, segment in segments(*call):
        work[cta] += segment.end - segment.begin
    shares = [work[cta] for cta in range(num_ctas)]
    assert max(shares) - min(shares) <= 1
    assert all(segment.end > segment.begin for _, segment in segments(*call))


@given(calls(cuts=("crews",)))
def test_crews_have_as_much_or_whole_tiles(call):
    cut, blocks, num_m_blocks, num_heads, num_ctas = call
    work = Counter()
    for cta, segment in segments(*call):
        work[cta] += segment.end - segment.begin
    crews = num_ctas // cut.width
    shares = [work[cta] for cta in range(crews * cut.width)]
    assert all(len(set(of_crew)) == 1 for of_crew in zip(*[iter(shares)] * cut.width, strict=True))
    total = num_m_blocks * num_heads // cut.width * sum(end - begin for begin, end in blocks)
    fewest = -(-total // crews)
    if max(shares) > fewest:
        assert all(segment.is_whole for _, segment in segments(*call))
        assert (max(shares) - fewest) * ONE_IDLE_IN <= max(shares)
    else:
        assert max(shares) - min(shares) <= 1 or min(shares[: -cut.width]) == fewest


def test_a_crew_reads_neighbouring_heads_at_once():
    """Its CTAs are at the same block of heads side by side."""
    at = defaultdict(list)
    for cta, segment in segments(CtaGroups(12, 4), [(0, 9), (0, 30)], 2, 8, 12):
        at[cta // 4].append((cta % 4, segment))
    for of_crew in at.values():
        lanes = [[s for lane, s in of_crew if lane == n] for n in range(4)]
        for together in zip(*lanes, strict=True):
            m_blocks, heads, batches = zip(*(s.tile for s in together), strict=True)
            assert len({*m_blocks}) == len({*batches}) == len({s[1:3] for s in together}) == 1
            assert heads == tuple(range(heads[0], heads[0] + 4)) and heads[0] % 4 == 0


@pytest.mark.parametrize(
    ("heads", "tiles", "ctas", "width"),
    [
        (8, 16 * 8, 132, 8),
        (4, 5 * 4, 132, 4),
        (10, 100, 132, 10),
        (6, 12, 132, 6),
        (1, 128, 132, 1),
        (200, 200, 132, 25),
        (8, 33 * 8, 132, 1),
        (8, 8, 1, 1),
        (7, 7, 9, 1),
    ],
)
def test_widths_of_crews(heads, tiles, ctas, width):
    assert crew_width(heads, tiles, ctas) == width


def test_tiles_as_many_as_ctas_stay_whole():
    for lengths, heads, num_ctas in (([(0, 128)] * 33, 8, 132), ([(0, 32)] * 128, 1, 132)):
        cut = CtaGroups(num_ctas, crew_width(heads, len(lengths) * heads, num_ctas))
        assert all(segment.is_whole for _, segment in segments(cut, lengths, 1, heads, num_ctas))


@given(calls())
def test_parts_are_where_the_record_says_in_the_order_of_keys(call):
    cut, parts = call[0], defaultdict(list)
    for _, segment in segments(*call):
        parts[segment.tile].append(segment)
    merged = {tile: slots for _, tile, slots in records(*call)}
    assert set(parts) == tiles_of(call)
    for tile, of_tile in parts.items():
        of_tile.sort(key=lambda segment: segment.begin)
        if len(of_tile) == 1:
            assert of_tile[0].is_whole and tile not in merged
        else:
            assert [segment.part.slot for segment in of_tile] == list(merged[tile])
    used = [segment.part.slot for _, segment in segments(*call) if not segment.is_whole]
    assert len(used) == len(set(used))
    assert all(0 <= slot < cut.num_slots for slot in used)
    if isinstance(cut, CtaGroups):
        return
    numbers = [record for record, _, _ in records(*call)]
    assert len(numbers) == len(set(numbers))
    assert all(0 <= number < cut.num_records for number in numbers)


@given(calls(cuts=("fixed",)), st.integers(1, 200))
def test_units_do_not_depend_on_the_neighbours(call, num_ctas):
    cut, blocks, num_m_blocks, num_heads, _ = call
    alone = FixedSplit(cut.num_splits, cut.unit_blocks, cut.max_parts, num_m_blocks * num_heads)

    def cuts_of_last(cut, blocks, num_ctas):
        batch = len(blocks) - 1
        return sorted(
            (segment.tile[:2], segment.begin, segment.end)
            for _, segment in segments(cut, blocks, num_m_blocks, num_heads, num_ctas)
            if segment.tile.batch == batch
        )

    together = cuts_of_last(cut, blocks, call[-1])
    assert together == cuts_of_last(alone, blocks[-1:], num_ctas)


@given(calls(cuts=("splits",)))
def test_a_fixed_split_has_no_more_parts_than_asked(call):
    parts = Counter(segment.tile for _, segment in segments(*call))
    assert max(parts.values()) <= call[0].num_splits


@given(calls(cuts=("stream", "crews", "whole")))
def test_a_walk_is_in_the_order_of_the_line(call):
    cut, blocks, *rest = call
    for walk in walks(cut, HostLengths(blocks), *rest):
        cursor, seen = walk.first(), []
        while walk.is_valid(cursor):
            seen.append(cursor.position)
            cursor = walk.next(cursor)
        assert seen == sorted(set(seen))


@given(calls(), st.data())
def test_a_walk_begins_in_a_sequence_even_if_lengths_change(call, data):
    """They may, where they are read before the kernel that appends has ended."""
    cut, blocks, *rest = call
    changed = [(0, data.draw(st.integers(1, 150))) for _ in blocks]
    for walk in walks(cut, HostLengths(blocks), *rest):
        cursor = replace(walk, lengths=HostLengths(changed)).first()
        assert cursor.length in changed
        assert 0 <= cursor.tile < walk.tiles(cursor.length) and cursor.batch <= len(blocks)


@given(st.integers(0, 3000), st.integers(1, 200))
def test_pieces_are_contiguous_and_equal(total, num_ctas):
    pieces = Chunks.even(total, PlainDivisor(num_ctas))
    begins = [pieces.begin(cta) for cta in range(num_ctas + 1)]
    assert begins[0] == 0 and begins[-1] == total
    sizes = [end - begin for begin, end in itertools.pairwise(begins)]
    assert max(sizes) - min(sizes) <= 1
    for cta, size in enumerate(sizes):
        for position in range(begins[cta], begins[cta] + size):
            assert pieces.crew_of(position) == cta


@given(
    st.integers(1, 90), st.integers(1, 40), st.integers(1, 3), st.integers(1, 4),
    st.sampled_from((1, 2, 7, 132)),
)  # fmt: skip
def test_among_equal_sequences_a_division_finds_the_place(
    num_sequences, num_blocks, num_m_blocks, num_heads, num_ctas
):
    lengths = HostLengths([(2, 2 + num_blocks)] * num_sequences)
    sizes = PlainDivisor(num_m_blocks), num_heads, PlainDivisor(num_ctas)
    for cut in (NoSplit(), CtaGroups(num_ctas, 1)):
        for walk in walks(cut, lengths, num_m_blocks, num_heads, num_ctas):
            place = locate_among_equals(type(cut), lengths, *sizes, walk.crew.number, int)
            assert place == walk.place
