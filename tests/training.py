"""A small Transformer that is trained with one attention and with another, from the same seeds.

Weights and all but attention are float32; q, k and v are rounded to 16 bits, for everyone alike.
Two curves of losses then differ by what attention rounds, which each step of the optimizer carries
on. How much that is, is what runs of torch say that differ in nothing else (`ROUNDINGS`).
"""

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import fa3

VOCABULARY, PERIOD = 16, 4
"""A sequence says its first `PERIOD` tokens again and again."""

WINDOW = 10
"""Losses that are averaged before they are compared."""

LEAST_NOISE = 1e-3
"""Of runs that happen to lie on each other."""


class Sizes(NamedTuple):
    """Of the model and of what it reads.

    Fields:
        lengths: the longest sequence, and how many there are; packed ones are shorter.
    """

    head_dim: int = 16
    heads: int = 4
    heads_kv: int = 2
    layers: int = 1
    width: int = 64
    longest: int = 32
    batch: int = 8
    is_packed: bool = False


class Batch(NamedTuple):
    """What is read in a step: (batch, seqlen) each, or (total,) if sequences are packed.

    Fields:
        places: of the tokens in their sequences.
        ends: cumulated lengths of the sequences.
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    places: torch.Tensor
    ends: torch.Tensor
    longest: int


Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Batch], torch.Tensor]
"""Causal attention: q, k and v, (batch, seqlen, heads, head_dim) or (total, heads, head_dim)."""


def draw(sizes: Sizes, generator: torch.Generator, device: torch.device) -> Batch:
    """Draw a batch. On the CPU, so that all devices get the same."""
    lengths = [sizes.longest] * sizes.batch
    if sizes.is_packed:
        lengths = torch.randint(1, sizes.longest + 1, (sizes.batch,), generator=generator).tolist()
    words = torch.randint(VOCABULARY, (sizes.batch, PERIOD), generator=generator)
    said = words.repeat(1, sizes.longest // PERIOD + 1)
    tokens, targets, places = (
        torch.cat([row[begin : begin + n] for row, n in zip(rows, lengths, strict=True)])
        for rows, begin in (
            (said, 0),
            (said, 1),
            (torch.arange(sizes.longest).expand(sizes.batch, -1), 0),
        )
    )
    ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    if not sizes.is_packed:
        tokens, targets, places = (x.view(sizes.batch, -1) for x in (tokens, targets, places))
    return Batch(*(x.to(device) for x in (tokens, targets, places, ends)), sizes.longest)


class Layer(nn.Module):
    """Attention and an MLP, each beside a residual connection."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.sizes = sizes
        heads = sizes.heads + 2 * sizes.heads_kv
        self.project = nn.Linear(sizes.width, heads * sizes.head_dim)
        self.join = nn.Linear(sizes.heads * sizes.head_dim, sizes.width)
        self.widen = nn.Linear(sizes.width, 2 * sizes.width)
        self.narrow = nn.Linear(2 * sizes.width, sizes.width)
        self.norms = nn.ModuleList(nn.LayerNorm(sizes.width) for _ in range(2))

    def forward(self, x: torch.Tensor, attend: Attend, batch: Batch) -> torch.Tensor:
        heads, heads_kv = self.sizes.heads, self.sizes.heads_kv
        projected = self.project(self.norms[0](x)).unflatten(-1, (-1, self.sizes.head_dim))
        q, k, v = projected.bfloat16().split((heads, heads_kv, heads_kv), dim=-2)
        x = x + self.join(attend(q, k, v, batch).float().flatten(-2))
        return x + self.narrow(self.widen(self.norms[1](x)).relu())


