"""What two objects must have in common to share a kernel."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
from score_problems import Span

import fa3
from fa3.kernels.forward import Forward
from fa3.kernels.forward_launch import ForwardConfig
from fa3.problem import AttentionSpec
from fa3.schedules import StaticPersistent
from fa3.scores.masks import Band, Intersection
from fa3.scores.scores import Alibi, Softcap
from fa3.scores.templates import Template


@dataclass(frozen=True)
class Scaled(fa3.Score):
    factor: Any


@dataclass(frozen=True)
class Biased(fa3.Score):
    """Two tensors with a plain field between them."""

    left: torch.Tensor
    reach: int
    right: torch.Tensor


def biased(left=(4,), reach=3, right=(2, 5), dtype=torch.float32) -> Biased:
    return Biased(torch.randn(left).to(dtype), reach, torch.randn(right))


SPEC = AttentionSpec("bfloat16", 64, 64, Band())


def kernel_of(score: fa3.Score) -> Forward:
    spec = replace(SPEC, scores=(Template.of(score),))
    return Forward(spec, ForwardConfig(128, 64), StaticPersistent)


# ---------------------------------------------------------------------------------- sameness


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Softcap(30.0), Softcap(30.0)),
        (Alibi(torch.zeros(4), True), Alibi(torch.ones(9), True)),
        (Scaled((1, "a")), Scaled((1, "a"))),
        (biased(), biased(left=(7,), right=(1, 1))),
        (biased(), Biased(torch.zeros(8)[::2], 3, torch.zeros(2, 5).T)),
    ],
)
def test_equal_objects_share_a_template(first, second):
    assert Template.of(first) == Template.of(second)
    assert hash(Template.of(first)) == hash(Template.of(second))
    assert kernel_of(first) == kernel_of(second)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Softcap(30.0), Softcap(50.0)),
        (Softcap(30.0), Scaled(30.0)),
        (Alibi(torch.zeros(4), True), Alibi(torch.zeros(4), False)),
        (Alibi(torch.zeros(4), True), Alibi(torch.zeros(2, 4), True)),
        (biased(), biased(dtype=torch.float64)),
        (biased(), biased(reach=4)),
        (biased(left=(4, 1)), biased()),
        (Scaled(1), Scaled(None)),
    ],
)
def test_what_shapes_the_code_tells_templates_apart(first, second):
    assert Template.of(first) != Template.of(second)
    assert repr(kernel_of(first)) != repr(kernel_of(second))


class Pair(NamedTuple):
    n: float


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (1, 1.0), (1, True), (0, False), ((1, 2), (1, 2.0)), (Pair(2), Pair(2.0)),
        (frozenset([2]), frozenset([2.0])), (0.0, -0.0), ((1, (2,)), (1, (2.0,))),
    ],
)  # fmt: skip
def test_constants_that_only_compare_equal_are_told_apart(first, second):
    """A kernel computes with integers where the constant is one: 7 // 2 is not 7 // 2.0."""
    assert first == second
    assert Template.of(Scaled(first)) != Template.of(Scaled(second))
    assert Template.of(Scaled(first)) == Template.of(Scaled(first))


def test_kernels_with_functions_of_the_user_s_are_not_kept_on_disk():
    """A method may use names of its module, of which the key says nothing."""
    assert kernel_of(Softcap(30.0)).is_storable
    assert kernel_of(Alibi(torch.zeros(4), True)).is_storable
    assert not kernel_of(biased()).is_storable
    mask = Intersection(Band(), Template.of(Span(*torch.zeros(2, 4).int())))
    assert not Forward(
        replace(SPEC, mask=mask), ForwardConfig(128, 64), StaticPersistent
    ).is_storable


# ---------------------------------------------------------------------------- taking and giving
