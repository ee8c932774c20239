"""What a call says about its scores, except the scale: checked, and split for compiling.

`ModifierSpec` is what of it shapes the code; the tensors go to the kernel.
"""

import functools
from typing import NamedTuple

import torch

from fa3.calls.operands import DTYPES, Operand, check_device, check_dtype, describe
from fa3.calls.options import Options
from fa3.complaints import not_an_object
from fa3.primitives.arguments import ELEMENT_TYPES
from fa3.problem import REMEMBERED, AttentionSpec, Window
from fa3.scores.diagnostics import check_class
from fa3.scores.masks import Band, Intersection, Mask
from fa3.scores.scores import Alibi, Score, Softcap
from fa3.scores.templates import Template, tensors_of

ELEMENT_DTYPES = tuple(getattr(torch, name) for name in ELEMENT_TYPES)
"""Dtypes of tensors that a score or a mask of the user's may have."""


class ModifierSpec(NamedTuple):
    """What is compiled into a kernel of scores, mask, sinks and dropout."""

    scores: tuple[Template, ...] = ()
    mask: Template | None = None
    sinks: str | None = None
    has_dropout: bool = False

    @property
    def function_names(self) -> tuple[str, ...]:
        """What a call knows the tensors of the user's score and mask as, in their order."""
        of_scores = (f"score.{one.name}" for score in self.scores for one in score.tensors)
        of_mask = (f"mask.{one.name}" for one in (self.mask.tensors if self.mask else ()))
        return (*of_scores, *of_mask)

    def joined(self, functions: "ModifierSpec") -> "ModifierSpec":
        """With the score and the mask of the user's that another one has."""
        return self._replace(scores=(*self.scores, *functions.scores), mask=functions.mask)

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
            self.has_dropout,
        )


def functions_of(
    q: torch.Tensor | Operand, score: Score | None, mask: Mask | None
) -> tuple[ModifierSpec, tuple[torch.Tensor, ...]]:
    """What is compiled of the user's score and mask, checked, and their tensors."""
    if score is not None:
        check_function("score", score, Score, q)
    if mask is not None:
        check_function("mask", mask, Mask, q)
    scores = () if score is None else (Template.of(score),)
    functions = (one for one in (score, mask) if one is not None)
    tensors = tuple(tensor for one in functions for _, tensor in tensors_of(one))
    return ModifierSpec(scores, None if mask is None else Template.of(mask)), tensors


def function_names(options: Options) -> tuple[str, ...]:
    """What a call knows the tensors of the user's score and mask as."""
    return () if options.functions is None else options.functions.function_names


def modifier_tensors(
    slopes: torch.Tensor | None,
    function_tensors: tuple[torch.Tensor, ...],
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, ...] | None:
    """What kernels take for scores, mask and sinks."""
    if slopes is sinks is None:
        return function_tensors or None
    return tuple(tensor for tensor in (slopes, *function_tensors, sinks) if tensor is not None)


@functools.lru_cache(maxsize=REMEMBERED)
def structure_of(
    softcap: float, rank_of_slopes: int | None, sinks: torch.dtype | None, is_causal: bool
) -> ModifierSpec:
    """What is compiled for a call without functions of the user's.

    Args:
        rank_of_slopes: of alibi_slopes; None if there are none.
        sinks: their dtype; None if there are none.
    """
    scores: list[Score] = [Softcap(float(softcap))] if softcap else []
    if rank_of_slopes is not None:
        like_slopes = torch.empty((0,) * rank_of_slopes, dtype=torch.float32, device="meta")
        scores.append(Alibi(like_slopes, is_causal))
    sinks_dtype = None if sinks is None else str(sinks).removeprefix("torch.")
    return ModifierSpec(tuple(map(Template.of, scores)), None, sinks_dtype)


def check_alibi_slopes(slopes: Operand, q: torch.Tensor | Operand, batch: int) -> None:
    heads = q.shape[-2]
    check_dtype("alibi_slopes", slopes, torch.float32)
    check_device("alibi_slopes", slopes, "q", q)
    if tuple(slopes.shape) not in ((heads,), (batch, heads)):
        raise ValueError(
            f"alibi_slopes must have shape ({heads},) or ({batch}, {heads}) to go with q, "
            f"got {tuple(slopes.shape)}"
        )


def check_sinks(sinks: Operand, q: torch.Tensor | Operand) -> None:
    heads = q.shape[-2]
    check_dtype("sinks", sinks, *dict.fromkeys((torch.float32, q.dtype)))
    check_device("sinks", sinks, "q", q)
    if tuple(sinks.shape) != (heads,):
        raise ValueError(
            f"sinks must have shape ({heads},), one for each query head, got {tuple(sinks.shape)}"
        )


def check_function(name: str, instance: object, base: type, q: torch.Tensor | Operand) -> None:
    """Raise unless it is an object of the user's that can be compiled."""
    if not isinstance(instance, base):
        raise not_an_object(name, instance, base)
    check_class(type(instance), base, "score" if base is Score else "visible")
    for field, tensor in tensors_of(instance):
        field = f"{name}.{field}"
        operand = describe(field, tensor, 1)
        check_dtype(field, operand, *ELEMENT_DTYPES)
        check_device(field, operand, "q", q)
