"""What `bench_backward` measures: cells of backward passes, and who computes gradients.

Any provider of attention becomes one of gradients: torch's autograd runs its backward pass, with an
output gradient that is drawn. A call computes gradients alone, of a forward pass that was run when
the call was prepared, or both passes. Ours is also measured with dropout, by a seed that is given,
so that the check knows its mask.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from benchmarks import harness, packed, peers
from benchmarks.harness import Errors, PartsReference, WrongOutput
from benchmarks.packed import PackedCell
from benchmarks.peers import Call, Provider, Tensors
from benchmarks.shapes import MASKS, SEQLENS, Cell, K, grid, named, size
from benchmarks.timing import capture_stream
from fa3.primitives.fragments import Position
from fa3.reference.dropout import Dropout

PASSES = ("backward", "both")
GRADIENTS = ("dq", "dk", "dv")

FEW = named("few", 8, (K, K), (12, 12), (64, 64))
"""Few tiles: the host shows where a graph does not hide it."""

FEW_HEADS = [
    named("heads" if d == 128 else f"heads-d{d}", batch, (seqlen, seqlen), heads, (d, d))
    for heads, batch, seqlen, d in (
        ((6, 1), 1, K, 128),
        ((8, 1), 1, 2 * K, 128),
        ((8, 1), 1, 4 * K, 128),
        ((8, 1), 1, 8 * K, 128),
        ((8, 1), 1, 32 * K, 128),
        ((16, 1), 1, 2 * K, 64),
        ((16, 2), 1, 8 * K, 128),
        ((16, 2), 2, 3 * K, 128),
        ((8, 2), 1, 4 * K, 256),
        ((28, 4), 1, 6000, 128),
        ((40, 8), 1, 3000, 128),
        ((64, 8), 1, 2 * K, 128),
        ((32, 8), 1, 4 * K, 128),
    )
]
"""Few key/value heads, as under tensor parallelism: fewer key tiles than SMs, or hardly more."""

PACKED_FEW_HEADS = [
    packed.pack("heads-h8.1-8x512", "heads", (8, 1), [512] * 8),
    packed.pack("heads-h8.1-5-of-8k", "heads", (8, 1), [3500, 2000, 1500, 700, 492]),
]
"""Packed sequences with few key/value heads."""

IN_GRAPH = [FEW, *(cell for cell in FEW_HEADS if cell.seqlen_q <= 2 * K), *PACKED_FEW_HEADS]
"""Shapes that are also replayed from a CUDA graph, where no host is slower than their kernels."""

PACKED = packed.lognormal(64 * K)

SHAPES: list[Cell] = [
    *grid([64, 96, 128, 256], list(MASKS), list(SEQLENS)),
    *(
        replace(cell, name=cell.name.replace("d128", "d192.128"), head_dim=192)
        for cell in grid([128], ["causal"], list(SEQLENS))
    ),
    named("gqa", 2, (4 * K, 4 * K), (32, 8)),
    FEW,
    *FEW_HEADS,
    *PACKED_FEW_HEADS,
    PACKED,
]

ORDERED = {
    *(f"d128-{mask}-{s}" for mask in MASKS for s in (K, 4 * K, 16 * K)),
    "d64-causal-4096",
    *(cell.name for cell in FEW_HEADS + PACKED_FEW_HEADS),
    PACKED.name,
}
"""Shapes on which deterministic gradients are measured beside the others."""

DROPPED = {f"d{d}-{mask}-{s}" for d in (64, 128) for mask in MASKS for s in (K, 4 * K, 16 * K)}
"""Shapes on which dropout is measured beside what has none."""

DROPOUT_P = 0.1

SEED = 7


def with_passes(cell: Cell, passes: str, graph: bool = False) -> Cell:
    """A cell that asks for gradients."""
    name = f"{passes}-{cell.name}" + ("-graph" if graph else "")
    return replace(cell, name=name, passes=passes, graph=graph)


CELLS = [
    with_passes(cell, passes, graph)
    for passes in PASSES
    for cell in SHAPES
    for graph in ((False, True) if cell in IN_GRAPH else (False,))
]

BY_NAME = {cell.name: cell for cell in CELLS}


def label_of(cell: Cell) -> str:
    """What a cell is, for a table."""
    if isinstance(cell, PackedCell):
        return cell.label.removeprefix(f"{cell.passes}-")
    head_dims = {cell.head_dim: None, cell.head_dim_v: None}
    text = (
        f"{'/'.join(map(str, head_dims))}, {cell.mask}, {cell.batch} x {size(cell.seqlen_q)}, "
        f"{cell.heads_q}/{cell.heads_kv}"
    )
    return f"{text}, graph" if cell.graph else text


def draw_gradient(cell: Cell, device: torch.device) -> torch.Tensor:
    """Draw the gradient of a cell's output; the same for everyone."""
    generator = torch.Generator(device).manual_seed(1)
    dtype = getattr(torch, cell.dtype)
    return torch.randn(cell.out_shape, dtype=dtype, device=device, generator=generator)


