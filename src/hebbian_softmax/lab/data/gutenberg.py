"""Project Gutenberg as in the paper: whole books, NLTK's sentences and words in lower case, words seen five times.

The books are those of the paper's appendix ("Gutenberg"). A book that is not in `gutenberg` under the data root comes
from a mirror, as the paper's books did, because the main site turns programs away. Books are fetched one at a time
with a pause, as Project Gutenberg asks of programs. A book gets its name once it is whole, so an interrupted download
goes on with the first missing book.
"""

import argparse
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import resources
from pathlib import Path
from urllib.error import HTTPError

from hebbian_softmax.lab.base.console import say
from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.base.progress import Progress
from hebbian_softmax.lab.base.settings import setting
from hebbian_softmax.lab.data.download import download
from hebbian_softmax.lab.data.prepare import CorpusKind, Plan, Workshop, readable
from hebbian_softmax.lab.data.texts import digest
from hebbian_softmax.lab.data.tokenise import find_punkt, tokeniser
from hebbian_softmax.lab.data.unpack import LIMIT, Source, is_archive, read_texts, unpack_limit
from hebbian_softmax.lab.data.vocabulary import Encoded

MARKERS = (b"THIS PROJECT GUTENBERG EBOOK", b"THE PROJECT GUTENBERG EBOOK")  # the first is the paper's
MINIMUM = 5  # occurrences in training that keep a word in the vocabulary
MISSING = "books not there"  # the manifest's note that lists books which the mirror does not have
MIRROR = "https://gutenberg.pglaf.org/cache/epub/{id}/pg{id}.txt"
LONGEST = 1 << 27  # bytes of a book; the longest of Project Gutenberg have a tenth of it
PAUSE = 1.0  # seconds between two books
GONE = (404, 410)  # the HTTP statuses that say that a mirror does not have a book
SUSPECT = 20  # the address is taken to be wrong when so many books are missing and none was found

Splits = Mapping[str, Sequence[int]]  # the numbers of the books of each split
# The paper's books in its order (appendix, "Gutenberg", "Splits"): gutenberg.txt has a line for each split.
_LINES = resources.files(__package__).joinpath("gutenberg.txt").read_text(encoding="utf-8").splitlines()
BOOKS: Splits = {split: [int(number) for number in numbers] for split, *numbers in map(str.split, _LINES)}


def parse_mirror(text: str) -> str:
    """Return the address of a mirror if it has `{id}` in the place of a book's number."""
    if "{id}" not in text or not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"must be an http or https address with {{id}} in it, not {text!r}")
    return text


@dataclass(frozen=True)
class Options:
    """The options of the corpus."""

    books: str = setting(
        "",
        "train on the .txt files of this folder or archive (.tar.xz, .zip, …) instead of the paper's 2,017 books",
        str,
        metavar="PLACE",
    )
    paper_exact: bool = setting(
        False,
        "treat files as the paper's script does: only the marker START OF THIS counts, without it the first 36 bytes "
        "and the last are lost, and bytes that are not UTF-8 are dropped",
    )
    mirror: str = setting(
        MIRROR,
        "address of the books that are not in the data root, with {id} for a book's number",
        parse_mirror,
        metavar="ADDRESS",
    )
    unpack_limit: int = unpack_limit()


def plan(options: Options, books: Splits = BOOKS) -> Plan:
    """Return the plan for these books; with the option `books`, those of the training split are not used."""
    settings = {
        "books": digest(Path(options.books)) if options.books else "",
        "paper_exact": options.paper_exact,
        "minimum": MINIMUM,
    }
    splits = {split: numbers for split, numbers in books.items() if split != "train" or not options.books}
    return Plan(
        "gutenberg",
        settings,
        partial(_gather, options, splits),
        partial(_at_hand, splits),
        MINIMUM,
        documents=True,
        usual=not options.books and not options.paper_exact,
    )


GUTENBERG = CorpusKind("gutenberg", "novels of Project Gutenberg: the paper's, or your own for training", Options, plan)


def _read_book(path: Path, file: Source) -> bytes:
    content = file.read(LONGEST + 1)
    if len(content) > LONGEST:
        raise LabError(f"{path} has more than {LONGEST:,} bytes, so it is no book: take it out")
    return content


def _at_hand(splits: Splits, root: Path) -> dict[str, Path]:
    """Return the files that books may come from, by their names in the folder: books, and archives of books."""
    folder = root / "gutenberg"
    paths = [*_books(folder, splits).values(), *_archives(folder)]
    return {path.relative_to(folder).as_posix(): path for path in paths}


