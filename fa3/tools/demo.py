"""The demo: one attention problem of a language model, planned, compiled, checked, timed, drawn.

On a Hopper GPU the kernel runs, and cuDNN runs for comparison. Without one, everything else
happens: plan, compilation for sm_90a, a look at the machine code, the same algorithm on the CPU.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from fa3.calls.devices import gpu_of
from fa3.calls.forward import flash_attn_func
from fa3.planning.explanation import counted, duration, quantity
from fa3.planning.gpu import H200
from fa3.planning.plan import Plan
from fa3.planning.planner import plan_forward
from fa3.problem import Problem
from fa3.running.compiler import compile_kernel
from fa3.tools.cubin import CubinReport, inspect
from fa3.tools.drawing import draw_tile_order

ROUNDS = 15
CALLS_PER_ROUND = 20


def prefill(seqlen: int, heads_q: int, heads_kv: int) -> Problem:
    """One causal sequence of a prompt, in bfloat16, with head_dim 128."""
    keys = 1, seqlen, heads_kv, 128
    return Problem.of((1, seqlen, heads_q, 128), keys, keys, causal=True)


LLAMA_PREFILL = prefill(seqlen=4096, heads_q=32, heads_kv=8)
"""One layer of Llama 3 8B reading a prompt."""

SMALL = prefill(seqlen=1024, heads_q=8, heads_kv=2)


def paragraph(title: str, text: str) -> None:
    """Print a paragraph below its title."""
    print(f"\n{title}\n{'-' * len(title)}\n{text}", flush=True)


@contextmanager
def working(text: str) -> Iterator[None]:
    """Tell what takes long, and how long it took."""
    print(f"\n{text} ...", end="", flush=True)
    begin = time.perf_counter()
    yield
    print(f" {time.perf_counter() - begin:.1f} s", flush=True)


def demo(png: Path) -> None:
    """Run the demo and draw the tile order to `png`."""
    on_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    gpu = gpu_of(torch.device("cuda", torch.cuda.current_device())) if on_hopper else H200
    plan = plan_forward(LLAMA_PREFILL, gpu)
    paragraph(f"Plan of a Llama 3 8B prefill for {gpu.name}", plan_in_words(plan))
    if on_hopper:
        check_on_gpu()
        time_beside_cudnn()
    else:
        show_machine_code(plan)
        check_on_cpu()
    paragraph("Picture of the plan", picture_of(plan, png))
    if not on_hopper:
        paragraph(
            "No kernel ran on a GPU",
            "This machine has no Hopper GPU. The kernel was compiled and inspected. The difference "
            "above\ncomes from the CPU reference, which follows the same algorithm.",
        )


def plan_in_words(plan: Plan) -> str:
    """What a plan does, one sentence a line, for readers new to the planner."""
    problem, config, prediction = plan.problem, plan.config, plan.predict()
    tiles = plan.schedule.order.num_tiles * config.cluster
    rate = quantity(problem.flops / prediction.us * 1e6, "FLOP/s")
    lines = [
        f"The prompt has {problem.seqlen_q:,} tokens. The layer has {problem.num_heads_q} query "
        f"heads; {problem.qhead_per_kvhead} of them share a key/value head.",
        f"The output is computed in {counted(tiles, 'tile')} of {config.tile_m} queries of one "
        f"head. A tile walks through its keys in blocks of {config.tile_n}.",
        f"{counted(plan.grid, 'CTA')} on {plan.gpu.num_sms} SMs share the tiles. In each, one "
        f"warpgroup loads while {config.consumers} others compute.",
    ]
    if config.cluster > 1:
        lines.append(
            f"{config.cluster} CTAs form a cluster, which loads each block of keys and values once "
            f"for {config.cluster} tiles."
        )
    if plan.again is not None:
        lines.append(
            "The softmax subtracts a fixed value instead of the running row max, which saves work. "
            "A second launch repeats rows that overflow."
        )
    lines += [
        "With the causal mask, late queries see more keys. Their tiles come first, so that all SMs "
        f"end at nearly the same time: SMs are busy for {plan.simulate().balance:.1%} of it.",
        f"Predicted time: {duration(prediction.us)}, {rate}. It is limited by {prediction.bound}.",
        "`fa3 plan --causal` shows the same with all numbers.",
    ]
    return "\n".join(lines)


def picture_of(plan: Plan, png: Path) -> str:
    """Draw the tile order; where it is, or why it was not drawn."""
    try:
        draw_tile_order(plan, plan.simulate(), png)
    except ModuleNotFoundError as error:
        return f"Not drawn: {error}"
    return f"{png.resolve()}: one row for each SM or cluster, one bar for each tile."


def tensors(of: Problem, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random q, k and v of a problem."""
    random = torch.Generator(device).manual_seed(0)
    head_dim = of.spec.head_dim
    q, k, v = (
        torch.randn(of.batch, seqlen, heads, head_dim, device=device, generator=random).bfloat16()
        for seqlen, heads in (
            (of.seqlen_q, of.num_heads_q),
            (of.seqlen_k, of.num_heads_kv),
            (of.seqlen_k, of.num_heads_kv),
        )
    )
    return q, k, v


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Causal attention from its definition with every intermediate in `dtype`."""
    q, k, v = (t.to(dtype).transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return (scores.masked_fill_(hidden, -torch.inf).softmax(dim=-1) @ v).transpose(1, 2)


def compare(out, q, k, v, exact: torch.dtype) -> str:
    """The largest error of `out`, and PyTorch's error in the dtype of q."""
    reference = attention(q, k, v, exact)
    ours, torchs = (
        (candidate - reference).abs().max().item()
        for candidate in (out, attention(q, k, v, q.dtype))
    )
    name = str(exact).removeprefix("torch.")
    return (
        f"Largest difference to attention in {name}: fa3 {ours:.2e}, PyTorch in bfloat16 "
        f"{torchs:.2e}."
    )


