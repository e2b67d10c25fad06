"""Project Gutenberg, as in the paper: whole books, NLTK's sentences and words in lower case, words seen five times.

The books are the paper's own (appendix, "Gutenberg"). Those of a split are looked for in `gutenberg` under the data
root, as `SPLIT/ID.txt` or `ID.txt`, in folders or in archives there; what is missing is downloaded.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hebbian_softmax.lab.data.corpus import SPLITS
from hebbian_softmax.lab.data.download import download
from hebbian_softmax.lab.data.gutenberg_ids import BOOKS
from hebbian_softmax.lab.data.prepare import Plan, Workshop
from hebbian_softmax.lab.data.texts import TARS, digest, read_texts
from hebbian_softmax.lab.data.tokenise import find_punkt, nltk_version, tokeniser
from hebbian_softmax.lab.data.vocabulary import Encoded
from hebbian_softmax.lab.errors import LabError

ADDRESS = "https://www.gutenberg.org/cache/epub/{0}/pg{0}.txt"
MARKERS = (b"THIS PROJECT GUTENBERG EBOOK", b"THE PROJECT GUTENBERG EBOOK")  # the first is the paper's
MINIMUM = 5  # occurrences in training of a word of the vocabulary


@dataclass(frozen=True)
class Options:
    """What may differ from the paper: books for training, and the original script's treatment of odd files."""

    books: str = ""
    paper_exact: bool = False


def plan(options: Options) -> Plan:
    """The corpus with these options."""
    settings = {
        "books": digest(Path(options.books)) if options.books else "",
        "paper_exact": options.paper_exact,
        "minimum": MINIMUM,
    }
    usual = options == Options()
    return Plan("gutenberg", settings, partial(_gather, options), MINIMUM, documents=True, usual=usual)


def _gather(options: Options, workshop: Workshop) -> None:
    find_punkt(workshop.data_root, workshop.quiet)
    splits = {split: list(BOOKS[split]) for split in SPLITS if split != "train" or not options.books}
    found = _collect(splits, workshop)
    training = Path(options.books) if options.books else None
    if training is not None and training.is_file():
        workshop.source(training)

    def books() -> Iterator[tuple[str, str, bytes | Path, bool]]:
        if training is not None:
            for name, content in read_texts(training):
                yield "train", name, content, options.paper_exact
        for split, number in ((split, number) for split, numbers in splits.items() for number in numbers):
            if number in found:
                yield split, f"{number}.txt", found[number], options.paper_exact

    workshop.tokenise(_tokenise, books(), None if training else len(found))
    workshop.notes["books"] = workshop.gathered.documents()
    workshop.notes["nltk"] = nltk_version()


def _collect(splits: dict[str, list[int]], workshop: Workshop) -> dict[int, bytes | Path]:
    """The books by number: files where there are files, bytes from archives."""
    folder = workshop.data_root / "gutenberg"
    found: dict[int, bytes | Path] = {}
    wanted = {f"{number}.txt": number for numbers in splits.values() for number in numbers}
    for split, numbers in splits.items():
        for number in numbers:
            for path in (folder / split / f"{number}.txt", folder / f"{number}.txt"):
                if path.exists():
                    found[number] = path
    archives = [path for path in folder.glob("*") if path.name.endswith((*TARS, ".zip"))] if folder.is_dir() else []
    for archive in sorted(archives, key=lambda path: (path.stat().st_size, path.name)):
        if (before := len(found)) < len(wanted):
            for name, content in read_texts(archive, lambda name: _book(name) in wanted):
                found.setdefault(wanted[_book(name)], content)
            if len(found) > before:
                workshop.source(archive)
    _download({number for number in wanted.values() if number not in found}, folder, found, workshop)
    for place in found.values():
        if isinstance(place, Path):
            workshop.source(place)
    return found


def _book(name: str) -> str:
    return name.rpartition("/")[2]


def _download(numbers: set[int], folder: Path, found: dict[int, bytes | Path], workshop: Workshop) -> None:
    gone = []
    for number in sorted(numbers):
        path = folder / f"{number}.txt"
        try:
            download(ADDRESS.format(number), path, quiet=True)
            found[number] = path
        except LabError as error:
            if "(HTTP 404" not in str(error):
                raise LabError(f"{len(numbers):,} of the paper's books are not in {folder}: {error}") from error
            gone.append(number)
    workshop.notes["books no longer offered"] = gone


def _tokenise(book: tuple[str, str, bytes | Path, bool]) -> list[tuple[str, Encoded]]:
    split, name, content, paper_exact = book
    if isinstance(content, Path):
        content = content.read_bytes()
    text = extract_as_in_paper(content) if paper_exact else extract(content, name)
    encoded = Encoded()
    encoded.add(tokeniser().tokens(text))
    return [(split, encoded)]


def extract(content: bytes, name: str) -> str:
    """What stands between the START and END markers: from the first marker's last letter to the second's first.

    A text without a START marker begins where the file does, one without an END marker ends where the file does.
    """
    if b"\0" in content:
        raise LabError(f"{name} is not a text, it has zero bytes: take it out of the books")
    starts = [
        (at, len(b"START OF " + marker)) for marker in MARKERS if (at := content.find(b"START OF " + marker)) >= 0
    ]
    start = sum(min(starts)) if starts else 0
    ends = [at for marker in MARKERS if (at := content.find(b"END OF " + marker, start)) >= 0]
    content = content[start : min(ends, default=len(content))]
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return content.decode("latin-1")


def extract_as_in_paper(content: bytes) -> str:
    """The original script's extraction, with what it does to other files than it was made for.

    It knows the marker with THIS alone. Without it 36 bytes at the beginning are lost, without END the last byte, and
    bytes that are not UTF-8 are dropped.
    """
    start = content.find(b"START OF " + MARKERS[0]) + len(b"START OF " + MARKERS[0])
    end = content.find(b"END OF " + MARKERS[0])
    return content[start:end].decode("utf-8", "ignore")
