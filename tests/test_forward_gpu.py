"""The forward kernel on a Hopper GPU, against dense attention in float64."""

import math
import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from pairs import pairs
from problems import make_operands, make_problem, poisoned_allocations
from reference import NO_WINDOW, check_attention, largest_difference
from sanitizer import TOOLS, check_sanitized

import fa3
from fa3.planning.planner import plan_forward
from fa3.problem import NO_BOUND, Problem, Window
from fa3.schedules import SingleTile, StaticPersistent, TileList

pytestmark = pytest.mark.gpu

DTYPES = ("bfloat16", "float16")
HEAD_DIMS = (64, 128, 256)
PADDED_HEAD_DIMS = ((40, 40), (96, 80), (192, 128))
"""Sizes (of q and k, of v) that take more columns in shared memory than they have, or differ."""

RANDOM_HEAD_DIMS = (
    *((size, size) for size in 2 * HEAD_DIMS),
    *((size, size) for size in (40, 96, 160, 192)),
    *((192, 128), (64, 128), (128, 64), (96, 80), (64, 256), (256, 64)),
)
CAUSAL = Window(right=0)
WINDOWS = (Window(), CAUSAL, Window(100, 30), Window(left=70))


def attend(q, k, v, window: Window = NO_WINDOW, **arguments):
    """Run the kernel into memory that is NaN wherever it does not write."""
    with poisoned_allocations():
        return fa3.flash_attn_func(q, k, v, window_size=window, return_lse=True, **arguments)


def check(problem: Problem, device, seed: int = 0) -> None:
    q, k, v = make_operands(problem, seed, device)
    out, lse = attend(q, k, v, problem.window)
    check_attention(out, lse, q, k, v, window=problem.window)


# ------------------------------------------------------------------------------------- shapes


def random_problem(seed: int, dtype: str) -> Problem:
    """Draw a problem: lengths of all orders of magnitude, equal or far apart.

    What changes the generated code is drawn from few sets, since each takes seconds to compile.
    """
    draw = random.Random(f"{seed} {dtype}")
    number = seed % len(RANDOM_HEAD_DIMS)
    head_dim, head_dim_v = RANDOM_HEAD_DIMS[number]
    of_spec = random.Random(f"{number} {dtype}")
    qhead_per_kvhead = of_spec.choice((1, 2, 4, 8))
    bounded = of_spec.choice(((False, False), (False, True), (True, False), (True, True)))
    causal = bounded == (False, True)

    def length() -> int:
        return draw.randint(1, draw.choice((1, 40, 300, 2500)))

    def bound(exists: bool) -> int:
        return draw.choice((0, draw.randint(0, 200), draw.randint(0, 2500))) if exists else NO_BOUND

    seqlen_q = length()
    return make_problem(
        batch=draw.randint(1, 3),
        seqlen_q=seqlen_q,
        seqlen_k=draw.choice((seqlen_q, length())),
        num_heads_kv=draw.randint(1, 3),
        qhead_per_kvhead=qhead_per_kvhead,
        head_dim=head_dim,
        window=CAUSAL if causal else Window(*map(bound, bounded)),
        dtype=dtype,
        head_dim_v=head_dim_v,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(2 * len(RANDOM_HEAD_DIMS)))
def test_random_shapes(seed, dtype, device):
    check(random_problem(seed, dtype), device, seed)


EDGES = (
    *((1, 1), (1, 4097), (4097, 1), (63, 65)),
    *((127, 129), (129, 127), (192, 160), (191, 161)),
)
"""(queries, keys)."""


@pairs(
    # Blocks that are hidden on their left alone were taken for open ones.
    {"lengths": (129, 127), "head_dim": 128, "window": Window(left=70)},
    {"lengths": (1, 4097), "head_dim": 128, "window": Window(left=70)},
    lengths=EDGES,
    head_dim=HEAD_DIMS,
    window=WINDOWS,
)
def test_edges_of_tiles(lengths, head_dim, window, device):
    check(make_problem(2, *lengths, 2, head_dim=head_dim, window=window), device)


