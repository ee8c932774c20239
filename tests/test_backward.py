"""Gradients against those of torch's autograd through dense attention in float64.

On a GPU memory is NaN wherever a kernel writes nothing.
"""

import itertools
from dataclasses import dataclass
from types import SimpleNamespace

import cutlass.cute as cute
import pytest
import torch
from gradients import check_gradients
from hypothesis import given, settings
from hypothesis import strategies as st
from pairs import pairs, places
from problems import CAUSAL, make_operands, make_problem, poisoned_allocations, problems
from score_problems import RECIPES_WITH_GRADIENTS, Recipe
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import fa3
from fa3.calls import backward
from fa3.calls.backward import BackwardCall
from fa3.interface import _flash_attn_backward
from fa3.planning.backward import BackwardPlan, most_keys_unzeroed
from fa3.problem import Problem, Window
from fa3.reference.backward import BackwardOperands


def check(problem: Problem, where, weights=(True, False), seed: int = 0, **modifiers) -> dict:
    q, k, v = make_operands(problem, seed, where)
    return check_gradients(q, k, v, problem.window, weights, seed, **modifiers)


def check_same(found, expected) -> None:
    """Assert that gradients have the same bits; on a GPU that they are close: dQ is added up in no
    fixed order."""
    tolerance = 2e-2 if found[0].is_cuda else 0.0
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


# -------------------------------------------------------------------------------- right results


@settings(max_examples=50)
@given(
    problems(1, 200),
    RECIPES_WITH_GRADIENTS,
    st.sampled_from([(1, 1), (1, 0), (0, 1)]),
    st.integers(0, 1000),
)
def test_random_combinations(problem, recipe, weights, seed):
    q, k, v = make_operands(problem, seed)
    modifiers = recipe.make(problem, q, seed)
    check_gradients(q, k, v, problem.window, weights, seed, **modifiers)


def test_rows_that_see_nothing(where):
    problem = make_problem(2, 350, 130, 2, head_dim=64, window=CAUSAL)
    for sinks in (None, torch.tensor([0.5, -1.0], device=where)):
        found = check(problem, where, (True, True), sinks=sinks)
        assert not found["q"][:, :220].any() and found["q"][:, 221:].any()


def test_rows_that_see_nothing_take_no_gradient_whatever_comes():
    q, k, v = leaves(150, 30)
    out, lse = fa3.flash_attn_func(q, k, v, causal=True, return_lse=True)
    d_out, d_lse = torch.randn_like(out), torch.randn_like(lse)
    expected = torch.autograd.grad((out, lse), (q, k, v), (d_out, d_lse), retain_graph=True)
    d_out[:, :120], d_lse[:, :, :120] = torch.nan, torch.inf
    found = torch.autograd.grad((out, lse), (q, k, v), (d_out, d_lse))
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("has_sinks", [False, True])
def test_nothing_to_compute(has_sinks, where):
    """Gradients are 0, but of the sinks of rows without keys."""
    sizes = (0, 5, 5, 1), (1, 0, 5, 1), (1, 5, 0, 1), (1, 5, 5, 0)
    for batch, seqlen_q, seqlen_k, heads_kv in sizes:
        problem = make_problem(batch, seqlen_q, seqlen_k, heads_kv, 2, 32)
        q, k, v = (x.requires_grad_() for x in make_operands(problem, 0, where))
        sinks = torch.ones(2 * heads_kv, device=where, requires_grad=True) if has_sinks else None
        out, lse = fa3.flash_attn_func(q, k, v, sinks=sinks, return_lse=True)
        wanted = (q, k, v, sinks) if has_sinks else (q, k, v)
        found = torch.autograd.grad((out, lse), wanted, (out, torch.ones_like(lse)))
        for x, dx in zip(wanted[:3], found[:3], strict=True):
            assert dx.shape == x.shape and not dx.any()
        if has_sinks:
            # The log-sum-exp of a row without keys is its head's sink.
            assert found[3].tolist() == [batch * seqlen_q * (seqlen_k == 0)] * len(sinks)


