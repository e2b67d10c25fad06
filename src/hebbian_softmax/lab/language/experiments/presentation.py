"""What recipes of many language models share: trials on a bench, then tables, figures and sentences about them.

All that is shown is made from the outcomes alone, which are in result.json: it can be made again without the device,
the corpus or the trials' folders.
"""

import argparse
import math
import os
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from hebbian_softmax.lab.base.console import program
from hebbian_softmax.lab.base.errors import LabError, OutOfTimeError, reason
from hebbian_softmax.lab.base.runs import Run, open_run
from hebbian_softmax.lab.data.corpus import Corpus
from hebbian_softmax.lab.language.experiments.trials import FOLDER, Bench, Measure, Outcome, Trial, WordSets
from hebbian_softmax.lab.language.experiments.tuning import PLAIN, Rule, by_title, tabulate_settings, tabulate_tuning
from hebbian_softmax.lab.language.report.curves import BANDS, CAPTION, draw_curves
from hebbian_softmax.lab.language.report.perplexities import apart, spread_cell
from hebbian_softmax.lab.language.settings import TrainSettings
from hebbian_softmax.lab.report.recipe import Recipe
from hebbian_softmax.lab.report.result import Figure, Result, load_result
from hebbian_softmax.lab.report.tables import Table

CURVES = "perplexity.png"
Row = tuple[str, str, TrainSettings]
"""Of the final models: a short name, a title, the settings."""


@dataclass(frozen=True)
class Presented:
    """What is shown of the outcomes."""

    title: str
    summary: str
    tables: Sequence[Table]
    images: Mapping[str, tuple[str, bytes]]
    """By file name: the caption and the PNG."""


@dataclass(frozen=True)
class Experiment:
    """`carry_out(bench, settings)` does all trials; `source(settings)` names the corpus as `hebbian train` does."""

    command: str
    source: Callable[[Any], str]
    carry_out: Callable[[Bench, Any], None]
    present: Callable[[Sequence[Outcome]], Presented]
    sets: Callable[[Corpus], WordSets] = field(default=lambda corpus: {})
    more: Callable[[Any], Sequence[Measure]] = field(default=lambda settings: ())
    """From the settings, what else the final models are measured with."""
    hint: str = ""
    """What to do where the corpus is missing."""


@dataclass(frozen=True)
class WordRecipe(Recipe):
    """A recipe whose tables and figures can be made again from its result."""

    experiment: Experiment

    def perform(self, run: Run, settings: Any, quiet: bool) -> tuple[Result, dict[str, bytes]]:
        return carry_out(self.experiment, run, settings, quiet)

    def execute(self, arguments: argparse.Namespace) -> int:
        """Start or resume it, in one process: each of several would do all trials over again."""
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise LabError(f"hebbian {self.command} trains in one process: start it without torchrun")
        return super().execute(arguments)

    def figures_again(self, run: Run, result: Result) -> dict[str, bytes]:
        """The figures, drawn again from the numbers of a finished run."""
        try:
            outcomes = [Outcome(**trial) for trial in result.metrics["trials"]]
            return {name: image for name, (_, image) in self.experiment.present(outcomes).images.items()}
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise LabError(
                f"{run.path / 'result.json'} lacks what its figures are drawn from ({reason(error)})"
            ) from error

    def tables_so_far(self, run: Run) -> list[Table]:
        """Of a run that is not finished, with the seeds that all rows have; none before such a seed."""
        whole = whole_seeds(stored_outcomes(run))
        if PLAIN not in by_title(whole, "final"):
            return []
        return [replace(table, title=f"Not finished: {table.title}") for table in self.experiment.present(whole).tables]


def stored_outcomes(run: Run) -> list[Outcome]:
    """Of the trials that are done, in the order in which they were begun."""
    done = (run.path / FOLDER).glob("*/result.json")
    results = {path: load_result(open_run(path.parent)) for path in done}
    try:
        order = sorted(results, key=lambda path: (path.with_name("config.json").stat().st_mtime_ns, path))
        return [Outcome(**result.metrics["trial"]) for path in order if (result := results[path]) is not None]
    except (KeyError, TypeError) as error:
        raise LabError(f"a result.json in {run.path / FOLDER} is not that of a trial ({reason(error)})") from error


