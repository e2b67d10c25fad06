"""`hebbian compare glyphs` and `hebbian compare omniglot`: the image curriculum (section 4.1) with both heads.

Both start from the same weights and draw the same random numbers; each goes through the curriculum at its own speed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from hebbian_softmax.lab.base.devices import choose_device
from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.base.runs import Run
from hebbian_softmax.lab.base.settings import as_options, choice, integer, multiple, number, setting
from hebbian_softmax.lab.base.training import train
from hebbian_softmax.lab.images.bars import Bars
from hebbian_softmax.lab.images.curriculum import BATCH, CHECK_EVERY, History
from hebbian_softmax.lab.images.data import ImageSet
from hebbian_softmax.lab.images.fleet import Runner, Threads, finish_all, start
from hebbian_softmax.lab.images.glyphs import make_glyphs
from hebbian_softmax.lab.images.learner import Learner, Method
from hebbian_softmax.lab.images.omniglot import load_omniglot
from hebbian_softmax.lab.images.tables import draw_two, tabulate_two
from hebbian_softmax.lab.report.recipe import Recipe
from hebbian_softmax.lab.report.result import Figure, Result

NAMES = {"plain": "plain softmax", "hebbian": "Hebbian softmax"}
CHECKPOINT_SECONDS = 5.0


@dataclass(frozen=True)
class GlyphsSettings:
    """The defaults are `make demo`: chosen by measurement over seeds, see `results/glyphs-demo`."""

    steps: int = setting(2000, f"training steps, a multiple of {CHECK_EVERY}", multiple(CHECK_EVERY))
    classes: int = setting(0, "classes that take part, 0 for all", integer(0, 100_000))
    learning_rate: float = setting(0.008, "of RMSProp, for both networks", number(0))
    gamma: float = setting(0.1, "γ, smallest mixing rate of the Hebbian rule", number(0, 1))
    limit: int = setting(50, "T, occurrences of a class that the rule writes", integer(0))
    filters: int = setting(32, "of each convolution, and features that the heads see", integer(1, 4096))
    softmax: str = setting(
        "all", "classes that compete: all from the first step on, or active", choice("all", "active")
    )
    seed: int = setting(0, "for the order of classes, the first weights and the draws", integer(0, 2**32 - 1))
    device: str = setting("auto", "auto, cpu or cuda", choice("auto", "cpu", "cuda"))


@dataclass(frozen=True)
class OmniglotSettings(GlyphsSettings):
    """The paper's data and its 64 filters; long enough to reach beyond 200 classes with both heads."""

    steps: int = setting(3000, f"training steps, a multiple of {CHECK_EVERY}", multiple(CHECK_EVERY))
    filters: int = setting(64, "of each convolution, and features that the heads see", integer(1, 4096))
    data_root: str = setting("", "folder with omniglot/*.zip in it (default: HEBBIAN_DATA, else downloaded)", str)


