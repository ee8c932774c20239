"""Gradients on a Hopper GPU against those of torch's autograd through dense attention in float64.

Simplest first: what hangs or fails early says most. Memory is NaN wherever a kernel writes nothing.
"""

import random

import pytest
import torch
from gradients import check_gradients
from pairs import pairs
from problems import make_operands, make_problem, poisoned_allocations
from sanitizer import check_sanitized
from score_problems import Recipe

import fa3
from fa3.planning.backward import BackwardPlan, most_keys_unzeroed
from fa3.problem import NO_BOUND, Problem, Window

pytestmark = pytest.mark.gpu

CAUSAL = Window(right=0)
WINDOWS = (Window(), CAUSAL, Window(40, 20), Window(left=70), Window(right=100))

HEAD_DIMS = (
    *((64, 64), (128, 128), (72, 72), (96, 96), (256, 256)),
    *((192, 128), (128, 192), (160, 160), (192, 192)),
)
"""Sizes (of q and k, of v): those of each way to share the work, and of each swizzle."""


def check(problem: Problem, device, weights=(True, False), seed: int = 0, **modifiers) -> dict:
    q, k, v = make_operands(problem, seed, device)
    return check_gradients(q, k, v, problem.window, weights, seed, **modifiers)


# -------------------------------------------------------------------------------------- shapes


@pytest.mark.parametrize("head_dims", HEAD_DIMS)
def test_one_block_of_queries_and_one_tile_of_keys(head_dims, device):
    head_dim, head_dim_v = head_dims
    check(make_problem(1, 64, 64, 1, 1, head_dim, head_dim_v=head_dim_v), device)


@pairs(head_dims=HEAD_DIMS, seqlen_q=(128, 512), seqlen_k=(128, 512))
def test_whole_blocks(head_dims, seqlen_q, seqlen_k, device):
    head_dim, head_dim_v = head_dims
    check(make_problem(1, seqlen_q, seqlen_k, 1, 1, head_dim, head_dim_v=head_dim_v), device)


LENGTHS = ((1, 1), (63, 63), (1023, 1023), (113, 203), (203, 113), (1024, 1000))
"""(queries, keys)."""


@pairs(lengths=LENGTHS, head_dims=HEAD_DIMS, window=WINDOWS)
def test_lengths(lengths, head_dims, window, device):
    head_dim, head_dim_v = head_dims
    problem = make_problem(2, *lengths, 2, head_dim=head_dim, head_dim_v=head_dim_v, window=window)
    check(problem, device)


@pytest.mark.parametrize("window", [Window(), CAUSAL])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_more_ctas_than_tiles_of_keys(head_dim, window, device):
    """They write dQ of what the others add."""
    check(make_problem(1, 9001, 70, 2, 2, head_dim, window), device)


@pairs(
    head_dim=(64, 128, 256),
    window=(Window(), CAUSAL, Window(40, 20)),
    qhead_per_kvhead=(2, 3, 8),
)
def test_shared_heads(head_dim, window, qhead_per_kvhead, device):
    check(make_problem(2, 200, 333, 2, qhead_per_kvhead, head_dim, window), device)


