"""`hebbian sweep CORPUS`: the paper's grid of the network (section 4.2), then a grid of T and γ."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from hebbian_softmax.lab.base.settings import choice, integer, setting
from hebbian_softmax.lab.language.experiments.experiment import Experiment, ExperimentSettings
from hebbian_softmax.lab.language.experiments.tables import frequency_table, totals_table
from hebbian_softmax.lab.language.experiments.trials import Outcome
from hebbian_softmax.lab.language.experiments.tuning import (
    Grid,
    Rule,
    around_choice,
    base_settings,
    grid_settings,
    paper_sweep,
)
from hebbian_softmax.lab.language.model import PRESETS
from hebbian_softmax.lab.language.names import HEBBIAN
from hebbian_softmax.lab.language.settings import TrainSettings
from hebbian_softmax.lab.language.source import CORPORA, settings_type
from hebbian_softmax.lab.report.tables import Table


@dataclass(frozen=True)
class SweepSettings(ExperimentSettings):
    """The settings of a sweep. Those of the grids take several values."""

    preset: str = setting(
        "small", f"sizes: {', '.join(PRESETS)}; the grid of --hidden is built around them", choice(*PRESETS)
    )
    trials: int = setting(9, "settings tried with each head, a fixed choice from the grids", integer(1))


class Sweep(Experiment[SweepSettings]):
    """`hebbian sweep NAME`: a plain softmax and the rule as the options of `hebbian train` describe it."""

    title = "A sweep"

    def __init__(self, name: str, help: str) -> None:
        self.trained = cast(type[TrainSettings], settings_type("train", name))
        super().__init__(
            verb="sweep",
            name=name,
            help=help,
            description=(
                f"Tunes the network and then the rule on {re.split('[;:]', help)[0]}: usual grids, or the values "
                "given, with equally many trials of both heads. See docs/language-models.md."
            ),
            settings=grid_settings(SweepSettings, self.trained),
        )

    def source(self, settings: SweepSettings) -> str:
        return self.name

    def base(self, settings: SweepSettings) -> TrainSettings:
        return base_settings(settings, self.trained, settings.preset)

    def rules(self, settings: SweepSettings) -> list[Rule]:
        return [Rule(HEBBIAN.key, HEBBIAN.title, {})]

    def network_grid(self, base: TrainSettings) -> Grid:
        return paper_sweep(base.sizes) if base.model == "lstm" else around_choice(base.sizes)

    def tables(self, outcomes: Sequence[Outcome]) -> list[Table]:
        return [totals_table(outcomes), frequency_table(outcomes)]


RECIPES = [Sweep(name, help) for name, help in CORPORA.items()]
