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
        self.drawn, self.begin = 0, time.perf_counter()
        if total:
            self.show(0)

    def __str__(self) -> str:
        seconds = time.perf_counter() - self.begin
        return f"{self.done} of {self.total} kernels, {seconds:.0f} s"

    def show(self, done: int, note: str = "") -> None:
        """Draw so many as done, with a note after the seconds."""
        self.done = done
        if self.stream:
            line = f"[{'#' * (BAR * done // self.total):{BAR}}] {self}" + (note and f": {note}")
            line = line[: shutil.get_terminal_size().columns - 1]
            # Spaces cover what a longer line has left.
            self.stream.write(f"\r{line:{self.drawn}}" + ("\n" if done == self.total else ""))
            self.stream.flush()
            self.drawn = len(line)

    def end(self) -> None:
        """Leave the line of a bar that is not full."""
        if self.stream and self.done < self.total:
            self.stream.write("\n")
