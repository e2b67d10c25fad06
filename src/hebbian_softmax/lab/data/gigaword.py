"""GigaWord v5 as the Linguistic Data Consortium ships it: SGML, one gzip file for each agency and month.

The paper trains on the articles of 2000 to 2009 and tests on those of 2010, with 250,000 words (section 4.4); its
learning curves use random samples of test articles. The paper names no validation set. Here it is December 2009, the
month before the test year, which is left out of training: tuning then does not look into the test year.

The headline, the dateline and each paragraph of an article are split into sentences separately. Documents of all types
are used ("story", "multi", "advis", "other"), since the paper leaves none out.
"""

import hashlib
import html
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from functools import partial
from itertools import islice
from pathlib import Path

from hebbian_softmax.lab.base.errors import LabError, reason
from hebbian_softmax.lab.base.settings import integer, setting
from hebbian_softmax.lab.data.prepare import CorpusKind, Plan, Workshop
from hebbian_softmax.lab.data.tokenise import find_punkt, tokeniser
from hebbian_softmax.lab.data.unpack import opened
from hebbian_softmax.lab.data.vocabulary import Encoded
from hebbian_softmax.lab.data.workers import in_order

SIZE = 250_000  # words of the vocabulary, including <unk> and <eos>
FIRST, VALID, TEST, END = date(2000, 1, 1), date(2009, 12, 1), date(2010, 1, 1), date(2011, 1, 1)
PERIODS = {"train": "2000 to November 2009", "valid": "December 2009", "test": "2010"}
TOGETHER = 200  # articles tokenised at a time
LONGEST = 1 << 24  # bytes of an article

_NAME = re.compile(r"([a-z]+_eng)_(\d{4})(\d\d)(?:\.gz)?", re.IGNORECASE)
_DOC = re.compile(rb'<DOC\s+id="([A-Za-z]+_ENG_(\d{4})(\d\d)(\d\d)\.\d+)"', re.IGNORECASE)
_PARAGRAPH = re.compile(r"</?(?:P|HEADLINE|DATELINE|TEXT)>", re.IGNORECASE)
_TAG = re.compile(r"</?[A-Za-z][^<>]*>")


@dataclass(frozen=True)
class Options:
    """The options of the corpus."""

    folder: str = setting("", "folder of the LDC's files (default: gigaword in the data root)", str, metavar="DIR")
    eval_articles: int = setting(
        0, "validate and test on N random articles each, as the paper does; 0: on all of them", integer(0)
    )
    seed: int = setting(0, "seed of the choice of these articles", integer(0))


def plan(options: Options, size: int = SIZE) -> Plan:
    """Return the plan with a vocabulary of at most `size` words."""
    if options.seed and not options.eval_articles:
        raise LabError("--seed chooses articles for --eval-articles: give that option, too, or leave out --seed")
    return Plan(
        "gigaword",
        {"eval_articles": options.eval_articles, "seed": options.seed, "size": size},
        partial(_gather, options),
        partial(_at_hand, options),
        size=size,
        documents=True,
        usual=options.eval_articles == 0,
    )


GIGAWORD = CorpusKind("gigaword", "news of 2000 to 2010: the paper's; licensed by the LDC", Options, plan)


def _gather(options: Options, workshop: Workshop) -> None:
    sources = _at_hand(options, workshop.data_root)
    if not sources:
        raise LabError(
            f"{_folder(options, workshop.data_root)} has no files of GigaWord v5 (such as afp_eng_200001.gz): the "
            "corpus is licensed, LDC catalogue number LDC2011T07; name the folder with its files with --folder, or put "
            "them into gigaword in the data root"
        )
    workshop.notes["nltk"] = find_punkt(workshop.data_root, workshop.quiet)
    workshop.note(sources)
    files = list(sources.values())
    chosen = choose_articles(options, files, workshop.processes) if options.eval_articles else None
    workshop.tokenise(_tokenise, ((path, chosen) for path in files), len(files))
    for split, tokens in workshop.gathered.tokens.items():
        if not tokens:
            raise LabError(
                f"{_folder(options, workshop.data_root)} has no articles of {PERIODS[split]} for the {split} split: "
                "add those files of GigaWord v5"
            )
    workshop.notes["articles"] = workshop.gathered.documents()


