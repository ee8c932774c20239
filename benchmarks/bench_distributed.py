"""Measure attention over several GPUs: `python -m benchmarks.bench_distributed`.

Each rank times the call on the whole sequence alone, and the calls over ranks, in the same rounds.
A call's time is the slowest rank's. Efficiency is the time alone over ranks times the time over
ranks: 1 if nothing is lost. With `--cpu` tiny shapes run in processes with gloo, as a test.
"""

import csv
import datetime
import functools
import json
import os
import random
import statistics
import tempfile
import time
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.attention
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel

import fa3
import fa3.distributed as fd
import fa3.integrations.torch
from benchmarks import environment, rings
from benchmarks.runs import first_line

K = 1024
ALONE = "alone"
PEERS = {"torch-cudnn": SDPBackend.CUDNN_ATTENTION, "torch-fa3": SDPBackend.FLASH_ATTENTION}
"""Torch's context parallelism on kernels of cuDNN, and of fa3."""
RINGS = "rings-fa4"
"""ring-flash-attn on kernels of FlashAttention-4: its zigzag ring, and its gather of documents,
which follows the number of key/value heads that it gathers at a time."""
STRIDES = 8, 4
METHODS = "gather", "ulysses", "ring"
IN_GRAPH = "-graph"
"""What the name of a provider ends with, where its calls are replayed from CUDA graphs."""
CSV_NAME = "distributed.csv"
TIMEOUT = datetime.timedelta(seconds=180)
"""Until a collective counts as hung; kernels compile in between."""


class Cell(NamedTuple):
    """What is computed: causal attention of one sequence, of documents, or decoding."""

    name: str
    kind: str
    passes: str
    seqlen: int
    heads: tuple[int, int] = (32, 8)
    head_dim: int = 128


BOTH = ("forward", "both")
CELLS = [
    *(Cell(f"dense-{x}-{n}k", "dense", x, n * K) for n in (8, 16, 32, 128) for x in BOTH),
    *(Cell(f"lognormal-both-{n}k", "documents", "both", n * K) for n in (16, 32, 128)),
    *(Cell(f"decode-{n}k", "decode", "forward", n * K) for n in (128, 1024)),
]
TINY = [x._replace(seqlen=64, heads=(4, 2), head_dim=16) for x in CELLS if x.name.endswith("-128k")]


class Row(NamedTuple):
    """A line of the record: the median of the slowest rank's microseconds."""

    cell: str
    provider: str
    ranks: int
    us: float | None
    efficiency: float | None = None
    max_error: float | None = None
    reason: str = ""


def documents_of(seqlen: int) -> fd.documents:
    """Return documents of lognormal lengths, an eighth of the sequence on average."""
    draw, ends = random.Random(0), [0]
    while ends[-1] < seqlen:
        length = int(draw.lognormvariate(0, 1) * seqlen / 13) + 1
        ends.append(min(ends[-1] + length, seqlen))
    return fd.documents(ends)


def with_gradients(attend: Callable, tensors: Sequence[torch.Tensor], cell: Cell) -> Callable:
    """Return a call of the cell's passes: out, or dQ."""
    if cell.passes == "forward":
        return torch.no_grad()(lambda: attend(*tensors))
    leaves = [x.detach().requires_grad_() for x in tensors]
    d_out = torch.ones_like(tensors[0])
    return lambda: torch.autograd.grad(attend(*leaves), leaves, d_out)[0]


