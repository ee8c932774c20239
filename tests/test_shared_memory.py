"""What a call writes must not be what it reads; it may lie between the elements of that."""

import itertools
from collections.abc import Iterator
from random import Random

import pytest
import torch
from full_calls import CALLS
from kvcache_problems import CacheProblem, make_call
from reference import check_call

import fa3
from fa3.calls.operands import Operand, overlaps_itself, share_bytes

HEADS, DIM = 4, 64


def packed(slots: int, seqlen: int = 40) -> torch.Tensor:
    """Draw a buffer (batch, seqlen, slots, heads, head_dim)."""
    return torch.randn(2, seqlen, slots, HEADS, DIM).bfloat16()


def bytes_at(memory: torch.Tensor, begin: int, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor like another one in the memory of a third, `begin` bytes after its start."""
    flat = memory.view(-1).view(torch.uint8)[begin:]
    return flat[: like.numel() * like.element_size()].view(like.dtype).view(like.shape)


# --------------------------------------------------------------------------------- outputs

TENSORS = [
    (call, name)
    for call in ("attend", "varlen", "cache", "combine")
    for name in CALLS[call][1]()
    if name != "out"
]


@pytest.mark.parametrize(("call", "name"), TENSORS)
def test_an_output_over_a_tensor_of_the_call(call, name):
    """Over its first bytes, and over its last."""
    run, make = CALLS[call]
    tensors, memory = make(), torch.zeros(1 << 20).bfloat16()
    given = tensors[name].contiguous()
    tensors[name] = bytes_at(memory, 256, given).copy_(given)
    before, cache = memory.clone(), tensors.get("k_cache", memory).clone()
    for begin in (0, 256 + (given.nbytes - 1) // 16 * 16):
        out = bytes_at(memory, begin, tensors["out"])
        with pytest.raises(ValueError, match=f"^out must not overlap {name}: "):
            run(tensors | {"out": out})
    for one, other in ((memory, before), (tensors.get("k_cache", memory), cache)):
        assert torch.equal(one.view(torch.int16), other.view(torch.int16))


@pytest.mark.parametrize(
    ("shape", "stride"),
    [
        ((2, 40, HEADS, DIM), (0, HEADS * DIM, DIM, 1)),
        ((2, 40, HEADS, DIM), (40 * HEADS * DIM, 8, 40 * DIM, 1)),
        ((2, 40, HEADS, DIM), (8, HEADS * DIM, DIM, 1)),
        ((2, 40, HEADS, DIM), (40 * HEADS * DIM, HEADS * DIM, DIM - 8, 1)),
    ],
)
def test_an_output_whose_rows_share_memory(shape, stride):
    q, k, v = packed(3).unbind(2)
    out = torch.zeros(2 * 40 * HEADS * DIM, dtype=q.dtype).as_strided(shape, stride)
    with pytest.raises(ValueError, match=r"^out must not overlap itself"):
        fa3.flash_attn_func(q, k, v, out=out)
    assert (out == 0).all()


def test_an_output_beside_the_inputs_in_one_buffer():
    buffer = packed(4)
    q, k, v, out = buffer.unbind(2)
    expected = fa3.flash_attn_func(q, k, v, causal=True)
    fa3.flash_attn_func(q, k, v, causal=True, out=out)
    assert torch.equal(out, expected)


# -------------------------------------------------------------------------------- the cache

APPENDS = CacheProblem(
    (20, 30), 2, (2, 2), heads_kv=2, group=2, page_size=16, batch_idx=(1, 0), rows=2,
    leftpads=(1, 2), rotary=(32, True, "float32"),
)  # fmt: skip


def large(call: dict) -> dict:
    """Return the call with caches that have room for other tensors in pages that nobody uses."""
    for name in ("k_cache", "v_cache"):
        call[name] = torch.cat((call[name], torch.zeros(64, *call[name].shape[1:]).bfloat16()))
    return call


@pytest.mark.parametrize("cache", ["k_cache", "v_cache"])
@pytest.mark.parametrize(
    "name",
    ["q", "k", "v", "rotary_cos", "rotary_sin", "cache_seqlens", "cache_batch_idx", "cache_leftpad",
     "page_table"],
)  # fmt: skip
def test_caches_over_what_is_appended_to_them(name, cache):
    call = large(make_call(APPENDS))
    given = call[name].contiguous()
    call[name] = bytes_at(call[cache][-60:], 0, given)
    call[name].copy_(given)
    before = call[cache].clone()
    with pytest.raises(ValueError, match=f"^{cache} must not overlap {name}: "):
        fa3.flash_attn_with_kvcache(**call)
    assert torch.equal(call[cache].view(torch.int16), before.view(torch.int16))


def test_caches_over_each_other():
    call = large(make_call(APPENDS))
    call["v_cache"] = call["k_cache"]
    with pytest.raises(ValueError, match=r"^k_cache must not overlap v_cache: "):
        fa3.flash_attn_with_kvcache(**call)
    memory = torch.zeros(200, 16, 2, 64).bfloat16()
    call["k_cache"], call["v_cache"] = memory[:100], memory[99:199]
    with pytest.raises(ValueError, match=r"^k_cache must not overlap v_cache: "):
        fa3.flash_attn_with_kvcache(**call)


def test_caches_may_be_one_if_nothing_is_written():
    call = make_call(CacheProblem((20, 30), heads_kv=2, page_size=16))
    call["v_cache"] = call["k_cache"]
    out, lse = fa3.flash_attn_with_kvcache(**call, return_lse=True)
    check_call(call, out, lse, (call["k_cache"], call["v_cache"]))


def interlaced(layout: str, cache: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return two caches in one piece of memory, as servers lay them out."""
    pages, size, heads, dim = cache.shape
    like = {"dtype": cache.dtype}
    if layout == "pages":
        return torch.zeros(pages, 2, size, heads, dim, **like).unbind(1)
    if layout == "columns":
        return torch.zeros(pages, size, heads, 2 * dim, **like).split(dim, dim=3)
    if layout == "heads first":
        return torch.zeros(pages, 2, heads, size, dim, **like).transpose(2, 3).unbind(1)
    assert layout == "layers"
    return torch.zeros(pages, 3, 2, size, heads, dim, **like)[:, 1].unbind(1)


@pytest.mark.parametrize("layout", ["pages", "columns", "heads first", "layers"])
@pytest.mark.parametrize("page_size", [16, None])
def test_caches_between_each_other_s_elements(layout, page_size):
    problem = CacheProblem((20, 30), 2, (2, 2), heads_kv=2, group=2, page_size=page_size)
    call = make_call(problem)
    caches = interlaced(layout, call["k_cache"])
    for cache, name in zip(caches, ("k_cache", "v_cache"), strict=True):
        cache.copy_(call[name])
    given = call | {"k_cache": caches[0], "v_cache": caches[1]}
    out, lse = fa3.flash_attn_with_kvcache(**given, return_lse=True)
    check_call(call, out, lse, caches)


def test_a_cache_that_is_appended_to_must_not_overlap_itself():
    call = make_call(CacheProblem((3, 4), counts=(1, 1)))
    rows = call["k_cache"].shape[1]
    call["k_cache"] = torch.zeros(64 * rows * 2).bfloat16().as_strided(
        call["k_cache"].shape, (64 * (rows - 1), 64, 64, 1)
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"^k_cache must not overlap itself"):
        fa3.flash_attn_with_kvcache(**call)


# -------------------------------------------------------------------------------- the merge


def test_a_merge_over_its_parts():
    parts, lses = torch.randn(3, 2, 5, 4, 64), torch.randn(3, 2, 5, 4)
    for out in (parts[1], parts.view(-1)[64:][: parts[0].numel()].view(parts[0].shape)):
        with pytest.raises(ValueError, match=r"^out must not overlap out_partial: "):
            fa3.flash_attn_combine(parts, lses, out)
    out = torch.zeros_like(parts[0])
    with pytest.raises(ValueError, match=r"^out must not overlap itself"):
        fa3.flash_attn_combine(parts, lses, out.as_strided(out.shape, (1280, 256, 32, 1)))
    both = torch.randn(3, 2, 5, 4, 2, 64)
    both[..., 1, :] = 0
    merged, _ = fa3.flash_attn_combine(both[..., 0, :], lses, both[0, ..., 1, :])
    assert torch.equal(merged, fa3.flash_attn_combine(both[..., 0, :], lses)[0])


NUM_DRAWN = 4000
"""Random layouts, or pairs of them: hypothesis would take most of a test's time to draw so many."""


BY_SIZE = {1: torch.int8, 2: torch.bfloat16, 4: torch.float32}


def laid_out(shape: tuple, stride: tuple, itemsize: int) -> Operand:
    return Operand(shape, stride, BY_SIZE[itemsize], torch.device("cpu"))


def layouts(count: int = NUM_DRAWN) -> Iterator[Operand]:
    """Draw a few dimensions of any strides, and often nested ones with gaps."""
    draw = Random(0)
    for _ in range(count):
        shape = [draw.randint(0, 4) for _ in range(draw.randint(0, 4))]
        if draw.random() < 0.5:
            stride = [draw.randint(0, 20) for _ in shape]
        else:
            stride, step = [], 1
            for size in shape:
                stride.append(step * draw.randint(1, 3))
                step = stride[-1] * max(size, 1)
            order = draw.sample(range(len(shape)), len(shape))
            shape, stride = [shape[i] for i in order], [stride[i] for i in order]
        yield laid_out(tuple(shape), tuple(stride), draw.choice((1, 2, 4)))


def places(layout: Operand) -> list[int]:
    """Where each element begins, in bytes."""
    indices = itertools.product(*map(range, layout.shape))
    strides = layout.stride
    return [
        layout.dtype.itemsize * sum(i * s for i, s in zip(index, strides, strict=True))
        for index in indices
    ]


def bytes_of(layout: Operand) -> set[int]:
    return {place + byte for place in places(layout) for byte in range(layout.dtype.itemsize)}


def test_whatever_is_shared_is_found():
    drawn, draw = layouts(2 * NUM_DRAWN), Random(0)
    for first, second in zip(drawn, drawn, strict=True):
        mine, theirs = bytes_of(first), bytes_of(second)
        # From just before they meet until they have met.
        distance = draw.randint(-second.bytes - 1, first.bytes + 1)
        are_shared = any(byte + distance in mine for byte in theirs)
        assert share_bytes(first, second, distance) >= are_shared, (first, second, distance)


def test_views_of_one_buffer_are_told_apart():
    """Views with the strides of a buffer, at any place in it and of any sizes."""
    draw = Random(0)
    for _ in range(NUM_DRAWN):
        sizes = [draw.randint(1, 4) for _ in range(4)]
        strides = [1]
        for size in reversed(sizes[1:]):
            strides.insert(0, strides[0] * size)
        views, begins = [], []
        for _ in range(2):
            begin = [draw.randint(0, size - 1) for size in sizes]
            shape = [draw.randint(1, size - at) for size, at in zip(sizes, begin, strict=True)]
            views.append(laid_out(tuple(shape), tuple(strides), 2))
            begins.append(2 * sum(i * s for i, s in zip(begin, strides, strict=True)))
        distance = begins[1] - begins[0]
        theirs = {byte + distance for byte in bytes_of(views[1])}
        assert share_bytes(*views, distance) == bool(bytes_of(views[0]) & theirs), (views, distance)


def test_elements_in_the_same_place():
    for layout in layouts():
        in_place = places(layout)
        assert overlaps_itself(layout) >= (len(set(in_place)) < len(in_place)), layout
        assert layout.bytes == max(bytes_of(layout), default=-1) + 1, layout


PAGES, PAGE, NUM_HEADS, HEAD_DIM = 100_000, 16, 8, 128
ROW = NUM_HEADS * HEAD_DIM


@pytest.mark.parametrize(
    ("distance", "stride"),
    [
        # (pages, 2, page_size, heads, dim), (pages, page_size, heads, 2 * dim)
        (PAGE * ROW, (2 * PAGE * ROW, ROW, HEAD_DIM, 1)),
        (HEAD_DIM, (2 * PAGE * ROW, 2 * ROW, 2 * HEAD_DIM, 1)),
        # (pages, heads, 2, page_size, dim), as seen with tokens before heads
        (PAGE * HEAD_DIM, (2 * PAGE * ROW, HEAD_DIM, 2 * PAGE * HEAD_DIM, 1)),
    ],
)
def test_slots_of_real_buffers_are_told_apart(distance, stride):
    """Of a size at which nothing could be counted element by element."""
    cache = laid_out((PAGES, PAGE, NUM_HEADS, HEAD_DIM), stride, 2)
    assert not overlaps_itself(cache)
    assert not share_bytes(cache, cache, 2 * distance)
    assert all(share_bytes(cache, cache, 2 * (distance + step)) for step in (-1, 1))
    # A page of another cache, as one that is appended to could be taken for.
    assert share_bytes(
        cache, laid_out((1, PAGE, NUM_HEADS, HEAD_DIM), (1, ROW, HEAD_DIM, 1), 2), 4 * PAGE * ROW
    )


def test_keys_and_values_of_other_sizes_share_an_allocation():
    """Pages that begin with the keys and end with the values."""
    key_dim, page = 192, PAGE * NUM_HEADS * (192 + 128)
    keys = laid_out((PAGES, PAGE, NUM_HEADS, key_dim), (page, NUM_HEADS * key_dim, key_dim, 1), 2)
    values = laid_out((PAGES, PAGE, NUM_HEADS, HEAD_DIM), (page, ROW, HEAD_DIM, 1), 2)
    for wrong in (-1, 0, 1):
        assert share_bytes(keys, values, 2 * (PAGE * NUM_HEADS * key_dim + wrong)) == (wrong != 0)
