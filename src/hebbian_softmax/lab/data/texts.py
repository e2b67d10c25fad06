"""The corpus `texts`: your own files, folders or archives; and how other corpora read such places.

Tokens are NLTK's sentences and words in lower case, as in the paper. For a text that is tokenised already or is not
English, they are the strings between spaces, and a line is a sentence.
"""

import contextlib
import gzip
import hashlib
import io
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import IO, Any

from hebbian_softmax.lab.base.errors import LabError, reason
from hebbian_softmax.lab.base.settings import REQUIRED, choice, integer, setting
from hebbian_softmax.lab.data.corpus import EOS, SPLITS, describe
from hebbian_softmax.lab.data.prepare import CorpusKind, Plan, Workshop, readable
from hebbian_softmax.lab.data.tokenise import find_punkt, tokeniser
from hebbian_softmax.lab.data.vocabulary import Encoded

MINIMUM = 3  # occurrences in training that keep a word in the vocabulary, as in WikiText
PART = 1 << 20  # bytes tokenised at a time; more where no paragraph ends
LONGEST = 16  # parts without the end of a paragraph, after which the end of a line ends a piece
TOKENS = ("nltk", "spaces")

TARS = (".tar", ".tar.xz", ".tar.gz", ".tgz", ".tar.bz2")
OPENERS: dict[str, Callable[..., Any]] = {".xz": lzma.open, ".gz": gzip.open}
# Zip archives with a password or with an unknown compression raise RuntimeError.
DAMAGES = (zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, EOFError, RuntimeError)


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


def plan(options: Options, part: int = PART) -> Plan:
    """Return the plan for the three places; texts are tokenised in pieces of about `part` bytes."""
    places = {split: _identity(options, split) for split in SPLITS}
    for one, other in combinations(SPLITS, 2):
        if places[one] == places[other]:
            raise LabError(f"--{one} and --{other} name the same text: a model must be measured on another one")
    settings = {**places, "minimum": options.minimum, "tokens": options.tokens}
    return Plan("texts", settings, partial(_gather, options, part), lambda root: {}, options.minimum, usual=False)


TEXTS = CorpusKind("texts", "any text: your own files, folders or archives for each split", Options, plan)


def _identity(options: Options, split: str) -> str:
    """Return the checksum of a split's place, which must hold at least one word."""
    place = Path(getattr(options, split))
    with readable(place):
        if place.exists() and not (place.is_dir() or place.is_file()):
            raise LabError(f"{place} is a pipe or a device, and texts are read twice: name a file with --{split}")
    if not any(content.decode(errors="replace").strip() for _, _, content in _pieces(place, by_lines=True)):
        raise LabError(f"{place} has no words: name a text, or a folder or archive of .txt files, with --{split}")
    return digest(place)


def _gather(options: Options, part: int, workshop: Workshop) -> None:
    workshop.notes["places"] = {split: str(Path(getattr(options, split)).absolute()) for split in SPLITS}
    if options.tokens == "nltk":
        workshop.notes["nltk"] = find_punkt(workshop.data_root, workshop.quiet)
    pieces = (
        (split, options.tokens, *piece)
        for split in SPLITS
        for piece in _pieces(Path(getattr(options, split)), by_lines=options.tokens == "spaces", part=part)
    )
    workshop.tokenise(_tokenise, pieces, None)


def _pieces(place: Path, by_lines: bool, part: int = PART) -> Iterator[tuple[str, int, bytes]]:
    """Yield the texts of a place in pieces: the text's name, the number of the piece's first line, the piece."""
    if place.is_dir() or is_archive(place):
        for name, content in read_texts(place):
            yield from ((f"{place / name}", *piece) for piece in cut(io.BytesIO(content), by_lines, part))
        return
    with opened(place) as file:
        yield from ((str(place), *piece) for piece in cut(file, by_lines, part))


def cut(file: IO[bytes], by_lines: bool, part: int = PART) -> Iterator[tuple[int, bytes]]:
    """Yield a text in pieces of at least `part` bytes, each with the number of its first line.

    A piece ends with a paragraph, or with any line if lines are sentences.
    """
    lines: list[bytes] = []
    first, size = 1, 0
    for number, line in enumerate(file, 1):
        lines.append(line)
        size += len(line)
        if size >= part and (by_lines or not line.strip() or size >= LONGEST * part):
            yield first, b"".join(lines)
            lines, first, size = [], number + 1, 0
    if lines:
        yield first, b"".join(lines)


def _tokenise(piece: tuple[str, str, str, int, bytes]) -> list[tuple[str, Encoded]]:
    split, tokens, name, first, content = piece
    text = _decode(name, first, content)
    return [(split, Encoded(tokeniser().tokens(text) if tokens == "nltk" else split_at_spaces(text)))]


def split_at_spaces(text: str) -> Iterator[str]:
    """Yield the strings between spaces, and `<eos>` at the end of each line.

    Lines end at line feeds alone: some texts, WikiText among them, have other separators inside a line.

    >>> list(split_at_spaces("ein Satz\\u2028 .\\nnoch einer"))
    ['ein', 'Satz', '.', '<eos>', 'noch', 'einer', '<eos>']
    """
    return (token for line in io.StringIO(text, newline="\n") for token in (*line.split(), EOS))


def _decode(name: str, first: int, content: bytes) -> str:
    """Decode a piece. Errors name the line in the file, since the piece's own positions mean nothing to the user."""
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


@contextlib.contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for reading; files that end with .xz or .gz are unpacked."""
    try:
        with readable(path), OPENERS.get(path.suffix, open)(path, "rb") as file:
            yield file
    except (lzma.LZMAError, EOFError, zlib.error) as error:
        raise LabError(f"{path} cannot be read ({reason(error)}): replace it with a whole file") from error


def is_archive(place: Path) -> bool:
    """Tell by the name whether a place is an archive."""
    return place.name.endswith((*TARS, ".zip"))


def read_texts(place: Path, wanted: Callable[[str], bool] = lambda name: True) -> Iterator[tuple[str, bytes]]:
    """Yield name and bytes of every wanted `.txt` file in a folder, sorted by path, or in an archive, in its order."""
    try:
        with readable(place):
            if place.is_dir():
                yield from _read_folder(place, wanted)
            elif place.suffix == ".zip":
                yield from _read_zip(place, wanted)
            elif place.name.endswith(TARS):
                yield from _read_tar(place, wanted)
            else:
                place.stat()  # a missing place has an error of its own
                raise LabError(
                    f"{place} is neither a folder nor an archive ({', '.join(TARS)}, .zip): name one of these"
                )
    except DAMAGES as error:
        raise LabError(f"{place} cannot be read ({reason(error)}): replace it with a whole archive") from error


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


def digest(place: Path) -> str:
    """Return the checksum of a file, or of all texts in a folder and their names."""
    with readable(place):
        if not place.is_dir():
            return str(describe(place)["sha256"])
        total = hashlib.sha256()
        for name, content in read_texts(place):
            total.update(f"{name}\n{hashlib.sha256(content).hexdigest()}\n".encode())
        return total.hexdigest()
