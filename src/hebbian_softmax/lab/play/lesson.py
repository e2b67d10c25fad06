"""A lesson: what one visitor has taught the two heads of a trained network.

The plain head takes gradient steps, and the Hebbian head one write. Both begin as the layer that was trained with the
network, and both see the same activations, since the network itself no longer changes.
"""

import copy
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hebbian_softmax import HebbianSoftmax, PaperRate
from hebbian_softmax.lab.base.seeds import derive_seed
from hebbian_softmax.lab.play.network import Knowledge

GAMMA, LIMIT = 0.1, 50
RULE: dict[str, Any] = {"write": "centred", "start": 0, "fade": False}  # with which the page was measured
RATE = PaperRate(GAMMA, LIMIT)  # likewise
SHOWN = 100  # batches of old activations that a Hebbian head sees first: its running values then forget slowly
# The learning rates of the plain head's steps, without momentum: the best on other characters (results/play).
LEARNING_RATE, LEARNING_RATE_WITH_REPLAY = 0.25, 1.0
REHEARSED = 16  # old drawings in each gradient step with replay, beside as many of those taught in this lesson
TOP = 5  # answers that are shown
MOST_TAUGHT = 200  # drawings in a lesson
MOST_UNDONE = 20  # acts that can be undone
HEADS = ("plain", "hebbian")


class LessonError(Exception):
    """An act that this lesson does not allow. The message says why, and the lesson stays as it is."""


@dataclass(frozen=True)
class Example:
    """A drawing (28, 28) in uint8 that was taught under a name, and how the plain head learned it."""

    name: str
    drawing: Tensor
    steps: int
    replay: bool


@dataclass(frozen=True, eq=False)
class Stage:
    """A moment of a lesson. Each act makes a new one, which takes over the Hebbian head and leaves a copy behind."""

    examples: tuple[Example, ...]
    activations: Tensor
    """The activations (examples, features) of the drawings."""
    names: tuple[str, ...]
    """The taught classes in the order of their rows, which follow those of the network's own classes."""
    plain: nn.Linear
    hebbian: HebbianSoftmax


class Lesson:
    """The acts of one visitor, each of which can be undone.

    `untaught` is what `hebbian_head` returns; it takes a tenth of a second to make, and lessons may share one.
    """

    def __init__(self, knowledge: Knowledge, untaught: HebbianSoftmax | None = None) -> None:
        self.knowledge = knowledge
        self.known = knowledge.head.out_features
        self.untaught = hebbian_head(knowledge) if untaught is None else untaught
        none = knowledge.activations.new_empty(0, knowledge.head.in_features)
        self.stage = Stage((), none, (), copy.deepcopy(knowledge.head), copy.deepcopy(self.untaught))
        self.before: list[Stage] = []

    def teach(self, examples: Sequence[Example]) -> dict[str, float]:
        """Teach drawings one after the other; return the milliseconds that gradient steps and writes took."""
        if len(self.stage.examples) + len(examples) > MOST_TAUGHT:
            raise LessonError(f"a lesson has room for {MOST_TAUGHT} drawings: forget some first")
        stage, spent = self.stage, dict.fromkeys(HEADS, 0.0)
        before = self._kept()
        try:
            for example in examples:
                stage = self._taught(stage, example, spent)
        except BaseException:
            self.stage = before  # whose head has none of the examples
            raise
        self._enter(stage, before)
        return spent

    def _taught(self, stage: Stage, example: Example, spent: dict[str, float]) -> Stage:
        is_new = example.name not in stage.names
        names = (*stage.names, example.name) if is_new else stage.names
        h = self.knowledge.embed(example.drawing.unsqueeze(0))
        examples, activations = (*stage.examples, example), torch.cat([stage.activations, h])
        labels = self._labels(examples, names)
        label = labels[-1:]
        draws = torch.Generator().manual_seed(derive_seed(len(examples), "plain"))
        plain = with_new_row(stage.plain, draws) if is_new else copy.deepcopy(stage.plain)
        taught = (activations, labels) if example.replay else None
        rate = LEARNING_RATE_WITH_REPLAY if example.replay else LEARNING_RATE
        began = time.perf_counter()
        descend(plain, h, label, example.steps, rate, draws, taught, self.knowledge.activations)
        spent["plain"] += 1000 * (time.perf_counter() - began)
        if is_new:
            stage.hebbian.add_classes(1)
        began = time.perf_counter()
        stage.hebbian.memorize(h, label)
        spent["hebbian"] += 1000 * (time.perf_counter() - began)
        return Stage(examples, activations, names, plain, stage.hebbian)

    def _labels(self, examples: Sequence[Example], names: Sequence[str]) -> Tensor:
        """Return the numbers of the rows that examples belong to."""
        return torch.tensor([self.known + names.index(example.name) for example in examples])

    @torch.no_grad()
    def recognise(self, drawing: Tensor, taught_only: bool) -> dict[str, list[tuple[int, float]]]:
        """Return each head's most likely classes with their probabilities, among the taught classes or all."""
        h = self.knowledge.embed(drawing.unsqueeze(0))
        first = self.known if taught_only else 0
        found = {}
        for name in HEADS:
            chances = getattr(self.stage, name)(h)[0, first:].softmax(dim=0)
            values, classes = chances.topk(min(TOP, len(chances)))
            found[name] = list(zip((first + classes).tolist(), values.tolist(), strict=True))
        return found

    @torch.no_grad()
    def review(self, h: Tensor) -> dict[str, int]:
        """Return how many activations (known classes, features), one of each class, are recognised among all classes.

        The count before the lesson stands beside those of the two heads: their difference is what a lesson costs.
        """
        heads = {"before": self.knowledge.head, "plain": self.stage.plain, "hebbian": self.stage.hebbian}
        labels = torch.arange(self.known)
        return {name: int((head(h).argmax(dim=1) == labels).sum()) for name, head in heads.items()}

    def forget(self, name: str) -> None:
        """Forget a taught class.

        The Hebbian head is then as if the class had never been taught: its other writes are made again. The plain head
        loses the row, but what gradient steps have done to other rows stays.
        """
        number = self._number(name)
        stays = [example.name != name for example in self.stage.examples]
        examples = tuple(example for example, kept in zip(self.stage.examples, stays, strict=True) if kept)
        activations = self.stage.activations[torch.tensor(stays)]
        names = tuple(other for other in self.stage.names if other != name)
        hebbian = copy.deepcopy(self.untaught)
        for place, label in enumerate(self._labels(examples, names).tolist()):
            if label == hebbian.num_classes:
                hebbian.add_classes(1)
            hebbian.memorize(activations[place : place + 1], torch.tensor([label]))
        plain = without_row(self.stage.plain, self.known + number)
        self._enter(Stage(examples, activations, names, plain, hebbian), self.stage)

    def rename(self, name: str, new_name: str) -> None:
        """Give a taught class another name, which no other taught class has."""
        number = self._number(name)
        if new_name != name and new_name in self.stage.names:
            raise LessonError(f"another character is called {new_name}: choose a name that is free")
        names = (*self.stage.names[:number], new_name, *self.stage.names[number + 1 :])
        examples = tuple(replace(each, name=new_name) if each.name == name else each for each in self.stage.examples)
        self._enter(replace(self.stage, examples=examples, names=names), self._kept())

    def undo(self) -> None:
        """Go back to the stage before the last act."""
        if not self.before:
            raise LessonError("there is nothing to undo")
        self.stage = self.before.pop()

    def load(self, examples: Sequence[Example]) -> None:
        """Begin again and teach these drawings; the lesson so far comes back with `undo`."""
        fresh = Lesson(self.knowledge, self.untaught)
        if examples:
            fresh.teach(examples)
        self._enter(fresh.stage, self.stage)

    def describe(self) -> dict[str, Any]:
        """Return what the page shows of the lesson, as plain values."""
        return {
            "taught": [
                {"name": name, "drawings": [each.drawing for each in self.stage.examples if each.name == name]}
                for name in self.stage.names
            ],
            "undoable": len(self.before),
        }

    def _number(self, name: str) -> int:
        if name not in self.stage.names:
            raise LessonError(f"no character is called {name}: it may have been forgotten already")
        return self.stage.names.index(name)

    def _kept(self) -> Stage:
        """Return this stage with a copy of the Hebbian head, which the next stage takes over.

        The copy is left behind because a head that has grown once can grow further at little cost, and a copy cannot.
        """
        return replace(self.stage, hebbian=copy.deepcopy(self.stage.hebbian))

    def _enter(self, stage: Stage, before: Stage) -> None:
        self.before = [*self.before, before][-MOST_UNDONE:]
        self.stage = stage


