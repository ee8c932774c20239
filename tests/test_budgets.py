"""The size of the code: lines of packages and files, functions, and the trails of tensors."""

import ast
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest

import fa3

PACKAGE = Path(fa3.__file__).parent
PAGE = PACKAGE.parent / "docs/architecture.md"

LONGEST_FILE, LONGEST_FUNCTION, MOST_ARGUMENTS, MOST_OF_GUIDE = 700, 100, 10, 3000

LONG_FUNCTIONS = {
    ("calls/attention.py", "flash_attn_func"),
    ("calls/attention.py", "flash_attn_with_kvcache"),
    ("calls/passes.py", "flash_attn_backward"),
    ("calls/scheduler_metadata.py", "get_scheduler_metadata"),
    ("calls/attention.py", "flash_attn_varlen_func"),
}
"""Public functions, with the longest docstrings."""

PUBLIC = LONG_FUNCTIONS | {
    ("distributed/attention.py", "flash_attn_func"),
    ("distributed/decode.py", "flash_attn_with_kvcache"),
    ("distributed/planning.py", "plan"),
    ("integrations/transformers.py", "attend_layer"),
    ("integrations/transformers.py", "describe_mask"),
    ("integrations/vllm_backend.py", "__init__"),
    ("problem.py", "of"),
    ("tools/warmup.py", "warmup"),
}
"""Functions with a signature that others prescribe, or that users call by name."""


def section(title: str) -> str:
    """Return the text of a section of the page."""
    text = PAGE.read_text()
    return re.search(rf"^## {title}$(.*?)^## ", text, re.MULTILINE | re.DOTALL)[1]


def lines_of(path: Path) -> int:
    return len(path.read_text().splitlines())


def functions() -> list[tuple[str, ast.FunctionDef]]:
    """Return all functions, with their files."""
    return [
        (str(path.relative_to(PACKAGE)), node)
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    ]


def test_packages_keep_to_their_budgets():
    rows = re.findall(r"^\| `?([a-z ]+?)`? \| (\d+) \|$", section("Line budgets"), re.MULTILINE)
    budgets = dict(rows)
    folders = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert budgets.keys() == folders | {"files at the top"}
    for name, budget in budgets.items():
        files = (PACKAGE / name).rglob("*.py") if name in folders else PACKAGE.glob("*.py")
        lines = sum(map(lines_of, files))
        assert lines <= int(budget), f"{name} has {lines} lines"


def test_no_file_is_long():
    assert not [path for path in PACKAGE.rglob("*.py") if lines_of(path) > LONGEST_FILE]


def test_no_other_function_is_long():
    lines = [(path, one.name, one.end_lineno - one.lineno + 1) for path, one in functions()]
    assert {tuple(name) for *name, n in lines if n > LONGEST_FUNCTION} == LONG_FUNCTIONS


def test_no_other_function_has_many_arguments():
    many = set()
    for path, node in functions():
        arguments = *node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs
        is_method = arguments and arguments[0].arg in ("self", "cls")
        if len(arguments) - bool(is_method) > MOST_ARGUMENTS:
            many.add((path, node.name))
    assert many == PUBLIC


def defined() -> dict[str, object]:
    """Return the functions and classes of calls, kernels and the reference, by name."""
    found: dict[str, object] = {}
    for package in ("calls", "kernels", "reference"):
        for module in pkgutil.iter_modules([str(PACKAGE / package)]):
            found |= vars(importlib.import_module(f"fa3.{package}.{module.name}"))
    return found


ROW = re.compile(r"^\| .* \| (.*`.*) \| (`.*`) \|$", re.MULTILINE)
TRAILS = ROW.findall(section("From a call to the kernel"))
"""What passes a tensor on, and its slot in a launch."""


@pytest.mark.parametrize(("trail", "slot"), TRAILS)
def test_what_passes_a_tensor_on_exists(trail, slot):
    places, passed = defined(), re.findall(r"`([^`]+)`", trail)
    assert 2 <= len(passed) <= 8
    for name in (*passed, slot.strip("`")):
        first, *attributes = name.split(".")
        owner = places[first]
        for attribute in attributes:
            owner = getattr(owner, attribute)


def test_the_reading_guide_is_short():
    """Of what it names up to decoding, without docstrings, comments and blank lines."""
    guide = (PAGE.parent / "reading.md").read_text()
    path = guide[guide.index("## Before the launch") : guide.index("## Where decoding differs")]
    places = defined()
    named = {places.get(name) for name in re.findall(r"`([A-Za-z_]+)(?:\.[a-z_]+)?`", path)}
    kinds = inspect.isclass, inspect.isfunction
    sources = [inspect.getsource(one) for one in named if any(kind(one) for kind in kinds)]
    lines = re.sub(r'""".*?"""|#[^\n]*', "", "\n".join(sources), flags=re.DOTALL).split("\n")
    assert len(sources) > 30 and sum(map(bool, map(str.strip, lines))) <= MOST_OF_GUIDE