# ------------------------------------------------------------------------------ part of autograd


def leaves(seqlen_q: int = 70, seqlen_k: int = 90, where="cpu") -> list[torch.Tensor]:
    """Return q, k and v that require grad."""
    head_dim = 32 if where == "cpu" else 64
    operands = make_operands(make_problem(2, seqlen_q, seqlen_k, 2, head_dim=head_dim), 0, where)
    return [x.requires_grad_() for x in operands]


def test_only_some_inputs(where):
    q, k, v = leaves(170, 190, where)
    inputs = {"q": q, "k": k, "v": v, "sinks": torch.zeros(2, requires_grad=True, device=where)}
    for names in (("q",), ("v",), ("sinks",), ("k", "v")):
        out = fa3.flash_attn_func(**inputs)
        d_out = torch.randn_like(out)
        expected = torch.autograd.grad(out, [inputs[name] for name in names], d_out)
        some = {name: x if name in names else x.detach() for name, x in inputs.items()}
        wanted = [some[name] for name in names]
        check_same(torch.autograd.grad(fa3.flash_attn_func(**some), wanted, d_out), expected)


def test_the_forward_pass_is_the_same(where):
    q, k, v = leaves(170, 190, where)
    found = fa3.flash_attn_func(q, k, v, causal=True, return_lse=True)
    assert all(x.requires_grad for x in found)
    with torch.no_grad():
        expected = fa3.flash_attn_func(q, k, v, causal=True, return_lse=True)
    assert not any(x.requires_grad for x in expected)
    assert all(map(torch.equal, found, expected))
    with torch.inference_mode():
        assert torch.equal(fa3.flash_attn_func(q, k, v, causal=True), expected[0])


def test_views_and_strange_gradients(where):
    """Operands and gradients that are not contiguous; one gradient is expanded from a number."""
    generator = torch.Generator(where).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=where).half()

    packed, shared = normal(2, 80, 3, 4, 64).requires_grad_(), normal(1, 80, 1, 64).requires_grad_()
    d_out = normal(2, 4, 80, 64).transpose(1, 2)

    def gradients(change):
        q, k, _ = packed.unbind(2)
        q, k = (change(x.transpose(1, 2)).transpose(1, 2) for x in (q, k))
        out = fa3.flash_attn_func(q, k, change(shared.expand(2, -1, 4, -1)), causal=True)
        return torch.autograd.grad(out, (packed, shared), d_out)

    check_same(gradients(lambda x: x), gradients(torch.clone))
    q, k, v = leaves(170, 190, where)
    out = fa3.flash_attn_func(q, k, v)
    expected = torch.autograd.grad(out, (q, k, v), torch.ones_like(out), retain_graph=True)
    check_same(torch.autograd.grad(out.sum(), (q, k, v)), expected)


@pytest.mark.parametrize("mode", ["twice", "checkpoint", "autocast", "plan"])
def test_the_same_bits(mode):
    q, k, v = leaves()
    out = fa3.flash_attn_func(q, k, v, causal=True)
    d_out = torch.randn_like(out)
    expected = torch.autograd.grad(out, (q, k, v), d_out)

    def run(q, k, v, **options):
        return fa3.flash_attn_func(q, k, v, causal=True, **options)

    if mode == "autocast":
        with torch.autocast("cpu"):
            found = torch.autograd.grad(run(q, k, v), (q, k, v), d_out)
    else:
        runs = {
            "twice": run,
            "checkpoint": lambda *x: checkpoint(run, *x, use_reentrant=False),
            "plan": lambda *x: run(*x, schedule="single"),
        }
        found = torch.autograd.grad(runs[mode](q, k, v), (q, k, v), d_out)
    assert all(map(torch.equal, found, expected))


