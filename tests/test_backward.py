"""Gradients on the CPU against those of torch's autograd through dense attention in float64."""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import cutlass.cute as cute
import pytest
import torch
from gradients import check_gradients, sums_in_float64, without_empty_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from pairs import pairs
from problems import head_dims, make_operands, make_problem, windows
from score_problems import Recipe, modify
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import fa3
from fa3.calls import autograd, backward
from fa3.calls.forward import PreparedCall
from fa3.planning.planner import plan_forward
from fa3.problem import Problem, Window
from fa3.reference.backward import BackwardOperands, Wanted
from fa3.reference.dropout import Dropout

# -------------------------------------------------------------------------------- right results


@st.composite
def problems(draw) -> Problem:
    return make_problem(
        batch=draw(st.integers(1, 2)),
        seqlen_q=draw(st.integers(1, 200)),
        seqlen_k=draw(st.integers(1, 200)),
        num_heads_kv=draw(st.integers(1, 2)),
        qhead_per_kvhead=draw(st.sampled_from([1, 2, 3])),
        head_dim=draw(head_dims()),
        window=draw(windows(largest=220)),
        dtype=draw(st.sampled_from(["bfloat16", "float16"])),
        head_dim_v=draw(st.none() | head_dims()),
    )


RECIPES = st.builds(
    Recipe,
    st.sampled_from([0.0, 0.0, 2.0, 30.0]),
    st.sampled_from([0, 1, 2]),
    st.sampled_from([None, "float32", "q"]),
    st.none(),
    st.sampled_from([None, "documents", "prefix", "span"]),
)


@settings(max_examples=60)
@given(problems(), RECIPES, st.sampled_from([(1, 1), (1, 0), (0, 1)]), st.integers(0, 1000))
def test_random_combinations(problem, recipe, weights, seed):
    q, k, v = make_operands(problem, seed)
    modifiers = recipe.make(problem, q, seed)
    check_gradients(q, k, v, problem.window, weights, seed, **modifiers)


@pairs(
    window=[Window(right=0), Window(2, 1)],
    recipe=[Recipe(), Recipe(3.0, 2, "float32"), Recipe(mask="documents")],
    dropout=[None, Dropout(torch.tensor([7]), 0.4)],
)
def test_gradcheck(window, recipe, dropout):
    """Of out and of the log-sum-exp together, every element. In float64 nothing is rounded to 16
    bits, nor to 32."""
    problem = make_problem(1, 5, 6, 1, 2, 8, window)
    inputs = [2 * x.double() for x in make_operands(problem)]
    problem, modifiers = modify(problem, inputs[0], recipe.make(problem, inputs[0]))
    spec = replace(problem.spec, has_dropout=dropout is not None)
    problem, tensors = replace(problem, spec=spec), [*(modifiers.tensors or ())]
    if spec.sinks:
        tensors[-1] = tensors[-1].double().requires_grad_()
    call = PreparedCall(plan_forward(problem), None, (1, 2, 5), problem=problem)

    def attend(*given):
        return call.attend(*given, torch.empty_like(inputs[0]), scale=0.25, dropout=dropout)

    backward = autograd.BackwardCall(problem, None, 0.25, False, 1)
    given = autograd.DifferentiableCall(attend, backward, autograd.NO_LENGTHS, dropout, True)

    def run(*tensors):
        return without_empty_rows(*autograd.attend_differentiably(given, *tensors))

    with sums_in_float64():
        assert torch.autograd.gradcheck(run, (*(x.requires_grad_() for x in inputs), *tensors))


@pytest.mark.parametrize("qhead_per_kvhead", [1, 4, 8])
@pytest.mark.parametrize("window", [Window(), Window(right=0), Window(left=40), Window(20, 10)])
def test_shared_heads(window, qhead_per_kvhead):
    problem = make_problem(1, 150, 190, 1, qhead_per_kvhead, 64, window, head_dim_v=32)
    check_gradients(*make_operands(problem), window)


