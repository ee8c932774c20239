"""Calls that share a GPU's streams and memory: threads, interruptions, graphs, queued work."""

import gc
import random
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from gpu_checks import captured, forget_prepared_calls, used_counters
from kvcache_problems import CacheProblem, make_call, random_problem
from problems import CAUSAL, make_operands, make_problem, poisoned_allocations
from reference import check_attention, check_call

import fa3
from fa3.calls.attention import flash_attn_with_kvcache
from fa3.planning.planner import plan_forward
from fa3.running import memory
from fa3.running.memory import idle_stream

pytestmark = pytest.mark.gpu

CALLS = 100


def failing_call(device, seed: int = 0, seqlen: int = 4096):
    """Operands and plan of a call many of whose rows are computed again."""
    problem = make_problem(1, seqlen, seqlen, 4, 2, 128, CAUSAL)
    plan = plan_forward(problem)
    assert plan.config.fixed_row_max
    q, k, v = make_operands(problem, seed, device)
    return q * 40, k, v, plan


def ordinary_call(device, seed: int):
    """Operands of a call in float16, whose tiles are taken from a counter."""
    problem = make_problem(1, 2048, 2048, 4, 2, 128, CAUSAL, "float16")
    return *make_operands(problem, seed, device), plan_forward(problem, schedule="dynamic")


def attend(q, k, v, plan):
    return fa3.flash_attn_func(q, k, v, causal=True, return_lse=True, plan=plan)


def test_threads_on_one_stream(device):
    """A launch of one thread between the two launches of another changes nothing."""
    num_threads = 4
    calls = [failing_call(device, 0), ordinary_call(device, 1), failing_call(device, 2, 3000)]
    calls += [ordinary_call(device, 3)]
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


@pytest.mark.parametrize("seqlens", [(2900, 2900), (3, 2900)])
def test_nothing_that_stays_is_in_a_memory_pool(seqlens, device):
    """Neither a new shape's table nor counters: compiled graphs want theirs to be empty."""
    problem = make_problem(1, *seqlens, 8, 2, 128, CAUSAL)
    operands = make_operands(problem, device=device)
    forget_prepared_calls()
    memory.BY_STREAM.clear()
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
    forget_prepared_calls()
    found = []
    for stream in streams:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(100_000_000)
            found.append(attend(q, k, v, plan)[0])
    forget_prepared_calls()
    gc.collect()
    # Where tables are allocated.
    with torch.cuda.stream(idle_stream(device)):
        scribbled = [
            torch.full((4096,), 10**6, dtype=torch.int32, device=device) for _ in range(50)
        ]
    torch.cuda.synchronize()
    assert scribbled and all(torch.equal(out, expected) for out in found)


def test_a_graph_keeps_what_it_reads(device):
    call = failing_call(device)
    expected, _ = attend(*call)
    graph, (out, _) = captured(lambda: attend(*call))
    forget_prepared_calls()
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
        graph, results = captured(lambda: attend(*call))
        graph.replay()
        torch.cuda.synchronize()
        del graph, results
        gc.collect()
        attend(*call)
        sizes.append(torch.cuda.memory_allocated())
    memory.free_ended_graphs()
    assert len(memory.LIVE) <= 2
    # At most one reserve that is being used up beside the first.
    assert max(sizes) - sizes[0] <= 3 * 4 * memory.RESERVE


# --------------------------------------------------------- parts that are merged inside of a launch

SEEDS = range(24)

FAMILIES = 12
"""Sets of options that change the generated code."""


def problem_of(seed: int) -> CacheProblem:
    return random_problem(seed, "bfloat16", seed % FAMILIES, (100, 1000, 9000))


def packed(call: dict) -> dict:
    """The same call with its queries behind one another."""
    batch, seqlen_q, *_ = call["q"].shape
    ends = torch.arange(batch + 1, device=call["q"].device).int() * seqlen_q
    return call | {"q": call["q"].flatten(0, 1), "cu_seqlens_q": ends, "max_seqlen_q": seqlen_q}