def calls_of(
    cell: Cell, device: torch.device, stack: ExitStack
) -> Iterator[tuple[str, Callable[[], Callable]]]:
    """Yield providers, each with what makes its call; its result is this rank's rows."""
    draw = functools.partial(torch.randn, device=device, dtype=torch.bfloat16)
    torch.manual_seed(0)
    q = draw(1, 1 if cell.kind == "decode" else cell.seqlen, cell.heads[0], cell.head_dim)
    k, v = draw(2, 1, cell.seqlen, cell.heads[1], cell.head_dim)
    if cell.kind == "decode":
        yield ALONE, lambda: functools.partial(fa3.flash_attn_with_kvcache, q, k, v)
        local_kv = [x.chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous() for x in (k, v)]
        yield "decode", lambda: functools.partial(fd.flash_attn_with_kvcache, q, *local_kv)
        return
    layout, alone, over = fd.zigzag, fa3.flash_attn_func, fd.flash_attn_func
    tensors, named, methods = [q, k, v], {"causal": True}, METHODS
    if cell.kind == "documents":
        layout, tensors = documents_of(cell.seqlen), [q[0], k[0], v[0]]
        ends = torch.tensor(layout.cu_seqlens, dtype=torch.int32, device=device)
        lengths = [ends, ends, *[int(ends.diff().max())] * 2]
        alone = lambda *x, **named: fa3.flash_attn_varlen_func(*x, *lengths, **named)  # noqa: E731
        over, methods = fd.flash_attn_varlen_func, ("gather", "ulysses")
    dim = tensors[0].ndim - 3
    yield ALONE, lambda: with_gradients(functools.partial(alone, **named), tensors, cell)
    parts = [layout.shard(x, dim) for x in tensors]
    named |= {"layout": layout, "seqlen": cell.seqlen}
    for method in methods:
        attend = functools.partial(over, method=method, **named)
        yield method, functools.partial(with_gradients, attend, parts, cell)
    if device.type != "cuda":
        return
    if cell.kind == "dense":
        yield RINGS, lambda: with_gradients(rings.zigzag_call(), parts, cell)
        for name, backend in PEERS.items():
            yield name, functools.partial(torch_call, cell, parts, stack, backend)
        return
    neighbours = [fd.contiguous.shard(x, dim) for x in tensors]
    for stride in STRIDES:
        make = functools.partial(rings.llama3_call, layout.cu_seqlens, stride, device)
        yield f"{RINGS}-{stride}", lambda make=make: with_gradients(make(), neighbours, cell)


