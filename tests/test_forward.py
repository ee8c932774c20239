"""Forward attention on the CPU and on a Hopper GPU, against dense attention in float64."""

import itertools
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gpu_checks import captured, check_sanitized
from hypothesis import given, settings
from hypothesis import strategies as st
from pairs import pairs
from problems import CAUSAL, attend, make_operands, make_problem, problems, run_plan
from reference import check_attention
from score_problems import Recipe

import fa3
from fa3.kernels.forward_launch import ForwardConfig
from fa3.planning.costs import Gpu
from fa3.planning.planner import plan_forward
from fa3.problem import AttentionSpec, Problem, Window
from fa3.reference.walker import steps
from fa3.schedules import SingleTile, StaticPersistent, TileList

SCHEDULE_TYPES = (SingleTile, StaticPersistent, TileList)
SMALL_TILES = ForwardConfig(128, 32)
SMALL_CONFIGS = (SMALL_TILES, ForwardConfig(192, 48), ForwardConfig(128, 16, cluster_m=2))
CONFIGS = (None, *SMALL_CONFIGS)
SMALL_GPU = Gpu("small", num_sms=6, l2_bytes=1 << 17)


def plans(problem: Problem):
    return st.builds(
        lambda config, schedule_type: plan_forward(problem, SMALL_GPU, config, schedule_type),
        st.sampled_from([config for config in CONFIGS if is_legal(config, problem.spec)]),
        st.sampled_from(SCHEDULE_TYPES),
    )


def is_legal(config: ForwardConfig | None, spec: AttentionSpec) -> bool:
    try:
        return config is None or config.validate(spec) is None
    except ValueError:
        return False


def check(problem: Problem, where, seed: int = 0, **arguments) -> None:
    q, k, v = make_operands(problem, seed, where)
    out, lse = attend(q, k, v, problem.window, **arguments)
    scale = arguments.get("softmax_scale")
    check_attention(out, lse, q, k, v, scale, problem.window)


# ------------------------------------------------------------------- the walk of the CPU: plans


@settings(max_examples=80)
@given(st.data(), problems(), st.sampled_from([1e-4, 0.125, 1.0]), st.integers(0, 1000))
def test_matches_dense_attention(data, problem, softmax_scale, seed):
    q, k, v = make_operands(problem, seed)
    out, lse = run_plan(data.draw(plans(problem)), q, k, v, softmax_scale)
    check_attention(out, lse, q, k, v, softmax_scale, problem.window, lse_tolerance=1e-5)


def test_probabilities_are_rounded_before_they_meet_the_values():
    """Two keys with scores 0 and -x: the output is P(x) / (1 + P(x)), its numerator rounded."""
    problem = make_problem(seqlen_q=128, seqlen_k=2)
    q, k, v = (torch.zeros_like(tensor) for tensor in make_operands(problem))
    q[0, :, 0, 0] = torch.linspace(4.0, 0.25, 128)
    k[0, 1, 0, 0] = -1.0
    v[0, 1] = 1.0
    out, _ = run_plan(plan_forward(problem), q, k, v, 1.0)
    p = torch.exp(-q[0, :, 0, 0].float())
    rounded = (p.bfloat16().float() / (1 + p)).bfloat16()
    assert torch.equal(out[0, :, 0, 0], rounded)
    assert not torch.equal((p / (1 + p)).bfloat16(), rounded)


@settings(max_examples=15)
@given(problems(), st.integers(1, 12), st.integers(1, 4))
def test_the_order_of_tiles_does_not_change_a_bit(problem, num_sms, heads_in_l2):
    operands = make_operands(problem)
    row_bytes = 2 * (problem.spec.head_dim + problem.spec.head_dim_v)
    key_head_bytes = row_bytes * max(1, problem.seqlen_k)
    gpu = Gpu("small", num_sms, heads_in_l2 * key_head_bytes)
    results = [
        run_plan(plan_forward(problem, gpu, SMALL_TILES, schedule_type), *operands, 0.125)
        for schedule_type in SCHEDULE_TYPES
    ]
    for single_tile, *others in zip(*results, strict=True):
        assert all(torch.equal(single_tile, other) for other in others)


