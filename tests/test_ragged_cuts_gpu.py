"""Tiles of packed sequences that are cut, on a Hopper GPU: results, streams, graphs, marks."""

import random

import pytest
import torch
from free_counters import used_counters
from test_known_lengths_gpu import CHUNK, made_for, on_cpu, run
from varlen_problems import VarlenProblem, check_varlen, make_call, unused

from fa3 import flash_attn_varlen_func

pytestmark = pytest.mark.gpu

PROBLEMS = {
    "chunk": CHUNK,
    "two": VarlenProblem((300, 700), (5000, 9000), heads_kv=2, group=2, causal=True),
    "full": VarlenProblem((200, 300), (7000, 100), heads_kv=3, dtype="float16"),
    "window": VarlenProblem(
        (900, 200), (12000, 7000), group=4, window=(4000, 0), head_dim=128, head_dim_v=128
    ),
    "unequal": VarlenProblem(
        (400,), (8000,), group=2, causal=True, head_dim=192, head_dim_v=128, spare=9
    ),
    "large": VarlenProblem((257,), (5001,), group=2, causal=True, head_dim=256, head_dim_v=256),
    "used": VarlenProblem(
        (700, 300), (9000, 300), (650, 300), (8000, 300), heads_kv=2, causal=True, head_dim=96,
        head_dim_v=96,
    ),
}  # fmt: skip


def has_cuts(metadata) -> bool:
    return any(tiles.segments is not None for tiles in metadata.lengths.tables.values())


@pytest.mark.parametrize("name", PROBLEMS)
def test_results_are_those_of_dense_attention(name, device):
    problem = PROBLEMS[name]
    call = make_call(problem, 0, device)
    metadata, plain = made_for(call), run(call)
    assert has_cuts(metadata)
    out, lse = run(call, scheduler_metadata=metadata)
    check_varlen(problem, call, out, lse)
    rows = ~unused(problem, len(out), device)
    torch.testing.assert_close(out[rows], plain[0][rows], rtol=2e-2, atol=2e-2)
    # Parts are added up in their order, whoever is last.
    for _ in range(20):
        again, of_again = run(call, scheduler_metadata=metadata)
        assert torch.equal(again[rows], out[rows])
        assert torch.equal(of_again[:, rows], lse[:, rows])
    assert not used_counters()


@pytest.mark.parametrize("seed", range(24))
def test_random_lengths(seed, device):
    draw = random.Random(seed)
    lengths_q = tuple(draw.randint(0, 700) for _ in range(draw.randint(1, 4)))
    lengths_k = tuple(n + draw.choice((0, draw.randint(0, 9000))) for n in lengths_q)
    heads_kv, group = draw.choice(((1, 8), (2, 2), (1, 5)))
    problem = VarlenProblem(
        lengths_q, lengths_k, heads_kv=heads_kv, group=group, causal=seed % 2 == 0,
        head_dim=(64, 128)[seed // 2 % 2], head_dim_v=(64, 128)[seed // 2 % 2],
    )  # fmt: skip
    call = make_call(problem, seed, device)
    out, lse = run(call, scheduler_metadata=made_for(call))
    check_varlen(problem, call, out, lse)
    assert not used_counters()


def test_streams_and_graphs_share_the_segments(device):
    call = make_call(CHUNK, 0, device)
    metadata = made_for(call)
    expected = flash_attn_varlen_func(**call, scheduler_metadata=metadata)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [flash_attn_varlen_func(**call, scheduler_metadata=metadata) for _ in range(3)]
    streams, found = [torch.cuda.Stream(device) for _ in range(3)], []
    for turn in range(30):
        graph.replay()
        with torch.cuda.stream(streams[turn % 3]):
            found.append(flash_attn_varlen_func(**call, scheduler_metadata=metadata))
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for out in (*found, *outs))
    assert not used_counters()


def test_calls_with_lengths_on_the_host(device):
    call = make_call(CHUNK, 0, device)
    of_host = on_cpu(call)
    given = {f"{name}_cpu": of_host[name] for name in ("cu_seqlens_q", "cu_seqlens_k")}
    cut = run(call, scheduler_metadata=made_for(call))
    whole = run(call, num_splits=1)
    for num_splits, expected in ((0, cut), (1, whole)):
        assert all(map(torch.equal, run(call, **given, num_splits=num_splits), expected))


def test_gradients_have_whole_tiles(device):
    problem = VarlenProblem((500,), (9000,), heads_kv=1, group=4, causal=True)
    found = []
    for has_metadata in (False, True):
        call = make_call(problem, 0, device)
        given = {"scheduler_metadata": made_for(call)} if has_metadata else {}
        leaves = [call[name].requires_grad_() for name in "qkv"]
        out = flash_attn_varlen_func(**call, **given, deterministic=True)
        found.append((out, *torch.autograd.grad(out.float().square().sum(), leaves)))
    assert all(map(torch.equal, *found))
