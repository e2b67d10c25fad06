"""Which settings are tried: the paper's grids, what the command line fixes, equally many for each head."""

import argparse
from dataclasses import fields
from typing import Any

import pytest

from hebbian_softmax.lab.base.settings import add_options, from_values, given_options
from hebbian_softmax.lab.language.experiments import grids
from hebbian_softmax.lab.language.experiments.grids import (
    LSTM,
    RULE,
    candidates,
    grid_settings,
    rule_candidates,
    subset,
)
from hebbian_softmax.lab.language.experiments.sweep import SweepSettings
from hebbian_softmax.lab.language.settings import PRESETS, TrainSettings

KIND = grid_settings("Toy", SweepSettings, TrainSettings)


def from_command_line(*words: str) -> Any:
    parser = argparse.ArgumentParser()
    add_options(parser, KIND)
    return KIND(**given_options(parser.parse_args(list(words)), KIND))


def test_the_paper_swept_96_lstms_and_9_rules() -> None:
    settings = from_command_line()
    lstms = candidates(settings, LSTM, grids.paper_sweep("paper"), TrainSettings)
    assert len(lstms) == len({tuple(each.items()) for each in lstms}) == 96
    assert {each["hidden"] for each in lstms} == {1024, 2048, 4096}
    assert {each["layers"] for each in lstms} == {1, 2}
    assert {each["input_dropout"] for each in lstms} == {0, 0.1, 0.2, 0.3}
    assert lstms[0] == {  # the one that was selected
        "hidden": 2048, "layers": 1, "input_dropout": 0.3, "output_dropout": 0.0,
        "layer_norm": "none", "tied": True, "learning_rate": PRESETS["paper"].learning_rate,
    }  # fmt: skip
    rules = candidates(settings, RULE, grids.paper_rule("paper"), TrainSettings)
    assert len(rules) == 9
    assert {each["limit"] for each in rules} == {100, 500, 1000}
    assert {each["gamma"] for each in rules} == {0.05, 0.1, 0.25}
    assert rules[0] == {"limit": 500, "gamma": 0.25}


def test_a_value_given_fixes_its_dimension_and_several_are_tried() -> None:
    settings = from_command_line("--hidden", "64", "--layers", "2", "--input-dropout", "0.5, 0.1,0.5", "--tied", "no")
    found = candidates(settings, LSTM, grids.paper_sweep("small"), TrainSettings)
    assert {each["hidden"] for each in found} == {64}
    assert [each["input_dropout"] for each in found] == [0.5, 0.5, 0.1, 0.1]
    assert {each["layer_norm"] for each in found} == {"none", "output"}
    assert from_values(KIND, vars(settings)) == settings  # as a resumed run reads it
    for words in (["--hidden", "64,many"], ["--layers", "1,3"], ["--gamma", "0.1,"]):
        with pytest.raises(SystemExit):
            from_command_line(*words)


def test_all_other_options_of_a_training_are_there() -> None:
    names = {field.name for field in fields(KIND)}
    assert {field.name for field in fields(TrainSettings)} - names == set(grids.OF_A_TRIAL) - {"preset"}


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
    needed = -(-count // rules)  # no LSTM before a better one is through with all rules
    assert {each["hidden"] for each in found} == set(range(needed))
