"""`hebbian reproduce wikitext-table` and `frequency-table`: the paper's tables 1 and 2.

The first also measures the final models with the memories of evaluation time, whose settings are chosen on the
validation text for each model (appendix A.1).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hebbian_softmax.lab.data.corpus import Corpus
from hebbian_softmax.lab.language.memory_command import FOLDER
from hebbian_softmax.lab.language.memory_grid import Grids
from hebbian_softmax.lab.language.memory_rows import memory_rows
from hebbian_softmax.lab.models.lstm import WordLSTM
from hebbian_softmax.lab.recipes.word_recipe import Presented, present_all
from hebbian_softmax.lab.recipes.word_reproductions import ReproduceSettings, Reproduction
from hebbian_softmax.lab.recipes.word_tables import frequency_table, totals_table, wikitext_table
from hebbian_softmax.lab.recipes.word_trials import Measure, Outcome
from hebbian_softmax.lab.settings import choice, integer, setting

MEMORIES = ("none", "cache", "all")


@dataclass(frozen=True)
class TableSettings(ReproduceSettings):
    memories: str = setting("all", "rows with memories: none, cache, or all: cache and MbPA", choice(*MEMORIES))
    two_step_words: int = setting(
        Grids.two_step_words, "validation words to sweep two steps of MbPA on; 0: one step only", integer(0)
    )


def with_memories(
    mbpa: bool, grids: Grids, model: WordLSTM, corpus: Corpus, folder: Path, quiet: bool
) -> Mapping[str, Mapping[str, float]]:
    """The rows below a model's own, named as the paper names them."""
    place = folder / FOLDER
    _, *rows = memory_rows(model, corpus, grids=grids, mbpa=mbpa, folder=place, label="it", quiet=quiet).rows
    return {
        "Cache" if row.memories.mbpa is None else "Cache + MbPA": {
            split: score.perplexity for split, score in row.scores.items()
        }
        for row in rows
    }


def measures(settings: TableSettings) -> list[Measure]:
    if settings.memories == "none":
        return []
    return [partial(with_memories, settings.memories == "all", Grids(two_step_words=settings.two_step_words))]


def present_table(outcomes: Sequence[Outcome]) -> Presented:
    tables = [wikitext_table(outcomes), totals_table(outcomes), frequency_table(outcomes)]
    return present_all(outcomes, "The paper's table 1", tables)


def present_frequencies(outcomes: Sequence[Outcome]) -> Presented:
    return present_all(
        outcomes, "Perplexity by training frequency", [frequency_table(outcomes), totals_table(outcomes)]
    )


REPRODUCTIONS = [
    Reproduction(
        name="wikitext-table",
        help="validation and test perplexity on WikiText-103 (table 1)",
        corpus="wikitext-103",
        epochs=90,
        present=present_table,
        more=measures,
        own=TableSettings,
        hint="; or give --corpus wikitext-2 --size small, a smaller one of its kind",
    ),
    Reproduction(
        name="frequency-table",
        help="test perplexity by training frequency on WikiText-103, Gutenberg or GigaWord (table 2)",
        corpus="wikitext-103",
        epochs=90,
        present=present_frequencies,
        hint="; or give another --corpus: wikitext-2, gutenberg, reuters",
    ),
]
