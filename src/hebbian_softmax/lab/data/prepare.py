"""Prepare a corpus: read its sources, tokenise on all cores, choose the vocabulary, write the folder."""

import contextlib
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Generic, TypeVar

from hebbian_softmax.lab.base.console import say
from hebbian_softmax.lab.base.errors import LabError, reason
from hebbian_softmax.lab.base.extras import require
from hebbian_softmax.lab.base.files import TEMPORARY, cannot_write, locked, locked_in_turn
from hebbian_softmax.lab.base.progress import Progress
from hebbian_softmax.lab.base.settings import REQUIRED
from hebbian_softmax.lab.data.corpus import (
    EOS,
    MANIFEST,
    UNK,
    Corpus,
    corpora_root,
    describe,
    open_corpus,
    write_corpus,
)
from hebbian_softmax.lab.data.download import check_download
from hebbian_softmax.lab.data.root import data_root as find_data_root
from hebbian_softmax.lab.data.vocabulary import Encoded, Gathered
from hebbian_softmax.lab.data.workers import cores, in_order

Input = TypeVar("Input")
Options = TypeVar("Options")


@dataclass
class Workshop:
    """The place where a corpus is prepared: where its sources are, and where its documents, sources and notes go."""

    corpus: str
    data_root: Path
    gathered: Gathered
    processes: int
    quiet: bool
    sources: list[dict[str, Any]] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)

    def note(self, sources: Mapping[str, Path]) -> None:
        """Record the files that the corpus is made from, given by name, with their checksums and times."""
        for name, path in sources.items():
            with readable(path):
                modified = path.stat().st_mtime_ns
                check_download(path)
                self.sources.append({"name": name, **describe(path), "modified": modified})

    def tokenise(
        self, function: Callable[[Input], Sequence[tuple[str, Encoded]]], inputs: Iterable[Input], total: int | None
    ) -> None:
        """Gather the documents that `function` makes of each input, for one split or several."""
        with Progress(self.corpus, total=total, unit="parts", quiet=self.quiet) as progress:
            for number, results in enumerate(in_order(function, inputs, self.processes), 1):
                for split, encoded in results:
                    self.gathered.add(split, encoded)
                progress.update(number, {"tokens": sum(self.gathered.tokens.values())})


@dataclass(frozen=True)
class Plan:
    """How to prepare a corpus: `gather` reads it; the rest decides its vocabulary and its name."""

    corpus: str
    settings: Mapping[str, Any]  # everything that decides the ids, except for the sources in the data root
    gather: Callable[[Workshop], None]
    at_hand: Callable[[Path], Mapping[str, Path]]
    """Returns the sources in a data root, with the names under which `gather` records them."""
    minimum: int = 1  # occurrences in training that keep a word in the vocabulary
    size: int | None = None  # the largest size of the vocabulary
    documents: bool = False  # whether document boundaries and dates are kept
    usual: bool = True  # whether the options are at their defaults, so that the corpus has its plain name
    check: Callable[[Workshop, int], None] = lambda workshop, vocabulary: None
    """Raises an error if the gathered text, or the size of its vocabulary, is not that of the corpus."""

    @property
    def name(self) -> str:
        """The name of the corpus, with a code of the settings if they are not the usual ones."""
        text = json.dumps(self.settings, sort_keys=True)
        return self.corpus if self.usual else f"{self.corpus}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


@dataclass(frozen=True)
class NoOptions:
    """The options of a corpus that has none."""


@dataclass(frozen=True)
class CorpusKind(Generic[Options]):
    """A corpus that can be prepared: declared once, by the module that reads its sources, and listed in registry.py."""

    name: str
    help: str  # a noun phrase; descriptions of commands quote it up to its first colon or semicolon
    options: type[Options]  # a dataclass whose fields are `setting`s: the options of `hebbian data prepare NAME`
    plan: Callable[[Options], Plan]

    @property
    def needs_options(self) -> bool:
        """Whether the name alone does not say which texts are meant, since files or days must be given, too."""
        return any(field.default is REQUIRED for field in fields(self.options))  # type: ignore[arg-type]

    def usual(self) -> Plan:
        """Return the plan with all options at their defaults."""
        return self.plan(self.options())


def prepare(
    plan: Plan,
    *,
    name: str = "",
    data_root: str = "",
    processes: int | None = None,
    quiet: bool = False,
    renew: bool = True,
) -> tuple[Corpus, bool]:
    """Return the corpus of a plan, and whether it was made by this call; a corpus that exists already is opened.

    The corpus is the folder `name` (default: the plan's name) under `corpora` in the cache folder. With `renew`, a
    corpus whose sources have changed since is made again. Missing sources do not count as changed: a prepared corpus
    does not need them.
    """
    require("numpy")
    folder, root = corpora_root() / (name or plan.name), find_data_root(data_root)
    found, changed = _existing(folder, plan, root, renew)
    if found is not None and changed is None:
        _tidy(folder)
        return found, False
    scratch = folder.with_name(f"{TEMPORARY}parts-{folder.name}")
    try:
        with _alone(folder):
            _put_back(folder)
            found, changed = _existing(folder, plan, root, renew)
            if found is not None and changed is None:  # another process has made it in the meantime
                return found, False
            if changed is not None:
                say(f"{changed} is not the file that {folder.name} was made from: making it again")
            for left in _leavings(folder):
                shutil.rmtree(left)
            scratch.mkdir()
            gathered = Gathered(scratch)
            try:
                return _make(folder, plan, Workshop(plan.corpus, root, gathered, processes or cores(), quiet)), True
            finally:
                gathered.close()
                shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        raise LabError(f"{cannot_write(folder, error)}, with HEBBIAN_CACHE") from error


