"""How far a command has come: a bar on a terminal, lines elsewhere."""

import shutil
import sys
import time
from typing import TextIO

BAR = 30
"""Characters of a full bar."""


def terminal() -> TextIO | None:
    """The standard error, if it is open and a terminal, so that a bar can be drawn."""
    return sys.stderr if sys.stderr is not None and sys.stderr.isatty() else None


class Bar:
    """A progress bar of one line, redrawn in place; silent without a stream."""

    def __init__(self, total: int, stream: TextIO | None) -> None:
        self.total, self.done, self.stream = total, 0, stream
        self.note, self.drawn = "", 0
        self.begin = time.perf_counter()
        if stream and total:
            self.draw(stream)

    def show(self, done: int, note: str = "") -> None:
        """Draw so many as done, with a note after the seconds."""
        self.done, self.note = done, note
        if self.stream:
            self.draw(self.stream)

    def end(self) -> None:
        """Leave the line of a bar that is not full."""
        if self.stream and self.done < self.total:
            self.stream.write("\n")

    def draw(self, stream: TextIO) -> None:
        full = BAR * self.done // self.total
        seconds = time.perf_counter() - self.begin
        line = f"[{'#' * full:{BAR}}] {self.done} of {self.total} kernels, {seconds:.0f} s"
        line += f": {self.note}" if self.note else ""
        line = line[: shutil.get_terminal_size().columns - 1]
        # Spaces cover what a longer line has left.
        stream.write(f"\r{line:{self.drawn}}" + ("\n" if self.done == self.total else ""))
        stream.flush()
        self.drawn = len(line)


class Lines:
    """A line for each thing that is done, for what is no terminal; silent without a stream."""

    def __init__(self, total: int, stream: TextIO | None) -> None:
        self.total, self.done, self.stream = total, 0, stream
        self.begin = time.perf_counter()

    def add(self, name: str) -> None:
        """Tell that one more is done."""
        self.done += 1
        if self.stream:
            seconds = time.perf_counter() - self.begin
            line = f"{self.done} of {self.total}, {seconds:.0f} s: {name}"
            print(line, file=self.stream, flush=True)
