"""Imports point down only."""

import ast
import sys
from pathlib import Path

import pytest

import fa3

ROOT = Path(fa3.__file__).parent
MODULES = sorted(path.relative_to(ROOT.parent) for path in ROOT.rglob("*.py"))

LAYERS = (
    ("problem", "cubin", "templates", "graphs", "code_cache", "eager", "options"),
    ("primitives", "counters", "overlap", "tables"),
    ("masks", "schedules", "scores"),
    ("lengths", "modifiers", "diagnostics", "tiling"),
    ("kernels",),
    ("costs", "timeline"),
    ("tiled", "plan_checks"),
    ("work",),
    ("prediction",),
    ("explanation",),
    ("planner",),
    ("compiler", "executor", "operands"),
    ("drawing", "decode"),
    ("api", "cache_executor", "cache_arguments"),
    ("cache_schedule",),
    ("kvcache", "recording"),
    ("__init__",),
    ("demo",),
    ("__main__",),
)
LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts}
BUILT_OF_SIBLINGS = ("primitives", "schedules")
STANDARD_LIBRARY_ONLY = ("problem", "cubin", "templates", "code_cache")
USE_TORCH = (
    "api",
    "cache_arguments",
    "cache_executor",
    "cache_schedule",
    "graphs",
    "counters",
    "decode",
    "demo",
    "eager",
    "executor",
    "kvcache",
    "modifiers",
    "operands",
    "recording",
    "tables",
    "__main__",
)


def part_of(path: Path) -> str:
    """Return the part of the package that a module belongs to: a file or a folder of `fa3`."""
    return path.parts[1].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """Return the dotted names that a module imports, also inside of functions."""
    names = set()
    for node in ast.walk(ast.parse((ROOT.parent / path).read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def imported_parts(path: Path) -> set[str]:
    """Return the parts of the package that a module imports."""
    parts = set()
    for name in imported(path):
        root, *rest = name.split(".")
        if root == "fa3":
            parts.add(rest[0] if rest and rest[0] in LEVEL else "__init__")
    return parts


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_imports_point_down(path):
    part = part_of(path)
    assert part in LEVEL, f"give {part} a place in LAYERS"
    for other in imported_parts(path):
        if other == part and part in BUILT_OF_SIBLINGS:
            continue
        assert LEVEL[other] < LEVEL[part], f"{path} imports {other}"


def test_every_layer_is_there():
    assert set(LEVEL) == {part_of(path) for path in MODULES}


@pytest.mark.parametrize("part", STANDARD_LIBRARY_ONLY)
def test_the_bottom_needs_the_standard_library_only(part):
    roots = {name.split(".")[0] for name in imported(Path("fa3", f"{part}.py"))}
    assert roots <= set(sys.stdlib_module_names)


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_torch_stays_at_the_edge(path):
    roots = {name.split(".")[0] for name in imported(path)}
    assert "torch" not in roots or part_of(path) in USE_TORCH


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_only_the_compiler_compiles(path):
    calls = (
        ast.unparse(node.func)
        for node in ast.walk(ast.parse((ROOT.parent / path).read_text()))
        if isinstance(node, ast.Call)
    )
    assert "cute.compile" not in calls or part_of(path) == "compiler"


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_files_are_named_for_what_is_in_them(path):
    assert path.stem not in ("utils", "util", "helpers", "common", "misc")
