"""Lengths that the host knows, on a Hopper GPU: tables, bits, streams, graphs, other lengths."""

import copy
import pickle
import random
from dataclasses import replace

import pytest
import torch
from free_counters import used_counters
from problems import poisoned_allocations
from test_known_lengths import (
    MIXED,
    cached_call,
    known,
    metadata_of,
    metadata_of_cache,
    on_host,
    records_of,
)
from varlen_problems import (
    VarlenProblem,
    check_varlen,
    integers,
    make_call,
    random_problem,
    unused,
)

from fa3 import flash_attn_varlen_func, flash_attn_with_kvcache
from fa3.kernels.tile_table import TileTable
from fa3.planning.host_table import TableKind
from fa3.planning.ragged import capacity_of_table, shift_of_work, words_of_table
from fa3.problem import Window
from fa3.running.compiler import load_kernel
from fa3.schedules.ragged import CTAS_BESIDE
from fa3.scores.masks import Band

pytestmark = pytest.mark.gpu

FAMILIES = 14
"""Sets of options that change the generated code; the dtypes take turns."""

DTYPES = "bfloat16", "float16"

SKEWED = VarlenProblem(
    (700, 5, 0, 1300, 130, 64), (700, 900, 3, 1300, 4000, 64), heads_kv=2, group=2, causal=True,
    head_dim=128, head_dim_v=128,
)  # fmt: skip

CHUNK = VarlenProblem((500,), (9000,), group=8, causal=True, head_dim=128, head_dim_v=128)
"""Has few tiles, which metadata cuts."""


def on_cpu(call: dict) -> dict:
    """The call with its lengths on the CPU, as metadata wants them."""
    return {
        name: value.cpu().clamp(min=0)
        if name.startswith(("cu_seq", "seqused", "cache_seq"))
        else value
        for name, value in call.items()
    }


def made_for(call: dict, **options):
    return metadata_of(on_cpu(call), **options)


def run(call: dict, **given):
    """Call into NaN memory."""
    with poisoned_allocations():
        return flash_attn_varlen_func(**call, **given, return_lse=True)


@pytest.mark.parametrize("seed", range(2 * FAMILIES))
def test_calls_have_the_bits_of_calls_without(seed, device):
    """Problems of `test_varlen_gpu`, whose kernels are there."""
    problem = random_problem(seed, DTYPES[seed % 2], seed % FAMILIES, 40 if seed % 3 else 700)
    problem = replace(problem, spare=0)
    call = make_call(problem, seed, device)
    out, lse = run(call)
    rows = ~unused(problem, len(out), device)
    metadata = made_for(call, num_splits=1)
    # Three layers, and a call that plans by itself.
    for given in (*[{"scheduler_metadata": metadata}] * 3, on_host(on_cpu(call))):
        again, of_again = run(call, **given)
        assert torch.equal(again[rows], out[rows])
        assert torch.equal(of_again[:, rows], lse[:, rows])
    assert not used_counters()


@pytest.mark.parametrize("problem", [SKEWED, MIXED], ids=["skewed", "mixed"])
def test_results_are_those_of_dense_attention(problem, device):
    call = make_call(problem, 0, device)
    out, lse = run(call, scheduler_metadata=made_for(call))
    check_varlen(problem, call, out, lse)


@pytest.mark.parametrize("problem", [SKEWED, CHUNK], ids=["skewed", "chunk"])
def test_rows_whose_reference_fails_are_computed_again(problem, device):
    """Tiles are whole, and cut."""
    call = make_call(problem, 0, device)
    call["q"][::3] *= 40
    metadata = made_for(call)
    for _ in range(3):
        out, lse = run(call, scheduler_metadata=metadata)
        check_varlen(problem, call, out, lse)
    assert not used_counters()


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("short", [0, 32])
def test_the_table_is_that_of_the_kernel(seed, short, device):
    problem = random_problem(seed, "bfloat16", seed, longest=(40, 700, 3000)[seed % 3])
    problem = replace(problem, used_q=None, used_k=None, spare=0)
    window = Window(problem.window[0], 0 if problem.causal else problem.window[1])
    window = window.tighten(1 << 29, 1 << 29)
    kind = TableKind(128, 96, Band.of(window), window, short, problem.group, 132)
    call = make_call(problem, 0, device)
    ends = call["cu_seqlens_q"], call["cu_seqlens_k"]
    totals = len(call["q"]), len(call["k"])
    capacity = capacity_of_table(totals[0], len(ends[0]) - 1, kind.tile_m)
    table = torch.full((words_of_table(capacity),), -7, dtype=torch.int32, device=device)
    shift = shift_of_work(max(1, call["max_seqlen_k"]), kind.tile_n)
    kernel = load_kernel(TileTable(kind.tile_m, kind.tile_n, kind.band, False, False))
    kernel(*ends, None, None, table, *totals, capacity, shift, *window, short, problem.group, 132)
    found, own = table.cpu().numpy(), known(problem).make(kind)
    assert sorted(records_of(found)) == sorted(records_of(own))
    assert abs(int(found[CTAS_BESIDE]) - int(own[CTAS_BESIDE])) <= 1