def whole_seeds(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Without the final trials of a seed that another row does not have: means over other seeds do not compare."""
    titles: dict[int, set[str]] = {}
    for outcome in outcomes:
        if outcome.part == "final":
            titles.setdefault(outcome.settings["seed"], set()).add(outcome.title)
    most = max(map(len, titles.values()), default=0)
    return [each for each in outcomes if each.part != "final" or len(titles[each.settings["seed"]]) == most]


def make_recipe(experiment: Experiment, *, help: str, description: str, settings: type) -> WordRecipe:
    verb, _, name = experiment.command.partition(" ")
    return WordRecipe(verb, name, help, description, settings, experiment)


def carry_out(experiment: Experiment, run: Run, settings: Any, quiet: bool) -> tuple[Result, dict[str, bytes]]:
    """Do the trials, or find them stored, and present them."""
    deadline = time.monotonic() + settings.budget if settings.budget else None
    source, more = experiment.source(settings), experiment.more(settings)
    bench = Bench(run, source, settings.device, deadline, quiet, experiment.sets, more, experiment.hint)
    try:
        experiment.carry_out(bench, settings)
    except OutOfTimeError as error:
        raise LabError(
            f"the budget of {settings.budget:g} s is used up, {len(bench.outcomes)} trials are stored; go on with: "
            f"{program()} {experiment.command} --resume {shlex.quote(str(run.path))}"
        ) from error
    shown = experiment.present(bench.outcomes)
    result = Result(
        title=shown.title,
        summary=shown.summary,
        metrics={"corpus": bench.outcomes[0].corpus, "trials": [asdict(outcome) for outcome in bench.outcomes]},
        tables=shown.tables,
        figures=[Figure(name, caption) for name, (caption, _) in shown.images.items()],
        next_steps=[],
    )
    return result, {name: image for name, (_, image) in shown.images.items()}


def rows_of(chosen: Mapping[str, TrainSettings], rules: Sequence[Rule]) -> list[Row]:
    """The plain softmax and each rule as they were chosen."""
    return [("plain", PLAIN, chosen["plain"]), *((rule.short, rule.title, chosen[rule.short]) for rule in rules)]


def finals(rows: Sequence[Row], seeds: int) -> list[Trial]:
    """Each row from seeds 0, 1, …: those of a seed one after the other, so that a budget leaves whole comparisons."""
    return [
        Trial("final", short, title, replace(settings, seed=seed))
        for seed in range(seeds)
        for short, title, settings in rows
    ]


def perplexities(group: Sequence[Outcome], split: str) -> list[float]:
    """Of one row, by seed; infinity where the numbers were not finite."""
    found = [outcome.scores[split]["perplexity"] if split in outcome.scores else None for outcome in group]
    return [math.inf if value is None else float(value) for value in found]


def present_all(
    outcomes: Sequence[Outcome], what: str, tables: Sequence[Table], sentences: Sequence[str] = ()
) -> Presented:
    """The tables given, that of the tuning, the learning curves, and what was seen in words."""
    groups = by_title(outcomes, "final")
    curves = {title: [outcome.curve for outcome in group] for title, group in groups.items()}
    return Presented(
        title=f"{what} on {outcomes[0].corpus['name']}",
        summary=" ".join([*sentences, summarize(groups)]),
        tables=[*tables, tabulate_settings(outcomes), *tabulate_tuning(outcomes)],
        images={CURVES: (CAPTION + BANDS, draw_curves(curves))},
    )


def summarize(groups: Mapping[str, Sequence[Outcome]]) -> str:
    """Test perplexities, whichever side they favour, and which of them chance over seeds does not explain."""
    seeds = len(groups[PLAIN])
    over = f"mean ± 2σ over {seeds} seeds" if seeds > 1 else "one seed"
    values = {title: perplexities(group, "test") for title, group in groups.items()}
    cells = [f"{title} {spread_cell(found)}" for title, found in values.items()]
    words = f"Test perplexity ({over}, {groups[PLAIN][0].words:,} training words): {'; '.join(cells)}."
    finite = [title for title, found in values.items() if math.isfinite(sum(found))]
    compared = [title for title in finite if title != PLAIN] if PLAIN in finite else []
    if seeds == 1 or not compared:
        return words
    separate = [title for title in compared if apart(values[PLAIN], values[title])]
    for title in separate:
        side = "below" if sum(values[title]) < sum(values[PLAIN]) else "above"
        words += f" The range of {title} is {side} that of {PLAIN}."
    none = "No range" if len(finite) == len(values) else "Of those that are finite no range"
    return words if separate else f"{words} {none} is apart from that of {PLAIN}."
