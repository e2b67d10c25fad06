"""An experiment on language models as a command: tune, train the chosen settings from several seeds, show the outcomes.

Tables, figures and sentences are made from the outcomes of the trials alone. result.json holds these, so everything
shown can be made again without the device, the corpus or the folders of the trials.
"""

import argparse
import os
import time
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Generic, TypeVar

from hebbian_softmax.lab.base.console import program, quoted
from hebbian_softmax.lab.base.errors import LabError, OutOfTimeError, reason
from hebbian_softmax.lab.base.runs import Run, open_run
from hebbian_softmax.lab.base.settings import boolean, choice, integer, number, setting, whole_or_auto
from hebbian_softmax.lab.data.corpus import Corpus
from hebbian_softmax.lab.data.registry import KNOWN, no_corpus
from hebbian_softmax.lab.language.experiments.tables import by_title, settings_table, summarize, tuning_tables
from hebbian_softmax.lab.language.experiments.trials import FOLDER, Bench, Measure, Outcome, WordSets
from hebbian_softmax.lab.language.experiments.tuning import (
    CORRECTED,
    DEFAULT,
    LITERAL,
    USUAL,
    Grid,
    Row,
    Rule,
    around_choice,
    base_settings,
    candidates,
    final_trials,
    grid_settings,
    tune,
    usual_or,
    usual_rule,
)
from hebbian_softmax.lab.language.model import PRESETS
from hebbian_softmax.lab.language.names import PLAIN
from hebbian_softmax.lab.language.report.curves import BANDS, CAPTION, draw_curves
from hebbian_softmax.lab.language.settings import FolderTrain, TrainSettings
from hebbian_softmax.lab.language.source import FOLDER as ANY_FOLDER
from hebbian_softmax.lab.language.source import prepared_corpus
from hebbian_softmax.lab.report.recipe import Recipe
from hebbian_softmax.lab.report.result import Figure, Result, load_result
from hebbian_softmax.lab.report.tables import Table

CURVES = "perplexity.png"
EPOCHS = {"small": 3.0, "tiny": 1.0}
"""Passes over the training text at the sizes that are smaller than the paper's."""
SETTLED = ("rate", "rule_scale", "write", "epochs")
"""Options of `hebbian train` that a reproduction decides itself, row by row or from its size."""


@dataclass(frozen=True)
class ExperimentSettings:
    """The settings of every experiment. The options of `hebbian train` are added by `grid_settings`."""

    trials: int = setting(9, "settings tried for each row; 0: the paper's choice, untuned", integer(0))
    tuning_share: float = setting(1.0, "share of the training steps that a trial of the tuning takes", number(0, 1))
    seeds: int = setting(2, "seeds from which the chosen settings are trained and tested", integer(1, 1000))
    budget: float = setting(0.0, "seconds after which to stop, to be resumed; 0 for no limit", number(0))


S = TypeVar("S", bound=ExperimentSettings)


