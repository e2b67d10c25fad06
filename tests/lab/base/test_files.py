"""Files are whole or absent, whatever happens while they are written."""

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.base.files import TEMPORARY, cannot_write, locked, remove_temporary, write_atomic


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Let the system refuse more than `size` bytes per file, as a full disk would."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_replaces_the_file_and_leaves_nothing_else(tmp_path: Path) -> None:
    write_atomic(tmp_path / "a", b"old")
    write_atomic(tmp_path / "a", lambda file: file.write(b"new"))
    assert (tmp_path / "a").read_bytes() == b"new"
    assert names(tmp_path) == {"a"}


def test_other_users_can_read_what_the_umask_lets_them(tmp_path: Path) -> None:
    write_atomic(tmp_path / "a", b"x")
    (tmp_path / "b").write_bytes(b"x")
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode


def test_a_disk_that_refuses_keeps_the_old_file(tmp_path: Path) -> None:
    write_atomic(tmp_path / "a", b"old")
    with file_size_limit(1000), pytest.raises(LabError, match=r"cannot write .*a "):
        write_atomic(tmp_path / "a", b"x" * 100_000)
    with pytest.raises(LabError, match=r"^cannot write [^\n]*$"):
        write_atomic(tmp_path / "missing" / "a", b"x")
    assert (tmp_path / "a").read_bytes() == b"old"
    assert names(tmp_path) == {"a"}


def test_an_exception_while_writing_keeps_the_old_file(tmp_path: Path) -> None:
    write_atomic(tmp_path / "a", b"old")

    def interrupted(file: IO[bytes]) -> None:
        file.write(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomic(tmp_path / "a", interrupted)
    assert (tmp_path / "a").read_bytes() == b"old"
    assert names(tmp_path) == {"a"}


def test_the_name_comes_after_the_bytes_are_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (calls.append("fsync"), fsync(handle)))
    monkeypatch.setattr(os, "replace", lambda a, b: (calls.append("replace"), replace(a, b)))
    write_atomic(tmp_path / "a", b"x")
    assert calls == ["fsync", "replace", "fsync"]  # the file, its name, the folder


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_named(number: int) -> None:
    assert "no space left" in str(cannot_write(Path("a"), OSError(number, os.strerror(number))))


def test_removes_what_a_killed_process_left(tmp_path: Path) -> None:
    (tmp_path / f"{TEMPORARY}123-a").write_bytes(b"half")
    (tmp_path / "mine").write_bytes(b"")
    remove_temporary(tmp_path)
    assert names(tmp_path) == {"mine"}


def test_a_lock_keeps_another_holder_out_until_it_is_free(tmp_path: Path) -> None:
    with locked(tmp_path, wait=False) as first, locked(tmp_path, wait=False) as second:
        assert first
        assert not second
    with locked(tmp_path, wait=True) as again:
        assert again


@pytest.mark.parametrize("name", [".", "", "/", "..", "folder"])
def test_a_folder_is_no_file_to_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(LabError, match="it is a folder; name a file"):
        write_atomic(Path(name), b"x")
    assert names(tmp_path) == {"folder"}
