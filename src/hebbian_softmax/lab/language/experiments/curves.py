"""`hebbian reproduce wikitext-curves | gutenberg-curves | gigaword-curves | objectives`: the paper's learning curves.

These are figure 4 (WikiText-103, T = 100 and 500) and the figures of the appendices: Gutenberg (T = 100 and 500,
γ = 0.1), GigaWord, and the four inner objectives of section 3.3 on WikiText-103 (section 4.4).
"""

from collections.abc import Sequence

from hebbian_softmax.lab.base.rule import DEFAULT_LIMIT, DEFAULT_WRITE
from hebbian_softmax.lab.language.experiments.experiment import ReproduceSettings, Reproduction
from hebbian_softmax.lab.language.experiments.paper_numbers import ALL, FREQUENCY_TABLE
from hebbian_softmax.lab.language.experiments.tables import by_title, frequency_table, perplexities, totals_table
from hebbian_softmax.lab.language.experiments.trials import Outcome
from hebbian_softmax.lab.language.experiments.tuning import GAMMAS, Grid, Row, candidates, vary_rules
from hebbian_softmax.lab.language.names import PLAIN
from hebbian_softmax.lab.language.report.curves import below_from
from hebbian_softmax.lab.language.report.perplexities import spread_cell
from hebbian_softmax.lab.language.settings import OBJECTIVES
from hebbian_softmax.lab.report.tables import Cell, Table


class Curves(Reproduction[ReproduceSettings]):
    """A figure of learning curves, and a table of where the curves end."""

    title = "Learning curves"
    settings_type = ReproduceSettings
    paper_remark: str
    """What the paper says about its figure."""
    paper_below_from: str
    """The training words from which the rule's curve is below the softmax's in the paper."""

    def tables(self, outcomes: Sequence[Outcome]) -> list[Table]:
        return [self.ends(outcomes), frequency_table(outcomes)]

    def remark(self, outcomes: Sequence[Outcome]) -> str:
        return self.paper_remark

    def ends(self, outcomes: Sequence[Outcome]) -> Table:
        """Show where the curves end, and from where on each rule is below the plain softmax."""
        groups = by_title(outcomes, "final")
        rows: list[list[Cell]] = []
        for title, group in groups.items():
            since: Cell = None
            if title != PLAIN.title:
                words = below_from([each.curve for each in groups[PLAIN.title]], [each.curve for each in group])
                since = "never" if words is None else f"{words / 1e6:,.3g} million"
            rows.append([title, *(spread_cell(perplexities(group, split)) for split in ("valid", "test")), since])
        since_in_paper = (None, self.paper_below_from)
        for (title, cells), since in zip(FREQUENCY_TABLE[self.corpus].items(), since_in_paper, strict=True):
            rows.append([title, None, float(cells[ALL]), since])
        last = outcomes[-1]
        title = f"The ends of the curves on {last.corpus['name']}, after {last.words:,} training words"
        return Table(title, ["", "validation", "test", "below plain from (words)"], rows)


class CurvesByLimit(Curves):
    """Learning curves of each rule with each T of the figure."""

    gammas: tuple[float, ...]
    """The values of γ to try with the paper's rule at size paper."""

    def rule_grid(self, write: str, preset: str) -> Grid:
        limits = (500, 100) if preset == "paper" else (20, 100)  # Smaller sizes see fewer words.
        if write == DEFAULT_WRITE:  # the same curves, and first that of the library's default
            return {"limit": (DEFAULT_LIMIT, *limits), "gamma": GAMMAS}
        return {"limit": limits, "gamma": self.gammas if preset == "paper" else (0.05, 0.1, 0.25)}

    def rows(self, tuned: Sequence[Row], settings: ReproduceSettings) -> list[Row]:
        found: list[Row] = []
        for row in tuned:
            tried = candidates(settings, self.rule_grid(row.settings.write, settings.size))
            limits = sorted({each["limit"] for each in tried}, key=lambda each: -1 if each == DEFAULT_LIMIT else each)
            found += vary_rules([row], "limit", {T: (f"T{T}", f"T = {T}") for T in limits})
        return found


class WikitextCurves(CurvesByLimit):
    """Figure 4."""

    name = "wikitext-curves"
    help = "the validation curves on WikiText-103 for T = 100 and 500 (figure 4)"
    gammas = (0.25, 0.1, 0.05)
    paper_below_from = "2–3 billion"
    paper_remark = (
        "The paper trains for 9 billion words; its T = 100 is faster at first and overfits after 5.5 billion."
    )


class GutenbergCurves(CurvesByLimit):
    """The figure of appendix A.2."""

    name = "gutenberg-curves"
    help = "the validation curves on Gutenberg for T = 100 and 500 (appendix A.2)"
    corpus = "gutenberg"
    epochs = 80
    gammas = (0.1,)
    hint = "; or prepare other books with hebbian data prepare gutenberg --books PLACE and give their --corpus"
    paper_below_from = "about 4 billion"
    paper_remark = "The paper trains for 15 billion words; the gap grows to 2–3 points."


class GigawordCurves(Curves):
    """The figure of appendix A.3."""

    name = "gigaword-curves"
    help = "the curves on GigaWord, news in the order of time (appendix A.3)"
    corpus = "gigaword"
    epochs = 1.5
    hint = "; or give --corpus reuters --size small: news of 1987 in the order of time, as a stand-in"
    paper_below_from = "–"
    paper_remark = "The paper trains for 6 billion words and measures on random articles of 2010."


class Objectives(Reproduction[ReproduceSettings]):
    """Rules tuned with L2, the paper's own objective; the other rows differ from these by the objective alone."""

    name = "objectives"
    help = "the inner objectives L2, IP, SVM and Smax on WikiText-103 (section 4.4, appendix A.4)"
    title = "Inner objectives"
    settings_type = ReproduceSettings
    left_out = ("objective",)

    def rows(self, tuned: Sequence[Row], settings: ReproduceSettings) -> list[Row]:
        titles = {"l2": "L2", "ip": "IP", "svm": "SVM", "smax": "Smax"}
        return vary_rules(tuned, "objective", {name: (name, titles[name]) for name in OBJECTIVES})

    def tables(self, outcomes: Sequence[Outcome]) -> list[Table]:
        return [totals_table(outcomes), frequency_table(outcomes)]

    def remark(self, outcomes: Sequence[Outcome]) -> str:
        return "The paper shows a figure without numbers and calls the four roughly equivalent."


RECIPES = [WikitextCurves(), GutenbergCurves(), GigawordCurves(), Objectives()]
