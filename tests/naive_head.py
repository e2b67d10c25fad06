"""What a head should do, as naively as possible: a list of calls with one state each, and the paper's loop.

Everything is in float64 and written without a look at how the library notices things: a call waits, is pending, was
written or is lost, because this model is told of every backward pass and of every change of the gradient.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import pytest
import torch
from torch import Tensor

from hebbian_softmax import HebbianSoftmax, RecentRate
from tests.closeness import assert_exact
from tests.oracle import IGNORED, AlongTheMean, Oracle

HORIZON = 100
"""A running value is a plain average of this many batches; after them it forgets."""
RECENT, CAUGHT_UP, LEAST_FIT = 10, 0.8, 0.2
"""Of the fit: the batches of the shorter mean, the share of it that the longer one must reach, and the least fit."""


class State(Enum):
    """Where the activations of a call are."""

    WAITING = auto()
    PENDING = auto()
    WRITTEN = auto()
    LOST = auto()


@dataclass(eq=False)
class Call:
    """The activations (N, features) of a call that the head should remember, and their targets."""

    h: Tensor
    targets: list[int]
    state: State = State.WAITING
    needs_gradient_of_h: bool = False
    """Whether only a backward pass that reaches h makes it pending, as after ``remember`` of an h with a graph."""


@dataclass(eq=False)
class Batch:
    """Activations (N, features), the leaf that they come from, and targets (N,)."""

    x: Tensor
    h: Tensor
    targets: Tensor
    probabilities: Tensor | None = None
    """(N, classes), where the loss is given these instead of the targets."""

    def call(self, **options: bool) -> Call:
        return Call(self.h.detach().double().clone(), self.targets.tolist(), **options)


@dataclass(eq=False)
class Graph:
    """What the backward pass of a loss gives, as it was when the loss was computed."""

    value: float
    gradients: dict[str, Tensor]
    calls: list[Call]
    size: float
    """The largest number that the gradients are computed from, which decides how exact they can be."""

    def scaled(self, factor: float) -> Graph:
        gradients = {name: factor * gradient for name, gradient in self.gradients.items()}
        return Graph(factor * self.value, gradients, self.calls, max(1.0, factor) * self.size)


@dataclass(eq=False)
class Running:
    """The running values of activations and rows."""

    mean: Tensor
    rows: float = 0.0
    activations: float = 0.0
    row_batches: int = 0
    batches: int = 0
    seen: int = 0
    along: AlongTheMean = field(default_factory=AlongTheMean)

    def see_rows(self, rows: list[Tensor]) -> None:
        if rows:
            self.row_batches += 1
            norm = sum(math.hypot(*row.tolist()) for row in rows) / len(rows)
            self.rows += (norm - self.rows) / min(self.row_batches, HORIZON)

    def see_activations(self, h: Tensor, center: Tensor) -> None:
        self.batches += 1
        self.seen += len(h)
        share = 1 / min(self.batches, HORIZON)
        norm = sum(math.hypot(*row.tolist()) for row in h - center) / len(h)
        self.activations += share * (norm - self.activations)
        self.mean = self.mean + share * (h.mean(0) - self.mean)

    def scale(self) -> float:
        return self.rows / self.activations if self.row_batches and self.activations else 1.0


@dataclass(eq=False)
class Settling:
    """How near the activations of a class are to a memory of earlier ones; every class is looked at."""

    features: int
    memories: dict[int, Tensor] = field(default_factory=dict)
    fit: float = 0.0
    recent: float = 0.0
    batches: int = 0
    began: int = -1

    @classmethod
    def of(cls, head: HebbianSoftmax) -> Settling | None:
        """Return the model of a head that has seen nothing yet; None for one that does not wait for this."""
        own = head.settling
        return None if own is None else cls(head.in_features, {}, float(own.fit), float(own.recent), int(own.batches))

    def see(self, h: Tensor, targets: list[int], counts: list[int], running: Running) -> None:
        """Take in a batch; counts and running values are those before it."""
        if self.began >= 0:
            return
        cosines = []
        for i in sorted(set(targets)):
            mean = torch.stack([row for row, target in zip(h, targets, strict=True) if target == i]).mean(0)
            memory = self.memories.get(i, torch.zeros(self.features, dtype=torch.float64))
            if counts[i] > 0:
                a, b = mean - running.mean, memory - running.mean
                norms = math.hypot(*a.tolist()) * math.hypot(*b.tolist())
                cosines.append(float(a @ b) / norms if norms > 0 else 0.0)
            self.memories[i] = memory + max(1 / (counts[i] + 1), 0.1) * (mean - memory)
        if cosines:
            self.batches += 1
            found = sum(cosines) / len(cosines)
            self.fit += (found - self.fit) / min(self.batches, HORIZON)
            self.recent += (found - self.recent) / min(self.batches, RECENT)
            if self.batches >= HORIZON and self.fit >= max(CAUGHT_UP * self.recent, LEAST_FIT):
                self.began = running.batches + 1


@dataclass(eq=False)
class NaiveHead:
    """The values of a head and of its SGD optimizer, and the calls that await a step."""

    dtype: torch.dtype
    parameters: dict[str, Tensor]
    gradients: dict[str, Tensor | None]
    oracle: Oracle
    running: Running
    scale: float | str
    how: str
    """literal, centred or across."""
    start: int | str
    fade: bool
    grows: bool
    """Whether T is not given: 100 or in a step the number of classes, and more if the mean count of a class is high."""
    settling: Settling | None
    since: list[int]
    """Occurrences of each class since writing began."""
    highest: float = 0.0
    """The highest learning rate of the optimizer, as far as the head was attached to it."""
    lr: float = 0.0
    momentum: float = 0.0
    velocity: dict[str, Tensor] = field(default_factory=dict)
    nonfinite: int = 0
    memorizing: bool = True
    frozen: bool = False
    attached: bool = False
    warned: bool = False
    """Whether the head has said that it is not attached."""
    asked: bool = False
    """Whether, since the last step, something remembered was reached, or ``loss`` was asked in training, or not to
    remember."""
    came: bool = False
    """Whether, since the last step, a backward pass has brought the weight a gradient."""
    told: bool = False
    """Whether the head has said that nothing was remembered."""
    unsure: bool = False
    """Whether, since the last step, a pass has failed at a place that is left open."""
    pending: list[Call] = field(default_factory=list)
    unclaimed: list[Call] = field(default_factory=list)
    """Frozen features that wait for their logits: a gradient that nothing explains is theirs."""
    size: float = 0.0
    """The largest number that the values were computed from since the last comparison."""

    @classmethod
    def of(cls, head: HebbianSoftmax) -> NaiveHead:
        """Return the model of a new head."""
        parameters = {name: value.detach().double().clone() for name, value in head.named_parameters()}
        return cls(
            next(head.parameters()).dtype,
            parameters,
            dict.fromkeys(parameters),
            Oracle(head.num_classes, head.gamma, head.limit),
            Running(torch.zeros(head.in_features, dtype=torch.float64), batches=int(head.running.batches_seen())),
            head.scale,
            head.write,
            head.start,
            head.fade,
            isinstance(head.rate, RecentRate) and head.rate.limit is None,
            Settling.of(head),
            [0] * head.num_classes,
        )

    @property
    def classes(self) -> int:
        return len(self.oracle.counts)

    def wide(self) -> torch.dtype:
        """Return the dtype in which the head computes what it writes."""
        return torch.promote_types(self.dtype, torch.float32)

    # Losses and gradients

    def cross_entropy(self, batch: Batch, calls: list[Call], *, mean: bool) -> Graph:
        """Return the loss of a batch and its gradients, summed or averaged over the targets."""
        h, weight = batch.h.detach().double(), self.parameters["weight"]
        wanted = torch.zeros(len(h), self.classes, dtype=torch.float64)
        for j, target in enumerate(batch.targets.tolist()):
            if batch.probabilities is not None:
                wanted[j] = batch.probabilities[j]
            elif target != IGNORED:
                wanted[j, target] = 1.0
        value, largest, errors = 0.0, 1.0, torch.zeros_like(wanted)
        share = 1 / max(int(wanted.any(1).sum()), 1) if mean else 1.0
        for j in range(len(h)):
            if not wanted[j].any():
                continue
            logits = weight @ h[j]
            if "bias" in self.parameters:
                logits = logits + self.parameters["bias"]
            largest = max(largest, float(logits.abs().max()))
            logarithms = logits - logits.logsumexp(0)
            value -= share * float(wanted[j] @ logarithms)
            errors[j] = share * (logarithms.exp() - wanted[j])
        gradients = {"weight": errors.T @ h, "bias": errors.sum(0)}
        size = largest * len(h) * max(1.0, _largest(h))
        return Graph(value, {name: gradients[name] for name in self.parameters}, calls, size)

    def backward(self, *graphs: Graph, only_weight: bool = False) -> None:
        """Take in the gradients of a backward pass that has ended well."""
        came = []
        for graph in graphs:
            self.add_gradients(graph, ["weight"] if only_weight else list(self.parameters))
            came += self.reached(graph, only_weight)
        if not came and not self.frozen:
            came, self.unclaimed = self.unclaimed, []
            self.asked |= bool(came)
        for call in came:
            if call.state is State.WAITING:
                call.state = State.PENDING
                self.pending.append(call)

    def reached(self, graph: Graph, only_weight: bool = False) -> list[Call]:
        """Return the calls that are told of a backward pass, whether it counts or not."""
        told = [call for call in graph.calls if not (only_weight and call.needs_gradient_of_h)]
        self.asked |= any(call.state is not State.LOST for call in told)
        return [call for call in told if call.state is State.WAITING]

    def add_gradients(self, graph: Graph, names: list[str]) -> None:
        self.size = max(self.size, graph.size)
        for name in names:
            if name == "weight" and self.frozen:
                continue
            if name == "weight":
                self.came = True
            old = self.gradients[name]
            self.gradients[name] = graph.gradients[name] if old is None else old + graph.gradients[name]

    def set_to_none(self) -> None:
        self.gradients = dict.fromkeys(self.gradients)
        self._clear()

    def changed(self, gradients: dict[str, Tensor | None]) -> None:
        """Take in gradients that somebody has changed; all zeros count as cleared."""
        self.gradients = gradients
        weight = gradients["weight"]
        if weight is not None and not weight.any():
            self._clear()

    def _clear(self) -> None:
        if not self.frozen:  # a frozen weight's activations last until the step
            self.set_waiting()

    def set_waiting(self) -> None:
        """Let nothing be pending: another backward pass may make it so again."""
        for call in self.pending:
            call.state = State.WAITING
        self.pending = []

    # Steps and writes

    def step(self) -> tuple[bool, ...]:
        """Step, and write what is pending; return whether the head should, or may, say that nothing was remembered."""
        for name, gradient in self.gradients.items():
            if gradient is None:
                continue
            if self.momentum:
                old = self.velocity.get(name)
                gradient = gradient if old is None else self.momentum * old + gradient
                self.velocity[name] = gradient
            self.parameters[name] = (self.parameters[name] - self.lr * gradient).to(self.dtype).double()
            self._saw(self.parameters[name], self.lr * gradient)
        if not self.attached:
            return (False,)
        if self.fade:
            self.highest = max(self.highest, self.lr)
        self.lose(self.unclaimed)
        if self.gradients["weight"] is None and not self.frozen:
            return (False,)
        silent = not (self.pending or self.asked or self.told) and self.memorizing
        warns = (True, False) if silent and self.unsure else (silent and self.came,)
        if self.gradients["weight"] is not None:
            self.came = self.asked = self.unsure = False
        for call in self.pending:
            call.state = State.WRITTEN
        pairs = [(h, target) for call in self.pending for h, target in zip(call.h, call.targets, strict=True)]
        strength = self.lr / self.highest if self.fade and self.highest else 1.0
        self.write(pairs, strength, waits=True)
        self.pending = []
        return warns

    def write(self, pairs: list[tuple[Tensor, int]], strength: float = 1.0, waits: bool = False) -> None:
        """Make one iteration of Algorithm 1 after its gradient step; without more, the write of ``memorize``."""
        limit = torch.finfo(self.wide()).max
        known = [(h.double(), target) for h, target in pairs if target != IGNORED]
        kept = [(h, target) for h, target in known if math.hypot(*h.tolist()) <= limit]
        self.nonfinite += len(known) - len(kept)
        if not kept:
            return
        h, targets = torch.stack([h for h, _ in kept]), torch.tensor([target for _, target in kept])
        theta, running = self.parameters["weight"], self.running
        if self.settling is not None:
            begun = self.settling.began >= 0
            self.settling.see(h, targets.tolist(), self.oracle.counts, running)
        else:
            assert isinstance(self.start, int)
            begun = running.batches >= self.start
        center = running.mean if self.how != "literal" else torch.zeros_like(running.mean)
        counts, limit = self.oracle.counts, self.oracle.limit
        if self.how == "across":
            rare = [(counts[i], theta[i]) for i in sorted(set(targets.tolist())) if 0 < counts[i] < limit]
            running.along.see(running.mean, running.activations, rare)
            running.along.see_returning(counts, targets.tolist(), running.batches)
            firsts = [count == 0 for count in counts]
            self.oracle.target = lambda i, mean, row: running.along.kept(mean, row, firsts[i])
        if self.scale == "match":
            first = running.row_batches == 0
            familiar = [i for i, count in enumerate(self.oracle.counts) if count and (first or i in targets)]
            running.see_rows([theta[i] for i in familiar])
        gamma, last, seen = self.oracle.gamma, limit, running.batches if waits else None
        if self.grows:
            least = min(100, self.classes) if waits else 100
            last = max(least, min(running.seen // self.classes // 4, running.batches // 20))
        running.see_activations(h, center)
        scale = running.scale() if self.scale == "match" else float(self.scale)
        self.oracle.follow(self.how == "literal", gamma, last if self.memorizing else 0, seen, strength)
        self.oracle.factor = lambda i: 0.0 if waits and not begun else strength if self.since[i] else 1.0
        self._saw(h, center, scale * h, scale * center, theta, torch.tensor([running.rows]))
        self.parameters["weight"] = self.oracle.update(theta, scale * (h - center), targets)
        for target in targets.tolist():
            self.since[target] += int(begun and self.memorizing)

    def _saw(self, *values: Tensor) -> None:
        self.size = max([self.size, *(_largest(value) for value in values)])

    # Other changes

    def lose(self, calls: list[Call]) -> None:
        """Forget calls that wait."""
        for call in calls:
            if call.state is State.WAITING:
                call.state = State.LOST
        self.unclaimed = [call for call in self.unclaimed if call.state is State.WAITING]

    def detach(self, calls: list[Call]) -> None:
        """Forget what is pending and what waits: the attachment has ended."""
        self.pending, self.unclaimed = [], []
        for call in calls:
            call.state = State.LOST
        self.attached = self.asked = self.came = self.told = self.unsure = False

    def grow(self, rows: Tensor) -> None:
        n = len(rows)
        self.oracle.counts += [0] * n
        self.since += [0] * n
        for name, new in {"weight": rows.double(), "bias": torch.zeros(n, dtype=torch.float64)}.items():
            if name in self.parameters:
                self.parameters[name] = torch.cat([self.parameters[name], new])
                for values in (self.gradients, self.velocity):
                    old = values.get(name)
                    if old is not None:
                        values[name] = torch.cat([old, torch.zeros_like(new)])

    def convert(self, dtype: torch.dtype) -> None:
        """Round everything to another dtype."""
        self.dtype = dtype
        for values in (self.parameters, self.gradients, self.velocity):
            values |= {name: None if old is None else old.to(dtype).double() for name, old in values.items()}
        self.running.mean = self.running.mean.to(self.wide()).double()

    def saved(self) -> NaiveHead:
        """Return a copy with what a state dict holds."""
        values = {name: value.clone() for name, value in self.parameters.items()}
        oracle = Oracle(self.classes, self.oracle.gamma, self.oracle.limit)
        oracle.counts = list(self.oracle.counts)
        running = copy.deepcopy(self.running)
        return NaiveHead(
            self.dtype,
            values,
            dict.fromkeys(values),
            oracle,
            running,
            self.scale,
            self.how,
            self.start,
            self.fade,
            self.grows,
            copy.deepcopy(self.settling),
            list(self.since),
            nonfinite=self.nonfinite,
        )

    def load(self, saved: NaiveHead) -> None:
        """Take over what a state dict holds; gradients and what is pending stay."""
        other = saved.saved()
        self.parameters, self.oracle, self.running = other.parameters, other.oracle, other.running
        self.nonfinite, self.since, self.settling = other.nonfinite, other.since, other.settling
        self.parameters = {name: value.to(self.dtype).double() for name, value in self.parameters.items()}

    # Comparison

    def compare(self, head: HebbianSoftmax, optimizer: torch.optim.Optimizer | None) -> None:
        """Check the head's state, then go on from its rounded values, so that errors do not add up."""
        assert next(head.parameters()).dtype == self.dtype
        assert head.running.mean.dtype == head.running.norms.dtype == self.wide()
        assert head.counts.tolist() == self.oracle.counts
        assert head.since_start.tolist() == self.since
        if self.settling is not None:
            self._compare_settling(head, self.settling)
        assert int(head.nonfinite_count) == self.nonfinite
        running, along, found = self.running, self.running.along, head.running
        numbers = [*found.batches.tolist(), int(found.along_batches), int(found.seen)]
        assert numbers == [running.row_batches, running.batches, along.batches, running.seen]
        norms = torch.tensor([running.rows, running.activations], dtype=torch.float64)
        self._near(found.mean, running.mean, "the running mean")
        self._near(found.norms[0], norms[0], "the running norm of rows", of=self.dtype)
        self._near(found.norms[1], norms[1], "the running norm of activations")
        running.mean, (running.rows, running.activations) = found.mean.double().clone(), found.norms.tolist()
        assert found.first.tolist() == [along.first.get(i, 0) for i in range(self.classes)]
        for value, own in zip((*found.along, *found.returning), (*along.line, *along.sums), strict=True):
            self._near(value, torch.tensor(own, dtype=torch.float64), "rare rows, or classes seen once", of=self.dtype)
        along.line, along.sums = found.along.tolist(), found.returning.tolist()
        for name, parameter in head.named_parameters():
            self._near(parameter, self.parameters[name], name)
            self.parameters[name] = parameter.detach().double().clone()
            gradient = self.gradients[name]
            assert (parameter.grad is None) == (gradient is None), f"the gradient of {name} is {parameter.grad}"
            if parameter.grad is not None and gradient is not None:
                self._near(parameter.grad, gradient, f"the gradient of {name}")
                self.gradients[name] = parameter.grad.double().clone()
            if optimizer is not None:
                state: dict[str, Any] = optimizer.state.get(parameter, {})
                velocity = state.get("momentum_buffer")
                assert (velocity is None) == (name not in self.velocity)
                if velocity is not None:
                    self._near(velocity, self.velocity[name], f"the momentum of {name}")
                    self.velocity[name] = velocity.double().clone()
        self.size = 0.0

    def _compare_settling(self, head: HebbianSoftmax, own: Settling) -> None:
        assert head.settling is not None
        assert int(head.settling.batches) == own.batches
        # The fit may be at the threshold: its rounding then decides whether writing begins.
        threshold = max(CAUGHT_UP * own.recent, LEAST_FIT)
        assert int(head.settling.began) == own.began or abs(own.fit - threshold) < 1e-5
        own.began = int(head.settling.began)
        # A cosine of differences that nearly vanish has few digits.
        assert float(head.settling.fit) == pytest.approx(own.fit, abs=1e-3)
        assert float(head.settling.recent) == pytest.approx(own.recent, abs=1e-3)
        own.fit, own.recent = float(head.settling.fit), float(head.settling.recent)
        for i, memory in enumerate(head.settling.memory):
            expected = own.memories.get(i, torch.zeros_like(memory, dtype=torch.float64))
            self._near(memory, expected, f"the memory of class {i}")
            own.memories[i] = memory.double().clone()

    def _near(self, found: Tensor, exact: Tensor, name: str, of: torch.dtype | None = None) -> None:
        """Compare; ``of`` is the dtype of what ``found`` was computed from, if that is a shorter one."""
        coarser = 1.0 if of is None else torch.finfo(of).eps / torch.finfo(found.dtype).eps
        assert_exact(found, exact, name, scale=coarser * max(self.size, _largest(exact)))


def _largest(values: Tensor) -> float:
    return float(values.abs().max()) if values.numel() else 0.0
