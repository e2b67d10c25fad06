"""The corpus `texts`: your own files, folders or archives; and how other corpora read such places.

Tokens are NLTK's sentences and words in lower case, as in the paper. For a text that is tokenised already or is not
English, they are the strings between spaces, and a line is a sentence. A text with `<unk>` in it is tokenised already.
"""

import hashlib
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from hebbian_softmax.lab.base.console import say
from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.base.settings import REQUIRED, choice, integer, setting
from hebbian_softmax.lab.data.corpus import EOS, SPLITS, UNK, describe
from hebbian_softmax.lab.data.prepare import CorpusKind, Plan, Workshop, readable
from hebbian_softmax.lab.data.tokenise import find_punkt, tokeniser
from hebbian_softmax.lab.data.unpack import Source, is_archive, opened, read_texts, unpack_limit
from hebbian_softmax.lab.data.vocabulary import Encoded

MINIMUM = 3  # occurrences in training that keep a word in the vocabulary, as in WikiText
PART = 1 << 20  # bytes tokenised at a time; more where no paragraph ends
LONGEST = 16  # parts without the end of a paragraph, after which the end of a line ends a piece
TOKENS = ("auto", "nltk", "spaces")
_UNKNOWN = re.compile(rf"(?<!\S){re.escape(UNK)}(?!\S)".encode())
"""The mark of a word that is not in a vocabulary, as a word of its own."""


class Piece(NamedTuple):
    """Some lines of a text."""

    first: int
    """The number of the first line."""
    content: bytes
    ended: bool
    """Whether the last line ends here. A very long line has several pieces."""


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
        f"for texts that are tokenised already or not English; auto: spaces if there is a word {UNK}, else nltk",
        choice(*TOKENS),
    )
    unpack_limit: int = unpack_limit()


def plan(options: Options, part: int = PART) -> Plan:
    """Return the plan for the three places; texts are tokenised in pieces of about `part` bytes."""
    places = {split: _identity(options, split) for split in SPLITS}
    for one, other in combinations(SPLITS, 2):
        if places[one] == places[other]:
            raise LabError(f"--{one} and --{other} name the same text: a model must be measured on another one")
    if options.tokens == "auto":
        options = replace(options, tokens=_noticed_tokens(options))
    settings = {**places, "minimum": options.minimum, "tokens": options.tokens}
    return Plan("texts", settings, partial(_gather, options, part), lambda root: {}, options.minimum, usual=False)


TEXTS = CorpusKind("texts", "any text: your own files, folders or archives for each split", Options, plan)


def _noticed_tokens(options: Options) -> str:
    """Return how the texts are to be read, and say so if it is not the usual way."""
    for split in SPLITS:
        for _, piece in _pieces(Path(getattr(options, split)), options.unpack_limit, by_lines=True):
            if _UNKNOWN.search(piece.content):
                say(
                    f"the {split} text has {UNK} in it, so words are what stands between spaces; "
                    "if it is there by chance, give --tokens nltk"
                )
                return "spaces"
    return "nltk"


def _identity(options: Options, split: str) -> str:
    """Return the checksum of a split's place, which must hold at least one word."""
    place = Path(getattr(options, split))
    with readable(place):
        if place.exists() and not (place.is_dir() or place.is_file()):
            raise LabError(f"{place} is a pipe or a device, and texts are read twice: name a file with --{split}")
    pieces = _pieces(place, options.unpack_limit, by_lines=True)
    if not any(piece.content.decode(errors="replace").strip() for _, piece in pieces):
        raise LabError(f"{place} has no words: name a text, or a folder or archive of .txt files, with --{split}")
    return digest(place)


def _gather(options: Options, part: int, workshop: Workshop) -> None:
    workshop.notes["places"] = {split: str(Path(getattr(options, split)).absolute()) for split in SPLITS}
    if options.tokens == "nltk":
        workshop.notes["nltk"] = find_punkt(workshop.data_root, workshop.quiet)
    by_lines = options.tokens == "spaces"
    pieces = (
        (split, options.tokens, *piece)
        for split in SPLITS
        for piece in _pieces(Path(getattr(options, split)), options.unpack_limit, by_lines, part)
    )
    workshop.tokenise(_tokenise, pieces, None)


def _pieces(place: Path, limit: int, by_lines: bool, part: int = PART) -> Iterator[tuple[str, Piece]]:
    """Yield the texts of a place in pieces, each with the text's name."""
    if place.is_dir() or is_archive(place):
        for name, file in read_texts(place, limit=limit):
            yield from ((str(place / name), piece) for piece in cut(file, place / name, by_lines, part))
        return
    with opened(place, limit) as file:
        yield from ((str(place), piece) for piece in cut(file, place, by_lines, part))


def cut(file: Source, path: Path, by_lines: bool, part: int = PART) -> Iterator[Piece]:
    """Yield a text in pieces of at least `part` bytes. Errors name its `path`.

    A piece ends with a paragraph, or with any line if lines are sentences. A line that is longer than a piece may be
    is cut at a space.
    """
    longest = LONGEST * part
    lines: list[bytes] = []
    first, number, size = 1, 1, 0
    while line := file.readline(longest):
        lines.append(line)
        size += len(line)
        if line.endswith(b"\n"):
            number += 1
            if size >= part and (by_lines or not line.strip() or size >= longest):
                yield Piece(first, b"".join(lines), True)
                lines, first, size = [], number, 0
        elif len(line) >= longest:
            content = b"".join(lines)
            end = content.rfind(b" ") + 1
            if not end:
                raise LabError(
                    f"{path}, line {number:,} has {size:,} bytes without a space: it is no text; take it out"
                )
            yield Piece(first, content[:end], False)
            lines, first, size = [content[end:]], number, len(content) - end
    if size:
        yield Piece(first, b"".join(lines), True)


def _tokenise(part: tuple[str, str, str, Piece]) -> list[tuple[str, Encoded]]:
    split, tokens, name, piece = part
    text = _decode(name, piece)
    if tokens == "nltk":
        return [(split, Encoded(tokeniser().tokens(text)))]
    return [(split, Encoded(split_at_spaces(text, piece.ended)))]


def split_at_spaces(text: str, ended: bool = True) -> Iterator[str]:
    """Yield the strings between spaces, and `<eos>` at the end of each line, except for a last line that has not ended.

    Lines end at line feeds alone: some texts, WikiText among them, have other separators inside a line.

    >>> list(split_at_spaces("ein Satz\\u2028 .\\nnoch einer"))
    ['ein', 'Satz', '.', '<eos>', 'noch', 'einer', '<eos>']
    """
    for line in io.StringIO(text, newline="\n"):
        yield from line.split()
        if ended or line.endswith("\n"):
            yield EOS


def _decode(name: str, piece: Piece) -> str:
    """Decode a piece. Errors name the line in the file, since the piece's own positions mean nothing to the user."""
    first, content = piece.first, piece.content
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


def digest(place: Path) -> str:
    """Return the checksum of a file, or of all texts in a folder and their names."""
    with readable(place):
        if not place.is_dir():
            return str(describe(place)["sha256"])
        total = hashlib.sha256()
        for name, file in read_texts(place):
            own = hashlib.sha256()
            while chunk := file.read(PART):
                own.update(chunk)
            # Names that are not UTF-8 count with the bytes that they have on the disk.
            total.update(f"{name}\n{own.hexdigest()}\n".encode(errors="surrogateescape"))
        return total.hexdigest()
