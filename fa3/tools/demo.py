"""The demo: one attention problem of a language model, planned, compiled, checked, timed, drawn.

On a Hopper GPU the kernel runs and stands beside cuDNN. Without one, everything else happens:
plan, compilation for sm_90a, a look at the machine code, and the same algorithm on the CPU.
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
from fa3.planning.gpu import H200
from fa3.planning.plan import Plan
from fa3.planning.planner import plan_forward
from fa3.problem import AttentionSpec, Problem
from fa3.running.compiler import compile_kernel
from fa3.scores.masks import Band
from fa3.tools.cubin import inspect
from fa3.tools.drawing import draw_tile_order
from fa3.tools.models import CAUSAL

try:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("the demo needs rich: pip install 'fa3[bench]'") from error

ROUNDS = 15
CALLS_PER_ROUND = 20


def problem(seqlen: int, heads_q: int, heads_kv: int) -> Problem:
    """A causal bfloat16 prefill of one sequence with head_dim 128."""
    spec = AttentionSpec("bfloat16", 128, 128, Band.of(CAUSAL))
    return Problem(spec, 1, seqlen, seqlen, heads_kv, heads_q // heads_kv, CAUSAL)


LLAMA_PREFILL = problem(seqlen=4096, heads_q=32, heads_kv=8)
"""One layer of Llama 3 8B reading a prompt."""

SMALL = problem(seqlen=1024, heads_q=8, heads_kv=2)


class Screen:
    """What a person sees: headed paragraphs, and a progress bar while something takes long."""

    def __init__(self):
        self.console = Console(highlight=False)

    def paragraph(self, title: str, text: str) -> None:
        self.console.print(f"\n[bold]{title}[/bold]")
        self.console.print(text, markup=False, soft_wrap=True)

    @contextmanager
    def progress(self, text: str, total: int | None = None) -> Iterator:
        """Show a bar, or a spinner when the number of steps is unknown; yields `advance()`."""
        with Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(32),
            TimeElapsedColumn(),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        ) as progress:
            task = progress.add_task(text, total=total)
            yield lambda: progress.advance(task)


def demo(png: Path) -> None:
    """Run the demo and draw the tile order to `png`."""
    screen = Screen()
    on_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    gpu = gpu_of(torch.device("cuda", torch.cuda.current_device())) if on_hopper else H200
    plan = plan_forward(LLAMA_PREFILL, gpu)
    explanation = plan.explain()
    screen.paragraph(f"Plan of a Llama 3 8B prefill for {gpu.name}", str(explanation))
    if on_hopper:
        check_on_gpu(screen)
        time_beside_cudnn(screen)
    else:
        show_machine_code(screen, plan)
        check_on_cpu(screen)
    with screen.progress("drawing"):
        draw_tile_order(plan, explanation.timeline, png)
    screen.paragraph("Tile order", f"{png.resolve()}")
    if not on_hopper:
        screen.paragraph(
            "No kernel ran on a GPU",
            "There is no Hopper GPU here. The kernel was compiled and inspected; the numbers "
            "above\ncome from the CPU reference, which walks the same plan.",
        )


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
    """The largest error of `out`, beside that of PyTorch in the dtype of q."""
    reference = attention(q, k, v, exact)
    ours, torchs = (
        (candidate - reference).abs().max().item()
        for candidate in (out, attention(q, k, v, q.dtype))
    )
    name = str(exact).removeprefix("torch.")
    return f"largest error against {name}  fa3 {ours:.2e}, PyTorch in bfloat16 {torchs:.2e}"


def check_on_gpu(screen: Screen) -> None:
    q, k, v = tensors(LLAMA_PREFILL, "cuda")
    with screen.progress("compiling the kernel, or loading it from the cache"):
        out = flash_attn_func(q, k, v, causal=True)
        torch.cuda.synchronize()
    screen.paragraph("Numbers", compare(out, q, k, v, torch.float32))


def time_beside_cudnn(screen: Screen) -> None:
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
    with screen.progress("timing", total=ROUNDS) as advance:
        for call in calls.values():
            milliseconds(call)
        for _ in range(ROUNDS):
            for name, call in calls.items():
                times[name].append(milliseconds(call))
            advance()
    lines = []
    for name, samples in times.items():
        ms = median(samples)
        lines.append(f"{name:6} {ms:7.3f} ms  {LLAMA_PREFILL.flops / ms / 1e9:6.0f} TFLOP/s")
    screen.paragraph(
        "Speed",
        "\n".join(lines) + f"\nmedian of {ROUNDS} alternating rounds of {CALLS_PER_ROUND} calls; "
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


def show_machine_code(screen: Screen, plan: Plan) -> None:
    spec, config = plan.problem.spec, plan.config
    with screen.progress("compiling the kernel for sm_90a"):
        start = time.perf_counter()
        kernel = compile_kernel(plan.kernel())
        seconds = time.perf_counter() - start
        report = inspect(kernel.cubin)
    screen.paragraph(
        f"Machine code for sm_90a, compiled in {seconds:.1f} s",
        f"Registers      {report.registers} a thread at launch, {report.threads} threads, "
        f"{report.setmaxnreg} setmaxnreg\n"
        f"Spills         {report.stack_bytes} bytes of stack, "
        f"{report.spill_instructions} local loads and stores\n"
        f"Shared memory  {config.smem_bytes(spec):,} bytes\n"
        f"Instructions   {len(report.instructions):,}: {report.wgmma} WGMMA, "
        f"{report.tma_loads} TMA loads, {report.tma_stores} TMA stores, "
        f"{report.exponentials} exponentials",
    )


def check_on_cpu(screen: Screen) -> None:
    q, k, v = tensors(SMALL, "cpu")
    with screen.progress("running a small problem on the CPU"):
        out = flash_attn_func(q, k, v, causal=True)
        comparison = compare(out, q, k, v, torch.float64)
    screen.paragraph(
        f"Numbers of the CPU reference: {SMALL.seqlen_q} tokens, {SMALL.num_heads_q} query heads",
        comparison,
    )
