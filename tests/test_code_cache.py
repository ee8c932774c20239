"""Objects on disk: made once, whole, and run only if nobody else can have written them."""

import contextlib
import errno
import fcntl
import os
import pwd
import resource
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from fa3.running import code_cache

pytestmark = pytest.mark.filterwarnings("error")

NOBODY = 65534
OBJECT = b"\x7fELF and so on"


class Maker:
    """Makes an object and counts how often it was asked to."""

    def __init__(self):
        self.count = 0

    def __call__(self) -> bytes:
        self.count += 1
        return OBJECT


@pytest.fixture(autouse=True)
def folder(monkeypatch):
    """An empty cache that everyone may look into."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        monkeypatch.setenv("FA3_CACHE_DIR", name)
        code_cache.warn.cache_clear()
        yield Path(name)


@pytest.fixture
def make() -> Maker:
    return Maker()


def kept(folder: Path) -> Path:
    """The one file that is in the cache beside its lock."""
    (path,) = (path for path in folder.iterdir() if path.suffix != ".lock")
    return path


def is_stored(make: Maker, key: str = "a kernel") -> bool:
    """Whether fetching an object twice makes it once at most."""
    make.count = 0
    assert code_cache.load_or_make(key, make) == OBJECT
    assert code_cache.load_or_make(key, make) == OBJECT
    return make.count < 2


@contextlib.contextmanager
def read_only(folder: Path, monkeypatch):
    """Nobody may write to the folder; root, who may, becomes somebody else."""
    user = os.geteuid()
    folder.chmod(0o555)
    # Who we become need not be able to read our sources.
    monkeypatch.setattr(code_cache, "is_unchanged", lambda: True)
    if user == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(user)
        folder.chmod(0o755)


def test_an_object_is_made_once_for_each_key(folder, make):
    for key in ("a", "b", "a", "b"):
        assert code_cache.load_or_make(key, make) == OBJECT
    assert make.count == 2
    assert len(list(folder.glob("*.o"))) == 2


DAMAGE = {
    "emptied": lambda content: b"",
    "cut in two": lambda content: content[: len(content) // 2],
    "longer": lambda content: content + b"x",
    "other object": lambda content: b"x" + content[1:],
    "other digest": lambda content: content[:-1] + bytes([content[-1] ^ 1]),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_made_again(folder, make, damage):
    code_cache.load_or_make("a kernel", make)
    path = kept(folder)
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert code_cache.load_or_make("a kernel", make) == OBJECT
    assert (make.count, path.read_bytes()) == (2, whole)


def test_an_object_counts_under_its_own_name_only(folder, make):
    code_cache.load_or_make("a kernel", make)
    code_cache.load_or_make("another kernel", lambda: b"another object")
    one, other = folder.glob("*.o")
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)
    assert code_cache.load_or_make("another kernel", lambda: b"made again") == b"made again"
    assert is_stored(make) and make.count == 1


def test_nobody_else_may_write_to_what_is_made(folder, make, monkeypatch):
    monkeypatch.setenv("FA3_CACHE_DIR", str(folder / "new"))
    mask = os.umask(0)
    try:
        assert is_stored(make)
    finally:
        os.umask(mask)
    assert (folder / "new").stat().st_mode & 0o777 == 0o755
    assert kept(folder / "new").stat().st_mode & 0o777 == 0o644
    (lock,) = folder.glob("new/*.lock")
    assert lock.stat().st_mode & 0o777 == 0o600, "whoever may open it may hold it for ever"


def test_a_full_disk_costs_a_warning(folder, make):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, hard))
    try:
        with pytest.warns(RuntimeWarning, match="File too large"):
            code = code_cache.load_or_make("a kernel", make)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert code == OBJECT
    assert [path.suffix for path in folder.iterdir()] == [".lock"]


def test_a_folder_that_cannot_be_written_is_read(folder, make, monkeypatch):
    """As an image's that root has filled: no lock, no note of the use, no warning."""
    code_cache.load_or_make("a kernel", make)
    for path in folder.glob("*.lock"):
        path.unlink()
    path, now = code_cache.path_of("a kernel"), time.time()
    os.utime(path, (now - 86400,) * 2)
    monkeypatch.setattr(code_cache, "object_lock", lambda path: pytest.fail("takes a lock"))
    with read_only(folder, monkeypatch):
        assert code_cache.load_or_make("a kernel", make) == OBJECT
        assert code_cache.has_object("a kernel") and not code_cache.has_object("another")
    assert make.count == 1 and path.stat().st_mtime < now - 80000


def test_what_a_folder_cannot_take_is_made_with_one_warning(folder, make, monkeypatch):
    with (
        read_only(folder, monkeypatch),
        pytest.warns(RuntimeWarning, match=f"{folder}: Permission denied.*FA3_CACHE_DIR") as seen,
    ):
        assert not is_stored(make)
        assert not is_stored(make, "another kernel")
    assert len(seen) == 1


