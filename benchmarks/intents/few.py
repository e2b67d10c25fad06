"""Known classes, then a few examples of new ones: accuracy over all classes and over the new ones."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from benchmarks.intents import data
from benchmarks.intents.contenders import CONTENDERS
from benchmarks.intents.data import Features, Task

SHOTS = (1, 2, 5)


def accuracy(task: Task, found: Any) -> tuple[float, float]:
    """Return the percentage of right labels over all classes, and over the new ones."""
    right = found == task.test.y
    return 100 * float(right.mean()), 100 * float(right[np.isin(task.test.y, task.new.y)].mean())


def measure(
    features: Features, seeds: list[int], tuning_seeds: list[int], names: list[str], **how: Any
) -> dict[str, Any]:
    """Choose the setting of each contender on the validation set, for each number of examples; then test it."""
    rows: dict[str, Any] = {}
    for name in names:
        contender, settings = CONTENDERS[name]
        rows[name] = {}
        for shots in SHOTS:
            tried = []
            if len(settings) > 1:
                for setting in settings:
                    tasks = [(data.split(features, seed, shots, final=False, **how), seed) for seed in tuning_seeds]
                    found = [accuracy(task, contender(task, seed, **setting))[0] for task, seed in tasks]
                    tried.append({"setting": setting, "validation": float(np.mean(found))})
            chosen = max(tried, key=lambda each: each["validation"])["setting"] if tried else settings[0]
            begun, both = time.perf_counter(), []
            for seed in seeds:
                task = data.split(features, seed, shots, final=True, **how)
                both.append(accuracy(task, contender(task, seed, **chosen)))
            seconds = (time.perf_counter() - begun) / len(seeds)
            everything, new = (list(each) for each in zip(*both, strict=True))
            rows[name][shots] = {"all": everything, "new": new, "setting": chosen, "tried": tried, "seconds": seconds}
        shown = "  ".join(
            f"{np.mean(rows[name][shots]['all']):5.1f} ({np.mean(rows[name][shots]['new']):5.1f})" for shots in SHOTS
        )
        print(f"{name:>36}  {shown}", flush=True)
    return rows
