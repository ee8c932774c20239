"""Calls that share a GPU's streams and memory: threads, interruptions, graphs, queued work."""

import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from problems import make_operands, make_problem
from reference import check_attention

import fa3
from fa3.calls.forward import prepare_forward
from fa3.planning.planner import plan_forward
from fa3.problem import Window
from fa3.running import counters, graphs
from fa3.running.graphs import idle_stream

pytestmark = pytest.mark.gpu

CAUSAL = Window(right=0)
CALLS = 100


def failing_call(device, seed: int = 0, seqlen: int = 4096):
    """Operands and plan of a call many of whose rows are computed again."""
    problem = make_problem(1, seqlen, seqlen, 4, 2, 128, CAUSAL)
    plan = plan_forward(problem)
    assert plan.config.fixed_reference
    q, k, v = make_operands(problem, seed, device)
    return q * 40, k, v, plan


def ordinary_call(device, seed: int):
    """Operands of a call in float16, whose tiles are taken from a counter."""
    problem = make_problem(1, 2048, 2048, 4, 2, 128, CAUSAL, "float16")
    return *make_operands(problem, seed, device), plan_forward(problem, schedule="dynamic")


def attend(q, k, v, plan):
    return fa3.flash_attn_func(q, k, v, causal=True, return_lse=True, plan=plan)


@pytest.mark.parametrize("num_threads", [2, 4])
def test_threads_on_one_stream(num_threads, device):
    """A launch of one thread between the two launches of another changes nothing."""
    calls = [failing_call(device, 0), ordinary_call(device, 1), failing_call(device, 2, 3000)]
    calls += [ordinary_call(device, 3)]
    calls = calls[:num_threads]
    expected = [attend(*call) for call in calls]
    torch.cuda.synchronize()
    start = threading.Barrier(num_threads)

    def work(i: int) -> int:
        start.wait()
        wrong = 0
        for _ in range(CALLS):
            out, lse = attend(*calls[i])
            same = torch.equal(out, expected[i][0]) and torch.equal(lse, expected[i][1])
            wrong += not same
        return wrong

    with ThreadPoolExecutor(num_threads) as pool:
        assert list(pool.map(work, range(num_threads))) == [0] * num_threads


def test_a_new_shape_does_not_wait_for_the_gpu(device):
    """The second shape has the kernel of the first; its table is copied beside queued work."""
    operands = [
        make_operands(make_problem(1, seqlen, seqlen, 4, 2, 128, CAUSAL), device=device)
        for seqlen in (3000, 3100)
    ]
    fa3.flash_attn_func(*operands[0], causal=True, schedule="list")
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    torch.cuda._sleep(1_500_000_000)
    done.record()
    out = fa3.flash_attn_func(*operands[1], causal=True, schedule="list")
    waited = done.query()
    assert not waited, "the call returned after the work that was queued before it"
    check_attention(out, None, *operands[1], window=CAUSAL)


@pytest.mark.parametrize("seqlens", [(2900, 2900), (3, 2900)], ids=str)
def test_nothing_that_stays_is_in_a_memory_pool(seqlens, device):
    """Neither a new shape's table nor counters: compiled graphs want theirs to be empty."""
    problem = make_problem(1, *seqlens, 8, 2, 128, CAUSAL)
    operands = make_operands(problem, device=device)
    prepare_forward.cache_clear()
    counters.BY_STREAM.clear()
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        out = fa3.flash_attn_func(*operands, causal=True)
    check_attention(out, None, *operands, window=CAUSAL)
    del out
    torch.cuda.synchronize()
    blocks = [block for segment in pool.snapshot() for block in segment["blocks"]]
    assert blocks and not any(block["state"] == "active_allocated" for block in blocks)


def test_tables_that_are_forgotten_stay_until_launches_have_read_them(device):
    """Launches wait in a stream while their calls' tables are let go and memory is used anew."""
    streams = [torch.cuda.current_stream(device), torch.cuda.Stream(device)]
    problem = make_problem(1, 2111, 2111, 4, 2, 128, CAUSAL, "float16")
    q, k, v = make_operands(problem, device=device)
    plan = plan_forward(problem, schedule="list")
    expected, _ = attend(q, k, v, plan)
    torch.cuda.synchronize()
    prepare_forward.cache_clear()
    found = []
    for stream in streams:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(100_000_000)
            found.append(attend(q, k, v, plan)[0])
    prepare_forward.cache_clear()
    gc.collect()
    # Where tables are allocated.
    with torch.cuda.stream(idle_stream(device)):
        scribbled = [
            torch.full((4096,), 10**6, dtype=torch.int32, device=device) for _ in range(50)
        ]
    torch.cuda.synchronize()
    assert scribbled and all(torch.equal(out, expected) for out in found)


def capture(call) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = attend(*call)
    return graph, out


def test_a_graph_keeps_what_it_reads(device):
    call = failing_call(device)
    expected, _ = attend(*call)
    graph, out = capture(call)
    prepare_forward.cache_clear()
    gc.collect()
    for seqlen in range(1000, 1040):
        attend(*ordinary_call(device, seqlen))
        q, k, v = make_operands(make_problem(1, seqlen, seqlen, 2, 2, 64, CAUSAL), device=device)
        fa3.flash_attn_func(q, k, v, causal=True)
    for _ in range(3):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, expected)


def test_what_a_graph_used_comes_back_when_it_goes(device):
    call = failing_call(device, seqlen=3000)
    attend(*call)
    sizes = []
    for _ in range(60):
        graph, out = capture(call)
        graph.replay()
        torch.cuda.synchronize()
        del graph, out
        gc.collect()
        attend(*call)
        sizes.append(torch.cuda.memory_allocated())
    graphs.forget_the_gone()
    assert len(graphs.LIVE) <= 2
    # At most one reserve that is being used up beside the first.
    assert max(sizes) - sizes[0] <= 3 * 4 * counters.RESERVE
