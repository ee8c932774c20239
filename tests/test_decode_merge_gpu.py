"""Calls whose parts are merged inside of the launch: in graphs, threads and streams, one after
another. The counters that CTAs take numbers from are zero afterwards, and bits are always the same.
"""

import random
import signal
import threading

import pytest
import torch
from cuda_graphs import captured
from free_counters import used_counters
from kvcache_problems import CacheProblem, make_call
from kvcache_reference import check_call
from problems import poisoned_allocations

from fa3.calls.decode import PreparedDecode
from fa3.calls.kvcache import flash_attn_with_kvcache

SEEDS = range(24)

HEADS = ((8, 4), (4, 7), (1, 8), (2, 1), (8, 8), (3, 2))


def lengths(draw: random.Random) -> tuple[int, ...]:
    """Draw lengths: many alike, few long ones, or none of a kind."""
    batch = draw.choice((1, 1, 2, 5, 16, 33))
    most = draw.choice((100, 1000, 9000))
    if draw.random() < 0.5:
        return (draw.randint(1, most),) * batch
    return tuple(draw.choice((0, 1, draw.randint(1, most), most)) for _ in range(batch))


def problem_of(seed: int) -> CacheProblem:
    draw = random.Random(seed)
    heads_kv, group = draw.choice(HEADS)
    seqlens = lengths(draw)
    return CacheProblem(
        seqlens,
        draw.choice((1, 1, 2, 5)),
        heads_kv=heads_kv,
        group=group,
        head_dim=128,
        page_size=draw.choice((None, None, 64, 16)),
        leftpads=tuple(n // 3 for n in seqlens) if draw.random() < 0.3 else None,
        causal=draw.random() < 0.5,
        sinks=draw.choice((None, "float32")),
        **appended(draw, seqlens),
    )


def appended(draw: random.Random, seqlens: tuple[int, ...]) -> dict:
    """Draw what is appended. A call that comes again appends the same tokens in the same places."""
    if draw.random() < 0.5:
        return {}
    ragged = draw.random() < 0.3
    counts = tuple(draw.randint(0, 3) for _ in seqlens) if ragged else (2,) * len(seqlens)
    rotary = draw.choice((None, (128, False, "bfloat16"), (64, True, "float32")))
    return {"counts": counts, "ragged": ragged, "rotary": rotary}


def packed(call: dict) -> dict:
    """The same call with its queries behind one another."""
    batch, seqlen_q, *_ = call["q"].shape
    ends = torch.arange(0, batch * seqlen_q + 1, seqlen_q, dtype=torch.int32, device="cuda")
    return call | {"q": call["q"].flatten(0, 1), "cu_seqlens_q": ends, "max_seqlen_q": seqlen_q}


@pytest.fixture
def merged(monkeypatch):
    """How many calls merged parts inside of their launch."""
    found, attend = [], PreparedDecode.attend

    def noting(self, *given, **named):
        found.append(self.plan.merges_inside)
        return attend(self, *given, **named)

    monkeypatch.setattr(PreparedDecode, "attend", noting)
    return found


def run(call: dict, **options) -> tuple[torch.Tensor, torch.Tensor]:
    return flash_attn_with_kvcache(**call, return_lse=True, **options)


def same(results, others) -> bool:
    return all(torch.equal(a, b) for a, b in zip(results, others, strict=True))


@pytest.mark.parametrize("seed", SEEDS)
def test_random_calls_give_the_same_bits_again(seed, device, merged):
    call = make_call(problem_of(seed), seed, device)
    with poisoned_allocations():
        first = run(call)
        check_call(call, *first, (call["k_cache"], call["v_cache"]))
        for _ in range(20):
            assert same(run(call), first)
    assert not used_counters()


def test_most_of_them_merge_in_the_launch(device, merged):
    for seed in SEEDS:
        run(make_call(problem_of(seed), seed, device))
    assert sum(merged) > len(merged) / 2


@pytest.mark.parametrize("seed", SEEDS)
def test_random_packed_calls_give_the_same_bits_again(seed, device):
    call = make_call(problem_of(seed), seed, device)
    with poisoned_allocations():
        first = run(packed(call))
        out, lse = first[0].view(*call["q"].shape), first[1].unflatten(1, call["q"].shape[:2])
        check_call(call, out, lse.transpose(0, 1), (call["k_cache"], call["v_cache"]))
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


def test_two_graphs_and_eager_calls_side_by_side(device):
    calls = [make_call(problem_of(seed), seed, device) for seed in range(20)]
    expected = [run(call) for call in calls]
    replayed = []
    for _ in range(2):
        graph, results = captured(lambda: [run(call) for call in calls])
        replayed.append((graph, results, torch.cuda.Stream()))
    torch.cuda.synchronize()
    for _ in range(100):
        for graph, _, stream in replayed:
            with torch.cuda.stream(stream):
                graph.replay()
        eager = [run(call) for call in calls[:5]]
    torch.cuda.synchronize()
    assert all(map(same, eager, expected[:5]))
    for _, results, _ in replayed:
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

    def interrupt(*given) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, interrupt)
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
