"""`hebbian reproduce objectives`: the four inner objectives of section 3.3 on WikiText-103 (section 4.4)."""

from collections.abc import Sequence

from hebbian_softmax.lab.language.experiments.experiment import ReproduceSettings, Reproduction
from hebbian_softmax.lab.language.experiments.tables import frequency_table, totals_table
from hebbian_softmax.lab.language.experiments.trials import Outcome
from hebbian_softmax.lab.language.experiments.tuning import Row
from hebbian_softmax.lab.language.settings import OBJECTIVES
from hebbian_softmax.lab.report.tables import Table

NAMES = {"l2": "L2", "ip": "IP", "svm": "SVM", "smax": "Smax"}


class Objectives(Reproduction[ReproduceSettings]):
    """Rules tuned with L2, the paper's own objective; the other rows differ from these by the objective alone."""

    name = "objectives"
    help = "the inner objectives L2, IP, SVM and Smax on WikiText-103 (section 4.4, appendix A.4)"
    title = "Inner objectives"
    settings_type = ReproduceSettings
    corpus = "wikitext-103"
    epochs = 90
    left_out = ("objective",)
    hint = "; or give --corpus wikitext-2 --size small, a smaller corpus of the same kind"

    def rows(self, tuned: Sequence[Row], settings: ReproduceSettings) -> list[Row]:
        return [
            each
            for row in tuned
            for each in ([row] if row.plain else [row.varied(name, NAMES[name], objective=name) for name in OBJECTIVES])
        ]

    def tables(self, outcomes: Sequence[Outcome]) -> list[Table]:
        return [totals_table(outcomes), frequency_table(outcomes)]

    def remark(self, outcomes: Sequence[Outcome]) -> str:
        return "The paper shows a figure without numbers and calls the four roughly equivalent."


RECIPES = [Objectives()]
