"""Zip archives: a damaged list of members is noticed."""

import zipfile
from pathlib import Path

import pytest

from hebbian_softmax.lab.base.zips import open_zip

MANY = pytest.param(70_000, b"", marks=pytest.mark.slow)  # more than two bytes can count; takes seconds


def pack(path: Path, count: int, comment: bytes = b"") -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.comment = comment
        for number in range(count):
            archive.writestr(f"{number}.txt", str(number))


@pytest.mark.parametrize(("count", "comment"), [(0, b""), (3, b""), (3, b"PK\4\5 of three"), MANY])
def test_a_whole_archive_is_opened(tmp_path: Path, count: int, comment: bytes) -> None:
    pack(tmp_path / "a.zip", count, comment)
    with open_zip(tmp_path / "a.zip") as archive:
        assert len(archive.namelist()) == count


def test_a_member_that_another_one_swallows_is_missed(tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    pack(path, 3)
    content = bytearray(path.read_bytes())
    entries = [at for at in range(len(content)) if content.startswith(b"PK\1\2", at)]
    content[entries[1] + 32] = entries[2] - entries[1]  # the comment of the second entry is as long as the third entry
    path.write_bytes(content)
    with zipfile.ZipFile(path) as archive:
        assert archive.namelist() == ["0.txt", "1.txt"]
    with pytest.raises(zipfile.BadZipFile, match="its list has 2 files, not 3"), open_zip(path):
        pass


@pytest.mark.parametrize("name", ["a.txt", "ä.txt"])
def test_a_damaged_name_is_noticed(tmp_path: Path, name: str) -> None:
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(name, "text")
    with open_zip(path) as archive:
        assert archive.read(name) == b"text"
    content = path.read_bytes()
    at = content.rindex(b".txt")
    path.write_bytes(content[:at] + b".tyt" + content[at + 4 :])
    with pytest.raises(zipfile.BadZipFile, match=r"the name '.\.tyt' in its list is damaged"), open_zip(path):
        pass


def test_a_member_behind_the_end_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("one", b"1")
    content = bytearray(path.read_bytes())
    entry = content.index(b"PK\1\2")  # of the list; it ends with the place of the member
    content[entry + 42 : entry + 46] = (10**6).to_bytes(4, "little")
    path.write_bytes(content)
    with pytest.raises(zipfile.BadZipFile, match="'one' begins behind its end"), open_zip(path):
        pass
