"""Object files of compiled kernels, kept on disk between processes for `fa3.running.compiler`.

A file's name is a digest of the kernel's key and of fa3's sources, and the file ends with a digest
of its content. A damaged file is compiled again and replaced.

Loading an object runs its code. So a file is trusted only if just the user and root can have
written it: one of the two owns the file and its folder, and neither group nor others may write to
them. A sticky folder such as /tmp may be writable by all, since users cannot replace each other's
files there. Parent folders are not checked.

If a folder cannot be used, a warning says why, and each process compiles its own objects.
"""

import contextlib
import errno
import fcntl
import functools
import hashlib
import os
import secrets
import stat
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path


def read_sources() -> dict[str, tuple[int, str]]:
    """Modification time (ns) and content digest of each source file."""
    root = Path(__file__).parents[1]
    return {
        str(path.relative_to(root)): (
            path.stat().st_mtime_ns,
            hashlib.sha256(path.read_bytes()).hexdigest(),
        )
        for path in sorted(root.rglob("*.py"))
        if path.stem.isidentifier()  # an editor's .#file.py is no module
    }


SOURCES = read_sources()
"""The sources that this process runs.

They are read before any other module that shapes code is imported, so later edits are seen as
changes. `fa3/__init__.py` reads them once more before it imports the first of these.
"""


def read_again() -> None:
    """Take the sources as they are, before modules that shape code run."""
    SOURCES.clear()
    SOURCES.update(read_sources())


def is_unchanged() -> bool:
    """Whether the source files are still the ones that this process runs."""
    try:
        return read_sources() == SOURCES
    except OSError:  # a file is being replaced
        return False


def cache_dir() -> Path:
    """Return the kernels' folder: $FA3_CACHE_DIR, else `fa3` in the user's cache.
    Raises RuntimeError if neither the environment nor a home folder says where."""
    if path := os.environ.get("FA3_CACHE_DIR"):
        return Path(path).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fa3"


def load_or_make(key: str, make: Callable[[], bytes]) -> bytes:
    """Return a key's object: read from disk, else made and written there.

    The key has all that determines the object, besides fa3's sources. One process makes it, and
    others that want it wait. This needs file locks; without them, as on some network file systems,
    each process makes its own.
    """
    try:
        path = path_of(key)
    except RuntimeError as error:
        warn(f"in a cache, since there is no folder for it ({error})")
        return make()
    code = read(path)
    if code is None:
        with object_lock(path):
            code = read(path)
            if code is None:
                code = make()
                write_object(path, code)
    return code


def path_of(key: str) -> Path:
    """Return the file of a key's object; raise RuntimeError without a folder."""
    digests = [(name, digest) for name, (_, digest) in SOURCES.items()]
    name = hashlib.sha256(repr((key, digests)).encode()).hexdigest()
    return cache_dir() / f"{name}.o"


def has_object(key: str) -> bool:
    """Whether a key's object is on disk, whole and to be trusted."""
    try:
        return read(path_of(key)) is not None
    except RuntimeError:
        return False


def read(path: Path) -> bytes | None:
    """The object in a file; None if it cannot be trusted."""
    try:
        check_trust(path.parent, path.parent.stat())
        # Refuse a link: its target may be writeable by others.
        check_trust(path, path.lstat())
        content = path.read_bytes()
    except OSError:
        return None
    code = content[: -hashlib.sha256().digest_size]
    return code if content == with_digest(path, code) else None


def write_object(path: Path, code: bytes) -> None:
    """Write an object atomically; warn if that is not possible."""
    if not SOURCES:
        warn("in a cache, since its sources are not in files")
        return
    if not is_unchanged():
        # The DSL reads a function's source when it first compiles it, so this object may come from
        # old sources, new ones or both.
        warn("until the process starts again: its sources have changed since they were imported")
        return
    try:
        write(path, code)
    except OSError as error:
        warn(f"in {path.parent}: {error.strerror}. Set FA3_CACHE_DIR to a folder of your own")


def write(path: Path, content: bytes) -> None:
    """Write a file for `read`, atomically; raise OSError if not possible."""
    unfinished = path.with_suffix(f".{secrets.token_hex(8)}.tmp")
    try:
        check_trust(path.parent, path.parent.stat())
        with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644), "wb") as file:
            file.write(with_digest(path, content))
        unfinished.replace(path)
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink()


def with_digest(path: Path, code: bytes) -> bytes:
    """A file's content: an object, and a digest of object and name."""
    return code + hashlib.sha256(path.name.encode() + code).digest()


def check_trust(path: Path, status: os.stat_result) -> None:
    """Raise PermissionError unless only user and root can have written a file."""
    if status.st_uid not in (0, os.geteuid()):
        reason = f"{path} belongs to uid {status.st_uid}, neither to you (uid {os.geteuid()})"
        raise PermissionError(errno.EPERM, f"{reason} nor to root")
    is_sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not is_sticky:
        mode = stat.filemode(status.st_mode)
        raise PermissionError(errno.EPERM, f"others may write to {path} ({mode}; chmod go-w it)")


def check_can_keep(folder: Path) -> None:
    """Make the folder; raise OSError if objects cannot be kept in it."""
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    check_trust(folder, folder.stat())
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, "it may not be written to")


@contextlib.contextmanager
def object_lock(path: Path) -> Iterator[None]:
    """Keep others from making this object. A dying process frees its lock."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            check_can_keep(path.parent)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
            # A process that can open the file can hold the lock for ever, so only the user may.
            lock = stack.enter_context(open(os.open(path.with_suffix(".lock"), flags, 0o600), "w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@functools.cache
def warn(what: str) -> None:
    """Warn, once for each reason, that objects are not kept."""
    warnings.warn(f"fa3 does not keep compiled kernels {what}", RuntimeWarning, stacklevel=2)
