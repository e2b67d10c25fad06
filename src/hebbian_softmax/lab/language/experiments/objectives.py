"""`hebbian reproduce objectives`: the four inner objectives of section 3.3 on WikiText-103 (section 4.4)."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hebbian_softmax.lab.language.experiments.presentation import Presented, Row, present_all
from hebbian_softmax.lab.language.experiments.reproduction import Reproduction
from hebbian_softmax.lab.language.experiments.tables import frequency_table, totals_table
from hebbian_softmax.lab.language.experiments.trials import Outcome
from hebbian_softmax.lab.language.settings import OBJECTIVES

NAMES = {"l2": "L2", "ip": "IP", "svm": "SVM", "smax": "Smax"}
PAPER = "The paper shows a figure without numbers and calls the four roughly equivalent."


def for_each_objective(rows: Sequence[Row], settings: Any) -> list[Row]:
    """Tuned with L2, the paper's own rule; the others differ from it by the objective alone."""
    found = []
    for short, title, chosen in rows:
        if chosen.head == "plain":
            found.append((short, title, chosen))
        else:
            found += [
                (f"{short}-{name}", f"{title}, {NAMES[name]}", replace(chosen, objective=name)) for name in OBJECTIVES
            ]
    return found


def present(outcomes: Sequence[Outcome]) -> Presented:
    return present_all(outcomes, "Inner objectives", [totals_table(outcomes), frequency_table(outcomes)], [PAPER])


REPRODUCTIONS = [
    Reproduction(
        name="objectives",
        help="the inner objectives L2, IP, SVM and Smax on WikiText-103 (section 4.4, appendix A.4)",
        corpus="wikitext-103",
        epochs=90,
        present=present,
        rows=for_each_objective,
        left_out=("objective",),
        hint="; or give --corpus wikitext-2 --size small, a smaller one of its kind",
    )
]
