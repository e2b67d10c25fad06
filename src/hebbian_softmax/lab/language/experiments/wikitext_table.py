"""`hebbian reproduce wikitext-table` and `frequency-table`: the paper's tables 1 and 2, also with memories."""

from collections.abc import Sequence
from dataclasses import dataclass

from hebbian_softmax.lab.language.experiments.memories import MemorySettings, WithMemories, memories_setting, with_grids
from hebbian_softmax.lab.language.experiments.tables import (
    chosen_tables,
    frequency_table,
    memory_tables,
    totals_table,
    wikitext_table,
)
from hebbian_softmax.lab.language.experiments.trials import Outcome
from hebbian_softmax.lab.report.tables import Table


@dataclass(frozen=True)
class TableSettings(MemorySettings):
    """The settings of table 1, whose rows with memories are measured by default."""

    memories: str = memories_setting("all")


class WikitextTable(WithMemories):
    """Table 1: validation and test perplexity, alone and with memories."""

    name = "wikitext-table"
    help = "validation and test perplexity on WikiText-103 (table 1)"
    title = "The paper's table 1"
    settings_type = with_grids(TableSettings)

    def tables(self, outcomes: Sequence[Outcome]) -> list[Table]:
        return [wikitext_table(outcomes), totals_table(outcomes), frequency_table(outcomes), *chosen_tables(outcomes)]


class FrequencyTable(WithMemories):
    """Table 2: test perplexity by how often a word occurs in the training text."""

    name = "frequency-table"
    help = "test perplexity by training frequency on WikiText-103, Gutenberg or GigaWord (table 2)"
    title = "Perplexity by training frequency"
    hint = "; or give another --corpus: wikitext-2, gutenberg, reuters"

    def tables(self, outcomes: Sequence[Outcome]) -> list[Table]:
        return [frequency_table(outcomes), totals_table(outcomes), *memory_tables(outcomes)]


RECIPES = [WikitextTable(), FrequencyTable()]
