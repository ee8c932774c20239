"""Imports point down only, and a name is that of one thing."""

import ast
import functools
import sys
from collections import defaultdict
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import fa3

ROOT = Path(fa3.__file__).parent
MODULES = sorted(path.relative_to(ROOT.parent) for path in ROOT.rglob("*.py"))

FLOORS = (
    ("complaints", "problem", "settings"),
    ("primitives",),
    ("scores",),
    ("schedules",),
    ("kernels",),
    ("planning", "running"),
    ("reference",),
    ("calls",),
    ("distributed", "integrations", "tools"),
    ("__init__", "interface"),
    ("__main__",),
)
"""Rooms: a file or a folder of `fa3` each. Rooms of one floor do not know each other."""

FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
STANDARD_LIBRARY_ONLY = (
    "problem.py",
    "settings.py",
    "scores/templates.py",
    "running/code_cache.py",
)
USE_TORCH = ("calls", "distributed", "integrations", "reference", "running", "tools")
OF_EVERY_INTEGRATION = ("register",)
OVER_RANKS = ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache")
"""Public functions that `fa3.distributed` has, too, for sequences that are split among ranks."""


def room_of(path: Path) -> str:
    """Return the room of a module."""
    return path.parts[1].removesuffix(".py")


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """Return the syntax tree of a module."""
    return ast.parse((ROOT.parent / path).read_text())


@functools.cache
def imported(path: Path) -> frozenset[str]:
    """Return the dotted names that a module imports, also inside of functions."""
    names = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(names)


def imported_modules(path: Path) -> set[Path]:
    """Return the modules of the package that a module imports."""
    found = set()
    for parts in (name.split(".") for name in imported(path)):
        # The last part may be a name in a module.
        modules = Path(*parts), Path(*(parts[:-1] or parts))
        files = (file for one in modules for file in (one.with_suffix(".py"), one / "__init__.py"))
        found |= {next((file for file in files if file in MODULES), None)}
    return found - {None}


def test_imports_point_down():
    for path in MODULES:
        room = room_of(path)
        assert room in FLOOR, f"give {room} a place in FLOORS"
        for other in imported_modules(path):
            below = FLOOR[room_of(other)] < FLOOR[room]
            assert below or room_of(other) == room, f"{path} imports {other}"


def test_no_circles():
    TopologicalSorter({path: imported_modules(path) - {path} for path in MODULES}).prepare()


def test_every_room_is_there():
    assert set(FLOOR) == {room_of(path) for path in MODULES}


@pytest.mark.parametrize("file", STANDARD_LIBRARY_ONLY)
def test_some_need_the_standard_library_only(file):
    roots = {name.split(".")[0] for name in imported(Path("fa3", file))}
    assert roots <= set(sys.stdlib_module_names)


def test_torch_stays_at_the_edge():
    for path in MODULES:
        roots = {name.split(".")[0] for name in imported(path)}
        assert "torch" not in roots or room_of(path) in USE_TORCH, path


def test_only_the_compiler_compiles():
    for path in MODULES:
        nodes = (node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call))
        compiles = any(ast.unparse(node.func) == "cute.compile" for node in nodes)
        assert not compiles or path == Path("fa3", "running", "compiler.py"), path


def defined(path: Path) -> set[str]:
    """Return the names that a module itself gives to classes, functions and constants."""
    names = set()
    for node in tree_of(path).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    repeated = OVER_RANKS if room_of(path) == "distributed" else ()
    return names - {"__all__", *OF_EVERY_INTEGRATION, *repeated}


def test_no_name_means_two_things():
    """No name of a module's level is that of two things in the package."""
    places = defaultdict(list)
    for path in MODULES:
        for name in defined(path):
            places[name].append(str(path))
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}
