"""What calls hand to the entry of a backward pass: where it looks for it, and in one buffer."""

import itertools
from collections import Counter, defaultdict
from dataclasses import replace
from types import FunctionType, SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from problems import CAUSAL, make_problem

from fa3.kernels.backward_launch import ACCUMULATED, BackwardConfig, place_of_group_flag
from fa3.planning.backward import (
    KEYS_OF_QUERY,
    TILES_PREPROCESSED,
    BackwardPlan,
    backward_pass,
    key_tiles_of,
    numbers_of_key_parts,
    words_of_counters,
)
from fa3.planning.backward_packed import (
    head_groups_of_packed,
    heads_in_l2,
    launch_of_packed,
    shares_of_packed,
)
from fa3.planning.costs import H200
from fa3.planning.key_split import MOST_PARTS_OF_SM, KeyShares, cuts_of_line, most_parts_of_line
from fa3.planning.routes import PackedSizes
from fa3.primitives import key_line
from fa3.primitives.arithmetic import LARGEST, PlainDivisor
from fa3.primitives.gradient_parts import (
    HEAD,
    RISE,
    KeySplit,
    KeyWork,
    blocks_of_head,
    family_of,
    find_part,
    parts_of_last,
    parts_of_tile,
)
from fa3.primitives.key_line import FRACTION, TILES_OF_LINE, KeyLine, rank_at
from fa3.primitives.query_tiles import QueryWalk, number_of_packed_tiles
from fa3.problem import Window
from fa3.schedules.order import KernelOrder, TileOrder
from fa3.schedules.query_index import QueryHeadGroups
from fa3.schedules.ragged import RaggedKeyOrder
from fa3.schedules.sequences import LONGEST
from fa3.scores.masks import Blocks, Sequence

FULL = Window()
ORDERED = "shares", "num_head_groups", "heads_per_group", "alternates"
"""What is said of a plan in a fixed order."""


def ordered(*values) -> dict:
    return {"is_ordered": True} | dict(zip(ORDERED, values, strict=True))


def lines(most_parts: int, length: int, count: int) -> KeyShares:
    return KeyShares(1, most_parts, RISE * most_parts, length, count)


FEW = "num_head_groups", "groups_preprocessed", "dq_is_zeroed"

