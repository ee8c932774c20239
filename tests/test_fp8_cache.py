"""Caches in FP8, with queries in 16 bits and in FP8, on the CPU and on a Hopper GPU."""

import itertools
from collections import Counter
from dataclasses import replace

import pytest
import torch
from gpu_checks import captured
from hypothesis import given, settings
from hypothesis import strategies as st
from kvcache_problems import CacheProblem, make_call, random_problem
from machine_code import report_of
from pairs import places
from problems import poisoned_allocations
from reference import Expected, check_out, expected
from varlen_problems import note_attending

from fa3 import flash_attn_varlen_func, get_scheduler_metadata
from fa3.calls import prepare
from fa3.calls.attention import flash_attn_with_kvcache
from fa3.kernels.append import Append
from fa3.kernels.decode import Decode
from fa3.kernels.forward import Forward
from fa3.planning import routes
from fa3.planning.costs import H200
from fa3.planning.decode import DecodePlan, config_of
from fa3.planning.tilings import converting_tiling
from fa3.primitives.cache_blocks import CacheLayout
from fa3.primitives.fp8_blocks import ConvertedPipeline
from fa3.primitives.shared_memory import CAPACITY, padded
from fa3.problem import AttentionSpec, Problem, Window
from fa3.schedules.ragged import RaggedTiles
from fa3.schedules.stream_k import CtaGroups, StreamK
from fa3.scores.masks import Band

FP8 = torch.float8_e4m3fn
MOST = torch.finfo(FP8).max
CACHES = "k_cache", "v_cache"
DESCALES = "k_descale", "v_descale"
DTYPES = "bfloat16", "float16"


def in_fp8(tensor: torch.Tensor, scales: torch.Tensor | float = 1.0) -> torch.Tensor:
    """Divide by scales (heads, 1), and round to FP8."""
    return (tensor.float() / scales).clamp(-MOST, MOST).to(FP8)


def in_two_types(problem: CacheProblem, seed=0, where="cpu", has_fp8_q=False) -> tuple[dict, dict]:
    """Draw a call on an FP8 cache, and the same call with all tensors as they count."""
    call = make_call(problem, seed, where)
    generator = torch.Generator().manual_seed(seed)
    exact = dict(call)
    for cache, new, name in zip(CACHES, "kv", DESCALES, strict=True):
        heads = problem.heads_kv
        scales = (torch.rand(heads, 1, generator=generator) + 0.5).to(where)
        call[cache] = in_fp8(call[cache], scales)
        exact[cache] = call[cache].double() * scales
        if new in call:
            exact[new] = in_fp8(call[new], scales).double() * scales
        call[name] = scales.T.expand(problem.batch, heads)
    if has_fp8_q:
        call["q"] = in_fp8(call["q"])
        scales = torch.rand(problem.heads_kv, generator=generator).to(where) + 0.5
        call["q_descale"] = scales.expand(problem.batch, problem.heads_kv)
        exact["q"] = call["q"].double() * scales.repeat_interleave(problem.group)[:, None]
    return call, exact


def attend(call: dict, **options):
    """Call into NaN memory on copies of the caches; return out, LSE and the caches."""
    copies = {name: call[name].clone() for name in CACHES}
    with poisoned_allocations():
        out, lse = flash_attn_with_kvcache(**call | copies | options, return_lse=True)
    return out, lse, copies


def check_results(exact: dict, out: torch.Tensor, lse: torch.Tensor) -> Expected:
    """Assert that the error is at most twice the error of the same computation in out's dtype."""
    right = expected(**exact)
    check_out(out, right.out, expected(**exact, dtype=out.dtype).out)
    tolerance = 1e-4 + 2.0**-10 * exact.get("softcap", 0.0)
    torch.testing.assert_close(lse.double(), right.lse, rtol=1e-6, atol=tolerance)
    return right


def check(problem: CacheProblem, where="cpu", seed=0, has_fp8_q=False, **options) -> None:
    call, exact = in_two_types(problem, seed, where, has_fp8_q)
    out, lse, caches = attend(call, **options)
    assert out.dtype == (torch.bfloat16 if has_fp8_q else call["q"].dtype)
    right = check_results(exact, out, lse)
    for name, descale in zip(CACHES, DESCALES, strict=True):
        codes = (getattr(right, name) / call[descale][0][:, None]).float().to(FP8)
        assert torch.equal(caches[name].view(torch.uint8), codes.view(torch.uint8)), name