@pytest.mark.parametrize(
    "head_dim", [*range(32, 257, 32), *(8, 48, 88, 104, 144, 184, 200, 240)]
)  # fmt: skip
def test_head_dims(head_dim, device):
    """Every padded size, with padding and without; what is left of 64 columns in all ways; and
    every tiling. The dtypes take turns."""
    dtype = ("bfloat16", "float16")[head_dim // 32 % 2]
    check(make_problem(2, 130, 150, 2, head_dim=head_dim, window=CAUSAL, dtype=dtype), device)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("window", [Window(), CAUSAL])
def test_sums_with_and_without_zeros(window, head_dim, device):
    """As many keys as sums without zeros have, one more, and queries that see no key."""
    keys = most_keys_unzeroed(window)
    for lengths in ((keys, keys), (keys + 1, keys + 1), (keys, 300), (300, keys + 1)):
        check(make_problem(1, *lengths, 2, 2, head_dim, window), device)


MANY = (
    make_problem(16, 512, 512, 8, head_dim=64),
    make_problem(8, 1024, 1024, 8, head_dim=64, window=CAUSAL),
    make_problem(16, 512, 512, 8, head_dim=128),
    make_problem(8, 1024, 1024, 8, head_dim=128, window=CAUSAL),
    make_problem(8, 1024, 1024, 2, 4, 128, CAUSAL),
    make_problem(8, 1024, 1024, 8, head_dim=256, window=CAUSAL),
    # Begun by the backward kernel, and tiles of queries that no key comes to.
    make_problem(4, 3000, 1000, 16, head_dim=128, window=CAUSAL),
)


@pytest.mark.parametrize("problem", MANY, ids=lambda p: f"{p.seqlen_q}-{p.spec.head_dim}")
def test_many_tiles_of_keys_come_first(problem, device):
    """None of them is lost, however often; only the order of the additions differs. In a fixed
    order sums begin with zeros."""
    operands = [x.requires_grad_() for x in make_operands(problem, 0, device)]
    options = {"window_size": tuple(problem.window)}
    out = fa3.flash_attn_func(*operands, **options)
    d_out = torch.randn_like(out)
    ordered = fa3.flash_attn_func(*operands, **options, deterministic=True)
    with poisoned_allocations():
        expected = torch.autograd.grad(ordered, operands, d_out)
    hidden = max(0, problem.seqlen_q - problem.seqlen_k) if problem.window == CAUSAL else 0
    for _ in range(50):
        with poisoned_allocations():
            found = torch.autograd.grad(out, operands, d_out, retain_graph=True)
        assert all(map(torch.equal, found[1:], expected[1:]))
        torch.testing.assert_close(found[0], expected[0], atol=1e-3, rtol=2e-2)
        assert not found[0][:, :hidden].any()


def test_many_come_first_on_two_streams(device):
    """Launches that share the SMs do not wait for one another's CTAs."""
    problem = MANY[3]
    streams = [torch.cuda.Stream() for _ in range(2)]
    calls = []
    for seed in range(2):
        operands = [x.requires_grad_() for x in make_operands(problem, seed, device)]
        out = fa3.flash_attn_func(*operands, causal=True)
        d_out = torch.randn_like(out)
        calls.append((out, operands, d_out))
    expected = [torch.autograd.grad(*call, retain_graph=True) for call in calls]
    torch.cuda.synchronize()
    found: tuple[list, list] = ([], [])
    for _ in range(20):
        for stream, call, results in zip(streams, calls, found, strict=True):
            with torch.cuda.stream(stream):
                results.append(torch.autograd.grad(*call, retain_graph=True))
    torch.cuda.synchronize()
    for results, wanted in zip(found, expected, strict=True):
        for result in results:
            assert all(map(torch.equal, result[1:], wanted[1:]))
            torch.testing.assert_close(result[0], wanted[0], atol=1e-3, rtol=2e-2)


RANDOM_HEAD_DIMS = (*HEAD_DIMS, (40, 40), (64, 128), (128, 64), (192, 64), (96, 80), (64, 256))


def random_problem(seed: int) -> tuple[Problem, Recipe]:
    """Draw a problem and modifiers; what changes the code comes from few sets."""
    draw, number = random.Random(seed), seed % (2 * len(RANDOM_HEAD_DIMS))
    of_spec = random.Random(number)
    head_dim, head_dim_v = RANDOM_HEAD_DIMS[number % len(RANDOM_HEAD_DIMS)]
    window = of_spec.choice(WINDOWS)

    def length() -> int:
        return draw.randint(1, draw.choice((1, 40, 300, 1100)))

    def bound(given: int) -> int:
        return given if given in (NO_BOUND, 0) else draw.choice((0, draw.randint(0, 700)))

    seqlen_q = length()
    problem = make_problem(
        draw.randint(1, 3),
        seqlen_q,
        draw.choice((seqlen_q, length())),
        draw.randint(1, 2),
        draw.choice((1, 2, 4)),
        head_dim,
        Window(*map(bound, window)),
        of_spec.choice(("bfloat16", "float16")),
        head_dim_v,
    )
    recipe = Recipe(
        of_spec.choice((0.0, 0.0, 2.0, 30.0)),
        of_spec.choice((0, 0, 1, 2)),
        of_spec.choice((None, None, "float32", "q")),
    )
    return problem, recipe


@pytest.mark.parametrize("seed", range(300))
def test_random_combinations(seed, device):
    problem, recipe = random_problem(seed)
    modifiers = recipe.make(problem, make_operands(problem, seed, device)[0], seed)
    weights = random.Random(seed).choice(((1, 0), (1, 1), (0, 1)))
    check(problem, device, weights, seed, **modifiers)


@pytest.mark.parametrize("window", [Window(), CAUSAL, Window(300, 0)])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_more_tiles_than_sms(head_dim, window, device):
    check(make_problem(2, 2048, 2048, 8, head_dim=head_dim, window=window), device)


# ----------------------------------------------------------------------- what changes the scores


RECIPES = (
    Recipe(softcap=2.0),
    Recipe(softcap=30.0),
    Recipe(alibi_rank=1),
    Recipe(alibi_rank=2),
    Recipe(sinks="float32"),
    Recipe(softcap=20.0, alibi_rank=2, sinks="q"),
    Recipe(mask="documents"),
    Recipe(mask="prefix"),
    Recipe(mask="span"),
)


@pairs(recipe=RECIPES, head_dim=(64, 128, 256), window=(Window(), CAUSAL))
def test_modifiers(recipe, head_dim, window, device):
    problem = make_problem(2, 300, 400, 2, 2, head_dim, window)
    q, k, v = make_operands(problem, 0, device)
    check_gradients(q, k, v, window, (True, True), **recipe.make(problem, q))


@pytest.mark.parametrize("weights", [(True, True), (False, True)])
def test_gradient_of_the_log_sum_exp(weights, device):
    check(make_problem(2, 200, 333, 2, 2, 128, CAUSAL), device, weights)


def test_rows_that_see_nothing(device):
    found = check(make_problem(2, 350, 130, 2, head_dim=64, window=CAUSAL), device, (True, True))
    assert not found["q"][:, :220].any() and found["q"][:, 221:].any()


@pytest.mark.parametrize("size", [1e2, -1e2, 1e-3])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_scores_of_all_sizes(head_dim, size, device):
    """Far below 0 too: the zeros after the last key must not come in, as large as they then are."""
    q, k, v = make_operands(make_problem(1, 150, 150, 1, head_dim=head_dim), 0, device)
    leaves = [x.requires_grad_() for x in (q.abs() * size, k.abs(), v)]
    with poisoned_allocations():
        found = torch.autograd.grad(fa3.flash_attn_func(*leaves).float().sum(), leaves)
    assert all(x.isfinite().all() for x in found)


# ------------------------------------------------------------------------------ part of autograd


def leaves(device, seqlen_q: int = 170, seqlen_k: int = 190) -> list[torch.Tensor]:
    """Return q, k and v that require grad."""
    operands = make_operands(make_problem(2, seqlen_q, seqlen_k, 2, head_dim=64), 0, device)
    return [x.requires_grad_() for x in operands]


@pytest.mark.parametrize("names", [("q",), ("k",), ("v",), ("sinks",), ("q", "sinks"), ("k", "v")])
def test_only_some_inputs(names, device):
    q, k, v = leaves(device)
    inputs = {"q": q, "k": k, "v": v, "sinks": torch.zeros(2, requires_grad=True, device=device)}
    out = fa3.flash_attn_func(**inputs)
    d_out = torch.randn_like(out)
    expected = torch.autograd.grad(out, [inputs[name] for name in names], d_out)
    some = {name: x if name in names else x.detach() for name, x in inputs.items()}
    found = torch.autograd.grad(fa3.flash_attn_func(**some), [some[name] for name in names], d_out)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("sizes", [(0, 5, 5, 1), (1, 0, 5, 1), (1, 5, 0, 1), (1, 5, 5, 0)])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_nothing_to_compute(sizes, has_sinks, device):
    batch, seqlen_q, seqlen_k, heads_kv = sizes
    problem = make_problem(batch, seqlen_q, seqlen_k, heads_kv, 2, 32)
    q, k, v = (x.requires_grad_() for x in make_operands(problem, 0, device))
    sinks = torch.ones(2 * heads_kv, device=device, requires_grad=True) if has_sinks else None
    out, lse = fa3.flash_attn_func(q, k, v, sinks=sinks, return_lse=True)
    wanted = (q, k, v, sinks) if has_sinks else (q, k, v)
    found = torch.autograd.grad((out, lse), wanted, (out, torch.ones_like(lse)))
    for x, dx in zip(wanted[:3], found[:3], strict=True):
        assert dx.shape == x.shape and not dx.any()
    if has_sinks:
        assert found[3].tolist() == [batch * seqlen_q * (seqlen_k == 0)] * len(sinks)


def test_views_and_strange_gradients(device):
    """Operands and gradients that are not contiguous; one gradient is expanded from a number."""
    packed = torch.randn(2, 80, 3, 4, 64, device=device).half().requires_grad_()
    apart = packed.detach().clone().requires_grad_()
    d_out = torch.randn(2, 4, 80, 64, device=device).half().transpose(1, 2)
    of_views = torch.autograd.grad(fa3.flash_attn_func(*packed.unbind(2)), packed, d_out)
    copies = (x.contiguous() for x in apart.unbind(2))
    of_copies = torch.autograd.grad(fa3.flash_attn_func(*copies), apart, d_out.contiguous())
    torch.testing.assert_close(*of_views, *of_copies, atol=1e-2, rtol=1e-2)
    q, k, v = leaves(device)
    out = fa3.flash_attn_func(q, k, v)
    expected = torch.autograd.grad(out, (q, k, v), torch.ones_like(out), retain_graph=True)
    found = torch.autograd.grad(out.sum(), (q, k, v))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-2, rtol=1e-2)


