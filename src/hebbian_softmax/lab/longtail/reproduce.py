"""`hebbian reproduce longtail`: balanced softmax and the Hebbian rule, alone and together, on two long tails.

Each method is tuned with equally many settings on seeds of its own, by the accuracy over all classes, every class
counting alike; then other seeds are reported. The log of the run has a record for each training, and a run that was
stopped goes on after the last of them.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from hebbian_softmax.lab.base.extras import require
from hebbian_softmax.lab.base.progress import Progress
from hebbian_softmax.lab.base.rule import RULE_BEFORE, fade_setting, rate_setting, start_setting, write_setting
from hebbian_softmax.lab.base.runs import Run
from hebbian_softmax.lab.base.settings import choice, integer, setting
from hebbian_softmax.lab.base.statistics import mean_and_spread
from hebbian_softmax.lab.longtail.learner import BATCH, Learner, Method, ShuffledBatches
from hebbian_softmax.lab.longtail.tasks import LongTail, digits, longtail
from hebbian_softmax.lab.report.figures import Line, Panel, line_figure
from hebbian_softmax.lab.report.recipe import Recipe
from hebbian_softmax.lab.report.result import Figure, Result
from hebbian_softmax.lab.report.tables import Cell, Table
from hebbian_softmax.rule import LIMIT

FIRST_TUNING_SEED = 1000
TRIALS = 9  # settings tried for each method
LOWEST_RATE, HIGHEST_RATE = 5e-4, 1.6e-2
RULES: dict[str, tuple[tuple[float, int | str], ...]] = {
    "across": ((0.2, "auto"), (0.1, 300), (0.2, 30)),
    "centred": ((0.1, 30), (0.05, 200), (0.25, 100)),
    "literal": ((0.1, 30), (0.05, 200), (0.25, 100)),
}
"""Pairs of γ and T that are tried with each kind of write; only the recent rate has a T of its own, auto."""
KINDS = {
    "plain": ("plain softmax", False, False),
    "balanced": ("balanced softmax", False, True),
    "rule": ("Hebbian rule", True, False),
    "both": ("both together", True, True),
}
"""The methods: a title, whether the head memorises, whether it is balanced."""
CAPTION = (
    "Test accuracy against the number of training examples of a class, mean over seeds. Each point is all classes with "
    "at least so many examples and fewer than twice as many."
)
Record = Mapping[str, Any]


@dataclass(frozen=True)
class Settings:
    """The options."""

    task: str = setting("both", "both, or zipf or digits alone", choice("both", "zipf", "digits"))
    seeds: int = setting(5, "number of seeds reported, from 0 on", integer(1, 999))
    trials: int = setting(TRIALS, "number of settings tried for each method", integer(1, TRIALS))
    write: str = write_setting()
    rate: str = rate_setting("recent", "paper")
    start: int | str = start_setting()
    fade: bool = fade_setting()
    classes: int = setting(1000, "number of classes of zipf", integer(25, 100_000))
    steps: int = setting(1500, "training steps on zipf", integer(1))
    digit_steps: int = setting(300, "training steps on digits", integer(1))

    def tails(self) -> list["Tail"]:
        """Return the tasks, the quicker one first."""
        ten = Tail(
            "digits",
            "ten digits, 100 to 1 training images",
            digits,
            self.digit_steps,
            batch=32,
            tuning_seeds=3,
            rates=(2e-3, 4e-3, 8e-3),
            rare=5,
            frequent=30,
        )
        zipf = Tail(
            "zipf",
            f"{self.classes:,} synthetic classes with Zipf's frequencies",
            lambda seed, validation: longtail(self.classes, seed),
            self.steps,
            batch=BATCH,
            tuning_seeds=1,
            rates=(1e-3, 2e-3, 4e-3),
            rare=10,
            frequent=100,
        )
        return [tail for tail in (ten, zipf) if self.task in ("both", tail.name)]


@dataclass(frozen=True)
class Tail:
    """A task and how it is trained.

    Classes with fewer than `rare` training examples are called rare, those with at least `frequent` frequent. `rates`
    are the learning rates that are tried with the rule. Seeds of `zipf` are tasks of their own, so `draw` needs no
    validation set there.
    """

    name: str
    title: str
    draw: Callable[[int, bool], LongTail]
    steps: int
    batch: int
    tuning_seeds: int
    rates: Sequence[float]
    rare: int
    frequent: int

    def groups(self) -> dict[str, str]:
        """Return the titles of the groups of classes by the names that their accuracies have in a record."""
        return {
            "all": "all classes",
            "rare": f"classes with fewer than {self.rare} examples",
            "frequent": f"classes with {self.frequent} examples and more",
            "weighted": "weighted by training frequency",
        }

    def measure(self, counts: Tensor, accuracy: Tensor) -> dict[str, float]:
        """Return the accuracy of each group, and of the classes from each power of two to the next."""
        weights = {
            "all": torch.ones_like(accuracy),
            "rare": counts < self.rare,
            "frequent": counts >= self.frequent,
            "weighted": counts,
        }
        weights |= {f"from_{low}": (counts >= low) & (counts < 2 * low) for low in (1 << n for n in range(40))}
        return {
            name: ((weight.double() * accuracy).sum() / weight.sum()).item()
            for name, weight in weights.items()
            if weight.any()
        }


@dataclass(frozen=True)
class Trial:
    """One training. `part` is tuning or final."""

    task: str
    part: str
    kind: str
    seed: int
    method: Method

    def identity(self) -> dict[str, Any]:
        """Return what tells the trial from others, as its record has it."""
        method = asdict(self.method)
        if not self.method.hebbian:
            method = {name: method[name] for name in ("learning_rate", "hebbian", "balanced")}
        return {"task": self.task, "part": self.part, "kind": self.kind, "seed": self.seed, **method}


def methods_of(kind: str, tail: Tail, settings: Settings) -> list[Method]:
    """Return the settings that are tried: learning rates for the methods that have nothing else, else also γ and T."""
    count = settings.trials
    _, hebbian, balanced = KINDS[kind]
    if not hebbian:
        ratio = (HIGHEST_RATE / LOWEST_RATE) ** (1 / max(1, count - 1))
        return [Method(float(f"{LOWEST_RATE * ratio**number:.2g}"), balanced=balanced) for number in range(count)]
    rule: dict[str, Any] = {name: getattr(settings, name) for name in ("write", "rate", "start", "fade")}
    grid = [
        Method(
            rate, hebbian, balanced, gamma, LIMIT if limit == "auto" and settings.rate != "recent" else limit, **rule
        )
        for (gamma, limit), rate in product(RULES[settings.write], tail.rates)
    ]
    return grid[:count]


def described(method: Method) -> str:
    """Return the tuned settings in words.

    >>> described(Method(0.002, hebbian=True))
    'learning rate 0.002, γ 0.2, T auto'
    """
    words = f"learning rate {method.learning_rate:g}"
    return f"{words}, γ {method.gamma:g}, T {method.limit}" if method.hebbian else words


def train_and_measure(tail: Tail, trial: Trial) -> dict[str, float]:
    """Train from the trial's seed and return the accuracies; a tuning trial never sees what is reported."""
    task = tail.draw(trial.seed, trial.part == "tuning")
    learner = Learner(task, trial.method, trial.seed)
    batches = ShuffledBatches(len(task.train_targets), tail.batch, trial.seed)
    for _ in range(tail.steps):
        batch = batches.next()
        learner.step(task.train_inputs[batch], task.train_targets[batch])
    return tail.measure(task.counts, learner.class_accuracies(task))


