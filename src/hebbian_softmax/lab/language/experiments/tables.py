"""Tables and sentences about trials, made from their outcomes alone."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from hebbian_softmax.lab.data.buckets import BUCKETS
from hebbian_softmax.lab.language.experiments.paper_numbers import ALL, FREQUENCY_TABLE, STAND_INS, WIKITEXT_TABLE
from hebbian_softmax.lab.language.experiments.trials import Outcome
from hebbian_softmax.lab.language.experiments.tuning import NETWORK, RULE, SEED, as_text, best_of
from hebbian_softmax.lab.language.memories.outcome import GRID
from hebbian_softmax.lab.language.memories.settings import KINDS
from hebbian_softmax.lab.language.names import PLAIN, TEXTS
from hebbian_softmax.lab.language.report.perplexities import apart, change_cell, spread_cell
from hebbian_softmax.lab.report.tables import Cell, Table

Scores = Mapping[str, Mapping[str, Any]]
"""The scores of a model by split, as result.json has them."""
OURS = ("", "validation", "test", "change on test by memories")
SETTINGS = {
    "hidden": "hidden",
    "layers": "layers",
    "input_dropout": "input dropout",
    "output_dropout": "output dropout",
    "layer_norm": "layer norm",
    "tied": "tied",
    "learning_rate": "learning rate",
    "limit": "T",
    "gamma": "γ",
}
"""The column titles of tuned settings."""


def by_title(outcomes: Sequence[Outcome], part: str) -> dict[str, list[Outcome]]:
    """Return the outcomes of a part, grouped by the row of the table that they belong to."""
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        if outcome.part == part:
            groups.setdefault(outcome.title, []).append(outcome)
    return groups


def perplexities(group: Sequence[Outcome], split: str) -> list[float]:
    """Return the perplexities of one row, seed by seed; infinity where a training diverged."""
    found = [outcome.scores[split]["perplexity"] if split in outcome.scores else None for outcome in group]
    return [math.inf if value is None else float(value) for value in found]


def paper_corpus(outcomes: Sequence[Outcome]) -> str:
    """Return the paper's corpus that ours is compared with: the same, or the one that ours stands in for."""
    corpus = outcomes[0].corpus
    kind = str(corpus["settings"].get("corpus", corpus["name"]))  # Other books have a name of their own.
    return STAND_INS.get(kind, kind)


def summarize(groups: Mapping[str, Sequence[Outcome]]) -> str:
    """Describe the test perplexities, and say which differences exceed the spread over seeds, in either direction."""
    seeds = len(groups[PLAIN.title])
    over = f"mean ± 2σ over {seeds} seeds" if seeds > 1 else "one seed"
    values = {title: perplexities(group, "test") for title, group in groups.items()}
    cells = [f"{title} {spread_cell(found)}" for title, found in values.items()]
    words = f"Test perplexity ({over}, {groups[PLAIN.title][0].words:,} training words): {'; '.join(cells)}."
    finite = [title for title, found in values.items() if math.isfinite(sum(found))]
    compared = [title for title in finite if title != PLAIN.title] if PLAIN.title in finite else []
    if seeds == 1 or not compared:
        return words
    separate = [title for title in compared if apart(values[PLAIN.title], values[title])]
    for title in separate:
        side = "below" if sum(values[title]) < sum(values[PLAIN.title]) else "above"
        words += f" The range of {title} is {side} that of {PLAIN.title}."
    ranges = "No range" if len(finite) == len(values) else "No finite range"
    return words if separate else f"{words} {ranges} is separate from that of {PLAIN.title}."


def totals_table(outcomes: Sequence[Outcome]) -> Table:
    """Show validation and test perplexity of each row over seeds, and the change from plain softmax."""
    groups = by_title(outcomes, "final")
    plain = perplexities(groups[PLAIN.title], "test")
    rows: list[list[Cell]] = []
    for title, group in groups.items():
        test = perplexities(group, "test")
        change = None if title == PLAIN.title else change_cell(plain, test)
        rows.append([title, len(group), spread_cell(perplexities(group, "valid")), spread_cell(test), change])
    corpus = outcomes[0].corpus["name"]
    columns = ["", "seeds", "validation", "test", "change on test"]
    return Table(f"Perplexity on {corpus}, mean ± 2σ over seeds", columns, rows)