def fp8_problem(seed: int, dtype: str, family: int, **rest) -> CacheProblem:
    """Draw a problem with head sizes that FP8 caches can have, without a rotary embedding."""
    problem = random_problem(seed, dtype, family, **rest)
    if problem.head_dim % 16 or problem.columns_v % 16:
        problem = replace(problem, head_dim=48, head_dim_v=32)
    return replace(problem, rotary=None)


@settings(max_examples=40)
@given(st.integers(0, 1 << 32), st.sampled_from(DTYPES), st.booleans())
def test_random_calls(seed, dtype, has_fp8_q):
    problem = fp8_problem(seed, dtype, seed, lengths=(0, 1, 20, 300))
    if has_fp8_q:
        problem = replace(problem, counts=None, ragged=False, sinks=None)
    check(problem, seed=seed, has_fp8_q=has_fp8_q)


@pytest.mark.gpu
@pytest.mark.parametrize("family", range(16))
def test_random_calls_on_a_gpu(family, device):
    for seed in range(9):
        check(fp8_problem(100 * family + seed, DTYPES[family % 2], family), device, seed)


HEAD_DIMS = [(64, 64), (80, 96), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256), (16, 32)]


FP8_PAGES = None, 1, 3, 16, 64, 256


@places(
    "head_dim,head_dim_v,page_size",
    cpu=[(*HEAD_DIMS[n % 8], FP8_PAGES[n % 6]) for n in range(24)],
    gpu=[
        *((128, 128, page_size) for page_size in FP8_PAGES),
        *((*dims, page_size) for dims in HEAD_DIMS if dims != (128, 128) for page_size in (3, 64)),
    ],
)
def test_head_sizes_and_pages(head_dim, head_dim_v, page_size, where):
    problem = CacheProblem(
        (700, 3, 0, 299, 4100), 3, heads_kv=2, group=4, head_dim=head_dim, head_dim_v=head_dim_v,
        page_size=page_size, causal=True,
    )  # fmt: skip
    check(problem, where)


CALLS = {
    "appends": CacheProblem((0, 63, 1000), 2, (2, 2, 2), heads_kv=2, group=4, head_dim=128),
    "appends many": CacheProblem((9, 64), 5, (5, 0), True, heads_kv=2, group=4, page_size=16),
    "left padding": CacheProblem((200, 500), 2, heads_kv=2, group=2, leftpads=(63, 500)),
    "padded pages": CacheProblem((200, 500), heads_kv=2, leftpads=(63, 100), page_size=16),
    "rows": CacheProblem((200, 90), heads_kv=2, group=8, batch_idx=(3, 0), rows=5),
    "window": CacheProblem((3000, 500), 4, heads_kv=2, group=4, window=(300, 0), page_size=64),
    "softcap": CacheProblem((700,), 2, heads_kv=2, group=4, softcap=15.0, causal=True),
    "alibi, sinks": CacheProblem((700, 5), 2, heads_kv=2, group=4, alibi=1, sinks="float32"),
    "chunk": CacheProblem((300, 90), 300, (300, 9), True, group=2, causal=True, page_size=64),
}


@pytest.mark.parametrize(
    ("name", "has_fp8_q"),
    [
        (name, has_fp8_q)
        for name, problem in CALLS.items()
        for has_fp8_q in ((False, True) if problem.counts is None else (False,))
    ],
)
def test_options(name, has_fp8_q, where):
    check(CALLS[name], where, has_fp8_q=has_fp8_q)


def test_cuts(where):
    for options in ({"num_splits": 1}, {"num_splits": 3}, {"sm_margin": 100}):
        check(CacheProblem((4000, 3, 700), heads_kv=2, group=4, head_dim=128), where, **options)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_results_are_those_of_the_converted_cache(head_dim, dtype, where):
    """With q and the cache in fp16, only the order of sums differs."""
    problem = CacheProblem((5000, 64, 130), 2, heads_kv=2, group=4, head_dim=head_dim, dtype=dtype)
    call = make_call(problem, 0, where)
    codes = {name: in_fp8(call[name]) for name in CACHES}
    wide = {"q": call["q"].half()} | {name: codes[name].half() for name in CACHES}
    for num_splits in (1, 4):
        out, lse, _ = attend(call | codes, num_splits=num_splits)
        other, other_lse, _ = attend(call | wide, num_splits=num_splits)
        torch.testing.assert_close(lse, other_lse, rtol=1e-6, atol=1e-5)
        if dtype == "float16":
            torch.testing.assert_close(out, other, rtol=2.0**-9, atol=2.0**-12)