class Trials:
    """Performs trials one after another, and keeps their records in the log of the run."""

    def __init__(self, run: Run, progress: Progress) -> None:
        self.run, self.progress = run, progress
        self.stored = run.records()
        self.steps = max((record["step"] for record in self.stored), default=0)
        run.cut_log(self.steps)  # without a line that a killed process did not finish
        self.done: list[Record] = []

    def do(self, tail: Tail, trials: Sequence[Trial]) -> list[Record]:
        """Return the records of all trials; those that are not stored yet are trained."""
        found = [self._stored(trial) or self._new(tail, trial) for trial in trials]
        self.done += found
        return found

    def _stored(self, trial: Trial) -> Record | None:
        identity = trial.identity().items()
        return next((record for record in self.stored if identity <= {**RULE_BEFORE, **record}.items()), None)

    def _new(self, tail: Tail, trial: Trial) -> Record:
        began = time.monotonic()
        found = train_and_measure(tail, trial)
        self.steps += 1
        record = {"step": self.steps, **trial.identity(), **found, "seconds": round(time.monotonic() - began, 3)}
        self.run.log(record)
        self.progress.update(self.steps, {f"{tail.name}_accuracy": record["all"]})
        return record


@dataclass(frozen=True)
class Outcome:
    """What was found on a task: everything tried in tuning, the methods chosen, and their records on other seeds."""

    tail: Tail
    tried: Mapping[str, Mapping[Method, Sequence[Record]]]
    chosen: Mapping[str, Method]
    final: Mapping[str, Sequence[Record]]

    def accuracies(self, kind: str, group: str) -> list[float]:
        """Return the accuracies in % of a method, one for each seed."""
        return [100 * record[group] for record in self.final[kind]]

    def against(self, kind: str, other: str, group: str = "all") -> list[float]:
        """Return the differences to another method, seed by seed; equal shares of right answers give 0."""
        pairs = zip(self.accuracies(kind, group), self.accuracies(other, group), strict=True)
        return [round(mine - theirs, 9) for mine, theirs in pairs]


