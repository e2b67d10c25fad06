"""The curriculum of section 4.1: more classes whenever those so far are known well enough, and its history."""

from dataclasses import dataclass, field
from typing import Any

START = 30  # classes at first
ADDED = 5  # classes of each further level
THRESHOLD = 60  # per cent of right answers on the test drawings of the classes so far that must be exceeded
BATCH = 32
CHECK_EVERY = 25  # steps; at most one level a check


@dataclass
class History:
    """What was seen at each check: accuracy on the classes that were active, and the classes after it."""

    start: int
    accuracy: list[float] = field(default_factory=list)
    classes: list[int] = field(default_factory=list)

    def add(self, accuracy: float, classes: int) -> None:
        self.accuracy.append(accuracy)
        self.classes.append(classes)

    @property
    def steps(self) -> list[int]:
        """The step of each check."""
        return [CHECK_EVERY * number for number in range(1, len(self.classes) + 1)]

    @property
    def reached(self) -> int:
        """Classes after the last check."""
        return self.classes[-1] if self.classes else self.start

    def levels(self) -> list[tuple[int, int]]:
        """Each level completed: how many classes it had, and the step of the check that ended it.

        >>> History(30, accuracy=[0.5, 0.7, 0.5, 0.7], classes=[30, 35, 35, 40]).levels()
        [(30, 50), (35, 100)]
        """
        before = [self.start, *self.classes]
        return [(old, step) for old, new, step in zip(before, self.classes, self.steps, strict=False) if new > old]

    def steps_per_level(self) -> list[tuple[int, int]]:
        """Each level completed: how many classes it had, and the steps spent on it."""
        levels = self.levels()
        begun = [0, *(step for _, step in levels)]
        return [(classes, step - start) for (classes, step), start in zip(levels, begun, strict=False)]

    def steps_to(self, classes: int) -> int | None:
        """The step of the check at which there were so many classes for the first time; None if there never were."""
        if classes <= self.start:
            return 0
        return next((step for step, now in zip(self.steps, self.classes, strict=True) if now >= classes), None)

    def classes_at(self, step: int) -> int:
        """Classes after the last check up to `step`."""
        checks = min(step // CHECK_EVERY, len(self.classes))
        return self.classes[checks - 1] if checks else self.start

    def state_dict(self) -> dict[str, Any]:
        return {"start": self.start, "accuracy": list(self.accuracy), "classes": list(self.classes)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["start"]
        self.accuracy, self.classes = list(state["accuracy"]), list(state["classes"])
