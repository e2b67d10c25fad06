"""Which settings are tried, equally many for each head, and which of them are chosen."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any, cast

import pytest

from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.base.settings import add_options, from_values, given_options
from hebbian_softmax.lab.language.experiments.sweep import RECIPES, SweepSettings
from hebbian_softmax.lab.language.experiments.tables import tuning_tables
from hebbian_softmax.lab.language.experiments.trials import Bench, Outcome, Trial
from hebbian_softmax.lab.language.experiments.tuning import (
    DEFAULT,
    LITERAL,
    OF_A_TRIAL,
    SEED,
    best_of,
    candidates,
    grid_settings,
    paper_rule,
    paper_sweep,
    rule_candidates,
    subset,
    tune,
    usual_rule,
)
from hebbian_softmax.lab.language.model import PRESETS
from hebbian_softmax.lab.language.names import PLAIN
from hebbian_softmax.lab.language.settings import TrainSettings

KIND = grid_settings(SweepSettings, TrainSettings)
LSTMS: list[dict[str, Any]] = [{"hidden": hidden, "learning_rate": 0.1} for hidden in (8, 4, 16)]
RULES = [{"limit": limit, "gamma": 0.1} for limit in (20, 5, 100)]
OTHER = [{"limit": limit, "gamma": 0.2} for limit in (100, 5, 300)]


def from_command_line(*words: str) -> Any:
    parser = argparse.ArgumentParser()
    add_options(parser, KIND)
    return KIND(**given_options(parser.parse_args(list(words)), KIND))


def test_the_paper_swept_96_lstms_and_9_rules() -> None:
    settings = from_command_line()
    lstms = candidates(settings, paper_sweep(PRESETS["paper"]))
    assert len(lstms) == len({tuple(each.items()) for each in lstms}) == 96
    assert {each["hidden"] for each in lstms} == {1024, 2048, 4096}
    assert {each["layers"] for each in lstms} == {1, 2}
    assert {each["input_dropout"] for each in lstms} == {0, 0.1, 0.2, 0.3}
    assert lstms[0] == {  # The paper selected this one.
        "hidden": 2048, "layers": 1, "input_dropout": 0.3, "output_dropout": 0.0,
        "layer_norm": "none", "tied": True, "learning_rate": PRESETS["paper"].learning_rate,
    }  # fmt: skip
    rules = candidates(settings, paper_rule("paper"))
    assert len(rules) == 9
    assert {each["limit"] for each in rules} == {100, 500, 1000}
    assert {each["gamma"] for each in rules} == {0.05, 0.1, 0.25}
    assert rules[0] == {"limit": 500, "gamma": 0.25}
    assert usual_rule("literal", "paper") == usual_rule("centred", "paper") == paper_rule("paper")
    around = candidates(settings, usual_rule("across", "paper"))
    assert len(around) == 9
    assert around[0] == {"limit": "auto", "gamma": 0.2}  # the library's default


def test_a_value_given_fixes_its_dimension_and_several_are_tried() -> None:
    settings = from_command_line("--hidden", "64", "--layers", "2", "--input-dropout", "0.5, 0.1,0.5", "--tied", "no")
    found = candidates(settings, paper_sweep(PRESETS["small"]))
    assert {each["hidden"] for each in found} == {64}
    assert [each["input_dropout"] for each in found] == [0.5, 0.5, 0.1, 0.1]
    assert {each["layer_norm"] for each in found} == {"none", "output"}
    assert from_values(KIND, vars(settings)) == settings  # A resumed run reads it so.
    for words in (["--hidden", "64,many"], ["--layers", "1,-3"], ["--gamma", "0.1,"]):
        with pytest.raises(SystemExit):
            from_command_line(*words)


def test_another_network_is_tried_with_the_sizes_of_its_preset() -> None:
    sweep = next(recipe for recipe in RECIPES if recipe.name == "zipf")
    found = candidates(from_command_line(), sweep.network_grid(TrainSettings(model="transformer")))
    assert len(found) == 9
    fixed = {"hidden": 2048, "layers": 6, "output_dropout": 0.0, "layer_norm": "none", "tied": True}
    assert all(fixed.items() <= each.items() for each in found)
    assert {each["learning_rate"] for each in found} == {0.0005, 0.00025, 0.001}
    assert len(candidates(from_command_line(), sweep.network_grid(TrainSettings()))) == 96


def test_all_other_options_of_a_training_are_there() -> None:
    names = {field.name for field in fields(KIND)}
    assert {field.name for field in fields(TrainSettings)} - names == set(OF_A_TRIAL) - {"preset"}


@pytest.mark.parametrize("count", [1, 2, 5, 9, 96])
def test_a_subset_is_always_the_same_and_has_the_papers_choice(count: int) -> None:
    grid = [{"number": number} for number in range(96)]
    chosen = subset(grid, count)
    assert chosen == subset(grid, count)
    assert chosen[0] == grid[0]
    assert len({each["number"] for each in chosen}) == count
    assert [each["number"] for each in chosen] == sorted(each["number"] for each in chosen)


@pytest.mark.parametrize(("count", "rules"), [(1, 9), (4, 9), (9, 9), (20, 9), (5, 1), (3, 2)])
def test_the_rule_gets_as_many_settings_as_the_lstm(count: int, rules: int) -> None:
    best = [{"hidden": number} for number in range(count)]
    found = rule_candidates(best, [{"limit": number} for number in range(rules)], count)
    assert len(found) == len({tuple(each.items()) for each in found}) == count
    assert found[0] == {"hidden": 0, "limit": 0}
    needed = -(-count // rules)  # An LSTM comes after all rules with a better LSTM.
    assert {each["hidden"] for each in found} == set(range(needed))


def outcome_of(trial: Trial, valid: float, test: float) -> Outcome:
    corpus = {"name": "toy", "fingerprint": "f", "vocabulary": 9, "settings": {}}
    curve = [{"valid_perplexity": 1.0}, {"valid_perplexity": valid}]
    of_trial = (trial.name, trial.part, trial.title, asdict(trial.settings), corpus)
    return Outcome(*of_trial, 10, 100, 1.0, "cpu", math.isinf(valid), curve, {"test": {"perplexity": test}})


class FakeBench:
    """A bench whose trials have test perplexities that would choose the opposite of the validation perplexities."""

    def __init__(self) -> None:
        self.trials: list[Trial] = []
        self.outcomes: list[Outcome] = []

    def do(self, trials: Sequence[Trial]) -> list[Outcome]:
        self.trials += trials
        found = []
        for trial in trials:
            settings = trial.settings
            valid = float(settings.hidden + (settings.limit if settings.head == "hebbian" else 0))
            valid += 1000 * (settings.write == "literal") * (settings.limit == 5)  # The literal rule needs another T.
            found.append(outcome_of(trial, valid, 10_000 - valid))
        self.outcomes += found
        return found


def test_validation_chooses_and_each_head_has_as_many_trials() -> None:
    bench = FakeBench()
    base = TrainSettings(steps=20, seed=3)
    rows = tune(cast(Bench, bench), base, LSTMS, [(LITERAL, RULES), (DEFAULT, OTHER)], trials=3, share=0.5)
    chosen = {row.short: row.settings for row in rows}
    assert (chosen["plain"].head, chosen["plain"].hidden) == ("plain", 4)
    assert (chosen["literal"].hidden, chosen["literal"].limit) == (4, 20)
    assert (chosen["default"].hidden, chosen["default"].limit) == (4, 5)
    assert {each.seed for each in chosen.values()} == {3}  # The tuning has its own seed; those of the rows come later.
    assert {each.steps for each in chosen.values()} == {20}
    assert {trial.settings.seed for trial in bench.trials} == {SEED}
    assert {trial.settings.steps for trial in bench.trials} == {10}
    counts = {title: sum(trial.title == title for trial in bench.trials) for title in ("literal rule", PLAIN.title)}
    assert counts == {"literal rule": 3, PLAIN.title: 3}
    assert {trial.settings.head for trial in bench.trials if trial.title == PLAIN.title} == {"plain"}
    literal = next(trial.settings for trial in bench.trials if trial.title == "literal rule")
    assert (literal.rate, literal.rule_scale, literal.write) == ("paper", "1", "literal")
    assert (literal.start, literal.fade) == (0, False)
    default = [trial.settings for trial in bench.trials if trial.title == "default rule"]
    assert {(each.rate, each.rule_scale, each.write) for each in default} == {("recent", "match", "across")}
    assert {(each.start, each.fade, each.gamma) for each in default} == {("auto", True, 0.2)}
    assert len({trial.name for trial in bench.trials}) == len(bench.trials) == 9

    (table,) = tuning_tables(bench.outcomes)
    assert len(table.rows) == 9
    marked = [row for row in table.rows if row[-1] == "chosen"]
    assert [row[0] for row in marked] == [PLAIN.title, "literal rule", "default rule"]
    assert [row[-2] for row in marked] == [4.0, 24.0, 9.0]
    assert "3 settings each" in table.title
    (single,) = tuning_tables([outcome for outcome in bench.outcomes if outcome.title == PLAIN.title][:1])
    assert single.title.startswith("Tuning: 1 setting each, ")


def test_without_trials_the_papers_choice_is_taken() -> None:
    bench = FakeBench()
    rows = tune(cast(Bench, bench), TrainSettings(), LSTMS, [(LITERAL, RULES)], trials=0)
    chosen = {row.short: row.settings for row in rows}
    assert bench.trials == []
    assert chosen["plain"].hidden == chosen["literal"].hidden == 8
    assert chosen["literal"].limit == 20
    assert tuning_tables([]) == []


def test_what_is_not_finite_is_never_chosen() -> None:
    trial = Trial("tuning", "x", "some rule", TrainSettings())
    bad, good = outcome_of(trial, math.inf, 1.0), outcome_of(trial, 50.0, 99.0)
    assert best_of([bad, good]) == 1
    with pytest.raises(LabError, match="every trial of some rule"):
        best_of([bad, bad])
