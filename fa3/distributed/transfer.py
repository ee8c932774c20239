"""Rows on their way between ranks: by copies into memory that ranks share, or by messages.

On one host a GPU writes rows into memory of the others. Its copy engine does that, which takes no
SM. Two words for each pair of ranks say what has come, and what may be written again. Elsewhere
ranks send and receive through `torch.distributed`.
"""

import contextlib
import functools
import math
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, cycle
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from cuda.bindings import driver
from torch import Tensor

from fa3.distributed.pieces import RowExchange
from fa3.running.graphs import capture_of, current_stream, succeeded

CAME, READ = 0, 1
"""Channels of an inbox: rows have come, and they have been read."""

FEW_BYTES = 1 << 26
"""Up to here there are two inboxes in turn: the next rows come while others are still read."""


@dataclass
class Transfer:
    """An exchange of tensors with so many heads and columns, again and again.

    Here ranks send each other messages.

    Attributes:
        number: that no other transfer has, unless this one is over before that begins.
        sizes: heads and columns of each tensor that leaves.
        leaves_by_heads: each rank gets a share of the heads; comes_by_heads: from each rank.
        tensors: what comes, (rows, batch, heads, columns), after it has begun.
    """

    exchange: RowExchange
    dtype: torch.dtype
    number: int
    group: dist.ProcessGroup
    batch: int
    sizes: Sequence[tuple[int, int]]
    device: torch.device
    leaves_by_heads: bool = False
    comes_by_heads: bool = False

    def __post_init__(self) -> None:
        self.rank, self.tensors = self.group.rank(), list[Tensor]()
        self.works, self.kept = list[Any](), list[Any]()

    def shapes(self, total: int) -> list[tuple[int, int, int, int]]:
        """Return the shapes of what comes, with so many rows."""
        count = self.group.size()
        up, down = (count if self.comes_by_heads else 1), (count if self.leaves_by_heads else 1)
        return [(total, self.batch, heads * up // down, columns) for heads, columns in self.sizes]

    def at(self, rows: slice) -> list[Tensor]:
        """Return some rows of what has come, (batch, rows, heads, columns)."""
        return [x[rows].transpose(0, 1) for x in self.tensors]

    def start(self, tensors: Sequence[Tensor]) -> "Transfer":
        """Begin, with tensors (rows, batch, heads, columns), contiguous."""
        count, rank, device = self.group.size(), self.rank, self.device
        sent, received = [], []
        shapes = self.shapes(self.exchange.totals[rank])
        self.tensors = [x.new_empty(shape) for x, shape in zip(tensors, shapes, strict=True)]
        for source, target, rows, places in self.exchange.moves:
            for x, y in zip(tensors, self.tensors, strict=True):
                leaving = share_of(x[rows], count, target, self.leaves_by_heads)
                place = share_of(y[places], count, source, self.comes_by_heads)
                if rank == source == target:
                    place.copy_(leaving)
                elif rank == source:
                    sent.append((target, leaving.contiguous()))
                elif rank == target:
                    coming = place if place.is_contiguous() else place.new_empty(place.shape)
                    received.append((source, coming))
                    self.kept.append((place, coming))
        if sent or received:
            # Torch's functions for this cost the host several times as much.
            group, is_batch = self.group, self.group._get_backend(device).supports_coalescing
            if is_batch:
                group._start_coalescing(device)
            self.works = [group.send([x], other, 0) for other, x in sent]
            self.works += [group.recv([x], other, 0) for other, x in received]
            if is_batch:
                self.works = [group._end_coalescing(device)]
        # Until the end nothing else may have the memory of what is sent.
        self.kept.append((None, sent))
        return self

    def wait(self) -> None:
        """Wait for what comes, before it is read."""
        while self.works:
            self.works.pop().wait()
        while self.kept:
            place, coming = self.kept.pop()
            if place is not None and place is not coming:
                place.copy_(coming)

    def release(self) -> None:
        """End it, after what has come is read."""
        self.wait()
        self.tensors = []


def transfer_of(*named: Any, **by_heads: Any) -> Transfer:
    """Return what begins a transfer; all ranks must call it."""
    transfer = Transfer(*named, **by_heads)
    between_ranks = any(move.source != move.target for move in transfer.exchange.moves)
    if between_ranks and transfer.device.type == "cuda" and shares_memory(transfer.group):
        return Copies(*named, **by_heads)
    return transfer


def by_rows(*tensors: Tensor) -> list[Tensor]:
    """Return tensors with the rows before the batch, contiguous."""
    return [x.transpose(0, 1).contiguous() for x in tensors]


def share_of(x: Tensor, count: int, index: int, by_heads: bool) -> Tensor:
    """Return one of so many shares of the heads; all of them unless it goes by heads."""
    return x.unflatten(2, (count, -1))[:, :, index] if by_heads else x


@functools.cache  # on all ranks alike: it may not be forgotten on one of them
def shares_memory(group: dist.ProcessGroup) -> bool:
    """Whether the GPUs of a group can write into each other's memory; all ranks must ask."""
    hosts: list[Any] = [None] * group.size()
    dist.all_gather_object(hosts, socket.gethostname(), group)
    worked = len(set(hosts)) == 1
    if worked:
        try:
            Inbox.of(group, 0, 0)
        except (AttributeError, ImportError, RuntimeError):  # no peer access, or an older torch
            worked = False
        dist.all_gather_object(hosts, worked, group)
    return worked and all(hosts)


class Inbox(NamedTuple):
    """Memory of this rank that the others write to, with words that say what has come."""

    rank: int
    buffer: Tensor  # bytes
    handle: Any  # torch's, for the memory of all ranks
    timeout_ms: int
    stream: torch.cuda.Stream  # of copies

    @classmethod
    @functools.cache  # on all ranks alike: sizes are powers of two, so they are few
    def of(cls, group: dist.ProcessGroup, number: int, size: int) -> "Inbox":
        """Make one of at least so many bytes; transfers of one number and size share it."""
        from torch.distributed import _symmetric_memory as symmetric

        device, rank = torch.device("cuda", torch.cuda.current_device()), group.rank()
        buffer = symmetric.empty(max(size, 1024), dtype=torch.uint8, device=device)
        handle = symmetric.rendezvous(buffer, group.group_name)
        timeout = group._get_backend(device).options._timeout
        milliseconds = int(timeout.total_seconds() * 1000)
        inbox = cls(rank, buffer, handle, milliseconds, stream_of(device))
        for other in range(group.size()):
            inbox.say(current_stream(device.index), rank, READ, other)
        torch.cuda.synchronize(device)
        dist.barrier(group)
        return inbox

    def say(self, stream: int, to: int, channel: int, source: int | None = None) -> None:
        """Write a word that a rank waits for, of this rank or another source."""
        size, source = self.handle.world_size, self.rank if source is None else source
        word = self.handle.signal_pad_ptrs[to] + 4 * (size * channel + source)
        succeeded(driver.cuStreamWriteValue32(stream, word, 1, 0))


@functools.cache
def turns_of(group: dist.ProcessGroup, number: int, size: int) -> Iterator[int]:
    """Return the inboxes that take turns, by number: in all transfers that have them, since ranks
    may differ in which transfer of one number and size it is."""
    return cycle(range(2 if size <= FEW_BYTES else 1))


@functools.cache
def stream_of(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of a device's copies to others."""
    return torch.cuda.Stream(device)


class Copies(Transfer):
    """A transfer by copy engines, into memory that ranks share.

    Attributes:
        turns: inboxes that take turns, each with its tensors, and with copies to other ranks and
            in this one; order: their numbers, as their turns come.
        others: all other ranks. Two words go each way between any two ranks, with rows or without:
            no rank says one again before the other has heard it.
        begun, ended: on the stream of the copies.
        under_way: what has begun and is not released.
    """

    turns: Sequence = ()
    under_way: ClassVar[list["Copies"]] = []

    def prepare(self) -> None:
        """Get what the attributes are; all ranks must."""
        exchange, rank, item = self.exchange, self.rank, self.dtype.itemsize
        shapes = self.shapes(max(exchange.totals))
        sizes = [item * math.prod(shape) for shape in shapes]
        ends = list(accumulate([-(-size // 256) * 256 for size in sizes], initial=0))
        size = 1 << max(ends[-1] - 1, 0).bit_length()
        self.begun, self.ended, turns = torch.cuda.Event(), torch.cuda.Event(), []
        self.order = turns_of(self.group, self.number, size)
        for turn in range(2 if size <= FEW_BYTES else 1):
            inbox = Inbox.of(self.group, 2 * self.number + turn, size)
            tensors = [
                inbox.buffer[begin : begin + size].view(self.dtype).view(shape)
                for begin, size, shape in zip(ends, sizes, shapes, strict=False)
            ]
            copies = list(self.copies(inbox, ends))
            turns.append((
                inbox, [x[: exchange.totals[rank]] for x in tensors],
                [copy for target, *copy in copies if target != rank],
                [copy for target, *copy in copies if target == rank],
            ))  # fmt: skip
        self.turns = turns
        self.others = [other for other in range(self.group.size()) if other != rank]

    def copies(self, inbox: Inbox, begins: list[int]) -> Iterator[tuple[int, int, int, Any]]:
        """Yield this rank's copies: the target, the number of a tensor, an offset in it, a copy."""
        count, rank, item = self.group.size(), self.rank, self.dtype.itemsize
        for i, (heads, columns) in enumerate(self.sizes):
            step = item * heads * columns
            width = step // count if self.leaves_by_heads else step
            step_there = width * count if self.comes_by_heads else width
            for move in self.exchange.moves:
                if move.source == rank:
                    source = move.rows.start * self.batch * step
                    source += move.target * width if self.leaves_by_heads else 0
                    target = begins[i] + inbox.handle.buffer_ptrs[move.target]
                    target += move.places.start * self.batch * step_there
                    target += rank * width if self.comes_by_heads else 0
                    rows = (move.rows.stop - move.rows.start) * self.batch
                    copy = rows_copied(target, rows, width, step, step_there)
                    yield move.target, i, source, copy

    def start(self, tensors: Sequence[Tensor]) -> "Transfer":
        """Begin to copy, after what the current stream does now."""
        if not self.turns:
            self.prepare()
        self.inbox, self.tensors, leaving, staying = self.turns[next(self.order)]
        (_, buffer, handle, timeout, side), self.kept = self.inbox, [tensors]
        stream, begins = current_stream(buffer.device.index), [x.data_ptr() for x in tensors]
        if (capture := capture_of(stream)) is not None:
            capture.keep(buffer)
        self.begun.record()
        with torch.cuda.stream(side):
            side.wait_event(self.begun)
            for other in self.others:
                handle.wait_signal(other, READ, timeout)
            copy_all(leaving, begins, side.cuda_stream)
            for other in self.others:
                self.inbox.say(side.cuda_stream, other, CAME)
            self.ended.record()
        copy_all(staying, begins, stream)
        self.works = list(self.others)
        self.under_way.append(self)
        return self

    def wait(self) -> None:
        """Wait for what comes, before it is read."""
        while self.works:
            self.inbox.handle.wait_signal(self.works.pop(), CAME, self.inbox.timeout_ms)

    def release(self) -> None:
        """End it, after what has come is read."""
        self.wait()
        if self.kept:
            torch.cuda.current_stream().wait_event(self.ended)
            for other in self.others:
                self.inbox.say(current_stream(self.device.index), other, READ)
            self.under_way.remove(self)
        self.kept = []


@contextlib.contextmanager
def released_after_errors() -> Iterator[None]:
    """Release what an error leaves under way: words that stay would end the next call."""
    try:
        yield
    except Exception:
        with contextlib.suppress(RuntimeError):  # of a GPU or a capture that has failed
            for transfer in list(Copies.under_way):
                transfer.release()
        Copies.under_way.clear()
        raise


def rows_copied(target: int, rows: int, width: int, step: int, step_there: int) -> Any:
    """Return a copy of rows of so many bytes to an address, without the source.
    Steps are from row to row."""
    copy, on_device = driver.CUDA_MEMCPY2D(), driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
    copy.srcMemoryType = copy.dstMemoryType = on_device
    copy.WidthInBytes, copy.Height = width, rows
    copy.dstDevice, copy.srcPitch, copy.dstPitch = target, step, step_there
    return copy


def copy_all(copies: list[list], begins: list[int], stream: int) -> None:
    """Copy from tensors that begin there."""
    for i, offset, copy in copies:
        if copy.srcPitch == copy.WidthInBytes == copy.dstPitch:
            size = copy.WidthInBytes * copy.Height
            succeeded(driver.cuMemcpyAsync(copy.dstDevice, begins[i] + offset, size, stream))
        else:
            copy.srcDevice = begins[i] + offset
            succeeded(driver.cuMemcpy2DAsync(copy, stream))
