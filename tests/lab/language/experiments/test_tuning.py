"""What is chosen, and by what."""

import math
from collections.abc import Sequence
from typing import Any, cast

import pytest

from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.language.experiments.trials import Bench, Outcome, Trial, as_stored
from hebbian_softmax.lab.language.experiments.tuning import (
    CORRECTED,
    LITERAL,
    PLAIN,
    SEED,
    best_of,
    tabulate_tuning,
    tune,
)
from hebbian_softmax.lab.language.settings import TrainSettings

LSTMS: list[dict[str, Any]] = [{"hidden": hidden, "learning_rate": 0.1} for hidden in (8, 4, 16)]
RULES = [{"limit": limit, "gamma": 0.1} for limit in (20, 5, 100)]


def outcome_of(trial: Trial, valid: float, test: float) -> Outcome:
    return Outcome(
        name=trial.name,
        part=trial.part,
        title=trial.title,
        settings=as_stored(trial.settings),
        corpus={"name": "toy", "fingerprint": "f", "vocabulary": 9, "settings": {}},
        steps=10,
        words=100,
        seconds=1.0,
        device="cpu",
        diverged=math.isinf(valid),
        curve=[
            {"step": 5, "words": 50, "valid_perplexity": 1.0},
            {"step": 10, "words": 100, "valid_perplexity": valid},
        ],
        scores={"test": {"perplexity": test}},
    )


class FakeBench:
    """Trials whose test perplexity would choose the opposite of what the validation perplexity chooses."""

    def __init__(self) -> None:
        self.trials: list[Trial] = []
        self.outcomes: list[Outcome] = []

    def do(self, trials: Sequence[Trial]) -> list[Outcome]:
        self.trials += trials
        found = []
        for trial in trials:
            settings = trial.settings
            valid = float(settings.hidden + (settings.limit if settings.head == "hebbian" else 0))
            valid += 1000 * (settings.rate == "paper") * (settings.limit == 5)  # the literal rule likes another T
            found.append(outcome_of(trial, valid, 10_000 - valid))
        self.outcomes += found
        return found


def test_validation_chooses_and_each_head_has_as_many_trials() -> None:
    bench = FakeBench()
    base = TrainSettings(steps=20, seed=3)
    chosen = tune(cast(Bench, bench), base, LSTMS, [LITERAL, CORRECTED], RULES, trials=3, share=0.5)
    assert (chosen["plain"].head, chosen["plain"].hidden) == ("plain", 4)
    assert (chosen["literal"].hidden, chosen["literal"].limit) == (4, 20)
    assert (chosen["corrected"].hidden, chosen["corrected"].limit) == (4, 5)
    assert {each.seed for each in chosen.values()} == {3}  # the reported seeds come later, the tuning's is another
    assert {each.steps for each in chosen.values()} == {20}
    assert {trial.settings.seed for trial in bench.trials} == {SEED}
    assert {trial.settings.steps for trial in bench.trials} == {10}
    counts = {title: sum(trial.title == title for trial in bench.trials) for title in ("literal rule", PLAIN)}
    assert counts == {"literal rule": 3, PLAIN: 3}
    assert {trial.settings.head for trial in bench.trials if trial.title == PLAIN} == {"plain"}
    literal = next(trial.settings for trial in bench.trials if trial.title == "literal rule")
    assert (literal.rate, literal.rule_scale, literal.center) == ("paper", "1", False)
    assert len({trial.name for trial in bench.trials}) == len(bench.trials) == 9

    (table,) = tabulate_tuning(bench.outcomes)
    assert len(table.rows) == 9
    marked = [row for row in table.rows if row[-1] == "chosen"]
    assert [row[0] for row in marked] == [PLAIN, "literal rule", "corrected rule"]
    assert [row[-2] for row in marked] == [4.0, 24.0, 9.0]
    assert "3 settings each" in table.title
    (single,) = tabulate_tuning([outcome for outcome in bench.outcomes if outcome.title == PLAIN][:1])
    assert single.title.startswith("Tuning: 1 setting each, ")


def test_without_trials_the_papers_choice_is_taken() -> None:
    bench = FakeBench()
    chosen = tune(cast(Bench, bench), TrainSettings(), LSTMS, [LITERAL], RULES, trials=0)
    assert bench.trials == []
    assert chosen["plain"].hidden == chosen["literal"].hidden == 8
    assert chosen["literal"].limit == 20
    assert tabulate_tuning([]) == []


def test_what_is_not_finite_is_never_chosen() -> None:
    trial = Trial("tuning", "x", "some rule", TrainSettings())
    bad, good = outcome_of(trial, math.inf, 1.0), outcome_of(trial, 50.0, 99.0)
    assert best_of([bad, good]) == 1
    with pytest.raises(LabError, match="every trial of some rule"):
        best_of([bad, bad])
