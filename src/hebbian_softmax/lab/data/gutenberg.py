"""Project Gutenberg, as in the paper: whole books, NLTK's sentences and words in lower case, words seen five times.

The books are the paper's own (appendix, "Gutenberg"), of `gutenberg` under the data root or from a mirror.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hebbian_softmax.lab.base.console import say
from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.base.settings import setting
from hebbian_softmax.lab.data.corpus import SPLITS
from hebbian_softmax.lab.data.gutenberg_books import MIRROR, collect, files_at_hand
from hebbian_softmax.lab.data.gutenberg_ids import BOOKS
from hebbian_softmax.lab.data.prepare import CorpusKind, Plan, Workshop, readable
from hebbian_softmax.lab.data.texts import digest, read_texts
from hebbian_softmax.lab.data.tokenise import find_punkt, nltk_version, tokeniser
from hebbian_softmax.lab.data.vocabulary import Encoded

MARKERS = (b"THIS PROJECT GUTENBERG EBOOK", b"THE PROJECT GUTENBERG EBOOK")  # the first is the paper's
MINIMUM = 5  # occurrences in training of a word of the vocabulary
MISSING = "books not there"  # the note of those that the mirror does not have


def parse_mirror(text: str) -> str:
    """Return the address of a mirror, which has `{id}` where a book's number belongs."""
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


def plan(options: Options) -> Plan:
    """The corpus with these options."""
    settings = {
        "books": digest(Path(options.books)) if options.books else "",
        "paper_exact": options.paper_exact,
        "minimum": MINIMUM,
    }
    usual = not options.books and not options.paper_exact
    return Plan(
        "gutenberg",
        settings,
        partial(_gather, options),
        partial(_at_hand, options),
        MINIMUM,
        documents=True,
        usual=usual,
    )


GUTENBERG = CorpusKind("gutenberg", "novels of Project Gutenberg: the paper's, or your own for training", Options, plan)


def _splits(options: Options) -> dict[str, list[int]]:
    """The paper's books that are used."""
    return {split: list(BOOKS[split]) for split in SPLITS if split != "train" or not options.books}


def _at_hand(options: Options, root: Path) -> dict[str, Path]:
    return files_at_hand(root / "gutenberg", _splits(options))


def _gather(options: Options, workshop: Workshop) -> None:
    find_punkt(workshop.data_root, workshop.quiet)
    splits, training = _splits(options), Path(options.books) if options.books else None
    folder, scratch = workshop.data_root / "gutenberg", workshop.gathered.folder
    found, missing = collect(folder, splits, scratch, options.mirror, workshop.quiet)
    workshop.note(_at_hand(options, workshop.data_root))
    if missing:
        workshop.notes[MISSING] = missing
        say(f"gutenberg: {name_missing(missing)}, at {options.mirror}: they are left out")

    def books() -> Iterator[tuple[str, str, bytes | Path, bool]]:
        if training is not None:
            for name, content in read_texts(training):
                yield "train", str(training / name), content, options.paper_exact
        for split, number in ((split, number) for split, numbers in splits.items() for number in numbers):
            if number in found:
                yield split, f"{number}.txt", found[number], options.paper_exact

    workshop.tokenise(_tokenise, books(), None if training else len(found))
    if training is not None and not workshop.gathered.tokens["train"]:
        raise LabError(f"{training} has no words to train on: name a folder or an archive of .txt files with --books")
    workshop.notes["books"] = workshop.gathered.documents()
    workshop.notes["nltk"] = nltk_version()


def name_missing(missing: dict[str, list[int]]) -> str:
    """The books that a mirror does not have, for people.

    >>> name_missing({"train": [10, 11], "test": [126]})
    'books that are not there: 10 11 (train), 126 (test)'
    """
    parts = (f"{' '.join(map(str, numbers))} ({split})" for split, numbers in missing.items())
    return f"books that are not there: {', '.join(parts)}"


def _tokenise(book: tuple[str, str, bytes | Path, bool]) -> list[tuple[str, Encoded]]:
    split, name, content, paper_exact = book
    if isinstance(content, Path):
        with readable(content):
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