class Gradients:
    """The gradients of a provider of attention."""

    def __init__(self, attention: Provider) -> None:
        self.attention = attention
        self.name, self.version = attention.name, attention.version
        # Not a peer with options that make it slower.
        self.is_peer = attention.is_peer and attention.name in peers.PROVIDERS

    def supports(self, cell: Cell) -> str | None:
        return self.attention.supports(cell)

    def prepare(self, cell: Cell, tensors: Tensors) -> dict[str, Call]:
        """Calls that return the gradients of q, k and v."""
        leaves = Tensors(*(tensor.detach().requires_grad_() for tensor in tensors))
        d_out = draw_gradient(cell, tensors.q.device)
        with torch.enable_grad(), on_stream_of_gradients(cell, d_out.device):
            calls = self.attention.prepare(cell, leaves)
            make = both_passes if cell.passes == "both" else backward_alone
            return {choice: make(attend, leaves, d_out) for choice, attend in calls.items()}


@contextlib.contextmanager
def on_stream_of_gradients(cell: Cell, device: torch.device) -> Iterator[None]:
    """Let torch run backward passes where they may be captured, if they shall be.

    It runs what belongs to an operation on the stream of that operation. So all that is done to the
    leaves before a capture, views of them too, is done on the stream of the capture.
    """
    if device.type == "cpu" or not cell.graph:
        yield
        return
    torch.cuda.synchronize(device)
    with torch.cuda.stream(capture_stream(device.index)):
        yield
    torch.cuda.synchronize(device)


def backward_alone(attend: Call, leaves: Tensors, d_out: torch.Tensor) -> Call:
    """The backward pass of a forward pass that is run now."""
    return functools.partial(torch.autograd.grad, attend(), leaves, d_out, retain_graph=True)


def both_passes(attend: Call, leaves: Tensors, d_out: torch.Tensor) -> Call:
    """The forward and the backward pass."""

    def call() -> tuple[torch.Tensor, ...]:
        with torch.enable_grad():
            out = attend()
        return torch.autograd.grad(out, leaves, d_out)

    return call


class EmptyFunction(torch.autograd.Function):
    """A function that allocates and keeps what attention does, and computes nothing."""

    @staticmethod
    def forward(ctx, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
        out, lse = torch.empty_like(q), q.new_empty(*q.shape[:3], dtype=torch.float32)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx, d_out: torch.Tensor, d_lse: None):
        return tuple(map(torch.empty_like, ctx.saved_tensors[:3]))


class Nothing:
    """No attention: what torch's autograd takes of the host by itself, for functions in Python."""

    name = "autograd"
    version = torch.__version__
    is_peer = False

    def supports(self, cell: Cell) -> str | None:
        return None

    def prepare(self, cell: Cell, tensors: Tensors) -> dict[str, Call]:
        return {"": lambda: EmptyFunction.apply(*tensors)[0]}


class InOneThread:
    """Gradients that are computed in the thread of the caller.

    Torch has a thread for each GPU, which waits for work, and the caller waits for it.
    """

    is_peer = False

    def __init__(self, gradients: Gradients) -> None:
        self.gradients = gradients
        self.name, self.version = f"{gradients.name}-one-thread", gradients.version

    def supports(self, cell: Cell) -> str | None:
        return self.gradients.supports(cell)

    def prepare(self, cell: Cell, tensors: Tensors) -> dict[str, Call]:
        """The same calls."""

        def alone(call: Call) -> tuple[torch.Tensor, ...]:
            with torch.autograd.set_multithreading_enabled(False):
                return call()

        calls = self.gradients.prepare(cell, tensors)
        return {choice: functools.partial(alone, call) for choice, call in calls.items()}


