"""What calls hand to the entry of a backward pass: where it looks for it, and in one buffer."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from problems import make_problem

from fa3.calls import backward
from fa3.calls.backward import BackwardCall
from fa3.kernels.backward_launch import ACCUMULATED, BackwardConfig, place_of_group_flag
from fa3.kernels.backward_pass import PassArguments
from fa3.planning.backward import (
    BackwardPlan,
    head_groups_of_packed,
    numbers_of_key_parts,
    shares_of_packed,
    words_of_counters,
)
from fa3.planning.gpu import H200
from fa3.planning.key_split import KeyShares
from fa3.primitives.divisor import PlainDivisor
from fa3.primitives.gradient_parts import KeySplit, family_of
from fa3.primitives.query_tiles import number_of_packed_tiles
from fa3.primitives.query_walk import EitherWalk
from fa3.problem import Window
from fa3.reference.backward import BackwardOperands, Wanted
from fa3.reference.dropout import Dropout
from fa3.reference.varlen import PackedLengths
from fa3.scores.masks import Blocks

CAUSAL = Window(right=0)

OPTIONS = [
    pytest.param(False, None, False, id="plain"),
    pytest.param(True, None, True, id="in order"),
    pytest.param(False, Dropout(torch.tensor([3]), 0.3), True, id="dropout"),
]


@pytest.fixture
def launched(monkeypatch):
    """Note the entries that are loaded, and what they get; they compute nothing."""
    found = []

    def load(entry):
        return lambda *given: found.append((entry, PassArguments(*given)))

    monkeypatch.setattr(backward, "load_kernel", load)
    monkeypatch.setattr(backward, "current_device", lambda: None)
    monkeypatch.setattr(backward, "gpu_of", lambda device: H200)
    remembered = backward.prepare_backward, backward.load_packed, backward.prepare_packed
    for prepare in remembered:
        prepare.cache_clear()
    yield found
    for prepare in remembered:
        prepare.cache_clear()


def check_handed_over(launched, operands, has_d_lse: bool, gradients) -> tuple:
    """Everything is in its place and of its kind, and parts of the buffer follow one another."""
    ((entry, given),) = launched
    wanted = PassArguments.symbolic(entry)
    assert [x is None for x in given] == [x is None for x in wanted]
    for name, value in given._asdict().items():
        is_tensor = hasattr(getattr(wanted, name), "memspace")
        assert isinstance(value, torch.Tensor) == is_tensor, name
    same = "q", "k", "v", "out", "lse", "d_out"
    assert all(getattr(given, name) is getattr(operands, name) for name in same)
    assert given.has_d_lse == has_d_lse
    assert given.d_lse is (operands.d_lse if has_d_lse else operands.lse)
    assert all(map(torch.Tensor.is_set_to, (given.dq, given.dk, given.dv), gradients))
    places = 0, given.dq_at, given.table_at, given.counters_at, given.dq_flags_at
    places = *places, given.buffer.numel()
    assert list(places) == sorted(places) and not any(place % 4 for place in places[:-1])
    # One flag for each query tile, which has two numbers of each of its rows.
    tiles = given.dq_at // (2 * entry.main.config.tile_m)
    end_of_flags = given.parts_at if entry.main.splits else places[-1]
    flags = tiles if entry.main.has_dq_flags else 0
    assert 0 <= end_of_flags - given.dq_flags_at - flags < (4 if entry.main.splits else 1)
    config = entry.main.config
    return given, config.tile_m, config.tile_n


@pytest.mark.parametrize(("is_ordered", "dropout", "has_d_lse"), OPTIONS)
def test_dense(is_ordered, dropout, has_d_lse, launched):
    problem = make_problem(2, 70, 90, 2, 3, 64, CAUSAL)
    problem = replace(problem, spec=replace(problem.spec, has_dropout=dropout is not None))
    q, out, d_out = (torch.zeros(2, 70, 6, 64).bfloat16() for _ in range(3))
    k, v = (torch.zeros(2, 90, 2, 64).bfloat16() for _ in range(2))
    lse = torch.zeros(2, 6, 70)
    operands = BackwardOperands(q, k, v, out, lse, d_out, lse.clone() if has_d_lse else None)
    call = BackwardCall(problem, None, 0.5, is_ordered, 132)
    *found, _ = backward.dense_gradients(call, operands, (), Wanted(sinks=False), dropout)
    given, tile_m, tile_n = check_handed_over(launched, operands, has_d_lse, found)
    assert (given.window_left, given.window_right) == problem.window
    rows = 2 * 6 * -(-70 // tile_m) * tile_m
    assert (given.dq_at, given.table_at) == (rows * 2, rows * (2 + 64))
    # In a fixed order a CTA has one query head.
    assert given.head_parts == (3 if is_ordered else None)
    assert given.num_clusters == 2 * 2 * -(-90 // tile_n) * (given.head_parts or 1)
    if not is_ordered:
        # Counters of the schedule, two more, and two flags of the one head group.
        assert given.dq_flags_at - given.table_at == 8
    assert given.dq_is_zeroed == is_ordered


@pytest.mark.parametrize("has_used", [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize(("is_ordered", "dropout", "has_d_lse"), OPTIONS)
def test_packed(is_ordered, dropout, has_d_lse, has_used, launched):
    spec = replace(make_problem(window=CAUSAL).spec, has_dropout=dropout is not None)
    q, out, d_out = (torch.zeros(300, 6, 64).bfloat16() for _ in range(3))
    k, v = (torch.zeros(500, 2, 64).bfloat16() for _ in range(2))
    lse = torch.zeros(6, 300)
    operands = BackwardOperands(q, k, v, out, lse, d_out, lse.clone() if has_d_lse else None)
    ends_q, ends_k = torch.tensor([0, 100, 300]).int(), torch.tensor([0, 200, 500]).int()
    lengths = PackedLengths(ends_q, ends_k, *(ends_q[1:] if has else None for has in has_used))
    call = BackwardCall((spec, CAUSAL), (200, 300), 0.5, is_ordered, 132)
    wanted = Wanted(sinks=False)
    *found, _ = backward.packed_gradients(call, operands, lengths, (), wanted, dropout)
    given, tile_m, tile_n = check_handed_over(launched, operands, has_d_lse, found)
    assert given[-9:-5] == tuple(lengths)
    rows = 6 * (300 // tile_m + 2) * tile_m
    assert (given.dq_at, given.table_at) == (rows * 2, rows * (2 + 64))
    # A header of 8 words, and 8 of each record.
    assert given.counters_at - given.table_at == 8 * (1 + given.capacity)
    # So few key tiles are shared. Two words of a schedule that has its own, two more, and two for
    # each head group; one for each part of a key tile and each of 8 warps.
    parts = given.head_parts * given.block_parts
    assert parts > 1 and given.head_parts in (1, 3)
    assert given.part_counters_at - given.counters_at == 8
    num_parts = 2 * (500 // tile_n + 2) * parts
    assert given.dq_flags_at - given.part_counters_at == 8 * num_parts
    assert given.buffer.numel() - given.parts_at == num_parts * tile_n * 2 * 64
    assert given.dq_is_zeroed
    assert (given.heads_per_group, given.groups_preprocessed) == (2 * parts, 1)
    assert given.capacity == 500 // tile_n + 2
    assert given.num_clusters == min(132, 2 * given.capacity * parts)


@pytest.mark.parametrize(
    ("shape", "window", "heads"),
    [
        pytest.param((16, 1024, 16, 1), Window(), 8, id="half as many tiles as run"),
        pytest.param((16, 1024, 16, 1), CAUSAL, 8, id="short, causal"),
        pytest.param((16, 4096, 16, 1), CAUSAL, 4, id="long, causal"),
        pytest.param((1, 4096, 16, 1), CAUSAL, 8, id="the last group is no small part"),
        pytest.param((16, 16384, 16, 1), CAUSAL, 2, id="tiles of few heads are enough"),
        pytest.param((16, 65536, 16, 1), Window(), 1, id="one head has more"),
        pytest.param((2, 4096, 8, 4), CAUSAL, 8, id="shared heads are taken one after another"),
        pytest.param((1, 4096, 9, 1), CAUSAL, 9, id="one more"),
        pytest.param((1, 4096, 20, 1), CAUSAL, 10, id="two equal ones"),
        pytest.param((1, 4096, 3, 1), CAUSAL, 3, id="few"),
    ],
)
def test_head_groups(shape, window, heads):
    batch, seqlen, heads_kv, group = shape
    problem = make_problem(batch, seqlen, seqlen, heads_kv, group, 128, window)
    plan = BackwardPlan.of(problem)
    assert plan.heads_per_group == heads * plan.shares.block_parts


def test_head_groups_are_larger_in_a_fixed_order():
    problem = make_problem(4, 4096, 4096, 16, 1, 128)
    assert BackwardPlan.of(problem).heads_per_group == 2
    assert BackwardPlan.of(problem, is_ordered=True).heads_per_group == 4


@pytest.mark.parametrize(
    ("shape", "head_dim", "shares", "groups", "heads", "alternates"),
    [
        pytest.param((1, 4096, 1, 8), 128, 8, 2, 4, 1, id="few heads"),
        pytest.param((2, 3072, 2, 8), 128, 8, 4, 8, 1, id="equal groups of more tiles"),
        pytest.param((1, 6000, 4, 7), 128, 7, 10, 3, 1, id="a smaller last group"),
        pytest.param((1, 1024, 1, 6), 128, 6, 1, 6, 1, id="all tiles run at the same time"),
        pytest.param((4, 4096, 16, 1), 128, 1, 16, 4, 1, id="many heads"),
        pytest.param((2, 4096, 8, 8), 128, 4, 16, 4, 1, id="two query heads of a CTA"),
        pytest.param((1, 4096, 2, 4), 256, 4, 2, 4, 1, id="blocks as long as key tiles"),
        pytest.param((4, 4096, 32, 1), 64, 1, 16, 8, 0, id="many of them"),
    ],
)
def test_head_groups_alternate_in_a_fixed_order(shape, head_dim, shares, groups, heads, alternates):
    batch, seqlen, heads_kv, group = shape
    problem = make_problem(batch, seqlen, seqlen, heads_kv, group, head_dim, CAUSAL)
    plan = BackwardPlan.of(problem, is_ordered=True)
    assert plan.shares == KeyShares(shares, 1)
    assert (plan.num_head_groups, plan.heads_per_group) == (groups, heads)
    assert plan.alternates == alternates
    assert BackwardPlan.of(problem).alternates is None


@given(begin=st.integers(0, 9), sizes=st.tuples(*[st.integers(0, 5)] * 3))
def test_a_walk_in_either_direction(begin, sizes):
    """Each block once, with and without a mask as before."""
    masked, full, more = sizes
    ends = begin + masked, begin + masked + full, begin + masked + full + more
    blocks = Blocks(begin, *ends)
    unmasked = set(range(ends[0], ends[1]))
    for is_down in (0, 1):
        walk = EitherWalk.of(blocks, is_down)
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


@pytest.mark.parametrize(
    ("shape", "shares"),
    [
        pytest.param((1, 4096, 1, 8), KeyShares(8, 1), id="a CTA for each query head"),
        pytest.param((1, 4096, 8, 4), KeyShares(2, 1), id="two query heads each"),
        pytest.param((1, 6000, 4, 7), KeyShares(7, 1), id="seven query heads"),
        pytest.param((1, 1024, 1, 6), KeyShares(6, 2), id="and half of the query blocks each"),
        pytest.param((1, 4608, 24, 1), KeyShares(), id="enough key tiles"),
        pytest.param((8, 4096, 16, 1), KeyShares(), id="many key tiles"),
    ],
)
def test_few_key_tiles_are_shared(shape, shares):
    """As in the fastest of the splits that were measured for these shapes."""
    batch, seqlen, heads_kv, group = shape
    problem = make_problem(batch, seqlen, seqlen, heads_kv, group, 128, CAUSAL)
    plan = BackwardPlan.of(problem)
    assert plan.shares == shares
    assert plan.kernels.entry.main.splits == (shares.parts > 1)
    assert BackwardPlan.of(problem, is_ordered=True).shares.block_parts == 1


@given(
    head_parts=st.sampled_from([1, 2, 3, 6]),
    block_parts=st.integers(1, 8),
    heads_kv=st.integers(1, 3),
    begin=st.integers(0, 5),
    count=st.integers(1, 40),
)
def test_parts_cover_every_head_and_block_once(head_parts, block_parts, heads_kv, begin, count):
    group = 6
    parts = PlainDivisor(head_parts * block_parts)
    split = KeySplit(parts, PlainDivisor(block_parts), group // head_parts)
    blocks = Blocks(begin, begin + count // 3, begin + count // 2, begin + count)
    found = []
    for head in range(heads_kv * parts.value):
        work = split.work(0, head, 0, group)
        walked = split.blocks(blocks, work.part)
        assert walked.begin <= walked.full_begin <= walked.full_end <= walked.end
        for block in range(walked.begin, walked.end):
            is_full = walked.full_begin <= block < walked.full_end
            assert is_full == (blocks.full_begin <= block < blocks.full_end)
            heads = range(work.first_head, work.first_head + work.num_heads)
            found += [(work.head_kv, head_q, block) for head_q in heads]
    expected = [
        (head // group, head, block)
        for head in range(heads_kv * group)
        for block in range(blocks.begin, blocks.end)
    ]
    assert sorted(found) == expected


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
    ],
)
def test_memory_of_packed_parts_is_bounded(total, num_sequences, heads, splits):
    """Whatever the lengths are: memory has room for as many key tiles as there can be."""
    spec = make_problem(head_dim=128, window=CAUSAL).spec
    longest = total // min(num_sequences, 4)
    shares = shares_of_packed(
        spec, CAUSAL, total, total, num_sequences, longest, *heads, False, 132
    )
    assert (shares.parts > 1) == splits
    num_parts = number_of_packed_tiles(total, num_sequences, 128) * heads[1] * shares.parts
    assert not splits or numbers_of_key_parts(num_parts, spec, BackwardConfig(64, 128)) * 4 < 3e8
