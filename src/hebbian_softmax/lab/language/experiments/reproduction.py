"""What the paper's experiments on language models share: their options, and the three rows each of them has.

Each tunes a plain softmax, the literal rule and the corrected rule with equally many trials, then trains what was
chosen from seeds of its own. `--size` shrinks the model, the batches, T and the number of epochs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.base.settings import choice, integer, number, setting
from hebbian_softmax.lab.data.corpus import Corpus
from hebbian_softmax.lab.data.registry import KNOWN, no_corpus
from hebbian_softmax.lab.language.experiments.grids import (
    LSTM,
    RULE,
    Candidate,
    around_choice,
    base_settings,
    candidates,
    grid_settings,
    paper_rule,
)
from hebbian_softmax.lab.language.experiments.presentation import (
    Experiment,
    Presented,
    Row,
    WordRecipe,
    finals,
    make_recipe,
    rows_of,
)
from hebbian_softmax.lab.language.experiments.trials import Bench, Measure, Outcome, WordSets
from hebbian_softmax.lab.language.experiments.tuning import CORRECTED, LITERAL, tune
from hebbian_softmax.lab.language.settings import PRESETS, FolderTrain, TrainSettings
from hebbian_softmax.lab.language.source import FOLDER, prepared_corpus

RULES = (LITERAL, CORRECTED)
EPOCHS = {"small": 3.0, "tiny": 1.0}  # of the sizes that are not the paper's
SETTLED = ("rate", "rule_scale", "center", "epochs")  # options of a training that the recipes decide by rows


@dataclass(frozen=True)
class ReproduceSettings:
    """Beside the settings of `hebbian train`, of which those that are tuned take several values."""

    corpus: str = setting("", "a corpus by name, or the folder of a prepared one", str)
    size: str = setting("paper", f"of models, batches and epochs: {', '.join(PRESETS)}", choice(*PRESETS))
    trials: int = setting(9, "settings tried for each row; 0: the paper's choice, untuned", integer(0))
    tuning_share: float = setting(1.0, "of the training steps that a trial of the tuning takes", number(0, 1))
    seeds: int = setting(2, "seeds of the rows reported", integer(1, 1000))
    epochs: float = setting(0.0, "passes over the training text; 0: as the size says", number(0))
    budget: float = setting(0.0, "seconds after which to stop, to be resumed; 0 for no limit", number(0))


@dataclass(frozen=True)
class Reproduction:
    """An experiment of the paper: its corpus, how long it trained, and what is made of the tuned settings."""

    name: str
    help: str
    corpus: str
    epochs: float
    """Passes over the training text in the paper."""
    present: Callable[[Sequence[Outcome]], Presented]
    rows: Callable[[Sequence[Row], Any], list[Row]] = lambda rows, settings: list(rows)
    """From the rows tuned to those reported."""
    rule_grid: Callable[[str], dict[str, tuple[Any, ...]]] = paper_rule
    left_out: tuple[str, ...] = ()
    sets: Callable[[Corpus], WordSets] = lambda corpus: {}
    more: Callable[[Any], Sequence[Measure]] = lambda settings: ()
    own: type[ReproduceSettings] = ReproduceSettings
    hint: str = ""

    def recipe(self) -> WordRecipe:
        """The command `hebbian reproduce NAME`."""
        return make_recipe(
            Experiment(
                f"reproduce {self.name}",
                lambda settings: place(settings)[0],
                partial(carry_out, self),
                self.present,
                self.sets,
                self.more,
                self.hint,
            ),
            help=self.help,
            description=(
                f"The paper's experiment: {self.help}. Tunes a plain softmax, the literal rule and the corrected "
                "rule equally often on the validation text, then reports seeds of their own. At size paper it trains "
                f"for {self.epochs:g} epochs. See docs/language-models.md."
            ),
            settings=grid_settings(
                "ReproduceSettings", self.own, TrainSettings, SETTLED + self.left_out, corpus=self.corpus
            ),
        )


def carry_out(reproduction: Reproduction, bench: Bench, settings: Any) -> None:
    """Tune the three rows, then train those reported."""
    epochs = settings.epochs or {**EPOCHS, "paper": reproduction.epochs}[settings.size]
    _, trained, more = place(settings)
    base = base_settings(settings, trained, settings.size, epochs=epochs, **more)
    chosen = tune(
        bench,
        base,
        candidates(settings, LSTM, around_choice(settings.size), trained),
        RULES,
        rule_grid(reproduction, settings),
        trials=settings.trials,
        share=settings.tuning_share,
    )
    bench.do(finals(reproduction.rows(rows_of(chosen, RULES), settings), settings.seeds))


def rule_grid(reproduction: Reproduction, settings: Any) -> list[Candidate]:
    return candidates(settings, RULE, reproduction.rule_grid(settings.size), TrainSettings)


def place(settings: Any) -> tuple[str, type[TrainSettings], dict[str, str]]:
    """How `hebbian train` names the corpus: its name and settings, and the values that only a folder has."""
    if settings.corpus in KNOWN:
        return settings.corpus, TrainSettings, {}
    if (folder := prepared_corpus(settings.corpus)) is None:
        raise LabError(f"--corpus {no_corpus(settings.corpus)}")
    return FOLDER, FolderTrain, {"corpus": folder}
