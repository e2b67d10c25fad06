"""Classifiers that are given new classes: each takes a task and a setting, and returns the labels of the test set."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression, SGDClassifier

from benchmarks.intents.data import Array, Labelled, Task
from hebbian_softmax import HebbianSoftmax, NewClasses
from hebbian_softmax.sklearn import HebbianClassifier

Contender = Callable[..., Array]


def class_means(data: Labelled) -> tuple[Array, Array, Array]:
    """Return the labels, the number of examples of each, and their means in float64."""
    labels, which, counts = np.unique(data.y, return_inverse=True, return_counts=True)
    sums = np.zeros((len(labels), data.x.shape[1]))
    np.add.at(sums, which, data.x)
    return labels, counts, sums / counts[:, None]


def unit(x: Array) -> Array:
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def nearest_mean(task: Task, seed: int, *, measure: str) -> Array:
    """Take the class whose mean is nearest."""
    labels, _, means = class_means(task.everything())
    if measure == "cosine":
        return labels[(task.test.x @ unit(means).T).argmax(1)]
    return labels[(task.test.x @ means.T - (means**2).sum(1) / 2).argmax(1)]


def imprinting(task: Task, seed: int, *, scale: float) -> Array:
    """Train a cosine softmax on the known classes, then add the direction of the mean of each new class (Qi 2018)."""
    labels, which = np.unique(task.known.y, return_inverse=True)
    x, y = torch.from_numpy(unit(task.known.x)).float(), torch.from_numpy(which)
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(len(labels), x.shape[1], generator=generator).requires_grad_()
    optimizer = torch.optim.Adam([rows], lr=0.03)
    steps, batch = 10 * len(x) // 64, 64
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 0.03 * (1 - step / steps)
        places = torch.randint(len(x), (batch,), generator=generator)
        loss = F.cross_entropy(scale * x[places] @ F.normalize(rows, dim=1).T, y[places])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    new, _, means = class_means(Labelled(unit(task.new.x), task.new.y))
    all_rows = np.concatenate([unit(rows.detach().numpy()), unit(means)])
    return np.concatenate([labels, new])[(task.test.x @ all_rows.T).argmax(1)]


def logistic(task: Task, seed: int, *, C: float, balanced: bool) -> Array:  # noqa: N803
    """Refit scikit-learn's LogisticRegression on everything."""
    model = LogisticRegression(C=C, class_weight="balanced" if balanced else None, max_iter=200)
    return _refitted(model, task)


def sgd(task: Task, seed: int, *, alpha: float, balanced: bool) -> Array:
    """Refit scikit-learn's SGDClassifier with the logistic loss on everything."""
    weight = "balanced" if balanced else None
    return _refitted(SGDClassifier(loss="log_loss", alpha=alpha, class_weight=weight, random_state=seed), task)


def _refitted(model: Any, task: Task) -> Array:
    data = task.everything()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return model.fit(data.x, data.y).predict(task.test.x)


def streaming_lda(task: Task, seed: int, *, epsilon: float) -> Array:
    """Use class means and one covariance within classes, shrunk (Hayes and Kanan 2020)."""
    data = task.everything()
    labels, _, means = class_means(data)
    deviations = data.x - means[np.searchsorted(labels, data.y)]
    covariance = deviations.T @ deviations / len(data.x)
    inverse = np.linalg.inv((1 - epsilon) * covariance + epsilon * np.eye(len(covariance)))
    rows = means @ inverse
    return labels[(task.test.x @ rows.T - (rows * means).sum(1) / 2).argmax(1)]


def ridge(task: Task, seed: int, *, penalty: float, balanced: bool, random_features: int = 0) -> Array:
    """Regress the classes' indicators on the features, or on random ones (McDonnell et al. 2023), with an L2 penalty.

    ``penalty`` is relative to the mean variance of a feature. ``balanced`` gives all classes the same total weight.
    """
    data = task.everything()
    x, test = data.x.astype(np.float64), task.test.x.astype(np.float64)
    if random_features:
        mean, length = x.mean(0), np.sqrt(x.var(0).sum())
        directions = np.random.default_rng(seed).normal(size=(x.shape[1], random_features))
        x, test = (np.maximum((each - mean) / length @ directions, 0) for each in (x, test))
    labels, which, counts = np.unique(data.y, return_inverse=True, return_counts=True)
    weight = 1 / counts[which] if balanced else np.ones(len(x))
    weight /= weight.sum()
    mean = weight @ x
    x, test = x - mean, test - mean
    indicators = np.eye(len(labels))[which]
    prior = weight @ indicators
    gram = (x * weight[:, None]).T @ x
    gram += penalty * np.trace(gram) / len(gram) * np.eye(len(gram))
    rows = np.linalg.solve(gram, (x * weight[:, None]).T @ (indicators - prior))
    return labels[(test @ rows + prior).argmax(1)]