PLANS = {
    # How many heads are in L2 at once.
    "half as many tiles as run": ((16, 1024, 16, 1), FULL, {"heads_per_group": 8}),
    "short, causal": ((16, 1024, 16, 1), CAUSAL, {"heads_per_group": 8}),
    "long, causal": ((16, 4096, 16, 1), CAUSAL, {"heads_per_group": 4}),
    "the last group is no small part": ((1, 4096, 16, 1), CAUSAL, {"heads_per_group": 8}),
    "tiles of few heads are enough": ((16, 16384, 16, 1), CAUSAL, {"heads_per_group": 2}),
    "one head has more": ((16, 65536, 16, 1), FULL, {"heads_per_group": 1}),
    "heads are taken one after another": ((2, 4096, 8, 4), CAUSAL, {"heads_per_group": 8}),
    "one more": ((1, 4096, 9, 1), CAUSAL, {"heads_per_group": 9}),
    "two equal ones": ((1, 4096, 20, 1), CAUSAL, {"heads_per_group": 10}),
    "few": ((1, 4096, 3, 1), CAUSAL, {"heads_per_group": 3, "shares": KeyShares(1, 2)}),
    "any order": ((4, 4096, 16, 1), FULL, {"heads_per_group": 2}),
    "a fixed order": ((4, 4096, 16, 1), FULL, {"heads_per_group": 4, "is_ordered": True}),
    "one group": ((1, 2048, 1, 1), FULL, {"num_head_groups": 1, "groups_preprocessed": 1}),
    "two short groups at once": ((1, 4096, 1, 8), CAUSAL, {"groups_preprocessed": 2}),
    "long groups one by one": ((1, 8192, 1, 8), CAUSAL, {"groups_preprocessed": 1}),
    # With few parts of key tiles: the number of head groups, and how many are preprocessed before.
    **{
        name: (sizes, window, dict(zip(FEW, values, strict=True)))
        for name, sizes, window, *values in (
            ("one wave", (1, 1024, 2, 8), CAUSAL, 1, 1, True),
            ("two waves", (1, 1024, 8, 8), CAUSAL, 2, 2, False),
            ("three waves", (1, 1500, 8, 8), CAUSAL, 2, 1, True),
            ("three waves in L2", (1, 1500, 4, 7), CAUSAL, 1, 1, True),
            ("an odd number of heads", (1, 4096, 1, 7), CAUSAL, 1, 1, True),
            ("four waves, any order", (4, 1024, 16, 1), FULL, 8, 8, True),
        )
    },
    # In a fixed order head groups alternate, and there may be two accumulators.
    "few heads": ((1, 4096, 1, 8), CAUSAL, ordered(lines(8, 64, 163), 1, 1, None)),
    "equal groups of more tiles": ((2, 3072, 2, 8), CAUSAL, ordered(lines(6, 72, 90), 2, 2, None)),
    "a smaller last group": ((1, 6000, 4, 7), CAUSAL, ordered(lines(6, 119, 180), 4, 1, None)),
    "seven heads": ((1, 1280, 1, 7), CAUSAL, ordered(lines(20, 7, 118), 1, 1, None)),
    "many heads": ((4, 4096, 16, 1), CAUSAL, ordered(KeyShares(), 16, 4, 1)),
    "two query heads of a CTA": ((2, 4096, 8, 8), CAUSAL, ordered(KeyShares(4), 16, 4, 1)),
    "two accumulators": ((1, 4096, 2, 4, 256), CAUSAL, ordered(lines(5, 63, 194), 2, 1, None)),
    "blocks as long as key tiles": ((4, 1024, 8, 1, 256), CAUSAL, ordered(KeyShares(), 2, 16, 1)),
    "many of them": ((4, 4096, 32, 1, 64), CAUSAL, ordered(KeyShares(), 16, 8, 0)),
    **{
        name: (sizes, CAUSAL, {"is_ordered": True, "accumulators": count})
        for name, sizes, count in (
            ("parts of query blocks", (1, 1024, 1, 6), 2),
            ("parts of query heads", (1, 4096, 1, 8), 1),
            ("key tiles of one block", (1, 4096, 2, 4, 256), 2),
            ("short ones", (16, 1024, 8, 1, 256), 1),
        )
    },
    "no bound": ((1, 4096, 1, 8), FULL, {"is_ordered": True, "accumulators": 1}),
    "no bound, more heads": ((1, 2048, 5, 4), FULL, {"is_ordered": True, "accumulators": 2}),
    "longer than L2": ((1, 8192, 1, 8), FULL, {"is_ordered": True, "num_head_groups": 2}),
    # As in the fastest of the splits that were measured for these shapes.
    **{
        name: (sizes, CAUSAL, {"shares": KeyShares(*shares)})
        for name, sizes, shares in (
            ("a CTA for each query head", (1, 4096, 1, 8), (8, 1)),
            ("two query heads each", (1, 4096, 8, 4), (2, 1)),
            ("seven query heads", (1, 6000, 4, 7), (7, 1)),
            ("long key tiles have more parts", (1, 1024, 1, 6), (1, 24, 3072)),
            ("all parts run at the same time", (1, 2048, 1, 8), (1, 15, 910)),
            ("enough key tiles", (1, 4608, 24, 1), ()),
            ("many key tiles", (8, 4096, 16, 1), ()),
        )
    },
}  # fmt: skip
"""(batch, seqlen, key/value heads, query heads of each, head size unless 128); fields of a plan."""