def hebbian_head(knowledge: Knowledge) -> HebbianSoftmax:
    """Return a Hebbian head with the trained rows, which has seen activations of the classes that it knows.

    These classes count as familiar, so their rows stay; the head learns where activations lie and how long rows are.
    """
    linear = copy.deepcopy(knowledge.head)
    # With counts of its own this is no trained head, whose write expects a new class as rarely as it was seen; in a
    # lesson all characters come equally often.
    head = HebbianSoftmax.from_linear(linear, gamma=GAMMA, limit=LIMIT, rate=RATE, counts=0, **RULE)
    head.counts.fill_(LIMIT)
    labels = torch.arange(linear.out_features).repeat_interleave(knowledge.activations.shape[1])
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    for part in order.chunk(SHOWN):
        head.memorize(knowledge.activations.flatten(0, 1)[part], labels[part])
    return head


def with_new_row(linear: nn.Linear, draws: torch.Generator) -> nn.Linear:
    """Return a layer with one more class, whose row begins as those of a new `nn.Linear` do."""
    new = torch.empty(1, linear.in_features)
    nn.init.kaiming_uniform_(new, a=math.sqrt(5), generator=draws)
    return _layer(torch.cat([linear.weight, new]))


def without_row(linear: nn.Linear, number: int) -> nn.Linear:
    """Return a layer without one of its classes."""
    return _layer(linear.weight[torch.arange(linear.out_features) != number])


def _layer(weight: Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    with torch.no_grad():
        linear.weight.copy_(weight)
    return linear.requires_grad_(False)


def descend(
    linear: nn.Linear,
    h: Tensor,
    label: Tensor,
    steps: int,
    learning_rate: float,
    draws: torch.Generator,
    taught: tuple[Tensor, Tensor] | None,
    known: Tensor,
) -> None:
    """Take gradient steps on one activation.

    If `taught` activations and their labels are given, they are replayed, and so are the `known` ones (classes,
    drawings, features): each step then has this activation, others of the lesson, and as many of the known classes.
    """
    linear.requires_grad_(True)
    optimizer = torch.optim.SGD(linear.parameters(), lr=learning_rate)
    for _ in range(steps):
        inputs, labels = h, label
        if taught is not None:
            own = torch.randint(len(taught[1]), (REHEARSED - 1,), generator=draws)
            old = torch.randint(len(known), (REHEARSED,), generator=draws)
            drawing = torch.randint(known.shape[1], (REHEARSED,), generator=draws)
            inputs = torch.cat([h, taught[0][own], known[old, drawing]])
            labels = torch.cat([label, taught[1][own], old])
        loss = F.cross_entropy(linear(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    linear.requires_grad_(False)
