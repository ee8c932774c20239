"""Problems and tensors that tests draw."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from hypothesis import strategies as st
from reference import NO_WINDOW

import fa3
from fa3.planning.costs import H200
from fa3.planning.planner import Plan, plan_forward
from fa3.planning.tilings import choose_config
from fa3.problem import NO_BOUND, AttentionSpec, Problem, Window
from fa3.reference.walker import execute
from fa3.scores.masks import Band

CAUSAL = Window(right=0)

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def windows(largest: int = 300) -> st.SearchStrategy[Window]:
    """Draw windows: none, causal, and all combinations of bounds."""
    bound = st.just(NO_BOUND) | st.integers(0, largest)
    return st.just(Window()) | st.just(Window(right=0)) | st.builds(Window, bound, bound)


def head_dims(largest: int = 256) -> st.SearchStrategy[int]:
    """Draw sizes of a head: half of them powers of two, half any that is supported."""
    powers = [size for size in (32, 64, 128, 256) if size <= largest]
    return st.sampled_from(powers) | st.integers(1, largest // 8).map(lambda n: 8 * n)


def make_problem(
    batch: int = 1,
    seqlen_q: int = 128,
    seqlen_k: int = 128,
    num_heads_kv: int = 1,
    qhead_per_kvhead: int = 1,
    head_dim: int = 64,
    window: Window = NO_WINDOW,
    dtype: str = "bfloat16",
    head_dim_v: int | None = None,
) -> Problem:
    """Build a problem whose mask fits its window; v is as wide as q unless told."""
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    spec = AttentionSpec(dtype, head_dim, head_dim_v, Band.of(window))
    return Problem(spec, batch, seqlen_q, seqlen_k, num_heads_kv, qhead_per_kvhead, window)


HEAD_DIMS = head_dims()


@st.composite
def problems(draw, least: int = 0, longest: int = 300, sizes=HEAD_DIMS, most: int = 2) -> Problem:
    """Draw problems of `least` or more sequences and rows, and `most` sequences and heads."""
    return make_problem(
        batch=draw(st.integers(least, most)),
        seqlen_q=draw(st.integers(least, longest)),
        seqlen_k=draw(st.integers(least, longest)),
        num_heads_kv=draw(st.integers(min(least, 1), most)),
        qhead_per_kvhead=draw(st.sampled_from([1, 2, 3, 8])),
        head_dim=draw(sizes),
        window=draw(windows(longest + 20)),
        dtype=draw(st.sampled_from(["bfloat16", "float16"])),
        head_dim_v=draw(st.none() | sizes),
    )


def make_operands(
    problem: Problem, seed: int = 0, device="cpu"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw contiguous q, k and v of a problem from the normal distribution."""
    generator = torch.Generator(device).manual_seed(seed)
    spec, batch = problem.spec, problem.batch
    shapes = (
        (batch, problem.seqlen_q, problem.num_heads_q, spec.head_dim),
        (batch, problem.seqlen_k, problem.num_heads_kv, spec.head_dim),
        (batch, problem.seqlen_k, problem.num_heads_kv, spec.head_dim_v),
    )
    return tuple(
        torch.randn(shape, generator=generator, device=device).to(DTYPES[spec.dtype])
        for shape in shapes
    )


def plan_of(problem: Problem, schedule: str = "list", **changes) -> Plan:
    """Plan with the planner's tiling for an H200, without clusters of rows unless told."""
    config = replace(choose_config(problem, H200), **({"cluster_m": 1} | changes))
    return plan_forward(problem, config=config, schedule=schedule)


def run_plan(
    plan: Plan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float, tensors=()
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out and the log-sum-exp that a plan gives on the CPU."""
    batch, seqlen_q, heads, _ = q.shape
    out, lse = q.new_empty(batch, seqlen_q, heads, v.shape[3]), torch.empty(batch, heads, seqlen_q)
    values = {"q": q, "k": k, "v": v, "o": out, "lse": lse, "softmax_scale": softmax_scale}
    execute(plan, values | {"modifiers": tensors})
    return out, lse


def attend(q, k, v, window: Window = NO_WINDOW, **arguments):
    """Call `flash_attn_func` into NaN memory; return out and the log-sum-exp."""
    with poisoned_allocations():
        return fa3.flash_attn_func(q, k, v, window_size=window, return_lse=True, **arguments)


@contextmanager
def poisoned_allocations() -> Iterator[None]:
    """Make torch fill what it allocates with NaN, so that a value never written shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
