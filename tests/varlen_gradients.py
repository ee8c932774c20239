"""Gradients of packed sequences against those of torch's autograd, sequence by sequence."""

import math

import torch
from gradients import (
    FEW_KEYS,
    check_errors,
    differentiate,
    error_of_delta,
    error_of_queries,
    error_of_sinks,
)
from problems import poisoned_allocations
from reference import cap_error, dense
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