class Experiment(Recipe, Generic[S]):
    """Tunes a plain softmax and some rules equally often, then trains each row from several seeds.

    A subclass overrides the methods in which it differs. Its module lists an instance in `RECIPES`, and
    lab/experiments.py names the module.
    """

    title: str
    """The beginning of the result's title; the corpus's name follows."""
    hint = ""
    """Advice that is added to the error when the corpus is missing; begins with a semicolon."""

    @abstractmethod
    def source(self, settings: S) -> str:
        """Return the name of the corpus, as `hebbian train` takes it."""

    @abstractmethod
    def base(self, settings: S) -> TrainSettings:
        """Return the settings that all trials share."""

    @abstractmethod
    def network_grid(self, base: TrainSettings) -> Grid:
        """Return the networks to try unless the command line names others."""

    @abstractmethod
    def rules(self, settings: S) -> Sequence[Rule]:
        """Return the variants of the rule that are tuned beside the plain softmax."""

    def rule_grid(self, write: str, preset: str) -> Grid:
        """Return the settings to try of a rule with this kind of write, unless the command line names others."""
        return usual_rule(write, preset)

    def rows(self, tuned: Sequence[Row], settings: S) -> Sequence[Row]:
        """Return the rows to report, made from the rows that were tuned."""
        return tuned

    def sets(self, corpus: Corpus) -> WordSets:
        """Return sets of words whose perplexity is measured apart."""
        return {}

    def measures(self, settings: S) -> Sequence[Measure]:
        """Return further measurements of the final models."""
        return ()

    @abstractmethod
    def tables(self, outcomes: Sequence[Outcome]) -> list[Table]:
        """Return the tables of the experiment; those of the settings and the tuning follow them."""

    def remark(self, outcomes: Sequence[Outcome]) -> str:
        """Return what the summary says before the perplexities."""
        return ""

    def execute(self, arguments: argparse.Namespace) -> int:
        """Start or resume the experiment; refuse several processes, each of which would do all trials again."""
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise LabError(f"hebbian {self.command} trains in one process: start it without torchrun")
        return super().execute(arguments)

    def perform(self, run: Run, settings: S, quiet: bool) -> tuple[Result, dict[str, bytes]]:
        deadline = time.monotonic() + settings.budget if settings.budget else None
        source, base, measures = self.source(settings), self.base(settings), self.measures(settings)
        bench = Bench(run, source, base.device, deadline, quiet, self.sets, measures, self.hint)
        try:
            networks = candidates(settings, self.network_grid(base))
            rules = [
                (rule, candidates(settings, self.rule_grid(rule.settings.get("write", base.write), base.preset)))
                for rule in self.rules(settings)
            ]
            tuned = tune(bench, base, networks, rules, trials=settings.trials, share=settings.tuning_share)
            bench.do(final_trials(self.rows(tuned, settings), settings.seeds))
        except OutOfTimeError as error:
            raise LabError(
                f"the budget of {settings.budget:g} s is used up, {len(bench.outcomes)} trials are stored; go on with:",
                command=f"{program()} {run.typed} --resume {quoted(run.path)}",
            ) from error
        outcomes = bench.outcomes
        result = Result(
            title=f"{self.title} on {outcomes[0].corpus['name']}",
            summary=f"{self.remark(outcomes)} {summarize(by_title(outcomes, 'final'))}".strip(),
            metrics={"corpus": outcomes[0].corpus, "trials": [asdict(outcome) for outcome in outcomes]},
            tables=self._all_tables(outcomes),
            figures=[Figure(CURVES, CAPTION + BANDS)],
            next_steps=[],
        )
        return result, draw(outcomes)

    def failure(self, result: Result) -> str:
        """Name the final models whose numbers are not finite. A setting of the tuning may diverge: it is not chosen."""
        final = [each for each in outcomes_of(result) if each.part == "final"]
        lost = [each.name for each in final if each.diverged]
        if not lost:
            return ""
        return f"the numbers of {', '.join(lost)} are not finite: start a new run with lower values of --learning-rate"

    def figures_again(self, run: Run, result: Result) -> dict[str, bytes]:
        try:
            return draw(outcomes_of(result))
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise LabError(f"{run.path}: {_foreign(error)}") from error

    def tables_so_far(self, run: Run) -> list[Table]:
        """Return the tables with the seeds that all rows have; none before there is such a seed."""
        whole = whole_seeds(stored_outcomes(run))
        if PLAIN.title not in by_title(whole, "final"):
            return []
        return [replace(table, title=f"Not finished: {table.title}") for table in self._all_tables(whole)]

    def _all_tables(self, outcomes: Sequence[Outcome]) -> list[Table]:
        return [*self.tables(outcomes), settings_table(outcomes), *tuning_tables(outcomes)]


def outcomes_of(result: Result) -> list[Outcome]:
    """Return the outcomes of the trials that a result consists of."""
    try:
        return [Outcome(**trial) for trial in result.metrics["trials"]]
    except (KeyError, TypeError, ValueError) as error:
        raise LabError(_foreign(error)) from error


def _foreign(error: Exception) -> str:
    return (
        f"the result lacks numbers of its trials ({reason(error)}): "
        "show the run with the version of hebbian-softmax that wrote it"
    )


def draw(outcomes: Sequence[Outcome]) -> dict[str, bytes]:
    """Draw the learning curves of the final models; return the images by file name."""
    groups = by_title(outcomes, "final")
    return {CURVES: draw_curves({title: [each.curve for each in group] for title, group in groups.items()})}