def _make(folder: Path, plan: Plan, workshop: Workshop) -> Corpus:
    gathered = workshop.gathered
    try:
        plan.gather(workshop)
    except OSError as error:
        if error.filename is None or Path(error.filename).is_relative_to(gathered.folder):
            raise  # writing failed, not reading
        raise LabError(f"{error.filename} cannot be read ({reason(error)}): make it readable") from error
    vocabulary = gathered.choose(plan.minimum, plan.size)
    if gathered.tokens["train"] and set(vocabulary.words) <= {EOS, UNK}:
        raise LabError(
            f"no word occurs {plan.minimum:,} times in the training text, so all would become {UNK}: "
            "take a longer text, or a smaller --minimum where the command has it"
        )
    plan.check(workshop, len(vocabulary.words))
    arrays = gathered.arrays() if plan.documents else {}
    if plan.documents and vocabulary.first_days.any():
        arrays["first_days"] = vocabulary.first_days
    return write_corpus(
        folder,
        folder.name,
        vocabulary.splits(),
        vocabulary.words,
        vocabulary.counts,
        {"corpus": plan.corpus, **plan.settings},
        workshop.sources,
        arrays,
        workshop.notes,
    )


def _existing(folder: Path, plan: Plan, root: Path, renew: bool) -> tuple[Corpus | None, Path | None]:
    """Return the corpus if it exists and, with `renew`, the first source that has changed since."""
    if not (folder / MANIFEST).exists():
        return None, None
    found = open_corpus(folder)
    expected = {"corpus": plan.corpus, **plan.settings}
    if found.settings != json.loads(json.dumps(expected)):
        keys = sorted(key for key in {*expected, *found.settings} if expected.get(key) != found.settings.get(key))
        raise LabError(
            f"{folder} was prepared with other settings ({', '.join(keys)}): choose another --name or delete it"
        )
    return found, _changed(found, plan.at_hand(root)) if renew else None


def _changed(corpus: Corpus, sources: Mapping[str, Path]) -> Path | None:
    """Return the first source that is new or has other bytes. A source of the same length and time is not read."""
    before = {source["name"]: source for source in corpus.manifest["sources"]}
    for name, path in sources.items():
        with readable(path):
            old, now = before.get(name), path.stat()
            if old is None or old["bytes"] != now.st_size:
                return path
            if old.get("modified") != now.st_mtime_ns and old["sha256"] != describe(path)["sha256"]:
                return path
    return None


def _leavings(folder: Path) -> list[Path]:
    """Return the folders of processes that write this corpus; if none holds its lock, these processes have died."""
    name = re.compile(rf"{re.escape(TEMPORARY)}(\d+|old|parts)-{re.escape(folder.name)}")
    return [path for path in folder.parent.glob(f"{TEMPORARY}*") if name.fullmatch(path.name)]


def _put_back(folder: Path) -> None:
    """Give the corpus its name again, if a process died after it had set it aside and before a new one was in place."""
    aside = folder.with_name(f"{TEMPORARY}old-{folder.name}")
    if not folder.exists() and (aside / MANIFEST).exists():
        aside.rename(folder)


def _tidy(folder: Path) -> None:
    """Remove what a process left that died after the corpus was in place."""
    if _leavings(folder):
        # Whoever cannot write here, as in a shared cache, can still use the corpus.
        with contextlib.suppress(OSError), locked(_lock(folder), wait=False) as free:
            for left in _leavings(folder) if free else ():
                shutil.rmtree(left)


def _lock(folder: Path) -> Path:
    """Return the file to lock while this corpus is written."""
    lock = folder.with_name(f".{folder.name}.lock")
    lock.touch()
    return lock


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the lock on this corpus, after waiting for any other process that prepares it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = _lock(folder)
    with locked_in_turn(lock, f"{folder.name} is being prepared by another process"):
        yield


@contextlib.contextmanager
def readable(path: Path, advice: str = "replace it with a whole one") -> Iterator[None]:
    """Turn errors in reading a source into errors that name it."""
    try:
        yield
    except FileNotFoundError as error:
        raise LabError(f"{path} is not there: name an existing file or folder") from error
    except OSError as error:
        raise LabError(f"{path} cannot be read ({reason(error)}): {advice}") from error
