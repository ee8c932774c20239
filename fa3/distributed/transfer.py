"""Rows between ranks: by copies into shared memory, or by messages.

On one host a GPU writes rows into memory of the others, and then a word that says so. Its copy
engine does that, which takes no SM. Once in a pass ranks meet before the copies, when no rank reads
that memory any more. Elsewhere ranks send and receive through `torch.distributed`.
"""

import functools
import math
import socket
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from cuda.bindings import driver
from torch import Tensor

from fa3.distributed.alone import KeyPart

Runs = tuple[tuple[range, ...], ...]  # rows of a sequence, of each rank
Placed = list[tuple[range, int]]  # runs of rows, each with the number of rows before it


def num_rows_of(chunks: Iterable[Sequence[range]]) -> tuple[int, ...]:
    """Return how many rows each rank has."""
    return tuple(sum(map(len, x)) for x in chunks)


Move = tuple[int, int, slice, slice]
"""Source and target, of ranks; neighbouring rows of the source, and their places on the target."""


class RowExchange(NamedTuple):
    """How all ranks get rows."""

    totals: tuple[int, ...]  # rows that each rank has in the end
    moves: tuple[Move, ...]

    def gradients(self, rank: int) -> tuple["RowExchange", tuple[list, list]]:
        """Return how rows' gradients get back to other ranks, move by move.
        Also a rank's rows that it uses itself, and those that others use. Each has its places
        there, or its gradients' here."""
        totals, moves, stay, leave = [0] * len(self.totals), list[Move](), list[Any](), list[Any]()
        for source, target, rows, places in self.moves:
            if source == target:
                stay += [(rows, places)] * (source == rank)
                continue
            back = slice(totals[source], totals[source] + rows.stop - rows.start)
            totals[source] = back.stop
            moves.append((target, source, places, back))
            leave += [(rows, back)] * (source == rank)
        return RowExchange(tuple(totals), tuple(moves)), (stay, leave)

    def most_received(self) -> int:
        """Return the most rows that a rank gets from others."""
        rows = [0] * len(self.totals)
        for source, target, at, _ in self.moves:
            rows[target] += (source != target) * (at.stop - at.start)
        return max(rows)


def exchange_of(chunks: Runs, wanted: Runs) -> RowExchange:
    """Return how ranks with these chunks get the rows they want."""
    # Searched, as runs are disjoint or the same: 64 ranks with 200 documents have 7 million pairs.
    held = sorted(
        (chunk.start, chunk.stop, source, row)
        for source, runs in enumerate(chunks)
        for chunk, row in with_begins(together(runs))
    )
    starts, stops, moves = [x[0] for x in held], [x[1] for x in held], list[Move]()
    for target, runs in enumerate(wanted):
        for run, place in with_begins([*filter(len, runs)]):
            seen = slice(bisect_right(stops, run.start), bisect_left(starts, run.stop))
            for start, stop, source, row in held[seen]:
                first, last = max(start, run.start), min(stop, run.stop)
                rows = slice(first - start + row, last - start + row)
                places = slice(first - run.start + place, last - run.start + place)
                moves.append((source, target, rows, places))
    return RowExchange(num_rows_of(wanted), tuple(moves))


def together(runs: Iterable[range]) -> tuple[range, ...]:
    """Return runs, joined where they touch or overlap."""
    results: list[range] = []
    for run in filter(len, runs):
        if results and results[-1].start <= run.start <= results[-1].stop:
            run = range(results[-1].start, max(results.pop().stop, run.stop))
        results.append(run)
    return tuple(results)


def with_begins(runs: Sequence[range]) -> Placed:
    """Return runs, each with the number of rows before it."""
    return list(zip(runs, accumulate(map(len, runs), initial=0), strict=False))


class RankCall(NamedTuple):
    """A call over ranks, without what its tensors hold.

    Attributes:
        chunks: of each rank, as `SequenceLayout.chunks` returns them; rank: in the group.
        part: with what is asked for; ends: of documents, or of the sequence.
        order: numbers of documents, as ranks have them, or none.
        batch: as the first dimension of tensors, or none of documents.
        sizes: heads and columns of q, k and v; dkv_dtype: of dK and dV.
    """

    chunks: Runs
    group: dist.ProcessGroup
    rank: int
    part: KeyPart
    ends: tuple[int, ...]
    order: tuple[int, ...]
    batch: tuple[int, ...]
    sizes: tuple[tuple[int, int], ...]
    dtype: torch.dtype
    device: torch.device
    dkv_dtype: torch.dtype


