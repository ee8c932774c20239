"""Training: a small causal model learns to repeat its input, with gradients through attention.

docs/backward.md says how the backward pass runs on a GPU.
"""

import math
import time

import torch
from torch import nn

import fa3

HEADS, HEAD_DIM, VOCABULARY, PERIOD = 2, 32, 8, 6


class Layer(nn.Module):
    """Attention with a residual connection, (batch, seqlen, HEADS * HEAD_DIM)."""

    def __init__(self) -> None:
        super().__init__()
        width = HEADS * HEAD_DIM
        self.norm = nn.LayerNorm(width)
        self.into = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # q, k and v are views of one tensor: strides may be anything of 16 bytes.
        q, k, v = self.into(self.norm(x)).bfloat16().unflatten(-1, (3, HEADS, HEAD_DIM)).unbind(2)
        attended = fa3.flash_attn_func(q, k, v, causal=True)
        return x + self.out(attended.flatten(-2).float())


class Model(nn.Module):
    """Two layers: which token comes next, (batch, seqlen, VOCABULARY)."""

    def __init__(self, longest: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, HEADS * HEAD_DIM)
        self.places = nn.Embedding(longest, HEADS * HEAD_DIM)
        self.layers = nn.Sequential(Layer(), Layer())
        self.head = nn.Linear(HEADS * HEAD_DIM, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = self.places.weight[: tokens.shape[1]]
        return self.head(self.layers(self.tokens(tokens) + places))


def example(device: str = "cpu", steps: int = 60) -> list[float]:
    """Train, and return the loss of every step. Guessing has a loss of log(VOCABULARY)."""
    random = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = Model(4 * PERIOD).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    losses, begin = [], time.perf_counter()
    for _ in range(steps):
        words = torch.randint(VOCABULARY, (4, PERIOD), generator=random)
        tokens = words.repeat(1, 4).to(device)
        logits = model(tokens[:, :-1])
        # The first repetition cannot be known.
        loss = nn.functional.cross_entropy(
            logits[:, PERIOD:].flatten(0, 1), tokens[:, PERIOD + 1 :].flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if len(losses) == 1:
            begin = time.perf_counter()  # without compiling
    seconds = (time.perf_counter() - begin) / max(1, steps - 1)
    assert losses[-1] < 0.5 * losses[0], "the model did not learn"
    where = torch.cuda.get_device_name() if device == "cuda" else "the CPU; nothing ran on a GPU"
    print(
        f"Checked: the loss fell from {losses[0]:.2f} to {losses[-1]:.2f} "
        f"(guessing: {math.log(VOCABULARY):.2f}). {1e3 * seconds:.1f} ms per step on {where}."
    )
    return losses


if __name__ == "__main__":
    example("cuda" if torch.cuda.is_available() else "cpu")
