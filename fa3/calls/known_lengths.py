"""Lengths of packed sequences that the host knows: checked once, and the tables made of them.

`fa3.calls.scheduler_metadata` makes them for all layers of a model, `fa3.calls.varlen` for a call
that has its lengths on the CPU too. Calls then need not launch the kernel that makes the table
(`fa3.calls.packed_calls`), nor kernels for sequences that do not exist. `fa3.planning.host_table`
builds the table. Calls only read it, so calls on several streams and in captured graphs
share it, each with counters of its own.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from fa3.calls.assertions import check_counts
from fa3.calls.eager import LOWEST_ADDRESS
from fa3.calls.launcher import PartMemory
from fa3.calls.operands import check_contiguous, check_dtype, check_shape, describe, operand_of
from fa3.planning.host_table import TableKind
from fa3.planning.routes import PackedSizes
from fa3.primitives.ragged_lengths import CacheLengths, RaggedLengths
from fa3.running.graphs import Capture
from fa3.running.tables import Table

NO_QUERIES = 1 << 62
"""The fewest queries of a sequence that has some, where none has."""


class WalksTables(Protocol):
    """Kernels that walk a table: `fa3.calls.packed_calls.PreparedVarlen`."""

    def table_kind(
        self, short_queries: int, heads_q: int, heads_kv: int, may_cut: bool
    ) -> TableKind: ...


class HostTiles(NamedTuple):
    """The tiles of known lengths on a GPU.

    Fields:
        table: of all tiles.
        segments: their parts, each CTA's in a column (`RaggedSplit`); None if none is cut. Then
            `num_ctas` have some, and `memory` is what their parts take.
    """

    table: Table
    segments: Table | None = None
    num_ctas: int = 0
    memory: PartMemory | None = None

    @classmethod
    def upload(cls, table: np.ndarray, kind: TableKind, device: torch.device) -> "HostTiles":
        """Cut the tiles of a table where that pays, and copy them to the GPU."""
        split, on_gpu = kind.cut(table), Table.upload(table, device)
        if split is None:
            return cls(on_gpu)
        memory = PartMemory.of(split.num_slots, kind.tile_m, kind.cutting.head_dim_v)
        return cls(on_gpu, Table.upload(split.table, device), split.num_clusters, memory)


class HostSeqlens:
    """The lengths of sequences, cut to the rows that there are.

    Attributes:
        queries, keys: what a table is made of, as arrays.
        batch: number of sequences.
        end_q, end_k: no sequence has a row of q, or of k, from here on; `end_k` is 0 for a cache.
        longest_q, longest_k: the most queries, and keys, of a sequence.
        fewest_q: the fewest queries of a sequence that has some.
        tables: those made so far, for the GPUs that they are on.
        may_cut: whether calls that want no gradient may have tiles cut.
        latest: what the latest launch took, and what for: its kernels, their `short_queries`, and
            whether tiles might be cut.
        route: what the latest call on packed keys led to, whether it had gradients, and its
            `fa3.calls.packed_calls.Route`, which is mostly the next one's too.
    """

    __slots__ = (
        "batch", "end_k", "end_q", "fewest_q", "keys", "latest", "longest_k", "longest_q",
        "may_cut", "queries", "route", "tables",
    )  # fmt: skip

    def __init__(
        self, queries: RaggedLengths, keys: RaggedLengths | CacheLengths, may_cut: bool
    ) -> None:
        self.queries, self.keys, self.may_cut = queries, keys, may_cut
        self.batch = queries.num_sequences
        at = np.arange(self.batch)
        (_, of_q), (_, of_k) = queries.read(at), keys.read(at)
        self.end_q = queries.total
        self.end_k = 0 if isinstance(keys, CacheLengths) else keys.total
        self.longest_q, self.longest_k = (int(n.max(initial=0)) for n in (of_q, of_k))
        self.fewest_q = int(of_q[of_q > 0].min(initial=NO_QUERIES))
        self.tables: dict[tuple[TableKind, torch.device], HostTiles] = {}
        self.latest: tuple[object, int, bool, HostTiles | None] = None, 0, False, None
        self.route: tuple[object, bool, Any] = None, False, None

    def __reduce__(self):
        """Copy and pickle the lengths alone: tables and kernels are of this process."""
        return type(self), (self.queries, self.keys, self.may_cut)

    @classmethod
    def packed(
        cls,
        ends_q: np.ndarray,
        ends_k: np.ndarray,
        used_q: np.ndarray | None,
        used_k: np.ndarray | None,
        may_cut: bool = False,
    ) -> "HostSeqlens":
        """Of packed queries and keys; the ends begin with 0 and do not fall."""
        queries = RaggedLengths(ends_q, used_q, int(ends_q[-1]))
        return cls(queries, RaggedLengths(ends_k, used_k, int(ends_k[-1])), may_cut)

    @classmethod
    def cached(cls, ends_q: np.ndarray, keys: np.ndarray) -> "HostSeqlens":
        """Of packed queries, and keys in a cache, as many as `keys` says."""
        queries = RaggedLengths(ends_q, None, int(ends_q[-1]))
        return cls(queries, CacheLengths(keys, int(keys.max(initial=0))), False)

    def sizes(self, heads: int) -> PackedSizes:
        """What there is to know to choose kernels."""
        return PackedSizes(
            self.batch, heads, self.end_q, self.end_k, self.longest_q, self.longest_k, self.fewest_q
        )

    def make(self, kind: TableKind) -> np.ndarray:
        """The table of these lengths, on the host."""
        return kind.table(self.queries, self.keys)

    def upload(self, kind: TableKind, device: torch.device) -> HostTiles:
        """The tiles of these lengths on a GPU."""
        tiles = HostTiles.upload(self.make(kind), kind, device)
        return self.tables.setdefault((kind, device), tiles)

    def on(
        self,
        kernels: WalksTables,
        short_queries: int,
        heads_q: int,
        heads_kv: int,
        may_cut: bool,
        device: torch.device,
        capture: Capture | None,
    ) -> HostTiles | None:
        """The tiles for a launch on torch's current stream; None if a CUDA graph is captured
        before their table was made: then the kernel on the GPU has to make one.

        Args:
            kernels: those that walk it; of one device and one number of heads.
            short_queries, heads_q, heads_kv, may_cut: of `RaggedPlan.table_kind`.
        """
        *of_latest, tiles = self.latest
        if of_latest != [kernels, short_queries, may_cut]:
            kind = kernels.table_kind(short_queries, heads_q, heads_kv, may_cut)
            tiles = self.tables.get((kind, device))
            if tiles is None:
                if capture is not None:
                    return None
                tiles = self.upload(kind, device)
            self.latest = kernels, short_queries, may_cut, tiles
        return tiles

    def check_fit(
        self, names: Sequence[str], batch: int, totals: Sequence[int], longest: Sequence[int]
    ) -> None:
        """Raise unless all rows lie in a call's tensors, and its sequences may be so long.

        Args:
            names: the arguments that the lengths of queries and of keys come from; more are not
                used.
            totals: rows of q, and of k.
            longest: the most queries and keys of a sequence.
        """
        (total_q, total_k), (most_q, most_k) = totals, longest
        if (
            batch == self.batch and self.end_q <= total_q and self.end_k <= total_k
            and self.longest_q <= most_q and self.longest_k <= most_k
        ):  # fmt: skip
            return
        if batch != self.batch:
            raise ValueError(
                f"{names[0]} must have {batch} sequences like cu_seqlens_q, got {self.batch}"
            )
        ends, own_longest = (self.end_q, self.end_k), (self.longest_q, self.longest_k)
        for name, side, own, most in zip(names[:2], "qk", ends, totals, strict=True):
            if own > most:
                raise ValueError(
                    f"{name} must have its sequences in the {most} rows of {side}, got {own} rows"
                )
        for name, side, own, most in zip(names[:2], "qk", own_longest, longest, strict=True):
            if own > most:
                raise ValueError(
                    f"{name} must have sequences of at most {most} rows of {side}, as "
                    f"max_seqlen_{side} or the cache says, got {own}"
                )

    def check_used(self, used_q: torch.Tensor | None, used_k: torch.Tensor | None) -> None:
        """Raise unless these are of a call on packed keys that says how many rows are used, as
        metadata was told, or does not, as it was not."""
        for name, mine, of_call in (
            ("seqused_q", self.queries.used, used_q),
            ("seqused_k", self.keys.used, used_k),
        ):
            if (mine is None) != (of_call is None):
                made, came = ("None", "it")[:: 1 if mine is None else -1]
                raise ValueError(
                    f"scheduler_metadata was made for {name} {made}, the call has {came}"
                )

    def check_same(self, arguments: Sequence[str], *values: list[int] | None) -> None:
        """Raise unless these are the lengths that a call sees.

        Args:
            arguments: which these come from, one for each of the values.
            values: cu_seqlens_q, cu_seqlens_k, seqused_q and seqused_k of the call, or for a cache
                cu_seqlens_q and the keys of each sequence, None for what it does not see.
        """
        queries, keys = self.queries, self.keys
        if isinstance(keys, CacheLengths):
            names, own = ("cu_seqlens_q", "cache_seqlens"), (queries.cu, keys.used)
        else:
            names = "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"
            own = queries.cu, keys.cu, queries.used, keys.used
        for name, of_call, mine, found in zip(arguments, names, own, values, strict=True):
            is_unseen = found is None and isinstance(keys, CacheLengths)
            mine = None if mine is None else mine.tolist()
            if not is_unseen and mine != found:
                raise ValueError(f"{name} was made for {of_call} {differing(mine, found)}")


def differing(made: list[int] | None, found: list[int] | None) -> str:
    """Where lengths differ first from a call's lengths, which have as many entries."""
    if made is None or found is None:
        came = ["None" if one is None else "given" for one in (made, found)]
        return f"{came[0]}, the call has it {came[1]}"
    at = next(i for i, pair in enumerate(zip(made, found, strict=True)) if pair[0] != pair[1])
    return f"with {made[at]} at {at}, the call has {found[at]} there"


