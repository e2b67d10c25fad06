"""The time of one new example beside that of one prediction, in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from hebbian_softmax.sklearn import HebbianClassifier


def measure(classes: int, features: int, rounds: int) -> dict[str, Any]:
    """Time single calls on a classifier of ``classes`` labels; each round makes each call once."""
    random = np.random.default_rng(0)
    means = random.normal(size=(classes, features))
    examples = (np.repeat(means, 2, axis=0) + random.normal(size=(2 * classes, features))).astype(np.float32)
    labels = np.repeat([f"label {i}" for i in range(classes)], 2)
    model = HebbianClassifier(random_state=0).memorize(examples, labels)
    model.partial_fit(examples[:1], labels[:1])

    def one() -> np.ndarray:
        return random.normal(size=(1, features)).astype(np.float32)

    calls: dict[str, Callable[[int], object]] = {
        "predict": lambda i: model.predict(one()),
        "memorize, a new label": lambda i: model.memorize(one(), [f"new {i}"]),
        "predict again": lambda i: model.predict(one()),
        "memorize, a known label": lambda i: model.memorize(one(), [f"label {i}"]),
        "partial_fit, a new label, with a step of replay": lambda i: model.partial_fit(one(), [f"newer {i}"]),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(rounds):
        for name, call in calls.items():
            begun = time.perf_counter()
            call(i)
            times[name].append(1e3 * (time.perf_counter() - begun))
    middle = {name: statistics.median(found) for name, found in times.items()}
    mean = {name: statistics.fmean(found) for name, found in times.items()}
    for name in calls:
        print(
            f"{name:>48}  median {middle[name]:7.3f} ms  mean {mean[name]:7.3f} ms  "
            f"{middle[name] / middle['predict']:5.2f} predictions"
        )
    return {"classes": classes, "features": features, "rounds": rounds, "median": middle, "mean": mean, "all": times}
