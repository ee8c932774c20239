"""Rows on their way between ranks: by copies into memory that ranks share, or by messages.

On one host a GPU writes rows into memory of the others. Its copy engine does that, which takes no
SM. Ranks meet before the copies, when no rank reads that memory any more, and after them.
Elsewhere ranks send and receive through `torch.distributed`.
"""

import functools
import math
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

Runs = tuple[tuple[range, ...], ...]  # rows of a sequence, of each rank


class Move(NamedTuple):
    """Neighbouring rows of a rank that get to neighbouring places of a rank, perhaps the same."""

    source: int
    target: int
    rows: slice
    places: slice


class RowExchange(NamedTuple):
    """How all ranks get rows."""

    totals: tuple[int, ...]  # rows that each rank has in the end
    moves: tuple[Move, ...]

    def back(self, rows: tuple[int, ...], but: int | None = None) -> "RowExchange":
        """Return how rows get back to the ranks, which have so many; a rank may keep its own."""
        moves = [Move(target, source, at, rows) for source, target, rows, at in self.moves]
        return RowExchange(rows, tuple(one for one in moves if one[:2] != (but, but)))


@functools.lru_cache(maxsize=64)
def exchange_of(chunks: Runs, wanted: Runs) -> RowExchange:
    """Return how ranks that have these chunks get the rows that they want."""
    moves = []
    for (source, held), (target, runs) in product(enumerate(chunks), enumerate(wanted)):
        for (chunk, row), (run, place) in product(with_begins(together(held)), with_begins(runs)):
            first, last = max(chunk.start, run.start), min(chunk.stop, run.stop)
            if first < last:
                rows = slice(first - chunk.start + row, last - chunk.start + row)
                places = slice(first - run.start + place, last - run.start + place)
                moves.append(Move(source, target, rows, places))
    return RowExchange(tuple(sum(map(len, runs)) for runs in wanted), tuple(moves))


def everything_of(rows: tuple[int, ...]) -> RowExchange:
    """Return how each rank gets all rows, one rank's after another's, if they have so many."""
    ends = list(accumulate(rows, initial=0))
    each = tuple((range(*pair),) for pair in pairwise(ends))
    return exchange_of(each, ((range(ends[-1]),),) * len(rows))


def together(runs: Iterable[range]) -> tuple[range, ...]:
    """Return runs, of which those that touch or overlap the one before are one with it."""
    results: list[range] = []
    for run in filter(len, runs):
        if results and results[-1].start <= run.start <= results[-1].stop:
            run = range(results[-1].start, max(results.pop().stop, run.stop))
        results.append(run)
    return tuple(results)


def with_begins(runs: Iterable[range]) -> list[tuple[range, int]]:
    """Return runs, each with the number of rows before it."""
    runs = tuple(runs)
    return list(zip(runs, accumulate(map(len, runs), initial=0), strict=False))