def test_scales_of_sequences(where):
    """They may differ by sequence and by head, and be expanded from one."""
    problem = CacheProblem((300, 70, 128), heads_kv=2, group=4, head_dim=128)
    call, exact = in_two_types(problem, 0, where)
    scales = torch.rand(2, 3, 2, device=where) + 0.5
    for cache, one, name in zip(CACHES, scales, DESCALES, strict=True):
        call[name], exact[cache] = one, call[cache].double() * one[:, None, :, None]
    check_results(exact, *attend(call)[:2])
    for name in DESCALES:
        call[name] = torch.tensor(2.0, device=where).expand(3, 2)
    exact |= {name: call[name].double() * 2 for name in CACHES}
    check_results(exact, *attend(call)[:2])
    del call["k_descale"], call["v_descale"]
    exact |= {name: call[name].double() for name in CACHES}
    check_results(exact, *attend(call)[:2])


def test_queries_of_any_size(where):
    """bf16 holds what fp16 does not."""
    problem = CacheProblem((300, 70), heads_kv=2, group=4, head_dim=128)
    for size in (1e30, 4e4, 1e-6):
        call, exact = in_two_types(problem, 0, where)
        call["q"] = exact["q"] = call["q"] * size
        call["softmax_scale"] = exact["softmax_scale"] = 0.1 / size
        check_results(exact, *attend(call)[:2])


HARD = {
    "needle": lambda k, q: k.index_copy(1, torch.tensor([40_000], device=k.device), 2 * q[:, :1]),
    "growing": lambda k, q: k * torch.linspace(0.1, 4, k.shape[1], device=k.device)[:, None, None],
    "outliers": lambda k, q: k + 10 * k.roll(1, 1) * (k.roll(2, 1) > 3),
    "large": lambda k, q: 8 * k,
}
"""By name: what is done to the keys."""


def test_hard_data(where):
    """The error stays at the error of 16 bits on the same numbers, also with a sink of 20."""
    for name in HARD:
        keys = (1 << 17) - 3 if name == "needle" else 5000
        problem = CacheProblem((keys,), heads_kv=1, group=2, head_dim=64, sinks="float32", room=0)
        call, exact = in_two_types(problem, 0, where)
        q = call["q"][:, :, :1].float()
        call["k_cache"] = in_fp8(HARD[name](call["k_cache"].float(), q))
        exact["k_cache"] = call["k_cache"].double() * call["k_descale"][0][:, None]
        call["sinks"] = exact["sinks"] = torch.tensor([0.0, 20.0], device=where)
        check_results(exact, *attend(call)[:2])


def test_values_beyond_the_range_are_limited(where):
    """Also by a small scale; infinities become the largest number, and NaN stays."""
    problem = CacheProblem((10,), 1, (6,), heads_kv=1, head_dim=64)
    call = make_call(problem, 0, where)
    call |= {name: in_fp8(call[name]) for name in CACHES}
    row = torch.tensor([500.0, -500.0, torch.inf, -torch.inf, 448.0, 1e-9], device=where)
    call["k"] = row[None, :, None, None].expand(1, 6, 1, 64).bfloat16()
    call["v"] = call["k"].contiguous()
    call["k"] = call["k"].contiguous()
    call |= {"k_descale": torch.full((1, 1), 1e-3, device=where)}
    _, _, caches = attend(call)
    found = caches["k_cache"][0, 10:16, 0, 0].float().tolist()
    assert found == [448.0, -448.0, 448.0, -448.0, 448.0, 0.0]
    assert caches["v_cache"][0, 10:16, 0, 0].float().tolist() == found


