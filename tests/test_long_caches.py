"""Caches, tables and calls so large that 32 bits, in which kernels count, do not do for them.

Kernels share their arithmetic with the host. Here it runs on integers that complain when they no
longer fit.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvcache_problems import CacheProblem, make_call
from test_split import HostLengths, segments

from fa3.calls import combine, devices, execution, prepare
from fa3.calls.attention import flash_attn_with_kvcache
from fa3.calls.call import AttentionCall, check_tensors
from fa3.calls.combine import MOST_COMBINED
from fa3.calls.operands import Operand
from fa3.calls.options import Options
from fa3.kernels.append import MOST_VECTORS, THREADS
from fa3.planning.costs import H200
from fa3.planning.decode import (
    MOST_ROWS,
    MOST_TILES,
    Sizes,
    check_workspace,
    choose_cut,
    most_of_whole_tiles,
)
from fa3.primitives.arithmetic import LARGEST, PlainDivisor
from fa3.primitives.packed_rows import WorkspaceSize
from fa3.problem import NO_BOUND, Window
from fa3.schedules import stream_k
from fa3.schedules.sequences import LONGEST, capacity_of
from fa3.schedules.stream_k import (
    Chunks,
    CtaGroup,
    CtaGroups,
    FixedSplit,
    NoSplit,
    Place,
    StreamK,
    Walk,
)
from fa3.scores.masks import Band, Sequence


class Fixed(int):
    """An integer of some bits; of two with different bits the result has the most."""

    bits = 0

    def __new__(cls, value):
        assert -(2 ** (cls.bits - 1)) <= value < 2 ** (cls.bits - 1), f"{value} in {cls.bits} bits"
        return super().__new__(cls, value)


class Int32(Fixed):
    bits = 32


class Int64(Fixed):
    bits = 64


def binary(name: str):
    def operate(one, other):
        wider = max(type(one), type(other), key=lambda kind: getattr(kind, "bits", 0))
        return wider(getattr(int, name)(one, other))

    return operate


for operation in ("add", "sub", "mul", "floordiv", "mod"):
    for name in (f"__{operation}__", f"__r{operation}__"):
        setattr(Fixed, name, binary(name))
Fixed.__neg__ = lambda one: type(one)(-int(one))

PAGE_SIZES = (1, 7, 16, 1000, 1024, 1 << 20, LONGEST)


def test_the_integers_complain():
    with pytest.raises(AssertionError, match=r"^2147483648 in 32 bits"):
        Int32(1024) * Int32(1 << 21)
    with pytest.raises(AssertionError, match=r"^2147483648 in 32 bits"):
        1 + Int32(LARGEST)
    assert type(Int32(1) - Int64(2)) is Int64


# ------------------------------------------------------------------------------------- lengths


@given(st.sampled_from(PAGE_SIZES), st.integers(0, LARGEST))
def test_the_capacity_is_that_of_the_pages_or_nearly_the_longest(page_size, pages):
    capacity = capacity_of(Int32(page_size), Int32(pages))
    assert type(capacity) is Int32 and capacity % page_size == 0
    assert capacity == page_size * pages or LONGEST - page_size < capacity <= LONGEST


@st.composite
def sequences(draw):
    """Draw a sequence of a call that passes the checks, with a tightened window."""
    capacity = draw(st.sampled_from((1, 1000, LONGEST // 2, LONGEST)))
    most = (LARGEST - capacity) // 2 - 64
    seqlen_q = draw(st.sampled_from((1, 3, 1000, most)).filter(lambda n: n <= most))
    seqlen_k = draw(st.sampled_from((0, 1, capacity - 1, capacity)))
    left, right = draw(st.integers(NO_BOUND, LARGEST)), draw(st.integers(NO_BOUND, LARGEST))
    sizes = Sizes(1, seqlen_q, 1, 1, capacity)
    sizes.check("q")
    window = Window(left, right).tighten(seqlen_q, capacity)
    return sizes, window, Sequence(*map(Int32, (seqlen_q, seqlen_k)), Window(*map(Int32, window)))


@given(sequences())
def test_masks_count_the_keys_of_the_longest_sequences(case):
    sizes, window, sequence = case
    mask = Band.of(window)
    blocks = mask.key_blocks(0, sequence.seqlen_q, 64, sequence)
    assert 0 < blocks.end - blocks.begin <= sizes.most_blocks(window)
    # The last row of a tile may lie behind the queries.
    for row in (0, sizes.seqlen_q - 1, sizes.seqlen_q + 63):
        mask.key_range(Int32(row), sequence)
        mask.key_blocks(Int32(row), Int32(64), 64, sequence)


# ------------------------------------------------------------------------------------ the line


def as_fixed(walk: Walk, kind: type) -> Walk:
    """Return a walk as a kernel has it, with places in the line of this kind."""
    pieces, batch, batch_begin = walk.place
    num_crews, num_m_blocks = (
        PlainDivisor(Int32(divisor.value)) for divisor in (pieces.num_crews, walk.num_m_blocks)
    )
    line = Chunks(kind(pieces.total), num_crews, kind(pieces.end))
    place = Place(line, Int32(batch), kind(batch_begin))
    blocks = [tuple(map(Int32, length)) for length in walk.lengths.ranges]
    cut = replace(walk.cut, **{name: Int32(n) for name, n in vars(walk.cut).items()})
    groups, crew = Int32(walk.num_groups), CtaGroup(*map(Int32, walk.crew))
    return Walk(cut, HostLengths(blocks), num_m_blocks, groups, num_crews, crew, place)


def segments_of(walk: Walk, count: int) -> list:
    """Return the first segments of a walk, where only positions may take more than 32 bits."""
    cursor, found = walk.first(), []
    while walk.is_valid(cursor) and len(found) < count:
        segment = walk.segment(cursor)
        short = *cursor[1:4], *segment.tile, segment.begin, segment.end, *segment.part
        assert not any(isinstance(n, Int64) for n in short)
        found.append((cursor.position, segment))
        cursor = walk.next(cursor)
    return found


LONG = LONGEST // 64  # blocks of the longest sequence

LINES = [
    ([(0, LONG), (3, 4), (0, LONG)], 11, 4, Int64),
    ([(0, LONG)] * 65, 1, 1, Int64),
    ([(0, 1), (LONG - 5, LONG), (0, LONG)], 1 << 9, 1 << 4, Int64),
    ([(0, LONG)], 1, 64, Int32),
    ([(0, 1), (0, LONG), (0, 3)], 3, 20, Int32),
]


@pytest.mark.parametrize(("blocks", "num_m_blocks", "num_heads", "kind"), LINES)
@pytest.mark.parametrize("num_ctas", [1, 132])
@pytest.mark.parametrize("cut", [StreamK, CtaGroups, FixedSplit, NoSplit])
def test_walks_of_long_lines(blocks, num_m_blocks, num_heads, kind, num_ctas, cut, monkeypatch):
    monkeypatch.setattr(stream_k, "Int32", Int32)
    monkeypatch.setattr(stream_k, "Int64", Int64)
    num_tiles = len(blocks) * num_m_blocks * num_heads
    made = {
        StreamK: StreamK(num_ctas, num_tiles),
        CtaGroups: CtaGroups(num_ctas, 1),
        FixedSplit: FixedSplit(1000, 8, 1000, num_tiles),
        NoSplit: NoSplit(),
    }[cut]
    total = num_m_blocks * num_heads * sum(end - begin for begin, end in blocks)
    assert (total > LARGEST) == (kind is Int64)
    if cut is CtaGroups and 2 * total > LARGEST:
        kind = Int64
    walks = [*stream_k.walks(made, HostLengths(blocks), num_m_blocks, num_heads, num_ctas)]
    for walk in (*walks[::30], walks[-1]):
        assert segments_of(as_fixed(walk, kind), 20) == segments_of(walk, 20)


@given(
    st.lists(st.integers(0, 30_000), min_size=1, max_size=9),
    st.integers(1, 200),
    st.integers(1, 3),
    st.integers(1, 132),
    st.sampled_from([Window(), Window(right=0), Window(left=500)]),
)
def test_the_most_of_whole_tiles_is_that_of_their_walk(lengths, queries, heads, num_ctas, window):
    sizes = Sizes(len(lengths), queries, heads, 1, max(lengths))
    mask, work = Band.of(window), [0] * num_ctas
    blocks = [mask.key_blocks(0, queries, 64, Sequence(queries, n, window)) for n in lengths]
    ranges = [(of.begin, of.end) for of in blocks]
    for cta, segment in segments(NoSplit(), ranges, sizes.num_m_blocks, heads, num_ctas):
        work[cta] += segment.end - segment.begin
    assert most_of_whole_tiles(sizes, window, lengths, num_ctas) == (max(work), sum(work))


# -------------------------------------------------------------------------------- preparations


def operand(*shape, dtype=torch.bfloat16, device="cpu") -> Operand:
    """Describe a tensor that lies on itself."""
    return Operand(torch.Size(shape), (0,) * (len(shape) - 1) + (1,), dtype, torch.device(device))


@pytest.fixture
def prepared(monkeypatch):
    """Prepare launches for an H200, and return their plans and kernels."""
    plans, kernels, attend_by = [], [], execution.attend_by
    gpu = SimpleNamespace(multi_processor_count=132, total_memory=150 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(devices, "gpu_of", lambda device: H200)
    monkeypatch.setattr(execution, "load_kernel", kernels.append)
    monkeypatch.setattr(
        execution, "attend_by", lambda plan, *given: plans.append(plan) or attend_by(plan, *given)
    )

    def prepare(batch=1, heads_kv=1, pages=1 << 21, page_size=1024, head_dim=128, **options):
        q = operand(batch, 1, heads_kv, head_dim, device="cuda:0")
        cache = operand(10, page_size, heads_kv, head_dim)
        table = operand(batch, pages, dtype=torch.int32)
        call = AttentionCall(q, cache, cache, page_table=table)
        execution.prepare_on_cache(call, Options(**options))
        return plans, kernels

    return prepare


@pytest.mark.parametrize(
    ("batch", "heads_kv", "options", "is_long"),
    [
        (1, 1, {}, False),
        (8, 8, {}, False),
        (65, 1, {}, True),
        (9, 8, {}, False),
        (65, 8, {}, True),
        (9, 8, {"num_splits": 9}, True),
        (9, 8, {"num_splits": 1}, True),
        (9, 8, {"window": Window(left=1000, right=0)}, False),
        (9, 8, {"pages": 1 << 10}, False),
    ],
)
def test_lines_that_may_be_long_have_long_places(batch, heads_kv, options, is_long, prepared):
    _, kernels = prepared(batch, heads_kv, **options)
    assert kernels[0].is_long is is_long


@pytest.mark.parametrize("num_splits", [1 << 20, 1 << 31, 1 << 60])
def test_more_splits_than_blocks_are_as_many_as_blocks(num_splits, prepared):
    (plan,), _ = prepared(pages=4, num_splits=num_splits)
    assert plan.cut == FixedSplit(64, 1, 64, 1)
    sizes = Sizes(3, 1, 2, 4, 4096)
    assert choose_cut(sizes, Window(), 132, num_splits, False) == FixedSplit(64, 1, 64, 6)


@pytest.mark.parametrize(
    "options",
    [
        {"batch": 16, "batch_invariant": True},
        {"batch": 64, "num_splits": 1 << 30},
        {"batch": 600, "head_dim": 8, "batch_invariant": True},
    ],
)
def test_an_absurd_workspace_is_refused(options, prepared):
    complaint = r"^num_splits or batch_invariant takes \d+\.\d GB of workspace, for \d+ parts of"
    with pytest.raises(ValueError, match=complaint):
        prepared(**options | {"heads_kv": 8})


def test_a_large_workspace_is_not(prepared):
    (plan,), _ = prepared(batch_invariant=True)
    assert 1 << 30 < 4 * sum(count for _, count in plan.memory.parts) < 8 << 30


def test_parts_that_32_bits_do_not_count_are_refused():
    check_workspace(WorkspaceSize(1, 2**25, 32), 8, 1000, 1 << 60)
    with pytest.raises(ValueError, match=r"^num_splits or batch_invariant takes"):
        check_workspace(WorkspaceSize(1, 2**26, 32), 8, 1000, 1 << 60)


# --------------------------------------------------------------------------------------- calls


def test_a_wide_page_table_gives_what_a_narrow_one_gives():
    """A table of 8 MB for 2^31 tokens, of which a sequence has some thousand."""
    problem = CacheProblem((3000,), 2, (2,), page_size=1024, causal=True)
    call, narrow = make_call(problem), make_call(problem)
    wide = torch.full((1, 1 << 21), -1, dtype=torch.int32)
    wide[:, : narrow["page_table"].shape[1]] = narrow["page_table"]
    out, lse = flash_attn_with_kvcache(**call | {"page_table": wide}, return_lse=True)
    same_out, same_lse = flash_attn_with_kvcache(**narrow, return_lse=True)
    assert torch.equal(out, same_out) and torch.equal(lse, same_lse)
    for name in ("k_cache", "v_cache"):
        assert torch.equal(call[name].view(torch.int16), narrow[name].view(torch.int16))


HUGE = 1 << 31


@pytest.mark.parametrize(
    ("shapes", "complaint"),
    [
        ({"k_cache": (1, HUGE, 1, 64)}, f"^k_cache must have sizes of at most {LARGEST}"),
        ({"k_cache": (1, LARGEST, 1, 64)}, f"^k_cache must have at most {LONGEST} tokens of a"),
        ({"page_table": (1, HUGE)}, f"^page_table must have sizes of at most {LARGEST}"),
        (
            {"q": (1, MOST_ROWS + 1, 1, 64)},
            f"^q must give a key/value head at most {MOST_ROWS} row",
        ),
        (
            {"q": (1, 1 << 20, 1, 64), "page_table": (1, HUGE - 1)},
            r"^q must give a sequence at most \d+ queries with a cache .* tokens, got 1048576",
        ),
        (
            {"q": (MOST_TILES + 1, 1, 1, 64), "page_table": (MOST_TILES + 1, 4)},
            f"^q must give at most {MOST_TILES} tiles of 64 rows, got {MOST_TILES + 1}: 1 for each",
        ),
    ],
)
def test_what_32_bits_do_not_count_is_refused(shapes, complaint):
    shapes = {"q": (1, 1, 1, 64), "k_cache": (1, 16, 1, 64)} | shapes
    q, cache = (operand(*shapes[name]) for name in ("q", "k_cache"))
    pages = operand(*shapes["page_table"], dtype=torch.int32) if "page_table" in shapes else None
    with pytest.raises(ValueError, match=complaint):
        check_tensors(AttentionCall(q, cache, cache, page_table=pages))


def test_vectors_that_32_bits_do_not_count_are_refused():
    """Threads come in blocks: those of the last block count, too."""
    cache = operand(1, 16, 1, 8)

    def call(tokens):
        new = operand(1, tokens, 1, 8)
        return AttentionCall(operand(1, 1, 1, 8), cache, cache, new, new)

    assert MOST_VECTORS + THREADS - 1 <= LARGEST
    prepare.append_kernel(call(MOST_VECTORS), False, False)
    with pytest.raises(ValueError, match=rf"^k must have at most {MOST_VECTORS} vectors .* got"):
        prepare.append_kernel(call(MOST_VECTORS + 1), False, False)


@pytest.mark.parametrize(
    ("parts", "seqlen", "what"), [(2, MOST_COMBINED + 1, "rows"), (MOST_COMBINED + 1, 2, "parts")]
)
def test_a_merge_that_32_bits_do_not_count_is_refused(parts, seqlen, what):
    shape = parts, 1, seqlen, 1
    partial, lse = operand(*shape, 8, dtype=torch.float32), operand(*shape, dtype=torch.float32)
    with pytest.raises(ValueError, match=rf"^out_partial must have at most {MOST_COMBINED} {what}"):
        combine.prepare_combine(partial, lse, None, torch.float32)
