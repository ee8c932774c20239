"""What is not imported until a kernel is needed, and that nothing else notices."""

import ast
import importlib
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import fa3

ROOT = Path(fa3.__file__).parent.parent

HEAVY = {"torch", "cutlass", "numpy", "tvm_ffi", "cuda", "rich", "matplotlib"}
"""Packages that take long to import."""

IMPORTED = "import sys; print(*{name.partition('.')[0] for name in sys.modules})"


def imported_by(program: str) -> set[str]:
    """The packages that a program has imported when it ends."""
    command = [sys.executable, "-c", f"{program}\n{IMPORTED}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


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
    assert not imported_by(program) & HEAVY


def type_checkers_imports() -> dict[str, str]:
    """What `fa3/__init__.py` imports for type checkers: names and their modules."""
    tree = ast.parse(Path(fa3.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    assert ast.unparse(block.test) == "TYPE_CHECKING"
    return {alias.name: node.module for node in block.body for alias in node.names}


def test_type_checkers_see_what_is_imported():
    assert type_checkers_imports() == fa3.HOMES
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
    shutil.copytree(ROOT / "fa3", tmp_path / "fa3", ignore=shutil.ignore_patterns("__pycache__"))
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