def torch_call(
    cell: Cell, parts: Sequence[torch.Tensor], stack: ExitStack, backend: SDPBackend
) -> Callable:
    """Return a call of torch's context parallelism, which deals rows out as zigzag does.

    Key/value heads are repeated, as torch's context parallelism has no groups of heads.
    """
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    buffer = torch.zeros(2 * mesh.size(), device="cuda")
    stack.enter_context(context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[0]))
    if backend == SDPBackend.FLASH_ATTENTION:
        fa3.integrations.torch.register()
        torch.nn.attention.activate_flash_attention_impl("fa3")
        stack.callback(torch.nn.attention.restore_flash_attention_impl)
    q, k, v = (x.transpose(1, 2).contiguous() for x in parts)
    k, v = (x.repeat_interleave(cell.heads[0] // cell.heads[1], 1) for x in (k, v))

    def attend(*tensors: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(*tensors, is_causal=True)

    call = with_gradients(attend, (q, k, v), cell)
    return lambda: call().transpose(1, 2)


def replay_of(call: Callable) -> Callable:
    """Return what replays a call from a CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        call()
    return graph.replay


def block_time(call: Callable, count: int, device: torch.device) -> float:
    """Return microseconds of a call on the slowest rank."""
    synchronize = torch.cuda.synchronize if device.type == "cuda" else int
    dist.barrier()
    synchronize()
    begin = time.perf_counter()
    for _ in range(count):
        call()
    synchronize()
    spent = torch.tensor((time.perf_counter() - begin) * 1e6 / count, device=device)
    dist.all_reduce(spent, dist.ReduceOp.MAX)
    return spent.item()


def measure(cell: Cell, options: Namespace, device: torch.device, stack: ExitStack) -> list[Row]:
    """Return the rows of a cell: check every provider, then time all in turn."""
    ranks, rows, calls, counts, errors, expected = dist.get_world_size(), [], {}, {}, {}, None
    layout = documents_of(cell.seqlen) if cell.kind == "documents" else fd.zigzag
    # Long calls are the same from a graph: the GPU is never idle.
    in_graph = options.graphs and (cell.kind == "decode" or cell.seqlen < 128 * K)
    for name, make in calls_of(cell, device, stack):
        if options.only and name not in (*options.only, ALONE):
            continue
        try:
            call = make()
            result = call()
            expected = result if expected is None else expected
            wanted = expected
            if cell.kind != "decode":
                is_cut = cell.kind == "documents" and name.startswith(RINGS)
                wanted = (fd.contiguous if is_cut else layout).shard(expected, expected.ndim - 3)
                result = wanted if name == ALONE else result
            errors[name] = (result.float() - wanted.float()).abs().max().item()
            for called in (name, *[name + IN_GRAPH] * in_graph):
                calls[called] = call if called == name else replay_of(call)
                most = block_time(calls[called], 2, device)
                counts[called] = 1
                if not options.cpu:
                    counts[called] = max(1, min(1000, int(options.block_ms * K / most)))
        except Exception as error:
            calls = {one: call for one, call in calls.items() if one in counts}
            rows.append(Row(cell.name, name, ranks, None, reason=first_line(error)))
    times: dict[str, list[float]] = {name: [] for name in calls}
    order = random.Random(cell.name)
    for _ in range(options.rounds):
        for name in order.sample(list(calls), len(calls)):
            times[name].append(block_time(calls[name], counts[name], device))
    medians = {name: statistics.median(found) for name, found in times.items() if found}
    for called, median in medians.items():
        name = called.removesuffix(IN_GRAPH)
        alone = medians.get(called.replace(name, ALONE), float("nan"))
        efficiency = None if name == ALONE else alone / (ranks * median)
        rows.append(Row(cell.name, called, ranks, median, efficiency, errors[name]))
    return rows


def work(rank: int, options: Namespace, folder: str) -> None:
    """Measure all cells as one rank; the first one prints and writes."""
    # NVLink multicast is not for hosts that are shared.
    os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    torch.set_num_threads(1)
    device = torch.device("cpu") if options.cpu else torch.device("cuda", rank)
    if not options.cpu:
        torch.cuda.set_device(device)
    backend = "gloo" if options.cpu else "nccl"
    store = dist.FileStore(f"{folder}/store", options.ranks)
    named = {"rank": rank, "world_size": options.ranks, "timeout": TIMEOUT}
    dist.init_process_group(backend, store=store, **named)
    console, rows = Console(quiet=rank > 0), []
    cells = TINY if options.cpu else CELLS
    for cell in dict.fromkeys(x for name in options.cells for x in cells if name in x.name):
        with ExitStack() as stack:
            rows += measure(cell, options, device, stack)
        table = Table("cell", "provider", "us", "efficiency", "largest error", "note")
        for row in (row for row in rows if row.cell == cell.name):
            figures = (row.us, row.efficiency, row.max_error)
            texts = ("" if x is None else f"{x:.4g}" for x in figures)
            table.add_row(row.cell, row.provider, *texts, row.reason)
        console.print(table)
        if rank == 0:
            write(rows, options)
    dist.destroy_process_group()


def write(rows: Sequence[Row], options: Namespace) -> None:
    """Write the rows, and where they were taken, to the results directory."""
    gpu = "cpu" if options.cpu else torch.cuda.get_device_name()
    name = environment.directory_name(gpu, datetime.date.today())
    folder = options.out or Path(__file__).parent / "results" / name
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / CSV_NAME, "w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([Row._fields, *rows])
    facts = {"gpu": gpu, "torch": torch.__version__, "git_commit": environment.git_commit()}
    (folder / "distributed.json").write_text(json.dumps(facts, indent=1) + "\n")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(
        "python -m benchmarks.bench_distributed", description=(__doc__ or "").partition(":")[0],
        formatter_class=ArgumentDefaultsHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--ranks", type=int, default=2, help="GPUs, or processes with --cpu")
    parser.add_argument("--rounds", type=int, default=7, help="timed blocks of every provider")
    parser.add_argument("--block-ms", type=float, default=100, help="length of a block")
    parser.add_argument("--cells", nargs="+", default=[""], help="cells with these in turn")
    parser.add_argument("--only", nargs="+", help="only these providers, and one GPU")
    parser.add_argument("--cpu", action="store_true", help="tiny shapes on gloo, as a test")
    parser.add_argument("--graphs", action="store_true", help="from CUDA graphs, too")
    parser.add_argument("--out", type=Path, help="results directory")
    options = parser.parse_args(arguments)
    if not options.cpu and torch.cuda.device_count() < options.ranks:
        parser.error(f"needs {options.ranks} GPUs, torch sees {torch.cuda.device_count()}")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (options, folder), options.ranks)


if __name__ == "__main__":
    main()