def test_what_is_kept_is_not_copied():
    """Nor what lies in a buffer with other tensors, nor the tensors of a mask."""
    packed = torch.randn(2, 70, 3, 2, 64).bfloat16().requires_grad_()
    q, k, v = packed.unbind(2)
    problem = make_problem(2, 70, 70, 2)
    modifiers = Recipe(20.0, 1, "q", mask="documents").make(problem, q)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        out, lse = fa3.flash_attn_func(q, k, v, return_lse=True, **modifiers)
    ours = [x.data_ptr() for x in (q, k, v, out, lse, modifiers["alibi_slopes"])]
    assert [x.data_ptr() for x in kept[:6]] == ours
    assert kept[-1].data_ptr() == modifiers["sinks"].data_ptr()
    of_mask = {x.data_ptr() for x in vars(modifiers["mask"]).values()}
    assert {x.data_ptr() for x in kept[6:-1]} == of_mask


def test_what_was_changed_since_is_not_used():
    q, k, v = leaves()
    slopes = torch.ones(2)
    for tensor in (k, slopes):
        out = fa3.flash_attn_func(q, k, v, alibi_slopes=slopes)
        with torch.no_grad():
            tensor.mul_(2.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


# -------------------------------------------------------------------------------- what is refused


@dataclass(frozen=True)
class Twice(fa3.Score):
    def score(self, logit, at):
        return 2.0 * logit

    def reference(self, logits, at):
        return 2 * logits


@pytest.mark.parametrize("name", ["q", "k", "v", "d_out", "d_lse"])
def test_second_derivatives_are_refused(name):
    """By whatever the gradients depend on."""
    q, k, v = leaves()
    out, lse = fa3.flash_attn_func(q, k, v, return_lse=True)
    given = [torch.randn_like(x).requires_grad_() for x in (out, lse)]
    found = torch.autograd.grad((out, lse), (q, k, v), given, create_graph=True)
    inputs = dict(zip(("q", "k", "v", "d_out", "d_lse"), (q, k, v, *given), strict=True))
    with pytest.raises(NotImplementedError, match="flash_attn_func has no second derivative"):
        torch.autograd.grad(sum(x.float().sum() for x in found), inputs[name])


@pytest.mark.parametrize("name", ["q", "k", "v", "sinks"])
def test_what_has_no_gradient_is_refused(name):
    q, k, v = (x.detach() for x in leaves())
    inputs = {"q": q, "k": k, "v": v, "sinks": torch.zeros(2)}
    inputs[name] = inputs[name].clone().requires_grad_()
    with pytest.raises(ValueError, match=f"^{name} requires grad, so out must be None"):
        fa3.flash_attn_func(**inputs, out=torch.empty_like(q))
    with pytest.raises(NotImplementedError, match=f"^{name} requires grad, but score has no deriv"):
        fa3.flash_attn_func(**inputs, score=Twice())
    with pytest.raises(NotImplementedError, match=f"^{name} requires grad inside of a transform"):
        torch.func.vmap(lambda x: fa3.flash_attn_func(**inputs) * x)(torch.ones(2))
    with torch.no_grad():
        fa3.flash_attn_func(**inputs, score=Twice(), out=torch.empty_like(q))


def test_torch_knows_of_gradients_only_where_they_may_be_differentiated(monkeypatch):
    """To tell torch of them takes the host as long as the launches."""
    told = []

    def apply(*given):
        told.append(len(given))
        return backward.WithoutDerivative.forward(SimpleNamespace(), *given)

    monkeypatch.setattr(backward.WithoutDerivative, "apply", apply)
    q, k, v = leaves()
    out = fa3.flash_attn_func(q, k, v)
    expected = torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)
    assert not told
    found = torch.autograd.grad(out.sum(), (q, k, v), create_graph=True)
    assert len(told) == 1
    assert all(map(torch.equal, found, expected))


