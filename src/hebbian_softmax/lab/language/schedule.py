"""The learning rate as a function of the step alone, so that a resumed run goes on with it."""

import math

SCHEDULES = ("constant", "cosine", "linear")


def learning_rate(step: int, *, peak: float, schedule: str, warmup: int, steps: int) -> float:
    """The rate of the step with index `step` of `steps`: a linear rise over `warmup` steps, then the schedule.

    `cosine` and `linear` fall to zero at the end of the run. The paper names no schedule for its language models.

    >>> [learning_rate(step, peak=1.0, schedule="linear", warmup=2, steps=6) for step in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    if schedule == "cosine":
        return peak * (1 + math.cos(math.pi * done)) / 2
    return peak * (1 - done) if schedule == "linear" else peak