def _folder(options: Options, root: Path) -> Path:
    return Path(options.folder) if options.folder else root / "gigaword"


def _at_hand(options: Options, root: Path) -> dict[str, Path]:
    """Return the files of 2000 to 2010, month by month, since the corpus is read in chronological order."""
    folder = _folder(options, root)
    found: dict[tuple[str, str, str], Path] = {}
    for path in sorted(folder.rglob("*_*")) if folder.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match and FIRST.year <= int(match[2]) < END.year and path.is_file():
            other = found.setdefault((match[2], match[3], match[1].lower()), path)
            if other != path:
                raise LabError(f"{other} and {path} are the same month twice: remove one of them")
    return {found[month].relative_to(folder).as_posix(): found[month] for month in sorted(found)}


def _split(day: date) -> str | None:
    if not FIRST <= day < END:
        return None
    return "train" if day < VALID else "valid" if day < TEST else "test"


def choose_articles(options: Options, files: list[Path], processes: int) -> frozenset[str]:
    """Return the articles to evaluate on: in each split, those with the smallest checksums of the seed and the name."""
    ranked: dict[str, list[tuple[bytes, str]]] = {"valid": [], "test": []}
    late = [path for path in files if path.stem[-6:] >= f"{VALID:%Y%m}"]
    for names in in_order(_names, late, processes):
        for split, name in names:
            if split in ranked:
                ranked[split].append((hashlib.sha256(f"{options.seed} {name}".encode()).digest(), name))
    return frozenset(name for names in ranked.values() for _, name in sorted(names)[: options.eval_articles])


def _names(path: Path) -> list[tuple[str | None, str]]:
    return [(_split(day), name) for name, day, _ in read_articles(path)]


def _tokenise(part: tuple[Path, frozenset[str] | None]) -> list[tuple[str, Encoded]]:
    path, chosen = part
    found: dict[str, Encoded] = {}
    wanted = (
        (split, day, paragraphs(sgml))
        for name, day, sgml in read_articles(path)
        if (split := _split(day)) and (split == "train" or chosen is None or name in chosen)
    )
    while articles := list(islice(wanted, TOGETHER)):
        every = tokeniser().tokens_of_each(texts for _, _, texts in articles)
        for (split, day, _), tokens in zip(articles, every, strict=True):
            found.setdefault(split, Encoded()).add(tokens, day.toordinal())
    return list(found.items())


def read_articles(path: Path) -> Iterator[tuple[str, date, bytes]]:
    """Yield name, day and SGML of each article, with only one of them in memory."""
    try:
        with opened(path) as file:
            name: str | None = None
            day, lines, size = date.min, list[bytes](), 0
            for number, line in enumerate(iter(lambda: file.readline(LONGEST), b""), 1):
                if line.startswith(b"<DOC") and (match := _DOC.match(line)):
                    if name is not None:
                        raise ValueError(f"line {number}: the article {name} does not end")
                    name, day = match[1].decode(), date(int(match[2]), int(match[3]), int(match[4]))
                    lines, size = [], 0
                elif line.startswith(b"<DOC"):
                    raise ValueError(f"line {number}: {line.strip()[:80]!r} names no article")
                elif line.startswith(b"</DOC") and name is not None:
                    yield name, day, b"".join(lines)
                    name = None
                elif name is not None:
                    lines.append(line)
                    size += len(line)
                    if size > LONGEST:
                        raise ValueError(f"line {number}: the article {name} has more than {LONGEST:,} bytes")
            if name is not None:
                raise ValueError(f"the article {name} does not end")
    except ValueError as error:
        raise LabError(f"{path} is not a whole file of GigaWord v5 ({reason(error)}): copy it again") from error


def paragraphs(sgml: bytes) -> list[str]:
    """Return the texts between the tags, with entities replaced by their characters."""
    try:
        decoded = sgml.decode()
    except UnicodeDecodeError:
        decoded = sgml.decode("latin-1")
    texts = [html.unescape(_TAG.sub(" ", text)) for text in _PARAGRAPH.split(decoded)]
    return [text for text in texts if text.strip()]
