"""The rows of the paper's table that come from memories: a model alone, with the cache, with cache and MbPA."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from hebbian_softmax.lab.base.progress import Progress
from hebbian_softmax.lab.data.corpus import Corpus
from hebbian_softmax.lab.language.evaluation import Score, score, text_of
from hebbian_softmax.lab.language.memories.grid import Grids
from hebbian_softmax.lab.language.memories.reading import Memories, mixture, read_parts
from hebbian_softmax.lab.language.memories.store import Store, digest
from hebbian_softmax.lab.language.memories.sweep import Sweep, sweep
from hebbian_softmax.lab.language.model import LanguageModel
from hebbian_softmax.lab.language.names import TEXTS

ALONE = Memories(None, None)


@dataclass(frozen=True)
class Row:
    """A mixture and its perplexities, by split."""

    memories: Memories
    scores: Mapping[str, Score]

    def as_plain(self) -> dict[str, Any]:
        settings = {
            name: None if each is None else asdict(each)
            for name, each in (("cache", self.memories.cache), ("mbpa", self.memories.mbpa))
        }
        return {
            "name": self.memories.name,
            **settings,
            "scores": {split: asdict(each) for split, each in self.scores.items()},
        }


@dataclass(frozen=True)
class MemoryRows:
    """The rows, each with more memories than the one before, and the words' log-probabilities they come from."""

    rows: Sequence[Row]
    parts: Mapping[str, Mapping[str, Tensor]]  # by split, then by `model`, `cache`, `mbpa`
    sweep: Sweep | None = None

    def losses(self, split: str) -> list[Tensor]:
        """-log p of every word, row by row."""
        return [mixture(self.parts[split], row.memories) for row in self.rows]


def memory_rows(
    model: LanguageModel,
    corpus: Corpus,
    *,
    grids: Grids | None = None,
    mbpa: bool = True,
    splits: Sequence[str] = ("valid", "test"),
    folder: Path | None = None,
    prefix: str = "",
    workspace: int | None = None,
    label: str = "the model",
    quiet: bool = False,
) -> MemoryRows:
    """Choose settings on the validation text, then measure each of `splits` once with what was chosen.

    Args:
        grids: what is swept over; None: the paper's.
        mbpa: whether there is a row with MbPA.
        folder: where parts are kept as they finish; a repeated call takes them from there.
        prefix: of their file names, where several models share a folder.
        workspace: bytes the memories may hold; None: the library's.
        label: how progress calls the model.
    """
    grids = Grids() if grids is None else grids
    store = Store(folder, prefix, f"{digest(model)} {corpus.fingerprint}" if folder else "")
    texts = {split: text_of(corpus, split) for split in dict.fromkeys(("valid", *splits))}
    found, valid = sweep(
        model,
        texts["valid"],
        grids,
        mbpa=mbpa,
        test_words=sum(len(texts[split]) - 1 for split in splits if split != "valid"),
        store=store,
        workspace=workspace,
        label=label,
        quiet=quiet,
    )
    chosen = Memories(found.chosen.cache, found.chosen.mbpa, workspace)
    rows = [ALONE, Memories(found.cache[0].cache, None, workspace), *([chosen] if mbpa else [])]
    parts = {}
    for split in splits:
        if split == "valid":
            parts[split] = valid
            continue
        settings = {"split": split, "cache": _identity(chosen.cache), "mbpa": _identity(chosen.mbpa)}

        def read(split: str = split) -> dict[str, Tensor]:
            return read_shown(model, texts[split], chosen, f"{label} with memories, {TEXTS[split]} text", quiet)

        parts[split] = store.get(f"{split}-parts", settings, read)
    return MemoryRows(score_rows(corpus, rows, parts), parts, found)


def _identity(settings: Any) -> dict[str, Any] | None:
    """What log-probabilities follow from: all but the share."""
    return None if settings is None else {name: value for name, value in asdict(settings).items() if name != "share"}


def read_shown(model: LanguageModel, ids: Tensor, memories: Memories, label: str, quiet: bool) -> dict[str, Tensor]:
    """`read_parts` with its progress."""
    with Progress(label, total=len(ids) - 1, unit="words", quiet=quiet) as progress:
        return read_parts(model, ids, memories, seen=progress.update)


def score_rows(corpus: Corpus, rows: Sequence[Memories], parts: Mapping[str, Mapping[str, Tensor]]) -> list[Row]:
    """The perplexity of each mixture on each split, in all and by frequency."""
    return [
        Row(
            memories,
            {
                split: score(mixture(of_split, memories), text_of(corpus, split)[1:], corpus.counts)
                for split, of_split in parts.items()
            },
        )
        for memories in rows
    ]