def test_two_streams_at_once(device):
    call = make_call(SKEWED, 0, device)
    expected = run(call)
    metadata = made_for(call)
    torch.cuda.synchronize()
    streams, found = [torch.cuda.Stream(device) for _ in range(3)], []
    for turn in range(60):
        with torch.cuda.stream(streams[turn % 3]):
            found.append(
                flash_attn_varlen_func(**call, scheduler_metadata=metadata, return_lse=True)
            )
    torch.cuda.synchronize()
    for pair in found:
        assert all(map(torch.equal, pair, expected))
    assert not used_counters()


def test_captured_graphs(device):
    """Two graphs of three layers share a table, replayed beside each other and plain calls."""
    call = make_call(SKEWED, 0, device)
    expected, _ = run(call)
    metadata = made_for(call)
    run(call, scheduler_metadata=metadata)
    torch.cuda.synchronize()
    graphs, outs = [torch.cuda.CUDAGraph() for _ in range(2)], []
    for graph in graphs:
        with torch.cuda.graph(graph):
            outs += [flash_attn_varlen_func(**call, scheduler_metadata=metadata) for _ in range(3)]
    del metadata
    streams = [torch.cuda.Stream(device) for _ in graphs]
    for _ in range(20):
        for out in outs:
            out.fill_(7.0)
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        plain = flash_attn_varlen_func(**call)
        torch.cuda.synchronize()
        assert all(torch.equal(out, expected) for out in (*outs, plain))


def test_a_graph_that_is_captured_before_there_is_a_table_makes_its_own(device):
    call = make_call(SKEWED, 0, device)
    expected, _ = run(call)
    lengths = on_host(on_cpu(call))
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = flash_attn_varlen_func(**call, **lengths)
    graph.replay()
    assert torch.equal(out, expected)


@pytest.mark.parametrize("seed", range(4))
def test_other_lengths_than_planned_touch_nothing_outside(seed, device):
    """Undefined what they give, but it lies in out."""
    call = make_call(SKEWED, 0, device)
    metadata, draw = made_for(call), random.Random(seed)
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        total = int(call[name][-1])
        cuts = sorted(draw.randint(-9, 2 * total) for _ in range(len(call[name]) - 1))
        call[name] = integers(0, *cuts, device=device)
    rows = len(call["q"])
    around = torch.full((3 * rows, *call["q"].shape[1:]), 7.0, device=device).bfloat16()
    flash_attn_varlen_func(**call, out=around[rows : 2 * rows], scheduler_metadata=metadata)
    torch.cuda.synchronize()
    assert (around[:rows] == 7).all() and (around[2 * rows :] == 7).all()
    assert not used_counters()


@pytest.mark.parametrize(
    "lengths_q", [(100, 1, 40, 1), (100, 90, 80, 70), (3, 1, 1, 2)], ids=["mixed", "long", "short"]
)
@pytest.mark.parametrize("page_size", [16, 64])
def test_calls_on_pages(lengths_q, page_size, device):
    call = cached_call(lengths_q, (300, 90, 80, 500), page_size)
    call = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in call.items()}
    call["max_seqlen_q"] = 128
    metadata = metadata_of_cache(on_cpu(call), page_size=page_size)
    assert metadata.lengths.tables
    out = flash_attn_with_kvcache(**call)
    for _ in range(3):
        assert torch.equal(out, flash_attn_with_kvcache(**call, scheduler_metadata=metadata))
    assert len(metadata.lengths.tables) == 1 and not used_counters()


def test_metadata_of_ever_new_lengths_keeps_no_memory(device):
    draw = random.Random(0)

    def sweep(turns: int) -> int:
        for _ in range(turns):
            lengths = tuple(draw.randint(1, 400) for _ in range(9))
            problem = VarlenProblem(lengths, lengths, causal=True)
            call = make_call(problem, 0, device) | {"max_seqlen_q": 400, "max_seqlen_k": 400}
            flash_attn_varlen_func(**call, scheduler_metadata=made_for(call))
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    sizes = [sweep(100) for _ in range(4)]
    assert sizes[-1] - sizes[0] < 1 << 20


def test_gradients(device):
    problem, gradients = replace(SKEWED, seqlens_k=SKEWED.seqlens_q), []
    for has_metadata in (False, True):
        call = make_call(problem, 0, device)
        given = {"scheduler_metadata": made_for(call)} if has_metadata else {}
        leaves = [call[name].requires_grad_() for name in "qkv"]
        out = flash_attn_varlen_func(**call, **given, deterministic=True)
        gradients.append(torch.autograd.grad(out.float().square().sum(), leaves))
    assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize(
    "way", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))], ids=["deepcopy", "pickle"]
)
def test_copies_of_metadata_that_was_used(way, device):
    call = make_call(CHUNK, device=device)
    metadata = metadata_of(on_cpu(call))
    expected = flash_attn_varlen_func(**call, scheduler_metadata=metadata)
    found = way(metadata)
    assert metadata.lengths.tables and not found.lengths.tables
    assert torch.equal(flash_attn_varlen_func(**call, scheduler_metadata=found), expected)
    assert found.lengths.tables
