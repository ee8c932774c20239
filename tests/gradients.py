"""How far gradients may be from those of dense attention."""

import math
from collections.abc import Callable

import torch
from problems import poisoned_allocations
from reference import FEW_KEYS, NO_WINDOW, cap_error, dense, largest_difference, visible
from varlen_problems import VarlenProblem, modifiers_of

import fa3
from fa3.problem import Window

FLOOR = 2e-5
"""Error that is always allowed, of gradients of size 1: the PyTorch computation can be exact."""

OPTIONS = "deterministic", "sm_margin", "schedule"
"""Arguments of a call that make no difference to what should come of it."""


def differentiate(
    run: Callable, inputs: dict, given: tuple, weights: tuple, dtype: torch.dtype | None = None
) -> list[torch.Tensor]:
    """Return gradients of a call's inputs.

    Args:
        run: takes the inputs by name; returns out and the log-sum-exp.
        given: the gradients of both.
        weights: whether each is part of the loss.
        dtype: of the inputs; None for theirs.
    """
    leaves = {name: x.detach().to(dtype or x.dtype) for name, x in inputs.items()}
    leaves = {name: x.requires_grad_() for name, x in leaves.items()}
    pairs = zip(run(**leaves), given, weights, strict=True)
    outputs, of_outputs = zip(*((x, d.to(x.dtype)) for x, d, on in pairs if on), strict=True)
    wanted = list(leaves.values())
    return list(torch.autograd.grad(outputs, wanted, of_outputs, materialize_grads=True))


def check_gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    window: Window = NO_WINDOW,
    weights: tuple[bool, bool] = (True, True),
    seed: int = 0,
    **modifiers,
) -> dict[str, torch.Tensor]:
    """Assert that errors of gradients are at most twice those of PyTorch in q's dtype.

    Args:
        weights: whether out and the log-sum-exp are part of the loss.
        modifiers: arguments of the call.

    Returns:
        the gradients by name.
    """
    inputs = {"q": q, "k": k, "v": v}
    if modifiers.get("sinks") is not None:
        inputs["sinks"] = modifiers["sinks"]
    generator = torch.Generator(q.device).manual_seed(seed)
    batch, seqlen_q, heads_q, _ = q.shape

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=q.device)

    d_out = randn(batch, seqlen_q, heads_q, v.shape[3]).to(q.dtype)
    given = d_out, randn(batch, heads_q, seqlen_q)
    plain = {name: value for name, value in modifiers.items() if name not in OPTIONS}

    def of_dtype(dtype: torch.dtype):
        return lambda **leaves: dense(**(plain | leaves), window=window, dtype=dtype)

    def ours(**leaves):
        options = {"window_size": tuple(window), "return_lse": True}
        return fa3.flash_attn_func(**(modifiers | leaves), **options)

    exact = differentiate(of_dtype(torch.float64), inputs, given, weights, torch.float64)
    rounded = differentiate(of_dtype(q.dtype), inputs, given, weights)
    with poisoned_allocations():
        found = differentiate(ours, inputs, given, weights)
    # The error of a score is the relative error of its weight.
    capped = cap_error(q, k, q.shape[-1] ** -0.5, modifiers.get("softcap", 0.0) if q.is_cuda else 0)
    beside = {}
    if "sinks" in inputs:
        beside["sinks"] = error_of_sinks(q, k, v, d_out, window, plain)
    seen = visible(seqlen_q, k.shape[1], window).sum(dim=1)
    is_rounded = q.is_cuda or "dropout_p" in modifiers or "sinks" in inputs
    if is_rounded and (seen < FEW_KEYS).all():
        beside |= dict.fromkeys("qk", error_of_delta(q, k, v, d_out))
    relative = 4 * capped
    if q.is_cuda and weights[1]:
        # Weights are rounded before they are multiplied by the gradient of the log-sum-exp.
        relative += torch.finfo(q.dtype).eps / 2
    check_errors(inputs, found, exact, rounded, relative, beside)
    return dict(zip(inputs, found, strict=True))


def check_errors(
    inputs: dict[str, torch.Tensor],
    found: list[torch.Tensor],
    exact: list[torch.Tensor],
    rounded: list[torch.Tensor],
    relative: float,
    beside: dict[str, float],
) -> None:
    """Assert that gradients are as close to the exact ones as those of PyTorch in 16 bits, twice.

    Args:
        relative: what is allowed beside that, times the largest value.
        beside: what is allowed beside that, by name.
    """
    for name, ours, true, theirs in zip(inputs, found, exact, rounded, strict=True):
        assert (ours.shape, ours.dtype) == (inputs[name].shape, inputs[name].dtype)
        assert ours.isfinite().all(), f"the gradient of {name} is not finite"
        size = largest_difference(true, 0 * true)
        allowed = 2 * largest_difference(theirs, true) + FLOOR * (1 + size) + relative * size
        allowed += beside.get(name, 0.0)
        error = largest_difference(ours, true)
        assert error <= allowed, f"{name}: error {error:.3g} is above {allowed:.3g}"


def error_of_delta(q, k, v, d_out) -> float:
    """Return how far the rounding of out alone may take a gradient of q or k.

    Torch's weight of a single key is exactly 1, and dP - delta exactly 0. Beside a reference that
    is not the row's maximum a weight is any number, and rounded to 16 bits, like those of several
    keys. So is what dropout divides by the share that it keeps.
    """
    largest = max(x.abs().max().item() for x in (q, k))
    delta = (d_out.norm(dim=-1).max() * v.float().norm(dim=-1).max()).item()
    return torch.finfo(q.dtype).eps * delta * largest * q.shape[-1] ** -0.5