def test_where_there_is_no_memory_there_are_no_gradients():
    with pytest.raises(ValueError, match=r"^q must be a CPU or CUDA tensor, got meta"):
        fa3.flash_attn_func(*(x.detach().to("meta").requires_grad_() for x in leaves()))


def test_gradients_without_keys_or_without_a_gradient_are_contiguous_zeros():
    """Graphs expect contiguous gradients, and one of the sinks wherever there are sinks."""
    q = torch.randn(2, 4, 5, 64).bfloat16().transpose(1, 2)
    k = torch.empty(2, 0, 4, 64).bfloat16()
    out, lse, sinks = torch.zeros(2, 5, 4, 64).bfloat16(), torch.zeros(2, 4, 5), torch.zeros(4)
    problem = make_problem(2, 5, 0, 4, head_dim=64)
    for d_out in (None, out):
        operands = BackwardOperands(q, k, k, out, lse, d_out, None)
        call = BackwardCall(problem, None, 1.0, False)
        found = call.gradients(operands, (), (sinks,), True, False, None)
        assert all(x.is_contiguous() and not x.any() for x in found)
        assert [x.shape for x in found] == [x.shape for x in (q, k, k, sinks)]


@pytest.mark.parametrize(("value", "overflows"), [(1e30, False), (3e38, True)])
def test_hidden_values_that_overflow_are_as_in_torch(value, overflows):
    """As docs/conventions.md says: dP is infinite, and 0 times infinity is NaN."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, 2, 64).bfloat16() for n in (64, 128, 128))
    v[:, :64] = value
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = fa3.flash_attn_func(*inputs, window_size=(0, 0))
    with sdpa_kernel(SDPBackend.MATH):
        visible = torch.ones(64, 128).tril(64).triu(64).bool()
        of_torch = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in inputs), attn_mask=visible
        )
    for result in (out, of_torch):
        assert result.isfinite().all()
        found = torch.autograd.grad(result.float().sum(), inputs)
        assert [bool(x.isnan().any()) for x in found] == [overflows, overflows, False]


# ------------------------------------------------------------------------------------- on a GPU

WINDOWS = (CAUSAL, Window(), Window(40, 20), Window(left=70))

HEAD_DIMS = (
    *((64, 64), (128, 128), (72, 72), (96, 96), (256, 256)),
    *((192, 128), (128, 192), (160, 160), (192, 192)),
)
"""Sizes (of q and k, of v): those of each way to share the work, and of each swizzle."""

LENGTHS = (
    *((1, 1), (63, 63), (64, 64), (128, 512), (512, 128)),
    *((1023, 1023), (113, 203), (203, 113), (1024, 1000)),
)
"""(queries, keys)."""


@pairs(head_dims=HEAD_DIMS, window=WINDOWS)
def test_lengths(head_dims, window, device):
    """Also as many keys as sums without zeros have, one more, and queries that see no key; and
    more CTAs than key tiles, which write dQ of what the others add."""
    head_dim, head_dim_v = head_dims
    keys = most_keys_unzeroed(window)
    around = (keys, keys), (keys + 1, keys + 1), (keys, 300), (300, keys + 1), (9001, 70)
    for turn, lengths in enumerate(LENGTHS + around):
        sizes = 1 if lengths in around else 2, *lengths, 2, (1, 2, 3, 8)[turn % 4]
        bounds = Window(right=100) if window == CAUSAL and turn % 3 == 2 else window
        problem = make_problem(*sizes, head_dim, bounds, head_dim_v=head_dim_v)
        check(problem, device, schedule="list")  # few forward kernels, of other tests


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_scores_of_all_sizes(head_dim, device):
    """Far below 0 too: the zeros after the last key must not come in, as large as they then are."""
    q, k, v = make_operands(make_problem(1, 150, 150, 1, head_dim=head_dim), 0, device)
    for size in (1e2, -1e2, 1e-3):
        leaves = [x.requires_grad_() for x in (q.abs() * size, k.abs(), v.clone())]
        with poisoned_allocations():
            found = torch.autograd.grad(fa3.flash_attn_func(*leaves).float().sum(), leaves)
        assert all(x.isfinite().all() for x in found)


def test_memory_beside_the_gradients(device):
    q, k, v = leaves(4096, 4096, device)
    out = fa3.flash_attn_func(q, k, v)
    d_out = torch.randn_like(out)
    problem = make_problem(2, 4096, 4096, 2, head_dim=64)
    plan = BackwardPlan.of(problem)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(out, (q, k, v), d_out)
    took = torch.cuda.max_memory_allocated() - before
    scratch = 4 * plan.layout.table_at
    assert took <= scratch + 3 * q.nbytes + (1 << 20)


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


SHAPES = (
    (200, 300, 4, 1, 64, 64),
    (100, 150, 2, 2, 128, 72),
    (130, 130, 4, 2, 256, 256),
    (64, 40, 2, 1, 192, 128),
)
"""Shared key tiles, one query head, wide heads, and fewer keys."""

CU_Q, CU_K = 3, 5
"""Divisors: the first of two packed sequences has this part of the rows."""


def make_call(shape, where, is_packed):
    seqlen_q, seqlen_k, heads_q, heads_kv, head_dim, head_dim_v = shape
    generator = torch.Generator(where).manual_seed(sum(shape))
    sizes = (
        (seqlen_q, heads_q, head_dim),
        (seqlen_k, heads_kv, head_dim),
        (seqlen_k, heads_kv, head_dim_v),
        (seqlen_q, heads_q, head_dim_v),
    )
    tensors = [torch.randn(x, generator=generator, device=where).bfloat16() for x in sizes]
    lengths = {}
    if is_packed:
        for name, rows, part in (("q", seqlen_q, CU_Q), ("k", seqlen_k, CU_K)):
            ends = torch.tensor([0, rows // part, rows], dtype=torch.int32, device=where)
            lengths |= {f"cu_seqlens_{name}": ends, f"max_seqlen_{name}": rows}
    else:
        tensors = [tensor[None] for tensor in tensors]
    *operands, d_out = tensors
    function = fa3.flash_attn_varlen_func if is_packed else fa3.flash_attn_func
    out, lse = function(*operands, **lengths, causal=True, return_lse=True)
    return (d_out, *operands, out, lse), lengths


def gradients(tensors, lengths, dtype, filled=float("nan"), **options):
    """Return dq, dk and dv, dk and dv of a dtype, written over `filled`."""
    dq = torch.full_like(tensors[1], float("nan"))
    dk, dv = (torch.full_like(x, filled, dtype=dtype) for x in tensors[2:4])
    with poisoned_allocations():
        _flash_attn_backward(*tensors, **lengths, dq=dq, dk=dk, dv=dv, is_causal=True, **options)
    return dq, dk, dv


@pairs(shape=SHAPES, is_packed=(False, True), deterministic=(False, True))
def test_rounded_they_are_those_in_16_bits(shape, is_packed, deterministic, where):
    """But for rounding: the fp32 kernel may sum in another order than the kernel in 16 bits."""
    call = make_call(shape, where, is_packed)
    expected = gradients(*call, torch.bfloat16, deterministic=deterministic)
    dq, *dkv = gradients(*call, torch.float32, deterministic=deterministic)
    for exact, rounded in zip(dkv, expected[1:], strict=True):
        assert exact.dtype == torch.float32 and exact.isfinite().all()
        torch.testing.assert_close(exact.bfloat16(), rounded, rtol=2**-7, atol=1e-3)
        # They are no rounded numbers.
        assert (exact != exact.bfloat16()).float().mean() > 0.5
    torch.testing.assert_close(dq, expected[0], rtol=2**-6, atol=2e-3)


@pytest.mark.parametrize("is_packed", [False, True], ids=["dense", "packed"])
def test_they_are_added_to_what_is_there(is_packed, where):
    call = make_call((200, 300, 4, 1, 64, 64), where, is_packed)
    dq, dk, dv = gradients(*call, torch.float32, deterministic=True)
    same, *sums = gradients(
        *call, torch.float32, filled=3.0, deterministic=True, accumulate_dkv=True
    )
    assert torch.equal(dq, same)
    for added, alone in zip(sums, (dk, dv), strict=True):
        assert torch.equal(added, alone + 3.0)


@dataclass(frozen=True)
class Diagonal(fa3.Mask):
    """Hides a query's own position."""

    @cute.jit
    def visible(self, at):
        return at.query != at.key

    def reference(self, at):
        return at.query != at.key


