"""HebbianClassifier: a linear classifier for scikit-learn that goes on learning, also classes it has never seen."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data
from torch import Tensor

from hebbian_softmax import HebbianSoftmax
from hebbian_softmax.checks import check_integer, check_number
from hebbian_softmax.sklearn.examples import Examples, Integers
from hebbian_softmax.sklearn.spread import ClassSpread, Floats

Data = ArrayLike | Tensor
FEWEST_STEPS = 200
"""The number of steps in which ``fit`` learns a small data set."""
LATER_RATE = 0.1
"""The learning rate of steps after the first call, as a part of the highest one in the first call."""
GROWTH = 1.2
"""Mean and spread are taken anew when the number of examples has grown by this factor."""


class HebbianClassifier(ClassifierMixin, BaseEstimator):
    r"""A softmax classifier on fixed features that learns new classes from single examples, without a new training.

    Made for features of a frozen encoder (sentence embeddings, image features), with labels that keep coming: the first
    example of a label that was never seen is written into a new row of a :class:`~hebbian_softmax.HebbianSoftmax`, and
    a few gradient steps on stored examples, drawn evenly over the classes, fit the rows to each other.

    A class that has been seen a few times is known less well than its examples suggest: the next example will be nearer
    to the mean of all classes than their mean :math:`\bar x` is. Replay therefore moves the examples of a class seen n
    times by :math:`(\kappa - 1)(\bar x - m)`, where m is the mean of all classes and :math:`\kappa = n / (n + k)`, with
    k = ``shrinkage`` · tr Σ_w / tr Σ_b, from the variances within and between classes. Familiar classes have κ = 1,
    nearly.

    Features may have any offset and scale: they are centred, and divided by the spread within classes. The mean and the
    spread are taken anew whenever the number of examples has grown by a fifth, without a change of the probabilities.
    All classes are taken to be equally frequent, whatever their numbers of examples are.

    Args:
        alpha: the strength of the L2 penalty on the rows.
        epochs: how often ``fit`` goes over the examples; it makes at least 200 steps.
        replay: the number of steps for each new example in ``partial_fit``, all together at most as many as ``fit``
            would make with the stored examples.
        batch_size: the number of examples in each step.
        learning_rate: of Adam, divided by the square root of the number of features. It falls to 0 during ``fit`` and
            the first ``partial_fit``; later steps have a tenth of it.
        limit: the number of examples of a class up to which they are written into its row.
        shrinkage: how far few examples are distrusted, see above; 0 takes them as they are.
        buffer_size: the number of examples stored for replay. If there are more, classes keep equally many.
        device: where the head is; stored examples are on the CPU.
        random_state: a number makes the results repeatable.

    Attributes:
        classes_: the labels. Those of the first call are sorted, and later ones follow as they come, so that the
            columns of probabilities keep their meaning.
        n_features_in_: the number of features.

    >>> from sklearn.datasets import load_digits
    >>> X, y = load_digits(return_X_y=True)
    >>> names = np.array("zero one two three four five six seven eight nine".split())[y]
    >>> known, rest = y < 8, np.arange(len(y)) >= 900
    >>> model = HebbianClassifier(random_state=0).fit(X[known & ~rest], names[known & ~rest])
    >>> model = model.partial_fit(X[8:10], names[8:10])              # an eight and a nine, never seen before
    >>> model.classes_[-2:].tolist()
    ['eight', 'nine']
    >>> bool(model.score(X[rest & ~known], names[rest & ~known]) > 0.5)
    True
    """

    classes_: NDArray[Any]
    n_features_in_: int

    def __init__(
        self,
        *,
        alpha: float = 1e-5,
        epochs: int = 10,
        replay: int = 1,
        batch_size: int = 64,
        learning_rate: float = 1.0,
        limit: int = 10,
        shrinkage: float = 3.0,
        buffer_size: int = 20_000,
        device: str | torch.device = "cpu",
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.alpha = alpha
        self.epochs = epochs
        self.replay = replay
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.limit = limit
        self.shrinkage = shrinkage
        self.buffer_size = buffer_size
        self.device = device
        self.random_state = random_state

    def fit(self, X: Data, y: Data) -> Self:
        """Learn from examples ``X`` (N, features) and labels ``y`` (N,); forget what was learned before."""
        x, labels = self._examples_and_labels(X, y, first=True)
        self._begin(x, np.unique(labels), max(self.buffer_size, len(x)))
        classes = self._take_in(x, labels)
        self._train(self._steps_of_fit(), first=True)
        if len(x) > self.buffer_size:
            self._store = Examples(x.shape[1], x.dtype, self.buffer_size)
            self._store.add_classes(len(self.classes_))
            self._store.store(x, classes, self._random)
        return self

    def partial_fit(self, X: Data, y: Data, classes: Data | None = None) -> Self:
        """Go on learning from examples of any labels, also of new ones; write them and make some steps of replay.

        ``classes`` may name labels that will come. They are columns of the probabilities, and have probability 0 until
        their first example comes.
        """
        first = not hasattr(self, "_head")
        self.memorize(X, y, classes)
        self._train(min(self._written * self.replay, self._steps_of_fit()), first=first)
        return self

    def memorize(self, X: Data, y: Data, classes: Data | None = None) -> Self:
        """Write examples into the rows of their labels and store them, without a gradient step.

        This takes about as long as a few predictions. The next ``partial_fit`` replays these examples, too.
        """
        first = not hasattr(self, "_head")
        x, labels = self._examples_and_labels(X, y, first=first)
        named = labels if classes is None else _joined(column_or_1d(_as_array(classes)), labels)
        if first:
            self._begin(x, np.unique(named), self.buffer_size)
        else:
            _joined(self.classes_[:1], named)  # raises if the labels are of another kind
            self._add_classes(np.unique(named))
        self._take_in(x, labels)
        return self

    def decision_function(self, X: Data) -> NDArray[Any]:
        """Return the logits (N, classes) or, of two classes, the logit of the second minus that of the first (N,).

        A class that was named and has no example yet has -inf.
        """
        logits = self._logits(X).cpu().numpy()
        return logits[:, 1] - logits[:, 0] if logits.shape[1] == 2 else logits

    def predict_proba(self, X: Data) -> NDArray[Any]:
        """Return the probabilities (N, classes), in the order of ``classes_``, if all classes are equally frequent."""
        return self._logits(X).softmax(1).cpu().numpy()

    def predict(self, X: Data) -> NDArray[Any]:
        """Return the most likely label of each example."""
        best = self._logits(X).argmax(1).cpu().numpy()
        labels: NDArray[Any] = self.classes_[best]
        return labels

    def _examples_and_labels(self, X: Data, y: Data, *, first: bool) -> tuple[NDArray[Any], NDArray[Any]]:
        check_number("alpha", self.alpha, 0)
        check_integer("epochs", self.epochs, 0)
        check_integer("replay", self.replay, 0)
        check_integer("batch_size", self.batch_size, 1)
        check_number("learning_rate", self.learning_rate, 0)
        check_number("shrinkage", self.shrinkage, 0)
        check_integer("buffer_size", self.buffer_size, 1)
        dtypes = [np.float64, np.float32]
        x, labels = validate_data(self, _as_array(X), _as_array(y), reset=first, dtype=dtypes)
        # Twice, since scikit-learn warns where more than half of the labels differ, which is usual for new ones.
        check_classification_targets(np.tile(labels, 2))
        return x, labels

    def _begin(self, x: NDArray[Any], labels: NDArray[Any], size: int) -> None:
        """Forget everything, and begin with these labels and no example."""
        features, dtype = x.shape[1], x.dtype
        self._random = check_random_state(self.random_state)
        self._head = HebbianSoftmax(
            features,
            0,
            gamma=0.0,
            limit=self.limit,
            rate=partial(_rate_of_mean, limit=self.limit),
            bias=True,
            write="literal",  # the activations are centred already
            scale="match",
            device=self.device,
            dtype=torch.from_numpy(np.zeros(0, dtype)).dtype,
        )
        groups: list[dict[str, Any]] = [
            {"params": [self._head.weight]},
            {"params": [self._head.bias], "weight_decay": 0.0},
        ]
        self._optimizer = torch.optim.Adam(groups)
        self._store, self._spread = Examples(features, dtype, size), ClassSpread(features)
        self._center: Floats = np.zeros(features)
        self._scale, self._examples_at_scaling, self._classes_at_scaling = 1.0, 0, 0
        self._index: dict[Any, int] = {}
        self.classes_ = labels[:0]
        self._add_classes(labels)

    def _add_classes(self, labels: NDArray[Any]) -> None:
        """Append those of the labels that are not there yet."""
        new = np.array([each not in self._index for each in labels.tolist()], dtype=bool)
        n = int(new.sum())
        if n == 0:
            return
        self._index |= {label: i for i, label in enumerate(labels[new].tolist(), len(self._index))}
        self.classes_ = np.concatenate([self.classes_, labels[new]])
        self._head.add_classes(n, optimizer=self._optimizer)
        self._store.add_classes(n)
        self._spread.add_classes(n)

    def _take_in(self, x: NDArray[Any], labels: NDArray[Any]) -> Integers:
        """Store and write examples; return their classes as numbers."""
        classes = np.array([self._index[each] for each in labels.tolist()], dtype=np.int64)
        self._written = len(x)
        self._store.store(x, classes, self._random)
        self._spread.see(x, classes)
        others_come = self._classes_at_scaling == 1 and self._spread.classes > 1
        if others_come or self._spread.examples >= GROWTH * self._examples_at_scaling:
            self._rescale()
        targets = torch.from_numpy(classes).to(self.device)
        self._head.memorize(_means_at_full_length(self._activations(x), targets), targets)
        return classes

    def _rescale(self) -> None:
        """Take mean and spread of the features anew, and change the rows so that the probabilities stay as they are.

        Rows that were written around an older mean have the way to the new one in common. It is taken off, since rows
        that will be written do not have it and would lose, or win, by it.

        A class that was alone had no other to be told from, and its features no mean to differ from: its row is made
        anew, too.
        """
        center, scale = self._spread.center(), math.sqrt(self._spread.traces()[0])
        seen = np.flatnonzero(self._spread.counts)
        if scale == 0:
            scale = float(np.linalg.norm(self._spread.means(seen), axis=1).mean()) or 1.0
        head = self._head
        with torch.no_grad():
            known = head.counts > 0  # rows without an example mean nothing yet
            moved = head.weight @ torch.from_numpy((center - self._center) / self._scale).to(head.weight)
            head.bias.add_(moved * known)
            head.weight *= scale / self._scale
            self._center, self._scale = center, scale
            if self._classes_at_scaling == 1 and len(seen) > 1:
                head.weight[known] = self._activations(self._spread.means(np.flatnonzero(known.cpu())))
                head.bias[known] = 0
            elif len(seen) > 1:
                for rows in (head.weight, head.bias):
                    rows[known] -= rows[known].mean(0)
        self._examples_at_scaling, self._classes_at_scaling = self._spread.examples, len(seen)
        self._begin_steps_anew()

    def _begin_steps_anew(self) -> None:
        """Let Adam forget its averages, and the head the length that rows had, which steps have changed since."""
        self._optimizer.state.clear()
        self._head.reset_memory(self._head.counts.clone())

    def _train(self, steps: int, *, first: bool) -> None:
        """Make steps on stored examples, drawn evenly over the classes."""
        head, optimizer = self._head, self._optimizer
        within, between = self._spread.traces()
        prior = self._mask()
        rate = self.learning_rate / math.sqrt(self.n_features_in_)
        optimizer.param_groups[0]["weight_decay"] = self.alpha
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = rate * (1 - step / steps if first else LATER_RATE)
            x, classes = self._store.draw(self.batch_size, self._random)
            if self.shrinkage > 0 and within > 0:
                # 1 − κ = k / (n + k); where tr Σ_b is 0, all classes have the same mean and κ is 0.
                k = self.shrinkage * within
                lost = k / (self._spread.counts[classes] * between + k)
                x = x - lost[:, None] * (self._spread.means(classes) - self._center)
            targets = torch.from_numpy(classes).to(self.device)
            head.loss(self._activations(x), targets, prior=prior, remember=False).backward()
            optimizer.step()
            optimizer.zero_grad()
        if first:
            self._begin_steps_anew()

    def _steps_of_fit(self) -> int:
        return max(FEWEST_STEPS, math.ceil(self.epochs * self._store.stored / self.batch_size))

    def _mask(self) -> Tensor | None:
        """Return -inf for classes that have no example yet and 0 for the others; None if all have one."""
        if self._spread.classes == len(self.classes_):
            return None
        return torch.where(self._head.counts > 0, 0.0, -math.inf).to(self._head.weight)

    def _logits(self, X: Data) -> Tensor:
        check_is_fitted(self)
        x = validate_data(self, _as_array(X), reset=False, dtype=[np.float64, np.float32])
        mask = self._mask()
        with torch.inference_mode():
            logits: Tensor = self._head(self._activations(x))
            return logits if mask is None else logits + mask

    def _activations(self, x: NDArray[Any]) -> Tensor:
        return torch.from_numpy((x - self._center) / self._scale).to(self._head.weight)


def _rate_of_mean(counts: Tensor, n: Tensor, *, limit: int) -> Tensor:
    """Return λ = n / (c + n) while c < limit: a row that is only written is then the mean of all that was written."""
    return n.double() / (counts + n) * (counts < limit)


def _means_at_full_length(h: Tensor, classes: Tensor) -> Tensor:
    """Return for each activation the mean of its class, made as long as activations of this class are on average.

    The mean of several activations is shorter than they are, and the row of a class would be, too.
    """
    labels, which, n = classes.unique(return_inverse=True, return_counts=True)
    sums = h.new_zeros(len(labels), h.shape[1]).index_add_(0, which, h)
    lengths = h.new_zeros(len(labels)).index_add_(0, which, torch.linalg.vector_norm(h, dim=1)) / n
    means: Tensor = F.normalize(sums, dim=1) * lengths.unsqueeze(1)
    return means.index_select(0, which)


def _as_array(data: Data) -> Any:
    """Return a tensor as an array, and anything else as it is."""
    if not isinstance(data, Tensor):
        return data
    data = data.detach().cpu()
    return (data.float() if data.dtype in (torch.bfloat16, torch.float16) else data).numpy()


def _joined(first: NDArray[Any], second: NDArray[Any]) -> NDArray[Any]:
    """Return two arrays of labels as one. NumPy would turn numbers into strings for that."""
    kinds = ["numbers" if labels.dtype.kind in "biuf" else "strings" for labels in (first, second)]
    if kinds[0] != kinds[1]:
        raise ValueError(
            f"labels must be all numbers or all strings, got {first[:1].tolist()} and {second[:1].tolist()}"
        )
    return np.concatenate([first, second])
