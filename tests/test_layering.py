"""Imports point down only, none is heavy before a kernel is needed; a name is that of one thing."""

import ast
import functools
import importlib
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from graphlib import TopologicalSorter
from importlib import metadata
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


# ----------------------------------------------------------------------------- what is not imported

HEAVY = {"torch", "cutlass", "numpy", "tvm_ffi", "cuda", "rich", "matplotlib"}
"""Packages that take long to import."""

IMPORTED = "import sys; print(*{name.partition('.')[0] for name in sys.modules})"
"""Prints the packages that a program has imported when it ends."""


HELP = """
from fa3.__main__ import main
try:
    main([{}])
except SystemExit:
    pass
"""


@pytest.mark.parametrize(
    "program",
    [
        "import fa3; fa3.__version__, dir(fa3)",
        "import fa3; fa3.Problem, fa3.AttentionSpec, fa3.Window",
        "from fa3.tools.models import PRESETS",
        HELP.format("'--help'"),
        HELP.format("'plan', '--help'"),
        HELP.format("'compile', '--help'"),
        HELP.format("'compile', '--preset'"),
    ],
)
def test_nothing_heavy_is_imported(program):
    command = [sys.executable, "-c", f"{program}\n{IMPORTED}"]
    done = subprocess.run(command, cwd=ROOT.parent, capture_output=True, text=True, check=True)
    assert not HEAVY.intersection(done.stdout.splitlines()[-1].split())


def test_type_checkers_see_what_is_imported():
    tree = ast.parse(Path(fa3.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    assert ast.unparse(block.test) == "TYPE_CHECKING"
    assert {alias.name: node.module for node in block.body for alias in node.names} == fa3.HOMES
    for name, module in fa3.HOMES.items():
        assert getattr(fa3, name) is getattr(importlib.import_module(module), name)
    assert set(fa3.__all__) <= set(dir(fa3))


def test_other_names_are_no_attributes():
    with pytest.raises(AttributeError, match="module 'fa3' has no attribute 'flash_atn_func'"):
        getattr(fa3, "flash_atn_" + "func")
    assert not hasattr(fa3, "__wrapped__")


EDITED = """
from pathlib import Path
import fa3
from fa3.running import code_cache

source = Path(fa3.__file__).parent / "problem.py"
source.write_text(source.read_text() + "# edited\\n")
assert not code_cache.is_unchanged()
fa3.Problem
assert code_cache.is_unchanged()
source.write_text(source.read_text() + "# edited again\\n")
fa3.Window, fa3.plan_forward
assert not code_cache.is_unchanged()
"""


def test_sources_that_are_edited_before_they_are_imported_are_the_ones_that_count(tmp_path):
    shutil.copytree(ROOT, tmp_path / "fa3", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run([sys.executable, "-c", EDITED], cwd=tmp_path, check=True)


try:
    FOLDER = metadata.distribution("fa3").locate_file("")
except metadata.PackageNotFoundError:
    FOLDER = None


@pytest.mark.skipif(
    FOLDER is None or not str(FOLDER).startswith(sys.prefix),
    reason="fa3 is not installed in this environment",
)
def test_a_folder_of_the_same_name_does_not_hide_it(tmp_path):
    """In the folder above a clone, the clone itself is a package `fa3` without files, unless the
    path has a real one."""
    (tmp_path / "fa3").mkdir()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-m", "fa3", "info"],
        cwd=tmp_path, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "CuTe DSL" in done.stdout
