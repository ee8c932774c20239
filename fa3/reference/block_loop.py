"""The loop over key blocks in torch: a running softmax of rows, from the last block to the first.

The kernels' loop is `fa3.primitives.attention`. Here references always follow, each row renews its
own, and P is rounded to the input dtype as it is there.
"""

import math
from collections.abc import Callable

import torch

from fa3.primitives.coords import Position
from fa3.primitives.softmax import LOG2_E, SLACK
from fa3.reference.dropout import Dropout
from fa3.reference.functions import changed
from fa3.schedules.joined import JoinedTile
from fa3.scores.masks import Sequence
from fa3.scores.scores import Score

CPU = torch.device("cpu")
"""Where new tensors are, whatever default the caller has set."""


class HostTensor:
    """A tensor whose elements are Python numbers, as a mask's ranges read them."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def __getitem__(self, index) -> int | float:
        return self.tensor[index].item()


def merge(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge outputs (rows, head_dim_v) and log-sum-exps (rows,) over parts of the keys."""
    outs, lses = (torch.stack(tensors) for tensors in zip(*parts, strict=True))
    lse = lses.logsumexp(dim=0)
    weights = torch.exp(lses - lse.masked_fill(lse == -torch.inf, 0.0))
    return (outs * weights[..., None]).sum(dim=0), lse


def with_sink(
    out: torch.Tensor, lse: torch.Tensor, sink: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Let a sink join the sums of rows (rows, head_dim_v) and (rows,)."""
    if sink is None:
        return out, lse
    joined = torch.logaddexp(lse, sink)
    # A row of nothing at all stays 0; a sink that is NaN reaches its rows, as in the kernels.
    weight = torch.exp(lse - joined.masked_fill(joined == -torch.inf, 0.0))
    return out * weight[:, None], joined


class RunningSoftmax:
    """Softmax of rows that come in blocks of keys, as the kernels keep it; all in float32.

    With dropout the sums are of all probabilities, the output of those that are kept.
    """

    def __init__(
        self, num_rows: int, head_dim_v: int, scale_log2: float, dropout: Dropout | None = None
    ):
        self.scale_log2 = scale_log2
        self.dropout = dropout
        self.reference = torch.full((num_rows, 1), -torch.inf, device=CPU)
        self.row_sum = torch.zeros(num_rows, 1, device=CPU)
        self.acc_O = torch.zeros(num_rows, head_dim_v, device=CPU)

    def add(self, scores: torch.Tensor, v: torch.Tensor, at: Position) -> None:
        """Take a block's scores (rows, keys), values (keys, head_dim_v) and positions."""
        row_max = scores.amax(dim=1, keepdim=True)
        outgrown = (row_max - self.reference) * self.scale_log2 > SLACK
        before, self.reference = self.reference, torch.where(outgrown, row_max, self.reference)
        # A row hidden so far has reference -inf; exp2(-inf - 0) is the 0 that it needs.
        scaled = self.reference.masked_fill(self.reference == -torch.inf, 0.0) * self.scale_log2
        correction = torch.exp2(before * self.scale_log2 - scaled)
        p = torch.exp2(scores * self.scale_log2 - scaled)
        self.row_sum = self.row_sum * correction + p.sum(dim=1, keepdim=True)
        if self.dropout is not None:
            p = p * self.dropout.keeps(at)
        self.acc_O = self.acc_O * correction + p.to(v.dtype).float() @ v.float()

    def finish(self, sink: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Give output (rows, head_dim_v) and log-sum-exp (rows,); a sink joins the sums.

        The sink is a number, or one for each row.
        """
        lse = (self.reference * self.scale_log2 + torch.log2(self.row_sum)) * math.log(2.0)
        lse = lse.masked_fill(self.row_sum == 0.0, -torch.inf)
        out = (self.acc_O / self.row_sum).masked_fill(self.row_sum == 0.0, 0.0)
        if self.dropout is not None:
            out = out / self.dropout.kept
        return with_sink(out, lse.squeeze(1), sink)


def attend(
    q: torch.Tensor,
    place: tuple[int, int | torch.Tensor, torch.Tensor],
    sequence: Sequence | JoinedTile,
    blocks: range,
    tile_n: int,
    load: Callable[[int, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    visible: Callable[[int, Position, torch.Tensor], torch.Tensor | None],
    scores: tuple[Score, ...],
    softmax_scale: float,
    head_dim_v: int,
    dropout: Dropout | None = None,
) -> RunningSoftmax:
    """Attend rows to key blocks, from the last to the first.

    Args:
        q: (rows, head_dim).
        place: batch, head (one or (rows, 1)) and query (rows, 1) of the rows.
        load: gives K (tile_n, head_dim) and V (tile_n, head_dim_v) of a block, by its number and
            its keys (tile_n,).
        visible: which keys of a block the rows see, (rows, tile_n); None for all.
        scores: bound to their tensors.
    """
    scale = 1.0 if scores else softmax_scale
    softmax = RunningSoftmax(len(q), head_dim_v, scale * LOG2_E, dropout)
    for n_block in reversed(blocks):
        key = n_block * tile_n + torch.arange(tile_n, device=CPU)
        k, v = load(n_block, key)
        last_key = key.clamp(max=sequence.seqlen_k - 1)
        at = Position(*place, last_key, sequence.seqlen_q, sequence.seqlen_k)
        values = q.float() @ k.float().T
        if scores:
            values = values * softmax_scale
        for score in scores:
            values = changed(score, values, at)
        seen = visible(n_block, at, key)
        if seen is not None:
            values = values.masked_fill(~seen, -torch.inf)
        softmax.add(values, v, at)
    return softmax
