"""Texts of one's own: a file, a folder or an archive for each split.

Tokens are NLTK's sentences and words in lower case, as in the paper. Where a text is tokenised already, or is not
English, they are what stands between spaces, and a line is a sentence.
"""

import io
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import IO, Any

from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.base.settings import REQUIRED, choice, integer, setting
from hebbian_softmax.lab.data.corpus import EOS, SPLITS
from hebbian_softmax.lab.data.prepare import CorpusKind, Plan, Workshop, readable
from hebbian_softmax.lab.data.texts import digest, is_archive, opened, read_texts
from hebbian_softmax.lab.data.tokenise import find_punkt, nltk_version, tokeniser
from hebbian_softmax.lab.data.vocabulary import Encoded

MINIMUM = 3  # occurrences in training of a word of the vocabulary, as in WikiText
PART = 1 << 20  # bytes tokenised at a time: more where no paragraph ends
LONGEST = 16  # parts, after which a line's end will do
TOKENS = ("nltk", "spaces")


def _place(split: str) -> Any:
    help = f"the {split} split: a text in UTF-8 (or .xz, .gz), or the .txt files of a folder or archive"
    return setting(REQUIRED, help, str, metavar="PLACE")


@dataclass(frozen=True)
class Options:
    """The options of the corpus."""

    train: str = _place("train")
    valid: str = _place("valid")
    test: str = _place("test")
    minimum: int = setting(MINIMUM, "keep words that occur at least N times in training", integer(1))
    tokens: str = setting(
        TOKENS[0],
        "nltk: English sentences and words in lower case; spaces: the strings between spaces, a line being a sentence, "
        "for texts that are tokenised already or not English",
        choice(*TOKENS),
    )


def plan(options: Options) -> Plan:
    """Whatever is named for training, validation and testing."""
    places = {split: _identity(options, split) for split in SPLITS}
    for one, other in combinations(SPLITS, 2):
        if places[one] == places[other]:
            raise LabError(f"--{one} and --{other} name the same text: a model must be measured on another one")
    settings = {**places, "minimum": options.minimum, "tokens": options.tokens}
    return Plan("texts", settings, partial(_gather, options), lambda root: {}, options.minimum, usual=False)


TEXTS = CorpusKind("texts", "any text: your own files, folders or archives for each split", Options, plan)


def _identity(options: Options, split: str) -> str:
    """The checksum of a split that has words."""
    place = Path(getattr(options, split))
    with readable(place):
        if place.exists() and not (place.is_dir() or place.is_file()):
            raise LabError(f"{place} is a pipe or a device, and texts are read twice: name a file with --{split}")
    if not any(content.decode(errors="replace").strip() for _, _, content in _parts(place, by_lines=True)):
        raise LabError(f"{place} has no words: name a text, or a folder or archive of .txt files, with --{split}")
    return digest(place)


def _gather(options: Options, workshop: Workshop) -> None:
    workshop.notes["places"] = {split: str(Path(getattr(options, split)).absolute()) for split in SPLITS}
    if options.tokens == "nltk":
        find_punkt(workshop.data_root, workshop.quiet)
        workshop.notes["nltk"] = nltk_version()
    parts = (
        (split, options.tokens, *part)
        for split in SPLITS
        for part in _parts(Path(getattr(options, split)), by_lines=options.tokens == "spaces")
    )
    workshop.tokenise(_tokenise, parts, None)


def _parts(place: Path, by_lines: bool) -> Iterator[tuple[str, int, bytes]]:
    """Names, first lines and pieces of all texts of a place."""
    if place.is_dir() or is_archive(place):
        for name, content in read_texts(place):
            yield from ((f"{place / name}", *part) for part in _cut(io.BytesIO(content), by_lines))
        return
    with opened(place) as file:
        yield from ((str(place), *part) for part in _cut(file, by_lines))


def _cut(file: IO[bytes], by_lines: bool) -> Iterator[tuple[int, bytes]]:
    """A text in pieces that end with a paragraph, or with a line where lines are sentences; and their first lines."""
    lines: list[bytes] = []
    first, size = 1, 0
    for number, line in enumerate(file, 1):
        lines.append(line)
        size += len(line)
        if size >= PART and (by_lines or not line.strip() or size >= LONGEST * PART):
            yield first, b"".join(lines)
            lines, first, size = [], number + 1, 0
    if lines:
        yield first, b"".join(lines)


def _tokenise(part: tuple[str, str, str, int, bytes]) -> list[tuple[str, Encoded]]:
    split, tokens, name, first, content = part
    text = _decode(name, first, content)
    encoded = Encoded()
    if tokens == "nltk":
        encoded.add(tokeniser().tokens(text))
    else:  # lines end at line feeds alone, as in WikiText
        encoded.add(token for line in io.StringIO(text, newline="\n") for token in (*line.split(), EOS))
    return [(split, encoded)]


def _decode(name: str, first: int, content: bytes) -> str:
    """A piece as text. Errors name the line, since a position in the piece is none in the file."""
    try:
        text = content.decode("utf-8-sig" if first == 1 else "utf-8")
    except UnicodeDecodeError as error:
        before, what = error.object[: error.start], f"byte 0x{error.object[error.start]:02x}, {error.reason}"
    else:
        before, zero, _ = content.partition(b"\0")
        if not zero:
            return text
        what = "a zero byte"
    line = first + before.count(b"\n")
    raise LabError(f"{name} is not a text in UTF-8 (line {line:,}: {what}): convert it, or take it out")
