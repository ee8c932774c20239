"""`flash_attn_with_kvcache` on a Hopper GPU: sizes, memory, bits, streams and graphs."""

import math
from dataclasses import replace

import pytest
import torch
from gpu_checks import captured, forget_prepared_calls
from kvcache_problems import CacheProblem, make_call
from problems import DTYPES, poisoned_allocations
from reference import as_bits, check_call, dense
from test_kvcache_results import MODES, assert_same_bits, check, run
from valid_calls import changed
from varlen_problems import integers

from fa3.calls.attention import flash_attn_with_kvcache
from fa3.calls.combine import flash_attn_combine
from fa3.kernels.decode import Decode
from fa3.planning import decode as planning

# ------------------------------------------------------------------------------------- shapes


@pytest.mark.parametrize(
    ("head_dims", "mode", "dtype"),
    [
        *(((size, size), "stream", "bfloat16") for size in range(8, 257, 24)),
        *(
            (sizes, mode, tuple(DTYPES)[(i + j) % 2])
            for i, sizes in enumerate(((256, 256), (72, 200), (192, 128), (64, 256)))
            for j, mode in enumerate(list(MODES)[1:])
        ),
    ],
)
def test_head_dims(head_dims, mode, dtype, device):
    """What is left of 64 columns in all ways."""
    head_dim, head_dim_v = head_dims
    problem = CacheProblem((513, 3), 2, (2, 2), group=4, causal=True, dtype=dtype)
    problem = replace(problem, head_dim=head_dim, head_dim_v=head_dim_v)
    check(problem, device, **MODES[mode])


@pytest.mark.parametrize("page_size", [None, 16, 256])
@pytest.mark.timeout(600)
def test_long_sequences(page_size, device):
    sizes = {"head_dim": 128, "group": 8}
    for seqlen, num_splits in ((1 << 17, 16), (1 << 17, 1), (1 << 20, 0)):
        problem = CacheProblem((seqlen, 77), counts=(1, 1), page_size=page_size, **sizes)
        check(problem, device, num_splits=num_splits)


@pytest.mark.parametrize(
    ("options", "leftpads"), [({}, None), ({"num_splits": 3}, None), ({"num_splits": 1}, (5, 0, 3))]
)
def test_a_page_table_wider_than_32_bits_count(options, leftpads, device):
    """2,097,152 pages of 1,024 tokens make 2^31; of the sequences few are long."""
    problem = CacheProblem(
        (3000, 0, 1000), 2, (2, 2, 2), heads_kv=2, group=4, page_size=1024, leftpads=leftpads,
        causal=True, rotary=(64, True, "bfloat16"),
    )  # fmt: skip
    call = make_call(problem, device=device)
    check_call(call, *run(call | {"page_table": widened(call["page_table"])}, **options))


def widened(table: torch.Tensor) -> torch.Tensor:
    """Return a page table with 2^21 columns, of which those behind the given ones are no pages."""
    wide = table.new_full((table.shape[0], 1 << 21), -1)
    wide[:, : table.shape[1]] = table
    return wide


MANY = CacheProblem(tuple((37 * n) % 400 for n in range(1500)), group=4, heads_kv=2)
ROWS = CacheProblem((9000, 41, 0, 3333), 30, heads_kv=2, group=8, page_size=16, causal=True)
WINDOW = CacheProblem((5000, 300), 3, heads_kv=3, window=(1000, 0), leftpads=(7, 0), page_size=1)


@pytest.mark.parametrize(
    ("problem", "options"),
    [
        (MANY, {}),
        (ROWS, {}),
        (ROWS, {"num_splits": 1}),
        (ROWS, {"num_splits": 5}),
        (WINDOW, {"batch_invariant": True}),
    ],
    ids=["many", "rows", "whole", "splits", "window"],
)
def test_long_places_change_no_bit(problem, options, device, monkeypatch):
    call = make_call(problem, device=device)
    results = run(call, **options)
    loaded = []

    def with_long_places(*fields):
        loaded.append(replace(Decode(*fields), is_long=True))
        return loaded[-1]

    monkeypatch.setattr(planning, "Decode", with_long_places)
    forget_prepared_calls()
    try:
        assert_same_bits(results, run(call, **options))
    finally:
        forget_prepared_calls()
    assert loaded


