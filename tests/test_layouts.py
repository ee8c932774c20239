"""Which rows each rank has, and that they come together again."""

import re
from bisect import bisect
from itertools import accumulate

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from ranks import NUM_RANKS, Ranks, refusal, seeded
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental._context_parallel import _load_balancer

from fa3.distributed import SequenceLayout, contiguous, documents, zigzag
from fa3.distributed.layouts import Contiguous, Documents

SIZES = 1, 2, 4
ENDS = 0, 5, 5, 6, 30, 41
LAYOUTS = zigzag, contiguous, documents(ENDS)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    ranks = Ranks(tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.stop()


def rows_of(layout: SequenceLayout, seqlen: int, num_ranks: int) -> list[list[int]]:
    return [[row for one in held for row in one] for held in layout.chunks(seqlen, num_ranks)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("seqlen", [0, 1, 3, 7, 8, 41])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_each_row_is_on_one_rank_and_all_have_as_many(layout, seqlen, num_ranks):
    if isinstance(layout, Documents):
        layout = documents([min(end, seqlen) for end in ENDS])
    rows = rows_of(layout, seqlen, num_ranks)
    assert len(rows) == num_ranks
    assert sorted(row for one in rows for row in one) == list(range(seqlen))
    lengths = set(map(len, rows))
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_zigzag_has_torchs_order(num_ranks):
    balancer = _load_balancer._HeadTailLoadBalancer(48, num_ranks, "cpu")
    rows = rows_of(zigzag, 48, num_ranks)
    assert [row for one in rows for row in one] == balancer._generate_indices()[0].tolist()


def test_a_document_alone_is_a_zigzag():
    assert documents([0, 43]).chunks(43, 4) == zigzag.chunks(43, 4)


def test_ranks_have_whole_documents_first():
    rows = rows_of(documents([0, 5, 21, 26]), 26, 2)
    assert rows == [[*range(21, 26), *range(5, 9), *range(17, 21)], [*range(5), *range(9, 17)]]
    assert rows_of(documents([0, 8, 16]), 16, 2) == [[*range(8, 16)], [*range(8)]]


def test_chunks_that_begin_documents_come_first():
    rows = rows_of(documents([0, 12, 21, 24]), 24, 3)
    assert rows[1] == [12, 13, 3, 4, 7, 8, 20, 22]  # first chunks, then second ones


@given(st.lists(st.integers(0, 3000), max_size=40), st.integers(1, 9))
@example([2100, 2000, 1900, 1600], 5)  # 3% if differences may add up
@example([2**40] * 5, 7)
def test_ranks_have_as_many_rows_and_about_the_same_work(lengths, num_ranks):
    layout, work = documents(ends := [*accumulate(lengths, initial=0)]), list[int]()
    chunks = layout.chunks(ends[-1], num_ranks)
    held = sorted((chunk.start, chunk.stop) for one in chunks for chunk in one if chunk)
    assert [0, *(stop for _, stop in held)] == [*(start for start, _ in held), ends[-1]]
    rows = [sum(map(len, one)) for one in chunks]
    assert max(rows) - min(rows) <= 1
    for one in chunks:
        shares = [0] * len(lengths)
        for chunk in filter(len, one):
            shares[bisect(ends, chunk.start) - 1] += len(chunk)
        assert sum(0 < x < length for x, length in zip(shares, lengths, strict=True)) <= 4
        work.append(sum(x * length for x, length in zip(shares, lengths, strict=True)))
    # A row or two of long documents are more than 2% of few rows.
    assert max(work) <= 1.02 * sum(work) / num_ranks + 2 * max(lengths, default=0)


def test_layouts_are_values():
    assert repr(zigzag) == "Zigzag()"
    assert contiguous == Contiguous() and contiguous != zigzag
    made = documents(torch.tensor([0, 3, 7], dtype=torch.int32))
    assert made == documents([0, 3, 7]) and repr(made) == "Documents(cu_seqlens=(0, 3, 7))"


def test_documents_have_one_length():
    with pytest.raises(ValueError, match="seqlen must be 41, where cu_seqlens ends, got 40"):
        documents(ENDS).chunks(40, 2)


def test_a_group_is_needed():
    with pytest.raises(ValueError, match="init_process_group"):
        zigzag.shard(torch.ones(1, 3))
    for call in (zigzag.shard, zigzag.unshard):
        with pytest.raises(TypeError, match=r"^x must be a torch\.Tensor, got"):
            call([1])
        with pytest.raises(ValueError, match="dim must be at most 1, got 2"):
            call(torch.ones(1, 3), 2)
    with pytest.raises(ValueError, match="seqlen must be 0 or more, got -1"):
        zigzag.positions(-1)


def shard_and_join(group, layout, shape, dim):
    whole = seeded(*shape).requires_grad_()
    rows = layout.shard(whole, dim, group)
    positions = layout.positions(shape[dim], group)
    assert positions.shape == (rows.shape[dim],) and positions.dtype == torch.int64
    joined = layout.unshard(rows, dim, group)
    assert torch.equal(joined, whole)
    (gradient,) = torch.autograd.grad(joined, whole, whole.detach())
    # Of this rank's rows, summed over the ranks, which all use the whole.
    expected = layout.shard(group.size() * whole.detach(), dim, group)
    assert torch.equal(layout.shard(gradient, dim, group), expected)
    return positions


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shape, dim", [((2, 41, 3), 1), ((41,), 0), ((2, 3, 41), -1)])
def test_rows_come_together_again(ranks, layout, size, shape, dim):
    positions = ranks.run(size, shard_and_join, layout, shape, dim)
    rows = rows_of(layout, 41, size)
    starts = [max(end for end in ENDS if end <= row) for row in range(41)]
    for mine, of_rank in zip(positions, rows, strict=True):
        is_packed = isinstance(layout, Documents)
        assert mine.tolist() == [row - starts[row] * is_packed for row in of_rank]


def join_in_mesh(group):
    mesh = DeviceMesh.from_group(group, "cpu")
    kinds = seeded(1, 9), seeded(1, 9) > 0
    return all(torch.equal(zigzag.unshard(zigzag.shard(x, 1, mesh), 1, mesh), x) for x in kinds)


def test_a_mesh_is_a_group(ranks):
    assert all(ranks.run(2, join_in_mesh))


def join_wrongly(group, wrong):
    rows = torch.zeros(1, 4, 3)
    layout = zigzag
    if group.rank() == 1:
        layout = contiguous if wrong == "layout" else zigzag
        rows = {"rows": rows[:, :2], "shape": rows.new_zeros(1, 4, 4), "dtype": rows.half(),
                "grad": rows.clone().requires_grad_()}.get(wrong, rows)  # fmt: skip
    return refusal(layout.unshard, rows, group=group)


@pytest.mark.parametrize(
    "wrong, message",
    {
        "rows": r"rank 0 must have 3 of 14 rows by Zigzag\(\), got 4",
        "shape": r"x must be the same on all ranks, got .* \[1, 3\] .* rank 0 and .* \[1, 4\] on",
        "dtype": "x must be the same on all ranks, got torch.float32 .* rank 0 and torch.float16",
        "layout": "layout must be the same on all ranks, got Zigzag",
        "grad": "x must be the same on all ranks, got .* cpu on rank 0 and .* with a gradient",
    }.items(),
)
def test_all_ranks_refuse_what_they_disagree_on(ranks, wrong, message):
    texts = ranks.run(NUM_RANKS, join_wrongly, wrong)
    assert len(set(texts)) == 1
    assert re.match(f"ValueError: {message}", texts[0])
