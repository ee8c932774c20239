"""The demo: one attention problem of a language model, planned, compiled, checked, timed, drawn.

On a Hopper GPU the kernel runs, and cuDNN runs for comparison. Without one, everything else
happens: plan, compilation for sm_90a, the same algorithm on the CPU.
"""

import argparse

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from fa3.calls.attention import flash_attn_func
from fa3.calls.devices import gpu_of
from fa3.planning.costs import H200
from fa3.planning.planner import plan_forward
from fa3.problem import Problem
from fa3.running.compiler import compile_kernel
from fa3.tools.drawing import draw_tile_order
from fa3.tools.recording import random_operands
from fa3.tools.timing import time_in_turn

# One layer of Llama 3 8B reading a prompt, and a smaller problem for the CPU.
LLAMA_PREFILL = Problem.of((1, 4096, 32, 128), *[(1, 4096, 8, 128)] * 2, causal=True)
SMALL = Problem.of((1, 1024, 8, 128), *[(1, 1024, 2, 128)] * 2, causal=True)


def show_demo(options: argparse.Namespace) -> None:
    """Run the demo and draw the tile order; takes the options of the command line."""
    on_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    gpu = gpu_of(torch.device("cuda", torch.cuda.current_device())) if on_hopper else H200
    plan = plan_forward(LLAMA_PREFILL, gpu)
    paragraph(f"Plan of a Llama 3 8B prefill for {gpu.name}", plan.explain())
    if on_hopper:
        paragraph("Is it right?", compare(LLAMA_PREFILL, "cuda"))
        paragraph("How fast is it?", time_with_cudnn())
    else:
        print("\nCompiling the kernel for sm_90a ...", flush=True)
        paragraph("Machine code", f"{len(compile_kernel(plan.kernel()).cubin):,} bytes for sm_90a.")
        paragraph("Is it right?", compare(SMALL, "cpu"))
    picture = f"{options.png.resolve()}: one row for each SM or cluster, one bar for each tile."
    try:
        draw_tile_order(plan, options.png)
    except ModuleNotFoundError as error:
        picture = f"Not drawn: {error}"
    paragraph("Picture of the plan", picture)
    if not on_hopper:
        paragraph(
            "No kernel ran on a GPU",
            "This machine has no Hopper GPU. The difference above comes from the CPU reference, "
            "which follows\nthe same algorithm.",
        )


def paragraph(title: str, text: str) -> None:
    """Print a paragraph below its title."""
    print(f"\n{title}\n{'-' * len(title)}\n{text}", flush=True)


def compare(problem: Problem, device: str) -> str:
    """The largest error of a call, and the error of PyTorch in the same dtype."""
    q, k, v = random_operands(problem, torch.device(device))
    print(f"\nAttending to {problem.seqlen_q:,} tokens ...", flush=True)
    out = flash_attn_func(q, k, v, causal=True)
    exact = torch_attention(q.float(), k.float(), v.float())
    ours, theirs = ((x - exact).abs().max().item() for x in (out, torch_attention(q, k, v)))
    return (
        f"Largest difference to attention in float32: fa3 {ours:.2e}, PyTorch in bfloat16 "
        f"{theirs:.2e}."
    )


def torch_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention by PyTorch."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def time_with_cudnn() -> str:
    """Time a call of fa3 and of cuDNN in turn."""
    q, k, v = random_operands(LLAMA_PREFILL, torch.device("cuda"))

    def call_cudnn() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch_attention(q, k, v)

    calls = {"fa3": lambda: flash_attn_func(q, k, v, causal=True), "cuDNN": call_cudnn}
    lines = [
        f"{name:6} {us / 1e3:7.3f} ms  {LLAMA_PREFILL.flops / us / 1e6:6.0f} TFLOP/s"
        for name, us in time_in_turn(calls).items()
    ]
    version = torch.backends.cudnn.version()
    lines.append(f"Under steady load; cuDNN {version} through scaled_dot_product_attention")
    return "\n".join(lines)
