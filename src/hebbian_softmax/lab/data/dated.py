"""News in time order: a file with one JSON object a line (`date`, `text` and perhaps `title`), split by dates.

`reuters` is Reuters-21578, newswire of 1987: a small stand-in for GigaWord's licensed news. Its test days, 19 and 20
October, are those of the stock market crash, four months after the last training day: a test of sudden change.
Tokens are NLTK's sentences and words in lower case, as in the paper's GigaWord.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from hebbian_softmax.lab.base.errors import LabError, reason
from hebbian_softmax.lab.base.json_files import from_json
from hebbian_softmax.lab.base.settings import REQUIRED, integer, setting
from hebbian_softmax.lab.data.corpus import SPLITS
from hebbian_softmax.lab.data.prepare import CorpusKind, Plan, Workshop
from hebbian_softmax.lab.data.texts import Piece, cut, digest
from hebbian_softmax.lab.data.tokenise import find_punkt, tokeniser
from hebbian_softmax.lab.data.unpack import LIMIT, OPENERS, opened, unpack_limit
from hebbian_softmax.lab.data.vocabulary import Encoded

REUTERS_FILE = "news/reuters-21578.jsonl"  # in the data root, packed or not
MINIMUM = 3  # occurrences in training that keep a word in the vocabulary, as in WikiText
SPAN = "FIRST..LAST"
NEWLINE = b"\n"


class Days(NamedTuple):
    """The days of a split, from the first to the last, both included."""

    first: date
    last: date

    def __str__(self) -> str:
        return f"{self.first}..{self.last}"


def parse_days(text: str) -> Days:
    """Parse the days of a split.

    >>> parse_days("1987-06-18..1987-06-29").last
    datetime.date(1987, 6, 29)
    """
    try:
        first, last = (date.fromisoformat(day) for day in text.split(".."))
    except ValueError as error:
        message = f"must be two dates as in 1987-02-01..1987-06-17, not {text!r}"
        raise argparse.ArgumentTypeError(message) from error
    if first > last:
        raise argparse.ArgumentTypeError(f"must begin before it ends, not {text!r}")
    return Days(first, last)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of Reuters."""

    train: Days = setting(Days(date(1987, 2, 1), date(1987, 6, 17)), "days of training", parse_days, metavar=SPAN)
    valid: Days = setting(Days(date(1987, 6, 18), date(1987, 6, 29)), "days of validation", parse_days, metavar=SPAN)
    test: Days = setting(Days(date(1987, 10, 19), date(1987, 10, 20)), "days of the test", parse_days, metavar=SPAN)
    minimum: int = setting(MINIMUM, "keep words that occur at least N times in training", integer(1))
    unpack_limit: int = unpack_limit()


@dataclass(frozen=True, kw_only=True)
class FileOptions(Options):
    """The options of any other file of dated articles."""

    file: str = setting(REQUIRED, "the articles: .jsonl, .jsonl.xz or .jsonl.gz", str, metavar="FILE")
    train: Days = setting(REQUIRED, "days of training, as in 1987-02-01..1987-06-17", parse_days, metavar=SPAN)
    valid: Days = setting(REQUIRED, "days of validation", parse_days, metavar=SPAN)
    test: Days = setting(REQUIRED, "days of the test", parse_days, metavar=SPAN)


def plan(options: Options) -> Plan:
    """Return the plan for Reuters or for any other file of dated articles."""
    days = {split: getattr(options, split) for split in SPLITS}
    for first, second in combinations(SPLITS, 2):
        if days[first][0] <= days[second][1] and days[second][0] <= days[first][1]:
            raise LabError(f"the days of {first} and {second} overlap: give each day to one split")
    settings: dict[str, Any] = {split: str(span) for split, span in days.items()} | {"minimum": options.minimum}
    if isinstance(options, FileOptions):
        settings["file"] = digest(Path(options.file))
    return Plan(
        "dated" if isinstance(options, FileOptions) else "reuters",
        settings,
        partial(_gather, options),
        partial(_at_hand, options),
        options.minimum,
        documents=True,
        usual=replace(options, unpack_limit=LIMIT) == Options(),
    )


REUTERS = CorpusKind("reuters", "newswire of 1987 in time order; tested on the October crash", Options, plan)
DATED = CorpusKind(
    "dated",
    "any news in time order: your own file, one JSON object a line with date, text and perhaps title",
    FileOptions,
    plan,
)


def _gather(options: Options, workshop: Workshop) -> None:
    sources = _at_hand(options, workshop.data_root)
    if not sources:
        raise LabError(
            f"{workshop.data_root / REUTERS_FILE} is not there, with .xz, .gz or neither: make it from the "
            "Reuters-21578 collection, one JSON object a line with date, title and text, or name the folder that has "
            "it with --data-root or HEBBIAN_DATA"
        )
    workshop.notes["nltk"] = find_punkt(workshop.data_root, workshop.quiet)
    workshop.note(sources)
    (path,) = sources.values()
    workshop.tokenise(_tokenise, ((options, str(path), piece) for piece in _parts(path, options.unpack_limit)), None)
    for split, tokens in workshop.gathered.tokens.items():
        if not tokens:
            first, last = getattr(options, split)
            raise LabError(
                f"{path} has no words of {first} to {last}, the days of the {split} split: "
                f"give other days with --{split}"
            )
    workshop.notes["articles"] = workshop.gathered.documents()


def _at_hand(options: Options, root: Path) -> dict[str, Path]:
    file = isinstance(options, FileOptions) and Path(options.file)
    paths = [file] if file else [root / f"{REUTERS_FILE}{suffix}" for suffix in ("", *OPENERS)]
    return {path.name: path for path in [path for path in paths if path.exists()][:1]}


def _parts(path: Path, limit: int) -> Iterator[Piece]:
    """Yield the lines of a file, about a megabyte at a time."""
    with opened(path, limit) as file:
        for piece in cut(file, path, by_lines=True):
            if not piece.ended:
                line = piece.first + piece.content.count(NEWLINE)
                raise LabError(f"{path}, line {line:,} is too long for an article: take it out")
            yield piece


def _tokenise(part: tuple[Options, str, Piece]) -> list[tuple[str, Encoded]]:
    options, path, piece = part
    articles = []
    for offset, line in enumerate(piece.content.split(NEWLINE)):
        if line.strip():
            try:
                articles.append(_article(line))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise LabError(
                    f"{path}, line {piece.first + offset} is not an article ({reason(error)}): "
                    "give each line a JSON object with date (as in 1987-02-26), text and perhaps title"
                ) from error
    results = []
    for split in SPLITS:
        first, last = getattr(options, split)
        inside = [(day, texts) for day, texts in articles if first <= day <= last]
        encoded = Encoded()
        for (day, _), tokens in zip(inside, tokeniser().tokens_of_each(texts for _, texts in inside), strict=True):
            encoded.add(tokens, day.toordinal())
        if inside:
            results.append((split, encoded))
    return results


def _article(line: bytes) -> tuple[date, list[str]]:
    """Return an article's day, and its title and text, which are split into sentences separately."""
    article = from_json(line)
    texts = [article.get("title") or "", article["text"]]
    # JSON can spell half a surrogate pair, which cannot be written to a file in UTF-8.
    texts = [text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") for text in texts]
    return date.fromisoformat(article["date"][:10]), texts
