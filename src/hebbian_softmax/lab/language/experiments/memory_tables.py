"""Tables of models with the memories of evaluation time: the paper's table 1, and the same for other texts."""

from collections.abc import Iterator, Sequence

from hebbian_softmax.lab.language.experiments.paper_numbers import STAND_INS, WIKITEXT_TABLE
from hebbian_softmax.lab.language.experiments.presentation import perplexities
from hebbian_softmax.lab.language.experiments.tables import kind_of, names_of_more
from hebbian_softmax.lab.language.experiments.trials import Outcome
from hebbian_softmax.lab.language.experiments.tuning import PLAIN, by_title
from hebbian_softmax.lab.language.memories.cache import CacheSettings
from hebbian_softmax.lab.language.memories.mbpa import MbpaSettings
from hebbian_softmax.lab.language.memories.outcome import GRID
from hebbian_softmax.lab.language.report.perplexities import change_cell, spread_cell
from hebbian_softmax.lab.report.tables import Cell, Table

OURS = ("", "validation", "test", "change on test by memories")
WIKITEXT = "wikitext-103"


def wikitext_table(outcomes: Sequence[Outcome]) -> Table:
    """The paper's table 1 with ours beside it; what a model was measured with besides comes below its row."""
    others = {name: paper for name, paper in WIKITEXT_TABLE.items() if name != "LSTM" and "+" not in name}
    rows: list[list[Cell]] = [[name, None, None, None, *_printed(paper)] for name, paper in others.items()]
    for name, remark, cells in _lines(outcomes):
        rows.append([name + remark, *cells, *_printed(WIKITEXT_TABLE.get(name, (None, None)))])
    columns = [*OURS, "paper, validation", "paper, test"]
    return Table(f"Perplexity on {outcomes[0].corpus['name']}; the paper's on WikiText-103", columns, rows)


def memory_tables(outcomes: Sequence[Outcome]) -> list[Table]:
    """The models with memories, the paper's numbers beside them where it has some; nothing without memories."""
    if not any(outcome.more for outcome in outcomes):
        return []
    if STAND_INS.get(kind_of(outcomes), kind_of(outcomes)) == WIKITEXT:
        return [wikitext_table(outcomes), *chosen_tables(outcomes)]
    rows: list[list[Cell]] = [[name + remark, *cells] for name, remark, cells in _lines(outcomes)]
    title = f"Perplexity on {outcomes[0].corpus['name']} with memories, mean ± 2σ over seeds"
    return [Table(title, list(OURS), rows), *chosen_tables(outcomes)]


def _lines(outcomes: Sequence[Outcome]) -> Iterator[tuple[str, str, list[Cell]]]:
    """A name as in the paper's table 1, which rule it is, and the cells of `OURS`."""
    for title, group in by_title(outcomes, "final").items():
        head, remark = ("LSTM", "") if title == PLAIN else ("LSTM + Hebbian", f" ({title})")
        alone = {split: perplexities(group, split) for split in ("valid", "test")}
        yield head, remark, [*map(spread_cell, alone.values()), None]
        for more in names_of_more(group):
            valid, test = (
                [float("inf") if each.diverged else each.more.get(more, {}).get(split) for each in group]
                for split in alone
            )
            yield f"{head} + {more}", remark, [spread_cell(valid), spread_cell(test), change_cell(alone["test"], test)]


def _printed(paper: tuple[float | None, float | None]) -> list[Cell]:
    return [None if value is None else f"{value:.1f}" for value in paper]


def chosen_tables(outcomes: Sequence[Outcome]) -> list[Table]:
    """The settings that each model's memories were given; none where none were kept, as in older runs."""
    rows: list[list[Cell]] = []
    for title, group in by_title(outcomes, "final").items():
        for outcome in group:
            for more, found in outcome.more.items():
                if "cache" not in found:
                    continue
                cache = CacheSettings(**found["cache"]).describe()
                mbpa = MbpaSettings(**found["mbpa"]).describe() if found["mbpa"] else "–"
                at_end = ", ".join(found["ends"]) or "–"
                rows.append([f"{title} + {more}", outcome.settings["seed"], cache, mbpa, at_end])
    columns = ["", "seed", *GRID[:2], "at the end of its grid: the best may lie beyond"]
    return [Table("Memories chosen on the validation text", columns, rows)] if rows else []