FUNCTION_OPTIONS = {
    "window": {"window_size": (70, 20), "softcap": 9.0, "deterministic": True},
    "sinks": {"causal": True, "softmax_scale": 0.2, "sinks": torch.tensor([0.3, -1.0, 2.0, 0.0])},
    "slopes": {"causal": True, "alibi_slopes": torch.tensor([0.1, 0.2, 0.4, 0.3])},
    "dropout": {"dropout_p": 0.3, "rng_state": torch.tensor([5]), "causal": True},
    "mask": {"mask": Diagonal()},
}


@places(
    "options,is_packed",
    cpu=itertools.product(FUNCTION_OPTIONS.values(), (False, True)),
    gpu=zip(FUNCTION_OPTIONS.values(), itertools.cycle((False, True))),
)
def test_the_function_gives_autograd_s_gradients(is_packed, options, where):
    (d_out, *operands, _, _), lengths = make_call((150, 190, 4, 2, 64, 48), where, is_packed)
    options = {
        name: value.to(where) if isinstance(value, torch.Tensor) else value
        for name, value in options.items()
    }
    leaves = [x.requires_grad_() for x in operands]
    if "sinks" in options:
        leaves.append(options["sinks"].clone().requires_grad_())
        options = options | {"sinks": leaves[-1]}
    function = fa3.flash_attn_varlen_func if is_packed else fa3.flash_attn_func
    out, lse = function(*operands, **lengths, **options, return_lse=True)
    d_lse = torch.rand(lse.shape, device=where)
    expected = torch.autograd.grad((out, lse), leaves, (d_out, d_lse))
    with torch.no_grad():
        found = fa3.flash_attn_backward(
            d_out, *operands, out, lse, d_lse=d_lse, **lengths, **options
        )
    assert len(found) == 4 and (found[3] is None) == ("sinks" not in options)
    check_same(found[: len(leaves)], expected)


