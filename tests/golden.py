"""Golden files: JSON in `tests/golden` that says what kernels and launches are today.

A test compares what it finds with its entry, or with `--update-golden` replaces the entry. Under
pytest-xdist each worker sends its entries to the process that started it, which writes the file.
The hooks of pytest are imported by `conftest.py`.
"""

import contextlib
import importlib.metadata
import json
from collections import defaultdict
from pathlib import Path

import pytest

FOLDER = Path(__file__).with_name("golden")
KERNELS, LAUNCHES = "kernels", "launches"

VERSIONS = "versions"
COMPILERS = "nvidia-cutlass-dsl", "nvidia-cuda-nvdisasm"
"""Packages whose versions determine the machine code of a kernel and how it is printed."""

MOST_LINES = 40
"""Differences that a failed test shows."""

FOUND: dict[str, dict[str, dict]] = defaultdict(dict)
"""By the name of a file: the entries of this process's tests, by the tests' ids."""

OF_TEST: dict[str, dict] = {}
"""The kernels that the present test has looked at."""

COLLECTED: set[str] = set()
"""The ids of all tests in the files that are run, those that are deselected included."""


def versions() -> dict[str, str]:
    """Return the versions of `COMPILERS`."""
    import cutlass

    # A process may run another DSL than the one that is installed (`test_older_dsl.py`).
    disassembler = "not installed"
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        disassembler = importlib.metadata.version(COMPILERS[1])
    return dict(zip(COMPILERS, (cutlass.__version__, disassembler), strict=True))


def read(name: str) -> dict:
    """Read a golden file."""
    path = FOLDER / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def dense(value: object) -> str:
    """Return a value as JSON without spaces."""
    return json.dumps(value, separators=(",", ":"))


def write(name: str, entries: dict) -> None:
    """Write a golden file: one line for each kernel and each call."""
    lines = []
    for test, entry in sorted(entries.items()):
        parts = (f"  {dense(key)}:{dense(value)}" for key, value in entry.items())
        lines.append(f" {json.dumps(test)}: {{\n" + ",\n".join(parts) + "\n }")
    FOLDER.mkdir(exist_ok=True)
    FOLDER.joinpath(f"{name}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


def updated(old: dict, found: dict, collected: set[str]) -> dict:
    """Return the entries of a file with those that were found now, without those of no test.

    Args:
        old: what is in the file; dropped if other versions wrote it.
        collected: the ids of all tests in the files that were run; empty if single tests were.
    """
    if VERSIONS in found and old.get(VERSIONS) != found[VERSIONS]:
        old = {}
    files = set(map(file_of, collected))
    kept = {
        test: entry
        for test, entry in old.items()
        if test in collected
        or (file_of(test) not in files and FOLDER.parents[1].joinpath(file_of(test)).exists())
    }
    return kept | found


def file_of(test: str) -> str:
    """Return the file of a test, by its id."""
    return test.partition("::")[0]


def differences(old: object, new: object, place: str = "") -> list[str]:
    """Return a line for every part of an entry that has changed."""
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        old, new = ({str(i): x for i, x in enumerate(values, 1)} for values in (old, new))
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return [] if old == new else [f"{place}: {old} -> {new}"]
    return [
        line
        for key in {**old, **new}
        for line in differences(
            old.get(key, "nothing"), new.get(key, "nothing"), f"{place}, {key}" if place else key
        )
    ]


def check(name: str, item: pytest.Item, entry: dict) -> None:
    """Compare what a test found with its entry in a golden file, or keep it for the update."""
    if item.config.option.update_golden:
        FOUND[name][item.nodeid] = entry
        return
    # As it comes back from a file: tuples are lists.
    entry = json.loads(json.dumps(entry))
    if lines := differences(read(name).get(item.nodeid, {}), entry):
        more = [f"and {len(lines) - MOST_LINES} more"] if len(lines) > MOST_LINES else []
        pytest.fail(
            f"{item.nodeid} differs from tests/golden/{name}.json (see CONTRIBUTING.md):\n"
            + "\n".join(lines[:MOST_LINES] + more),
            pytrace=False,
        )


def why_not_compared() -> str | None:
    """Return why machine code cannot be compared here, or None if it can."""
    recorded, here = read(KERNELS).get(VERSIONS), versions()
    if recorded == here:
        return None
    return f"machine code was recorded with {recorded}, here it is {here}"


# ------------------------------------------------------------------------------- hooks of pytest


def pytest_addoption(parser):
    parser.addoption(
        "--update-golden", action="store_true", help="write what tests find to tests/golden"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_itemcollected(item):
    COLLECTED.add(item.nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    """Compare the kernels of a test that has passed."""
    OF_TEST.clear()
    result = yield
    if OF_TEST and (pyfuncitem.config.option.update_golden or why_not_compared() is None):
        check(KERNELS, pyfuncitem, dict(OF_TEST))
    return result


def pytest_sessionfinish(session):
    """Hand over what the tests found, or write it."""
    config = session.config
    if not config.option.update_golden:
        return
    if hasattr(config, "workeroutput"):
        config.workeroutput["golden"] = json.dumps([FOUND, sorted(COLLECTED)])
        return
    has_single_tests = any("::" in argument for argument in config.args)
    for name, entries in FOUND.items():
        if name == KERNELS:
            entries[VERSIONS] = versions()
        write(name, updated(read(name), entries, set() if has_single_tests else COLLECTED))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """Take over what a worker of pytest-xdist found."""
    found, collected = json.loads(getattr(node, "workeroutput", {}).get("golden", "[{}, []]"))
    for name, entries in found.items():
        FOUND[name].update(entries)
    COLLECTED.update(collected)
