"""The tables of language models: totals, and the paper's table 2 by training frequency."""

from collections.abc import Mapping, Sequence
from typing import Any

from hebbian_softmax.lab.data.buckets import BUCKETS
from hebbian_softmax.lab.language.experiments.paper_numbers import paper_rows
from hebbian_softmax.lab.language.experiments.presentation import perplexities
from hebbian_softmax.lab.language.experiments.trials import Outcome
from hebbian_softmax.lab.language.experiments.tuning import PLAIN, by_title
from hebbian_softmax.lab.language.report.perplexities import change_cell, spread_cell
from hebbian_softmax.lab.report.tables import Cell, Table

Scores = Mapping[str, Mapping[str, Any]]
"""By split, as result.json has them."""


def totals_table(outcomes: Sequence[Outcome]) -> Table:
    """Each row of final models: validation and test perplexity over seeds, and the change from plain softmax."""
    groups = by_title(outcomes, "final")
    plain = perplexities(groups[PLAIN], "test")
    rows: list[list[Cell]] = []
    for title, group in groups.items():
        test = perplexities(group, "test")
        change = None if title == PLAIN else change_cell(plain, test)
        rows.append([title, len(group), spread_cell(perplexities(group, "valid")), spread_cell(test), change])
    corpus = outcomes[0].corpus["name"]
    columns = ["", "seeds", "validation", "test", "change on test"]
    return Table(f"Perplexity on {corpus}, mean ± 2σ over seeds", columns, rows)


def frequency_table(outcomes: Sequence[Outcome]) -> Table:
    """The paper's table 2: test perplexity by training occurrences of the word, ours and then the paper's.

    What a model was measured with besides comes below its row.
    """
    rows: list[list[Cell]] = []
    for title, group in by_title(outcomes, "final").items():
        named: dict[str, list[Scores | None]] = {title: [each.scores for each in group]}
        named |= {f"{title} + {more}": [scores_with(each, more) for each in group] for more in names_of_more(group)}
        for name, of_seeds in named.items():
            cells: list[Cell] = [spread_cell([_bucket(scores, of) for scores in of_seeds]) for of in (*BUCKETS, None)]
            if any(cells):  # older runs kept only the totals of mixtures
                rows.append([name, *cells])
    corpus = outcomes[0].corpus["name"]
    if (paper := paper_rows(kind_of(outcomes))) is not None:
        rows.append([f"paper, {paper.name}, softmax", *paper.softmax])
        rows.append([f"paper, {paper.name}, Hebbian softmax", *paper.hebbian])
    return Table(f"Test perplexity on {corpus} by training occurrences of the word", ["", *BUCKETS, "all"], rows)


def kind_of(outcomes: Sequence[Outcome]) -> str:
    """The corpus that this one is of the kind of: of other books, say, under a name of their own."""
    corpus = outcomes[0].corpus
    return str(corpus["settings"].get("corpus", corpus["name"]))


def names_of_more(group: Sequence[Outcome]) -> list[str]:
    """What models of a row were measured with besides, in order; those whose numbers were not finite have nothing."""
    return list(dict.fromkeys(name for outcome in group for name in outcome.more))


def scores_with(outcome: Outcome, more: str) -> Scores | None:
    """By split; none where a diverged model has none; None where they were not kept."""
    return {} if outcome.diverged else outcome.more.get(more, {}).get("scores")


def _bucket(scores: Scores | None, bucket: str | None) -> float | None:
    """The test perplexity of a bucket, or of all words; infinity where it was not finite, None where there is none."""
    if scores is None:
        return None
    if "test" not in scores:
        return float("inf")
    score = scores["test"]
    words, value = score["words"], score["perplexity"]
    if bucket is not None:
        words, value = score["bucket_words"][bucket], score["bucket_perplexity"][bucket]
    return float("inf") if value is None and words else value


def set_table(outcomes: Sequence[Outcome], name: str, short: str, described: str) -> Table:
    """Perplexity on the words of a set, `short` in the columns, beside that on all words."""
    groups = by_title(outcomes, "final")
    known = next((each.sets for each in groups[PLAIN] if each.sets), {})
    plain = [_of_set(each, "test", name) for each in groups[PLAIN]]
    rows: list[list[Cell]] = []
    for title, group in groups.items():
        cells: list[Cell] = []
        for split in ("valid", "test"):
            cells.append(spread_cell(perplexities(group, split)))
            cells.append(spread_cell([_of_set(each, split, name) for each in group]))
        change = None if title == PLAIN else change_cell(plain, [_of_set(each, "test", name) for each in group])
        rows.append([title, *cells, change])
    valid, test = (known[split][name]["words"] if split in known else 0 for split in ("valid", "test"))
    many = f"{valid:,} of them are predicted in the validation text, {test:,} in the test text"
    columns = ["", "validation, all", f"validation, {short}", "test, all", f"test, {short}", f"change, {short}"]
    return Table(f"Perplexity on all words and on {described}; {many}", columns, rows)


def _of_set(outcome: Outcome, split: str, name: str) -> float | None:
    if split not in outcome.sets:
        return float("inf")
    found = outcome.sets[split][name]
    value: float | None = found["perplexity"]
    return float("inf") if value is None and found["words"] else value