@pytest.mark.parametrize("interleaved", [True, False])
def test_keys_are_turned_before_they_are_rounded(interleaved, where):
    """As if the keys were appended in 16 bits and then quantized."""
    problem = CacheProblem(
        (20, 3), 1, (4, 4), heads_kv=2, group=2, head_dim=64, rotary=(32, interleaved, "bfloat16"),
        causal=True,
    )  # fmt: skip
    call = make_call(problem, 0, where)
    scales = torch.tensor([[0.5, 0.03], [1.7, 0.2]], device=where)
    caches = {name: torch.zeros_like(call[name]) for name in CACHES}
    _, _, wide = attend(call | caches)
    options = {"k_descale": scales, "v_descale": scales}
    out, lse, narrow = attend(call | {name: caches[name].to(FP8) for name in CACHES} | options)
    for name in CACHES:
        codes = in_fp8(wide[name], scales[:, None, :, None])
        assert torch.equal(narrow[name].view(torch.uint8), codes.view(torch.uint8))
    assert out.isfinite().all() and lse.isfinite().all()


def test_packed_queries_on_pages(where):
    """As vLLM calls: a prompt, sequences that decode, and the metadata of the step."""
    problem = CacheProblem((600, 90, 40), 1, heads_kv=2, group=4, head_dim=128, page_size=16)
    counts = [33, 1, 1]
    call, exact = in_two_types(replace(problem, causal=True), 0, where)
    q = torch.randn(sum(counts), 8, 128, device=where).bfloat16()
    ends = torch.tensor([0, 33, 34, 35], dtype=torch.int32, device=where)
    shared = {name: call[name] for name in DESCALES}
    metadata = get_scheduler_metadata(
        3, 33, call["page_table"].shape[1] * 16, 8, 2, 128, call["cache_seqlens"], FP8,
        cu_seqlens_q=ends, page_size=16, causal=True,
    )  # fmt: skip
    for given_metadata in (None, metadata):
        out = flash_attn_varlen_func(
            q, call["k_cache"], call["v_cache"], ends, None, 33, call["page_table"].shape[1] * 16,
            seqused_k=call["cache_seqlens"], page_table=call["page_table"], causal=True,
            scheduler_metadata=given_metadata, **shared,
        )  # fmt: skip
        check_sequences(exact, q, ends, out)


def check_sequences(exact: dict, q: torch.Tensor, ends: torch.Tensor, out: torch.Tensor) -> None:
    """Assert that packed queries attend to their sequences' keys, the last to all of them."""
    by_row = ("cache_seqlens", *(("page_table",) if "page_table" in exact else CACHES))
    for n, (begin, end) in enumerate(itertools.pairwise(ends.tolist())):
        one = {name: exact[name] for name in CACHES} | {"q": q[None, begin:end], "causal": True}
        one |= {name: exact[name][n : n + 1] for name in by_row}
        check_out(out[None, begin:end], expected(**one).out, expected(**one, dtype=out.dtype).out)


# (head_dim, head_dim_v, page size); None for a cache without pages.
PROMPTS = [(64, 64, 128), (128, 128, 64), (128, 128, None), (128, 128, 16), (96, 96, 8)]
WIDE_PROMPTS = [
    (192, 128, 64), (192, 192, 16), (256, 256, 64), (64, 256, 64), (256, 64, None),
    # A block has fewer rows than the warps convert at once.
    (256, 224, 64), (224, 256, 16),
]  # fmt: skip


@places(
    "head_dim,head_dim_v,page_size,dtype",
    cpu=[(*PROMPTS[n], DTYPES[n % 2]) for n in range(4)],
    gpu=[
        (*PROMPTS[1], DTYPES[0]),
        *((*sizes, DTYPES[n % 2]) for n, sizes in enumerate(PROMPTS + WIDE_PROMPTS)),
    ],
)
def test_prompts(head_dim, head_dim_v, page_size, dtype, where):
    """The forward kernel serves them; in fp16 and without descales bits are those of fp16."""
    for lengths in [(700, 401, 64)] if where == "cpu" else [(5000, 4001, 64), (9000,)]:
        check_prompts(head_dim, head_dim_v, page_size, lengths, dtype, where)