def dropout_on(device: torch.device) -> Dropout:
    """The dropout that is measured."""
    return Dropout(torch.tensor([SEED], device=device), DROPOUT_P)


class WithDropout(peers.Ours):
    """This package with dropout."""

    def prepare(self, cell: Cell, tensors: Tensors) -> dict[str, Call]:
        dropout = dropout_on(tensors.q.device)
        options = {"dropout_p": dropout.p, "rng_state": dropout.rng_state}
        calls = super().prepare(cell, tensors)
        return {choice: functools.partial(call, **options) for choice, call in calls.items()}


OURS, ORDERED_OURS, ORDERED_FA4 = "fa3", "fa3-deterministic", "fa4-cute-deterministic"
DROPPED_OURS = "fa3-dropout"

DENSE_KINDS: dict[str, Callable[[], Provider]] = {
    OURS: peers.Ours,
    ORDERED_OURS: functools.partial(peers.Ours, ORDERED_OURS, deterministic=True),
    DROPPED_OURS: functools.partial(WithDropout, DROPPED_OURS),
    "fa4-cute": peers.Fa4Cute,
    ORDERED_FA4: functools.partial(peers.Fa4Cute, ORDERED_FA4, deterministic=True),
    "cudnn": peers.Cudnn,
}

PACKED_KINDS: dict[str, Callable[[], Provider]] = {
    OURS: packed.Ours,
    ORDERED_OURS: functools.partial(packed.Ours, ORDERED_OURS, deterministic=True),
    "fa4-cute": packed.Fa4Cute,
    ORDERED_FA4: functools.partial(packed.Fa4Cute, ORDERED_FA4, deterministic=True),
}

PEERS = ("fa4-cute", "cudnn")
NAMES = tuple(DENSE_KINDS)


class Found:
    """Who could be imported, for dense and for packed cells.

    Fields:
        missing: why others could not, by name.
    """

    def __init__(self, names: Sequence[str]) -> None:
        dense, self.missing = peers.find(names, DENSE_KINDS)
        in_both = [name for name in names if name in PACKED_KINDS]
        self.dense = [Gradients(one) for one in dense]
        self.packed = [Gradients(one) for one in peers.find(in_both, PACKED_KINDS)[0]]

    def providers_of(self, cell: Cell) -> list[Provider]:
        """Who is measured on a cell."""
        found = self.packed if isinstance(cell, PackedCell) else self.dense
        shape = cell.name.removeprefix(f"{cell.passes}-").removesuffix("-graph")
        left_out = set()
        if shape not in ORDERED:
            left_out |= {ORDERED_OURS, ORDERED_FA4}
        if shape not in DROPPED:
            left_out.add(DROPPED_OURS)
        return [one for one in found if one.name not in left_out]


def shrink(provider: Provider, cell: Cell) -> Cell:
    """A cell that runs on the same kernels, smaller if that is known.

    Of ours, the tiling of a dense forward pass depends on all sizes.
    """
    cell = replace(cell, name="", group="", passes="both", graph=False)
    if isinstance(cell, PackedCell):
        return packed.shrink(cell)
    if provider.name in (OURS, ORDERED_OURS, DROPPED_OURS):
        return cell
    length = min(cell.seqlen_q, K)
    return replace(cell, batch=1, seqlen_q=length, seqlen_k=length)


