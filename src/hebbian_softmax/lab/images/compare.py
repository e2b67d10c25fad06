"""`hebbian compare glyphs` and `hebbian compare omniglot`: the image curriculum (section 4.1) with both heads.

Both learners start from the same weights and draw the same random numbers; each goes through the curriculum at its
own speed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from hebbian_softmax.lab.base.console import quoted
from hebbian_softmax.lab.base.devices import choose_device
from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.base.progress import ContendersProgress
from hebbian_softmax.lab.base.rule import LITERAL_RULE, newly_begun, say_if_short, say_when_it_began, writing_began
from hebbian_softmax.lab.base.runs import Run
from hebbian_softmax.lab.base.settings import as_options
from hebbian_softmax.lab.base.training import train
from hebbian_softmax.lab.images import glyphs, omniglot
from hebbian_softmax.lab.images.curriculum import BATCH, CHECK_EVERY, CurriculumSettings, History
from hebbian_softmax.lab.images.data import ImageSet, ImageSource
from hebbian_softmax.lab.images.fleet import Runner, Threads, start
from hebbian_softmax.lab.images.learner import Learner, Method
from hebbian_softmax.lab.images.tables import draw_answers, draw_two, tabulate_two
from hebbian_softmax.lab.report.recipe import Recipe
from hebbian_softmax.lab.report.result import Figure, Result

SOURCES = (glyphs.SOURCE, omniglot.SOURCE)
NAMES = ContendersProgress.titles
SHOWN = 10  # classes whose drawings are shown with what both heads take them for
SCALES = (50, 100, 200, 500, 1000, 2000)  # numbers of classes that a full bar stands for


class Comparison:
    """The task of the training loop: both learners take a step, and every 25 steps both are tested."""

    def __init__(self, data: ImageSet, settings: CurriculumSettings, threads: Threads) -> None:
        device = choose_device(settings.device)
        images = data.images.to(device)
        self.threads = threads
        self.learners: dict[str, Learner] = {}
        for name in NAMES:
            method = Method(
                hebbian=name == "hebbian",
                learning_rate=settings.learning_rate,
                gamma=settings.gamma,
                limit=settings.limit,
                rate=settings.rate,
                write=settings.write,
                scale=1.0 if settings.write == "literal" else "match",
                start=settings.start,
                fade=settings.fade,
                active_only=settings.softmax == "active",
                seen_only=settings.softmax == "seen",
                checks_seen_only=settings.checks == "seen",
            )
            size: dict[str, Any] = {"classes": settings.classes or None, "filters": settings.filters}
            self.learners[name] = Learner(data, method, settings.seed, device=device, images=images, **size)
        self.histories = {name: History(learner.start) for name, learner in self.learners.items()}
        self._runners: list[Runner] = []

    @property
    def runners(self) -> list[Runner]:
        """The runners of both learners, made when first needed, since a recorded learner must not be loaded again."""
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
            began = newly_begun(runner.learner.head, history.steps[-1], CHECK_EVERY)
            if began is not None:
                metrics[f"{name}_write_began"] = began
        return metrics

    def state_dict(self) -> dict[str, Any]:
        for runner in self._runners:
            runner.finish()
        return {
            name: {"learner": learner.state_dict(), "history": self.histories[name].state_dict()}
            for name, learner in self.learners.items()
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, learner in self.learners.items():
            learner.load_state_dict(state[name]["learner"])
            self.histories[name].load_state_dict(state[name]["history"])


def summarize(histories: Mapping[str, History], settings: CurriculumSettings, began: int | None = None) -> str:
    """Say what was seen in plain sentences, whichever side it favours.

    `began` is after how many steps the Hebbian head began to write by itself.
    """
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
    words += say_when_it_began(settings.start, began)
    among = "all classes, including those that had not come yet"
    if settings.softmax == "active":
        among = "the classes that have come so far"
    elif settings.checks == "seen":
        among = "the classes seen in training"
    if settings.softmax == "all":
        words += (
            "If you know which classes can occur, leave the others out: with --softmax active, plain softmax learned "
            "faster than version 0.1's rule. "
        )
    elif settings.softmax == "seen":
        words += "In training, the softmax of both was over the classes seen so far. "
    return f"{words}Both chose among {among}. This is one seed."


def show_answers(comparison: Comparison) -> tuple[Figure, bytes]:
    """Return a picture of the newest classes that both learners have met, and of what each head takes them for."""
    met = min(int(learner.active) for learner in comparison.learners.values())
    learners = {NAMES[name]: learner for name, learner in comparison.learners.items()}
    first = next(iter(learners.values()))
    labels = first.labels[max(0, met - SHOWN) : met]
    answers = {title: learner.answers(labels) for title, learner in learners.items()}
    caption = (
        f"Test drawings of the newest {len(labels)} classes that both have met. Below each, for both heads: a training "
        "drawing of the class that it is taken for, whether that is right, and with which probability. The head that "
        "has reached more classes has trained on these for longer."
    )
    drawings = list(first.images[first.order[labels], 0])
    return Figure("answers.png", caption), draw_answers(drawings, answers)


def suggest(name: str, settings: CurriculumSettings) -> list[str]:
    """Return commands worth trying next. Each varies one thing and keeps the other settings of this run."""
    variations = [
        (replace(settings, seed=(settings.seed + 1) % 2**32), "other classes first, other first weights"),
        (replace(settings, steps=min(2 * settings.steps, 10**6)), "does the difference last?"),
        (replace(settings, softmax="active"), "only classes that have come compete: plain softmax likes that"),
        (replace(settings, softmax="seen"), "classes never seen take no part in training"),
        (replace(settings, **LITERAL_RULE), "the paper's literal rule"),
    ]
    commands = [
        f"{' '.join([f'hebbian compare {name}', *map(quoted, as_options(varied))])}  # {remark}"
        for varied, remark in variations
        if varied != settings
    ]
    return [*commands, "hebbian compare longtail  # rare classes instead of new ones"]


class CurriculumProgress(ContendersProgress):
    """Progress with a further bar for the classes that each contender has reached.

    The metrics of a contender are `NAME_classes`, `NAME_accuracy` and, once it has completed a level,
    `NAME_level_steps`.
    """

    def scale(self, most: float) -> float:
        return next((scale for scale in SCALES if most <= scale), SCALES[-1])

    def contender(self, name: str) -> tuple[float, list[str]]:
        if f"{name}_classes" not in self.metrics:
            return 0, []
        classes, accuracy = self.metrics[f"{name}_classes"], self.metrics[f"{name}_accuracy"]
        said = [f"{classes:.0f} classes", f"{100 * accuracy:.0f} % right"]
        if f"{name}_level_steps" in self.metrics:
            said.append(f"{self.metrics[f'{name}_level_steps']:.0f} steps a level")
        return classes, said


@dataclass(frozen=True)
class Comparing(Recipe):
    """`hebbian compare` on a set of images."""

    source: ImageSource
    checkpoint_seconds: float = 5.0

    def perform(self, run: Run, settings: CurriculumSettings, quiet: bool) -> tuple[Result, dict[str, bytes]]:
        """Train both learners, then compare them."""
        device = choose_device(settings.device)
        data = self.source.load(settings, quiet)
        if settings.classes > len(data.images):
            raise LabError(
                f"{self.name} has {len(data.images)} classes, not {settings.classes}: give --classes a smaller number"
            )
        say_if_short(settings.start, settings.steps, quiet)
        with Threads(device, len(NAMES)) as threads:
            comparison = Comparison(data, settings, threads)
            seconds = train(
                comparison,
                run,
                steps=settings.steps,
                evaluate_every=CHECK_EVERY,
                checkpoint_seconds=self.checkpoint_seconds,
                label=self.name,
                quiet=quiet,
                show=CurriculumProgress,
            )
            answers, picture = show_answers(comparison)
            began = writing_began(comparison.learners["hebbian"].head)
        histories = comparison.histories
        caption = "Left: classes against training steps for both heads. Right: the steps that each level took."
        result = Result(
            title=f"Plain and Hebbian softmax on the {self.name.capitalize()} curriculum",
            summary=summarize(histories, settings, began),
            metrics={
                "data": data.identity,
                "seconds": seconds,
                "write_began": began,
                **{name: {"reached": history.reached, **history.state_dict()} for name, history in histories.items()},
            },
            tables=[tabulate_two(histories, NAMES)],
            figures=[Figure("curriculum.png", caption), answers],
            next_steps=suggest(self.name, settings),
            settled={"classes": comparison.learners["plain"].head.out_features},
        )
        return result, {"curriculum.png": draw_two(histories, NAMES), answers.file: picture}


def comparing(source: ImageSource, checkpoint_seconds: float = 5.0) -> Comparing:
    """Return the recipe that compares both heads on a set of images."""
    return Comparing(
        verb="compare",
        name=source.name,
        help=source.help,
        description=(
            "Trains the same convolutional network twice, with a plain and with a Hebbian softmax. Each begins with "
            "30 classes of images and gets 5 more whenever it recognises more than 60 % of the test images so far: "
            "which gets further in the same number of steps?"
        ),
        settings=source.settings,
        source=source,
        checkpoint_seconds=checkpoint_seconds,
    )


RECIPES = [comparing(source) for source in SOURCES]
