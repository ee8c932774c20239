"""The demo on a machine with neither a GPU nor the extras, and how `make demo` begins."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fa3
from fa3.__main__ import main
from fa3.tools import cubin

ROOT = Path(fa3.__file__).parents[1]


@pytest.mark.compiles
def test_the_demo_needs_no_extras(tmp_path, monkeypatch, capsys):
    def absent() -> Path:
        raise ModuleNotFoundError("reading machine code (SASS) needs nvdisasm")

    monkeypatch.setattr(cubin, "nvdisasm", absent)
    for package in ("rich", "matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    main(["demo", "--png", str(tmp_path / "order.png")])
    printed = capsys.readouterr().out
    assert "Instructions were not counted: reading machine code (SASS) needs nvdisasm." in printed
    assert "Not drawn: drawing needs matplotlib" in printed
    assert "384 threads" in printed and "fa3 " in printed.split("Is it right?")[1]
    assert "No kernel ran on a GPU" in printed and not any(tmp_path.iterdir())


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_make_names_the_python_that_is_needed_before_it_installs(tmp_path):
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "pyproject.toml").touch()
    older = tmp_path / "older-python"
    program = "import sys; sys.version_info = (3, 9, 2); exec(sys.argv[1])"
    older.write_text(
        f"#!/bin/sh\n[ $1 = -c ] || exit 3\nexec {sys.executable} -c '{program}' \"$2\"\n"
    )
    older.chmod(0o755)
    done = subprocess.run(
        ["make", "demo", f"PYTHON={older}"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert f"fa3 needs Python 3.10 or newer, but {older} is 3.9." in done.stderr
    assert done.returncode != 0 and not done.stdout and not (tmp_path / ".venv").exists()
