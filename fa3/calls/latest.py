"""The latest call with some options: a call that is like it is not described again.

To describe its tensors takes a call most of its time. In a model, tensors of layers and steps
differ only in addresses and, where rows are packed, in rows. `FastPath` compares a call's tensors
with the previous call's through the guards of torch.compile, all in one call of C++. Calls
that differ in more are described (`fa3.calls.operands`), looked up and are the latest from then on.
"""

import functools
import math
from collections.abc import Callable, Sequence
from operator import itemgetter, mod
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import is_inference_mode_enabled
from torch.autograd import forward_ad

from fa3.calls.eager import LOWEST_ADDRESS

PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
"""Tensors of other types are described in each call: guards do not see what they wrap."""

Outcome = TypeVar("Outcome")

MOST_PLACES = 128
"""Calls whose addresses are remembered as fine: a layer has the same ones in every step."""

MOST_MISSES = 8  # calls in a row that differ from what is remembered, until it is forgotten
UNKNOWN = (None, ())  # what `FastPath.find` gives for a call that must be described


class Guards(NamedTuple, Generic[Outcome]):
    """What tensors were like, and what a call on them led to. It keeps none of them."""

    # given, missing: pick the tensors that there were, and the places where there was none.
    given: Callable[[Sequence], Any]
    missing: Callable[[Sequence], Any]
    nothing: object  # what `missing` picked
    # Whether tensors may begin at these addresses. It remembers some where no tensor has another
    # length in every call.
    are_aligned: Callable[..., bool]
    # Whether torch was in its inference mode. The dispatcher sees which tensors may be written only
    # together with this.
    in_inference: bool
    twice: tuple[tuple[int, int], ...]  # pairs of places that had the same tensor
    # Picks each tensor at its first place; guards want different objects.
    once: Callable[[Sequence], Any]
    # Whether these have their types, shapes, strides, dtypes and devices, and are the same to
    # torch's dispatcher.
    are_alike: Callable[..., bool]
    outcome: Outcome


class FastPath(Generic[Outcome]):
    """The latest call with the same options. Threads may share it: what is found fits.

    Attributes:
        remembered: what calls are compared with.
        described: what the latest call led to that was described. Only when it comes again right
            away it is remembered: that takes as long as to describe a call three times.
        misses: calls since the last one that was found. After some, what is remembered is
            forgotten, so that calls of two kinds in turn are not compared for nothing.
    """

    __slots__ = ("described", "misses", "remembered")

    def __init__(self) -> None:
        self.misses = 0
        self.described: Outcome | None = None
        self.remembered: Guards[Outcome] | None = None

    def find(self, tensors: Sequence) -> tuple[Outcome | None, Sequence[int]]:
        """What the latest call led to if its tensors were like these, and where these begin.

        They would pass `fa3.calls.operands.describe` then, and `check_writable` if those passed.

        Args:
            tensors: of the call, in the same places as the latest one's; None for none.
        """
        if self.remembered is None:
            return UNKNOWN
        (
            given, missing, nothing, are_aligned, in_inference, twice, once, are_alike, outcome,
        ) = self.remembered  # fmt: skip
        try:
            if missing(tensors) != nothing:
                return UNKNOWN
            # Nested tensors have an address, but guards would ask for their strides and abort.
            present = given(tensors)
            begins = [0 if one.is_nested else one.data_ptr() for one in present]
        except (AttributeError, RuntimeError, TypeError, ValueError):
            return UNKNOWN
        if (
            not are_aligned(*begins)
            or forward_ad._current_level >= 0
            or is_inference_mode_enabled() != in_inference
            or not are_alike(*(once(tensors) if twice else present))
        ):
            return UNKNOWN
        for first, second in twice:
            if tensors[first] is not tensors[second]:
                return UNKNOWN
        self.misses = 0
        return outcome, begins

    def remember(
        self,
        tensors: Sequence[torch.Tensor | None],  # of the call
        alignments: Sequence[int],  # that `fa3.calls.operands.describe` asked for in each place
        # Places of tensors whose first dimension may have another length.
        of_any_length: Sequence[int],
        outcome: Outcome,
        with_gradient: Sequence[int] = (),  # places of tensors that may require grad
    ) -> None:
        """Keep what a call led to, which has been described and found valid."""
        self.misses += 1
        if self.misses > MOST_MISSES:
            self.remembered = None
        if self.described is not outcome:
            self.described = outcome
            return
        places = [i for i, one in enumerate(tensors) if one is not None]
        if any(
            type(tensors[i]) not in PLAIN_TYPES
            or (tensors[i].requires_grad and i not in with_gradient)
            or (i in of_any_length and not says_its_stride(tensors[i]))
            for i in places
        ):
            return
        first_of = {id(tensors[i]): i for i in reversed(places)}
        distinct = sorted(first_of.values())
        fixed = {id(tensors[i]) for i in places if i not in of_any_length}
        guards = torch._C._dynamo.guards.TensorGuards(
            *(tensors[i] for i in distinct),
            dynamic_dims_sizes=[
                list(one.shape) if id(one) in fixed else [None, *one.shape[1:]]
                for one in (tensors[i] for i in distinct)
            ],
            dynamic_dims_strides=[list(tensors[i].stride()) for i in distinct],
        )
        are_aligned = check_of_alignments(tuple(alignments[i] for i in places))
        if not of_any_length:
            are_aligned = functools.lru_cache(maxsize=MOST_PLACES)(are_aligned)
        missing = picker([i for i in range(len(tensors)) if i not in places])
        self.remembered = Guards(
            picker(places),
            missing,
            missing(tensors),
            are_aligned,
            is_inference_mode_enabled(),
            tuple((first_of[id(tensors[i])], i) for i in places if i not in distinct),
            picker(distinct),
            guards.check,
            outcome,
        )


def check_of_alignments(alignments: tuple[int, ...]) -> Callable[..., bool]:
    """Whether tensors may begin at some addresses: multiples of these, and no offsets from 0."""

    def are_aligned(*begins: int) -> bool:
        return min(begins) >= LOWEST_ADDRESS and not any(map(mod, begins, alignments))

    return are_aligned


def says_its_stride(tensor: torch.Tensor) -> bool:
    """Whether tensors with more rows and the same strides are as valid as this one: the stride of a
    single row may be anything."""
    return len(tensor) > 1 or tensor.stride(0) == math.prod(tensor.shape[1:])


def picker(places: list[int]) -> Callable[[Sequence], Any]:
    """Picks what is in some places of a tuple, as a tuple."""
    if not places:
        return itemgetter(slice(0))
    if places[-1] - places[0] == len(places) - 1:
        return itemgetter(slice(places[0], places[-1] + 1))
    return itemgetter(*places)
