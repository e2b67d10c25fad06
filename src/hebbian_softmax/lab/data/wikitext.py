"""WikiText-2 and WikiText-103 (Merity et al., 2016): Wikipedia articles that are tokenised already and have `<unk>`.

Each line ends with one `<eos>`, as in the counts that papers give. The files are `wiki.train.tokens` and so on. They
are in the official archive or, packed with xz or not, in a folder of the data root that has the corpus's name.
"""

import contextlib
import lzma
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

from hebbian_softmax.lab.base.errors import LabError, reason
from hebbian_softmax.lab.data.corpus import SPLITS
from hebbian_softmax.lab.data.download import download
from hebbian_softmax.lab.data.prepare import CorpusKind, NoOptions, Plan, Workshop, readable
from hebbian_softmax.lab.data.texts import cut, split_at_spaces
from hebbian_softmax.lab.data.unpack import LIMIT, Allowance, Bounded
from hebbian_softmax.lab.data.vocabulary import Encoded

ADDRESS = "https://wikitext.smerity.com/"  # the site of the corpus's author
PART = 4 << 20  # bytes tokenised at a time


@dataclass(frozen=True)
class Official:
    """The published counts of a corpus."""

    name: str
    tokens: tuple[int, int, int]  # of train, valid and test, one `<eos>` a line included
    words: int  # different words, `<eos>` included
    sha256: str | None = None  # of the archive


def plan(official: Official) -> Plan:
    """Return the plan for the corpus that has these counts."""
    return Plan(
        official.name, {}, partial(_gather, official), partial(_at_hand, official), check=partial(_check, official)
    )


def _kind(help: str, official: Official) -> CorpusKind[NoOptions]:
    return CorpusKind(official.name, help, NoOptions, lambda options: plan(official))


WIKITEXT_2 = _kind(
    "2 million words of Wikipedia; a vocabulary of 33,278",
    Official(
        "wikitext-2",
        (2_088_628, 217_646, 245_569),
        33_278,
        "92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c",
    ),
)
WIKITEXT_103 = _kind(
    "103 million words of Wikipedia: the paper's; a vocabulary of 267,735",
    Official(
        "wikitext-103",
        (103_227_021, 217_646, 245_569),
        267_735,
        "242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590",
    ),
)


def _gather(official: Official, workshop: Workshop) -> None:
    places = _look(official, workshop.data_root)
    if len(places) < len(SPLITS):
        archive = workshop.data_root / official.name / f"{official.name}-v1.zip"
        try:
            download(ADDRESS + archive.name, archive, sha256=official.sha256, quiet=workshop.quiet)
        except LabError as error:
            if not places:
                raise
            missing = " and ".join(f"wiki.{split}.tokens" for split in SPLITS if split not in places)
            message = f"{archive.parent} has no {missing}, and the whole archive cannot be had: {error}"
            raise LabError(message) from error
        places = dict.fromkeys(SPLITS, archive)
    workshop.note({path.name: path for path in places.values()})
    parts = ((split, str(path), part) for split, path in places.items() for part in _parts(official, split, path))
    workshop.tokenise(_tokenise, parts, None)


def _at_hand(official: Official, root: Path) -> dict[str, Path]:
    places = _look(official, root)
    return {path.name: path for path in places.values()} if len(places) == len(SPLITS) else {}


def _look(official: Official, root: Path) -> dict[str, Path]:
    """Return the file that holds each split, where there is one: a text, or the archive for all splits."""
    folder, archive = root / official.name, f"{official.name}-v1.zip"
    for path in (root / archive, folder / archive):
        if path.exists():
            return dict.fromkeys(SPLITS, path)
    texts = {}
    for split in SPLITS:
        for path in (folder / f"wiki.{split}.tokens.xz", folder / f"wiki.{split}.tokens"):
            if path.exists():
                texts[split] = path
    return texts


def _parts(official: Official, split: str, path: Path) -> Iterator[bytes]:
    """Yield the lines of a split, some megabytes at a time."""
    advice = f"replace it with {ADDRESS}{official.name}-v1.zip, or delete it and it will be downloaded"
    try:
        with readable(path, advice), _open(official, split, path) as file:
            for piece in cut(Bounded(file, Allowance(path, LIMIT)), path, by_lines=True, part=PART):
                yield piece.content
    except (
        zipfile.BadZipFile,
        zlib.error,
        lzma.LZMAError,
        EOFError,
        NotImplementedError,
        KeyError,
    ) as error:
        raise LabError(f"{path} cannot be read ({reason(error)}): {advice}") from error


@contextlib.contextmanager
def _open(official: Official, split: str, path: Path) -> Iterator[IO[bytes]]:
    if path.suffix == ".zip":
        with zipfile.ZipFile(path) as archive, archive.open(f"{official.name}/wiki.{split}.tokens") as file:
            yield file
    else:
        with lzma.open(path) if path.suffix == ".xz" else open(path, "rb") as file:
            yield file


def _tokenise(part: tuple[str, str, bytes]) -> list[tuple[str, Encoded]]:
    split, path, lines = part
    try:
        text = lines.decode()
    except UnicodeDecodeError as error:
        raise LabError(
            f"{path} holds bytes in its {split} split that are not UTF-8 ({error}): replace it with the official file"
        ) from error
    return [(split, Encoded(split_at_spaces(text)))]


def _check(official: Official, workshop: Workshop, words: int) -> None:
    """Refuse sources that do not have the published counts."""
    found = (*workshop.gathered.tokens.values(), words)
    expected = (*official.tokens, official.words)
    if found != expected:
        places = dict.fromkeys(map(str, _look(official, workshop.data_root).values()))
        raise LabError(
            f"{' and '.join(places)}: not {official.name}, with {found[0]:,} / {found[1]:,} / {found[2]:,} tokens and "
            f"{words:,} words where it has {expected[0]:,} / {expected[1]:,} / {expected[2]:,} and {official.words:,}; "
            f"get {ADDRESS}{official.name}-v1.zip"
        )
