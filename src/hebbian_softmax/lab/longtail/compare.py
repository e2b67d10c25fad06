"""`hebbian compare longtail`: the same small network with a plain and with a Hebbian softmax, side by side.

Both start from the same weights and see the same batches in the same order. The synthetic task has many rare classes
and a balanced test set, so most test examples belong to classes that an epoch shows only a handful of times.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hebbian_softmax.lab.base.progress import ContendersProgress
from hebbian_softmax.lab.base.rule import (
    LITERAL_RULE,
    fade_setting,
    gamma_setting,
    limit_setting,
    newly_begun,
    rate_setting,
    say_if_short,
    say_when_it_began,
    start_setting,
    write_setting,
    writing_began,
)
from hebbian_softmax.lab.base.runs import Run
from hebbian_softmax.lab.base.settings import as_options, integer, positive, setting
from hebbian_softmax.lab.base.training import train
from hebbian_softmax.lab.longtail.learner import BATCH, Learner, Method, ShuffledBatches
from hebbian_softmax.lab.longtail.tasks import longtail
from hebbian_softmax.lab.report.figures import Line, Panel, line_figure
from hebbian_softmax.lab.report.recipe import Recipe
from hebbian_softmax.lab.report.result import Figure, Result
from hebbian_softmax.lab.report.tables import Cell, Table

EVALUATIONS = 25  # points on the curves
RARE = 10  # classes with fewer training examples than this are called rare
BUCKETS = ((RARE, 20), (20, 100), (100, None))  # ranges of a class's training examples, for classes that are not rare
NAMES = ContendersProgress.titles


@dataclass(frozen=True)
class Settings:
    """The options. Their defaults were chosen for plain softmax on seeds other than 0: see `results/longtail-demo`."""

    steps: int = setting(1500, "training steps", integer(1))
    classes: int = setting(1000, "number of classes", integer(20, 100_000))
    learning_rate: float = setting(0.002, "learning rate of Adam, for both networks", positive)
    gamma: float = gamma_setting()
    limit: int | str = limit_setting()
    write: str = write_setting()
    rate: str = rate_setting("recent", "paper")
    start: int | str = start_setting()
    fade: bool = fade_setting()
    seed: int = setting(0, "seed of the task, the first weights and the order of examples", integer(0, 2**32 - 1))

    @property
    def evaluate_every(self) -> int:
        """The steps between evaluations."""
        return max(1, self.steps // EVALUATIONS)


class Comparison:
    """The task of the training loop: both contenders take their step on the same batch."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.data = longtail(settings.classes, settings.seed)
        self.batches = ShuffledBatches(len(self.data.train_targets), BATCH, settings.seed)
        names = ("gamma", "limit", "write", "rate", "start", "fade")
        rule = Method(settings.learning_rate, hebbian=True, **{name: getattr(settings, name) for name in names})
        methods = {"plain": Method(settings.learning_rate), "hebbian": rule}
        self.contenders = {name: Learner(self.data, methods[name], settings.seed) for name in NAMES}

    def train_step(self) -> dict[str, Tensor]:
        batch = self.batches.next()
        inputs, targets = self.data.train_inputs[batch], self.data.train_targets[batch]
        return {f"{name}_loss": contender.step(inputs, targets) for name, contender in self.contenders.items()}

    def evaluate(self) -> dict[str, float]:
        rare = self.data.counts < RARE
        metrics = {}
        for name, accuracy in self.class_accuracies().items():
            metrics[f"{name}_accuracy"] = accuracy.mean().item()
            metrics[f"{name}_rare"] = accuracy[rare].mean().item()
            began = newly_begun(self.contenders[name].head, self.batches.drawn, self.settings.evaluate_every)
            if began is not None:
                metrics[f"{name}_write_began"] = began
        return metrics

    def class_accuracies(self) -> dict[str, Tensor]:
        """Return, for each contender, the share of right test answers in each class."""
        return {name: contender.class_accuracies(self.data) for name, contender in self.contenders.items()}

    def state_dict(self) -> dict[str, Any]:
        states = {name: contender.state_dict() for name, contender in self.contenders.items()}
        return {"batches": self.batches.state_dict(), **states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches.load_state_dict(state["batches"])
        for name, contender in self.contenders.items():
            contender.load_state_dict(state[name])


class LongtailProgress(ContendersProgress):
    """Progress with a further bar for the accuracy of each contender."""

    def contender(self, name: str) -> tuple[float, list[str]]:
        if f"{name}_accuracy" not in self.metrics:
            return 0, []
        accuracy, rare = self.metrics[f"{name}_accuracy"], self.metrics[f"{name}_rare"]
        return accuracy, [f"{100 * accuracy:.1f} % right", f"{100 * rare:.1f} % of rare classes"]


class Comparing(Recipe):
    """`hebbian compare longtail`."""

    def perform(self, run: Run, settings: Settings, quiet: bool) -> tuple[Result, dict[str, bytes]]:
        """Train both contenders, then compare them."""
        comparison = Comparison(settings)
        say_if_short(settings.start, settings.steps, quiet)
        seconds = train(
            comparison,
            run,
            steps=settings.steps,
            evaluate_every=settings.evaluate_every,
            checkpoint_seconds=10.0,
            label="longtail",
            quiet=quiet,
            show=LongtailProgress,
        )
        outcomes = compare(comparison.data.counts, comparison.class_accuracies())
        began = writing_began(comparison.contenders["hebbian"].head)
        caption = "Test accuracy against training steps, for all classes and for rare ones."
        result = Result(
            title="Plain and Hebbian softmax on a long-tailed task",
            summary=summarize(outcomes, settings, began),
            metrics={
                "training_examples": len(comparison.data.train_targets),
                "seconds": seconds,
                "write_began": began,
                "accuracy": outcomes,
            },
            tables=[tabulate(outcomes)],
            figures=[Figure("accuracy.png", caption)],
            next_steps=suggest(settings),
        )
        return result, {"accuracy.png": draw(run.records())}


def suggest(settings: Settings) -> list[str]:
    """Return commands worth trying next. Each varies one thing and keeps the other settings of this run."""
    variations = [
        (replace(settings, seed=(settings.seed + 1) % 2**32), "another task, other first weights"),
        (replace(settings, steps=min(settings.steps * 3, 2**31 - 1)), "does the difference last?"),
        (replace(settings, **LITERAL_RULE), "the paper's literal rule"),
    ]
    return [
        f"{' '.join(['hebbian compare longtail', *as_options(varied)])}  # {remark}"
        for varied, remark in variations
        if varied != settings
    ]


def compare(counts: Tensor, accuracies: dict[str, Tensor]) -> dict[str, dict[str, float]]:
    """Return accuracies by training frequency, with their difference and its standard error over classes."""
    every = torch.ones_like(counts, dtype=torch.double)
    groups = {"all classes": every, f"seen fewer than {RARE} times": (counts < RARE).double()}
    for low, high in BUCKETS:
        inside = counts >= low if high is None else (counts >= low) & (counts < high)
        if inside.any():
            name = f"seen {low} times and more" if high is None else f"seen {low} to {high - 1} times"
            groups[name] = inside.double()
    groups["weighted by training frequency"] = counts.double()

    outcomes = {}
    for name, weights in groups.items():
        weights = weights / weights.sum()
        difference = accuracies["hebbian"] - accuracies["plain"]
        mean = (weights * difference).sum()
        outcomes[name] = {
            "classes": int((weights > 0).sum()),
            "plain": (weights * accuracies["plain"]).sum().item(),
            "hebbian": (weights * accuracies["hebbian"]).sum().item(),
            "difference": mean.item(),
            "standard_error": (weights * (difference - mean)).square().sum().sqrt().item(),
        }
    return outcomes


def tabulate(outcomes: dict[str, dict[str, float]]) -> Table:
    """Return the table of accuracies by training frequency."""
    rows: list[list[Cell]] = [
        [
            name,
            int(outcome["classes"]),
            *(f"{100 * outcome[column]:.1f}" for column in NAMES),
            f"{100 * outcome['difference']:+.1f} ± {100 * outcome['standard_error']:.1f}",
        ]
        for name, outcome in outcomes.items()
    ]
    columns = ["classes of the training set", "classes", *NAMES.values(), "difference ± standard error"]
    return Table("Test accuracy in %, every class with equally many test examples", columns, rows)


def summarize(outcomes: dict[str, dict[str, float]], settings: Settings, began: int | None = None) -> str:
    """Say what was seen in plain sentences, whichever side it favours.

    `began` is after how many steps the Hebbian head began to write by itself.
    """

    def words(name: str) -> str:
        outcome = outcomes[name]
        if abs(outcome["difference"]) <= 2 * outcome["standard_error"]:
            verdict = "no clear difference"
        else:
            verdict = f"{NAMES['hebbian' if outcome['difference'] > 0 else 'plain']} is better"
        return f"Hebbian {100 * outcome['hebbian']:.1f} %, plain {100 * outcome['plain']:.1f} %: {verdict}"

    rare, *_, frequent = (name for name in outcomes if name.startswith("seen"))
    timing = say_when_it_began(settings.start, began)
    return (
        f"Test accuracy after {settings.steps:,} steps, every class counting alike: {words('all classes')}. "
        f"Classes {rare}: {words(rare)}. Classes {frequent}: {words(frequent)}. {timing}"
        "This is one seed; differences within two standard errors are called not clear."
    )


def draw(records: list[dict[str, Any]]) -> bytes:
    """Draw accuracy against steps from the records of the log."""

    def line(name: str, key: str) -> Line:
        points = [(record["step"], record.get(f"{name}_{key}")) for record in records]
        known = [(step, 100 * value) for step, value in points if isinstance(value, int | float)]
        return Line(NAMES[name], [step for step, _ in known], [value for _, value in known])

    panels = [
        Panel("all classes", [line(name, "accuracy") for name in NAMES]),
        Panel(f"classes seen fewer than {RARE} times", [line(name, "rare") for name in NAMES]),
    ]
    return line_figure(panels, x_label="training steps", y_label="test accuracy in %")


RECIPES = [
    Comparing(
        verb="compare",
        name="longtail",
        help="a synthetic task with many rare classes; no download, about a minute",
        description=(
            "Trains the same network twice, with a plain and with a Hebbian softmax, on a synthetic task whose class "
            "frequencies follow Zipf's law, and compares their test accuracy by class frequency."
        ),
        settings=Settings,
    )
]
