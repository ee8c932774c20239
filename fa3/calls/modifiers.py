"""What a call says about its scores beside the scale: checked, and split for compiling.

`Structure` is what of it shapes the code; the tensors go to the kernel.
"""

import dataclasses
from typing import NamedTuple

import torch

from fa3.calls.eager import address_of, check_resolved, check_undifferentiated
from fa3.calls.operands import DTYPES
from fa3.primitives.arguments import ELEMENT_TYPES
from fa3.problem import LEAST_FLOAT, MOST_FLOAT, AttentionSpec, Window
from fa3.scores.masks import Band, Intersection, Mask
from fa3.scores.scores import Alibi, Score, Softcap
from fa3.scores.templates import Template, tensors_of

ELEMENT_DTYPES = tuple(getattr(torch, name) for name in ELEMENT_TYPES)
"""Dtypes of tensors that a score or a mask of the user's may have."""


class Structure(NamedTuple):
    """The part of `Modifiers` that is compiled into a kernel; hashable."""

    scores: tuple[Template, ...] = ()
    mask: Template | None = None
    sinks: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """What a call knows the tensors as, in their order."""
        of_scores = [
            "alibi_slopes" if score.kind is Alibi else f"score.{tensor.name}"
            for score in self.scores
            for tensor in score.tensors
        ]
        of_mask = [f"mask.{tensor.name}" for tensor in self.mask.tensors] if self.mask else []
        return (*of_scores, *of_mask, *(("sinks",) if self.sinks else ()))

    def spec(
        self, dtype: torch.dtype, head_dim: int, head_dim_v: int, window: Window
    ) -> AttentionSpec:
        """What is compiled for a call with these scores, mask and sinks."""
        band = Band.of(window)
        return AttentionSpec(
            DTYPES[dtype],
            head_dim,
            head_dim_v,
            Intersection(band, self.mask) if self.mask else band,
            self.scores,
            self.sinks,
        )


class Modifiers(NamedTuple):
    """Scores, mask and sinks of a call.

    Fields:
        structure: what is compiled.
        tensors: those of the scores, the mask and the sinks, in this order; None if there are
            none.
    """

    structure: Structure
    tensors: tuple[torch.Tensor, ...] | None

    @classmethod
    def of(
        cls,
        q: torch.Tensor,
        batch: int,
        softcap: float,
        alibi_slopes: torch.Tensor | None,
        sinks: torch.Tensor | None,
        score: Score | None,
        mask: Mask | None,
        is_causal: bool,
        has_backward: bool = False,
    ) -> "Modifiers":
        """Check the arguments of a call.

        Args:
            q: (..., heads_q, head_dim), of `batch` sequences.
            is_causal: no key after a query's own position is visible.
            has_backward: whether sinks may require grad.

        Raises:
            TypeError, ValueError: an argument is not what `flash_attn_func` says it is.
        """
        check_softcap(softcap)
        scores: list[Score] = [Softcap(float(softcap))] if softcap else []
        if alibi_slopes is not None:
            check_alibi_slopes(alibi_slopes, q, batch)
            scores.append(Alibi(alibi_slopes, is_causal))
        if score is not None:
            check_function("score", score, Score, q)
            scores.append(score)
        if mask is not None:
            check_function("mask", mask, Mask, q)
        if sinks is not None:
            check_sinks(sinks, q, has_backward)
        structure = Structure(
            tuple(map(Template.of, scores)),
            None if mask is None else Template.of(mask),
            None if sinks is None else str(sinks.dtype).removeprefix("torch."),
        )
        functions = scores if mask is None else [*scores, mask]
        tensors = [tensor for item in functions for _, tensor in tensors_of(item)]
        if sinks is not None:
            tensors.append(sinks)
        return cls(structure, tuple(tensors) or None)


UNMODIFIED = Modifiers(Structure(), None)


def check_softcap(softcap: float) -> None:
    if softcap != 0 and not LEAST_FLOAT <= softcap <= MOST_FLOAT:
        raise ValueError(
            f"softcap must be 0 (none) or positive and finite in float32, got {softcap}"
        )


def check_alibi_slopes(slopes: torch.Tensor, q: torch.Tensor, batch: int) -> None:
    heads = q.shape[-2]
    check_tensor("alibi_slopes", slopes, (torch.float32,), q.device)
    if tuple(slopes.shape) not in ((heads,), (batch, heads)):
        raise ValueError(
            f"alibi_slopes must have shape ({heads},) or ({batch}, {heads}) to go with q, "
            f"got {tuple(slopes.shape)}"
        )


def check_sinks(sinks: torch.Tensor, q: torch.Tensor, has_backward: bool = False) -> None:
    heads = q.shape[-2]
    check_tensor("sinks", sinks, (torch.float32, q.dtype), q.device, has_backward)
    if tuple(sinks.shape) != (heads,):
        raise ValueError(
            f"sinks must have shape ({heads},), one for each query head, got {tuple(sinks.shape)}"
        )


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
    has_backward: bool = False,
) -> None:
    """Raise unless it is a tensor of one of the dtypes on the device.

    Args:
        has_backward: whether it may require grad.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.dtype not in dtypes:
        accepted = " or ".join(str(dtype) for dtype in dict.fromkeys(dtypes))
        raise TypeError(f"{name} must be {accepted}, got {tensor.dtype}")
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device} like q, got {tensor.device}")
    if tensor.requires_grad and not has_backward:
        check_undifferentiated(name)
    address_of(name, tensor)
    check_resolved(name, tensor)


def check_function(name: str, instance: object, base: type, q: torch.Tensor) -> None:
    """Raise unless it is an object of the user's that can be compiled."""
    if not isinstance(instance, base):
        raise TypeError(f"{name} must be a fa3.{base.__name__}, got {type(instance).__name__}")
    if not dataclasses.is_dataclass(instance):
        raise TypeError(f"{type(instance).__name__} must be a frozen dataclass")
    for field, tensor in tensors_of(instance):
        check_tensor(f"{name}.{field}", tensor, ELEMENT_DTYPES, q.device)
