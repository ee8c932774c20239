"""The lengths of one step's sequences, as `fa3.calls.scheduler_metadata` is given them: checked,
and read where the host may see them.

Lengths on a GPU are described only, or with FA3_ASSERTIONS=1 read back to be checked
(`fa3.calls.assertions`). What is seen goes to the choice of whole tiles, as a list of keys, or to a
table of tiles, as `HostSeqlens`.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fa3.calls.assertions import is_visible, read_back
from fa3.calls.call import LENGTHS, LENGTHS_OF_PACKED, MOST_RAGGED_ROWS
from fa3.calls.known_lengths import HostSeqlens, host_lengths
from fa3.calls.operands import check_dtype, check_shape, describe_unaligned, operand_of
from fa3.calls.options import integer
from fa3.calls.values import check_leftpads
from fa3.schedules.sequences import LONGEST


@dataclass(frozen=True, slots=True)
class StepLengths:
    """What a step says of its sequences, by the names of `get_scheduler_metadata`.

    Raises:
        ValueError: a tensor of packed sequences without those that it goes with.
    """

    batch: int
    max_seqlen_q: int
    max_seqlen_k: int
    max_seqlen_k_new: int
    cache_seqlens: int | torch.Tensor | None
    cache_leftpad: torch.Tensor | None
    cu_seqlens_k_new: torch.Tensor | None
    cu_seqlens_q: torch.Tensor | None
    cu_seqlens_k: torch.Tensor | None
    seqused_q: torch.Tensor | None

    def __post_init__(self) -> None:
        for name, other in (
            ("cu_seqlens_k", "cu_seqlens_q"),
            ("seqused_q", "cu_seqlens_q"),
            ("seqused_q", "cu_seqlens_k"),
        ):
            if getattr(self, name) is not None and getattr(self, other) is None:
                raise ValueError(f"{name} must be None without {other}")

    @property
    def has_cache_on_gpu(self) -> bool:
        """Whether a tensor that says what is in the cache is on a GPU."""
        tensors = self.cache_seqlens, self.cu_seqlens_k_new, self.cache_leftpad
        return any(isinstance(one, torch.Tensor) and not one.is_cpu for one in tensors)

    def of_packed(self, may_cut: bool) -> HostSeqlens | None:
        """The lengths of packed queries and keys; None if one is on a GPU."""
        integers = self.cu_seqlens_q, self.cu_seqlens_k, self.seqused_q, self.cache_seqlens
        ends_q, ends_k, used_q, used_k = on_host(LENGTHS_OF_PACKED, integers, self.batch)
        if ends_q is None:
            return None
        return self.checked(HostSeqlens.packed(ends_q, ends_k, used_q, used_k, may_cut))

    def of_packed_queries(self) -> HostSeqlens | None:
        """The lengths of packed queries and of keys in a cache; None if they cannot be seen."""
        keys = self.keys_in_cache()
        (ends_q,) = on_host(("cu_seqlens_q",), (self.cu_seqlens_q,), self.batch)
        if ends_q is None or keys is None:
            return None
        return self.checked(HostSeqlens.cached(ends_q, np.array(keys, np.int64)))

    def checked(self, lengths: HostSeqlens) -> HostSeqlens:
        """These lengths, if they are as short as the step says."""
        rows = MOST_RAGGED_ROWS, MOST_RAGGED_ROWS
        longest = self.max_seqlen_q, self.max_seqlen_k
        lengths.check_fit(("cu_seqlens_q", "cu_seqlens_q"), self.batch, rows, longest)
        return lengths

    def keys_in_cache(self) -> list[int] | None:
        """Keys of each sequence with the new tokens and without padding; None if not to be seen."""
        lengths = self.cache_seqlens
        if not isinstance(lengths, torch.Tensor):
            lengths = equal_lengths(self.batch, lengths)
        tensors = {
            "cache_seqlens": lengths,
            "cu_seqlens_k_new": self.cu_seqlens_k_new,
            "cache_leftpad": self.cache_leftpad,
        }
        check_entries(tensors, self.batch)
        if not all(tensor is None or is_visible(tensor) for tensor in tensors.values()):
            return None
        before, ends, padding = (read_back(name, tensor) for name, tensor in tensors.items())
        new = self.new_tokens(ends)
        self.check_in_cache(before, new)
        totals = [a + b for a, b in zip(before, new, strict=True)]
        padding = padding or [0] * self.batch
        check_leftpads(padding, totals)
        return [total - pad for total, pad in zip(totals, padding, strict=True)]

    def new_tokens(self, ends: list[int] | None) -> list[int]:
        """What each sequence gets.

        Args:
            ends: what is in cu_seqlens_k_new.
        """
        if ends is None:
            return [self.max_seqlen_k_new] * self.batch
        if ends[0] != 0:
            raise ValueError(f"cu_seqlens_k_new must begin with 0, got {ends[0]}")
        return [b - a for a, b in itertools.pairwise(ends)]

    def check_in_cache(self, before: list[int], new: list[int]) -> None:
        """Raise unless sequences can have these lengths, and get these tokens."""
        for sequence, (length, count) in enumerate(zip(before, new, strict=True)):
            total = length + count
            if length < 0:
                raise ValueError(
                    f"cache_seqlens must be 0 or more, got {length} for sequence {sequence}"
                )
            if count < 0:
                raise ValueError(
                    f"cu_seqlens_k_new must not decrease, but falls by {-count} for sequence "
                    f"{sequence}"
                )
            if 0 < self.max_seqlen_k_new < count:
                raise ValueError(
                    f"max_seqlen_k_new must be the most tokens that a sequence gets, {count}, or "
                    f"more, got {self.max_seqlen_k_new}: sequence {sequence} of cu_seqlens_k_new "
                    "has them"
                )
            if total > LONGEST:
                raise ValueError(
                    f"cache_seqlens must be at most {LONGEST} with new tokens, got {total} for "
                    f"sequence {sequence}"
                )
            if total > self.max_seqlen_k:
                raise ValueError(
                    f"max_seqlen_k must be the longest length with new tokens, {total}, or more, "
                    f"got {self.max_seqlen_k}"
                )


def equal_lengths(batch: int, cache_seqlens: object) -> torch.Tensor:
    """One length for each sequence."""
    length = integer("cache_seqlens", cache_seqlens, kind=LENGTHS)
    if not 0 <= length <= LONGEST:
        raise ValueError(f"cache_seqlens must be from 0 to {LONGEST}, got {length}")
    return torch.full((batch,), length, dtype=torch.int32, device="cpu")


def check_entries(tensors: Mapping[str, torch.Tensor | None], batch: int) -> None:
    """Raise unless each has an int32 for each sequence, and ends of sequences one more."""
    for name, tensor in tensors.items():
        operand = operand_of(describe_unaligned(name, tensor))
        if operand is not None:
            entries = batch + name.startswith("cu_seqlens")
            check_dtype(name, operand, torch.int32)
            check_shape(name, operand, (entries,), "batch_size")


def on_host(
    names: Sequence[str], tensors: Sequence[torch.Tensor | None], batch: int
) -> list[np.ndarray | None]:
    """What lies in integer tensors; nothing if one is on a GPU."""
    check_entries(dict(zip(names, tensors, strict=True)), batch)
    if not all(tensor is None or tensor.is_cpu for tensor in tensors):
        return [None] * len(tensors)
    return [
        None if tensor is None else host_lengths(name, tensor, batch)
        for name, tensor in zip(names, tensors, strict=True)
    ]  # fmt: skip