def test_a_user_without_a_home_gets_a_warning(make, monkeypatch):
    monkeypatch.setattr(pwd, "getpwuid", Mock(side_effect=KeyError))
    for name in ("HOME", "XDG_CACHE_HOME", "FA3_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    with pytest.warns(RuntimeWarning, match="no folder"):
        assert not is_stored(make)


@pytest.mark.parametrize("mode", [0o775, 0o757, 0o777], ids=oct)
def test_a_folder_that_others_may_write_to_is_not_used(folder, make, mode):
    assert is_stored(make)
    folder.chmod(mode)
    with pytest.warns(RuntimeWarning, match=f"others may write to {folder} .*chmod go-w"):
        assert not is_stored(make)
    folder.chmod(0o1777)
    assert is_stored(make)


@pytest.mark.parametrize("spoil", ["owner", "mode", "link"])
def test_an_object_that_others_may_have_written_is_made_again(folder, make, spoil):
    assert is_stored(make)
    path = kept(folder)
    if spoil == "owner":
        if os.geteuid():
            pytest.skip("only root can give a file away")
        os.chown(path, NOBODY, NOBODY)
    elif spoil == "mode":
        path.chmod(0o666)
    else:
        (folder / "elsewhere").mkdir()
        path.symlink_to(path.rename(folder / "elsewhere" / path.name))
    assert is_stored(make)
    assert make.count == 1
    assert path.lstat().st_uid == os.geteuid()
    assert path.lstat().st_mode & 0o022 == 0


def test_objects_of_sources_that_have_changed_are_not_kept(folder, make, tmp_path):
    package = shutil.copytree(Path(code_cache.__file__).parents[1], tmp_path / "fa3")
    (package / "scores" / ".#masks.py").symlink_to("nowhere")
    old, new = (runpy.run_path(str(package / "running" / "code_cache.py")) for _ in range(2))
    assert old["load_or_make"]("a kernel", make) == new["load_or_make"]("a kernel", make) == OBJECT
    assert make.count == 1
    masks = package / "scores" / "masks.py"
    text = masks.read_text()
    for content in (text + "# edited\n", text):
        masks.write_text(content)
        with pytest.warns(RuntimeWarning, match="sources have changed"):
            assert old["load_or_make"]("another kernel", make) == OBJECT
        old["warn"].cache_clear()
        assert len(list(folder.glob("*.o"))) == 1
        assert old["load_or_make"]("a kernel", lambda: b"not asked for") == OBJECT
    masks.write_text(text + "# edited\n")
    new = runpy.run_path(str(package / "running" / "code_cache.py"))
    assert new["load_or_make"]("a kernel", lambda: b"of new sources") == b"of new sources"
    masks.rename(masks.with_name("masks_2.py"))
    new = runpy.run_path(str(package / "running" / "code_cache.py"))
    assert new["load_or_make"]("a kernel", lambda: b"of other names") == b"of other names"


def test_nothing_is_kept_without_sources(make, monkeypatch):
    monkeypatch.setattr(code_cache, "SOURCES", {})
    with pytest.warns(RuntimeWarning, match="not in files"):
        assert not is_stored(make)


def test_sources_are_read_before_anything_else_is_imported():
    modules = (name for name, module in sys.modules.items() if not hasattr(module, "__path__"))
    assert next(name for name in modules if name.startswith("fa3.")) == "fa3.running.code_cache"


PROCESS = """
import runpy, sys, time
load_or_make = runpy.run_path(sys.argv[1])["load_or_make"]

def make():
    print("made", flush=True)
    time.sleep(0.3)
    return b"an object"

for key in ("a", "b"):
    assert load_or_make(key, make) == b"an object"
"""


def test_processes_that_start_together_make_an_object_once():
    command = [sys.executable, "-c", PROCESS, code_cache.__file__]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(8)]
    printed = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 8
    assert "".join(printed).split() == ["made"] * 2


def test_the_lock_of_a_process_that_died_is_free(folder, make):
    command = [sys.executable, "-c", PROCESS.replace("0.3", "60"), code_cache.__file__]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "made\n"
        process.send_signal(signal.SIGKILL)
    assert [path.suffix for path in folder.iterdir()] == [".lock"]
    assert code_cache.load_or_make("a", make) == OBJECT


def test_a_lock_is_not_made_where_a_link_leads(folder, make):
    assert is_stored(make)
    (lock,) = folder.glob("*.lock")
    lock.unlink()
    lock.symlink_to(folder / "elsewhere")
    kept(folder).unlink()
    assert is_stored(make)
    assert not (folder / "elsewhere").exists()


def test_a_file_system_without_locks_will_do(make, monkeypatch):
    no_locks = OSError(errno.ENOLCK, "No locks available")
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=no_locks))
    assert is_stored(make)
