"""Packed files and archives, read in pieces, and only as far as they unpack to a size that a text can have.

A few megabytes can unpack to terabytes. Texts become four to ten times as large; a packed file that becomes more than
`LIMIT` times as large is refused, unless it is small.
"""

import bz2
import contextlib
import gzip
import lzma
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, Protocol, cast

from hebbian_softmax.lab.base.errors import LabError, reason
from hebbian_softmax.lab.base.progress import format_bytes
from hebbian_softmax.lab.base.settings import integer, setting
from hebbian_softmax.lab.base.zips import open_zip
from hebbian_softmax.lab.data.prepare import readable

LIMIT = 200  # times its own size that a packed file may unpack to
PIECE = 1 << 16  # bytes read at a time where nobody wants them
SMALL = 4 << 20  # bytes that any packed file may unpack to

TARS = (".tar", ".tar.xz", ".tar.gz", ".tgz", ".tar.bz2")
OPENERS: dict[str, Callable[..., Any]] = {".xz": lzma.open, ".gz": gzip.open}
# The first bytes of packed files: an archive is opened by these, whatever its name promises.
_BEGINNINGS: dict[bytes, Callable[..., Any]] = {b"\xfd7zXZ\0": lzma.open, b"\x1f\x8b": gzip.open, b"BZh": bz2.open}
# Zip archives with a password or with an unknown compression raise RuntimeError, names that are not UTF-8 ValueError.
_DAMAGES = (
    zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, struct.error, EOFError, RuntimeError, ValueError,
)  # fmt: skip


def unpack_limit() -> Any:
    """Declare the setting that raises the limit."""
    return setting(LIMIT, "times its own size that a packed file may unpack to before it is refused", integer(1))


@contextlib.contextmanager
def _whole(path: Path) -> Iterator[None]:
    """Turn the errors that a damaged packed file causes into one that names it."""
    try:
        with readable(path):
            yield
    except _DAMAGES as error:
        raise LabError(f"{path} cannot be read ({reason(error)}): replace it with a whole one") from error


class Source(Protocol):
    """A file to read from, a piece at a time."""

    def read(self, size: int = -1, /) -> bytes: ...

    def readline(self, size: int, /) -> bytes: ...


class Bounded:
    """A file to read from that raises a `LabError` once too many bytes have come from one packed file, or damaged ones.

    Whoever reads the file is not inside the block that opened its archive, so errors are noticed here.
    """

    def __init__(self, file: Source, allowance: "Allowance") -> None:
        self._file, self._allowance = file, allowance

    def read(self, size: int = -1) -> bytes:
        with _whole(self._allowance.path):
            return self._allowance.taken(self._file.read(self._allowance.at_most(size)))

    def readline(self, size: int) -> bytes:
        with _whole(self._allowance.path):
            return self._allowance.taken(self._file.readline(self._allowance.at_most(size)))


class Allowance:
    """The bytes that one packed file may still unpack to."""

    def __init__(self, path: Path, limit: int) -> None:
        self.path, self._limit = path, limit
        self._left = max(SMALL, limit * path.stat().st_size)

    def at_most(self, size: int) -> int:
        """Return how many bytes to read: one too many tells that there are more than allowed."""
        return min(size, self._left + 1) if size >= 0 else self._left + 1

    def taken(self, content: bytes) -> bytes:
        """Note that these bytes have been read, and return them."""
        self._left -= len(content)
        self.check(0)
        return content

    def check(self, more: int) -> None:
        """Raise an error if so many bytes more would be too many."""
        if self._left < more:
            size = self.path.stat().st_size
            raise LabError(
                f"{self.path} ({format_bytes(size)}) unpacks to more than "
                f"{format_bytes(max(SMALL, self._limit * size))}, as files do that are made to fill a disk: if you "
                "trust it, unpack it yourself, or raise --unpack-limit where the command has it"
            )


@contextlib.contextmanager
def opened(path: Path, limit: int = LIMIT) -> Iterator[Source]:
    """Open a file for reading; files that end with .xz or .gz are unpacked."""
    with readable(path), OPENERS.get(path.suffix, open)(path, "rb") as file:
        yield Bounded(file, Allowance(path, limit)) if path.suffix in OPENERS else file


def is_archive(place: Path) -> bool:
    """Tell by the name whether a place is an archive."""
    return place.name.endswith((*TARS, ".zip"))


def read_texts(
    place: Path, wanted: Callable[[str], bool] = lambda name: True, limit: int = LIMIT
) -> Iterator[tuple[str, Source]]:
    """Yield every wanted `.txt` file in a folder, sorted by path, or in an archive, in its order.

    Each comes with its name and is open until the next one is asked for.
    """
    with _whole(place):
        if place.is_dir():
            yield from _read_folder(place, wanted)
        elif place.suffix == ".zip":
            yield from _read_zip(place, wanted, limit)
        elif place.name.endswith(TARS):
            yield from _read_tar(place, wanted, limit)
        else:
            place.stat()  # a missing place has an error of its own
            raise LabError(f"{place} is neither a folder nor an archive ({', '.join(TARS)}, .zip): name one of these")


def _read_folder(folder: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, Source]]:
    for path in sorted(folder.rglob("*.txt")):
        if path.is_file() and wanted(name := path.relative_to(folder).as_posix()):
            with readable(path), open(path, "rb") as file:
                yield name, file


def _read_zip(path: Path, wanted: Callable[[str], bool], limit: int) -> Iterator[tuple[str, Source]]:
    allowance = Allowance(path, limit)
    with open_zip(path) as archive:
        texts = [each for each in archive.infolist() if each.filename.endswith(".txt") and wanted(each.filename)]
        allowance.check(sum(text.file_size for text in texts))
        for text in texts:
            with archive.open(text) as file:
                yield text.filename, Bounded(file, allowance)


def _read_tar(path: Path, wanted: Callable[[str], bool], limit: int) -> Iterator[tuple[str, Source]]:
    with open(path, "rb") as packed:
        beginning = packed.read(8)
    opener = next((opener for first, opener in _BEGINNINGS.items() if beginning.startswith(first)), open)
    with opener(path, "rb") as file:
        # What lies between the texts counts, too. The contents count once more, as holes in a file take no space.
        stream, contents = Bounded(file, Allowance(path, limit)), Allowance(path, limit)
        with tarfile.open(fileobj=cast(IO[bytes], stream), mode="r|") as archive:
            for member in archive:
                if member.isfile() and member.name.endswith(".txt") and wanted(member.name):
                    content = archive.extractfile(member)
                    assert content is not None
                    yield member.name, Bounded(content, contents)
        while stream.read(PIECE):  # a packed file has its checksum at its end, which lies behind the end of the archive
            pass