@pytest.mark.parametrize("head_dims", [(8, 8), (256, 256), (192, 128), (64, 256), (72, 40)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_head_dims(head_dims, dtype):
    head_dim, head_dim_v = head_dims
    problem = make_problem(1, 70, 140, 1, 2, head_dim, Window(right=0), dtype, head_dim_v)
    check_gradients(*make_operands(problem), problem.window)


def test_rows_that_see_nothing():
    window = Window(right=0)
    q, k, v = make_operands(make_problem(2, 150, 30, 2, head_dim=32))
    found = check_gradients(q, k, v, window)
    assert not found["q"][:, :120].any() and found["q"][:, 121:].any()
    sinks = torch.tensor([0.5, -1.0])
    found = check_gradients(q, k, v, window, sinks=sinks)
    assert not found["q"][:, :120].any()


def test_rows_that_see_nothing_take_no_gradient_whatever_comes():
    q, k, v = leaves(150, 30)
    out, lse = fa3.flash_attn_func(q, k, v, causal=True, return_lse=True)
    d_out, d_lse = torch.randn_like(out), torch.randn_like(lse)
    expected = torch.autograd.grad((out, lse), (q, k, v), (d_out, d_lse), retain_graph=True)
    d_out[:, :120], d_lse[:, :, :120] = torch.nan, torch.inf
    found = torch.autograd.grad((out, lse), (q, k, v), (d_out, d_lse))
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("sizes", [(0, 5, 5, 1), (1, 0, 5, 1), (1, 5, 0, 1), (1, 5, 5, 0)])
@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -1.0])])
def test_nothing_to_compute(sizes, sinks):
    batch, seqlen_q, seqlen_k, heads_kv = sizes
    problem = make_problem(batch, seqlen_q, seqlen_k, heads_kv, 2, 32)
    sinks = sinks if sinks is None else sinks[: 2 * heads_kv]
    q, k, v = (x.requires_grad_() for x in make_operands(problem))
    if sinks is not None:
        sinks = sinks.clone().requires_grad_()
    out, lse = fa3.flash_attn_func(q, k, v, sinks=sinks, return_lse=True)
    wanted = (q, k, v) if sinks is None else (q, k, v, sinks)
    found = torch.autograd.grad((out, lse), wanted, (out, torch.ones_like(lse)))
    for x, dx in zip(wanted[:3], found[:3], strict=True):
        assert dx.shape == x.shape and not dx.any()
    if sinks is not None:
        # The log-sum-exp of a row without keys is its head's sink.
        assert found[3].tolist() == [batch * seqlen_q * (seqlen_k == 0)] * len(sinks)


def test_blocks_of_a_mask_of_the_users():
    @dataclass(frozen=True)
    class Only(fa3.Mask):
        @cute.jit
        def visible(self, at):
            return at.key >= 140 and at.query < 70 + at.batch

        def reference(self, at):
            return (at.key >= 140) & (at.query < 70 + at.batch)

        def key_range(self, rows):
            return 140, rows.seqlen_k

    q, k, v = make_operands(make_problem(2, 150, 300, 1, 2, 32))
    found = check_gradients(q, k, v, mask=Only())
    assert not found["k"][:, :140].any() and not found["q"][0, 70:].any()


# ------------------------------------------------------------------------------ part of autograd


def leaves(seqlen_q: int = 70, seqlen_k: int = 90, heads: int = 2) -> list[torch.Tensor]:
    """Return q, k and v that require grad."""
    operands = make_operands(make_problem(2, seqlen_q, seqlen_k, heads, head_dim=32))
    return [x.requires_grad_() for x in operands]