@given(st.data(), problems())
def test_steps_visit_every_row_once(data, problem):
    plan = data.draw(plans(problem))
    visits = Counter(
        (step.segment.tile.batch, step.segment.tile.head, row)
        for step in steps(plan)
        for row in step.rows
    )
    assert len(visits) == problem.batch * problem.num_heads_q * problem.seqlen_q
    assert set(visits.values()) <= {1}


# ------------------------------------------------------------------------------------- calls

HEAD_DIMS = (64, 128, 256)

PADDED_HEAD_DIMS = ((40, 40), (96, 80), (192, 128))
"""Sizes (of q and k, of v) that take more columns in shared memory than they have, or differ."""

WINDOWS = (Window(), CAUSAL, Window(100, 30), Window(left=70))

EDGES = (
    *((1, 1), (1, 4097), (4097, 1), (63, 65)),
    *((127, 129), (129, 127), (192, 160), (191, 161)),
)
"""(queries, keys)."""


@pairs(head_dim=HEAD_DIMS, window=WINDOWS)
def test_edges_of_tiles(head_dim, window, where):
    """Blocks that are hidden on their left alone were once taken for open ones."""
    head_dim = head_dim // 4 if where == "cpu" else head_dim
    for lengths in EDGES:
        check(make_problem(2, *lengths, 2, head_dim=head_dim, window=window), where)


def test_empty_tensors(where):
    sizes = {"batch": 0}, {"seqlen_q": 0}, {"seqlen_k": 0}, {"num_heads_kv": 0}
    for one, window in itertools.product(sizes, (Window(), CAUSAL, Window(left=3))):
        q, k, v = make_operands(make_problem(**one), device=where)
        out, lse = attend(q, k, v, window)
        assert out.shape == q.shape and lse.shape == (q.shape[0], q.shape[2], q.shape[1])
        assert (out == 0).all() and (lse == -math.inf).all()


def test_extreme_options(where):
    """A window that is wider than any sequence hides nothing."""
    q, k, v = make_operands(make_problem(1, 300, 400, 2), device=where)
    for scale, window in ((1e-4, Window()), (0.5, Window()), (3.0, Window(1 << 40, 1 << 40))):
        out, lse = attend(q, k, v, window, softmax_scale=scale)
        check_attention(out, lse, q, k, v, scale)


@pytest.mark.parametrize(
    ("head_dim", "window"),
    [(size, window) for size in HEAD_DIMS for window in (Window(), CAUSAL)]
    + [(128, Window(1000, 0))],
)
def test_many_tiles_for_every_cluster(head_dim, window, device):
    """Several rounds of a persistent schedule, and several head groups."""
    check(make_problem(2, 8192, 8192, 8, head_dim=head_dim, window=window), device)


@pytest.mark.timeout(600)
def test_more_elements_than_int32_counts(device):
    shape = (130, 1024, 64, 256)
    assert math.prod(shape) > 2**31
    q, k, v = (torch.empty(shape, dtype=torch.bfloat16, device=device).normal_() for _ in range(3))
    out, lse = fa3.flash_attn_func(q, k, v, return_lse=True)
    for batch in (slice(0, 1), slice(127, 130)):
        check_attention(out[batch], lse[batch], q[batch], k[batch], v[batch])