def test_the_forward_pass_is_the_same(device):
    q, k, v = leaves(device)
    found = fa3.flash_attn_func(q, k, v, causal=True, return_lse=True)
    assert all(x.requires_grad for x in found)
    with torch.no_grad():
        expected = fa3.flash_attn_func(q, k, v, causal=True, return_lse=True)
    assert all(map(torch.equal, found, expected))


def test_dk_and_dv_have_the_same_bits_every_time(device):
    """Only dQ is added up in no fixed order."""
    q, k, v = leaves(device, 1000, 1000)
    out = fa3.flash_attn_func(q, k, v, causal=True)
    d_out = torch.randn_like(out)
    first = torch.autograd.grad(out, (k, v), d_out, retain_graph=True)
    for _ in range(20):
        again = torch.autograd.grad(out, (k, v), d_out, retain_graph=True)
        assert all(map(torch.equal, again, first))


DETERMINISTIC = (
    make_problem(1, 300, 300, 2, head_dim=64),
    make_problem(2, 1000, 1000, 2, 2, 128, CAUSAL),
    make_problem(1, 2000, 1500, 2, head_dim=64, window=CAUSAL),
    make_problem(2, 777, 1500, 1, 3, 128, Window(200, 30)),
    make_problem(1, 1500, 700, 2, head_dim=128, window=Window(left=100)),
    make_problem(1, 1000, 1000, 3, head_dim=256, window=CAUSAL),
    make_problem(1, 700, 900, 2, head_dim=192),
    make_problem(4, 2048, 2048, 8, head_dim=128, window=CAUSAL),
    make_problem(4, 2048, 2048, 8, head_dim=64),
    make_problem(1, 20000, 20000, 1, head_dim=128),
)


