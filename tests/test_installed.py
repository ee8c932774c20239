"""What an installed fa3 is imported from, wherever a program runs."""

import os
import subprocess
import sys
from importlib import metadata

import pytest

try:
    FOLDER = metadata.distribution("fa3").locate_file("")
except metadata.PackageNotFoundError:
    FOLDER = None


@pytest.mark.skipif(
    FOLDER is None or not str(FOLDER).startswith(sys.prefix),
    reason="fa3 is not installed in this environment",
)
@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        (("-c", "import fa3; print(fa3.flash_attn_func.__name__)"), "flash_attn_func"),
        (("-m", "fa3", "info"), "CuTe DSL"),
    ],
)
def test_a_folder_of_the_same_name_does_not_hide_it(tmp_path, arguments, printed):
    """In the folder above a clone, the clone itself is a package `fa3` without files, unless the
    path has a real one."""
    (tmp_path / "fa3").mkdir()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert printed in done.stdout
