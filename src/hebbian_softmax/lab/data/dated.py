"""News in time order: one JSON object a line with `date`, `text` and perhaps `title`, split by dates.

`reuters` is Reuters-21578, newswire of 1987: a small stand-in for GigaWord's licensed news. Its test days, 19 and 20
October, are those of the stock market crash, four months after the last training day: a test of sudden change.
Tokens are made as the paper makes GigaWord's: NLTK's sentences and words, in lower case.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path

from hebbian_softmax.lab.base.errors import LabError, reason
from hebbian_softmax.lab.data.corpus import SPLITS
from hebbian_softmax.lab.data.prepare import Plan, Workshop
from hebbian_softmax.lab.data.texts import OPENERS, digest, opened
from hebbian_softmax.lab.data.tokenise import find_punkt, nltk_version, tokeniser
from hebbian_softmax.lab.data.vocabulary import Encoded

REUTERS = "news/reuters-21578.jsonl"  # in the data root, packed or not
MINIMUM = 3  # occurrences in training of a word of the vocabulary, as in WikiText
PART = 1 << 20  # bytes tokenised at a time

Days = tuple[date, date]  # the first and the last


def parse_days(text: str) -> Days:
    """The days of a split.

    >>> parse_days("1987-06-18..1987-06-29")
    (datetime.date(1987, 6, 18), datetime.date(1987, 6, 29))
    """
    try:
        first, last = (date.fromisoformat(day) for day in text.split(".."))
    except ValueError as error:
        raise ValueError(f"must be two dates as in 1987-02-01..1987-06-17, not {text!r}") from error
    if first > last:
        raise ValueError(f"must begin before it ends, not {text!r}")
    return first, last


@dataclass(frozen=True)
class Options:
    """The days of each split, the rarest word that is kept, and the file where it is not Reuters."""

    file: str = ""
    train: Days = (date(1987, 2, 1), date(1987, 6, 17))
    valid: Days = (date(1987, 6, 18), date(1987, 6, 29))
    test: Days = (date(1987, 10, 19), date(1987, 10, 20))
    minimum: int = MINIMUM


def plan(options: Options) -> Plan:
    """Reuters, or any other file of dated articles."""
    days = {split: getattr(options, split) for split in SPLITS}
    for first, second in (("train", "valid"), ("train", "test"), ("valid", "test")):
        if days[first][0] <= days[second][1] and days[second][0] <= days[first][1]:
            raise LabError(f"the days of {first} and {second} overlap: give each day to one split")
    settings = {split: "..".join(map(str, span)) for split, span in days.items()} | {"minimum": options.minimum}
    if options.file:
        settings["file"] = digest(Path(options.file))
    return Plan(
        "dated" if options.file else "reuters",
        settings,
        partial(_gather, options),
        partial(_at_hand, options),
        options.minimum,
        documents=True,
        usual=options == Options(),
    )


def _gather(options: Options, workshop: Workshop) -> None:
    sources = _at_hand(options, workshop.data_root)
    if not sources:
        raise LabError(
            f"{workshop.data_root / REUTERS} is not there, with .xz, .gz or neither: make it from the Reuters-21578 "
            "collection, one JSON object a line with date, title and text, or name the folder that has it with "
            "--data-root or HEBBIAN_DATA"
        )
    find_punkt(workshop.data_root, workshop.quiet)
    workshop.note(sources)
    (path,) = sources.values()
    workshop.tokenise(_tokenise, ((options, str(path), *part) for part in _parts(path)), None)
    for split, tokens in workshop.gathered.tokens.items():
        if not tokens:
            first, last = getattr(options, split)
            raise LabError(
                f"{path} has no words of {first} to {last}, the days of the {split} split: "
                f"give other days with --{split}"
            )
    workshop.notes["articles"] = workshop.gathered.documents()
    workshop.notes["nltk"] = nltk_version()


def _at_hand(options: Options, root: Path) -> dict[str, Path]:
    paths = [Path(options.file)] if options.file else [root / f"{REUTERS}{suffix}" for suffix in ("", *OPENERS)]
    return {path.name: path for path in [path for path in paths if path.exists()][:1]}


def _parts(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a file, about a megabyte at a time, and the number of the first."""
    number = 1
    with opened(path) as file:
        while lines := file.readlines(PART):
            yield number, b"".join(lines)
            number += len(lines)


def _tokenise(part: tuple[Options, str, int, bytes]) -> list[tuple[str, Encoded]]:
    options, path, number, lines = part
    articles = []
    for offset, line in enumerate(lines.split(b"\n")):
        if line.strip():
            try:
                articles.append(_article(line))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise LabError(
                    f"{path}, line {number + offset} is not an article ({reason(error)}): "
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
    """Its day, and the title and the text, which are no sentence together."""
    article = json.loads(line)
    texts = [article.get("title") or "", article["text"]]
    # JSON can spell half a surrogate pair, which no file of words could hold.
    texts = [text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") for text in texts]
    return date.fromisoformat(article["date"][:10]), texts
