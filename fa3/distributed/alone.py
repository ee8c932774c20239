"""Attention in this process: a rank's queries, and keys that are here."""

import functools
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fa3.calls.backward import BackwardCall
from fa3.calls.call import NO_VALUES, describe_tensors, prepare_without_lengths
from fa3.calls.modifiers import modifier_tensors
from fa3.calls.options import PACKED, Options, check_scale
from fa3.calls.prepare import prepare_call
from fa3.reference.backward import BackwardOperands
from fa3.running.memory import Table


@dataclass(eq=False)
class KeyPart:
    """Attention of some rows of this rank to keys that they see.

    Attributes:
        rows: of this rank; keys: among those that come here together.
        merges: other parts have the same rows; this one is merged into the first of them.
        lengths: rows and keys of each packed sequence, or of a dense call.
        documents: which ones the sequences are.
        attention, gradients: what is launched, after the first time.
        ends: of packed sequences, of their rows and their keys.
    """

    options: Options
    softmax_scale: float | None
    deterministic: bool
    rows: slice = field(default_factory=lambda: slice(None))
    keys: Any = field(default_factory=lambda: slice(None))  # None while it is not known
    merges: bool = False
    lengths: tuple[tuple[int, int], ...] = ()
    documents: tuple[int, ...] = ()
    attention: Any = field(default=None, init=False)  # a `PreparedAttention`
    gradients: Any = field(default=None, init=False)  # a `BackwardCall`
    ends: tuple[Tensor | None, Tensor | None] = field(default=(None, None), init=False)

    def slopes_of(self, slopes: Tensor | None) -> Tensor | None:
        """Return slopes of heads, or of the packed sequences' documents."""
        if slopes is None or slopes.ndim == 1 or self.options.kind != PACKED:
            return slopes
        return slopes.index_select(0, numbers_on(slopes.device, *self.documents))

    def forward(self, tensors: Any, modifiers: tuple) -> tuple[Tensor, Tensor]:
        """Write out; return it with the log-sum-exp.
        Tensors are q, k, v and out of the part alone; modifiers alibi_slopes and sinks."""
        slopes, sinks = self.slopes_of(modifiers[0]), modifiers[1]
        values = NO_VALUES | {"alibi_slopes": slopes, "sinks": sinks}
        values |= zip(("q", "k", "v", "out"), tensors, strict=True)
        if self.attention is None:
            self.prepare(values)
        values["cu_seqlens_q"], values["cu_seqlens_k"] = self.ends
        values["modifiers"] = modifier_tensors(slopes, (), sinks) or None
        values["softmax_scale"] = self.gradients.softmax_scale
        values["longest"] = self.gradients.longest
        return self.attention.attend(values, True)

    def prepare(self, values: dict[str, Any]) -> None:
        """Check and prepare what `fa3.flash_attn_func` and `flash_attn_varlen_func` do."""
        longest = None
        if self.options.kind == PACKED:
            sides = [*zip(*self.lengths, strict=True)] or [(), ()]
            longest = max(sides[0], default=0), max(sides[1], default=0)
            ends = [numbers_on(values["q"].device, 0, *accumulate(x)) for x in sides]
            values["cu_seqlens_q"], values["cu_seqlens_k"] = self.ends = ends[0], ends[1]
        call: Any = prepare_without_lengths(
            prepare_call, describe_tensors(values, self.options), self.options
        )
        scale = check_scale(self.softmax_scale, values["q"].shape[-1])
        rest = scale, self.deterministic, call.prepare_backward
        self.attention, self.gradients = call, BackwardCall(call.problem, longest, *rest)

    def backward(self, tensors: Any, modifiers: tuple, dq: Tensor | None, fp32_dkv: bool) -> tuple:
        """Return the gradients by `BackwardOperands`, with dq where it is given.
        The log-sum-exp may be of more keys. Autograd rounds gradients in float32."""
        slopes, sinks = self.slopes_of(modifiers[0]), modifiers[1]
        operands = BackwardOperands(*tensors)
        wanted = sinks is not None, fp32_dkv
        read = modifier_tensors(slopes, (), sinks) or None
        lengths = *self.ends, None, None
        grads = self.gradients.gradients(operands, lengths, read, *wanted, None, dq)
        if dq is not None and grads[0] is not dq:  # no kernel has run
            dq.copy_(grads[0])
        return grads


@functools.lru_cache(maxsize=64)
def numbers_on(device: torch.device, *numbers: int) -> Tensor:
    """Return numbers in int32; wait for their copy alone."""
    if device.type == "cpu":
        with torch.inference_mode(False):
            return torch.tensor(numbers, dtype=torch.int32, device=device)
    copied = Table.upload(np.array(numbers, np.int32), device).numbers
    copied.record_stream(torch.cuda.current_stream(device))  # it may be forgotten
    return copied
