"""Experiments that also measure their final models with memories, as `hebbian evaluate --sweep` does.

The settings of the memories are chosen on the validation text for each model (appendix A.1).
"""

from collections.abc import Mapping
from dataclasses import Field, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.base.settings import choice, integer, setting
from hebbian_softmax.lab.data.corpus import Corpus
from hebbian_softmax.lab.language.experiments.experiment import ReproduceSettings, Reproduction
from hebbian_softmax.lab.language.experiments.trials import Measure
from hebbian_softmax.lab.language.memories.command import FOLDER
from hebbian_softmax.lab.language.memories.mbpa import MbpaSettings
from hebbian_softmax.lab.language.memories.settings import KINDS, Grids, ends, sweep_option
from hebbian_softmax.lab.language.memories.sweep import memory_rows
from hebbian_softmax.lab.language.model import LanguageModel

GRIDS: Mapping[str, Field[Any]] = {
    sweep_option(field.name): field for field in fields(Grids) if isinstance(field.default, tuple)
}
"""The options of `hebbian evaluate` that name grids, by the names of the settings here."""
OF_THE_CACHE = ("sweep_thetas", "sweep_sizes", "sweep_cache_shares")


def memories_setting(default: str, later: bool = False) -> Any:
    """Declare which memories the final models are measured with."""
    help = "memories that the final models are also measured with: none, cache, or all (cache and MbPA)"
    return setting(default, help, choice("none", "cache", "all"), later)


def _grid(name: str) -> Any:
    """Declare a grid as a setting; config.json keeps it as text that the option's parser understands."""
    field = GRIDS[name]
    parse = field.metadata["parse"]

    def as_text(values: tuple[Any, ...]) -> str:
        return ",".join(map(str, values))

    help = f"grid of {field.metadata['help']}; values separated by commas"
    return setting(as_text(getattr(Grids(), field.name)), help, lambda text: as_text(parse(text)), True)


@dataclass(frozen=True)
class MemorySettings(ReproduceSettings):
    """The settings of an experiment with memories. The grids have the same names as in `hebbian evaluate`."""

    memories: str = memories_setting("none", later=True)
    two_step_words: int = setting(
        Grids.two_step_words, "validation words to sweep two steps of MbPA on; 0: one step only", integer(0), later=True
    )
    sweep_thetas: str = _grid("sweep_thetas")
    sweep_sizes: str = _grid("sweep_sizes")
    sweep_cache_shares: str = _grid("sweep_cache_shares")
    sweep_neighbours: str = _grid("sweep_neighbours")
    sweep_rates: str = _grid("sweep_rates")
    sweep_l2: str = _grid("sweep_l2")
    sweep_mbpa_shares: str = _grid("sweep_mbpa_shares")


class WithMemories(Reproduction[MemorySettings]):
    """An experiment whose final models are measured with memories if `--memories` asks for it."""

    settings_type = MemorySettings

    def measures(self, settings: MemorySettings) -> list[Measure]:
        """Return the measurement with memories; faulty grids are refused before anything is trained."""
        check_used(settings)
        grids = grids_of(settings)
        return [] if settings.memories == "none" else [partial(with_memories, settings.memories == "all", grids)]


def grids_of(settings: MemorySettings) -> Grids:
    """Return the grids that the settings name."""
    given = {field.name: field.metadata["parse"](getattr(settings, name)) for name, field in GRIDS.items()}
    return Grids(**given, two_step_words=settings.two_step_words)


def check_used(settings: MemorySettings) -> None:
    """Refuse grids that `--memories` would not use."""
    used = {"none": (), "cache": OF_THE_CACHE, "all": tuple(GRIDS)}[settings.memories]
    defaults = {field.name: field.default for field in fields(MemorySettings)}
    for name in GRIDS:
        if name not in used and getattr(settings, name) != defaults[name]:
            raise LabError(
                f"--{name.replace('_', '-')} has no effect with --memories {settings.memories}: omit it, or "
                f"give --memories {'cache or all' if name in OF_THE_CACHE else 'all'}"
            )


def with_memories(
    mbpa: bool, grids: Grids, model: LanguageModel, corpus: Corpus, folder: Path, quiet: bool
) -> Mapping[str, Mapping[str, Any]]:
    """Measure a model with the cache and, if asked, with MbPA as well.

    Returns, by the names that the paper gives them, perplexities in total and by frequency, the settings chosen, and
    which of these lie at the ends of their grids.
    """
    found = memory_rows(
        model, corpus, grids=grids, kinds=KINDS if mbpa else KINDS[:1], folder=folder / FOLDER, quiet=quiet
    )
    assert found.sweep is not None
    points = [found.sweep.points["cache"][0], found.sweep.chosen]
    return {
        "Cache" if row.memories.of(MbpaSettings) is None else "Cache + MbPA": {
            **{split: score.perplexity for split, score in row.scores.items()},
            **row.as_plain(),
            "ends": ends(point, grids),
        }
        for row, point in zip(found.rows[1:], points, strict=False)
    }
