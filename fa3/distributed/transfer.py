"""Rows on their way between ranks: by copies into memory that ranks share, or by messages.

On one host a GPU writes rows into memory of the others. Its copy engine does that, which takes no
SM. Two words for each pair of ranks say what has come, and what may be written again. Elsewhere
ranks send and receive through `torch.distributed`.
"""

import functools
import math
import socket
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from cuda.bindings import driver
from torch import Tensor

from fa3.distributed.pieces import Exchange, Move
from fa3.running.graphs import capture_of, current_stream, succeeded

CAME, READ = 0, 1
"""Channels of a mailbox: rows have come, and they have been read."""


class Arrival(NamedTuple):
    """Rows that come to this rank."""

    tensors: Sequence[Tensor]  # (rows, batch, heads, columns)
    wait: Callable[[], None]  # before they are read
    release: Callable[[], None]  # after they are read

    def at(self, rows: slice) -> list[Tensor]:
        """Return some rows, (batch, rows, heads, columns)."""
        return [x[rows].transpose(0, 1) for x in self.tensors]


class Transfer(NamedTuple):
    """An exchange of tensors with so many heads and columns.

    Attributes:
        number: that no other transfer of a call has.
        sizes: heads and columns of each tensor that leaves.
        leaves_by_heads: each rank gets a share of the heads; comes_by_heads: from each rank.
    """

    exchange: Exchange
    dtype: torch.dtype
    number: int
    group: dist.ProcessGroup
    batch: int
    sizes: tuple[tuple[int, int], ...]
    device: torch.device
    leaves_by_heads: bool = False
    comes_by_heads: bool = False

    def shapes(self, total: int) -> list[tuple[int, int, int, int]]:
        """Return the shapes of what comes, with so many rows."""
        count = self.group.size()
        up, down = (count if self.comes_by_heads else 1), (count if self.leaves_by_heads else 1)
        return [(total, self.batch, heads * up // down, columns) for heads, columns in self.sizes]

    def leaving(self, x: Tensor, move: Move) -> Tensor:
        """Return what of a tensor leaves."""
        return share(x[move.rows], self.group.size(), move.target, self.leaves_by_heads)

    def coming(self, x: Tensor, move: Move) -> Tensor:
        """Return where it gets to."""
        return share(x[move.places], self.group.size(), move.source, self.comes_by_heads)


Start = Callable[[Sequence[Tensor]], Arrival]
"""Begins a transfer of tensors (rows, batch, heads, columns), contiguous."""


def starting(*named: Any, **by_heads: bool) -> Start:
    """Return what begins a `Transfer`. All ranks must call it."""
    transfer = Transfer(*named, **by_heads)
    between_ranks = any(move.source != move.target for move in transfer.exchange.moves)
    if between_ranks and transfer.device.type == "cuda" and shares_memory(transfer.group):
        return ByCopies.of(transfer).start
    return functools.partial(start_messages, transfer)


def by_rows(*tensors: Tensor) -> list[Tensor]:
    """Return tensors with the rows before the batch, contiguous."""
    return [x.transpose(0, 1).contiguous() for x in tensors]


def share(x: Tensor, count: int, index: int, by_heads: bool) -> Tensor:
    """Return one of so many shares of the heads; all of them unless it goes by heads."""
    return x.unflatten(2, (count, -1))[:, :, index] if by_heads else x


def start_messages(transfer: Transfer, tensors: Sequence[Tensor]) -> Arrival:
    """Begin to send and receive by torch.distributed."""
    group, rank = transfer.group, transfer.group.rank()
    total, moves = transfer.exchange.totals[rank], transfer.exchange.moves
    arrived = [tensors[0].new_empty(shape) for shape in transfer.shapes(total)]
    sent, received, copies = [], [], []
    for move in moves:
        for x, y in zip(tensors, arrived, strict=True):
            if rank == move.source == move.target:
                transfer.coming(y, move).copy_(transfer.leaving(x, move))
            elif rank == move.source:
                sent.append((move.target, transfer.leaving(x, move).contiguous()))
            elif rank == move.target:
                place = buffer = transfer.coming(y, move)
                if not place.is_contiguous():
                    buffer = torch.empty(place.shape, dtype=y.dtype, device=y.device)
                    copies.append((place, buffer))
                received.append((move.source, buffer))
    works: list[Any] = []
    if sent or received:
        # Torch's functions for this cost the host several times as much.
        backend = group._get_backend(transfer.device)
        if backend.supports_coalescing:
            group._start_coalescing(transfer.device)
        works = [group.send([x], other, 0) for other, x in sent]
        works += [group.recv([x], other, 0) for other, x in received]
        if backend.supports_coalescing:
            works = [group._end_coalescing(transfer.device)]

    def wait() -> None:
        while works:
            works.pop().wait()
        # Until here nothing else may have the memory of what is sent.
        sent.clear()
        while copies:
            place, buffer = copies.pop()
            place.copy_(buffer)

    return Arrival(arrived, wait, wait)


@functools.lru_cache(maxsize=64)
def shares_memory(group: dist.ProcessGroup) -> bool:
    """Whether the GPUs of a group can write into each other's memory; all ranks must ask."""
    hosts: list[Any] = [None] * group.size()
    dist.all_gather_object(hosts, socket.gethostname(), group)
    worked = len(set(hosts)) == 1
    if worked:
        try:
            Mailbox.of(group, 0, 0)
        except RuntimeError:
            worked = False
        dist.all_gather_object(hosts, worked, group)
    return worked and all(hosts)


class Mailbox(NamedTuple):
    """Memory of this rank that the others write to, with words that say what has come."""

    rank: int
    buffer: Tensor  # bytes
    handle: Any  # torch's, for the memory of all ranks
    timeout_ms: int
    stream: torch.cuda.Stream  # of copies

    @classmethod
    @functools.lru_cache(maxsize=64)
    def of(cls, group: dist.ProcessGroup, number: int, size: int) -> "Mailbox":
        """Make one of at least so many bytes; transfers of one number and size share it."""
        from torch.distributed import _symmetric_memory as symmetric

        device, rank = torch.device("cuda", torch.cuda.current_device()), group.rank()
        buffer = symmetric.empty(max(size, 1024), dtype=torch.uint8, device=device)
        handle = symmetric.rendezvous(buffer, group.group_name)
        timeout = group._get_backend(device).options._timeout
        milliseconds = int(timeout.total_seconds() * 1000)
        mailbox = cls(rank, buffer, handle, milliseconds, stream_of(device))
        for other in range(group.size()):
            mailbox.say(current_stream(device.index), rank, READ, other)
        torch.cuda.synchronize(device)
        dist.barrier(group)
        return mailbox

    def say(self, stream: int, to: int, channel: int, source: int | None = None) -> None:
        """Write a word that a rank waits for, of this rank or another source."""
        size, source = self.handle.world_size, self.rank if source is None else source
        word = self.handle.signal_pad_ptrs[to] + 4 * (size * channel + source)
        succeeded(driver.cuStreamWriteValue32(stream, word, 1, 0))


@functools.cache
def stream_of(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of a device's copies to others."""
    return torch.cuda.Stream(device)


Copy = Callable[[int, int], None]
"""Copies from an address, on a stream."""


class ByCopies(NamedTuple):
    """A transfer by copy engines.

    Attributes:
        tensors: of the mailbox, where rows come.
        leaving, staying: to other ranks and in this one: numbers of tensors, and copies of them.
        begun, ended: on the stream of the copies.
    """

    mailbox: Mailbox
    tensors: list[Tensor]
    leaving: list[tuple[int, Copy]]
    staying: list[tuple[int, Copy]]
    targets: list[int]
    sources: list[int]
    others: list[int]
    begun: torch.cuda.Event
    ended: torch.cuda.Event

    @classmethod
    def of(cls, transfer: Transfer) -> "ByCopies":
        """Prepare a transfer; all ranks must."""
        exchange, rank, item = transfer.exchange, transfer.group.rank(), transfer.dtype.itemsize
        shapes = transfer.shapes(max(exchange.totals))
        sizes = [item * math.prod(shape) for shape in shapes]
        ends = list(accumulate([-(-size // 256) * 256 for size in sizes], initial=0))
        mailbox = Mailbox.of(
            transfer.group, transfer.number, 1 << max(ends[-1] - 1, 0).bit_length()
        )
        tensors, copies, count = [], list[tuple[Move, int, Copy]](), transfer.group.size()
        for i, (begin, shape) in enumerate(zip(ends, shapes, strict=False)):
            place = mailbox.buffer[begin : begin + sizes[i]].view(transfer.dtype).view(shape)
            tensors.append(place[: exchange.totals[rank]])
            pitch = item * math.prod(transfer.sizes[i])
            width = pitch // count if transfer.leaves_by_heads else pitch
            for move in exchange.moves:
                if move.source == rank:
                    target = begin + mailbox.handle.buffer_ptrs[move.target]
                    steps = pitch, width * count if transfer.comes_by_heads else width
                    source = move.rows.start * transfer.batch * pitch
                    source += move.target * width if transfer.leaves_by_heads else 0
                    target += move.places.start * transfer.batch * steps[1]
                    target += rank * width if transfer.comes_by_heads else 0
                    rows = (move.rows.stop - move.rows.start) * transfer.batch
                    copies.append((move, i, copy_of(source, target, rows, width, steps)))
        return cls(
            mailbox, tensors,
            [(i, copy) for move, i, copy in copies if move.target != rank],
            [(i, copy) for move, i, copy in copies if move.target == rank],
            sorted({move.target for move in exchange.moves if move.source == rank} - {rank}),
            sorted({move.source for move in exchange.moves if move.target == rank} - {rank}),
            [other for other in range(count) if other != rank],
            torch.cuda.Event(), torch.cuda.Event(),
        )  # fmt: skip

    def start(self, tensors: Sequence[Tensor]) -> Arrival:
        """Begin to copy, after what the current stream does now."""
        (_, buffer, handle, timeout, side), kept = self.mailbox, [tensors]
        stream, begins = current_stream(buffer.device.index), [x.data_ptr() for x in tensors]
        if (capture := capture_of(stream)) is not None:
            capture.keep(buffer)
        self.begun.record()
        with torch.cuda.stream(side):
            side.wait_event(self.begun)
            for other in self.others:
                handle.wait_signal(other, READ, timeout)
            for i, copy in self.leaving:
                copy(begins[i], side.cuda_stream)
            for target in self.targets:
                self.mailbox.say(side.cuda_stream, target, CAME)
            self.ended.record()
        for i, copy in self.staying:
            copy(begins[i], stream)
        awaited = list(self.sources)

        def wait() -> None:
            while awaited:
                handle.wait_signal(awaited.pop(), CAME, timeout)

        def release() -> None:
            if kept:
                wait()
                torch.cuda.current_stream().wait_event(self.ended)
                for other in self.others:
                    self.mailbox.say(stream, other, READ)
                # Until here nothing else may have the memory of what is sent.
                kept.clear()

        return Arrival(self.tensors, wait, release)


def copy_of(source: int, target: int, rows: int, width: int, steps: tuple[int, int]) -> Copy:
    """Return a copy of rows of so many bytes, from an offset to an address.
    Steps are from row to row, of the source and of the target."""
    if steps == (width, width):

        def copy(begin: int, stream: int) -> None:
            succeeded(driver.cuMemcpyAsync(target, begin + source, width * rows, stream))

        return copy
    on_device = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
    named = {
        "srcMemoryType": on_device, "dstMemoryType": on_device, "WidthInBytes": width,
        "Height": rows, "srcPitch": steps[0], "dstPitch": steps[1], "dstDevice": target,
    }  # fmt: skip
    copy_2d = driver.CUDA_MEMCPY2D()
    for name, value in named.items():
        setattr(copy_2d, name, value)

    def copy(begin: int, stream: int) -> None:
        copy_2d.srcDevice = begin + source
        succeeded(driver.cuMemcpy2DAsync(copy_2d, stream))

    return copy
