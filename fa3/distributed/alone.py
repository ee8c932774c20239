"""Attention in this process: a rank's queries, and keys that are here."""

import functools
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from fa3.calls.backward import BackwardCall, preparation_of
from fa3.calls.call import NO_VALUES, describe_tensors, prepare_without_lengths
from fa3.calls.devices import gpu_for_call
from fa3.calls.modifiers import modifier_tensors
from fa3.calls.options import Options, check_scale
from fa3.calls.prepare import prepare_call
from fa3.reference.backward import BackwardOperands, Wanted

FourGradients = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""Of q, k, v and the sinks. They may be float32, which autograd rounds."""


@dataclass(eq=False)
class KeyPart:
    """Attention of some rows of this rank to keys that they see.

    Attributes:
        rows: of this rank; keys: among those that come here together.
        merges: other parts have the same rows; this one is merged into the first of them.
        is_alone: no other part has gradients of these keys.
        lengths: of packed sequences; their tensors have a batch of 1 all the same.
        documents: that the part is of, where each has slopes of its own.
        attention, gradients: what is launched, after the first time; ends: of packed sequences.
    """

    options: Options
    softmax_scale: float | None
    deterministic: bool
    rows: slice = field(default_factory=lambda: slice(None))
    keys: Any = field(default_factory=lambda: slice(None))  # None while it is not known
    merges: bool = False
    is_alone: bool = False
    lengths: tuple[int, ...] | None = None
    documents: tuple[int, ...] = ()
    attention: Any = field(default=None, init=False)  # a `PreparedAttention`
    gradients: Any = field(default=None, init=False)  # a `BackwardCall`
    ends: Tensor | None = field(default=None, init=False)

    def without_batch(self, tensors: Iterable[Tensor | None]) -> Iterable:
        """Return tensors as the call takes them."""
        return tensors if self.lengths is None else [None if x is None else x[0] for x in tensors]

    def slopes_of(self, slopes: Tensor | None) -> Tensor | None:
        """Return slopes of heads, or of the packed sequences' documents."""
        if slopes is None or slopes.ndim == 1 or (self.lengths is None and not self.documents):
            return slopes
        return slopes.index_select(0, numbers_on(slopes.device, *self.documents))

    def forward(self, tensors: Any, modifiers: tuple) -> tuple[Tensor, Tensor]:
        """Write out, or a new tensor; return it with the log-sum-exp.
        Tensors are q, k and v of the part alone, and out or None; modifiers alibi_slopes and
        sinks."""
        q, k, v, out = self.without_batch(tensors)
        slopes, sinks = self.slopes_of(modifiers[0]), modifiers[1]
        values = NO_VALUES | {"q": q, "k": k, "v": v, "alibi_slopes": slopes, "sinks": sinks}
        if self.ends is None and self.lengths is not None:
            self.ends = numbers_on(q.device, 0, *accumulate(self.lengths))
        values["cu_seqlens_q"] = values["cu_seqlens_k"] = self.ends
        if self.attention is None:
            self.prepare(values)
        values["out"], values["modifiers"] = out, modifier_tensors(slopes, (), sinks)
        values["dropout"], values["softmax_scale"] = None, self.gradients.softmax_scale
        results: Any = self.attention.attend(values, self.gradients.longest, True)
        return results if self.lengths is None else tuple(x[None] for x in results)

    def prepare(self, values: dict[str, Any]) -> None:
        """Check and prepare what `fa3.flash_attn_func` and `flash_attn_varlen_func` do."""
        call: Any = prepare_without_lengths(
            prepare_call, describe_tensors(values, self.options), self.options
        )
        scale = check_scale(self.softmax_scale, values["q"].shape[-1])
        longest = None if self.lengths is None else (max(self.lengths, default=0),) * 2
        prepare = preparation_of(
            call.problem, gpu_for_call(values["q"].device, self.options.sm_margin)
        )
        self.gradients = BackwardCall(call.problem, longest, scale, self.deterministic, prepare)
        self.attention = call

    def backward(
        self, tensors: Any, modifiers: tuple, fp32_dkv: bool = True, dq: Tensor | None = None
    ) -> FourGradients:
        """Return the gradients by `BackwardOperands`, with dq where it is given.
        The log-sum-exp may be of more keys."""
        slopes, sinks = self.slopes_of(modifiers[0]), modifiers[1]
        operands = BackwardOperands(*self.without_batch(tensors))
        wanted = Wanted(sinks=sinks is not None, fp32_dkv=fp32_dkv)
        read = modifier_tensors(slopes, (), sinks)
        lengths = self.ends, self.ends, None, None
        grads: Any
        (target,) = self.without_batch([dq])
        *grads, d_sinks = self.gradients.gradients(operands, lengths, read, wanted, None, target)
        if target is not None and grads[0] is not target:  # no kernel has run
            target.copy_(grads[0])
        dq, dk, dv = grads if self.lengths is None else [x[None] for x in grads]
        return dq, dk, dv, d_sinks


@functools.lru_cache(maxsize=64)
def numbers_on(device: torch.device, *numbers: int) -> Tensor:
    """Return a tensor of numbers in int32."""
    with torch.inference_mode(False):
        return torch.tensor(numbers, dtype=torch.int32).to(device)