class HeadGradients:
    """What the gradients of a cell should be, on some heads of K and V."""

    def __init__(
        self, cell: Cell, tensors: Tensors, d_out: torch.Tensor, has_dropout: bool = False
    ) -> None:
        self.group = cell.heads_q // cell.heads_kv
        self.heads = harness.checked_heads(replace(cell, heads_q=cell.heads_kv))
        self.expected = []
        largest = dict.fromkeys(GRADIENTS, 0.0)
        for batch, head in self.heads:
            head_tensors = self.select((tensors.q, tensors.k, tensors.v, d_out), batch, head)
            heads = range(head * self.group, (head + 1) * self.group)
            weights = [weights_of(cell, batch, one) if has_dropout else None for one in heads]
            exact, rounded = (
                gradients_of_head(cell, weights, *(tensor.to(dtype) for tensor in head_tensors))
                for dtype in (torch.float32, tensors.q.dtype)
            )
            for name, x, y in zip(GRADIENTS, exact, rounded, strict=True):
                largest[name] = max(largest[name], (y - x).abs().max().item())
            self.expected.append(exact)
        self.allowed = {
            name: harness.ERROR_FACTOR * error + harness.ERROR_FLOOR
            for name, error in largest.items()
        }

    def select(
        self, tensors: Sequence[torch.Tensor], batch: int, head: int
    ) -> tuple[torch.Tensor, ...]:
        """Of a head of K and V: the group's rows of q, its own of k and v, and more of the group.

        Args:
            tensors: of q, k and v, and of the output if there is a fourth.
        """
        group = slice(head * self.group, (head + 1) * self.group)
        q, k, v, *out = tensors
        return (
            q[batch, :, group],
            k[batch, :, head],
            v[batch, :, head],
            *(tensor[batch, :, group] for tensor in out),
        )

    def check(self, gradients: tuple[torch.Tensor, ...]) -> Errors:
        """Compare dq, dk and dv; give the errors of the worst.

        Raises:
            WrongOutput: if one is not finite everywhere, or too far from float32.
        """
        largest = dict.fromkeys(GRADIENTS, 0.0)
        for name, gradient in zip(GRADIENTS, gradients, strict=True):
            if not gradient.isfinite().all():
                raise WrongOutput(f"{name} is not finite everywhere")
        for (batch, head), expected in zip(self.heads, self.expected, strict=True):
            found = self.select(gradients, batch, head)
            for name, x, y in zip(GRADIENTS, expected, found, strict=True):
                largest[name] = max(largest[name], (y - x).abs().max().item())
        errors = {name: Errors(largest[name], self.allowed[name]) for name in GRADIENTS}
        for name, error in errors.items():
            if error.share > 1:
                raise WrongOutput(
                    f"error of {name} {error.largest:.3g}, allowed {error.allowed:.3g}"
                )
        return max(errors.values(), key=lambda error: error.share)


def weights_of(cell: Cell, batch: int, head: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function of rows of a head: what dropout multiplies their probabilities by."""

    def weigh(rows: torch.Tensor) -> torch.Tensor:
        dropout, key = dropout_on(rows.device), torch.arange(cell.seqlen_k, device=rows.device)
        at = Position(batch, head, rows[:, None], key, cell.seqlen_q, cell.seqlen_k)
        return dropout.keeps(at) / dropout.kept

    return weigh


def gradients_of_head(
    cell: Cell,
    weights: Sequence[Callable | None],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    d_out: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Gradients of attention as it is written down, everything in the dtype of q.

    Args:
        weights: what each query head's probabilities are multiplied by, if by anything.
        q, d_out: (seqlen, query heads that share the head of k and v, head_dim).
    """
    with torch.enable_grad():
        q, k, v = (tensor.detach().requires_grad_() for tensor in (q, k, v))
        outs = [
            harness.attend_head(cell, head, k, v, q.dtype, weigh)
            for head, weigh in zip(q.unbind(1), weights, strict=True)
        ]
    return torch.autograd.grad(outs, (q, k, v), d_out.unbind(1))


def reference_of(
    cell: Cell, tensors: Tensors, has_dropout: bool = False
) -> HeadGradients | PartsReference:
    """What the gradients of a cell should be, of packed cells in some sequences.

    Args:
        has_dropout: whether they are those of `WithDropout`, which knows no packed cells.
    """
    d_out = draw_gradient(cell, tensors.q.device)
    if not isinstance(cell, PackedCell):
        return HeadGradients(cell, tensors, d_out, has_dropout)
    parts = []
    for i in packed.checked_sequences(cell):
        rows, one, sequence_tensors = packed.sequence_of(cell, i, tensors)
        parts.append((rows, HeadGradients(one, sequence_tensors, d_out[rows][None])))
    return PartsReference(parts)
