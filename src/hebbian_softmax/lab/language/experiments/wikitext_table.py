"""`hebbian reproduce wikitext-table` and `frequency-table`: the paper's tables 1 and 2.

Both can measure the final models with the memories of evaluation time, the first unless told otherwise.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hebbian_softmax.lab.base.settings import setting
from hebbian_softmax.lab.language.experiments.memories import MEMORIES, WITH, MemorySettings, measures
from hebbian_softmax.lab.language.experiments.memory_tables import chosen_tables, memory_tables, wikitext_table
from hebbian_softmax.lab.language.experiments.presentation import Presented, present_all
from hebbian_softmax.lab.language.experiments.reproduction import Reproduction
from hebbian_softmax.lab.language.experiments.tables import frequency_table, totals_table
from hebbian_softmax.lab.language.experiments.trials import Outcome


@dataclass(frozen=True)
class TableSettings(MemorySettings):
    memories: str = setting("all", WITH, MEMORIES)


def present_table(outcomes: Sequence[Outcome]) -> Presented:
    tables = [wikitext_table(outcomes), totals_table(outcomes), frequency_table(outcomes), *chosen_tables(outcomes)]
    return present_all(outcomes, "The paper's table 1", tables)


def present_frequencies(outcomes: Sequence[Outcome]) -> Presented:
    tables = [frequency_table(outcomes), totals_table(outcomes), *memory_tables(outcomes)]
    return present_all(outcomes, "Perplexity by training frequency", tables)


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
        more=measures,
        own=MemorySettings,
        hint="; or give another --corpus: wikitext-2, gutenberg, reuters",
    ),
]
RECIPES = [reproduction.recipe() for reproduction in REPRODUCTIONS]