def stored_outcomes(run: Run) -> list[Outcome]:
    """Return the outcomes of the finished trials, in the order in which the trials were begun."""
    done = (run.path / FOLDER).glob("*/result.json")
    results = {path: load_result(open_run(path.parent)) for path in done}
    try:
        order = sorted(results, key=lambda path: (path.with_name("config.json").stat().st_mtime_ns, path))
        return [Outcome(**result.metrics["trial"]) for path in order if (result := results[path]) is not None]
    except (KeyError, TypeError) as error:
        raise LabError(
            f"a result.json in {run.path / FOLDER} is not the result of a trial ({reason(error)}): "
            "delete its folder to repeat that trial"
        ) from error


def whole_seeds(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Leave out the final trials of seeds that some row lacks: means over different seeds cannot be compared."""
    titles: dict[int, set[str]] = {}
    for outcome in outcomes:
        if outcome.part == "final":
            titles.setdefault(outcome.settings["seed"], set()).add(outcome.title)
    most = max(map(len, titles.values()), default=0)
    return [each for each in outcomes if each.part != "final" or len(titles[each.settings["seed"]]) == most]


@dataclass(frozen=True)
class ReproduceSettings(ExperimentSettings):
    """The settings of every experiment of the paper. Their corpus can be replaced, their size reduced."""

    corpus: str = setting("", "a corpus by name, or the folder of a prepared one", str)
    size: str = setting("paper", f"size of models, batches and epochs: {', '.join(PRESETS)}", choice(*PRESETS))
    epochs: float = setting(0.0, "passes over the training text; 0: as the size says", number(0))
    rule: str = setting(
        "default",
        "the rule beside the literal one: default (the library's) or corrected (that of version 0.1: --write centred "
        "--start 0 --no-fade --rate inclusive)",
        choice("default", "corrected"),
        before="corrected",
    )
    start: int | str = setting(
        USUAL, "step from which that rule writes, or auto; usual: as the rule has it", usual_or(whole_or_auto)
    )
    fade: bool | str = setting(
        USUAL,
        "whether what that rule writes fades with the learning rate (yes, no); usual: as the rule has it",
        usual_or(boolean),
        before=False,
    )


R = TypeVar("R", bound=ReproduceSettings)


class Reproduction(Experiment[R]):
    """An experiment of the paper, `hebbian reproduce NAME`: a plain softmax, the literal and the default rule.

    A subclass sets `name`, `help`, `title` and the attributes below.
    """

    settings_type: type[R]
    """The experiment's own settings."""
    corpus = "wikitext-103"
    """The paper's corpus, which `--corpus` replaces."""
    epochs: float = 90
    """Passes over the training text in the paper."""
    hint = "; or give --corpus wikitext-2 --size small, a smaller corpus of the same kind"
    left_out: tuple[str, ...] = ()
    """Further options of `hebbian train` that the experiment decides itself."""

    def __init__(self) -> None:
        super().__init__(
            verb="reproduce",
            name=self.name,
            help=self.help,
            description=(
                f"The paper's experiment: {self.help}. Tunes a plain softmax, the paper's literal rule and the default "
                "rule equally often on the validation text, then trains the chosen settings from other seeds and "
                f"reports these. At size paper it trains for {self.epochs:g} epochs. See docs/language-models.md."
            ),
            settings=grid_settings(self.settings_type, TrainSettings, SETTLED + self.left_out, corpus=self.corpus),
        )

    def source(self, settings: R) -> str:
        return settings.corpus if settings.corpus in KNOWN else ANY_FOLDER

    def rules(self, settings: R) -> Sequence[Rule]:
        given = {name: value for name in ("start", "fade") if (value := getattr(settings, name)) != USUAL}
        if settings.rule == "default":  # the literal rule stays the paper's
            return LITERAL, replace(DEFAULT, settings={**DEFAULT.settings, **given})
        return [replace(each, settings={**each.settings, **given}) for each in (LITERAL, CORRECTED)]  # as version 0.1

    def base(self, settings: R) -> TrainSettings:
        more = dict(self.rules(settings)[-1].settings)  # a plain softmax does not need it
        more["epochs"] = settings.epochs or {**EPOCHS, "paper": self.epochs}[settings.size]
        if settings.corpus in KNOWN:
            return base_settings(settings, TrainSettings, settings.size, **more)
        if (folder := prepared_corpus(settings.corpus)) is None:
            raise LabError(f"--corpus {no_corpus(settings.corpus)}")
        return base_settings(settings, FolderTrain, settings.size, corpus=folder, **more)

    def network_grid(self, base: TrainSettings) -> Grid:
        return around_choice(base.sizes)