def host_lengths(name: str, tensor: torch.Tensor, batch: int) -> np.ndarray:
    """Ends of sequences, or how many rows they use, from an int32 tensor on the CPU."""
    return checked_lengths(name, host_contents(name, tensor, batch))


def host_contents(name: str, tensor: torch.Tensor, batch: int) -> bytes:
    """The numbers in an int32 tensor on the CPU that has them for so many sequences.

    Raises:
        TypeError, ValueError: it is no such vector.
    """
    entries = batch + name.startswith("cu_seqlens")
    try:
        is_plain = type(tensor) is torch.Tensor and tensor.is_cpu and tensor.dtype is torch.int32
        is_vector = is_plain and not tensor.is_nested and tensor.shape == (entries,)
        is_plain = is_vector and tensor.data_ptr() >= LOWEST_ADDRESS and tensor.is_contiguous()
    except RuntimeError:  # sparse tensors have no address
        is_plain = False
    if not is_plain:
        operand = operand_of(describe(name, tensor, 1))
        check_dtype(name, operand, torch.int32)
        check_shape(name, operand, (entries,), "the batch")
        check_contiguous(name, operand)
        if operand.device.type != "cpu":
            raise ValueError(f"{name} must be on the CPU, got {operand.device}")
    return tensor.numpy().tobytes()


