"""The latest calls with some options; calls like these skip description.

To describe its tensors takes a call most of its time. In a model, tensors of layers and steps
differ only in addresses and, where rows are packed, in rows. `FastPath` compares a call's tensors
with an earlier call's tensors through the guards of torch.compile, in one call of C++. Calls that
differ in more are described (`fa3.calls.operands`) and looked up.
"""

import functools
import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from operator import itemgetter, mod
from typing import Any, Generic, TypeVar

import torch
from torch import is_inference_mode_enabled
from torch.autograd import forward_ad

from fa3.calls.eager import LOWEST_ADDRESS

PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
"""Tensors of other types are described in each call: guards do not see what they wrap."""

Outcome = TypeVar("Outcome")

MOST_PLACES = 128
"""Calls whose addresses are remembered as fine: a layer has the same ones in every step."""

NO_PLAIN_TENSOR = AttributeError, RuntimeError, TypeError, ValueError  # raised by what is none

MOST_SHAPES = 64  # of calls with the same options that are remembered

UNKNOWN = (None, ())  # what `FastPath.find` gives for a call that must be described

Found = tuple[Outcome | None, Sequence[int]]  # what a call leads to, and addresses of its tensors


def shapes_of(values: Mapping[str, Any]) -> tuple:
    """What of a call's shapes picks an earlier call.
    Packed queries have other numbers of rows in each call."""
    ends = values["cu_seqlens_q"]
    return (values["q"].shape, values["k"].shape) if ends is None else ends.shape


class FastPath(Generic[Outcome]):
    """The latest call of each shape with the same options.
    Threads may share it.

    Attributes:
        key_of: what of a call tells shapes apart, if not only numbers of rows differ.
        latest: compares a call with the latest one that was found, and gives what is found.
        remembered: the same for all calls, by key.
        described: what the latest described call led to, by key. Only when it comes again it is
            remembered: that takes as long as to describe a call three times.
    """

    __slots__ = ("described", "key_of", "latest", "remembered")

    def __init__(self, key_of: Callable[[Mapping], Hashable] = lambda _: None) -> None:
        self.key_of = key_of
        self.latest: Callable[[Mapping], Found] = lambda values: UNKNOWN
        self.remembered: dict[Hashable, Callable[[Mapping], Found]] = {}
        self.described: dict[Hashable, Outcome] = {}

    def find(self, values: Mapping[str, Any]) -> Found:
        """Return an earlier call's outcome, and addresses, if tensors are alike.

        They would pass `fa3.calls.operands.describe` then, and `check_writable` if those passed.
        """
        latest = self.latest
        found = latest(values)
        if found is UNKNOWN and self.remembered:
            try:
                one = self.remembered.get(self.key_of(values))
            except NO_PLAIN_TENSOR:
                return UNKNOWN
            if not (one is None or one is latest) and (found := one(values)) is not UNKNOWN:
                self.latest = one
        return found

    def remember(
        self,
        values: Mapping[str, Any],  # of the call
        alignments: Mapping[str, int],  # that `describe` asked for, of all tensors that it can have
        growing: Collection[str],  # tensors whose first dimension may have another length
        outcome: Outcome,
        with_gradient: Collection[str] = (),  # tensors that may require grad
    ) -> None:
        """Keep what a call led to that was described and found valid."""
        key = self.key_of(values)
        if self.described.get(key) is not outcome:
            if len(self.described) >= MOST_SHAPES:
                self.described, self.remembered = {}, {}
            self.described[key] = outcome
            return
        tensors = {name: values[name] for name in alignments if values[name] is not None}
        if any(
            type(one) not in PLAIN_TYPES
            or (one.requires_grad and name not in with_gradient)
            or (name in growing and not says_its_stride(one))
            for name, one in tensors.items()
        ):
            return
        self.latest = self.remembered[key] = comparison(tensors, alignments, growing, outcome)


def comparison(
    tensors: Mapping[str, torch.Tensor],
    alignments: Mapping[str, int],
    growing: Collection,
    outcome: Outcome,
) -> Callable[[Mapping], Found]:
    """Return a function that compares tensors with these.

    It keeps none of them. Arguments are as in `FastPath.remember`.
    """
    missing = [name for name in alignments if name not in tensors]
    first_of = {id(one): name for name, one in reversed(tensors.items())}
    # Guards want different objects.
    distinct = {name: one for name, one in tensors.items() if first_of[id(one)] == name}
    twice = [(first_of[id(one)], name) for name, one in tensors.items() if name not in distinct]
    fixed = {id(one) for name, one in tensors.items() if name not in growing}
    # Whether tensors have these types, shapes, strides, dtypes and devices, and are the same to
    # torch's dispatcher.
    are_alike = torch._C._dynamo.guards.TensorGuards(
        *distinct.values(),
        dynamic_dims_sizes=[
            list(one.shape) if id(one) in fixed else [None, *one.shape[1:]]
            for one in distinct.values()
        ],
        dynamic_dims_strides=[list(one.stride()) for one in distinct.values()],
    ).check
    units = tuple(map(alignments.__getitem__, tensors))

    def are_aligned(*begins: int) -> bool:
        return min(begins) >= LOWEST_ADDRESS and not any(map(mod, begins, units))

    if not growing:
        are_aligned = functools.lru_cache(maxsize=MOST_PLACES)(are_aligned)
    pick, pick_distinct, pick_missing = map(picker, (list(tensors), list(distinct), missing))
    nothing = (None,) * len(missing)
    # The dispatcher sees which tensors may be written only together with this.
    in_inference = is_inference_mode_enabled()

    def compare(values: Mapping) -> Found:
        try:
            if pick_missing(values) != nothing:
                return UNKNOWN
            # Nested tensors have an address, but guards would ask for their strides and abort.
            present = pick(values)
            begins = [0 if one.is_nested else one.data_ptr() for one in present]
        except NO_PLAIN_TENSOR:
            return UNKNOWN
        if (
            not are_aligned(*begins)
            or forward_ad._current_level >= 0
            or is_inference_mode_enabled() != in_inference
            or not are_alike(*(pick_distinct(values) if twice else present))
        ):
            return UNKNOWN
        for first, second in twice:
            if values[first] is not values[second]:
                return UNKNOWN
        return outcome, begins

    return compare


def says_its_stride(tensor: torch.Tensor) -> bool:
    """Whether more rows with these strides are as valid as this one.
    The stride of a single row may be anything."""
    return len(tensor) > 1 or tensor.stride(0) == math.prod(tensor.shape[1:])


def picker(names: list[str]) -> Callable[[Mapping], Any]:
    """Picks the values of some names, as a tuple."""
    if len(names) < 2:
        return lambda values: tuple([values[name] for name in names])
    return itemgetter(*names)