@pytest.mark.parametrize("name", PLANS)
def test_plans(name):
    (batch, seqlen, heads_kv, group, *head_dim), window, expected = PLANS[name]
    head_dim = head_dim[0] if head_dim else 128
    problem = make_problem(batch, seqlen, seqlen, heads_kv, group, head_dim, window)
    plan = BackwardPlan.of(problem, is_ordered=expected.get("is_ordered", False))
    assert {field: getattr(plan, field) for field in expected} == expected
    assert plan.kernels.main.splits == (plan.shares.parts > 1)
    assert plan.is_ordered or (plan.alternates is None and plan.accumulators == 1)
    numbers = plan.num_query_tiles * plan.config.tile_m * head_dim
    assert plan.layout.table_at - plan.layout.dq_at == plan.accumulators * numbers


@given(begin=st.integers(0, 9), sizes=st.tuples(*[st.integers(0, 5)] * 3))
def test_a_walk_in_either_direction(begin, sizes):
    """Each block once, with and without a mask as before."""
    masked, full, more = sizes
    ends = begin + masked, begin + masked + full, begin + masked + full + more
    blocks = Blocks(begin, *ends)
    unmasked = set(range(ends[0], ends[1]))
    for is_down in (0, 1):
        walk = QueryWalk.of(blocks, is_down)
        places = range(walk.blocks.begin, walk.blocks.end)
        visited = list(map(walk.at, places))
        assert visited == sorted(range(begin, ends[2]), reverse=bool(is_down))
        inside = range(walk.blocks.full_begin, walk.blocks.full_end)
        assert set(map(walk.at, inside)) == unmasked


@pytest.mark.parametrize(
    ("heads_kv", "tiles", "fitting", "groups"),
    [
        pytest.param(16, 512, 7, 4, id="a quarter of the queries before"),
        pytest.param(16, 512, 1, 16, id="a head of it fits into L2"),
        pytest.param(16, 512, 0, 16, id="not even one"),
        pytest.param(6, 512, 12, 3, id="equal ones"),
        pytest.param(7, 512, 12, 1, id="no equal ones"),
        pytest.param(7, 512, 2, 7, id="no equal ones, long"),
        pytest.param(4, 128, 2, 2, id="few tiles, long"),
        pytest.param(8, 128, 12, 2, id="few tiles"),
        pytest.param(1, 512, 1, 1, id="one head"),
        pytest.param(4, 0, 12, 1, id="fewer than a tile"),
    ],
)
def test_head_groups_of_packed_sequences(heads_kv, tiles, fitting, groups):
    assert head_groups_of_packed(heads_kv, tiles, fitting) == groups
    assert words_of_counters(groups) % 4 == 0
    assert words_of_counters(groups) > place_of_group_flag(groups - 1, ACCUMULATED)


def test_fewer_heads_of_packed_sequences_are_together_in_order():
    sizes, cases = PackedSizes(4, 32, 8192, 8192, 2048, 2048), ((128, 1, 24, 8), (128, 2, 24, 1))
    for head_dim, query_heads, *fitting in (*cases, (64, 1, 48, 48), (256, 2, 12, 0)):
        spec = make_problem(head_dim=head_dim, window=CAUSAL).spec
        kernels = (backward_pass(spec, one, is_packed=True) for one in (False, True))
        assert [heads_in_l2(one.main, sizes, query_heads) for one in kernels] == fitting


