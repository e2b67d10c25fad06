"""One learner of the image curriculum (section 4.1): network, head, optimizer, and its place in the curriculum.

Everything happens where the tensors are. The number of active classes is itself a tensor on the device, so a training
step and a check can both be recorded as CUDA graphs (see `fleet.py`). All random numbers come from the learner's own
generator, so many learners can share a process without disturbing each other.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hebbian_softmax import ConstantRate, HebbianSoftmax, InverseCountRate
from hebbian_softmax.lab.base.rule import (
    DEFAULT_FADE,
    DEFAULT_GAMMA,
    DEFAULT_LIMIT,
    DEFAULT_RATE,
    DEFAULT_START,
    DEFAULT_WRITE,
    make_rate,
    number_of,
    writing_began,
)
from hebbian_softmax.lab.base.seeds import derive_seed
from hebbian_softmax.lab.images.convnet import augment, convnet, count_features
from hebbian_softmax.lab.images.curriculum import ADDED, BATCH, START, THRESHOLD
from hebbian_softmax.lab.images.data import TEST_DRAWINGS, ImageSet
from hebbian_softmax.rule import Rate

DROPOUT = 0.2
# The number of classes that a check tests together. A CPU is twice as fast while its cache holds them.
PART = {"cuda": 200, "cpu": 20}
FOR_EVER: dict[str, Callable[[float], Rate]] = {
    "constant": ConstantRate,
    "inverse": lambda gamma: InverseCountRate(),
}
"""The rates λ that do not end at T, made from γ."""


@dataclass(frozen=True)
class Method:
    """How a learner learns. Users tune the first four settings; the others make the variants of the comparison."""

    hebbian: bool
    learning_rate: float = 1e-3
    gamma: float = DEFAULT_GAMMA
    limit: int | str = DEFAULT_LIMIT
    rate: str = DEFAULT_RATE
    """The rate λ: `recent` is the library's, `paper` is equation 4, `constant` is always γ, and `inverse` is always 1/c
    (section 3.1)."""
    scale: float | str = "match"
    write: str = DEFAULT_WRITE
    """What the rule writes: `literal`, `centred` or `across`."""
    objective: str = "l2"
    start: int | str = DEFAULT_START
    """The step from which the rule writes, or `auto`: once features have settled."""
    fade: bool = DEFAULT_FADE
    """Whether what the rule writes fades with the learning rate."""
    train_rows: bool = True
    """If False, the head's rows get no gradient and only the rule changes them."""
    head_rate: float = 1.0
    """The head's learning rate relative to the network's."""
    extra_steps: int = 0
    """Further gradient steps on the examples of a batch whose class was seen fewer than T times.

    They do not count as training steps.
    """
    active_only: bool = False
    """Whether the softmax is over the active classes instead of all."""
    seen_only: bool = False
    """Whether the softmax of training leaves out classes that were in no batch yet."""
    checks_seen_only: bool = False
    """Whether checks leave them out, too."""
    class_means: bool = False
    """Whether the nearest mean of a class's training activations gives the answer instead of the head."""

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can hold a step. Two objectives cannot, since solving them waits for the device."""
        return not (self.hebbian and self.objective in ("svm", "smax"))


def rate_of(method: Method) -> Rate:
    """Return the rate λ of a method."""
    if method.rate in FOR_EVER:
        return FOR_EVER[method.rate](method.gamma)
    return make_rate(method.rate, method.gamma, method.limit)


@dataclass(frozen=True)
class Answer:
    """What a head takes a drawing for."""

    right: bool
    probability: float
    example: Tensor
    """A training drawing of the class that the head has chosen."""


class Learner:
    """A network, its head and its optimizer on the curriculum.

    Equal seeds give equal class orders, first weights and random draws, whatever the method.
    """

    def __init__(
        self,
        data: ImageSet,
        method: Method,
        seed: int,
        *,
        device: torch.device | str = "cpu",
        images: Tensor | None = None,
        classes: int | None = None,
        filters: int = 64,
        threshold: float = THRESHOLD,
    ) -> None:
        """Make a learner that has not trained yet.

        `images` are `data.images` on the device, for learners to share. `classes` is the number of classes that take
        part, by default all. A level ends when more than `threshold` per cent of the answers are right.
        """
        self.method, self.device, self.threshold = method, torch.device(device), threshold
        self.images = data.images.to(self.device) if images is None else images
        draws = torch.Generator().manual_seed(derive_seed(seed, "order"))
        self.order = torch.randperm(len(data.images), generator=draws)[:classes].to(self.device)
        self.total = len(self.order)
        self.start = min(START, self.total)
        self.labels = torch.arange(self.total, device=self.device)
        self.part = PART.get(self.device.type, 200)

        draws = torch.Generator().manual_seed(derive_seed(seed, "weights"))
        self.network = convnet(filters, draws).to(self.device)
        # For plain softmax the head is not attached to the optimizer, so it is exactly an nn.Linear; or it counts only.
        self.head = HebbianSoftmax(
            count_features(filters, *self.images.shape[-2:]),
            self.total,
            gamma=method.gamma,
            limit=number_of(method.limit),
            rate=rate_of(method),
            scale=method.scale,
            write=method.write,
            objective=method.objective,
            start=method.start if method.hebbian else 0,
            fade=method.fade,
            seen_only=method.checks_seen_only,  # for checks; in training it is not the head that computes the loss
        )
        nn.init.xavier_uniform_(self.head.weight, generator=draws)
        self.head.to(self.device)
        self.head.weight.requires_grad_(method.train_rows)
        groups: list[dict[str, Any]] = [
            {"params": list(self.network.parameters())},
            {"params": list(self.head.parameters()), "lr": method.learning_rate * method.head_rate},
        ]
        self.optimizer = torch.optim.RMSprop(groups, lr=method.learning_rate, capturable=self.device.type == "cuda")
        self.counting = method.hebbian or method.seen_only or method.checks_seen_only
        if self.counting:
            self.head.memorizing = method.hebbian
            self.head.attach(self.optimizer)

        self.generator = torch.Generator(self.device).manual_seed(derive_seed(seed, "draws"))
        self.active = torch.tensor(self.start, device=self.device)
        self.seen = torch.zeros(self.total, dtype=torch.long, device=self.device)
        self.loss = torch.zeros((), device=self.device)
        """The loss of the last step."""
        self.outcome = torch.zeros(2, device=self.device)
        """The accuracy of the last check and the number of classes after it."""
        self.recognised = torch.zeros(self.total, dtype=torch.long, device=self.device)
        """How many test drawings of each class the last check recognised; 0 for classes that were not active."""

    def step(self) -> None:
        """Take one training step, and the extra steps of the method."""
        inputs, labels = self.draw()
        self.loss.copy_(self.descend(inputs, labels, None))
        if self.method.extra_steps:
            rare = (self.seen[labels] < self.head.limit).float()
            self.seen.index_add_(0, labels, torch.ones_like(labels))
            for _ in range(self.method.extra_steps):
                self.descend(inputs, labels, rare)

    def draw(self) -> tuple[Tensor, Tensor]:
        """Draw a batch: training drawings of active classes, rotated and moved at random, and their labels."""
        labels = self.uniform(BATCH, self.active)
        drawings = TEST_DRAWINGS + self.uniform(BATCH, self.images.shape[1] - TEST_DRAWINGS)
        return augment(self.images[self.order[labels], drawings].unsqueeze(1), self.generator), labels

    def descend(self, inputs: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        """Take a gradient step on the mean loss, weighted if `weights` are given, and return that loss."""
        features = self.network(inputs)
        if self.counting:
            self.head.remember(features, labels)  # the activation before dropout, as the paper says
        logits = self.logits(self._dropped(features))
        if self.method.seen_only:
            logits = logits + self.head.seen_prior(labels)
        losses = F.cross_entropy(logits, labels, reduction="none")
        loss = losses.mean() if weights is None else (losses * weights).sum() / weights.sum().clamp_min(1)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def uniform(self, count: int, below: Tensor | int) -> Tensor:
        """Draw whole numbers from 0 to `below` - 1, where `below` may be a tensor on the device."""
        drawn = torch.rand(count, generator=self.generator, device=self.device) * below
        return drawn.long().clamp(max=below - 1)  # rounding can reach `below`

    def _dropped(self, features: Tensor) -> Tensor:
        """Apply 20 % dropout. The head's own dropout could not draw from the learner's generator."""
        kept = torch.rand(features.shape, generator=self.generator, device=self.device) >= DROPOUT
        return features * kept / (1 - DROPOUT)

    def logits(self, features: Tensor) -> Tensor:
        """Return the logits, with those of inactive classes at minus infinity if only active classes compete."""
        logits: Tensor = self.head(features)
        return logits.masked_fill(self.labels >= self.active, -torch.inf) if self.method.active_only else logits

    @torch.no_grad()
    def check(self, capacity: int) -> None:
        """Test the active classes, which must be among the first `capacity`, and add a level if they are known."""
        right = self.right_answers(capacity)
        tests = TEST_DRAWINGS * self.active
        accuracy = right / tests
        grown = (self.active + ADDED).clamp(max=self.total)
        self.active.copy_(torch.where(100 * right > self.threshold * tests, grown, self.active))
        self.outcome.copy_(torch.stack([accuracy, self.active.to(accuracy.dtype)]))

    @torch.no_grad()
    def right_answers(self, capacity: int) -> Tensor:
        """Count the test drawings of the active classes that are recognised, also by class in `recognised`.

        What the learner has learned stays as it is.
        """
        self.network.eval()
        self.head.eval()
        centers = self.class_means(capacity) if self.method.class_means else None
        recognised = self.recognised[:capacity]
        parts = zip(self.labels[:capacity].split(self.part), recognised.split(self.part), strict=True)
        for labels, right in parts:
            features = self._features(labels, slice(0, TEST_DRAWINGS))
            if centers is None:
                guesses = self.logits(features).argmax(dim=1)
            else:
                guesses = torch.cdist(features, centers).argmin(dim=1)
            hits = (guesses.view(len(labels), -1) == labels.unsqueeze(1)) & (labels < self.active).unsqueeze(1)
            right.copy_(hits.sum(dim=1))
        self.network.train()
        self.head.train()
        return recognised.sum()

    @torch.no_grad()
    def answers(self, labels: Tensor) -> list[Answer]:
        """Return what the head takes a test drawing of each of these classes for. The learner stays as it is."""
        self.network.eval()
        self.head.eval()
        probabilities, guesses = self.logits(self._features(labels, slice(0, 1))).softmax(1).max(1)
        self.network.train()
        self.head.train()
        examples = self.images[self.order[guesses], TEST_DRAWINGS]
        found = zip(labels.tolist(), guesses.tolist(), probabilities.tolist(), examples, strict=True)
        return [Answer(label == guess, probability, example) for label, guess, probability, example in found]

    def class_means(self, capacity: int) -> Tensor:
        """Return the mean training activation of each class. Those of inactive classes are placed far away."""
        drawings = slice(TEST_DRAWINGS, None)
        features = [self._features(labels, drawings) for labels in self.labels[:capacity].split(max(1, self.part // 3))]
        means = torch.cat(features).view(min(capacity, self.total), -1, self.head.in_features).mean(dim=1)
        return means.masked_fill((self.labels[:capacity] >= self.active).unsqueeze(1), 1e6)

    def _features(self, labels: Tensor, drawings: slice) -> Tensor:
        """Return the activations of some drawings of each class in `labels`."""
        images = self.images[self.order[labels], drawings]
        features: Tensor = self.network(images.reshape(-1, 1, *images.shape[-2:]) / 255)
        return features

    def writes(self) -> tuple[int | None, int | None]:
        """Return the steps before the rule began by itself, and how many classes it has written; None without it.

        A class that had been seen T times before that is not written.
        """
        if not self.method.hebbian:
            return None, None
        later = self.head.since_start
        written = (later > 0) & (self.head.counts - later < self.head.limit)
        return writing_began(self.head), int(written.sum())

    def state_dict(self) -> dict[str, Any]:
        """Return everything that learning depends on; the tensors are not copied."""
        return {
            "network": self.network.state_dict(),
            "head": self.head.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "active": self.active,
            "seen": self.seen,
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.network.load_state_dict(state["network"])
        self.head.load_state_dict(state["head"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.active.copy_(state["active"])
        self.seen.copy_(state["seen"])
        self.generator.set_state(state["generator"])

    def tensors(self) -> Iterator[Tensor]:
        """Yield every tensor that a step or a check changes, except the optimizer's state."""
        yield from self.network.state_dict().values()
        yield from self.head.state_dict().values()
        yield from (self.active, self.seen, self.loss, self.outcome, self.recognised)
