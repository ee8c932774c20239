"""The demo: a language model's attention, planned, compiled, checked, timed, drawn.

On a Hopper GPU the kernel runs, and cuDNN runs for comparison. Without one, everything else
happens: plan, compilation for sm_90a, the same algorithm on the CPU.
"""

import argparse
from functools import partial

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from fa3.calls.attention import flash_attn_func
from fa3.planning.planner import plan_forward
from fa3.problem import Problem
from fa3.running.compiler import object_code
from fa3.tools.plan_command import draw_tile_order
from fa3.tools.recording import random_operands
from fa3.tools.tune import time_in_turn
from fa3.tools.warmup import known_gpus

# One layer of Llama 3 8B reading a prompt, and a smaller problem for the CPU.
LLAMA_PREFILL = Problem.of((1, 4096, 32, 128), *[(1, 4096, 8, 128)] * 2, causal=True)
SMALL = Problem.of((1, 1024, 8, 128), *[(1, 1024, 2, 128)] * 2, causal=True)


def show_demo(options: argparse.Namespace) -> None:
    """Run the demo and draw the tile order."""
    on_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    plan = plan_forward(LLAMA_PREFILL, known_gpus()[0])
    paragraph(f"Plan of a Llama 3 8B prefill for {plan.gpu.name}", plan.explain())
    problem, device = (LLAMA_PREFILL, "cuda") if on_hopper else (SMALL, "cpu")
    q, k, v = random_operands(problem, torch.device(device))
    attend = partial(flash_attn_func, q, k, v, causal=True)
    print("\nCompiling the kernel for sm_90a, then attending ...", flush=True)
    if not on_hopper:
        paragraph("Object code", f"{len(object_code(plan.kernel())):,} bytes for sm_90a.")
    exact = torch_attention(q.float(), k.float(), v.float())
    ours, theirs = ((x - exact).abs().max() for x in (attend(), torch_attention(q, k, v)))
    paragraph(
        "Is it right?",
        f"Largest difference to attention in float32: fa3 {ours:.2e}, PyTorch in bfloat16 "
        f"{theirs:.2e}.",
    )
    if on_hopper:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            us = time_in_turn({"fa3": attend, "cuDNN": partial(torch_attention, q, k, v)})
        rates = (
            f"{name:6} {t / 1e3:7.3f} ms {problem.flops / t / 1e6:6.0f} TFLOP/s"
            for name, t in us.items()
        )
        paragraph("How fast is it, under steady load?", "\n".join(rates))
    picture = f"{options.png.resolve()}: one row for each SM or cluster, one bar for each tile."
    try:
        draw_tile_order(plan, options.png)
    except ModuleNotFoundError as error:
        picture = f"Not drawn: {error}"
    paragraph("Picture of the plan", picture)
    if not on_hopper:
        paragraph("No kernel ran on a GPU", "The CPU reference follows the same algorithm.")


def paragraph(title: str, text: str) -> None:
    """Print a paragraph below its title."""
    print(f"\n{title}\n{'-' * len(title)}\n{text}", flush=True)


def torch_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention by PyTorch."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
