"""Checkpoint files, written with a checksum and read only if they are whole.

`torch.load` takes changed bytes for weights: it does not look at the checksums in the zip archive that a checkpoint is.
So the SHA-256 of the archive stands on a line after it. `torch.load` and programs for zip archives pass over that line.
Checkpoints of older versions do not have the line; for them the checksums inside the archive are compared.
"""

import hashlib
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, cast

import torch

MARK = b"\nsha256:"
LINE = len(MARK) + 64 + 1  # the mark, the checksum in hexadecimal digits, the end of the line
CHUNK = 1 << 22  # bytes read at a time


class _Hashing:
    """A file to write to that computes the checksum of what is written."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.checksum = file, hashlib.sha256()

    def write(self, content: bytes) -> int:
        self.checksum.update(content)
        return self._file.write(content)

    def flush(self) -> None:
        self._file.flush()


def write_checkpoint(state: Mapping[str, Any], file: IO[bytes]) -> None:
    """Write a checkpoint and its checksum."""
    hashing = _Hashing(file)
    try:
        torch.save(dict(state), cast(IO[bytes], hashing))
    except RuntimeError as error:
        # torch reports a failed write as an error of its own; the system's error names the reason.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from error
        raise
    file.write(MARK + hashing.checksum.hexdigest().encode() + b"\n")


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Return a checkpoint on the CPU. Damage raises an error of one of many types, most of them torch's."""
    verify(path)
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(state, dict):
        raise TypeError(f"a {type(state).__name__} where a dict is expected")
    return state


def verify(path: Path) -> None:
    """Raise an error if a checkpoint does not have its checksum."""
    with open(path, "rb") as file:
        left = max(0, file.seek(0, os.SEEK_END) - LINE)
        file.seek(left)
        line = file.read()
        if not (line.startswith(MARK) and line.endswith(b"\n")):
            with zipfile.ZipFile(file) as archive:
                if (damaged := archive.testzip()) is not None:
                    raise ValueError(f"the checksum of {damaged} in it is wrong")
            return
        file.seek(0)
        checksum = hashlib.sha256()
        while left and (chunk := file.read(min(CHUNK, left))):
            checksum.update(chunk)
            left -= len(chunk)
    if checksum.hexdigest().encode() != line[len(MARK) : -1]:
        raise ValueError("its checksum is wrong")


def is_whole(path: Path) -> bool:
    """Return whether a checkpoint exists and has its checksum."""
    try:
        verify(path)
    except Exception:  # damaged bytes raise many types of error inside zipfile
        return False
    return True