def run(call: dict, **options) -> tuple[torch.Tensor, torch.Tensor]:
    return flash_attn_with_kvcache(**call, return_lse=True, **options)


def same(results, others) -> bool:
    return all(torch.equal(a, b) for a, b in zip(results, others, strict=True))


@pytest.mark.parametrize("family", range(FAMILIES))
def test_random_calls_give_the_same_bits_again(family, device):
    """Also with packed queries."""
    for seed in SEEDS[family::FAMILIES]:
        call = make_call(problem_of(seed), seed, device)
        caches, shape = (call["k_cache"], call["v_cache"]), call["q"].shape[:2]
        with poisoned_allocations():
            first = run(call)
            check_call(call, *first, caches)
            for _ in range(20):
                assert same(run(call), first)
            first = run(packed(call))
            out, lse = first[0].unflatten(0, shape), first[1].unflatten(1, shape)
            check_call(call, out, lse.transpose(0, 1), caches)
            for _ in range(20):
                assert same(run(packed(call)), first)
    assert not used_counters()


def test_graphs_of_many_calls_replayed_many_times(device):
    calls = [make_call(problem_of(seed), seed, device) for seed in SEEDS]
    expected = [run(call) for call in calls]
    graph, results = captured(lambda: [run(call) for call in calls])
    for _ in range(200):
        for tensors in results:
            for tensor in tensors:
                tensor.fill_(torch.nan)
        graph.replay()
    assert all(map(same, results, expected))
    for _ in range(1000):
        graph.replay()
    assert all(map(same, results, expected))
    assert not used_counters()


@pytest.mark.timeout(600)
def test_threads_and_streams(device):
    calls = [make_call(problem_of(seed), seed, device) for seed in SEEDS]
    expected = [run(call) for call in calls]
    torch.cuda.synchronize()
    wrong: list[tuple[int, int]] = []

    def work(number: int) -> None:
        draw, stream = random.Random(number), torch.cuda.Stream()
        with torch.cuda.device(device), torch.cuda.stream(stream):
            for _ in range(20):
                order = draw.choices(range(len(calls)), k=20)
                results = [run(calls[i]) for i in order]
                stream.synchronize()
                wrong.extend(
                    (number, i)
                    for i, found in zip(order, results, strict=True)
                    if not same(found, expected[i])
                )

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert not used_counters()


def test_fewer_sms_and_long_sequences(device):
    for seqlens, heads_kv, group in (((1 << 17,), 8, 4), ((60_000, 5), 2, 4)):
        problem = CacheProblem(seqlens, heads_kv=heads_kv, group=group, head_dim=128)
        call = make_call(problem, device=device)
        for sm_margin in (0, 1, 60, 130, 131):
            out, lse = run(call, sm_margin=sm_margin)
            check_call(call, out, lse, (call["k_cache"], call["v_cache"]))
    assert not used_counters()


def test_calls_that_are_interrupted_at_random_moments(device):
    """By Ctrl-C or a test's timeout: what runs in a process afterwards is right."""
    calls = [make_call(problem_of(seed), seed, device) for seed in range(8)]
    expected = [run(call) for call in calls]
    draw, rounds, interrupted = random.Random(0), 200, 0
    before = signal.signal(signal.SIGUSR1, signal.default_int_handler)
    signal_here = signal.pthread_kill, (threading.get_ident(), signal.SIGUSR1)
    try:
        for _ in range(rounds):
            timer = threading.Timer(draw.uniform(0, 0.002), *signal_here)
            try:
                timer.start()
                for i in draw.choices(range(len(calls)), k=400):
                    run(calls[i])
                timer.join()
            except KeyboardInterrupt:
                interrupted += 1
            timer.join()
            assert all(map(same, map(run, calls), expected))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert interrupted > rounds / 2
    assert not used_counters()