@pytest.mark.parametrize("problem", DETERMINISTIC, ids=lambda p: f"{p.seqlen_q}-{p.spec.head_dim}")
def test_deterministic_gradients_have_the_same_bits_every_time(problem, device):
    """More tiles than fit on the GPU too: tiles wait for each other, and none may wait forever."""
    operands = [x.requires_grad_() for x in make_operands(problem, 0, device)]
    options = {"window_size": tuple(problem.window), "return_lse": True}
    out, lse = fa3.flash_attn_func(*operands, **options, deterministic=True)
    plain, _ = fa3.flash_attn_func(*operands, **options)
    given = torch.randn_like(out), torch.randn_like(lse)
    first = torch.autograd.grad((out, lse), operands, given, retain_graph=True)
    expected = torch.autograd.grad(plain, operands, given[0])
    without_lse = torch.autograd.grad(out, operands, given[0], retain_graph=True)
    for ours, theirs in zip(without_lse, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-2, rtol=2e-2)
    for _ in range(200):
        again = torch.autograd.grad((out, lse), operands, given, retain_graph=True)
        assert all(map(torch.equal, again, first))


@pytest.mark.parametrize("window", [Window(), CAUSAL, Window(40, 20), Window(left=70)])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_deterministic_gradients(head_dim, window, device):
    problem = make_problem(2, 500, 700, 2, 2, head_dim, window)
    q, k, v = make_operands(problem, 0, device)
    check_gradients(q, k, v, window, (True, True), deterministic=True)


