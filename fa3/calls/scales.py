"""The scales of calls with FP8 tensors, of which the caller may leave out some."""

import functools
from dataclasses import dataclass

import torch

from fa3.running.graphs import idle_stream, is_capturing, made_apart


@functools.cache
def one_on(device: torch.device) -> torch.Tensor:
    """A one, (1, 1), that calls on any stream may read. Must not be called during a capture."""
    make = functools.partial(torch.ones, 1, 1, dtype=torch.float32, device=device)
    if device.type != "cuda":
        return make()
    idle = idle_stream(device)
    with torch.cuda.stream(idle):
        one = made_apart(make, device)
        idle.synchronize()
    return one


@dataclass(frozen=True, slots=True)
class Scales:
    """The scales of a call with FP8 tensors."""

    device: torch.device  # of the call
    heads_kv: int
    has_fp8_q: bool  # whether queries have a scale
    # A one, (1, 1), for descales that are not given. None if it would have been made during a
    # capture: then each call makes its own, as a graph writes its memory when it runs.
    one: torch.Tensor | None

    @classmethod
    def on(cls, device: torch.device, heads_kv: int, has_fp8_q: bool) -> "Scales":
        """The scales of calls of a description."""
        return cls(device, heads_kv, has_fp8_q, None if is_capturing(device) else one_on(device))

    def of(
        self,
        batch: int,
        scale_q: torch.Tensor | None,
        scale_k: torch.Tensor | None,
        scale_v: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        """The `descales` of a launch: of keys, values and, if they are FP8, queries."""
        found = scale_k, scale_v, *[scale_q] * self.has_fp8_q
        given = [scale for scale in found if scale is not None]
        if len(given) == len(found):
            return tuple(given)
        one, shape = self.one, (batch, self.heads_kv)
        if one is None:
            ones = torch.ones(shape, dtype=torch.float32, device=self.device)
        else:
            ones = one.expand(shape)
        return tuple([ones if scale is None else scale for scale in found])