def check_prompts(head_dim, head_dim_v, page_size: int | None, lengths, dtype: str, where) -> None:
    """Check packed queries on sequences of these lengths."""
    problem = CacheProblem(
        lengths, heads_kv=2, group=2, head_dim=head_dim, head_dim_v=head_dim_v,
        page_size=page_size, causal=True, dtype=dtype,
    )  # fmt: skip
    call, exact = in_two_types(problem, 0, where)
    counts = torch.tensor([min(260 - 100 * n, length) for n, length in enumerate(lengths)])
    ends = torch.cat([torch.zeros(1), counts.cumsum(0)]).to(where, torch.int32)
    used = int(counts.sum())
    shape = used + 40, problem.heads_kv * problem.group, head_dim
    packed = {"q": torch.randn(shape, device=where).to(call["q"].dtype), "cu_seqlens_q": ends}
    # Rows that are no sequence's may hold anything, also next to a tile's last rows.
    packed["q"][used:] = torch.finfo(packed["q"].dtype).max
    packed["max_seqlen_q"] = int(counts.max())
    out, _, _ = attend(call | packed, num_splits=0)
    check_sequences(exact, packed["q"], ends, out)
    if dtype == "float16" and (head_dim, head_dim_v, page_size) in PROMPTS:
        packed |= dict.fromkeys(DESCALES)
        wide = {name: call[name].to(packed["q"].dtype) for name in CACHES}
        results = [attend(call | packed | caches, num_splits=0)[:2] for caches in ({}, wide)]
        # Sequences with few queries are the decode kernel's.
        for mine, other in zip(*results, strict=True):
            dim = 0 if mine.ndim == 3 else 1
            mine, other = (x.narrow(dim, 0, int(ends[min(2, len(counts))])) for x in (mine, other))
            assert torch.equal(mine, other)


@pytest.mark.gpu
@pytest.mark.parametrize("in_fp8", [True, False])
def test_graphs_read_lengths_and_scales_when_they_run(in_fp8, device):
    """The call before writes the lengths, when CTAs of this one have already read them."""
    problem = CacheProblem((900, 300), heads_kv=2, group=4, head_dim=128, room=0)
    make = in_two_types if in_fp8 else lambda *args: (make_call(*args),) * 2
    call, exact = make(problem, 0, device)
    scales = DESCALES if in_fp8 else ()
    call |= {name: call[name].contiguous() for name in scales}
    # All its values are the lengths, read as fp16 numbers, and so is its output.
    keys = torch.zeros(1, 30000, 1, 64, dtype=torch.float16, device=device)
    values, written = keys.clone(), keys[:, :1].clone()
    call["cache_seqlens"] = written.view(torch.int32).flatten()[:2]

    def both():
        flash_attn_with_kvcache(keys[:, :1], keys, values, out=written)
        return flash_attn_with_kvcache(**call, return_lse=True)

    both()
    graph, (out, lse) = captured(both)
    lengths = torch.tensor([100, 299], dtype=torch.int32, device=device)
    values[..., :4] = lengths.view(torch.float16)
    for cache, name in zip(CACHES, scales, strict=False):
        call[name].mul_(1.5)
        exact[cache] = exact[cache] * 1.5
    for _ in range(3):
        out.fill_(torch.nan)
        call["cache_seqlens"].fill_(7)
        graph.replay()
        assert torch.equal(call["cache_seqlens"], lengths)
        check_results(exact | {"cache_seqlens": lengths}, out, lse)


def test_torch_compile_keeps_the_call(where):
    problem = CacheProblem((300, 70), heads_kv=2, group=4, head_dim=128)
    call, exact = in_two_types(problem, 0, where)
    compiled = torch.compile(
        lambda: flash_attn_with_kvcache(**call, return_lse=True), backend="aot_eager"
    )
    check_results(exact, *compiled())


@pytest.mark.parametrize("has_fp8_q", [False, True], ids=["16-bit q", "fp8 q"])
def test_packed_output_of_the_callers(has_fp8_q, where):
    """It is bfloat16, also for queries in FP8; an FP8 output would have half of its bytes."""
    problem = CacheProblem((300, 70), 1, heads_kv=2, group=4, head_dim=128, page_size=16)
    call, _ = in_two_types(problem, 0, where, has_fp8_q)
    call["q"], counts = call["q"].flatten(0, 1), torch.arange(3, dtype=torch.int32, device=where)
    of_cache = call | {"cu_seqlens_q": counts, "max_seqlen_q": 1}
    shared = {name: one for name, one in call.items() if name.endswith("descale") or name == "q"}
    packed = shared | {"k": call["k_cache"], "v": call["v_cache"], "cu_seqlens_q": counts}
    packed |= {"seqused_k": call["cache_seqlens"], "page_table": call["page_table"]}
    packed |= {"cu_seqlens_k": None, "max_seqlen_q": 1, "max_seqlen_k": 300}
    for function, one in ((flash_attn_with_kvcache, of_cache), (flash_attn_varlen_func, packed)):
        right = function(**one)
        out = torch.full_like(right, torch.nan)
        assert function(**one, out=out) is out and torch.equal(out, right)
        for dtype in (FP8, torch.float16):
            with pytest.raises(TypeError, match=r"^out must be torch\.bfloat16"):
                function(**one, out=out.to(dtype))


