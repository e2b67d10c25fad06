"""A head and its optimizer beside their naive model: everything that can be done to both at once."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hebbian_softmax import HebbianSoftmax
from tests.heads import early_head
from tests.naive_head import Batch, Call, Graph, NaiveHead
from tests.oracle import IGNORED

FEATURES = 3
MOST_CLASSES, MOST_LOSSES = 9, 6
REDUCTIONS = ["mean", "sum", "none"]

Drawn = dict[str, Any]
"""What hypothesis has drawn for a batch or an optimizer."""


@dataclass(eq=False)
class Loss:
    """A loss that may still be backpropagated, and what the model expects of that."""

    value: Tensor
    x: Tensor
    graph: Graph
    weight_version: int
    outgrown: bool = False


@dataclass(eq=False)
class Held:
    """A batch that was remembered and whose loss is yet to be computed."""

    batch: Batch
    call: Call
    has_logits: bool = False


class UserError(Exception):
    """The error of a user's hook or closure."""


class SideBySide:
    """The head, its optimizer, their model, and the losses that may still be backpropagated."""

    optimizer: torch.optim.Optimizer

    def begin(self, classes: int, dtype: torch.dtype, optimizer: Drawn, grows: bool = False, **options: Any) -> None:
        torch.manual_seed(0)
        self.options = {"gamma": 0.3} | options | ({"limit": None} if grows else {})
        self.head = early_head(FEATURES, classes, dtype=dtype, **self.options)
        if grows:  # as after many batches
            self.head.running.batches[1] = 1000
        if self.head.settling is not None:  # as if most of the batches had come that writing waits for
            self.head.settling.batches.fill_(98)
            self.head.settling.fit.fill_(0.5)
        self.model = NaiveHead.of(self.head)
        self.losses: list[Loss] = []
        self.held: list[Held] = []
        self.snapshot: tuple[dict[str, Tensor], NaiveHead] | None = None
        self.make_optimizer(optimizer)
        self.attach()

    @property
    def weight(self) -> Tensor:
        """The parameter; ``head.weight`` may be an alias of it."""
        return next(self.head.parameters())

    def compare(self) -> None:
        self.model.compare(self.head, self.optimizer)
        assert self.head.num_classes == self.weight.shape[0] == self.model.classes
        attachment = self.head.attachment
        assert (attachment is not None and attachment.active) == self.model.attached

    # Losses

    def batch(self, drawn: Drawn) -> Batch:
        labels = [] if drawn["life"] == "empty" else drawn["labels"]
        generator = torch.Generator().manual_seed(drawn["seed"])
        x = 2 * torch.randn(len(labels), FEATURES, generator=generator, dtype=torch.float64)
        x = (0 * x if drawn["life"] == "zero features" else x).to(self.weight.dtype)
        x.requires_grad_(drawn["kind"] != "frozen")
        classes = self.head.num_classes
        targets = [label % classes if label >= 0 and classes else IGNORED for label in labels]
        return Batch(x, x.clone() if drawn["kind"] == "graph" else x, torch.tensor(targets, dtype=torch.int64))

    def compute(self, drawn: Drawn, way: str) -> Loss:
        """Compute a loss in one of the ways that there are, and keep it."""
        batch = self.batch(drawn)
        if len(batch.h) == 0 and batch.h.grad_fn is None and not way.startswith("targets"):
            way = "loss"  # activations without memory cannot be told apart
        if way.endswith("loss") or way == "loss not remembered" or self.head.num_classes == 0:
            value, graph = self._by_the_head(batch, way, REDUCTIONS[drawn["seed"] % len(REDUCTIONS)])
        elif way.startswith("targets"):
            value, graph = self._in_a_context(batch, shift=way == "targets shifted")
        else:
            value, graph = self._with_remember(batch, way)
        return self._keep(value, batch, graph, drawn["life"])

    def _by_the_head(self, batch: Batch, way: str, reduction: str) -> tuple[Tensor, Graph]:
        if way == "soft loss" and self.head.num_classes:
            batch = _softened(batch, self.head.num_classes)
        remember = way != "loss not remembered"
        targets = batch.targets if batch.probabilities is None else batch.probabilities
        with self.may_warn(remember and torch.is_grad_enabled()):
            value = self.head.loss(batch.h, targets, reduction=reduction, remember=remember)
        self.model.asked |= self.model.attached and (self.head.training or not remember)
        calls = [batch.call()] if remember and self._remembers() else []
        return value.sum(), self.model.cross_entropy(batch, calls, mean=reduction == "mean")

    def _in_a_context(self, batch: Batch, shift: bool) -> tuple[Tensor, Graph]:
        h, targets = batch.h, batch.targets
        if shift:
            h, targets = h.unsqueeze(0), targets.unsqueeze(0)
            batch = replace(batch, targets=torch.cat([batch.targets[1:], batch.targets[:1] * 0 + IGNORED]))
        with self.may_warn(torch.is_grad_enabled()), self.head.targets(targets, shift=shift):
            logits = self.head(h).reshape(-1, self.head.num_classes)
        return self._own_loss(logits, batch, [batch.call()] if self._remembers() else [])

    def _with_remember(self, batch: Batch, way: str) -> tuple[Tensor, Graph]:
        lone = batch.h.grad_fn is None
        if lone and any(call.h.shape == batch.h.shape for call in self.model.unclaimed):
            way = "remember first"  # else this h could be what another one has become, say after dropout
        if lone and self.model.frozen and way == "functional":
            way = "remember first"  # else there is no gradient to be noticed by
        calls = self.remember(batch) if way in ("remember first", "functional") else []
        logits = self._logits(batch, way == "functional")
        return self._own_loss(logits, batch, self.remember(batch) if way == "head first" else calls)

    def _logits(self, batch: Batch, functional: bool) -> Tensor:
        return F.linear(batch.h, self.head.weight, self.head.bias) if functional else self.head(batch.h)

    def remember(self, batch: Batch) -> list[Call]:
        with self.may_warn(torch.is_grad_enabled()):
            self.head.remember(batch.h, batch.targets)
        if not self._remembers():
            return []
        return [batch.call(needs_gradient_of_h=batch.h.grad_fn is not None)]

    def hold(self, batch: Batch) -> None:
        """Remember a batch, to be used later."""
        held = [Held(batch, call) for call in self.remember(batch)]
        self.held = [*self.held, *held][-MOST_LOSSES:]
        self.model.unclaimed += [each.call for each in held if not each.call.needs_gradient_of_h]

    def use(self, held: Held, functional: bool) -> None:
        """Compute the loss of a batch that was remembered, perhaps again."""
        call, waits = held.call, held.call in self.model.unclaimed
        held.has_logits |= waits or call.needs_gradient_of_h
        self.model.unclaimed = [each for each in self.model.unclaimed if each is not call]
        # head.weight tells of frozen features that have no logits yet; head(h) also of those that have some.
        logits = self._logits(held.batch, functional and (waits or call.needs_gradient_of_h))
        value, graph = self._own_loss(logits, held.batch, [call] if held.has_logits else [])
        self._keep(value, held.batch, graph, "alive")

    def _own_loss(self, logits: Tensor, batch: Batch, calls: list[Call]) -> tuple[Tensor, Graph]:
        value = F.cross_entropy(logits, batch.targets, ignore_index=IGNORED, reduction="sum")
        return value, self.model.cross_entropy(batch, calls, mean=False)

    def _keep(self, value: Tensor, batch: Batch, graph: Graph, life: str) -> Loss:
        """Check the value of a loss, and keep the loss for backward passes."""
        eps = torch.finfo(self.weight.dtype).eps
        assert value.item() == pytest.approx(graph.value, abs=16 * eps * max(1.0, graph.size))
        if life == "times zero":
            value, graph = value * 0, graph.scaled(0.0)
        loss = Loss(value, batch.x, graph, _version(self.weight))
        if value.requires_grad:
            self.losses = [*self.losses, loss][-MOST_LOSSES:]
        return loss

    def _remembers(self) -> bool:
        return self.head.training and torch.is_grad_enabled() and self.model.attached

    @contextmanager
    def may_warn(self, asked: bool) -> Iterator[None]:
        """Check that a head that is asked to remember says once that it is not attached, and nothing else."""
        expected = asked and self.head.training and not self.model.attached and not self.model.warned
        with self._warns("not attached", expected):
            yield
        self.model.warned |= expected

    @contextmanager
    def _warns(self, words: str, *allowed: bool) -> Iterator[list[warnings.WarningMessage]]:
        """Check that there is one warning with these words, or none, as ``allowed``, and no other."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield caught
        found = [str(each.message) for each in caught]
        assert all(words in each for each in found), found
        assert len(found) in allowed, f"there were {len(found)} warnings: {words}"

    # Backward passes

    def backward(self, loss: Loss, how: str, retain: bool = True) -> None:
        """Make a backward pass through a loss in one of the ways that there are."""
        if loss.outgrown:
            with pytest.raises(RuntimeError, match=r"add_classes|modified by an inplace operation"):
                loss.value.backward(retain_graph=retain)
            self.model.unsure = True
        elif how == "backward" or self.model.frozen:
            self._backpropagate(loss, retain, None)
        elif how == "only weight":
            self._backpropagate(loss, retain, [self.weight])
        elif self.is_stale(loss):
            return
        elif how == "by hand":
            (gradient,) = torch.autograd.grad(loss.value, self.weight, retain_graph=retain)
            old = self.weight.grad
            self.weight.grad = gradient if old is None else old + gradient
            self.model.backward(loss.graph, only_weight=True)
            self.adopt_gradients()
            self.step()  # nobody could see that a gradient given by hand is cleared again
        elif loss.x.requires_grad and how == "input alone":
            torch.autograd.grad(loss.value, loss.x, retain_graph=retain)
            self.model.reached(loss.graph)
        elif loss.x.requires_grad and how == "failure":
            self._fail_in_backward(loss)

    def _backpropagate(self, loss: Loss, retain: bool, inputs: list[Tensor] | None) -> None:
        try:
            loss.value.backward(retain_graph=retain, inputs=inputs)
        except RuntimeError as error:
            if not self.is_stale(loss) or "modified by an inplace operation" not in str(error):
                raise
            self.losses.remove(loss)
            self.model.unsure = True
            return
        self.model.backward(loss.graph, only_weight=inputs is not None)

    def _fail_in_backward(self, loss: Loss) -> None:
        def versions() -> dict[str, int]:
            return {name: _version(parameter.grad) for name, parameter in self.head.named_parameters()}

        before = versions()
        hook = loss.x.register_hook(fail)
        with pytest.raises(UserError):
            loss.value.backward(retain_graph=True)
        hook.remove()
        came = [name for name, now in versions().items() if now != before[name]]
        self.model.add_gradients(loss.graph, came)
        self.model.reached(loss.graph)
        if "weight" in came:
            self.model.changed(self.model.gradients)  # zeros that a failing pass has added to zeros count as cleared

    def backward_of_a_sum(self, one: Loss, other: Loss) -> None:
        (one.value + other.value).backward()
        self.losses = [loss for loss in self.losses if loss not in (one, other)]
        self.model.backward(one.graph, other.graph)

    def is_stale(self, loss: Loss) -> bool:
        """Return whether the weight has changed since, which autograd refuses if it needs the weight."""
        return loss.weight_version != _version(self.weight)

    # Gradients and steps

    def train_on_broken(self, batch: Batch) -> None:
        """Backpropagate a loss of activations that are not finite, and mend the gradients, as users do."""
        with self.may_warn(True):
            loss = self.head.loss(batch.h, batch.targets)
        self.model.asked |= self.model.attached
        if not loss.requires_grad:
            return
        loss.backward()
        for parameter in self.head.parameters():
            if parameter.grad is not None:
                parameter.grad.nan_to_num_(0.01, 0.01, 0.01).clamp_(-1, 1)
        unknown = {name: torch.zeros_like(each) for name, each in self.model.parameters.items()}
        self.model.backward(Graph(0.0, unknown, [batch.call()] if self._remembers() else [], 1.0))
        self.adopt_gradients()

    def clear(self, to_none: bool, whose: str) -> None:
        if whose == "by hand":
            for parameter in self.head.parameters():
                if to_none:
                    parameter.grad = None
                elif parameter.grad is not None:
                    parameter.grad.zero_()
        else:
            (self.optimizer if whose == "optimizer" else self.head).zero_grad(set_to_none=to_none)
        if to_none:
            self.model.set_to_none()
        else:
            self.adopt_gradients()

    def adopt_gradients(self) -> None:
        """Tell the model of gradients that the user has changed."""
        found = {name: parameter.grad for name, parameter in self.head.named_parameters()}
        self.model.changed({name: None if each is None else each.double().clone() for name, each in found.items()})

    def step(self) -> None:
        with self._warns("nothing was remembered", *self.model.step()) as caught:
            self.optimizer.step()
        self.model.told |= bool(caught)
        self.held = [held for held in self.held if held.call.needs_gradient_of_h]  # others are forgotten

    # Changes of the head

    def add_classes(self, n: int) -> None:
        if n == 0:
            return
        old = self.head.num_classes
        self.head.add_classes(n, self.optimizer)
        rows = self.weight.detach()[old:]
        assert float(rows.abs().max()) <= FEATURES**-0.5 * 1.01
        self.model.grow(rows)
        for loss in self.losses:
            loss.outgrown = True

    def take_snapshot(self) -> None:
        state = {name: value.clone() for name, value in self.head.state_dict().items()}
        self.snapshot = state, self.model.saved()

    def return_to_snapshot(self) -> None:
        assert self.snapshot is not None
        state, saved = self.snapshot
        if saved.classes == self.model.classes:
            self.head.load_state_dict(state)
            self.model.load(saved)
        else:
            with pytest.raises(ValueError, match="add_classes"):
                self.head.load_state_dict(state)

    def make_optimizer(self, drawn: Drawn) -> None:
        how, momentum = drawn["how"], drawn["momentum"]
        # torch's fused SGD is wrong in bfloat16, and with momentum fails if parameters get gradients one by one.
        fused = how == "fused" and not momentum and self.weight.dtype != torch.bfloat16
        self.optimizer = torch.optim.SGD(
            self.head.parameters(), lr=0.1, momentum=momentum, foreach=how == "foreach", fused=fused
        )
        self.model.lr, self.model.momentum, self.model.velocity, self.model.highest = 0.1, momentum, {}, 0.0

    def change_learning_rate(self, lr: float) -> None:
        self.optimizer.param_groups[0]["lr"] = self.model.lr = lr

    def attach(self, **options: bool) -> None:
        handle = self.head.attach(self.optimizer, **options)
        assert self.head.attachment is handle
        self.model.detach(self._waiting_calls())
        self.model.attached = True

    def detach(self) -> None:
        self.head.detach()
        self.model.detach(self._waiting_calls())

    def _waiting_calls(self) -> list[Call]:
        return [call for loss in self.losses for call in loss.graph.calls] + [held.call for held in self.held]

    def change_dtype(self, dtype: torch.dtype) -> None:
        self.losses, self.held = [], []
        self.head.to(dtype)
        self.optimizer.load_state_dict(self.optimizer.state_dict())  # casts the momentum
        self.optimizer.param_groups[0]["fused"] &= dtype != torch.bfloat16
        self.model.convert(dtype)

    def save_and_load(self, optimizer: Drawn) -> None:
        file = io.BytesIO()
        torch.save({"head": self.head.state_dict(), "optimizer": self.optimizer.state_dict()}, file)
        file.seek(0)
        state = torch.load(file)
        head = early_head(FEATURES, self.head.num_classes, dtype=self.weight.dtype, **self.options)
        head.load_state_dict(state["head"])
        old = self._replace_head(head)
        self.make_optimizer(optimizer | {"momentum": old.momentum})
        self.optimizer.load_state_dict(state["optimizer"])
        self.model.velocity, self.model.lr, self.model.highest = old.velocity, old.lr, old.highest
        self.attach()

    def copy(self, optimizer: Drawn | None) -> None:
        """Go on with a copy of the head, and a new optimizer or a copy of the optimizer."""
        head, copied = copy.deepcopy((self.head, self.optimizer))
        assert head.attachment is None
        old = self._replace_head(head)
        assert head.memorizing == old.memorizing
        self.model.warned, self.model.memorizing = old.warned, old.memorizing
        if optimizer is None:
            self.optimizer = copied
            self.model.lr, self.model.momentum, self.model.velocity = old.lr, old.momentum, old.velocity
            self.model.highest = old.highest
        else:
            self.make_optimizer(optimizer)
        self.attach()

    def _replace_head(self, head: HebbianSoftmax) -> NaiveHead:
        """Go on with another head that has the state of this one; return the old model."""
        old = self.model
        self.losses, self.held = [], []
        self.head, self.model = head, old.saved()
        self.model.frozen = not self.weight.requires_grad
        return old


def fail(*_: Tensor) -> float:
    raise UserError


def _softened(batch: Batch, classes: int) -> Batch:
    """Return the batch with probabilities: most for the target, or the same for every class where it is ignored."""
    rows = []
    for target in batch.targets.tolist():
        row = torch.full((classes,), 1 / classes, dtype=torch.float64)
        if target != IGNORED:
            row = torch.zeros(classes, dtype=torch.float64)
            row[target] += 0.75
            row[(target + 1) % classes] += 0.25
        rows.append(row)
    probabilities = torch.stack(rows) if rows else torch.zeros(0, classes, dtype=torch.float64)
    targets = [int(row.argmax()) if float(row.max()) > 0.5 else IGNORED for row in rows]
    return replace(batch, targets=torch.tensor(targets, dtype=torch.int64), probabilities=probabilities)


def _version(tensor: Tensor | None) -> int:
    return -1 if tensor is None else tensor._version