def experiment(tail: Tail, settings: Settings, trials: Trials) -> Outcome:
    """Tune all methods, then train each with its best settings from the seeds that are reported."""
    seeds = range(FIRST_TUNING_SEED, FIRST_TUNING_SEED + tail.tuning_seeds)
    tried = {
        kind: {
            method: trials.do(tail, [Trial(tail.name, "tuning", kind, seed, method) for seed in seeds])
            for method in methods_of(kind, tail, settings)
        }
        for kind in KINDS
    }
    chosen = {kind: max(group, key=lambda method: mean_of(group[method])) for kind, group in tried.items()}
    final = {
        kind: trials.do(tail, [Trial(tail.name, "final", kind, seed, method) for seed in range(settings.seeds)])
        for kind, method in chosen.items()
    }
    return Outcome(tail, tried, chosen, final)


def mean_of(records: Sequence[Record]) -> float:
    """Return the mean accuracy over all classes."""
    return mean_and_spread([record["all"] for record in records])[0]


def spread(values: Sequence[float], signed: bool = False) -> str:
    """Return the mean and the standard deviation in words.

    >>> spread([1.0, 2.0, 3.0], signed=True)
    '+2.0 ± 1.0'
    """
    mean, deviation = mean_and_spread(values)
    return f"{mean:+.1f} ± {deviation:.1f}" if signed else f"{mean:.1f} ± {deviation:.1f}"


def tables_of(outcome: Outcome) -> list[Table]:
    """Return the accuracies on the seeds that are reported, and those of everything tried in tuning."""
    tail, kinds = outcome.tail, list(KINDS)
    rows: list[list[Cell]] = []
    for kind in kinds:
        differences = outcome.against(kind, "plain")
        better = f"{sum(each > 0 for each in differences)} of {len(differences)}"
        beside = [None, None] if kind == "plain" else [spread(differences, signed=True), better]
        cells = [spread(outcome.accuracies(kind, group)) for group in tail.groups()]
        rows.append([f"{KINDS[kind][0]}, {described(outcome.chosen[kind])}", *cells, *beside])
    seeds = len(outcome.final["plain"])
    title = f"{tail.title}: test accuracy in %, mean ± standard deviation over {seeds} seeds"
    columns = [tail.name, *tail.groups().values(), "all classes against plain", "seeds better than plain"]
    tuning = [
        [
            f"{KINDS[kind][0]}, {described(method)}",
            f"{100 * mean_of(records):.1f}",
            "chosen" if method == outcome.chosen[kind] else "",
        ]
        for kind in kinds
        for method, records in outcome.tried[kind].items()
    ]
    last = FIRST_TUNING_SEED + tail.tuning_seeds - 1
    tried = f"{tail.title}: accuracy in % over all classes in tuning, seeds {FIRST_TUNING_SEED} to {last}"
    return [Table(title, columns, rows), Table(tried, ["tried", "all classes", ""], tuning)]