def test_parts_of_the_keys_add_up(where):
    """In float32, into tensors that are passed; None for a gradient of zeros."""
    (d_out, q, k, v, out, lse), _ = make_call((64, 150, 4, 2, 64, 48), where, is_packed=False)
    out, lse = fa3.flash_attn_func(q, k, v, return_lse=True)
    whole = fa3.flash_attn_backward(d_out, q, k, v, out, lse, fp32_dkv=True)
    assert [x.dtype for x in whole[:3]] == [torch.bfloat16, torch.float32, torch.float32]
    sums = [torch.zeros(x.shape, device=where) for x in (q, k, v)]
    for begin, end in ((0, 60), (60, 150)):
        dk, dv = (x[:, begin:end] for x in sums[1:])
        part = fa3.flash_attn_backward(
            d_out, q, k[:, begin:end], v[:, begin:end], out, lse, dk=dk, dv=dv, accumulate_dkv=True
        )
        assert part[1] is dk and part[2] is dv
        sums[0] += part[0]
    for one, other in zip(sums, whole[:3], strict=True):
        torch.testing.assert_close(one, other.float(), atol=2e-2, rtol=2e-2)
    nothing = fa3.flash_attn_backward(None, q, k, v, out, lse)
    assert not any(x.any() for x in nothing[:3])
