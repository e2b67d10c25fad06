"""A network with its head and its optimizer, and the order in which it sees its examples."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hebbian_softmax import HebbianSoftmax
from hebbian_softmax.lab.base.rule import (
    DEFAULT_FADE,
    DEFAULT_GAMMA,
    DEFAULT_LIMIT,
    DEFAULT_RATE,
    DEFAULT_START,
    DEFAULT_WRITE,
    make_rate,
    number_of,
)
from hebbian_softmax.lab.base.seeds import derive_seed
from hebbian_softmax.lab.longtail.tasks import FEATURES, LongTail

BATCH = 128
LOGITS = 1 << 24  # logits that an evaluation holds at a time, 64 MiB


class ShuffledBatches:
    """Indices of examples in batches: every epoch shows all of them once, in a new order.

    The order depends only on `seed` and on the number of batches drawn, so that number is the whole state. A last
    batch that would be smaller is left out; its examples come in other epochs.
    """

    def __init__(self, examples: int, batch: int, seed: int) -> None:
        if not 1 <= batch <= examples:
            raise ValueError(f"batch must be between 1 and the {examples} examples, not {batch}")
        self.examples, self.batch, self.seed = examples, batch, seed
        self.drawn = 0
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.long)

    def next(self) -> Tensor:
        """Return the indices of the next batch."""
        epoch, position = divmod(self.drawn, self.examples // self.batch)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(derive_seed(self.seed, "order", epoch))
            self._epoch, self._order = epoch, torch.randperm(self.examples, generator=generator)
        self.drawn += 1
        return self._order[position * self.batch : (position + 1) * self.batch]

    def state_dict(self) -> dict[str, int]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.drawn = state["drawn"]


@dataclass(frozen=True)
class Method:
    """How a network is trained. The last six are settings of the Hebbian rule.

    With `balanced`, the logarithms of the classes' frequencies are added to the logits in training alone (balanced
    softmax, or logit adjustment): the network learns the rest, which is right where all classes are equally frequent.
    """

    learning_rate: float
    hebbian: bool = False
    balanced: bool = False
    gamma: float = DEFAULT_GAMMA
    limit: int | str = DEFAULT_LIMIT
    write: str = DEFAULT_WRITE
    rate: str = DEFAULT_RATE
    start: int | str = DEFAULT_START
    fade: bool = DEFAULT_FADE


class Learner:
    """A network, its head and its optimizer. Equal seeds give equal first weights, whatever the method."""

    def __init__(self, task: LongTail, method: Method, seed: int) -> None:
        torch.manual_seed(derive_seed(seed, "weights"))
        classes = len(task.counts)
        self.network = task.network()
        self.head: nn.Linear
        if method.hebbian:
            self.head = HebbianSoftmax(
                FEATURES,
                classes,
                gamma=method.gamma,
                limit=number_of(method.limit),
                write=method.write,
                rate=make_rate(method.rate, method.gamma, method.limit),
                start=method.start,
                fade=method.fade,
            )
        else:
            self.head = nn.Linear(FEATURES, classes, bias=False)
        self.prior = (task.counts / task.counts.sum()).log() if method.balanced else None
        parameters = [*self.network.parameters(), *self.head.parameters()]
        self.optimizer = torch.optim.Adam(parameters, lr=method.learning_rate)
        if isinstance(self.head, HebbianSoftmax):
            self.head.attach(self.optimizer)

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Take one training step and return its loss."""
        features = self.network(inputs)
        if isinstance(self.head, HebbianSoftmax):
            loss = self.head.loss(features, targets, prior=self.prior)
        else:
            logits = self.head(features)
            loss = F.cross_entropy(logits if self.prior is None else logits + self.prior, targets)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    @torch.no_grad()
    def predict(self, inputs: Tensor, logits: int = LOGITS) -> Tensor:
        """Return the likeliest classes, computing at most about `logits` logits at a time: all could be terabytes."""
        modules = [module for part in (self.network, self.head) for module in part.modules()]
        modes = [module.training for module in modules]
        self.network.eval()
        self.head.eval()
        try:
            parts = inputs.split(max(1, logits // self.head.out_features))
            return torch.cat([self.head(self.network(part)).argmax(dim=1) for part in parts])
        finally:
            for module, mode in zip(modules, modes, strict=True):
                module.training = mode

    def class_accuracies(self, task: LongTail) -> Tensor:
        """Return the share of right test answers in each class."""
        right = self.predict(task.test_inputs) == task.test_targets
        return right.double().view(len(task.counts), -1).mean(dim=1)

    def parts(self) -> dict[str, Any]:
        return {"network": self.network, "head": self.head, "optimizer": self.optimizer}

    def state_dict(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self.parts().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, part in self.parts().items():
            part.load_state_dict(state[name])