@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), (256, 256), (192, 128)], ids=str)
def test_prompts_with_fp8_queries(head_dims, where, monkeypatch):
    """Their queries become 16-bit ones, and attend in the forward kernel. Sequences of a call with
    packed queries have them together; options that keep to the decode kernel leave them FP8."""
    monkeypatch.setattr(routes, "LITTLE_WORK", 0)
    prepare.prepare_call.cache_clear()
    lengths = (300, 7, 90)
    problem = CacheProblem(lengths, 100, None, False, "bfloat16", 2, 4, *head_dims, 64, causal=True)
    call, exact = in_two_types(problem, 0, where, has_fp8_q=True)
    attending = note_attending(monkeypatch)
    out, lse, _ = attend(call)
    check_results(exact, out, lse)
    ends = torch.tensor([0, 100, 101, 180], dtype=torch.int32, device=where)
    packed = call | {"cu_seqlens_q": ends, "max_seqlen_q": 100}
    packed["q"] = torch.cat([call["q"][n, 100 - count :] for n, count in enumerate((100, 1, 79))])
    packed_out, packed_lse, _ = attend(packed)
    assert attending == ["forward", "beside", "forward"]
    for n, (begin, end) in enumerate(itertools.pairwise(ends.tolist())):
        rows = slice(100 - (end - begin), None)
        torch.testing.assert_close(packed_out[begin:end], out[n, rows], rtol=2e-2, atol=1e-2)
        torch.testing.assert_close(packed_lse[:, begin:end], lse[n, :, rows], rtol=1e-3, atol=1e-3)
    check_results(exact, *attend(call, num_splits=1)[:2])
    assert attending[3:] == [100]


def test_calls_first_met_in_a_capture_make_their_own_scales(monkeypatch):
    """Memory of a graph is written when the graph runs, which may be after other calls."""
    call, exact = make_fp8_call((31, 7, 9, 2, 5), "cpu")
    with monkeypatch.context() as capture:
        capture.setattr(prepare, "is_capturing", lambda device: True)
        check_results(exact, *attend(call)[:2])
        scales = prepare.scales_on(torch.device("cpu"), 3, False)
    check_results(exact, *attend(call)[:2])
    one, other = (scales(2)[0] for _ in range(2))
    assert one.data_ptr() != other.data_ptr() and one.shape == (2, 3)


@pytest.mark.gpu
def test_a_captured_call_without_scales_leaves_later_calls_right(device):
    """Also before the graph runs, and after it is gone."""
    attend(make_fp8_call((300, 70), device)[0])
    call, exact = make_fp8_call((300, 70, 5), device)
    graph, (out, lse) = captured(lambda: flash_attn_with_kvcache(**call, return_lse=True))
    check_results(exact, *attend(call)[:2])
    graph.replay()
    check_results(exact, out, lse)
    del graph, out, lse
    check_results(exact, *attend(call)[:2])


def make_fp8_call(lengths: tuple[int, ...], where) -> tuple[dict, dict]:
    """Return a call without descales, and the same call with the caches in float64."""
    call, exact = in_two_types(CacheProblem(lengths, heads_kv=2, group=4, head_dim=128), 0, where)
    exact |= {name: call[name].double() for name in CACHES}
    return {name: one for name, one in call.items() if name not in DESCALES}, exact


# ------------------------------------------------------------------------------- machine code

KERNELS = {
    "128": (128, 128, 16, 0, CtaGroups, False),
    "192-128": (192, 128, 16, 64, StreamK, False),
    "256": (256, 256, 64, 16, StreamK, False),
    "64, page 1": (64, 64, 16, 1, StreamK, True),
}


