"""Preparing a corpus: read its sources, tokenise on all cores, choose the vocabulary, write the folder."""

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
from hebbian_softmax.lab.base.files import TEMPORARY, cannot_write, locked
from hebbian_softmax.lab.base.progress import Progress
from hebbian_softmax.lab.base.settings import REQUIRED
from hebbian_softmax.lab.data.corpus import MANIFEST, Corpus, corpora_root, describe, open_corpus, write_corpus
from hebbian_softmax.lab.data.root import data_root as find_data_root
from hebbian_softmax.lab.data.vocabulary import Encoded, Gathered
from hebbian_softmax.lab.data.workers import cores, in_order

Input = TypeVar("Input")
Options = TypeVar("Options")


@dataclass
class Workshop:
    """What a corpus needs to read its sources, and where it puts what it read."""

    corpus: str
    data_root: Path
    gathered: Gathered
    processes: int
    quiet: bool
    sources: list[dict[str, Any]] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)

    def note(self, sources: Mapping[str, Path]) -> None:
        """Note the files that the corpus is made from, by name, with their checksums and times."""
        for name, path in sources.items():
            with readable(path):
                modified = path.stat().st_mtime_ns
                self.sources.append({"name": name, **describe(path), "modified": modified})

    def tokenise(
        self, function: Callable[[Input], Sequence[tuple[str, Encoded]]], inputs: Iterable[Input], total: int | None
    ) -> None:
        """Gather `function` of all inputs, which gives documents for one split or several."""
        with Progress(self.corpus, total=total, unit="parts", quiet=self.quiet) as progress:
            for number, results in enumerate(in_order(function, inputs, self.processes), 1):
                for split, encoded in results:
                    self.gathered.add(split, encoded)
                progress.update(number, {"million_tokens": sum(self.gathered.tokens.values()) / 1e6})


@dataclass(frozen=True)
class Plan:
    """A corpus to prepare: `gather` reads it, the rest says how its vocabulary is chosen and what it is called."""

    corpus: str
    settings: Mapping[str, Any]  # all that decides the ids, apart from the bytes of the sources in the data root
    gather: Callable[[Workshop], None]
    at_hand: Callable[
        [Path], Mapping[str, Path]
    ]  # the sources there are in a data root, by name, as `gather` notes them
    minimum: int = 1  # occurrences in training of a word that is kept
    size: int | None = None  # of the vocabulary
    documents: bool = False  # whether document boundaries and dates are kept
    usual: bool = True  # whether the settings are the corpus's usual ones, so that it goes by its plain name
    check: Callable[[Workshop, int], None] = lambda workshop, vocabulary: None  # refuses what is not the known corpus

    @property
    def name(self) -> str:
        """The corpus's own name, or for unusual settings one that no other settings give."""
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
    """The corpus of a plan, and whether it was made now; one that is there already is opened.

    It goes to the folder `name` (default: the plan's) under `corpora` in the cache folder. With `renew` one whose
    sources have changed since is made again. Sources that are gone are no change: a corpus does not need them.
    """
    require("numpy")
    folder, root = corpora_root() / (name or plan.name), find_data_root(data_root)
    found, changed = _there(folder, plan, root, renew)
    if found is not None and changed is None:
        return found, False
    scratch = folder.with_name(f"{TEMPORARY}parts-{folder.name}")
    try:
        with _alone(folder):
            found, changed = _there(folder, plan, root, renew)
            if found is not None and changed is None:  # another process has just made it
                return found, False
            if changed is not None:
                say(f"{changed} is not what {folder.name} was made from: making it again")
            for left in folder.parent.glob(f"{TEMPORARY}*"):
                if re.fullmatch(rf"(\d+|old|parts)-{re.escape(folder.name)}", left.name.removeprefix(TEMPORARY)):
                    shutil.rmtree(left)  # of a process that died, since nobody else writes this corpus now
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
            raise  # in writing
        raise LabError(f"{error.filename} cannot be read ({reason(error)}): make it readable") from error
    vocabulary = gathered.choose(plan.minimum, plan.size)
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


def _there(folder: Path, plan: Plan, root: Path, renew: bool) -> tuple[Corpus | None, Path | None]:
    """The corpus if it is there, and with `renew` a source that is not what it was made from."""
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
    """The first source that is new or has other bytes; one of the same length and time is not read."""
    before = {source["name"]: source for source in corpus.manifest["sources"]}
    for name, path in sources.items():
        with readable(path):
            old, now = before.get(name), path.stat()
            if old is None or old["bytes"] != now.st_size:
                return path
            if old.get("modified") != now.st_mtime_ns and old["sha256"] != describe(path)["sha256"]:
                return path
    return None


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the lock on this corpus; another process that prepares it is waited for."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = folder.with_name(f".{folder.name}.lock")
    lock.touch()
    with locked(lock, wait=False) as free:
        if free:
            yield
            return
    say(f"{folder.name} is being prepared by another process: waiting for it")
    with locked(lock, wait=True):
        yield


@contextlib.contextmanager
def readable(path: Path, advice: str = "replace it with a whole one") -> Iterator[None]:
    """Errors in reading a source as errors that name it."""
    try:
        yield
    except FileNotFoundError as error:
        raise LabError(f"{path} is not there: name an existing file or folder") from error
    except OSError as error:
        raise LabError(f"{path} cannot be read ({reason(error)}): {advice}") from error