@pytest.mark.parametrize("names", [("q",), ("k",), ("v",), ("sinks",), ("q", "sinks"), ("k", "v")])
def test_only_some_inputs(names):
    q, k, v = leaves()
    inputs = {"q": q, "k": k, "v": v, "sinks": torch.zeros(2, requires_grad=True)}
    out = fa3.flash_attn_func(**inputs)
    d_out = torch.randn_like(out)
    expected = torch.autograd.grad(out, [inputs[name] for name in names], d_out)
    some = {name: x if name in names else x.detach() for name, x in inputs.items()}
    found = torch.autograd.grad(fa3.flash_attn_func(**some), [some[name] for name in names], d_out)
    assert all(map(torch.equal, found, expected))


def test_the_forward_pass_is_the_same():
    q, k, v = leaves()
    found = fa3.flash_attn_func(q, k, v, causal=True, return_lse=True)
    assert all(x.requires_grad for x in found)
    with torch.no_grad():
        expected = fa3.flash_attn_func(q, k, v, causal=True, return_lse=True)
    assert not any(x.requires_grad for x in expected)
    assert all(map(torch.equal, found, expected))
    with torch.inference_mode():
        assert torch.equal(fa3.flash_attn_func(q, k, v, causal=True), expected[0])


def test_views_and_repeated_tensors():
    generator = torch.Generator().manual_seed(0)
    packed = torch.randn(2, 80, 3, 4, 64, generator=generator).half().requires_grad_()
    shared = torch.randn(1, 80, 1, 64, generator=generator).half().requires_grad_()
    d_out = torch.randn(2, 80, 4, 64, generator=generator).half().transpose(1, 2).contiguous()

    def gradients(change):
        q, k, _ = packed.unbind(2)
        one = change(q.transpose(1, 2)), change(k.transpose(1, 2))
        q, k = (x.transpose(1, 2) for x in one)
        out = fa3.flash_attn_func(q, k, change(shared.expand(2, -1, 4, -1)), causal=True)
        return torch.autograd.grad(out, (packed, shared), d_out.transpose(1, 2))

    of_views, of_copies = gradients(lambda x: x), gradients(torch.clone)
    assert all(map(torch.equal, of_views, of_copies))
    x = packed.detach()[:, :, 0].requires_grad_()
    apart = [x.detach().requires_grad_() for _ in range(3)]
    (together,) = torch.autograd.grad(fa3.flash_attn_func(x, x, x).float().sum(), x)
    parts = torch.autograd.grad(fa3.flash_attn_func(*apart).float().sum(), apart)
    torch.testing.assert_close(together, sum(parts), atol=2e-3, rtol=2e-3)


def test_a_gradient_that_is_expanded():
    q, k, v = leaves()
    out = fa3.flash_attn_func(q, k, v)
    expected = torch.autograd.grad(out, q, torch.ones_like(out), retain_graph=True)
    found = torch.autograd.grad(out.sum(), q)
    assert torch.equal(*found, *expected)


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


def test_what_is_kept():
    q, k, v = leaves()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.shape) or x, lambda x: x):
        out = fa3.flash_attn_func(q, k, v, causal=True)
        with torch.no_grad():
            fa3.flash_attn_func(q, k, v)
    assert kept == [q.shape, k.shape, v.shape, out.shape, (2, 2, 70)]


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


@pytest.mark.parametrize("slopes", [torch.ones(2), torch.ones(2, 2)])
def test_slopes_have_no_gradient(slopes):
    with pytest.raises(ValueError, match=r"^alibi_slopes requires grad"):
        fa3.flash_attn_func(*leaves(), alibi_slopes=slopes.requires_grad_())


def test_torch_knows_of_gradients_only_where_they_may_be_differentiated(monkeypatch):
    """To tell torch of them takes the host as long as the launches."""
    told = []

    def apply(*given):
        told.append(len(given))
        return autograd.WithoutDerivative.forward(SimpleNamespace(), *given)

    monkeypatch.setattr(autograd.WithoutDerivative, "apply", apply)
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
        found = backward.gradients(problem, operands, 1.0, (sinks,), Wanted(), False, None, 132)
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