class Comparison:
    """The task of the training loop: both learners take a step, and every 25 steps both are tested."""

    def __init__(self, data: ImageSet, settings: GlyphsSettings, threads: Threads) -> None:
        device = choose_device(settings.device)
        images = data.images.to(device)
        self.threads = threads
        self.learners = {
            name: Learner(
                data,
                Method(
                    hebbian=name == "hebbian",
                    learning_rate=settings.learning_rate,
                    gamma=settings.gamma,
                    limit=settings.limit,
                    active_only=settings.softmax == "active",
                ),
                settings.seed,
                device=device,
                images=images,
                classes=settings.classes or None,
                filters=settings.filters,
            )
            for name in NAMES
        }
        self.histories = {name: History(learner.start) for name, learner in self.learners.items()}
        self._runners: list[Runner] = []

    @property
    def runners(self) -> list[Runner]:
        """Made when they are first needed, since a recorded learner must stay where it is."""
        if not self._runners:
            self._runners = [start(learner) for learner in self.learners.values()]
        return self._runners

    def train_step(self) -> dict[str, Tensor]:
        self.threads.each(lambda runner: runner.steps(1), self.runners)
        return {f"{name}_loss": runner.loss() for name, runner in zip(NAMES, self.runners, strict=True)}

    def evaluate(self) -> dict[str, float]:
        self.threads.each(lambda runner: runner.check(), self.runners)
        metrics: dict[str, float] = {}
        for (name, history), runner in zip(self.histories.items(), self.runners, strict=True):
            history.add(*runner.read())
            metrics |= {f"{name}_classes": history.reached, f"{name}_accuracy": history.accuracy[-1]}
            if spent := history.steps_per_level():
                metrics[f"{name}_level_steps"] = spent[-1][1]
        return metrics

    def state_dict(self) -> dict[str, Any]:
        finish_all(self._runners)
        return {
            name: {"learner": learner.state_dict(), "history": self.histories[name].state_dict()}
            for name, learner in self.learners.items()
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, learner in self.learners.items():
            learner.load_state_dict(state[name]["learner"])
            self.histories[name].load_state_dict(state[name]["history"])


def compare(name: str, run: Run, settings: GlyphsSettings, quiet: bool) -> tuple[Result, dict[str, bytes]]:
    """Train both, then compare them."""
    device = choose_device(settings.device)
    data = load(name, settings, quiet)
    if settings.classes > len(data.images):
        raise LabError(
            f"{name} has {len(data.images)} classes, not {settings.classes}: give --classes a smaller number"
        )
    with Threads(device, len(NAMES)) as threads:
        comparison = Comparison(data, settings, threads)
        seconds = train(
            comparison,
            run,
            steps=settings.steps,
            evaluate_every=CHECK_EVERY,
            checkpoint_seconds=CHECKPOINT_SECONDS,
            label=name,
            quiet=quiet,
            show=partial(Bars, contenders=NAMES),
        )
    histories = comparison.histories
    result = Result(
        title=f"Plain and Hebbian softmax on the {name.capitalize()} curriculum",
        summary=summarize(histories, settings),
        metrics={
            "data": data.identity,
            "seconds": seconds,
            **{name: {"reached": history.reached, **history.state_dict()} for name, history in histories.items()},
        },
        tables=[tabulate_two(histories, NAMES)],
        figures=[
            Figure(
                "curriculum.png",
                "Left: classes against training steps for both heads. Right: the steps that each level took.",
            )
        ],
        next_steps=suggest(name, settings),
    )
    return result, {"curriculum.png": draw_two(histories, NAMES)}


def load(name: str, settings: GlyphsSettings, quiet: bool) -> ImageSet:
    if isinstance(settings, OmniglotSettings):
        return load_omniglot(settings.data_root or None, quiet=quiet)
    return make_glyphs(quiet=quiet)


def summarize(histories: Mapping[str, History], settings: GlyphsSettings) -> str:
    """What was seen, in plain sentences, whichever side it favours."""
    plain, hebbian = histories["plain"], histories["hebbian"]
    words = (
        f"In the same {settings.steps:,} steps of {BATCH} images, plain softmax learned its way up to {plain.reached} "
        f"classes, Hebbian softmax to {hebbian.reached}. "
    )
    slower, faster = sorted(histories.items(), key=lambda item: item[1].reached)
    target = slower[1].reached
    first, second = slower[1].steps_to(target), faster[1].steps_to(target)
    if plain.reached == hebbian.reached == plain.start:
        words = (
            f"In {settings.steps:,} steps of {BATCH} images neither got beyond the {plain.start} classes it began "
            "with, so there is nothing to compare. "
        )
    elif plain.reached == hebbian.reached:
        words += "That is no difference. "
    elif first and second:
        words += (
            f"{NAMES[faster[0]].capitalize()} had {target} classes after {second:,} steps, "
            f"{NAMES[slower[0]]} after {first:,}. "
        )
    among = "all classes, also those to come" if settings.softmax == "all" else "the classes that have come so far"
    return f"{words}Both chose among {among}. This is one seed."


def suggest(name: str, settings: GlyphsSettings) -> list[str]:
    """Commands worth trying next; what they do not vary stays as it was in this run."""
    variations = [
        (replace(settings, seed=(settings.seed + 1) % 2**32), "other classes first, other first weights"),
        (replace(settings, steps=min(2 * settings.steps, 10**6)), "does the difference last?"),
        (replace(settings, softmax="active"), "only classes that have come compete: plain softmax likes that"),
    ]
    commands = [
        f"{' '.join([f'hebbian compare {name}', *as_options(varied)])}  # {remark}"
        for varied, remark in variations
        if varied != settings
    ]
    return [*commands, "hebbian compare longtail  # rare classes instead of new ones"]


class Comparing(Recipe):
    """`hebbian compare glyphs` and `hebbian compare omniglot`."""

    def perform(self, run: Run, settings: GlyphsSettings, quiet: bool) -> tuple[Result, dict[str, bytes]]:
        return compare(self.name, run, settings, quiet)


def recipe(name: str, settings: type, help: str) -> Recipe:
    return Comparing(
        verb="compare",
        name=name,
        help=help,
        description=(
            "Trains the same convolutional network twice, with a plain and with a Hebbian softmax. Each begins with "
            "30 classes of images and gets 5 more whenever it recognises more than 60 % of the test images so far: "
            "who gets further in the same number of steps?"
        ),
        settings=settings,
    )


RECIPES = [
    recipe(
        "glyphs", GlyphsSettings, "new classes of printed characters keep coming; no download, one to three minutes"
    ),
    recipe("omniglot", OmniglotSettings, "new classes of handwritten characters keep coming: the paper's task"),
]
