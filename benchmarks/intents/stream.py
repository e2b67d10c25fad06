"""Utterances that come one at a time: each is first predicted, then learned."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from scipy.special import expit
from sklearn.linear_model import SGDClassifier

from benchmarks.intents.contenders import unit
from benchmarks.intents.data import Array, Features, Labelled
from hebbian_softmax.sklearn import HebbianClassifier


class Learner(Protocol):
    """What a stream needs of a classifier. ``begin`` is told all labels that will come, which only some need."""

    def begin(self, labels: Array, known: Labelled, seed: int) -> None: ...
    def learn(self, x: Array, label: str) -> None: ...
    def predict(self, x: Array) -> Array: ...


class Means:
    """The class means, as nearest-mean classifiers and streaming LDA use them."""

    def begin(self, labels: Array, known: Labelled, seed: int) -> None:
        self.labels, features = labels, known.x.shape[1]
        self.index = {label: i for i, label in enumerate(labels.tolist())}
        self.sums, self.counts = np.zeros((len(labels), features)), np.zeros(len(labels))
        for x, label in zip(*known, strict=True):
            self.learn(x, label)

    def learn(self, x: Array, label: str) -> None:
        i = self.index[label]
        self.sums[i] += x
        self.counts[i] += 1

    def means(self) -> tuple[Array, Array]:
        seen = self.counts > 0
        return self.labels[seen], self.sums[seen] / self.counts[seen, None]


class NearestMean(Means):
    """The class whose mean has the largest cosine."""

    def predict(self, x: Array) -> Array:
        labels, means = self.means()
        return labels[(x @ unit(means).T).argmax(1)]


class StreamingLDA(Means):
    """Hayes and Kanan 2020: a running covariance within classes; its inverse is renewed after 1 % more examples."""

    def __init__(self, epsilon: float) -> None:
        self.epsilon = epsilon

    def begin(self, labels: Array, known: Labelled, seed: int) -> None:
        features = known.x.shape[1]
        self.scatter, self.seen, self.renewed = np.zeros((features, features)), 0, 0
        self.inverse = np.eye(features) / self.epsilon
        super().begin(labels, known, seed)

    def learn(self, x: Array, label: str) -> None:
        i = self.index[label]
        if self.counts[i]:
            away = x - self.sums[i] / self.counts[i]
            self.scatter += self.counts[i] / (self.counts[i] + 1) * np.outer(away, away)
        self.seen += 1
        super().learn(x, label)

    def predict(self, x: Array) -> Array:
        if self.seen >= 1.01 * self.renewed:
            covariance = self.scatter / self.seen
            self.inverse = np.linalg.inv((1 - self.epsilon) * covariance + self.epsilon * np.eye(len(covariance)))
            self.renewed = self.seen
        labels, means = self.means()
        rows = means @ self.inverse
        return labels[(x @ rows.T - (rows * means).sum(1) / 2).argmax(1)]


class SGD:
    """scikit-learn's SGDClassifier with the logistic loss; it must know all labels from the start.

    A step for one utterance is made here, for all labels at once: scikit-learn makes it label by label, which takes
    more than ten times as long. A test compares the two.
    """

    def __init__(self, alpha: float) -> None:
        self.alpha = alpha

    def begin(self, labels: Array, known: Labelled, seed: int) -> None:
        self.labels = labels
        self.rows, self.intercepts, self.step = np.zeros((len(labels), known.x.shape[1])), np.zeros(len(labels)), 1.0
        if len(known.x):
            model = SGDClassifier(loss="log_loss", alpha=self.alpha, random_state=seed)
            order = np.random.default_rng(seed).permutation(len(known.x))
            for _ in range(5):
                model.partial_fit(known.x[order], known.y[order], classes=labels)
            self.rows, self.intercepts, self.step = model.coef_.astype(np.float64), model.intercept_, model.t_

    def learn(self, x: Array, label: str) -> None:
        # The learning rate "optimal": 1 / (α (t₀ + t − 1)), where t₀ makes the first one α^(−1/4).
        rate = 1 / (self.alpha * (self.alpha**-0.75 + self.step - 1))
        gradients = expit(self.rows @ x + self.intercepts) - (self.labels == label)
        self.rows *= max(0.0, 1 - rate * self.alpha)
        self.rows -= rate * np.outer(gradients, x)
        self.intercepts = self.intercepts - rate * gradients
        self.step += 1

    def predict(self, x: Array) -> Array:
        return self.labels[(x @ self.rows.T + self.intercepts).argmax(1)]


class Ours:
    """HebbianClassifier with one ``partial_fit`` for each utterance."""

    def __init__(self, **setting: Any) -> None:
        self.setting = setting

    def begin(self, labels: Array, known: Labelled, seed: int) -> None:
        self.model = HebbianClassifier(random_state=seed, **self.setting)
        if len(known.x):
            self.model.fit(*known)

    def learn(self, x: Array, label: str) -> None:
        self.model.partial_fit(x[None], [label])

    def predict(self, x: Array) -> Array:
        return self.model.predict(x)


LEARNERS: dict[str, list[Callable[[], Learner]]] = {
    "nearest class mean": [NearestMean],
    "streaming LDA": [lambda: StreamingLDA(1e-3), lambda: StreamingLDA(1e-2), lambda: StreamingLDA(1e-1)],
    "SGDClassifier": [lambda: SGD(1e-3), lambda: SGD(1e-4), lambda: SGD(1e-5), lambda: SGD(1e-6)],
    "HebbianClassifier": [Ours],
    "HebbianClassifier, nothing written": [lambda: Ours(limit=0)],
    "HebbianClassifier, shrinkage 0": [lambda: Ours(shrinkage=0.0)],
    "HebbianClassifier, no replay": [lambda: Ours(replay=0)],
}
"""Each learner with the settings that are tried on other seeds; HebbianClassifier has its defaults."""


def run(learner: Learner, features: Features, seed: int, *, known: int, length: int | None, final: bool) -> Any:
    """Return the accuracy over the stream, on the second utterance of new intents, and on the test set at the end.

    With ``known`` intents, half of their utterances are learned before the stream, which has the other half and as many
    of each new intent; without any, the stream has all utterances. Nothing is predicted before the first is learned.
    """
    random = np.random.default_rng(seed)
    train, test = features.train, features.test if final else features.validation
    labels = np.unique(train.y)
    old = random.permutation(labels)[:known]
    shuffled = [random.permutation(np.flatnonzero(train.y == each)) for each in labels]
    halves = [half for places in shuffled for half in np.array_split(places, 2)]
    first, second = np.concatenate(halves[::2]), np.concatenate(halves[1::2])
    before = first[np.isin(train.y[first], old)]
    order = random.permutation(second if known else np.concatenate([first, second]))[:length]
    learner.begin(labels, Labelled(train.x[before], train.y[before]), seed)
    seen = dict.fromkeys(labels.tolist(), 0) | dict.fromkeys(old.tolist(), len(train.y))
    right, on_second, begun = [], [], time.perf_counter()
    for n, i in enumerate(order):
        label = str(train.y[i])
        if n or known:
            right.append(bool(learner.predict(train.x[i : i + 1])[0] == label))
            if seen[label] == 1:
                on_second.append(right[-1])
        learner.learn(train.x[i], label)
        seen[label] += 1
    return {
        "stream": 100 * float(np.mean(right)),
        "second": 100 * float(np.mean(on_second)),
        "test": 100 * float(np.mean(learner.predict(test.x) == test.y)),
        "milliseconds for each utterance": 1e3 * (time.perf_counter() - begun) / len(order),
    }


def measure(
    features: Features, seeds: list[int], tuning_seeds: list[int], names: list[str], *, known: int, length: int | None
) -> dict[str, Any]:
    """Choose the setting of each learner by the accuracy over streams of other seeds; then measure it."""
    rows: dict[str, Any] = {}
    for name in names:
        makers, tried = LEARNERS[name], []
        if len(makers) > 1:
            how = {"known": known, "length": 3000, "final": False}
            tried = [
                float(np.mean([run(make(), features, seed, **how)["stream"] for seed in tuning_seeds]))
                for make in makers
            ]
        chosen = int(np.argmax(tried)) if tried else 0
        runs = [run(makers[chosen](), features, seed, known=known, length=length, final=True) for seed in seeds]
        rows[name] = {"runs": runs, "chosen": chosen, "tried": tried}
        mean = {key: float(np.mean([each[key] for each in runs])) for key in runs[0]}
        print(f"{name:>36}  " + "  ".join(f"{key} {value:5.1f}" for key, value in mean.items()), flush=True)
    return rows