def summarize(outcome: Outcome) -> str:
    """Say who is best, and what the rule does to plain and to balanced softmax, whichever side it favours."""

    def words(kind: str, other: str) -> str:
        differences = outcome.against(kind, other)
        clear = all(each > 0 for each in differences) or all(each < 0 for each in differences)
        gain = "gains" if sum(differences) > 0 else "loses"
        mean, deviation = mean_and_spread(differences)
        return f"{gain} {abs(mean):.1f} ± {deviation:.1f}{'' if clear else ' (not in all seeds)'}"

    best = max(KINDS, key=lambda kind: mean_of(outcome.final[kind]))
    return (
        f"{outcome.tail.name}: {KINDS[best][0]} is best over all classes, {spread(outcome.accuracies(best, 'all'))} %. "
        f"Balanced softmax {words('balanced', 'plain')} points against plain softmax; the rule "
        f"{words('rule', 'plain')} against plain softmax and {words('both', 'balanced')} on top of balanced softmax."
    )


def draw(outcomes: Sequence[Outcome]) -> bytes:
    """Draw accuracy against a class's number of training examples, a panel for each task."""
    panels = []
    for outcome in outcomes:
        names = [name for name in outcome.final["plain"][0] if name.startswith("from_")]
        lines = [
            Line(
                KINDS[kind][0],
                [int(name.removeprefix("from_")) for name in names],
                [mean_and_spread(outcome.accuracies(kind, name))[0] for name in names],
            )
            for kind in KINDS
        ]
        panels.append(Panel(outcome.tail.title, lines, log_x=True))
    return line_figure(panels, x_label="training examples of a class, at least", y_label="test accuracy in %")


class Reproducing(Recipe):
    """`hebbian reproduce longtail`."""

    def perform(self, run: Run, settings: Settings, quiet: bool) -> tuple[Result, dict[str, bytes]]:
        """Train everything that the log does not have, then make tables and the figure."""
        tails = settings.tails()
        if tails[0].name == "digits":
            require("sklearn")
        total = sum(len(KINDS) * (settings.trials * tail.tuning_seeds + settings.seeds) for tail in tails)
        with Progress("longtail", total=total, start=len(run.records()), unit="trainings", quiet=quiet) as progress:
            trials = Trials(run, progress)
            outcomes = [experiment(tail, settings, trials) for tail in tails]
        accuracies = {
            outcome.tail.name: {
                kind: {group: outcome.accuracies(kind, group) for group in outcome.tail.groups()} for kind in KINDS
            }
            for outcome in outcomes
        }
        chosen = {
            outcome.tail.name: {kind: asdict(method) for kind, method in outcome.chosen.items()} for outcome in outcomes
        }
        result = Result(
            title="Balanced softmax and the Hebbian rule on long tails",
            summary=" ".join(map(summarize, outcomes)),
            metrics={"accuracy": accuracies, "chosen": chosen, "seconds": sum(each["seconds"] for each in trials.done)},
            tables=[table for outcome in outcomes for table in tables_of(outcome)],
            figures=[Figure("accuracy.png", CAPTION)],
            next_steps=["hebbian compare longtail  # plain softmax and the rule on one seed, with curves"],
        )
        return result, {"accuracy.png": draw(outcomes)}


RECIPES = [
    Reproducing(
        verb="reproduce",
        name="longtail",
        help="balanced softmax and the rule, alone and together, on 1,000 synthetic classes and on ten digits",
        description=(
            "Compares plain softmax, balanced softmax, the Hebbian rule and both together on two tasks with rare "
            "classes: 1,000 synthetic classes with Zipf's frequencies, and ten digits of scikit-learn with 100 to 1 "
            "training images. Tunes each method with equally many settings on seeds of their own, then reports other "
            "seeds. About 20 minutes on one core; a stopped run goes on with --resume."
        ),
        settings=Settings,
    )
]
