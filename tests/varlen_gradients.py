"""Gradients of packed sequences against those of torch's autograd, sequence by sequence."""

import math

import torch
from gradients import (
    FEW_KEYS,
    check_errors,
    dense,
    error_of_delta,
    error_of_queries,
    error_of_sinks,
)
from problems import poisoned_allocations
from reference import cap_error
from varlen_problems import VarlenProblem, modifiers_of

import fa3
from fa3.problem import Window

NAMES = ("q", "k", "v", "sinks")


def check_varlen_gradients(
    problem: VarlenProblem,
    call: dict,
    weights: tuple[bool, bool] = (True, True),
    seed: int = 0,
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

    def given(outputs: tuple, gradients: tuple) -> tuple[list, list]:
        pairs = zip(outputs, gradients, weights, strict=True)
        chosen = [(x, d.to(x.dtype)) for x, d, on in pairs if on]
        return [x for x, _ in chosen], [d for _, d in chosen]

    def leaves_of(dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
        made = {name: x.detach().to(dtype or x.dtype) for name, x in inputs.items()}
        return {name: x.requires_grad_() for name, x in made.items()}

    def expected(dtype: torch.dtype, of_leaves: torch.dtype | None) -> list[torch.Tensor]:
        leaves, outputs, gradients = leaves_of(of_leaves), [], []
        for sequence, (of_q, of_k) in enumerate(rows):
            modifiers = modifiers_of(call, sequence) | {"sinks": leaves.get("sinks")}
            operands = leaves["q"][None, of_q], leaves["k"][None, of_k], leaves["v"][None, of_k]
            results = dense(*operands, window, dtype, **modifiers)
            results, of_results = given(results, (d_out[None, of_q], d_lse[None, :, of_q]))
            outputs += results
            gradients += of_results
        wanted = list(leaves.values())
        return list(torch.autograd.grad(outputs, wanted, gradients, materialize_grads=True))

    exact = expected(torch.float64, torch.float64)
    rounded = expected(q.dtype, None)
    leaves = leaves_of(None)
    with poisoned_allocations():
        results = fa3.flash_attn_varlen_func(**(call | leaves), return_lse=True)
        outputs, gradients = given(results, (d_out, d_lse))
        wanted = list(leaves.values())
        found = list(torch.autograd.grad(outputs, wanted, gradients, materialize_grads=True))
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
