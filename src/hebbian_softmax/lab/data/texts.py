"""Texts in files that may be packed, in folders and in archives."""

import contextlib
import gzip
import hashlib
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from hebbian_softmax.lab.base.errors import LabError, reason
from hebbian_softmax.lab.data.prepare import readable

TARS = (".tar", ".tar.xz", ".tar.gz", ".tgz", ".tar.bz2")
OPENERS: dict[str, Callable[..., Any]] = {".xz": lzma.open, ".gz": gzip.open}
DAMAGES = (zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, EOFError, RuntimeError)
"""What unreadable archives raise; zips with a password or packed in an unknown way a RuntimeError."""


@contextlib.contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """A file to be read, packed or not."""
    try:
        with readable(path), OPENERS.get(path.suffix, open)(path, "rb") as file:
            yield file
    except (lzma.LZMAError, EOFError, zlib.error) as error:
        raise LabError(f"{path} cannot be read ({reason(error)}): replace it with a whole file") from error


def read_texts(place: Path, wanted: Callable[[str], bool] = lambda name: True) -> Iterator[tuple[str, bytes]]:
    """Name and bytes of every wanted `.txt` file: a folder's in the order of their paths, an archive's in its own."""
    try:
        with readable(place):
            if place.is_dir():
                yield from _read_folder(place, wanted)
            elif place.suffix == ".zip":
                yield from _read_zip(place, wanted)
            elif place.name.endswith(TARS):
                yield from _read_tar(place, wanted)
            else:
                place.stat()
                raise LabError(
                    f"{place} is neither a folder nor an archive ({', '.join(TARS)}, .zip): name one of these"
                )
    except DAMAGES as error:
        raise LabError(f"{place} cannot be read ({reason(error)}): replace it with a whole archive") from error


def is_archive(place: Path) -> bool:
    """By its name."""
    return place.name.endswith((*TARS, ".zip"))


def digest(place: Path) -> str:
    """A checksum of an archive, or of all texts in a folder and their names."""
    with readable(place):
        if not place.is_dir():
            with open(place, "rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        total = hashlib.sha256()
        for name, content in read_texts(place):
            total.update(f"{name}\n{hashlib.sha256(content).hexdigest()}\n".encode())
        return total.hexdigest()


def _read_folder(folder: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    for path in sorted(folder.rglob("*.txt")):
        if path.is_file() and wanted(name := path.relative_to(folder).as_posix()):
            with readable(path):
                yield name, path.read_bytes()


def _read_zip(path: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            if name.endswith(".txt") and wanted(name):
                yield name, archive.read(name)


def _read_tar(path: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(path) as archive:
        for member in archive:
            if member.isfile() and member.name.endswith(".txt") and wanted(member.name):
                file = archive.extractfile(member)
                assert file is not None
                yield member.name, file.read()
