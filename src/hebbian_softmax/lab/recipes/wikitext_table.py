"""`hebbian reproduce wikitext-table` and `frequency-table`: the paper's tables 1 and 2."""

from collections.abc import Sequence

from hebbian_softmax.lab.recipes.word_recipe import Presented, present_all
from hebbian_softmax.lab.recipes.word_reproductions import Reproduction
from hebbian_softmax.lab.recipes.word_tables import frequency_table, totals_table, wikitext_table
from hebbian_softmax.lab.recipes.word_trials import Measure, Outcome

WITH_MEMORIES: Sequence[Measure] = ()
"""Each measures a final model with memories beside it, and names its rows as the paper does: Cache, Cache + MbPA."""


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
        more=WITH_MEMORIES,
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
