"""Programs run under compute-sanitizer."""

import subprocess
import sys
import textwrap
from pathlib import Path

TOOLS = ("memcheck", "racecheck")


def check_sanitized(tool: str, program: str) -> None:
    """Assert that a tool of compute-sanitizer finds nothing in a program, which can import what
    lies beside the tests.
    """
    path = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
    # The DSL asks for the GPU's architecture before the driver is initialised.
    options = "--tool", tool, "--error-exitcode", "9", "--report-api-errors", "no"
    command = "compute-sanitizer", *options, sys.executable, "-c", path + textwrap.dedent(program)
    finished = subprocess.run(command, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stdout[-4000:] + finished.stderr[-4000:]
