"""Attention in this process: a rank's queries, and keys that are here."""

import functools
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fa3.calls.backward import BackwardCall, DifferentiableCall
from fa3.calls.call import describe_tensors, of_any_lengths, placed_tensors
from fa3.calls.devices import gpu_for_call
from fa3.calls.modifiers import modifier_tensors
from fa3.calls.options import DENSE, PACKED, Options, check_scale
from fa3.calls.prepare import prepare_call
from fa3.problem import Window
from fa3.reference.backward import BackwardOperands, Wanted

FourGradients = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""Of q, k, v and the sinks. They may be float32, which autograd rounds."""

Lengths = tuple[Tensor, Tensor, tuple[int, int]]
"""cu_seqlens_q, cu_seqlens_k and the longest, as `fa3.flash_attn_varlen_func` takes them."""

ALL = slice(None)

MARGIN = 2
"""SMs that a part leaves while rows are under way: kernels that wait for a word have one each."""


class Asked(NamedTuple):
    """What a call over ranks asks of attention."""

    options: Options
    softmax_scale: float | None
    deterministic: bool
    has_gradient: bool


@dataclass(eq=False)
class KeyPart:
    """Attention of some rows of this rank to keys that they see.

    Attributes:
        rows: of this rank; keys: among those that come here together.
        own: the keys among this rank's rows if all of them are there; else None.
        lengths: of packed sequences; their tensors have a batch of 1 all the same.
        call: what is launched, after the first time.
    """

    asked: Asked
    rows: slice = field(default_factory=lambda: ALL)
    keys: slice = field(default_factory=lambda: ALL)
    own: slice | None = None
    lengths: Lengths | None = None
    call: Any = field(default=None, init=False)  # a `DifferentiableCall`

    def at(self, rows: slice, keys: slice, window: Window, own: slice | None = None) -> "KeyPart":
        """Return a part of these rows and keys that is as here in all else."""
        options = self.asked.options._replace(window=window)
        if own is not None:
            options = options._replace(sm_margin=max(options.sm_margin, MARGIN))
        return replace(
            self, asked=self.asked._replace(options=options), rows=rows, keys=keys, own=own
        )

    def without_batch(self, tensors: Iterable[Tensor | None]) -> list:
        """Return tensors as the call takes them."""
        if self.lengths is None:
            return list(tensors)
        return [None if x is None else x[0] for x in tensors]

    def forward(self, tensors: Any, modifiers: tuple) -> tuple[Tensor, Tensor]:
        """Write out, or a new tensor; return it with the log-sum-exp. Tensors are q, k and v of the
        part alone, and out or None; modifiers are alibi_slopes and sinks, or None."""
        slopes, sinks = modifiers
        q, k, v, out = self.without_batch(tensors)
        if self.call is None:
            self.call = self.prepared(q, k, v, slopes, sinks)
        out, lse = self.call.attend(q, k, v, modifiers, out)
        return (out, lse) if self.lengths is None else (out[None], lse[None])

    def backward(self, tensors: Any, modifiers: tuple, fp32_dkv: bool = True) -> FourGradients:
        """Return the gradients by `BackwardOperands`; the log-sum-exp may be of more keys."""
        (slopes, sinks), call = modifiers, self.call
        operands = BackwardOperands(*self.without_batch(tensors))
        read = modifier_tensors(slopes, (), sinks) or ()
        wanted = Wanted(sinks=sinks is not None, fp32_dkv=fp32_dkv)
        grads: Any
        *grads, d_sinks = call.backward.gradients(operands, call.lengths, read, wanted, None)
        dq, dk, dv = grads if self.lengths is None else [x[None] for x in grads]
        # Where no key is seen, they are zeros of the dtype of K and V.
        return dq, *((dk.float(), dv.float()) if fp32_dkv else (dk, dv)), d_sinks

    def prepared(self, q: Tensor, k: Tensor, v: Tensor, *modifiers: Tensor | None):
        """Check and prepare what `fa3.flash_attn_func` and `flash_attn_varlen_func` do."""
        options, softmax_scale, deterministic, has_gradient = self.asked
        scale, longest = check_scale(softmax_scale, q.shape[-1]), None
        ends: Any = (None, None)
        kind = DENSE
        if self.lengths is not None:
            *ends, longest = self.lengths
            kind = PACKED

        def named(q, k, v, modifiers, out):
            slopes, sinks = modifiers
            ends_q, ends_k = ends
            return placed_tensors(
                q=q, k=k, v=v, cu_seqlens_q=ends_q, cu_seqlens_k=ends_k,
                alibi_slopes=slopes, sinks=sinks, out=out,
            )  # fmt: skip

        described = describe_tensors(kind, named(q, k, v, modifiers, None))
        options = options._replace(has_gradient=has_gradient)
        call: Any = of_any_lengths(prepare_call, described, options)

        def attend(*given):
            read = modifier_tensors(given[3][0], (), given[3][1])
            return call.attend(named(*given), read, scale, None, longest, True)

        num_sms = gpu_for_call(q.device, options.sm_margin).num_sms
        backward = BackwardCall(call.problem, longest, scale, deterministic, num_sms)
        return DifferentiableCall(attend, backward, (*ends, None, None), None, True)


@functools.lru_cache(maxsize=64)
def packed_lengths(device: torch.device, rows: tuple[int, ...], keys: tuple[int, ...]) -> Lengths:
    """Return lengths of packed sequences with so many rows and keys."""
    with torch.inference_mode(False):
        starts = (torch.tensor([0, *accumulate(x)], dtype=torch.int32) for x in (rows, keys))
        ends_q, ends_k = (x.to(device) for x in starts)
    return ends_q, ends_k, (max(rows, default=0), max(keys, default=0))