def _gather(options: Options, splits: Splits, workshop: Workshop) -> None:
    workshop.notes["nltk"] = find_punkt(workshop.data_root, workshop.quiet)
    training = Path(options.books) if options.books else None
    folder, scratch = workshop.data_root / "gutenberg", workshop.gathered.folder
    found, missing = collect(folder, splits, scratch, options.mirror, workshop.quiet, options.unpack_limit)
    workshop.note(_at_hand(splits, workshop.data_root))
    if missing:
        workshop.notes[MISSING] = missing
        say(f"gutenberg: {name_missing(missing)}, at {options.mirror}: they are left out")

    def books() -> Iterator[tuple[str, str, bytes | Path, bool]]:
        if training is not None:
            for name, file in read_texts(training, limit=options.unpack_limit):
                yield "train", str(training / name), _read_book(training / name, file), options.paper_exact
        for split, number in ((split, number) for split, numbers in splits.items() for number in numbers):
            if number in found:
                path = found[number]
                name = f"{number}.txt in an archive of {folder}" if path.parent == scratch else str(path)
                yield split, name, path, options.paper_exact

    workshop.tokenise(_tokenise, books(), None if training else len(found))
    if training is not None and not workshop.gathered.tokens["train"]:
        raise LabError(f"{training} has no words to train on: name a folder or an archive of .txt files with --books")
    workshop.notes["books"] = workshop.gathered.documents()


def name_missing(missing: Mapping[str, Sequence[int]]) -> str:
    """Describe the books that a mirror does not have.

    >>> name_missing({"train": [10, 11], "test": [126]})
    'books that are not there: 10 11 (train), 126 (test)'
    """
    parts = (f"{' '.join(map(str, numbers))} ({split})" for split, numbers in missing.items())
    return f"books that are not there: {', '.join(parts)}"


def _tokenise(book: tuple[str, str, bytes | Path, bool]) -> list[tuple[str, Encoded]]:
    split, name, content, paper_exact = book
    if isinstance(content, Path):
        with readable(content), open(content, "rb") as file:
            content = _read_book(content, file)
    text = extract_as_in_paper(content) if paper_exact else extract(content, name)
    return [(split, Encoded(tokeniser().tokens(text)))]


def extract(content: bytes, name: str) -> str:
    """Return the text between the START and END markers, without the markers.

    A text without a START marker begins where the file does; a text without an END marker ends where the file does.
    """
    if b"\0" in content:
        raise LabError(f"{name} is not a text, it has zero bytes: take it out of the books")
    starts = [found.span() for marker in MARKERS if (found := re.search(b"START OF " + marker, content))]
    start = min(starts, default=(0, 0))[1]
    ends = [at for marker in MARKERS if (at := content.find(b"END OF " + marker, start)) >= 0]
    content = content[start : min(ends, default=len(content))]
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return content.decode("latin-1")


def extract_as_in_paper(content: bytes) -> str:
    """Return what the paper's script takes from a book, including what the script does to unusual files.

    The script knows only the marker with THIS. Without that marker it loses the first 36 bytes, without an END marker
    the last byte, and it drops bytes that are not UTF-8.
    """
    start = content.find(b"START OF " + MARKERS[0]) + len(b"START OF " + MARKERS[0])
    end = content.find(b"END OF " + MARKERS[0])
    return content[start:end].decode("utf-8", "ignore")


def collect(
    folder: Path, splits: Splits, scratch: Path, mirror: str, quiet: bool, limit: int = LIMIT
) -> tuple[dict[int, Path], dict[str, list[int]]]:
    """Return a file for each book, and for each split the books that the mirror does not have.

    A book is `SPLIT/ID.txt` or `ID.txt` in `folder`, or a member ID.txt of an archive there, which is unpacked to
    `scratch`. Any other book is downloaded to `folder`.
    """
    found = _books(folder, splits)
    wanted = [number for numbers in splits.values() for number in numbers]
    for archive in _archives(folder):
        if missing := {f"{number}.txt": number for number in wanted if number not in found}:
            _unpack(archive, missing, scratch, found, limit)
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
    """Return the archives in a folder, the smallest first because it takes the least time to look through."""
    found = [path for path in folder.glob("*") if is_archive(path)] if folder.is_dir() else []
    return sorted(found, key=lambda path: (path.stat().st_size, path.name))


def _unpack(archive: Path, missing: Mapping[str, int], scratch: Path, found: dict[int, Path], limit: int) -> None:
    for member, file in read_texts(archive, lambda member: Path(member).name in missing, limit):
        path = scratch / Path(member).name
        if missing[path.name] not in found:
            path.write_bytes(_read_book(archive / member, file))
            found[missing[path.name]] = path


def _fetch(numbers: Sequence[int], folder: Path, mirror: str, found: dict[int, Path], quiet: bool) -> set[int]:
    """Download books to `folder` and add them to `found`; return the books that the mirror does not have."""
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
    """Refuse a web page that came in place of a book: such a page asks for a human, and would be read as a book."""
    with open(path, "rb") as file:
        beginning = file.read(256).lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if beginning.startswith((b"<!doctype", b"<html", b"<?xml")):
        path.unlink()
        raise LabError(f"{address} is a web page, not a book: give the address of another mirror with --mirror")