def test_deterministic_gradients_on_two_streams(device):
    """Launches that share the SMs do not wait for one another's CTAs."""
    problem = make_problem(2, 1500, 1500, 8, 1, 64, CAUSAL)
    operands = [x.requires_grad_() for x in make_operands(problem, 0, device)]
    out = fa3.flash_attn_func(*operands, causal=True, deterministic=True)
    grad = torch.randn_like(out)
    expected = torch.autograd.grad(out, operands, grad)
    streams = [torch.cuda.Stream(device) for _ in range(3)]
    found = []
    torch.cuda.synchronize()
    for _ in range(20):
        for stream in streams:
            # Autograd runs what is behind a call on the call's stream, so each has its own.
            with torch.cuda.stream(stream):
                again = fa3.flash_attn_func(*operands, causal=True, deterministic=True)
                found.append(torch.autograd.grad(again, operands, grad))
    torch.cuda.synchronize()
    assert all(torch.equal(*pair) for one in found for pair in zip(one, expected, strict=True))


def test_deterministic_gradients_captured_in_a_graph(device):
    """Words that tiles wait for are zero again at each replay."""
    problem = make_problem(2, 1500, 1500, 4, head_dim=128, window=CAUSAL)
    operands = [x.requires_grad_() for x in make_operands(problem, 0, device)]
    d_out = torch.randn_like(operands[0])

    def run():
        out = fa3.flash_attn_func(*operands, causal=True, deterministic=True)
        return torch.autograd.grad(out, operands, d_out)

    with torch.cuda.stream(torch.cuda.Stream()):
        expected = run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    for _ in range(5):
        for x in found:
            x.fill_(torch.nan)
        graph.replay()
        assert all(map(torch.equal, found, expected))


def test_captured_in_a_graph(device):
    q, k, v = leaves(device)
    d_out = torch.randn_like(q)

    def run():
        return torch.autograd.grad(fa3.flash_attn_func(q, k, v, causal=True), (q, k, v), d_out)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        expected = run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    for _ in range(3):
        for x in found:
            x.fill_(torch.nan)
        graph.replay()
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-2, rtol=1e-2)


