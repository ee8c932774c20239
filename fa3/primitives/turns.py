"""Ping-pong: a ring of named barriers that makes warpgroups issue WGMMAs in turn."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32, pipeline

from fa3.primitives.wgmma import WARPGROUP


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
