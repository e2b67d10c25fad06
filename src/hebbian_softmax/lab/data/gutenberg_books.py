"""The files of the paper's books: those at hand in the data root, the rest from a mirror of Project Gutenberg.

A mirror, since the paper took them from one and the main site turns programs away. One book at a time with a pause, as
Project Gutenberg asks of programs. A book gets its name once it is whole, so a download that was stopped goes on with
the first book that is not there.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.error import HTTPError

from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.base.progress import Progress
from hebbian_softmax.lab.data.download import download
from hebbian_softmax.lab.data.texts import TARS, read_texts

MIRROR = "https://gutenberg.pglaf.org/cache/epub/{id}/pg{id}.txt"
PAUSE = 1.0  # seconds between two books
GONE = (404, 410)  # the mirror has no such book
SUSPECT = 20  # so many books that are not there, and none that is: the address is wrong

Splits = Mapping[str, Sequence[int]]  # the numbers of the books of each split


def files_at_hand(folder: Path, splits: Splits) -> dict[str, Path]:
    """The files in `folder` that books may come from, by their names there: books, and archives to look through."""
    paths = [*_books(folder, splits).values(), *_archives(folder)]
    return {path.relative_to(folder).as_posix(): path for path in paths}


def collect(
    folder: Path, splits: Splits, scratch: Path, mirror: str, quiet: bool
) -> tuple[dict[int, Path], dict[str, list[int]]]:
    """A file for each book, and the books of each split that cannot be had.

    A book is `SPLIT/ID.txt` or `ID.txt` in `folder`, or a file ID.txt in an archive there, which is unpacked to
    `scratch`. What is in neither is downloaded to `folder`.
    """
    found = _books(folder, splits)
    wanted = [number for numbers in splits.values() for number in numbers]
    for archive in _archives(folder):
        if missing := {f"{number}.txt": number for number in wanted if number not in found}:
            _unpack(archive, missing, scratch, found)
    gone = _fetch([number for number in wanted if number not in found], folder, mirror, found, quiet)
    by_split = {split: [number for number in numbers if number in gone] for split, numbers in splits.items()}
    return found, {split: numbers for split, numbers in by_split.items() if numbers}


def _books(folder: Path, splits: Splits) -> dict[int, Path]:
    found = {}
    for split, numbers in splits.items():
        for number in numbers:
            for path in (folder / split / f"{number}.txt", folder / f"{number}.txt"):
                if path.exists():
                    found[number] = path
    return found


def _archives(folder: Path) -> list[Path]:
    """The smallest first: it is the quickest to look through."""
    found = [path for path in folder.glob("*") if path.name.endswith((*TARS, ".zip"))] if folder.is_dir() else []
    return sorted(found, key=lambda path: (path.stat().st_size, path.name))


def _unpack(archive: Path, missing: Mapping[str, int], scratch: Path, found: dict[int, Path]) -> None:
    def name_of(member: str) -> str:
        return member.rpartition("/")[2]

    for member, content in read_texts(archive, lambda member: name_of(member) in missing):
        number, path = missing[name_of(member)], scratch / name_of(member)
        if number not in found:
            path.write_bytes(content)
            found[number] = path


def _fetch(numbers: Sequence[int], folder: Path, mirror: str, found: dict[int, Path], quiet: bool) -> set[int]:
    """Download books to `folder` and add them to `found`; the value are those that the mirror does not have."""
    gone: set[int] = set()
    if not numbers:
        return gone
    total, start = len(found) + len(numbers), len(found)
    with Progress("gutenberg", total=total, start=start, unit="books", quiet=quiet) as progress:
        for number in numbers:
            if number != numbers[0]:
                time.sleep(PAUSE)
            address, path = mirror.replace("{id}", str(number)), folder / f"{number}.txt"
            try:
                download(address, path, quiet=True)
                _refuse_pages(address, path)
                found[number] = path
            except LabError as error:
                if not (isinstance(error.__cause__, HTTPError) and error.__cause__.code in GONE):
                    left = total - len(found) - len(gone)
                    raise LabError(f"{left:,} of {total:,} books are still to come: {error}") from error
                gone.add(number)
            if len(gone) == SUSPECT and not any(place.parent == folder for place in found.values()):
                raise LabError(
                    f"{address} is not there, nor are {SUSPECT - 1} other books: give the address of another mirror "
                    "with --mirror"
                )
            progress.update(len(found) + len(gone), {"not_there": len(gone)} if gone else {})
    return gone


def _refuse_pages(address: str, path: Path) -> None:
    """A web page in place of a book asks for a human, and would be read as a book."""
    with open(path, "rb") as file:
        beginning = file.read(256).lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if beginning.startswith((b"<!doctype", b"<html", b"<?xml")):
        path.unlink()
        raise LabError(f"{address} is a web page, not a book: give the address of another mirror with --mirror")