def test_what_is_kept(device):
    q, k, v = leaves(device)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.shape) or x, lambda x: x):
        fa3.flash_attn_func(q, k, v, causal=True)
    assert kept == [q.shape, k.shape, v.shape, q.shape, (2, 2, 170)]


def test_memory_beside_the_gradients(device):
    q, k, v = leaves(device, 4096, 4096)
    out = fa3.flash_attn_func(q, k, v)
    d_out = torch.randn_like(out)
    problem = make_problem(2, 4096, 4096, 2, head_dim=64)
    plan = BackwardPlan.of(problem)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(out, (q, k, v), d_out)
    took = torch.cuda.max_memory_allocated() - before
    scratch = 4 * plan.sizes.layout.table_at
    assert took <= scratch + 3 * q.nbytes + (1 << 20)


# ------------------------------------------------------------------------------- what is refused


def test_refusals(device):
    q, k, v = leaves(device)
    out = fa3.flash_attn_func(q, k, v)
    (dq,) = torch.autograd.grad(out.float().square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        dq.float().sum().backward()
    with pytest.raises(ValueError, match=r"^q requires grad, so out must be None"):
        fa3.flash_attn_func(q, k, v, out=torch.empty_like(q))
    with torch.no_grad():
        fa3.flash_attn_func(q, k, v, deterministic=True)


@pytest.mark.parametrize("heads", [(16, 2), (8, 8)])
def test_sms_that_are_left_to_others(heads, device):
    """Gradients on fewer SMs, dense and packed; the kernels' CTAs are as few."""
    heads_q, heads_kv = heads
    problem = make_problem(1, 1500, 1500, heads_kv, heads_q // heads_kv, 128, CAUSAL)
    check_gradients(*make_operands(problem, 0, device), CAUSAL, (True, True), sm_margin=100)
    q, k, v = (x[0].requires_grad_() for x in make_operands(problem, 0, device))
    ends = torch.tensor([0, 700, 1500], dtype=torch.int32, device=device)
    of_margin = []
    for sm_margin in (0, 100):
        out = fa3.flash_attn_varlen_func(
            q, k, v, ends, ends, 800, 800, causal=True, sm_margin=sm_margin
        )
        of_margin.append(torch.autograd.grad(out, (q, k, v), torch.ones_like(out)))
    for ours, theirs in zip(*of_margin, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=2e-2)


SANITIZED = """
    import torch
    import fa3
    for head_dim, head_dim_v in ((64, 64), (128, 128), (192, 128), (256, 256)):
        q, k = (torch.randn(2, n, 2, head_dim, device="cuda").bfloat16() for n in (200, 300))
        v = torch.randn(2, 300, 2, head_dim_v, device="cuda").bfloat16()
        leaves = [x.requires_grad_() for x in (q, k, v)]
        packed = [x.detach().flatten(0, 1).requires_grad_() for x in leaves]
        ends = [torch.tensor((0, n, 2 * n), device="cuda").int() for n in (200, 300)]
        for deterministic in (False, True):
            options = {"causal": True, "deterministic": deterministic}
            out = fa3.flash_attn_func(*leaves, **options)
            torch.autograd.grad(out.sum(), leaves)
            out = fa3.flash_attn_varlen_func(*packed, *ends, 200, 300, **options)
            torch.autograd.grad(out.sum(), packed)
    torch.cuda.synchronize()
"""


@pytest.mark.sanitizer
@pytest.mark.timeout(900)
def test_compute_sanitizer_finds_nothing():
    """Not with racecheck: it takes copies in bulk and the loads that wait for their mbarrier for
    a race (docs/experiments.md)."""
    check_sanitized("memcheck", SANITIZED)
