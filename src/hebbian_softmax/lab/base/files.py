"""Files that are either whole or absent, and locks between processes."""

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from hebbian_softmax.lab.base.console import say
from hebbian_softmax.lab.base.errors import LabError

try:
    import fcntl
except ImportError:  # Windows has no advisory locks, so two processes in one folder do not notice each other
    fcntl = None  # type: ignore[assignment]

TEMPORARY = ".writing-"


def write_atomic(path: Path, content: bytes | Callable[[IO[bytes]], object], *, old_name: Path | None = None) -> None:
    """Write bytes, or call `content(file)` to write them, so that a reader sees the old file or the new one.

    The data reach the disk before the name does, so this also holds after a power cut. If writing fails, the
    old file stays and nothing else is left; a killed process leaves a file that `remove_temporary` finds.
    With `old_name` the old file is kept under that name. A process killed at that moment leaves no file at `path`.
    """
    try:
        if path.is_dir():
            raise LabError(f"cannot write {path}: it is a folder; name a file")
        temporary = path.with_name(f"{TEMPORARY}{os.getpid()}-{path.name}")
        try:
            with open(temporary, "wb") as file:
                file.write(content) if isinstance(content, bytes) else content(file)
                file.flush()
                os.fsync(file.fileno())
            if old_name is not None:
                os.replace(path, old_name)
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)
    except OSError as error:
        raise cannot_write(path, error) from error


def sync_folder(folder: Path) -> None:
    """Make renames in `folder` durable, if the system can (Windows cannot open folders)."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def remove_temporary(folder: Path, name: str | None = None) -> None:
    """Remove files that processes killed inside `write_atomic` left in `folder`: all, or those for `name`."""
    for path in folder.glob(TEMPORARY + "*"):
        if name is None or path.name.removeprefix(TEMPORARY).partition("-")[2] == name:
            path.unlink(missing_ok=True)


def cannot_write(path: Path, error: OSError) -> LabError:
    """Return the error to raise when writing `path` failed."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return LabError(f"no space left to write {path}: free some, or choose a folder on another disk")
    reason = error.strerror or str(error)
    return LabError(f"cannot write {path} ({reason}): make its folder writable or choose another")


@contextlib.contextmanager
def locked(path: Path, *, wait: bool) -> Iterator[bool]:
    """Hold an exclusive lock on an existing file or folder, and yield whether this succeeded.

    With `wait` it always does, once the other process is done. The system frees the lock when its holder dies.
    """
    if fcntl is None:
        yield True
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(handle)


@contextlib.contextmanager
def locked_in_turn(path: Path, busy: str) -> Iterator[None]:
    """Hold the lock of `locked`; say `busy` if another process must be waited for."""
    with locked(path, wait=False) as free:
        if free:
            yield
            return
    say(f"{busy}: waiting for it")
    with locked(path, wait=True):
        yield