def frequency_table(outcomes: Sequence[Outcome], buckets: Sequence[str] = BUCKETS) -> Table:
    """Show the paper's table 2: test perplexity by training occurrences of the word, ours and then the paper's.

    A model with memories has a row of its own below the model alone. A cell is empty where a run or the paper does not
    have the bucket.
    """
    rows: list[list[Cell]] = []
    for title, group in by_title(outcomes, "final").items():
        named: dict[str, list[Scores | None]] = {title: [each.scores for each in group]}
        named |= {f"{title} + {more}": [_scores_with(each, more) for each in group] for more in _additions(group)}
        for name, scores in named.items():
            cells: list[Cell] = [spread_cell([_bucket(each, bucket) for each in scores]) for bucket in (*buckets, ALL)]
            if any(cells):  # Older runs kept only the totals of models with memories.
                rows.append([name, *cells])
    paper = FREQUENCY_TABLE.get(paper_corpus(outcomes), {})
    rows += [[title, *(cells.get(bucket) for bucket in (*buckets, ALL))] for title, cells in paper.items()]
    corpus = outcomes[0].corpus["name"]
    return Table(f"Test perplexity on {corpus} by training occurrences of the word", ["", *buckets, ALL], rows)


def _additions(group: Sequence[Outcome]) -> list[str]:
    """Return the names of the additions that some model of a row was measured with; a diverged model has none."""
    return list(dict.fromkeys(name for outcome in group for name in outcome.more))


def _scores_with(outcome: Outcome, more: str) -> Scores | None:
    """Return the scores of a model with an addition: empty if it diverged, None if they were not kept."""
    return {} if outcome.diverged else outcome.more.get(more, {}).get("scores")


def _bucket(scores: Scores | None, bucket: str) -> float | None:
    """Return the test perplexity of a bucket or of all words: infinity if it is not finite, None if there is none."""
    if scores is None:
        return None
    if "test" not in scores:
        return float("inf")
    score = scores["test"]
    words, value = score["words"], score["perplexity"]
    if bucket != ALL:
        words, value = score["bucket_words"].get(bucket), score["bucket_perplexity"].get(bucket)
    return float("inf") if value is None and words else value


def set_table(outcomes: Sequence[Outcome], name: str, short: str, described: str) -> Table:
    """Show perplexity on the words of a set, called `short` in the columns, beside perplexity on all words."""
    groups = by_title(outcomes, "final")
    known = next((each.sets for each in groups[PLAIN.title] if each.sets), {})
    plain = [_in_set(each, "test", name) for each in groups[PLAIN.title]]
    rows: list[list[Cell]] = []
    for title, group in groups.items():
        inside = {split: [_in_set(each, split, name) for each in group] for split in TEXTS}
        cells = [spread_cell(found) for split in TEXTS for found in (perplexities(group, split), inside[split])]
        rows.append([title, *cells, None if title == PLAIN.title else change_cell(plain, inside["test"])])
    valid, test = (known[split][name]["words"] if split in known else 0 for split in TEXTS)
    many = f"{valid:,} of them are predicted in the validation text, {test:,} in the test text"
    columns = ["", "validation, all", f"validation, {short}", "test, all", f"test, {short}", f"change, {short}"]
    return Table(f"Perplexity on all words and on {described}; {many}", columns, rows)


def _in_set(outcome: Outcome, split: str, name: str) -> float | None:
    if split not in outcome.sets:
        return float("inf")
    found = outcome.sets[split][name]
    value: float | None = found["perplexity"]
    return float("inf") if value is None and found["words"] else value


def wikitext_table(outcomes: Sequence[Outcome]) -> Table:
    """Show the paper's table 1 with our numbers beside it; a model with memories comes below the model alone."""
    others = {name: paper for name, paper in WIKITEXT_TABLE.items() if name != "LSTM" and "+" not in name}
    rows: list[list[Cell]] = [[name, None, None, None, *_printed(paper)] for name, paper in others.items()]
    for name, remark, cells in _with_memories(outcomes):
        rows.append([name + remark, *cells, *_printed(WIKITEXT_TABLE.get(name, (None, None)))])
    columns = [*OURS, "paper, validation", "paper, test"]
    return Table(f"Perplexity on {outcomes[0].corpus['name']}; the paper's on WikiText-103", columns, rows)