@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_every_head_dim(head_dim, device):
    """The dtypes take turns."""
    dtype = ("bfloat16", "float16")[head_dim // 8 % 2]
    problem = make_problem(2, 200, 333, 2, head_dim=head_dim, window=CAUSAL, dtype=dtype)
    check_in_poison(problem, device)


@pytest.mark.parametrize("window", [Window(), CAUSAL, Window(1000, 0)])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_many_tiles_for_every_cluster(head_dim, window, device):
    """Several rounds of a persistent schedule, and several sections of heads."""
    check(make_problem(2, 8192, 8192, 8, head_dim=head_dim, window=window), device)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", [{"batch": 0}, {"seqlen_q": 0}, {"seqlen_k": 0}], ids=str)
def test_empty_tensors(sizes, causal, device):
    q, k, v = make_operands(make_problem(**sizes), device=device)
    out, lse = attend(q, k, v, causal=causal)
    assert out.shape == q.shape and lse.shape == (q.shape[0], q.shape[2], q.shape[1])
    assert (out == 0).all() and (lse == -math.inf).all()


def test_a_window_wider_than_any_sequence_hides_nothing(device):
    q, k, v = make_operands(make_problem(1, 300, 400, 2), device=device)
    out, lse = attend(q, k, v, (1 << 40, 1 << 40))
    check_attention(out, lse, q, k, v)


@pytest.mark.parametrize("softmax_scale", [1e-4, 0.5, 3.0])
def test_softmax_scale(softmax_scale, device):
    q, k, v = make_operands(make_problem(1, 300, 400, 2), device=device)
    out, lse = attend(q, k, v, softmax_scale=softmax_scale)
    check_attention(out, lse, q, k, v, softmax_scale)


def test_the_lse_is_optional(device):
    q, k, v = make_operands(make_problem(2, 300, 400, 2), device=device)
    out, _ = attend(q, k, v)
    assert torch.equal(out, fa3.flash_attn_func(q, k, v))


@pytest.mark.timeout(600)
def test_more_elements_than_int32_counts(device):
    shape = (130, 1024, 64, 256)
    assert math.prod(shape) > 2**31
    q, k, v = (torch.empty(shape, dtype=torch.bfloat16, device=device).normal_() for _ in range(3))
    out, lse = fa3.flash_attn_func(q, k, v, return_lse=True)
    for batch in (slice(0, 1), slice(127, 130)):
        check_attention(out[batch], lse[batch], q[batch], k[batch], v[batch])


# ------------------------------------------------------------------------------------- memory


def in_poison(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy a tensor into the middle of a NaN buffer; return the view and the buffer."""
    batch, seqlen, heads, head_dim = tensor.shape
    buffer = tensor.new_full((batch + 2, seqlen + 300, heads + 2, head_dim + 16), torch.nan)
    view = buffer[1:-1, 150:-150, 1:-1, 8:-8]
    view.copy_(tensor)
    return view, buffer


def check_in_poison(problem: Problem, device) -> None:
    """Check a problem whose tensors all lie in NaN, and that only the output's has changed."""
    q, k, v = (in_poison(tensor)[0] for tensor in make_operands(problem, device=device))
    out_shape = (*q.shape[:3], v.shape[3])
    out, buffer = in_poison(q.new_full(out_shape, torch.nan))
    _, lse = attend(q, k, v, problem.window, out=out)
    check_attention(out, lse, q, k, v, window=problem.window)
    out.fill_(torch.nan)
    untouched = torch.full_like(buffer, torch.nan)
    assert torch.equal(buffer.view(torch.int16), untouched.view(torch.int16))


@pairs(
    head_dims=(*((size, size) for size in HEAD_DIMS), *PADDED_HEAD_DIMS),
    lengths=((1, 1), (130, 70), (200, 333)),
    window=(CAUSAL, Window(100, 30)),
)
def test_nothing_outside_is_read_or_written(head_dims, lengths, window, device):
    head_dim, head_dim_v = head_dims
    problem = make_problem(2, *lengths, 2, 2, head_dim, window, head_dim_v=head_dim_v)
    check_in_poison(problem, device)


@pytest.mark.parametrize(("head_dim", "head_dim_v"), PADDED_HEAD_DIMS)
def test_clusters_of_padded_heads_give_the_same_bits(head_dim, head_dim_v, device):
    problem = make_problem(2, 1500, 700, 4, 2, head_dim, CAUSAL, head_dim_v=head_dim_v)
    q, k, v = make_operands(problem, device=device)
    config = plan_forward(problem).config
    one, two = (
        plan_forward(problem, config=replace(config, cluster_m=cluster_m)) for cluster_m in (1, 2)
    )
    out, lse = attend(q, k, v, CAUSAL, plan=one)
    check_attention(out, lse, q, k, v, window=CAUSAL)
    same, same_lse = attend(q, k, v, CAUSAL, plan=two)
    assert torch.equal(out, same) and torch.equal(lse, same_lse)


def packed(problem: Problem, device):
    """Give q, k and v as slices of one tensor (batch, seqlen, 3, heads, head_dim)."""
    return torch.stack(make_operands(problem, device=device), dim=2).unbind(2)


def heads_first(problem: Problem, device):
    """Give tensors that lie in memory as (batch, heads, seqlen, head_dim)."""
    operands = make_operands(problem, device=device)
    return tuple(tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in operands)


def sequence_first(problem: Problem, device):
    """Give tensors that lie in memory as (seqlen, batch, heads, head_dim)."""
    operands = make_operands(problem, device=device)
    return tuple(tensor.transpose(0, 1).contiguous().transpose(0, 1) for tensor in operands)


def shared_keys(problem: Problem, device):
    """Give keys and values with stride 0 over the batch."""
    q, k, v = make_operands(problem, device=device)
    return q, k[:1].expand_as(k), v[:1].expand_as(v)


def shared_head(problem: Problem, device):
    """Give keys and values with stride 0 over the heads."""
    q, k, v = make_operands(problem, device=device)
    return q, k[:, :, :1].expand_as(k), v[:, :, :1].expand_as(v)


@pytest.mark.parametrize("window", [Window(), CAUSAL])
@pytest.mark.parametrize("layout", [packed, heads_first, sequence_first, shared_keys, shared_head])
def test_strides(layout, window, device):
    problem = make_problem(3, 333, 333, 4, head_dim=128, window=window)
    q, k, v = layout(problem, device)
    assert not k.is_contiguous()
    out, lse = attend(q, k, v, window)
    check_attention(out, lse, q, k, v, window=window)
    dense_out, dense_lse = attend(q.contiguous(), k.contiguous(), v.contiguous(), window)
    assert torch.equal(out, dense_out) and torch.equal(lse, dense_lse)


def test_size_one_dimensions_may_have_any_stride(device):
    operands = make_operands(make_problem(1, 200, 200, 1), device=device)
    q, k, v = (tensor.as_strided(tensor.shape, (3, 64, 5, 1)) for tensor in operands)
    out, lse = attend(q, k, v)
    check_attention(out, lse, q, k, v)


def test_out_may_be_a_view(device):
    problem = make_problem(2, 200, 300, 4)
    q, k, v = make_operands(problem, device=device)
    out = torch.full((2, 4, 200, 64), torch.nan, dtype=q.dtype, device=device).transpose(1, 2)
    returned, lse = attend(q, k, v, out=out)
    assert returned is out
    check_attention(out, lse, q, k, v)


# -------------------------------------------------------------------------------- determinism


@pytest.mark.parametrize("window", [Window(), CAUSAL])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_repeated_calls_give_the_same_bits(head_dim, window, device):
    problem = make_problem(2, 2000, 2000, 8, 2, head_dim, window)
    q, k, v = make_operands(problem, device=device)
    out, lse = attend(q, k, v, window)
    for _ in range(200):
        again, lse_again = attend(q, k, v, window)
        assert torch.equal(out, again) and torch.equal(lse, lse_again)


@pairs(
    window=WINDOWS,
    head_dim=HEAD_DIMS,
    lengths=((1000, 1000), (1500, 700), (129, 3000)),
    schedule=(SingleTile, StaticPersistent),
)
def test_schedules_and_clusters_give_the_same_bits(window, head_dim, lengths, schedule, device):
    """A schedule and that by a list, each without clusters and with pairs of rows."""
    problem = make_problem(3, *lengths, 8, 2, head_dim, window)
    q, k, v = make_operands(problem, device=device)
    config = plan_forward(problem).config
    of_clusters = []
    for cluster_m in (1, 2):
        paired = replace(config, cluster_m=cluster_m, cluster_h=1)
        plan = plan_forward(problem, config=paired, schedule=TileList)
        out, lse = attend(q, k, v, window, plan=plan)
        check_attention(out, lse, q, k, v, window=window)
        of_clusters.append((out, lse))
        plan = plan_forward(problem, config=paired, schedule=schedule)
        same, same_lse = attend(q, k, v, window, plan=plan)
        assert torch.equal(out, same) and torch.equal(lse, same_lse), plan
    # Pairs of rows begin with another block under a mask, from which a fixed reference is taken.
    if not config.fixed_reference:
        (out, lse), (paired_out, paired_lse) = of_clusters
        assert torch.equal(out, paired_out) and torch.equal(lse, paired_lse)


def test_fewer_clusters_give_the_same_bits(device):
    q, k, v = make_operands(make_problem(2, 2000, 2000, 8), device=device)
    out, _ = attend(q, k, v, CAUSAL)
    few, _ = attend(q, k, v, CAUSAL, sm_margin=120)
    assert torch.equal(out, few)


def test_the_executor_computes_the_same(device):
    problem = make_problem(1, 300, 400, 2, 2, 128, CAUSAL)
    q, k, v = make_operands(problem, device=device)
    out, lse = attend(q, k, v, CAUSAL)
    cpu_out, cpu_lse = attend(q.cpu(), k.cpu(), v.cpu(), CAUSAL)
    torch.testing.assert_close(lse.cpu(), cpu_lse, rtol=1e-5, atol=1e-5)
    spacing = torch.finfo(out.dtype).eps * cpu_out.abs().max().item()
    assert largest_difference(out.cpu(), cpu_out) <= spacing


# ---------------------------------------------------------------- streams, graphs and devices


def test_runs_on_the_current_stream(device):
    """The operands arrive late on a side stream; a launch elsewhere would read NaN."""
    late = make_operands(make_problem(1, 500, 500, 4), device=device)
    q, k, v = (torch.full_like(tensor, torch.nan) for tensor in late)
    attend(*late)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        for tensor, value in zip((q, k, v), late, strict=True):
            tensor.copy_(value)
        out, lse = fa3.flash_attn_func(q, k, v, return_lse=True)
    stream.synchronize()
    check_attention(out, lse, q, k, v)


@pytest.mark.parametrize("causal", [False, True])
def test_a_cuda_graph_replays_on_new_inputs(causal, device):
    problem = make_problem(2, 700, 700, 4, head_dim=128, window=CAUSAL if causal else Window())
    q, k, v = make_operands(problem, device=device)
    fa3.flash_attn_func(q, k, v, causal=causal, return_lse=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = fa3.flash_attn_func(q, k, v, causal=causal, return_lse=True)
    for seed in (1, 2):
        new = make_operands(problem, seed, device)
        for tensor, value in zip((q, k, v), new, strict=True):
            tensor.copy_(value)
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        eager_out, eager_lse = attend(*new, problem.window)
        assert torch.equal(out, eager_out) and torch.equal(lse, eager_lse)


@pytest.mark.parametrize("window", [Window(), CAUSAL])
def test_tensors_of_another_gpu(window, device):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    problem = make_problem(2, 500, 500, 4, window=window)
    check(problem, device)
    assert torch.cuda.current_device() != 1
    check(problem, torch.device("cuda", 1))
    assert torch.cuda.current_device() != 1


def test_operands_on_two_devices_are_refused(device):
    q, k, v = make_operands(make_problem(), device=device)
    with pytest.raises(ValueError, match=r"^k must be on cuda.* got cpu"):
        fa3.flash_attn_func(q, k.cpu(), v)


# ---------------------------------------------------------------------------------- sanitizer

SANITIZED = """
    import torch
    from problems import make_operands, make_problem
    from fa3 import Window, flash_attn_func, plan_forward
    from dataclasses import replace
    for head_dim, head_dim_v in ((64, 64), (128, 128), (192, 128)):
        for window in (Window(right=0), Window(70, 10)):
            problem = make_problem(1, 200, 900, 1, 2, head_dim, window, head_dim_v=head_dim_v)
            config = plan_forward(problem).config
            one, two = (replace(config, cluster_m=n, cluster_h=1) for n in (1, 2))
            pair = replace(one, cluster_h=2)
            kinds = ((one, "list"), (two, "static"), (pair, "list"), (one, "dynamic"))
            q, k, v = make_operands(problem, device="cuda")
            for config, schedule in (*kinds, (one, "split"), (two, "split")):
                plan = plan_forward(problem, config=config, schedule=schedule)
                flash_attn_func(q, k, v, window_size=window, return_lse=True, plan=plan)
    torch.cuda.synchronize()
"""


@pytest.mark.sanitizer
@pytest.mark.timeout(900)
@pytest.mark.parametrize("tool", TOOLS)
def test_compute_sanitizer_finds_nothing(tool):
    check_sanitized(tool, SANITIZED)


# ------------------------------------------------------------------------------ tile orders


def test_no_order_of_the_tiles_changes_a_bit(device):
    """100 random orders, and every named schedule of whole tiles; the planner may cut them."""
    problem = make_problem(2, 1500, 1500, 3, 2, head_dim=128, window=CAUSAL)
    q, k, v = make_operands(problem, device=device)
    out, lse = attend(q, k, v, CAUSAL, schedule="single")
    check_attention(out, lse, q, k, v, window=CAUSAL)

    def shuffled(tiles, seed):
        return random.Random(seed).sample(tiles, len(tiles))

    orders = [partial(shuffled, seed=seed) for seed in range(100)]
    for schedule in ("static", "list", "dynamic", *orders):
        again, again_lse = attend(q, k, v, CAUSAL, schedule=schedule)
        assert torch.equal(again, out)
        assert torch.equal(again_lse, lse)