class Ours:
    """HebbianClassifier: ``fit`` on the known classes, then one ``partial_fit`` (or ``memorize``) with the new ones."""

    def __init__(self, then: str = "partial_fit") -> None:
        self.then = then

    def __call__(self, task: Task, seed: int, **setting: Any) -> Array:
        model = HebbianClassifier(random_state=seed, **setting).fit(*task.known)
        return getattr(model, self.then)(*task.new).predict(task.test.x)


def trained_head(task: Task, seed: int, *, shown: int, whiten: bool) -> Array:
    """Train an ``nn.Linear`` on the known classes, take it over with ``from_linear``, and memorise the new ones once.

    Before that, the head is shown this many activations of known classes (``calibrate``): with 0, ``memorize`` is the
    first that it sees.
    """
    labels, which = np.unique(task.known.y, return_inverse=True)
    x, y = torch.from_numpy(task.known.x), torch.from_numpy(which)
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    linear = torch.nn.Linear(x.shape[1], len(labels))
    optimizer = torch.optim.Adam(linear.parameters(), lr=0.03)
    steps = 10 * len(x) // 64
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 0.03 * (1 - step / steps)
        places = torch.randint(len(x), (64,), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(linear(x[places]), y[places]).backward()
        optimizer.step()
    settings = NewClasses(whiten=whiten, prior="even")
    head = HebbianSoftmax.from_linear(linear, limit=50, new_classes=settings)
    if shown:
        head.calibrate(x[torch.randperm(len(x), generator=generator)[:shown]])
    new, which = np.unique(task.new.y, return_inverse=True)
    head.add_classes(len(new))
    head.memorize(torch.from_numpy(task.new.x), torch.from_numpy(which) + len(labels))
    with torch.inference_mode():
        best = head(torch.from_numpy(task.test.x)).argmax(1).numpy()
    return np.concatenate([labels, new])[best]


def grid(**options: list[Any]) -> list[dict[str, Any]]:
    """Return all combinations of options."""
    found: list[dict[str, Any]] = [{}]
    for name, values in options.items():
        found = [{**each, name: value} for each in found for value in values]
    return found


CONTENDERS: dict[str, tuple[Contender, list[dict[str, Any]]]] = {
    "nearest class mean": (nearest_mean, grid(measure=["cosine", "euclidean"])),
    "imprinting": (imprinting, grid(scale=[3.0, 5.0, 10.0, 20.0])),
    "LogisticRegression refit": (logistic, grid(C=[1.0, 10.0, 100.0, 1000.0], balanced=[False])),
    "LogisticRegression refit, balanced": (logistic, grid(C=[0.01, 0.1, 1.0, 10.0], balanced=[True])),
    "SGDClassifier refit": (sgd, grid(alpha=[1e-6], balanced=[False])),
    "SGDClassifier refit, balanced": (sgd, grid(alpha=[1e-3], balanced=[True])),
    "streaming LDA": (streaming_lda, grid(epsilon=[1e-4, 1e-3, 1e-2, 1e-1])),
    "ridge": (ridge, grid(penalty=[0.1, 1.0, 10.0], balanced=[True, False])),
    "ridge on 2,000 random features": (ridge, grid(penalty=[0.1, 1.0, 10.0], balanced=[True], random_features=[2000])),
    "from_linear, then memorize": (trained_head, grid(shown=[0], whiten=[True, False])),
    "from_linear, calibrate with 3,000, then memorize": (trained_head, grid(shown=[3000], whiten=[True, False])),
    "HebbianClassifier": (Ours(), [{}]),
    "HebbianClassifier, memorize only": (Ours("memorize"), [{}]),
    "HebbianClassifier, shrinkage 0": (Ours(), [{"shrinkage": 0.0}]),
}
"""Each contender with the settings that validation chooses from; HebbianClassifier has its defaults.

SGDClassifier is slow: its alpha is the best of 1e-6 to 1e-4 (plain) and of 1e-4 to 1e-2 (balanced) on one validation
task.
"""