def memory_tables(outcomes: Sequence[Outcome]) -> list[Table]:
    """Show the models with memories, beside the paper's numbers if it has any; return no table without memories."""
    if not any(outcome.more for outcome in outcomes):
        return []
    if paper_corpus(outcomes) == "wikitext-103":
        return [wikitext_table(outcomes), *chosen_tables(outcomes)]
    rows: list[list[Cell]] = [[name + remark, *cells] for name, remark, cells in _with_memories(outcomes)]
    title = f"Perplexity on {outcomes[0].corpus['name']} with memories, mean ± 2σ over seeds"
    return [Table(title, list(OURS), rows), *chosen_tables(outcomes)]


def _with_memories(outcomes: Sequence[Outcome]) -> Iterator[tuple[str, str, list[Cell]]]:
    """Yield each row's name in the paper's table 1, the rule in brackets, and the cells below `OURS`."""
    for title, group in by_title(outcomes, "final").items():
        model = group[0].settings.get("model", "lstm")  # older runs have the LSTM and do not say so
        network = "LSTM" if model == "lstm" else model.capitalize()
        head, remark = (network, "") if title == PLAIN.title else (f"{network} + Hebbian", f" ({title})")
        alone = {split: perplexities(group, split) for split in ("valid", "test")}
        yield head, remark, [*map(spread_cell, alone.values()), None]
        for more in _additions(group):
            valid, test = (
                [float("inf") if each.diverged else each.more.get(more, {}).get(split) for each in group]
                for split in alone
            )
            yield f"{head} + {more}", remark, [spread_cell(valid), spread_cell(test), change_cell(alone["test"], test)]


def _printed(paper: tuple[float | None, float | None]) -> list[Cell]:
    return [None if value is None else f"{value:.1f}" for value in paper]


def chosen_tables(outcomes: Sequence[Outcome]) -> list[Table]:
    """Show the settings of each model's memories; return no table for older runs, which did not keep them."""
    rows: list[list[Cell]] = []
    for title, group in by_title(outcomes, "final").items():
        for outcome in group:
            for more, found in outcome.more.items():
                if "ends" not in found:
                    continue
                memories: list[Cell] = [
                    cast(Any, kind)(**found[kind.key]).describe() if found.get(kind.key) else "–" for kind in KINDS
                ]
                at_end = ", ".join(found["ends"]) or "–"
                rows.append([f"{title} + {more}", outcome.settings["seed"], *memories, at_end])
    columns = ["", "seed", *GRID[:-1], "at the end of its grid: the best may lie beyond"]
    return [Table("Memories chosen on the validation text", columns, rows)] if rows else []


def tuning_tables(outcomes: Sequence[Outcome]) -> list[Table]:
    """Show all trials of the tuning and which were chosen; return no table if nothing was tuned."""
    groups = by_title(outcomes, "tuning")
    if not groups:
        return []
    tried = [outcome for group in groups.values() for outcome in group]
    varied = [name for name in NETWORK + RULE if len({as_text(each.settings[name]) for each in tried}) > 1]
    rows: list[list[Cell]] = []
    for title, group in groups.items():
        best = best_of(group)
        for number, outcome in enumerate(group):
            valid = "not finite" if math.isinf(outcome.valid) else outcome.valid
            rows.append([title, *_settings(outcome, varied), valid, "chosen" if number == best else ""])
    counts = {len(group) for group in groups.values()}
    many = f"{min(counts)} setting{'' if counts == {1} else 's'} each" if len(counts) == 1 else f"{len(tried)} settings"
    title = f"Tuning: {many}, {tried[0].steps:,} steps, seed {SEED}, chosen by the validation text"
    return [Table(title, ["tried", *(SETTINGS[name] for name in varied), "validation perplexity", ""], rows)]


def settings_table(outcomes: Sequence[Outcome]) -> Table:
    """Show the settings with which the final models were trained."""
    rows: list[list[Cell]] = [
        [title, *_settings(group[0], list(SETTINGS)), group[0].steps]
        for title, group in by_title(outcomes, "final").items()
    ]
    return Table("Settings of the rows", ["", *SETTINGS.values(), "steps"], rows)


def _settings(outcome: Outcome, names: Sequence[str]) -> list[Cell]:
    """Return the cells of these settings; a plain softmax has none for the settings of the rule."""
    plain = outcome.settings["head"] == "plain"
    return [None if plain and name in RULE else as_text(outcome.settings[name]) for name in names]
