"""Issue of warpgroup matrix multiplications (WGMMA), and sizes of warps and warpgroups.

`PingPong` is a ring of named barriers that makes warpgroups issue WGMMAs in turn.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, pipeline
from cutlass.cute.nvgpu import warpgroup

WARP = 32  # threads of a warp
WARPGROUP = 128  # threads of a warpgroup
WARPS = WARPGROUP // WARP  # warps of a warpgroup
ROWS = 64  # rows of one WGMMA

REGISTERS = {2: (24, 240), 3: (32, 160)}
"""Warpgroups that multiply -> registers of a thread after setmaxnreg: producer, others."""

REGISTERS_OF_PAGES = REGISTERS | {2: (40, 232)}  # with pages or V^T
REGISTERS_OF_CONVERTERS = {2: (56, 224)}  # with pages in FP8; the sum over warps is the same
ROWS_OF_WARP = ROWS // WARPS  # accumulator rows of a WGMMA that one warp holds


@cute.jit
def issue(op: cutlass.Constexpr, acc: cute.Tensor, a, b, accumulate: cutlass.Constexpr):
    """Start acc = a b^T (+ acc) over all k blocks as one commit group; the caller waits for it.
    Makes its own MMA atom: a field set on an atom from outside a dynamic loop would escape it."""
    mma = cute.make_tiled_mma(op)
    warpgroup.fence()
    for k in cutlass.range_constexpr(cute.size(a, mode=[2])):
        mma.set(warpgroup.Field.ACCUMULATE, accumulate or k > 0)
        cute.gemm(mma, acc, a[None, None, k], b[None, None, k], acc)
    warpgroup.commit_group()


@dataclass(frozen=True)
class PingPong:
    """Turns pass from warpgroup to warpgroup around the ring, starting with group 0.
    Each group has one barrier: its own threads wait on it, and the previous group's threads
    arrive on it. All groups must take the same number of turns."""

    first_barrier: int
    groups: int
    group: Int32

    @cute.jit
    def start(self):
        """Give group 0 the first turn. Every group must call this once."""
        if self.group == self.groups - 1:
            self.signal_next()

    @cute.jit
    def wait(self):
        """Wait for this group's turn."""
        self.barrier(self.group).arrive_and_wait()

    @cute.jit
    def signal_next(self):
        """Give the turn to the next group."""
        last = self.group == self.groups - 1
        self.barrier(0 if last else self.group + 1).arrive()

    @cute.jit
    def finish(self):
        """Take the last turn that was passed on, so that no barrier is left half full."""
        if self.group == 0:
            self.wait()

    def barrier(self, group) -> pipeline.NamedBarrier:
        return pipeline.NamedBarrier(self.first_barrier + group, 2 * WARPGROUP)


class NoPingPong:
    """For warpgroups that never wait for a turn."""

    def wait(self):
        pass

    start = signal_next = finish = wait
