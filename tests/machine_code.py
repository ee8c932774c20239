"""What tests of machine code share."""

import re

import cutlass

HAS_LOG = not cutlass.__version__.startswith("4.7.")
"""Whether the DSL hands on what ptxas prints. Without it spills and serialised WGMMAs are seen in
the instructions only."""


def check_ptxas_log(log: str) -> None:
    """ptxas had nothing to warn about, such as WGMMAs that it serialised (C75..)."""
    assert bool(re.search(r"\bUsed \d+ registers", log)) == HAS_LOG, log
    assert not re.findall(r"C75\d\d", log), log