def error_of_sinks(q, k, v, d_out, window: Window, modifiers: dict) -> float:
    """Return how far the rounding of out alone may take the gradient of a sink.

    A sink has one number, the sum of P dO O over rows and columns. Few of them are no measure of
    what PyTorch's error could have been.
    """
    out, lse = dense(q, k, v, window=window, **modifiers)
    p = torch.exp(modifiers["sinks"].double()[:, None] - lse).transpose(1, 2)[..., None]
    terms = (p * d_out.double() * out).square().sum(dim=(0, 1, 3)).sqrt()
    return 2 * torch.finfo(q.dtype).eps * terms.amax().item()


def error_of_queries(q, k, v, d_out, window: Window, modifiers: dict) -> float:
    """Return how far the rounding of out alone may take the gradient of a query, through delta.

    All of a row's gradient goes with its delta. Few rows are no measure of what PyTorch's error
    could have been.
    """
    out, _ = dense(q, k, v, window=window, **modifiers)
    keys, _ = dense(q, k, k, window=window, **modifiers)
    of_rows = (d_out.double() * out).norm(dim=3) * keys.abs().amax(dim=3) * q.shape[3] ** -0.5
    return torch.finfo(q.dtype).eps * of_rows.amax().item() if of_rows.numel() else 0.0


# --------------------------------------------------------------------------------- packed sequences

NAMES = ("q", "k", "v", "sinks")


def check_varlen_gradients(
    problem: VarlenProblem, call: dict, weights: tuple[bool, bool] = (True, True), seed: int = 0
) -> dict[str, torch.Tensor]:
    """Assert that errors are at most twice those of PyTorch, and that rows that are not used get 0.

    Args:
        call: what `make_call` made of the problem.
        weights: whether out and the log-sum-exp are part of the loss. Their gradients are NaN in
            rows that are not used.

    Returns:
        the gradients by name.
    """
    inputs = {name: call[name] for name in NAMES if call[name] is not None}
    q, k, v = (call[name] for name in "qkv")
    left, right = problem.window
    window = Window(left, 0 if problem.causal else right)
    generator = torch.Generator(q.device).manual_seed(seed)
    rows = [tuple(slice(part.start, part.stop) for part in of_both) for of_both in problem.rows]
    d_out, d_lse = (
        torch.full(shape, torch.nan, device=q.device)
        for shape in ((*q.shape[:2], v.shape[2]), (q.shape[1], len(q)))
    )
    for of_q, _ in rows:
        for part in (d_out[of_q], d_lse[:, of_q]):
            part.copy_(torch.randn(part.shape, generator=generator, device=q.device))
    d_out = d_out.to(q.dtype)

    used = torch.cat([torch.arange(len(q))[of_q] for of_q, _ in rows])

    def of_dtype(dtype: torch.dtype):
        def run(**leaves):
            outs, lses = [], []
            for sequence, (of_q, of_k) in enumerate(rows):
                modifiers = modifiers_of(call, sequence) | {"sinks": leaves.get("sinks")}
                parts = leaves["q"][None, of_q], leaves["k"][None, of_k], leaves["v"][None, of_k]
                out, lse = dense(*parts, window=window, dtype=dtype, **modifiers)
                outs.append(out[0])
                lses.append(lse[0])
            return torch.cat(outs), torch.cat(lses, dim=1)

        return run

    def ours(**leaves):
        return fa3.flash_attn_varlen_func(**(call | leaves), return_lse=True)

    of_used = d_out[used], d_lse[:, used]
    exact = differentiate(of_dtype(torch.float64), inputs, of_used, weights, torch.float64)
    rounded = differentiate(of_dtype(q.dtype), inputs, of_used, weights)
    with poisoned_allocations():
        found = differentiate(ours, inputs, (d_out, d_lse), weights)
    capped, of_queries, of_delta, of_sinks = 0.0, 0.0, 0.0, []
    for sequence, (of_q, of_k) in enumerate(rows):
        operands = q[None, of_q], k[None, of_k], v[None, of_k]
        modifiers = modifiers_of(call, sequence)
        if q.is_cuda and modifiers["softcap"] and operands[0].numel() and operands[1].numel():
            scale = q.shape[-1] ** -0.5
            capped = max(capped, cap_error(*operands[:2], scale, modifiers["softcap"]))
        rest = d_out[None, of_q], window, modifiers
        of_queries = max(of_queries, error_of_queries(*operands, *rest))
        if 0 < operands[1].shape[1] < FEW_KEYS and q.is_cuda and operands[0].numel():
            of_delta = max(of_delta, error_of_delta(*operands, d_out[None, of_q]))
        if "sinks" in inputs:
            of_sinks.append(error_of_sinks(*operands, *rest))
    beside = {"q": of_queries + of_delta, "k": of_delta, "sinks": math.hypot(*of_sinks)}
    check_errors(inputs, found, exact, rounded, 4 * capped, beside)
    for name, gradient in zip(inputs, found, strict=True):
        if name != "sinks":
            is_unused = torch.ones(len(gradient), dtype=torch.bool, device=q.device)
            for of_q, of_k in rows:
                is_unused[of_q if name == "q" else of_k] = False
            assert not gradient[is_unused].any(), f"rows of {name} that are not used have gradients"
    return dict(zip(inputs, found, strict=True))