def in_poison(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy a tensor into the middle of a NaN buffer; return the view and the buffer."""
    batch, seqlen, heads, head_dim = tensor.shape
    buffer = tensor.new_full((batch + 2, seqlen + 300, heads + 2, head_dim + 16), torch.nan)
    view = buffer[1:-1, 150:-150, 1:-1, 8:-8]
    view.copy_(tensor)
    return view, buffer


def check_in_poison(problem: Problem, where) -> None:
    """Check a problem whose tensors all lie in NaN, and that only the output's has changed."""
    q, k, v = (in_poison(tensor)[0] for tensor in make_operands(problem, device=where))
    out_shape = (*q.shape[:3], v.shape[3])
    out, buffer = in_poison(q.new_full(out_shape, torch.nan))
    returned, lse = attend(q, k, v, problem.window, out=out)
    assert returned is out
    check_attention(out, lse, q, k, v, window=problem.window)
    out.fill_(torch.nan)
    untouched = torch.full_like(buffer, torch.nan)
    assert torch.equal(buffer.view(torch.int16), untouched.view(torch.int16))


@pytest.mark.parametrize(
    "head_dims", [*((size, size) for size in HEAD_DIMS), *PADDED_HEAD_DIMS, (8, 96), (256, 8)]
)
def test_nothing_outside_is_read_or_written(head_dims, where):
    head_dim, head_dim_v = head_dims
    window = CAUSAL if head_dim % 64 else Window(100, 30)
    for lengths in ((1, 1), (130, 70), (200, 333)):
        problem = make_problem(2, *lengths, 2, 2, head_dim, window, head_dim_v=head_dim_v)
        check_in_poison(problem, where)


LAYOUTS = {
    # Slices of one tensor (batch, seqlen, 3, heads, head_dim).
    "packed": lambda *qkv: torch.stack(qkv, dim=2).unbind(2),
    "heads first": lambda *qkv: (x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv),
    "sequence first": lambda *qkv: (x.transpose(0, 1).contiguous().transpose(0, 1) for x in qkv),
    "every other row": lambda *qkv: (x.repeat_interleave(2, dim=1)[:, ::2] for x in qkv),
    "shared keys": lambda q, k, v: (q, k[:1].expand_as(k), v[:1].expand_as(v)),
    "shared head": lambda q, k, v: (q, k[:, :, :1].expand_as(k), v[:, :, :1].expand_as(v)),
}


@pytest.mark.parametrize("window", [Window(), CAUSAL])
def test_strides(window, where):
    head_dim = 32 if where == "cpu" else 128
    problem = make_problem(3, 333, 333, 4, head_dim=head_dim, window=window)
    for layout in LAYOUTS.values():
        q, k, v = layout(*make_operands(problem, device=where))
        assert not k.is_contiguous()
        out, lse = attend(q, k, v, window)
        check_attention(out, lse, q, k, v, window=window)
        dense_out, dense_lse = attend(q.contiguous(), k.contiguous(), v.contiguous(), window)
        assert torch.equal(out, dense_out) and torch.equal(lse, dense_lse) and out.is_contiguous()


@pytest.mark.parametrize(
    ("head_dim", "window", "schedule"),
    [
        *((128, window, SingleTile) for window in WINDOWS),
        *((size, CAUSAL, StaticPersistent) for size in (*HEAD_DIMS, 96)),
        *((64, Window(), StaticPersistent), (256, Window(100, 30), SingleTile)),
        (96, Window(left=70), StaticPersistent),
    ],
)
def test_schedules_and_clusters_give_the_same_bits(head_dim, window, schedule, device):
    """A schedule and that by a list, each without clusters and with pairs of rows."""
    for lengths in ((1000, 1000), (1500, 700), (129, 3000)):
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
        # Pairs of rows begin with another block under a mask: another fixed reference.
        if not config.fixed_row_max:
            (out, lse), (paired_out, paired_lse) = of_clusters
            assert torch.equal(out, paired_out) and torch.equal(lse, paired_lse)


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


GRAPHS = {
    "full": (Window(), Recipe(), {}),
    "causal": (CAUSAL, Recipe(), {}),
    "built in": (CAUSAL, Recipe(20.0, 1, "q"), {}),
    "everything": (CAUSAL, Recipe(5.0, 2, "float32", "relative", "documents"), {}),
    "decode kernel": (CAUSAL, Recipe(), {"pack_gqa": True}),
}
"""What a graph is captured with: a window, modifiers, and options of the call."""


@pytest.mark.parametrize("name", GRAPHS)
def test_a_cuda_graph_replays_on_new_inputs(name, device):
    """Slopes, sinks and tables are read anew at every replay, like q, k and v. The decode kernel is
    captured with a size that was not called before: nothing is copied from the host."""
    window, recipe, options = GRAPHS[name]
    queries = 1 if "pack_gqa" in options else 700
    problem = make_problem(2, queries, 700, 2, 2, 128, window)

    def drawn(batch: int, seed: int) -> dict:
        of_batch = replace(problem, batch=batch)
        q, k, v = make_operands(of_batch, seed, device)
        modifiers = recipe.make(of_batch, q, seed)
        return {"q": q, "k": k, "v": v, "window_size": window} | modifiers | options

    call = drawn(2, 0)
    fa3.flash_attn_func(**drawn(3, 0) if options else call, return_lse=True)
    graph, results = captured(lambda: fa3.flash_attn_func(**call, return_lse=True))
    for seed in (1, 2):
        new = drawn(2, seed)
        for tensor, value in zip(tensors_of(call), tensors_of(new), strict=True):
            tensor.copy_(value)
        for result in results:
            result.fill_(torch.nan)
        graph.replay()
        assert all(map(torch.equal, results, fa3.flash_attn_func(**new, return_lse=True)))


def tensors_of(call: dict) -> list[torch.Tensor]:
    """The tensors of a call, with those of its score and its mask."""
    functions = [value for value in call.values() if isinstance(value, fa3.Score | fa3.Mask)]
    values = [*call.values(), *(value for one in functions for value in vars(one).values())]
    return [value for value in values if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize("window", [Window(), CAUSAL])
def test_tensors_of_another_gpu(window, device):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    problem = make_problem(2, 500, 500, 4, window=window)
    check(problem, device)
    assert torch.cuda.current_device() != 1
    check(problem, torch.device("cuda", 1))
    assert torch.cuda.current_device() != 1


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

SANITIZED_GRADIENTS = """
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


@pytest.mark.gpu
@pytest.mark.sanitizer
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("tool", "program"),
    [("memcheck", SANITIZED), ("racecheck", SANITIZED), ("memcheck", SANITIZED_GRADIENTS)],
    ids=["memory", "races", "memory of gradients"],
)
def test_compute_sanitizer_finds_nothing(tool, program):
    """Of gradients not with racecheck: it takes copies in bulk and the loads that wait for their
    mbarrier for a race (docs/experiments.md)."""
    check_sanitized(tool, program)


def test_out_of_an_empty_problem_has_the_head_dim_of_v():
    q, k, v = make_operands(make_problem(2, 70, 0, 2, 2, head_dim_v=96))
    out = fa3.flash_attn_func(q, k, v)
    assert out.shape == (2, 70, 4, 96) and (out == 0).all()
    out.fill_(torch.nan)
    assert (fa3.flash_attn_func(q, k, v, out=out) == 0).all()


@pytest.mark.compiles
def test_type_checkers_see_the_arguments(tmp_path, monkeypatch):
    """Decorators leave the signatures of the public functions as they are."""
    checker = pytest.importorskip("mypy.api")
    monkeypatch.setenv("MYPYPATH", str(Path(fa3.__file__).parents[1]))
    monkeypatch.chdir(tmp_path)
    names = [name for name in fa3.__all__ if name.startswith("flash_attn_")]
    Path("calls.py").write_text("\n".join(["import fa3", *(f"fa3.{n}(no=1)" for n in names)]))
    # Only fa3 is read: others' decorators would make a signature anything, and the test fail.
    options = "--config-file=", "--follow-imports=silent", "--ignore-missing-imports"
    options += ("--no-site-packages",)
    printed, _, _ = checker.run([*options, "calls.py"])
    for number, name in enumerate(names, 2):
        assert f'calls.py:{number}: error: Unexpected keyword argument "no" for "{name}"' in printed