def checked_lengths(name: str, contents: bytes) -> np.ndarray:
    """Ends of sequences, or how many rows they use, as 64-bit integers.

    Raises:
        ValueError: there are no such lengths.
    """
    numbers = np.frombuffer(contents, np.int32).astype(np.int64)
    if not name.startswith("cu_seqlens"):
        check_counts(name, numbers.tolist())
        return numbers
    if numbers[0] != 0:
        raise ValueError(f"{name} must begin with 0, got {numbers[0]}")
    falls = numbers[1:] < numbers[:-1]
    if falls.any():
        sequence = int(falls.argmax())
        raise ValueError(
            f"{name} must not decrease, got {numbers[sequence]} to {numbers[sequence + 1]} for "
            f"sequence {sequence}"
        )
    return numbers


RECENT_LENGTHS = 4
"""Lengths that are remembered: the layers of a model have the same ones."""


def seqlens_on_host(
    names: Sequence[str], tensors: Sequence[torch.Tensor | None], batch: int, may_cut: bool
) -> HostSeqlens:
    """The lengths in tensors on the CPU: of a recent call if it had the same.

    Args:
        names: what a call knows the tensors as.
        tensors: the ends of queries and keys, and how many of them are used.
        may_cut: of `HostSeqlens`.

    Raises:
        TypeError, ValueError: they are no lengths.
    """
    contents = (
        None if one is None else host_contents(name, one, batch)
        for name, one in zip(names, tensors, strict=True)
    )
    return seqlens_of_contents(names, may_cut, *contents)


@functools.lru_cache(maxsize=RECENT_LENGTHS)
def seqlens_of_contents(names, may_cut: bool, *contents: bytes | None) -> HostSeqlens:
    lengths = (
        None if one is None else checked_lengths(name, one)
        for name, one in zip(names, contents, strict=True)
    )
    return HostSeqlens.packed(*lengths, may_cut)
