"""Every key block exactly once, in pieces of equal size, with parts where the merge looks."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from unittest.mock import Mock

import pytest
import torch
from gpu_checks import forget_prepared_calls
from hypothesis import given
from hypothesis import strategies as st
from kvcache_problems import CacheProblem, make_call
from reference import check_call
from valid_calls import OnGpu

from fa3.calls.attention import flash_attn_with_kvcache
from fa3.calls.options import Options
from fa3.calls.scheduler_metadata import get_scheduler_metadata
from fa3.kernels.decode_launch import TILE_N
from fa3.planning import decode
from fa3.problem import Window
from fa3.schedules import stream_k
from fa3.schedules.order import Segment, Tile
from fa3.schedules.stream_k import ONE_IDLE_IN, CtaGroups, Cut, FixedSplit, NoSplit, StreamK, walks
from fa3.scores.masks import Blocks


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


@given(calls(), st.data())
def test_a_walk_begins_in_a_sequence_even_if_lengths_change(call, data):
    """They may, where they are read before the kernel that appends has ended."""
    cut, blocks, *rest = call
    changed = [(0, data.draw(st.integers(1, 150))) for _ in blocks]
    for walk in walks(cut, HostLengths(blocks), *rest):
        cursor = replace(walk, lengths=HostLengths(changed)).first()
        assert cursor.length in changed
        assert 0 <= cursor.tile < walk.tiles(cursor.length) and cursor.batch <= len(blocks)


def metadata(seqlens, seqlen_q=1, heads=(8, 8), **options):
    batch, longest = len(seqlens), max(seqlens) + options.get("max_seqlen_k_new", 0)
    lengths = torch.tensor(seqlens, dtype=torch.int32)
    return get_scheduler_metadata(batch, seqlen_q, longest, *heads, 128, lengths, **options)


@pytest.mark.parametrize(
    ("seqlens", "heads", "whole"),
    [
        ([4096] * 132, (8, 1), True),
        ([4096] * 264, (8, 8), True),
        ([4096] * 40, (8, 1), False),
        ([131072] + [128] * 131, (8, 1), False),
        ([64] * 4, (8, 1), True),
        ([0, 0], (8, 1), True),
    ],
)
def test_tiles_stay_whole_where_they_keep_all_sms_busy(seqlens, heads, whole):
    assert metadata(seqlens, heads=heads).keeps_tiles_whole == whole


@pytest.mark.parametrize(
    ("queries", "keys", "options", "whole"),
    [
        (64, 4096, {}, True),
        (65, 4096, {}, False),
        (65, 200, {}, True),
        (65, 4096, {"page_size": 64}, False),
        (65, 4096, {"page_size": 3}, True),
        (65, 4096, {"sm_margin": 66}, True),
        (65, 4096, {"cache_leftpad": torch.zeros(132, dtype=torch.int32)}, True),
    ],
)
def test_tiles_stay_whole_in_the_decode_kernel_only(queries, keys, options, whole):
    """A prompt would leave the forward kernel, as with `num_splits=1`."""
    made = metadata([keys] * 132, queries, (8, 1), **options)
    assert made.keeps_tiles_whole == whole


def test_a_window_bounds_the_work():
    seqlens = [131072] + [128] * 131
    assert metadata(seqlens, heads=(8, 1), window_size=(127, 0)).keeps_tiles_whole


def test_new_tokens_and_padding_count():
    few = [64] * 4
    assert not metadata(few, heads=(8, 1), max_seqlen_k_new=10_000).keeps_tiles_whole
    long, padding = [10_000] * 4, torch.tensor([9_990] * 4, dtype=torch.int32)
    assert metadata(long, heads=(8, 1), cache_leftpad=padding).keeps_tiles_whole
    ends = torch.tensor([0, 10_000, 10_000, 10_000, 10_000], dtype=torch.int32)
    options = {"cu_seqlens_k_new": ends, "max_seqlen_k_new": 10_000}
    assert not metadata(few, heads=(8, 1), **options).keeps_tiles_whole


def test_what_was_asked_for_stays():
    made = metadata([4096] * 132, heads=(8, 1), num_splits=3, sm_margin=8)
    assert not made.keeps_tiles_whole
    expected = Options(num_splits=3, sm_margin=8)
    assert made.applied_to(Options()) == made.applied_to(expected) == expected
    with pytest.raises(ValueError, match=r"^num_splits must be 0 or, .* 3, got 2"):
        made.applied_to(Options(num_splits=2))
    with pytest.raises(ValueError, match=r"^sm_margin must be 0 or, .* 8, got 1"):
        made.applied_to(Options(sm_margin=1))


def test_batch_invariance_does_not_look_at_the_lengths():
    made = metadata([4096] * 132, heads=(8, 1))
    assert made.applied_to(Options()).num_splits == 1
    assert made.applied_to(Options(batch_invariant=True)).num_splits == 0


def made_for(call: dict, **options):
    q, k_cache, v_cache = call["q"], call["k_cache"], call["v_cache"]
    pages = call.get("page_table")
    defaults = {
        "qkv_dtype": q.dtype,
        "headdim_v": v_cache.shape[3],
        "page_size": None if pages is None else k_cache.shape[1],
        "causal": call["causal"],
        "window_size": call["window_size"],
        "has_softcap": bool(call["softcap"]),
        "max_seqlen_k_new": call["k"].shape[1] if "k" in call else 0,
    }
    sizes = (*q.shape[:2], 1 << 20, q.shape[2], k_cache.shape[2], q.shape[3])
    return get_scheduler_metadata(*sizes, call["cache_seqlens"], **(defaults | options))


@pytest.mark.parametrize(("num_splits", "cut"), [(0, NoSplit), (1, NoSplit), (3, FixedSplit)])
def test_calls_follow_it(num_splits, cut, monkeypatch):
    problem = CacheProblem(
        (200, 0, 131), 2, (2, 2, 2), page_size=16, group=4, head_dim_v=96, causal=True, softcap=9.0
    )
    call = make_call(problem)
    choose_cut = Mock(wraps=decode.choose_cut)
    monkeypatch.setattr(decode, "choose_cut", choose_cut)
    forget_prepared_calls()
    caches = {name: call[name].clone() for name in ("k_cache", "v_cache")}
    made = made_for(call, num_splits=num_splits)
    out, lse = flash_attn_with_kvcache(**(call | caches), scheduler_metadata=made, return_lse=True)
    check_call(call, out, lse, tuple(caches.values()))
    choose_cut.assert_called_once()
    assert type(choose_cut(*choose_cut.call_args.args)) is cut


def test_lengths_on_a_gpu_decide_nothing(monkeypatch):
    monkeypatch.setattr(OnGpu, "tolist", lambda tensor: pytest.fail("was read"))
    lengths = torch.full((132,), 4096, dtype=torch.int32).as_subclass(OnGpu)
    made = get_scheduler_metadata(132, 1, 4096, 8, 1, 128, lengths)
    assert made == metadata([4096] * 132, heads=(8, 1))._replace(keeps_tiles_whole=False)


WRONG = torch.tensor([-(1 << 31), -3, 70, (1 << 31) - 1], dtype=torch.int32)


@pytest.mark.parametrize("lengths", [WRONG, -1, 1 << 39], ids=str)
@pytest.mark.parametrize("padding", [None, WRONG, WRONG.flip(0)], ids=str)
@pytest.mark.parametrize("ends", [None, torch.cat((WRONG, WRONG[:1]))], ids=str)
def test_metadata_takes_any_lengths(lengths, padding, ends):
    """They cost time at most; calls refuse them."""
    options = {"cache_leftpad": padding, "cu_seqlens_k_new": ends}
    assert get_scheduler_metadata(4, 1, 40, 8, 8, 128, lengths, **options).batch == 4


@pytest.mark.parametrize(
    ("seqlen_q", "ratio", "heads_kv", "keys"),
    [
        (1, 4, 8, {1000: 256, 3000: 512, 9000: 512}),
        (4, 4, 1, {1000: 256, 3000: 256, 9000: 320, 40_000: 512}),
        (8, 4, 8, {1000: 2048, 9000: 2048}),
        (64, 8, 1, {1000: 2048, 9000: 2048}),
    ],
)
def test_batch_invariant_units_follow_from_a_sequence_and_its_heads(
    seqlen_q, ratio, heads_kv, keys
):
    for batch, capacity, num_ctas in ((1, 50_000, 132), (33, 100_000, 60)):
        sizes = decode.Sizes(batch, seqlen_q, heads_kv, ratio, capacity)
        cut = decode.choose_cut(sizes, Window(), num_ctas, 0, True)
        blocks = {length: -(-length // TILE_N) for length in keys}
        assert {n: cut.unit(blocks[n]) * TILE_N for n in keys} == keys
        most = max(-(-n // cut.unit(n)) for n in range(1, sizes.most_blocks(Window()) + 1))
        assert cut.max_parts == most


def test_a_forced_split_is_kept_in_the_batch_invariant_mode():
    sizes = decode.Sizes(2, 1, 8, 4, 10_000)
    forced = decode.choose_cut(sizes, Window(), 132, 3, True)
    assert forced == decode.choose_cut(sizes, Window(), 132, 3, False)
    assert forced != decode.choose_cut(sizes, Window(), 132, 0, True)


# -------------------------------------------------------- segments from the key blocks of sequences


@dataclass(frozen=True)
class HostLengths:
    """Lengths of sequences as `Walk` takes them, in lists."""

    ranges: Sequence[tuple[int, int]]  # key blocks [begin, end) that a sequence's queries touch
    # Row blocks of a head of each sequence, or 0; None if all have equally many.
    of_rows: Sequence[int] | None = None

    @property
    def num_sequences(self) -> int:
        return len(self.ranges)

    def read(self, batch: int) -> tuple[int, ...]:
        rows = () if self.of_rows is None else (self.of_rows[batch],)
        return *self.ranges[batch], *rows

    def blocks(self, length: tuple[int, ...]) -> Blocks:
        begin, end, *_ = length
        return Blocks(begin, begin, begin, end)

    def num_blocks(self, length: tuple[int, ...]) -> int:
        begin, end, *_ = length
        return end - begin

    def m_blocks(self, length: tuple[int, ...]) -> int | None:
        _, _, *rows = length
        return rows[0] if rows else None


def segments(cut: Cut, blocks, *sizes: int, of_rows=None) -> Iterator[tuple[int, Segment]]:
    """Yield (CTA, segment); `sizes` are row blocks of a head, heads and CTAs."""
    yield from stream_k.segments(cut, HostLengths(blocks, of_rows), *sizes)


def records(cut: Cut, blocks, *sizes: int, of_rows=None) -> Iterator[tuple[int, Tile, range]]:
    """Yield (record, tile, slots to merge in this order) for every tile that is cut into parts."""
    for _, segment in segments(cut, blocks, *sizes, of_rows=of_rows):
        part, (first, _) = segment.part, blocks[segment.tile.batch]
        if segment.begin == first and part.num_parts > 1:
            slots = range(part.first_slot, part.first_slot + part.num_parts)
            yield part.record, segment.tile, slots
