"""`hebbian reproduce wikitext-curves | gutenberg-curves | gigaword-curves`: the paper's learning curves.

Figure 4 (WikiText-103, T = 100 and 500), and those of the appendices: Gutenberg (T = 100 and 500, γ = 0.1), GigaWord.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from hebbian_softmax.lab.language.experiments.grids import RULE, candidates
from hebbian_softmax.lab.language.experiments.paper_numbers import FREQUENCY_TABLE
from hebbian_softmax.lab.language.experiments.presentation import Presented, Row, perplexities, present_all
from hebbian_softmax.lab.language.experiments.reproduction import Reproduction
from hebbian_softmax.lab.language.experiments.tables import frequency_table
from hebbian_softmax.lab.language.experiments.trials import Outcome
from hebbian_softmax.lab.language.experiments.tuning import PLAIN, by_title
from hebbian_softmax.lab.language.report.curves import below_from
from hebbian_softmax.lab.language.report.perplexities import spread_cell
from hebbian_softmax.lab.language.settings import TrainSettings
from hebbian_softmax.lab.report.tables import Cell, Table


@dataclass(frozen=True)
class PaperCurve:
    """What the paper says of a figure: when the rule's curve passes below that of the softmax."""

    corpus: str
    below_from: str
    remark: str


PAPER = {
    "wikitext": PaperCurve(
        "wikitext-103",
        "2–3 billion",
        "The paper trains for 9 billion words; its T = 100 is faster at first and overfits after 5.5 billion.",
    ),
    "gutenberg": PaperCurve(
        "gutenberg", "about 4 billion", "The paper trains for 15 billion words; the gap grows to 2–3 points."
    ),
    "gigaword": PaperCurve(
        "gigaword", "–", "The paper trains for 6 billion words and measures on random articles of 2010."
    ),
}


def grid(gammas: Sequence[float], size: str) -> dict[str, tuple[Any, ...]]:
    """T of the figure; smaller sizes see fewer words."""
    limits, usual = ((500, 100), tuple(gammas)) if size == "paper" else ((20, 100), (0.05, 0.1, 0.25))
    return {"limit": limits, "gamma": usual}


def for_each_limit(gammas: Sequence[float], rows: Sequence[Row], settings: Any) -> list[Row]:
    """The plain softmax, and each rule as it was tuned with each T of the figure."""
    limits = sorted({each["limit"] for each in candidates(settings, RULE, grid(gammas, settings.size), TrainSettings)})
    found = []
    for short, title, chosen in rows:
        if chosen.head == "plain":
            found.append((short, title, chosen))
        else:
            found += [(f"{short}-T{T}", f"{title}, T = {T}", replace(chosen, limit=T)) for T in limits]
    return found


def curve_table(outcomes: Sequence[Outcome], paper: PaperCurve) -> Table:
    """The ends of the curves, and from where on each rule is below the plain softmax."""
    groups: Mapping[str, Sequence[Outcome]] = by_title(outcomes, "final")
    softmax, hebbian = FREQUENCY_TABLE[paper.corpus].totals
    rows: list[list[Cell]] = []
    for title, group in groups.items():
        since: Cell = None
        if title != PLAIN:
            words = below_from([each.curve for each in groups[PLAIN]], [each.curve for each in group])
            since = "never" if words is None else f"{words / 1e6:,.3g} million"
        rows.append([title, *(spread_cell(perplexities(group, split)) for split in ("valid", "test")), since])
    rows.append([f"paper, {FREQUENCY_TABLE[paper.corpus].name}, softmax", None, softmax, None])
    rows.append([f"paper, {FREQUENCY_TABLE[paper.corpus].name}, Hebbian softmax", None, hebbian, paper.below_from])
    first = outcomes[-1]
    title = f"The ends of the curves on {first.corpus['name']}, after {first.words:,} training words"
    return Table(title, ["", "validation", "test", "below plain from (words)"], rows)


def present(paper: PaperCurve, outcomes: Sequence[Outcome]) -> Presented:
    return present_all(
        outcomes, "Learning curves", [curve_table(outcomes, paper), frequency_table(outcomes)], [paper.remark]
    )


REPRODUCTIONS = [
    Reproduction(
        name="wikitext-curves",
        help="the validation curves on WikiText-103 for T = 100 and 500 (figure 4)",
        corpus="wikitext-103",
        epochs=90,
        present=partial(present, PAPER["wikitext"]),
        rows=partial(for_each_limit, (0.25, 0.1, 0.05)),
        rule_grid=partial(grid, (0.25, 0.1, 0.05)),
        hint="; or give --corpus wikitext-2 --size small, a smaller one of its kind",
    ),
    Reproduction(
        name="gutenberg-curves",
        help="the validation curves on Gutenberg for T = 100 and 500 (appendix A.2)",
        corpus="gutenberg",
        epochs=80,
        present=partial(present, PAPER["gutenberg"]),
        rows=partial(for_each_limit, (0.1,)),
        rule_grid=partial(grid, (0.1,)),
        hint="; or prepare other books with hebbian data prepare gutenberg --books PLACE and give their --corpus",
    ),
    Reproduction(
        name="gigaword-curves",
        help="the curves on GigaWord, news in the order of time (appendix A.3)",
        corpus="gigaword",
        epochs=1.5,
        present=partial(present, PAPER["gigaword"]),
        hint="; or give --corpus reuters --size small: news of 1987 in the order of time, as a stand-in",
    ),
]
RECIPES = [reproduction.recipe() for reproduction in REPRODUCTIONS]
