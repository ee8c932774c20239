"""Scores and masks on the CPU: calls their torch halves and explains what goes wrong.

A user's method may raise anything, or return what no kernel would get. The error names the
argument of the call, the class and the method. On a GPU `fa3.scores.diagnostics` does the same.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fa3.complaints import shown
from fa3.primitives.coords import Position
from fa3.scores.masks import Mask
from fa3.scores.scores import Score


@contextmanager
def errors_of(argument: str, function: object, method: str) -> Iterator[None]:
    """Raise ValueError that names the argument and the method, if the method fails inside.
    NotImplementedError is passed on: the class does not define the method."""
    try:
        yield
    except NotImplementedError:
        raise
    except Exception as error:
        raise ValueError(
            f"{argument} does not work: {type(function).__name__}.{method} raised "
            f"{type(error).__name__}: {error}"
        ) from error


def changed(score: Score, logits: torch.Tensor, at: Position) -> torch.Tensor:
    """Return the logits after a score; raise ValueError if its method does not return them."""
    with errors_of("score", score, "reference"):
        result = score.reference(logits, at)
    return as_matrix("score", score, result, logits.shape, "floats")


def lets_through(mask: Mask, at: Position, shape: tuple[int, ...]) -> torch.Tensor:
    """Return which (queries, keys), so many each, a mask lets through.
    Raises ValueError if the mask's method does not return that."""
    with errors_of("mask", mask, "reference"):
        result = mask.reference(at)
    if isinstance(result, bool):
        result = torch.tensor(result, device=at.query.device)
    return as_matrix("mask", mask, result, shape, "bools")


def as_matrix(
    argument: str, function: object, result: object, shape: tuple[int, ...], elements: str
) -> torch.Tensor:
    """What a method returned, as a matrix of floats or bools; raises ValueError if it is none."""
    if isinstance(result, torch.Tensor):
        types = {"floats": result.is_floating_point(), "bools": result.dtype == torch.bool}
        # Sizes from the right that are 1 or the same.
        sizes = zip(reversed(result.shape), reversed(shape), strict=False)
        fits = result.ndim <= len(shape) and all(one in (1, size) for one, size in sizes)
        if types[elements] and fits:
            return result.expand(shape)
        got = f"a tensor of {result.dtype} with shape {tuple(result.shape)}"
    else:
        got = shown(result)
    raise ValueError(
        f"{argument} must have a {type(function).__name__}.reference that returns a tensor of "
        f"{elements} which broadcasts to (queries, keys), here {tuple(shape)}, got {got}"
    )