@dataclass(eq=False)
class Transfer:
    """An exchange of tensors (*batch, rows, heads, columns), again and again.

    Where ranks share memory, they must `meet` in each pass before its first transfer, and before
    they write again to memory that was read in the same pass.

    Attributes:
        kinds: heads, columns and dtype of each tensor, as it comes from a rank.
        number: of the memory that ranks share. No two transfers of one number are under way at the
            same time.
        heads: "split" if each rank gets its share of the heads that leave, "join" if it gets a
            share from each rank, or "all".
    """

    call: RankCall
    exchange: RowExchange
    kinds: Sequence[tuple[int, int, torch.dtype]]
    number: int
    heads: str = "all"

    def __post_init__(self) -> None:
        # Of each piece of a tensor the tensor's number, where its rows are, where they come, and
        # the other rank. Copy engines take what is contiguous, so each sequence is a piece.
        self.own, self.leaving, self.coming = list[Any](), list[Any](), list[Any]()
        self.rank = self.call.group.rank()
        sequences: list[Any] = [*product(*map(range, self.call.batch))]
        if len(sequences) == 1:
            sequences = [(slice(None),) * len(self.call.batch)]  # a view less for the host
        for (source, target, rows, places), (i, (heads, *_)), sequence in product(
            self.exchange.moves, enumerate(self.kinds), sequences
        ):
            shares = [slice(target * heads, target * heads + heads)] * (self.heads == "split")
            here = *sequence, rows, *shares
            # What is joined comes from each rank apart.
            there = *[source] * (self.heads == "join"), *sequence, places
            if source == target == self.rank:
                self.own.append((i, here, there, source))
            elif source == self.rank:
                self.leaving.append((i, here, there, target))
            elif target == self.rank:
                self.coming.append((i, here, there, source))
        self.targets, self.sources = ({x[-1] for x in one} for one in (self.leaving, self.coming))
        crosses = any(source != target for source, target, *_ in self.exchange.moves)
        self.in_shared_memory = crosses and shares_memory(self.call.group, self.call.device)

    def shapes(self, total: int) -> list[tuple[int, ...]]:
        """Return the shapes of what comes, with so many rows."""
        first = [self.call.group.size()] * (self.heads == "join")
        return [(*first, *self.call.batch, total, *sizes) for *sizes, _ in self.kinds]

    def meet(self) -> None:
        """Wait until all ranks may write to the memory they share."""
        if self.in_shared_memory:
            while UNDER_WAY:  # in a ring from the hop before; or from a call that failed
                UNDER_WAY[-1].arrive()
            self.shared.handle.barrier(0, self.shared.timeout_ms)

    def start(self, tensors: Sequence[Tensor], is_kept: bool = False) -> Callable[[], list[Tensor]]:
        """Begin after the current stream's work; return what waits for tensors.
        It returns the tensors that come. In shared memory they are there until it is written again,
        unless they are joined. If what leaves `is_kept`, this does not wait for it: `end` does."""
        if self.in_shared_memory:
            wait, places = self.push(tensors, is_kept), self.own_places
        else:
            shapes = self.shapes(self.exchange.totals[self.rank])
            results = [x.new_empty(shape) for x, shape in zip(tensors, shapes, strict=True)]
            wait = self.send(tensors, results)
            places = [results[i][there] for i, _, there, _ in self.own]
        if places:
            torch._foreach_copy_(places, [tensors[i][here] for i, here, *_ in self.own])
        return wait if self.heads != "join" else lambda: [torch.cat([*x], -2) for x in wait()]

    def send(self, tensors: Sequence[Tensor], results: list[Tensor]) -> Callable[[], list[Tensor]]:
        """Begin to send messages."""
        messages = [
            dist.P2POp(dist.isend, tensors[i][here].contiguous(), None, self.call.group, 0, other)
            for i, here, _, other in self.leaving
        ] + [
            dist.P2POp(dist.irecv, results[i][there], None, self.call.group, 0, other)
            for i, _, there, other in self.coming
        ]
        works = dist.batch_isend_irecv(messages) if messages else []

        def wait() -> list[Tensor]:
            while works:  # a work of gloo can be waited for once
                works.pop().wait()
            messages.clear()  # only now may others have the memory
            return results

        return wait

    def push(self, tensors: Sequence[Tensor], is_kept: bool) -> Callable[[], list[Tensor]]:
        """Begin to copy into other ranks' memory."""
        shared, kept = self.shared, list(tensors)
        # Without a number torch would look for the device, several times as long.
        current = torch.cuda.current_stream(self.call.device.index)
        self.begun.record(current)
        torch.cuda.set_stream(shared.stream)  # torch's context for this takes the host longer
        try:
            shared.stream.wait_event(self.begun)
            for (i, here, *_), place in zip(self.leaving, self.places, strict=True):
                place.copy_(tensors[i][here])
            for rank in self.targets:
                shared.say(rank)
            self.ended.record(shared.stream)
        finally:
            torch.cuda.set_stream(current)
        UNDER_WAY.append(self)

        def wait() -> list[Tensor]:
            self.arrive()
            if not is_kept:
                self.end()
            kept.clear()
            return self.arrived

        return wait

    def arrive(self) -> None:
        """Wait on the current stream for what other ranks copy here."""
        if self in UNDER_WAY:
            UNDER_WAY.remove(self)
            for rank in self.sources:
                self.shared.handle.wait_signal(rank, SAID, self.shared.timeout_ms)

    def end(self) -> None:
        """Wait on the current stream for copies to other ranks."""
        if self.in_shared_memory:
            torch.cuda.current_stream(self.call.device.index).wait_event(self.ended)

    @functools.cached_property
    @torch.inference_mode(False)  # else no other call could write there
    def shared(self) -> "SharedMemory":
        """Prepare to copy, on all ranks; copies write the same each time."""
        self.begun, self.ended = torch.cuda.Event(), torch.cuda.Event()
        shapes, dtypes = self.shapes(max(self.exchange.totals)), [x for *_, x in self.kinds]
        counts = zip(map(math.prod, shapes), dtypes, strict=True)
        *begins, end = accumulate((-(-n * x.itemsize // 256) * 256 for n, x in counts), initial=0)
        size = 1 << max(end - 1, 1023).bit_length()
        shared = SharedMemory.of(self.call.group, self.number, size)

        def box(rank: int, i: int) -> Tensor:
            begin = begins[i] // dtypes[i].itemsize
            return shared.handle.get_buffer(rank, shapes[i], dtypes[i], begin)

        rows_dim, total = len(shapes[0]) - 3, self.exchange.totals[self.rank]
        self.arrived = [box(self.rank, i).narrow(rows_dim, 0, total) for i in range(len(shapes))]
        self.own_places = [self.arrived[i][there] for i, _, there, _ in self.own]
        self.places = [box(target, i)[there] for i, _, there, target in self.leaving]
        return shared


@functools.cache  # on all ranks alike: it may not be forgotten on one of them
def shares_memory(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether a group's GPUs can write into each other's memory.
    All ranks must ask."""
    if device.type != "cuda":
        return False
    hosts: list[Any] = [None] * group.size()
    dist.all_gather_object(hosts, socket.gethostname(), group)
    if len(set(hosts)) > 1:
        return False
    worked = True
    try:
        SharedMemory.of(group, 0, 1024)
    except (AttributeError, ImportError, RuntimeError):  # no peer access, or an older torch
        worked = False
    dist.all_gather_object(hosts, worked, group)
    return all(hosts)


class SharedMemory(NamedTuple):
    """Memory of this rank and of others that they write to."""

    buffer: Tensor
    handle: Any  # torch's, for the memory of all ranks
    timeout_ms: int
    stream: torch.cuda.Stream  # of copies

    @classmethod
    @functools.cache  # on all ranks alike: sizes are powers of two, so they are few
    def of(cls, group: dist.ProcessGroup, number: int, size: int) -> "SharedMemory":
        """Make one, which transfers of this number and size share."""
        from torch.distributed import _symmetric_memory as symmetric

        device = torch.device("cuda", torch.cuda.current_device())
        buffer = symmetric.empty(size, dtype=torch.uint8, device=device)
        handle = symmetric.rendezvous(buffer, group.group_name)
        torch.cuda.synchronize(device)
        dist.barrier(group)  # it has been cleared on all ranks
        timeout = group._get_backend(device).options._timeout
        return cls(buffer, handle, int(timeout.total_seconds() * 1000), stream_of(device))

    def say(self, rank: int) -> None:
        """Let a rank's `wait_signal` end, after the copies."""
        place = SAID * self.handle.world_size + self.handle.rank
        word = self.handle.signal_pad_ptrs[rank] + 4 * place
        # Unlike torch's `put_signal` this takes no SM, so no kernel keeps it waiting.
        (error,) = driver.cuStreamWriteValue32(self.stream.cuda_stream, word, 1, 0)
        if error:
            raise RuntimeError(f"CUDA cannot write to memory of rank {rank}: {error.name}")


SAID = 1
"""Torch's channel of words that say that rows have come; ranks meet by channel 0."""

UNDER_WAY: list[Transfer] = []
"""Transfers whose rows have not been waited for. A word that stayed would end a later wait."""

stream_of = functools.cache(torch.cuda.Stream)
"""The stream of a device's copies to others: one, so that they come in the same order."""