def check_on_gpu() -> None:
    q, k, v = tensors(LLAMA_PREFILL, "cuda")
    with working("Compiling the kernel, or loading it from disk"):
        out = flash_attn_func(q, k, v, causal=True)
        torch.cuda.synchronize()
    paragraph("Is it right?", compare(out, q, k, v, torch.float32))


def time_beside_cudnn() -> None:
    """Time both in alternating rounds, so that a drifting clock hits them alike."""
    q, k, v = tensors(LLAMA_PREFILL, "cuda")

    def fa3_call():
        flash_attn_func(q, k, v, causal=True)

    def cudnn_call():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            scaled_dot_product_attention(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
                is_causal=True, enable_gqa=True,
            )  # fmt: skip

    calls = {"fa3": fa3_call, "cuDNN": cudnn_call}
    times: dict[str, list[float]] = {name: [] for name in calls}
    with working(f"Timing {ROUNDS} rounds"):
        for call in calls.values():
            milliseconds(call)
        for _ in range(ROUNDS):
            for name, call in calls.items():
                times[name].append(milliseconds(call))
    lines = []
    for name, samples in times.items():
        ms = median(samples)
        lines.append(f"{name:6} {ms:7.3f} ms  {LLAMA_PREFILL.flops / ms / 1e9:6.0f} TFLOP/s")
    paragraph(
        "How fast is it?",
        "\n".join(lines) + f"\nMedian of {ROUNDS} alternating rounds of {CALLS_PER_ROUND} calls; "
        f"cuDNN {torch.backends.cudnn.version()} through scaled_dot_product_attention",
    )


def milliseconds(call) -> float:
    """Time of one of CALLS_PER_ROUND calls on the GPU."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(CALLS_PER_ROUND):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / CALLS_PER_ROUND


def show_machine_code(plan: Plan) -> None:
    with working("Compiling the kernel for sm_90a"):
        report = inspect(compile_kernel(plan.kernel()).cubin)
    paragraph(
        "Machine code",
        f"A CTA has {report.threads} threads with {report.registers} registers each at launch, and "
        f"{plan.config.smem_bytes(plan.problem.spec):,} bytes of shared memory.\n"
        f"Registers spill {report.stack_bytes} bytes per thread to memory.\n"
        f"{count_instructions(report)}",
    )


def count_instructions(report: CubinReport) -> str:
    """How many instructions a kernel has of each kind, if the disassembler is there."""
    try:
        instructions = report.instructions
    except ModuleNotFoundError as error:
        return f"Instructions were not counted: {error}."
    return (
        f"It has {len(instructions):,} instructions: {report.wgmma} matrix products (WGMMA), "
        f"{report.tma_loads + report.multicast_loads} loads and {report.tma_stores} stores by TMA, "
        f"{report.exponentials} exponentials."
    )


def check_on_cpu() -> None:
    q, k, v = tensors(SMALL, "cpu")
    with working(f"Running {SMALL.seqlen_q:,} tokens on the CPU"):
        out = flash_attn_func(q, k, v, causal=True)
        comparison = compare(out, q, k, v, torch.float64)
    paragraph("Is it right?", comparison)