@pytest.mark.timeout(600)
def test_more_key_blocks_than_32_bits_count(device):
    """133,120 tiles with 16,384 blocks each, 2.2e9 in all: one page, again and again."""
    generator = torch.Generator(device).manual_seed(0)
    batch, seqlen_q, repeats, page_size, head_dim = 65, 1 << 17, 1 << 10, 1 << 10, 8

    def normal(*shape):
        return torch.randn(shape, generator=generator, device=device).bfloat16()

    q = normal(batch, seqlen_q, 1, head_dim)
    k, v = (normal(1, page_size, 1, head_dim) for _ in range(2))
    pages = torch.zeros(batch, repeats, dtype=torch.int32, device=device)
    with poisoned_allocations():
        out, lse = flash_attn_with_kvcache(q, k, v, page_table=pages, return_lse=True)
    for sequence in (0, 1, 33, 64):
        rows = torch.arange(sequence, seqlen_q, 997, device=device)
        expected, expected_lse = dense(q[sequence, rows][None], k, v)
        torch.testing.assert_close(out[sequence, rows].double(), expected[0], rtol=2e-2, atol=5e-3)
        expected_lse = expected_lse[0] + math.log(repeats)
        torch.testing.assert_close(lse[sequence][:, rows].double(), expected_lse, rtol=0, atol=1e-2)


# --------------------------------------------------------------------------------- appending


@pytest.mark.parametrize("page_size", [None, 1, 48])
def test_a_long_prompt_is_appended(page_size, device):
    for counts, ragged in (((900, 0, 333), True), ((900, 900, 900), False)):
        problem = CacheProblem(
            (0, 70, 500), 8, counts, ragged, heads_kv=3, page_size=page_size, causal=True
        )
        check(problem, device)


@pytest.mark.parametrize("page_size", [None, 16])
def test_what_does_not_fit_the_cache_is_dropped(page_size, device):
    """Lengths on the GPU are not checked: they count as if cut to the cache."""
    problem = CacheProblem((30, 9, 0), 2, (4, 4, 4), page_size=page_size, room=0)
    call, capacity = make_call(problem, device=device), problem.capacity
    for name in ("k_cache", "v_cache"):
        call[name] = call[name].nan_to_num(1.0)
    if page_size is not None:
        pages = torch.arange(3 * (capacity // page_size), dtype=torch.int32, device=device)
        call["page_table"] = pages.view(3, -1)
        for name in ("k_cache", "v_cache"):
            call[name] = torch.randn(len(pages), page_size, 1, 64, device=device).bfloat16()
    call["cache_seqlens"] = integers(capacity - 1, capacity + 100, -5).to(device)
    check_call(call, *run(call))


@pytest.mark.parametrize(
    ("problem", "argument", "values"),
    [
        (
            CacheProblem((3, 4), 1, (2, 2), batch_idx=(1, 0), rows=2),
            "cache_batch_idx",
            integers(-1, 2),
        ),
        (
            CacheProblem((3, 4), 1, (2, 2), page_size=16),
            "page_table",
            integers(-1, 1 << 20).view(2, 1),
        ),
    ],
    ids=["rows", "pages"],
)
def test_tokens_without_a_place_are_dropped(problem, argument, values, device):
    call = changed(make_call(problem, device=device), {argument: values})
    _, _, caches = run(call)
    for name, cache in zip(("k_cache", "v_cache"), caches, strict=True):
        assert torch.equal(as_bits(cache), as_bits(call[name]))


def test_values_on_the_cpu_are_checked_and_used(device):
    problem = CacheProblem((30, 60), 2, (2, 2), batch_idx=(3, 1), rows=5, page_size=16)
    call = make_call(problem, device=device)
    names = ("cache_seqlens", "cache_batch_idx", "page_table")
    on_cpu = {name: call[name].cpu() for name in names}
    assert_same_bits(run(call), run(call | on_cpu))
    before = call["k_cache"].clone()
    too_long = on_cpu | {"cache_seqlens": on_cpu["cache_seqlens"] + 30}
    with pytest.raises(ValueError, match=r"^cache_seqlens must be from 0 to 80"):
        flash_attn_with_kvcache(**(call | too_long))
    assert torch.equal(as_bits(before), as_bits(call["k_cache"]))
    with pytest.raises(ValueError, match=r"^cache_seqlens must be on cuda.* or on the CPU"):
        flash_attn_with_kvcache(**(call | {"cache_seqlens": on_cpu["cache_seqlens"].to("meta")}))


# ------------------------------------------------------------------------- bits, and their peers


def test_rows_of_a_merge_that_many_groups_share(device):
    """16 groups work on each of 2^27 rows: 2^31 pairs. The parts are one and the same."""
    rows, parts = (1 << 27) + 5, 61
    part = torch.randn(1, 1, rows, 1, 8, device=device)
    lses = torch.zeros(1, 1, rows, 1, device=device)
    with poisoned_allocations():
        out, lse = flash_attn_combine(
            part.expand(parts, -1, -1, -1, -1), lses.expand(parts, -1, -1, -1),
            out_dtype=torch.bfloat16,
        )  # fmt: skip
    torch.testing.assert_close(out, part[0].bfloat16(), rtol=2**-7, atol=1e-6)
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(parts)), rtol=1e-5, atol=0.0)


