"""`hebbian sweep CORPUS`: the paper's grids, first of the LSTM, then of T and γ (section 4.2).

The plain softmax is tuned first; the rule is tuned on the best LSTM with as many trials. The settings chosen are
trained anew from other seeds, and only these models meet the test text.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from hebbian_softmax.lab.base.settings import choice, integer, number, setting
from hebbian_softmax.lab.language.experiments.grids import (
    LSTM,
    RULE,
    base_settings,
    candidates,
    grid_settings,
    paper_rule,
    paper_sweep,
)
from hebbian_softmax.lab.language.experiments.presentation import (
    Experiment,
    Presented,
    WordRecipe,
    finals,
    make_recipe,
    present_all,
    rows_of,
)
from hebbian_softmax.lab.language.experiments.tables import frequency_table, totals_table
from hebbian_softmax.lab.language.experiments.trials import Bench, Outcome
from hebbian_softmax.lab.language.experiments.tuning import Rule, tune
from hebbian_softmax.lab.language.settings import PRESETS, TrainSettings
from hebbian_softmax.lab.language.source import CORPORA, settings_type

HEBBIAN = Rule("hebbian", "Hebbian softmax", {})


@dataclass(frozen=True)
class SweepSettings:
    """Beside the settings of `hebbian train`, of which those of the grids take several values."""

    preset: str = setting("small", f"sizes: {', '.join(PRESETS)}; the grid of hidden is around it", choice(*PRESETS))
    trials: int = setting(9, "settings tried with each head, a fixed choice from the grids", integer(1))
    tuning_share: float = setting(1.0, "of the training steps that a trial of the tuning takes", number(0, 1))
    seeds: int = setting(2, "seeds from which the chosen settings are trained and tested", integer(1, 1000))
    budget: float = setting(0.0, "seconds after which to stop, to be resumed; 0 for no limit", number(0))


def experiment(trained: type[TrainSettings], bench: Bench, settings: Any) -> None:
    """Tune, then train what was chosen."""
    base = base_settings(settings, trained, settings.preset)
    chosen = tune(
        bench,
        base,
        candidates(settings, LSTM, paper_sweep(settings.preset), trained),
        [HEBBIAN],
        candidates(settings, RULE, paper_rule(settings.preset), trained),
        trials=settings.trials,
        share=settings.tuning_share,
    )
    bench.do(finals(rows_of(chosen, [HEBBIAN]), settings.seeds))


def present(outcomes: Sequence[Outcome]) -> Presented:
    return present_all(outcomes, "A sweep", [totals_table(outcomes), frequency_table(outcomes)])


def _recipe(name: str, help: str) -> WordRecipe:
    trained = cast(type[TrainSettings], settings_type("train", name))
    return make_recipe(
        Experiment(f"sweep {name}", lambda settings: name, partial(experiment, trained), present),
        help=help,
        description=(
            f"Tunes the LSTM and then the rule on {re.split('[;:]', help)[0]}: the paper's grids, or the values given, "
            "with equally many trials of both heads. See docs/language-models.md."
        ),
        settings=grid_settings("SweepSettings", SweepSettings, trained),
    )


RECIPES = [_recipe(name, help) for name, help in CORPORA.items()]
