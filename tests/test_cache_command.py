"""Upkeep of the folder of compiled kernels: what is shown, and what is removed."""

import os
import time
from pathlib import Path

import pytest

from fa3.__main__ import main
from fa3.running import code_cache

pytestmark = pytest.mark.filterwarnings("error")

HOUR = 3600
CODE = bytes(1000)


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A cache with three kernels, each with its lock."""
    tmp_path.chmod(0o755)
    monkeypatch.setenv("FA3_CACHE_DIR", str(tmp_path))
    for key in "012":
        code_cache.fetch(key, lambda: CODE)
    return tmp_path


def set_age(path: Path, seconds: float):
    os.utime(path, (time.time() - seconds,) * 2, follow_symlinks=False)


def present() -> str:
    """The keys whose kernels are on disk."""
    return "".join(key for key in "012" if code_cache.path_of(key).exists())


def printed(capsys, *arguments: str) -> str:
    main(["cache", *arguments])
    return capsys.readouterr().out


@pytest.mark.parametrize("arguments", [(), ("show",)])
def test_show(folder, capsys, arguments):
    lines = dict(line.split(maxsplit=1) for line in printed(capsys, *arguments).splitlines())
    assert lines["folder"] == str(folder)
    assert lines["holds"] == "3 kernels, 0.0 MB"
    assert "not" not in lines


def test_show_says_why_a_folder_is_not_used(folder, capsys):
    folder.chmod(0o777)
    assert f"not used  others may write to {folder}" in printed(capsys)


def test_a_folder_that_is_not_there_is_empty(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FA3_CACHE_DIR", str(tmp_path / "none"))
    shown = printed(capsys)
    assert "holds     0 kernels" in shown
    assert "not used" not in shown
    assert printed(capsys, "clear").startswith("removed 0 kernels")
    assert not (tmp_path / "none").exists()


def test_no_folder_is_explained(monkeypatch):
    monkeypatch.setenv("FA3_CACHE_DIR", "~nouser/x")
    with pytest.raises(SystemExit, match="fa3 cache: Could not determine home directory"):
        main(["cache"])


def test_only_what_is_abandoned_is_removed_beside_kernels(folder):
    path = code_cache.path_of("1")
    young, old = (path.with_suffix(f".{digit * 16}.tmp") for digit in "ab")
    for unfinished in (young, old):
        unfinished.write_bytes(b"half")
    set_age(old, 2 * HOUR)
    strange = [folder / name for name in ("notes.txt", "kernel.o", f"{'g' * 64}.o")]
    for other in strange:
        other.write_text("of somebody else")
    main(["cache", "clear"])
    assert sorted(folder.iterdir()) == sorted([young, *strange])


def test_nothing_is_removed_where_others_may_write(folder):
    folder.chmod(0o777)
    with pytest.raises(SystemExit, match=f"others may write to {folder}"):
        main(["cache", "clear"])
    assert present() == "012"
