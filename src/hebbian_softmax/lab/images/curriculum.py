"""The curriculum of section 4.1: classes are added whenever those so far are known well enough."""

from dataclasses import dataclass, field
from typing import Any

from hebbian_softmax.lab.base.rule import (
    fade_setting,
    gamma_setting,
    limit_setting,
    rate_setting,
    start_setting,
    write_setting,
)
from hebbian_softmax.lab.base.settings import choice, integer, multiple, positive, setting

START = 30  # classes at first
ADDED = 5  # classes that each further level adds
THRESHOLD = 60  # per cent of right answers on the test drawings of the classes so far that must be exceeded
BATCH = 32
CHECK_EVERY = 25  # training steps between checks; a check adds one level at most


@dataclass(frozen=True)
class CurriculumSettings:
    """The options of `hebbian compare` on a set of images. A set may give them other defaults and add its own."""

    steps: int = setting(2000, f"training steps, a multiple of {CHECK_EVERY}", multiple(CHECK_EVERY))
    classes: int = setting(0, "number of classes that take part, 0 for all", integer(0, 100_000))
    learning_rate: float = setting(0.008, "learning rate of RMSProp, for both networks", positive)
    gamma: float = gamma_setting()
    limit: int | str = limit_setting()
    write: str = write_setting()
    rate: str = rate_setting("recent", "paper")
    start: int | str = start_setting()
    fade: bool = fade_setting()
    filters: int = setting(32, "filters of each convolution, and features that the heads see", integer(1, 4096))
    softmax: str = setting(
        "all",
        "classes that compete: all from the first step on, active ones only, or in training those seen so far",
        choice("all", "active", "seen"),
    )
    checks: str = setting(
        "all",
        "classes that compete in checks: all that --softmax knows, or those seen",
        choice("all", "seen"),
        later=True,
    )
    seed: int = setting(0, "seed of the order of classes, the first weights and the draws", integer(0, 2**32 - 1))
    device: str = setting("auto", "auto, cpu or cuda", choice("auto", "cpu", "cuda"))


@dataclass
class History:
    """The outcome of each check: the accuracy on the classes active before it, and the number active after it."""

    start: int
    accuracy: list[float] = field(default_factory=list)
    classes: list[int] = field(default_factory=list)
    began: int | None = None
    """The steps before the rule began to write by itself; None if it did not, or was not to wait."""
    written: int | None = None
    """The number of classes that the rule has written in the end; None without the rule."""

    def add(self, accuracy: float, classes: int) -> None:
        """Append the outcome of one more check."""
        self.accuracy.append(accuracy)
        self.classes.append(classes)

    @property
    def steps(self) -> list[int]:
        """The training step of each check."""
        return [CHECK_EVERY * number for number in range(1, len(self.classes) + 1)]

    @property
    def reached(self) -> int:
        """The number of classes after the last check."""
        return self.classes[-1] if self.classes else self.start

    def levels(self) -> list[tuple[int, int]]:
        """Return, for each completed level, its number of classes and the step of the check that ended it.

        >>> History(30, accuracy=[0.5, 0.7, 0.5, 0.7], classes=[30, 35, 35, 40]).levels()
        [(30, 50), (35, 100)]
        """
        before = [self.start, *self.classes]
        return [(old, step) for old, new, step in zip(before, self.classes, self.steps, strict=False) if new > old]

    def steps_per_level(self) -> list[tuple[int, int]]:
        """Return, for each completed level, its number of classes and the steps spent on it."""
        levels = self.levels()
        begun = [0, *(step for _, step in levels)]
        return [(classes, step - start) for (classes, step), start in zip(levels, begun, strict=False)]

    def steps_to(self, classes: int) -> int | None:
        """Return the step of the first check with so many classes, or None if there never were so many."""
        if classes <= self.start:
            return 0
        return next((step for step, now in zip(self.steps, self.classes, strict=True) if now >= classes), None)

    def classes_at(self, step: int) -> int:
        """Return the number of classes after the last check up to `step`."""
        checks = min(step // CHECK_EVERY, len(self.classes))
        return self.classes[checks - 1] if checks else self.start

    def check(self) -> None:
        """Raise a TypeError or a ValueError if this is no history, whatever file it came from."""
        if not all(type(count) is int for count in (self.start, *self.classes)):
            raise TypeError("a number of classes is not a whole number")
        if not all(value is None or type(value) is int for value in (self.began, self.written)):
            raise TypeError("what the rule has done is not a whole number")
        if not all(isinstance(share, int | float) for share in self.accuracy):
            raise TypeError("an accuracy is not a number")
        if len(self.accuracy) != len(self.classes):
            raise ValueError("it has not as many accuracies as numbers of classes")

    def state_dict(self) -> dict[str, Any]:
        known = {"began": self.began, "written": self.written}
        return {
            "start": self.start,
            "accuracy": list(self.accuracy),
            "classes": list(self.classes),
            **{name: value for name, value in known.items() if value is not None},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["start"]
        self.accuracy, self.classes = list(state["accuracy"]), list(state["classes"])
        self.began, self.written = state.get("began"), state.get("written")