# ------------------------------------------------------------------- streams, graphs and devices


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("mode", MODES)
def test_a_cuda_graph_goes_on_while_lengths_grow(page_size, mode, device):
    """Captured once; sequences grow to the end of the cache, and begin anew."""
    new = 13
    problem = CacheProblem(
        (0, 1, 300, 600), counts=(new,) * 4, heads_kv=2, group=4, page_size=page_size, room=39,
        head_dim=128, causal=True, rotary=(128, True, "bfloat16"),
    )  # fmt: skip
    call, names = make_call(problem, device=device), ("k_cache", "v_cache")
    if page_size is not None:
        pages = call["page_table"].numel()
        table = torch.randperm(pages, device=device).view(4, -1)
        call["page_table"] = table.to(torch.int32)
        for name in names:
            call[name] = torch.randn(pages, page_size, 2, 128, device=device).bfloat16()
    options = MODES[mode] | {"return_lse": True}
    flash_attn_with_kvcache(**call, **options)
    graph, (out, lse) = captured(lambda: flash_attn_with_kvcache(**call, **options))
    generator, lengths = torch.Generator(device).manual_seed(1), call["cache_seqlens"]
    for step in range(60):
        for name in ("q", "k", "v"):
            call[name].normal_(generator=generator)
        before, eager = (call | {name: call[name].clone() for name in names} for _ in range(2))
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        eager_out, eager_lse = flash_attn_with_kvcache(**eager, **options)
        assert torch.equal(out, eager_out) and torch.equal(lse, eager_lse)
        assert all(torch.equal(as_bits(call[name]), as_bits(eager[name])) for name in names)
        if step % 6 == 0:
            check_call(before, out, lse, tuple(call[name] for name in names))
        lengths.copy_((lengths + new).where(lengths + 2 * new <= problem.capacity, 0))


def test_calls_in_a_row_wait_for_each_other(device):
    """Layers one after another, each reading what the one before wrote: PDL must not overtake."""
    problem = CacheProblem((2000, 30, 500), counts=(1, 1, 1), heads_kv=2, group=1, page_size=16)
    call = make_call(problem, device=device)

    def layers(wait):
        caches = {name: call[name].clone() for name in ("k_cache", "v_cache")}
        lengths, outputs, x = call["cache_seqlens"].clone(), [], call["q"]
        for _ in range(30):
            token = x[:, :, :2].contiguous()
            arguments = {"q": x, "k": token, "v": token, "cache_seqlens": lengths.clone()}
            x = flash_attn_with_kvcache(**(call | caches | arguments))
            outputs.append(x)
            if wait:
                torch.cuda.synchronize()
        return torch.stack(outputs), caches

    out, caches = layers(wait=True)
    for _ in range(20):
        same_out, same_caches = layers(wait=False)
        assert torch.equal(out, same_out)
        for name, cache in caches.items():
            assert torch.equal(as_bits(cache), as_bits(same_caches[name]))
