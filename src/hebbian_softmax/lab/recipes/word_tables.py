"""The tables of language models: totals, the paper's table 1, and its table 2 by training frequency."""

from collections.abc import Sequence

from hebbian_softmax.lab.data.corpus import BUCKETS
from hebbian_softmax.lab.recipes.paper_numbers import WIKITEXT_TABLE, paper_rows
from hebbian_softmax.lab.recipes.tuning import PLAIN, by_title
from hebbian_softmax.lab.recipes.word_recipe import perplexities
from hebbian_softmax.lab.recipes.word_trials import Outcome
from hebbian_softmax.lab.report.perplexities import change_cell, spread_cell
from hebbian_softmax.lab.report.tables import Cell, Table


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


def wikitext_table(outcomes: Sequence[Outcome]) -> Table:
    """The paper's table 1 with ours beside it; what a model was measured with besides comes below its row."""
    others = {name: paper for name, paper in WIKITEXT_TABLE.items() if name != "LSTM" and "+" not in name}
    rows: list[list[Cell]] = [[name, None, None, *_printed(paper)] for name, paper in others.items()]
    for title, group in by_title(outcomes, "final").items():
        head, remark = ("LSTM", "") if title == PLAIN else ("LSTM + Hebbian", f" ({title})")
        ours: list[Cell] = [spread_cell(perplexities(group, split)) for split in ("valid", "test")]
        rows.append([head + remark, *ours, *_printed(WIKITEXT_TABLE[head])])
        for more in group[0].more:
            found: list[Cell] = [
                spread_cell([each.more.get(more, {}).get(split) for each in group]) for split in ("valid", "test")
            ]
            paper = WIKITEXT_TABLE.get(f"{head} + {more}", (None, None))
            rows.append([f"{head} + {more}{remark}", *found, *_printed(paper)])
    columns = ["", "validation", "test", "paper, validation", "paper, test"]
    return Table(f"Perplexity on {outcomes[0].corpus['name']}; the paper's on WikiText-103", columns, rows)


def _printed(paper: tuple[float | None, float | None]) -> list[Cell]:
    return [None if value is None else f"{value:.1f}" for value in paper]


def frequency_table(outcomes: Sequence[Outcome]) -> Table:
    """The paper's table 2: test perplexity by training occurrences of the word, ours and then the paper's."""
    rows: list[list[Cell]] = []
    for title, group in by_title(outcomes, "final").items():
        cells: list[Cell] = [spread_cell([_bucket(each, bucket) for each in group]) for bucket in BUCKETS]
        rows.append([title, *cells, spread_cell(perplexities(group, "test"))])
    corpus = outcomes[0].corpus["name"]
    kind = outcomes[0].corpus["settings"].get("corpus", corpus)  # of other books, say, under a name of their own
    if (paper := paper_rows(kind)) is not None:
        rows.append([f"paper, {paper.name}, softmax", *paper.softmax])
        rows.append([f"paper, {paper.name}, Hebbian softmax", *paper.hebbian])
    return Table(f"Test perplexity on {corpus} by training occurrences of the word", ["", *BUCKETS, "all"], rows)


def _bucket(outcome: Outcome, bucket: str) -> float | None:
    if "test" not in outcome.scores:
        return float("inf")
    score = outcome.scores["test"]
    value: float | None = score["bucket_perplexity"][bucket]
    return float("inf") if value is None and score["bucket_words"][bucket] else value


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