@pytest.mark.parametrize(
    ("lengths", "heads_kv", "window", "per_group"),
    [
        pytest.param((3, 6000), 16, CAUSAL, 2, id="one query head"),
        pytest.param((1, 6000), 16, CAUSAL, 8, id="one sequence"),
        pytest.param((4, 2048), 4, CAUSAL, 2, id="several query heads"),
        pytest.param((4, 2048), 4, FULL, None, id="without a mask"),
        pytest.param((8, 1024), 4, CAUSAL, None, id="short ones"),
    ],
)
def test_tiles_that_come_by_their_work_share_l2(lengths, heads_kv, window, per_group):
    """By those of several sequences; one alone has the same order anyway."""
    num_sequences, longest = lengths
    total = num_sequences * longest
    problem = make_problem(0, 0, 0, heads_kv, 16 // heads_kv, 128, window)
    kernels = backward_pass(problem.spec, is_packed=True)
    sizes = PackedSizes(num_sequences, 16, total, total, longest, longest)
    arguments = launch_of_packed(kernels, problem, sizes, KeyShares(), 132)[0].arguments
    assert arguments["is_by_work"] == (per_group is not None)
    assert arguments["heads_per_group"] == (per_group or heads_kv)


FIND_PART, PARTS_OF_LAST = (
    FunctionType(one.__wrapped__.__code__, {"parts_of_tile": parts_of_tile, "Int32": int})
    for one in (find_part, parts_of_last)
)
"""The code as it is written."""


@given(
    head_parts=st.sampled_from([1, 2, 3, 6]),
    shares=st.tuples(st.integers(1, 20), st.integers(1, 8000)),
    sizes=st.tuples(*[st.integers(1, 3)] * 3, st.integers(1, 6)),
    first=st.integers(1, 40),
)
def test_parts_cover_every_head_and_block_once(head_parts, shares, sizes, first):
    """In the order of CTAs, in head groups; no part is in two of them."""
    (block_parts, rise), (heads_kv, batch, per_group, tiles) = shares, sizes
    group, sets = 6, heads_kv * head_parts
    split = KeySplit(PlainDivisor(head_parts), block_parts, rise, group // head_parts)
    of_set = sum(map(KeyShares(head_parts, block_parts, rise).parts_of_set, range(tiles)))
    assert PARTS_OF_LAST(block_parts, rise, tiles) == of_set
    order, found, numbers = TileOrder(of_set, sets, batch, per_group), [], []
    for index in range(order.num_tiles):
        left, number, of_batch = order.tile(index)
        m_block, before, parts = FIND_PART(block_parts, rise, left)
        n_block = tiles - 1 - m_block
        work = split.work(n_block, number, of_batch, (left - before, parts), group)
        numbers.append((of_batch, work.head_kv, n_block, work.part, work.parts))
        begin, count = n_block, max(1, first - 7 * n_block)
        blocks = Blocks(begin, begin + count // 3, begin + count // 2, begin + count)
        for h in range(work.num_heads):
            walked = blocks_of_head(work, h, blocks, begin, count)
            assert walked.begin <= walked.full_begin <= walked.full_end <= walked.end
            for block in range(walked.begin, walked.end):
                is_full = walked.full_begin <= block < walked.full_end
                assert is_full == (blocks.full_begin <= block < blocks.full_end)
                found.append((of_batch, work.first_head + h, n_block, block))
                flat = of_batch * sets + (work.first_head + h) // (group // head_parts)
                assert order.group_of_tile(index) == flat // per_group
    assert sorted(found) == [
        (of_batch, head, n_block, block)
        for of_batch in range(batch)
        for head in range(heads_kv * group)
        for n_block in range(tiles)
        for block in range(n_block, n_block + max(1, first - 7 * n_block))
    ]
    assert len(set(numbers)) == len(numbers)
    assert all(part < parts <= head_parts * block_parts for *_, part, parts in numbers)


def ballot(values) -> int:
    """The lanes, as bits, that have True."""
    return sum(1 << int(lane) for lane in np.flatnonzero(np.broadcast_to(values, 32)))


LANE = np.arange(32)
"""Numbers that differ from lane to lane are arrays."""

FIND = KeyLine.find.__wrapped__.__code__  # as written: to compile it once changes it


@pytest.fixture
def warp(monkeypatch):
    """`KeyLine.find` for a warp on the CPU, and what else lines compute with."""
    popc = np.vectorize(lambda bits: int(bits).bit_count())
    arch = {"vote_ballot_sync": ballot, "popc": popc, "make_warp_uniform": int}
    arch = SimpleNamespace(lane_idx=lambda: LANE, warp_reduction_max=np.max, **arch)
    monkeypatch.setattr(key_line, "cute", SimpleNamespace(arch=arch))
    constexpr = SimpleNamespace(range_constexpr=range, const_expr=bool)
    monkeypatch.setattr(key_line, "cutlass", constexpr)
    monkeypatch.setattr(key_line, "Int32", int)
    monkeypatch.setattr(key_line, "either", np.where)
    return FunctionType(FIND, vars(key_line))


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.tuples(st.integers(1, TILES_OF_LINE), st.integers(1, 9), st.integers(1, 80)),
    blocks=st.tuples(st.integers(1, 40), st.integers(0, 2)),
    data=st.data(),
)
def test_parts_of_lines_wait_only_for_parts_that_come_before(sizes, blocks, data, warp):
    """And all of them together visit each unit of each key tile once."""
    (num_tiles, heads, length), (first, slope) = sizes, blocks
    units = [max(1, first - slope * n) * heads for n in range(num_tiles)]
    units_of = np.array(units + TILES_OF_LINE * [1 << 20]).__getitem__  # also past the last one
    line = KeyLine.of(PlainDivisor(length), num_tiles)
    counts = [int(line.parts(n, count)) for n, count in enumerate(units)]
    assert max(counts) <= most_parts_of_line(length, units[0])
    most_parts = data.draw(st.sampled_from((max(counts), None)))  # None: of packed sequences
    line, visitors = line._replace(most_parts=most_parts), defaultdict(list)
    for index in range(sum(counts)):
        n, row = warp(line, units_of, index)
        begin, end = (int(min(line.cut(n, one), units[n])) for one in (row, row + 1))
        assert begin < end
        for unit in range(begin, end):
            visitors[unit].append((n, begin))
    for unit in data.draw(st.sets(st.sampled_from(range(units[0])), max_size=9)):
        ranks = [rank_at(line.before(units_of, *part), unit) for part in visitors[unit]]
        assert ranks == list(range(len(ranks)))
    visited = sorted((n, unit) for unit, parts in visitors.items() for n, _ in parts)
    assert visited == [(n, unit) for n in range(num_tiles) for unit in range(units[n])]


@given(block_parts=st.integers(1, 8), count=st.integers(1, 40), data=st.data())
def test_parts_divide_key_tiles_at_the_same_blocks_in_a_fixed_order(block_parts, count, data):
    split = KeySplit(PlainDivisor(1), block_parts, RISE * block_parts, 1)
    works = [split.work(0, 0, 0, (part, block_parts), 1) for part in range(block_parts)]
    parts = {}
    for _ in range(3):
        begin = data.draw(st.integers(0, count - 1))
        end = data.draw(st.integers(begin + 1, count))
        blocks = Blocks(begin, begin, end, end)
        walks = [blocks_of_head(work, 0, blocks, 0, count) for work in works]
        assert [b for walk in walks for b in range(walk.begin, walk.end)] == [*range(begin, end)]
        for part, walk in enumerate(walks):
            for block in range(walk.begin, walk.end):
                assert parts.setdefault(block, part) == part


@pytest.mark.parametrize("window", [CAUSAL, FULL, Window(200, 30), Window(left=100)], ids=str)
def test_no_key_tile_has_more_parts_than_there_is_room_for(window):
    """Also where the first key tile has less work than others, or where there are many."""
    lengths = (777, 1500), (1500, 700), (1024, 1024), (300, 4000), (1, 200), (135_000, 135_000)
    # Where each number of blocks of a part was tried, choosing one took minutes.
    lengths += ((1 << 26, 12_800),)
    for (seqlen_q, seqlen_k), heads in itertools.product(lengths, ((1, 1), (1, 3), (2, 8))):
        plan = BackwardPlan.of(make_problem(1, seqlen_q, seqlen_k, *heads, 128, window))
        parts = [plan.shares.parts_of_set(after) for after in range(plan.key_tiles_of_head)]
        assert parts == sorted(parts) and min(parts) >= 1 and max(parts) <= plan.shares.block_parts
        assert len(set(parts)) == 1 or plan.num_parts <= plan.gpu.num_sms
        assert plan.num_parts == plan.heads * sum(parts)


def test_ends_of_parts_of_the_longest_sequences_fit_into_32_bits():
    count = LONGEST // 64
    begin, end, none, count_32 = map(np.int32, (5, HEAD, 0, count))
    work = KeyWork(none, none, none, none, 1, begin=begin, end=end)
    with np.errstate(over="raise"):
        walked = blocks_of_head(work, none, Blocks(none, none, *[count_32] * 2), none, count_32)
    assert (walked.begin, walked.end) == (count * 5 // HEAD, count)
    # On few SMs parts are longer than a line, or more than there is room for.
    for lengths, group, sms in (((1 << 26, 4096), 1, 16), ((2048, 8192), 64, 8)):
        problem = make_problem(1, *lengths, 1, group, 128)
        plan = BackwardPlan.of(problem, replace(H200, num_sms=sms), is_ordered=True)
        assert (plan.shares.line_length or 0) * FRACTION <= LARGEST
        assert plan.num_parts <= MOST_PARTS_OF_SM * sms


@given(parts=st.integers(1, 20), order=st.randoms(use_true_random=False))
def test_the_last_part_adds_up_all(parts, order):
    """The tree of `GradientParts`, for parts that come in any order."""
    slots, counters, finished = {}, {}, []
    arrivals = list(range(parts))
    order.shuffle(arrivals)
    for part in arrivals:
        total, first, span, is_last = {part}, part, 1, True
        while is_last and span < parts:
            left, right, sibling = family_of(first, span)
            if right < parts:
                is_last = counters.get(right, 0) > 0
                if is_last:
                    total |= slots.pop(sibling)
                else:
                    slots[first] = total
                    counters[right] = 1
            first, span = left, 2 * span
        if is_last:
            finished.append(total)
    assert finished == [set(range(parts))]


@pytest.mark.parametrize(
    ("total", "num_sequences", "heads", "splits"),
    [
        (32768, 4, (8, 1), True),
        (32768, 32768, (8, 1), False),
        (8192, 8192, (32, 8), False),
        (16384, 1000, (64, 8), False),
        (2000, 3, (16, 2), True),
        # Memory just has room for four parts.
        (8192, 4, (64, 8), True),
        *((total, 4, heads, True) for total in (4096, 8192) for heads in ((8, 1), (16, 4))),
    ],
)
def test_memory_of_packed_parts_is_bounded(total, num_sequences, heads, splits):
    """Whatever the lengths are: memory has room for as many key tiles as there can be."""
    problem = make_problem(0, 0, 0, heads[1], heads[0] // heads[1], 128, CAUSAL)
    longest = total // min(num_sequences, 4)
    sizes, spec = PackedSizes(num_sequences, heads[0], total, total, longest, longest), problem.spec
    shares = shares_of_packed(problem, sizes, splits, 132)
    assert (shares.parts > 1) == splits
    num_parts = number_of_packed_tiles(total, num_sequences, 128) * heads[1] * shares.parts
    assert not splits or numbers_of_key_parts(num_parts, spec, BackwardConfig(64, 128)) * 4 < 3e8
    # No key tile of a line has more parts, if one sequence has all rows, either.
    for length in (longest, total) if shares.line_length else ():
        tiles = key_tiles_of(spec, BackwardConfig(64, 128), Sequence(length, length, CAUSAL), False)
        units = [tile.blocks * heads[0] // heads[1] // shares.head_parts for tile in tiles]
        cuts = (cuts_of_line(shares.line_length, len(units), n, one) for n, one in enumerate(units))
        assert 1 < max(map(len, cuts)) <= shares.block_parts


LOCATE = FunctionType(RaggedKeyOrder.locate.__wrapped__.__code__, {"larger": max})
"""With the code as it is written, taken before the DSL puts its own in its place."""


@pytest.mark.parametrize("keys", [1, 3, 8])
@pytest.mark.parametrize("most_heads", [1, 2, 4, 35])
def test_queries_are_in_the_head_group_of_their_keys(most_heads, keys):
    """Of so many key tiles of a head, and heads of a head group. A query tile is in one group."""
    for heads, batch, queries in itertools.product((1, 2, 7), (1, 5), (1, 2, 6)):
        per_group = min(most_heads, heads * batch)
        order = TileOrder(keys, heads, batch, per_group)
        total = heads * batch * queries
        groups = QueryHeadGroups(total, PlainDivisor(per_group * queries))
        for index in range(order.num_tiles):
            tile, group = order.tile(index), order.group_of_tile(index)
            head = tile.batch * heads + tile.head
            own = range(head * queries, (head + 1) * queries)
            assert {groups.group_of(number) for number in own} == {group}
        count = -(-heads * batch // per_group)
        in_kernel = KernelOrder(
            keys, heads, batch, per_group, PlainDivisor(per_group * keys), *[None] * 3
        )
        found = Counter(map(order.group_of_tile, range(order.num_tiles)))
        assert found == {i: in_kernel.tiles_in(i) for i in range(count)}
        assert sum(map(groups.tiles_in, range(count))) == total
        begins = [groups.tiles_before(group) for group in range(count + 1)]
        assert begins[0] == 0 and begins[-1] == total == groups.tiles_before(count + 3)
        assert all(
            b - a == groups.tiles_in(i) for i, (a, b) in enumerate(itertools.pairwise(begins))
        )


@pytest.mark.parametrize("records", [1, 5, 33])
@pytest.mark.parametrize(("heads", "per_group"), [(1, 1), (6, 2), (6, 6), (12, 3)])
def test_packed_tiles_are_walked_group_by_group(records, heads, per_group):
    """Each record once for every head, and queries numbered head by head are in its head group."""
    order = RaggedKeyOrder(None, PlainDivisor(per_group), PlainDivisor(heads // per_group))
    of_head, end = 7, records * heads
    groups = QueryHeadGroups(of_head * heads, PlainDivisor(of_head * per_group))
    found = []
    for index in range(end):
        first_head, number = LOCATE(order, index, end)
        head, record = first_head + number % per_group, number // per_group
        found.append((order.group_of(head), record, head))
        assert groups.group_of(head * of_head) == order.group_of(head)
        assert groups.group_of(head * of_head + of_head - 1) == order.group_of(head)
    assert LOCATE(order, 0, 0) == (0, 0)
    assert found == sorted(found)
    assert len({(record, head) for _, record, head in found}) == end


@pytest.mark.parametrize(
    ("seqlen", "window", "inside"),
    [
        (KEYS_OF_QUERY, Window(), True),
        (KEYS_OF_QUERY - 1, Window(), False),
        (2 * KEYS_OF_QUERY, Window(right=0), True),
        (2 * KEYS_OF_QUERY - 2, Window(right=0), False),
        (16384, Window(KEYS_OF_QUERY - 1, 0), True),
        (16384, Window(KEYS_OF_QUERY - 2, 0), False),
        (16384, Window(100, 100), False),
    ],
)
def test_short_head_groups_are_preprocessed_before(seqlen, window, inside):
    plan = BackwardPlan.of(make_problem(4, seqlen, seqlen, 64, head_dim=128, window=window))
    assert plan.num_head_groups > 1
    if not inside:
        assert plan.groups_preprocessed == plan.num_head_groups
        return
    per_group = plan.heads_per_group * plan.key_tiles_of_head * plan.shares.parts
    assert 0 <= plan.groups_preprocessed * per_group - TILES_PREPROCESSED < per_group
