"""Packed files that unpack to far more than a text would are refused before they fill memory or disk."""

import bz2
import gzip
import io
import lzma
import random
import re
import tarfile
import tracemalloc
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.cli import main
from hebbian_softmax.lab.data import unpack
from hebbian_softmax.lab.data.unpack import SMALL, Source, opened, read_texts
from tests.lab.data.english import zipped

MANY = SMALL + (1 << 20)  # bytes
PIECE = 1 << 12


class Zeros(io.RawIOBase):
    """A file of `MANY` bytes that takes no memory."""

    def __init__(self) -> None:
        self.left = MANY

    def read(self, size: int = -1) -> bytes:
        taken = min(self.left, 1 << 20 if size < 0 else size)
        self.left -= taken
        return b" " * taken


def pack(path: Path) -> Path:
    """Write a packed file whose text has `MANY` bytes."""
    member = tarfile.TarInfo("a.txt")
    member.size = MANY
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("a.txt", "w") as file:
            for _ in range(MANY >> 20):
                file.write(b" " * (1 << 20))
    elif path.name.endswith(unpack.TARS):
        level = {"preset": 0} if path.suffix == ".xz" else {"compresslevel": 9}
        with tarfile.open(path, f"w:{path.suffix[1:]}", **level) as archive:  # type: ignore[call-overload]
            archive.addfile(member, Zeros())
    else:
        small = partial(lzma.open, preset=0)  # unpacking others takes eight megabytes
        with {".gz": gzip.open, ".xz": small}[path.suffix](path, "wb") as file:
            for _ in range(MANY >> 20):
                file.write(b" " * (1 << 20))
    assert path.stat().st_size < MANY // 200
    return path


def length(file: Source) -> int:
    """Read a file in small pieces, and return its length."""
    return sum(len(piece) for piece in iter(lambda: file.read(PIECE), b""))


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.parametrize("name", ["a.zip", "a.tar.gz", "a.tar.xz", "a.tar.bz2", "a.gz", "a.xz"])
def test_a_bomb_is_refused_before_it_fills_memory(tmp_path: Path, traced: None, name: str) -> None:
    path = pack(tmp_path / name)
    tracemalloc.reset_peak()

    def read_all(limit: int) -> int:
        if not unpack.is_archive(path):
            with opened(path, limit) as file:
                return length(file)
        return sum(length(file) for _, file in read_texts(path, limit=limit))

    with pytest.raises(LabError, match=r"unpacks to more than .*: if you trust it, unpack it yourself, or raise"):
        read_all(2)
    assert read_all(1_000_000) == MANY
    assert tracemalloc.get_traced_memory()[1] < SMALL // 2


def test_the_command_refuses_it_and_the_limit_can_be_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEBBIAN_CACHE", str(tmp_path / "cache"))
    line = b"a few words and a line end " * 200
    (tmp_path / "train.xz").write_bytes(lzma.compress((line + b"\n") * (MANY // len(line))))
    for split in ("valid", "test"):
        (tmp_path / split).write_text(f"a few words of {split}\n")
    places = [word for split in ("valid", "test") for word in (f"--{split}", str(tmp_path / split))]
    command = ["data", "prepare", "texts", "--train", str(tmp_path / "train.xz"), *places, "--tokens", "spaces"]
    assert main([*command, "--quiet"]) == 1
    assert "--unpack-limit" in capsys.readouterr().err
    assert not list((tmp_path / "cache").glob("corpora/[!.]*"))
    assert main([*command, "--quiet", "--unpack-limit", "20000", "--name", "large"]) == 0


def test_an_archive_is_opened_by_its_content(tmp_path: Path) -> None:
    """A name that promises another compression, or none, does no harm."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        member = tarfile.TarInfo("a.txt")
        member.size = 4
        archive.addfile(member, io.BytesIO(b"text"))
    for content in (buffer.getvalue(), bz2.compress(buffer.getvalue()), lzma.compress(buffer.getvalue())):
        (tmp_path / "a.tar").write_bytes(content)
        assert [(name, file.read(9)) for name, file in read_texts(tmp_path / "a.tar")] == [("a.txt", b"text")]


@pytest.mark.parametrize("name", ["a.zip", "a.tar.gz", "a.tar.xz", "a.tar.bz2", "a.txt.gz", "a.txt.xz"])
def test_damage_that_comes_up_while_reading_is_an_error_that_names_the_archive(tmp_path: Path, name: str) -> None:
    """The text is long enough for its end to be read after the archive was opened."""
    path, text = tmp_path / name, random.Random(0).randbytes(1 << 19).hex().encode()
    if not unpack.is_archive(path):
        path.write_bytes({".gz": gzip.compress, ".xz": lzma.compress}[path.suffix](text))
    elif path.suffix == ".zip":
        path.write_bytes(zipped({"a.txt": text}))
    else:
        with tarfile.open(path, f"w:{path.suffix[1:]}") as archive:  # type: ignore[call-overload]
            member = tarfile.TarInfo("a.txt")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text))
    content = bytearray(path.read_bytes())
    content[len(content) * 3 // 4] ^= 1
    path.write_bytes(content)

    def read_all() -> None:
        if unpack.is_archive(path):
            assert all(length(file) for _, file in read_texts(path))
        else:
            with opened(path) as file:
                length(file)

    with pytest.raises(LabError, match=rf"{re.escape(str(path))} cannot be read \(.*\): replace it with a whole one"):
        read_all()