class Model(nn.Module):
    """Which token comes next."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, sizes.width)
        self.places = nn.Embedding(sizes.longest, sizes.width)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.read = nn.Linear(sizes.width, VOCABULARY)

    def forward(self, attend: Attend, batch: Batch) -> torch.Tensor:
        x = self.tokens(batch.tokens) + 0.1 * self.places(batch.places)
        for layer in self.layers:
            x = layer(x, attend, batch)
        return self.read(x)


def train(attend: Attend, sizes: Sizes, steps: int, device: torch.device) -> torch.Tensor:
    """Train a model; give the loss of every step."""
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Model(sizes).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for _ in range(steps):
        batch = draw(sizes, generator, device)
        logits = model(attend, batch)
        loss = nn.functional.cross_entropy(logits.flatten(0, -2), batch.targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).cpu()


def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch) -> torch.Tensor:
    if q.ndim == 4:
        return fa3.flash_attn_func(q, k, v, causal=True)
    lengths = batch.ends, batch.ends, batch.longest, batch.longest
    return fa3.flash_attn_varlen_func(q, k, v, *lengths, causal=True)


def of_torch(q, k, v, batch: Batch, dtype: torch.dtype, attend) -> torch.Tensor:
    """Attention of dense operands, (batch, heads, seqlen, head_dim), in a dtype.

    Args:
        attend: takes these and which keys each query sees.
    """
    is_packed = q.ndim == 3
    operands = (x[None] if is_packed else x for x in (q, k, v))
    queries, *others = (x.transpose(1, 2).to(dtype) for x in operands)
    # Not all backends know heads that are shared.
    others = (x.repeat_interleave(q.shape[-2] // k.shape[-2], dim=1) for x in others)
    length = queries.shape[2]
    mask = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
    if is_packed:
        rows = torch.arange(length, device=q.device)
        sequence = torch.searchsorted(batch.ends, rows, right=True)
        mask = mask & (sequence[:, None] == sequence)
    out = attend(queries, *others, mask).transpose(1, 2).to(q.dtype)
    return out[0] if is_packed else out


def sdpa(backend: SDPBackend, dtype: torch.dtype = torch.bfloat16) -> Attend:
    """scaled_dot_product_attention on a backend."""

    def attend(q, k, v, mask):
        with sdpa_kernel(backend):
            return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    return functools.partial(of_torch, dtype=dtype, attend=attend)


def written_down(q, k, v, mask) -> torch.Tensor:
    """Attention as it is written down, everything in 16 bits."""
    scores = (q @ k.mT) * q.shape[-1] ** -0.5
    return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v


MATH = sdpa(SDPBackend.MATH)

ROUNDINGS = {
    "float32": sdpa(SDPBackend.MATH, torch.float32),
    "bfloat16": functools.partial(of_torch, dtype=torch.bfloat16, attend=written_down),
}
"""Other ways to compute the same: what differs from `MATH` is rounding."""

EFFICIENT = sdpa(SDPBackend.EFFICIENT_ATTENTION)
"""One more on GPUs."""


def averages(losses: torch.Tensor) -> torch.Tensor:
    return losses.unfold(0, WINDOW, WINDOW).mean(1)


def check_training(sizes: Sizes, steps: int, device: torch.device) -> None:
    """Assert that the losses with our attention lie on those with torch's math within noise.

    Noise up to a step is how far runs of torch that differ in rounding have come apart, averaged
    over `WINDOW` steps: it grows, as each step carries on what differed before. Twice that is
    allowed, as of single gradients. Without a head's gradient of K losses are 10 times as far apart
    after 30 steps; what scales a gradient by a few per cent, AdamW hides: that is for other tests.
    """
    expected = averages(train(MATH, sizes, steps, device))
    roundings = [*ROUNDINGS.values(), *[EFFICIENT] * (device.type == "cuda")]
    others = torch.stack([averages(train(one, sizes, steps, device)) for one in roundings])
    noise = (others - expected).abs().amax(0).cummax(0).values
    found = averages(train(ours, sizes, steps, device))
    assert expected[-1] < expected[0] - 0.05
    beyond = (found - expected).abs() - (2 * noise + LEAST_NOISE)
    assert (beyond <= 0).all(), f"losses {found}, expected {expected}, noise {noise}"
