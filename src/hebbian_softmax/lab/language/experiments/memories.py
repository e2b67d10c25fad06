"""Experiments that also measure their final models with memories, as `hebbian evaluate --sweep` does.

The settings of the memories are chosen on the validation text for each model (appendix A.1). This module names no kind
of memory: it takes the kinds and their grids from `memories/settings.py`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, make_dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.base.settings import choice, option_name, setting
from hebbian_softmax.lab.data.corpus import Corpus
from hebbian_softmax.lab.language.experiments.experiment import ReproduceSettings, Reproduction
from hebbian_softmax.lab.language.experiments.trials import Measure
from hebbian_softmax.lab.language.memories.command import FOLDER
from hebbian_softmax.lab.language.memories.memory import Memory
from hebbian_softmax.lab.language.memories.settings import KINDS, Grids, ends, sweep_option
from hebbian_softmax.lab.language.memories.sweep import memory_rows
from hebbian_softmax.lab.language.model import LanguageModel

Kinds = tuple[type[Memory], ...]
CHOICES: Mapping[str, Kinds] = {
    "none": (),
    **{kind.key: KINDS[:number] for number, kind in enumerate(KINDS[:-1], start=1)},
    "all": KINDS,
}
"""The values of `--memories`, and the kinds of memories that the final models are measured with."""
OPTIONS = {sweep_option(field.name): field for field in fields(Grids) if field.name != "budget"}
"""The options of a sweep in `hebbian evaluate`, by name, without its budget: an experiment has a budget of its own."""


def memories_setting(default: str, later: bool = False) -> Any:
    """Declare the setting `memories`."""
    kinds = " and ".join(kind.title for kind in KINDS)
    help = f"memories that the final models are also measured with: {', '.join(CHOICES)}; all: {kinds}"
    return setting(default, help, choice(*CHOICES), later)


@dataclass(frozen=True)
class MemorySettings(ReproduceSettings):
    """The settings of an experiment with memories, before `with_grids` adds the options of a sweep."""

    memories: str = memories_setting("none", later=True)


M = TypeVar("M", bound=MemorySettings)


def with_grids(own: type[M]) -> type[M]:
    """Extend settings by the options of a sweep. config.json keeps a grid as the text that its parser understands."""

    def as_kept(parse: Callable[[str], tuple[Any, ...]], text: str) -> str:
        return ",".join(map(str, parse(text)))

    added: list[tuple[str, Any, Any]] = []
    for name, field in OPTIONS.items():
        help, parse = field.metadata["help"], field.metadata["parse"]
        if isinstance(field.default, tuple):
            help, default = f"grid of {help}; values separated by commas", ",".join(map(str, field.default))
            added.append((name, str, setting(default, help, partial(as_kept, parse), later=True)))
        else:
            added.append((name, field.type, setting(field.default, help, parse, later=True)))
    return cast(type[M], make_dataclass(own.__name__, added, bases=(own,), frozen=True))


class WithMemories(Reproduction[MemorySettings]):
    """An experiment whose final models are measured with memories if `--memories` asks for it."""

    settings_type = with_grids(MemorySettings)

    def measures(self, settings: MemorySettings) -> list[Measure]:
        """Return the measurement with memories; faulty grids are refused before anything is trained."""
        check_used(settings)
        kinds, grids = CHOICES[settings.memories], grids_of(settings)
        return [partial(with_memories, kinds, grids)] if kinds else []


def grids_of(settings: MemorySettings) -> Grids:
    """Return the grids that the settings name."""
    return Grids(**{each.name: each.metadata["parse"](str(getattr(settings, name))) for name, each in OPTIONS.items()})


def check_used(settings: MemorySettings) -> None:
    """Refuse grids that `--memories` would not use."""
    defaults = {field.name: field.default for field in fields(settings)}
    for name, field in OPTIONS.items():
        using = [value for value, kinds in CHOICES.items() if any(hasattr(kind.grid, field.name) for kind in kinds)]
        given = isinstance(field.default, tuple) and getattr(settings, name) != defaults[name]
        if given and settings.memories not in using:
            raise LabError(
                f"{option_name(name)} has no effect with --memories {settings.memories}: omit it, or give --memories "
                f"{' or '.join(using)}"
            )


def with_memories(
    kinds: Kinds, grids: Grids, model: LanguageModel, corpus: Corpus, folder: Path, quiet: bool
) -> Mapping[str, Mapping[str, Any]]:
    """Measure a model with the first of some kinds of memories, with the first two, and so on.

    Returns, by the names that the paper gives them, perplexities in total and by frequency, the settings chosen, and
    which of these lie at the ends of their grids.
    """
    found = memory_rows(model, corpus, grids=grids, kinds=kinds, folder=folder / FOLDER, quiet=quiet)
    assert found.sweep is not None
    points = [*(found.sweep.points[kind.key][0] for kind in kinds[:-1]), found.sweep.chosen]
    measured = {}
    for row, point in zip(found.rows[1:], points, strict=True):
        name = " + ".join(memory.title for memory in row.memories.used)
        measured[name[0].upper() + name[1:]] = {
            **{split: score.perplexity for split, score in row.scores.items()},
            **row.as_plain(),
            "ends": ends(point, grids),
        }
    return measured