@dataclass
class Transfer:
    """An exchange of tensors (batch, rows, heads, columns), again and again.

    Attributes:
        number: of the memory that ranks share. No two transfers of one number are under way at the
            same time.
        sizes: heads and columns of each tensor, as it comes from a rank.
        shares_heads: each rank gets its share of the heads that leave.
        by_source: what comes from each rank is apart, (ranks, batch, rows, heads, columns).
        is_free: ranks have met in the same pass, after all had read that memory. So the first rank
            need not wait for the last one before it copies.
    """

    exchange: RowExchange
    dtype: torch.dtype
    number: int
    group: dist.ProcessGroup
    batch: int
    sizes: Sequence[tuple[int, int]]
    device: torch.device
    shares_heads: bool = False
    by_source: bool = False
    is_free: bool = False

    def __post_init__(self) -> None:
        self.rank, moves = self.group.rank(), self.exchange.moves
        self.in_shared_memory = any(source != target for source, target, *_ in moves) and (
            shares_memory(self.group, self.device)
        )

    def shapes(self, total: int) -> list[tuple[int, ...]]:
        """Return the shapes of what comes, with so many rows."""
        first = (self.group.size(), self.batch) if self.by_source else (self.batch,)
        return [(*first, total, *size) for size in self.sizes]

    def views(
        self, move: Move, tensors: Sequence[Tensor], places: Sequence[Tensor]
    ) -> list[tuple[Tensor, Tensor]]:
        """Return where the rows of a move come, and the rows, of each tensor."""
        source, target, rows, at = move
        results = []
        for x, y, (heads, _) in zip(tensors, places, self.sizes, strict=True):
            mine = slice(target * heads, (target + 1) * heads) if self.shares_heads else slice(None)
            results.append(((y[source] if self.by_source else y)[:, at], x[:, rows, mine]))
        return results

    def start(self, tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """Begin, after what the current stream does now. Return what waits for the tensors that
        come, and returns them. In shared memory they are there until it is written again."""
        return self.push(tensors) if self.in_shared_memory else self.send(tensors)

    def send(self, tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """Begin to send messages."""
        group, rank = self.group, self.rank
        shapes = self.shapes(self.exchange.totals[rank])
        results = [x.new_empty(shape) for x, shape in zip(tensors, shapes, strict=True)]
        sent, received, works = [], [], list[Any]()
        for move in self.exchange.moves:
            for place, leaving in self.views(move, tensors, results):
                if move.source == move.target == rank:
                    place.copy_(leaving)
                elif move.source == rank:
                    sent.append((move.target, leaving.contiguous()))
                elif move.target == rank:
                    coming = place if place.is_contiguous() else torch.empty_like(place)
                    received.append((move.source, coming, place))
        if sent or received:
            # Torch's functions for this cost the host several times as much.
            is_batch = group._get_backend(self.device).supports_coalescing
            if is_batch:
                group._start_coalescing(self.device)
            works = [group.send([x], other, 0) for other, x in sent]
            works += [group.recv([x], other, 0) for other, x, _ in received]
            if is_batch:
                works = [group._end_coalescing(self.device)]

        def wait() -> list[Tensor]:
            while works:
                works.pop().wait()
            while received:
                _, coming, place = received.pop()
                if coming is not place:
                    place.copy_(coming)
            sent.clear()  # only now may others have the memory
            return results

        return wait

    def push(self, tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """Begin to copy into other ranks' memory, and in this one's."""
        boxes, inbox, kept = self.boxes, self.inbox, list(tensors)
        copies = [
            (move.target, self.views(move, tensors, boxes[move.target]))
            for move in self.exchange.moves
            if move.source == self.rank
        ]
        self.begun.record()
        with torch.cuda.stream(inbox.stream):
            inbox.stream.wait_event(self.begun)
            if not self.is_free:
                inbox.meet()
            for target, pairs in copies:
                if target != self.rank:
                    copy_all(pairs)
            inbox.meet()
            self.ended.record()
        for target, pairs in copies:
            if target == self.rank:
                copy_all(pairs)

        def wait() -> list[Tensor]:
            torch.cuda.current_stream().wait_event(self.ended)
            kept.clear()
            batches = 2 if self.by_source else 1
            return [x.narrow(batches, 0, self.exchange.totals[self.rank]) for x in boxes[self.rank]]

        return wait

    @functools.cached_property
    @torch.inference_mode(False)  # else no other call could write there
    def boxes(self) -> list[list[Tensor]]:
        """Where rows come, of each rank; all ranks must ask for it."""
        shapes, item = self.shapes(max(self.exchange.totals)), self.dtype.itemsize
        sizes = [-(-math.prod(shape) * item // 256) * 256 for shape in shapes]
        *begins, end = accumulate(sizes, initial=0)
        self.inbox = Inbox.of(self.group, self.number, 1 << max(end - 1, 1023).bit_length())
        self.begun, self.ended = torch.cuda.Event(), torch.cuda.Event()
        return [
            [
                self.inbox.handle.get_buffer(rank, shape, self.dtype, begin // item)
                for shape, begin in zip(shapes, begins, strict=True)
            ]
            for rank in range(self.group.size())
        ]


def copy_all(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy rows to their places; where both are contiguous in each sequence, by copy engines."""
    for places, rows in pairs:
        for place, row in zip(places, rows, strict=True):
            place.copy_(row)


@functools.cache  # on all ranks alike: it may not be forgotten on one of them
def shares_memory(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the GPUs of a group can write into each other's memory; all ranks must ask."""
    if device.type != "cuda":
        return False
    hosts: list[Any] = [None] * group.size()
    dist.all_gather_object(hosts, socket.gethostname(), group)
    worked = len(set(hosts)) == 1
    if worked:
        try:
            Inbox.of(group, 0, 1024)
        except (AttributeError, ImportError, RuntimeError):  # no peer access, or an older torch
            worked = False
        dist.all_gather_object(hosts, worked, group)
    return worked and all(hosts)


class Inbox(NamedTuple):
    """Memory of this rank that the others write to, and theirs that this one writes to."""

    buffer: Tensor
    handle: Any  # torch's, for the memory of all ranks
    timeout_ms: int
    stream: torch.cuda.Stream  # of copies

    @classmethod
    @functools.cache  # on all ranks alike: sizes are powers of two, so they are few
    def of(cls, group: dist.ProcessGroup, number: int, size: int) -> "Inbox":
        """Make one of so many bytes; transfers of one number and size share it."""
        from torch.distributed import _symmetric_memory as symmetric

        device = torch.device("cuda", torch.cuda.current_device())
        buffer = symmetric.empty(size, dtype=torch.uint8, device=device)
        handle = symmetric.rendezvous(buffer, group.group_name)
        torch.cuda.synchronize(device)
        dist.barrier(group)  # it has been cleared on all ranks
        timeout = group._get_backend(device).options._timeout
        return cls(buffer, handle, int(timeout.total_seconds() * 1000), stream_of(device))

    def meet(self) -> None:
        """Wait on the current stream until all ranks' streams are here."""
        self.handle.barrier(0, self.timeout_ms)


@functools.cache
def stream_of(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of a device's copies to others."""
    return torch.cuda.Stream(device)