@pytest.mark.compiles
@pytest.mark.parametrize("name", KERNELS)
def test_machine_code(name):
    """No register spills, and e4m3 becomes fp16 in one instruction for two values."""
    head_dim, head_dim_v, rows, page_size, cut, has_fp8_q = KERNELS[name]
    spec = AttentionSpec("bfloat16", head_dim, head_dim_v, Band(right=True))
    cache = CacheLayout(page_size, is_fp8=True)
    kernel = Decode(spec, config_of(spec, cache, cut, rows), 4, cache, cut, has_fp8_q=has_fp8_q)
    report = report_of(kernel, kernel.config.ctas_of_sm)
    assert report.threads == kernel.threads
    assert report.count("F2FP.F16.E4M3.UNPACK_B") > 0
    if kernel.converts:
        consumer, others = kernel.registers
        # Otherwise setmaxnreg would wait for ever: each scheduler has one warp of consumers.
        warps = kernel.threads // 128
        assert consumer + (warps - 1) * others <= warps * report.registers
    else:
        # Q K^T and P V stand in the loops, before them or behind.
        assert report.count("HMMA.16816.F32") == 3 * (padded(head_dim) + padded(head_dim_v)) // 8


@pytest.mark.compiles
def test_machine_code_of_append():
    kernel = Append("bfloat16", 128, 128, True, False, False, None, fp8=True)
    assert report_of(kernel).count("F2FP.SATFINITE.E4M3") > 0


def test_two_ctas_share_an_sm_where_they_fit():
    """With few rows one is alone on its SM."""
    for head_dim, most in ((64, 2), (96, 2), (128, 2), (192, 1), (256, 1)):
        spec = AttentionSpec("bfloat16", head_dim, head_dim, Band())
        for page_size, rows, cut in itertools.product((0, 64, 1), (16, 17), (CtaGroups, StreamK)):
            cache = CacheLayout(page_size, is_fp8=True)
            config, shares = config_of(spec, cache, cut, rows), page_size != 1 and rows == 16
            assert config.keys_by_warp == shares and (config.converted_stages == 0) == shares
            assert config.ctas_of_sm == (most if page_size != 1 and not shares else 1)
            assert config.ctas_of_sm * config.smem_bytes(spec) <= CAPACITY
            assert not shares or 2 * config.smem_bytes(spec) > CAPACITY
            problem = Problem(spec, 1, rows, 8192, 8, 1, Window())
            for layout, count in ((cache, 132 * config.ctas_of_sm), (CacheLayout(), 132)):
                assert DecodePlan.of(problem, H200, layout).num_ctas == count


@pytest.mark.compiles
@pytest.mark.parametrize(
    ("head_dims", "page_size", "dtype"),
    [((64, 64), 64, "float16"), ((128, 128), 64, "bfloat16"), ((224, 256), 16, "float16")]
    + [((256, 256), 16, dtype) for dtype in ("bfloat16", "float16")],
    ids=str,
)
def test_forward_kernel_converts(head_dims, page_size, dtype, monkeypatch):
    """To fp16, by one instruction for two values. Warps acquire all stages that they commit."""
    calls = Counter()
    for method in (ConvertedPipeline.producer_acquire, ConvertedPipeline.producer_commit):

        def counted(pipe, state, method=method):
            calls[method] += 1
            method(pipe, state)

        monkeypatch.setattr(ConvertedPipeline, method.__name__, counted)
    spec = AttentionSpec(dtype, *head_dims, Band(right=True))
    cache = CacheLayout(page_size, is_fp8=True)
    report = report_of(Forward(spec, converting_tiling(spec), RaggedTiles, cache=cache))
    assert report.count("F2FP.F16.E4M3.UNPACK_B") > 0 and report.count("HADD2.F32") == 0
    assert len(calls) == 2 and len(set(calls.values())) == 1


def test_tilings_of_the_forward_kernel_on_fp8_caches_fit():
    for head_dim, head_dim_v in itertools.product(range(16, 257, 16), repeat=2):
        spec = AttentionSpec("bfloat16", head_dim, head_dim_v, Band(right=True))
        config = converting_tiling(spec)
        config.validate(spec, has_fp8_cache=True)
        assert config.tile_n >= (128 if max(head_dim, head_dim_v) <= 128 else 32)
