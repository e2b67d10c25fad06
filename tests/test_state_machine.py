"""Heads used in any order, against a naive model of what should happen.

Hypothesis chooses the calls: losses, backward passes, steps, cleared gradients, new classes, copies, other dtypes,
attaching and detaching. After each of them the head must be what the model of :mod:`tests.naive_head` says. A failure
is shown as the shortest sequence of calls that hypothesis finds.
"""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor, nn

from hebbian_softmax import HebbianSoftmax
from tests.naive_head import Call, Graph, NaiveHead, State
from tests.oracle import IGNORED

FEATURES = 3
MOST_CLASSES, MOST_LOSSES = 9, 6
DTYPES = [torch.float64, torch.float32, torch.bfloat16]

labels = st.lists(st.integers(-1, MOST_CLASSES - 1), max_size=4)
seeds = st.integers(0, 99)
which = st.integers(0, MOST_LOSSES - 1)
kinds = st.sampled_from(["graph", "leaf", "frozen"])
lives = st.sampled_from(["alive", "alive", "alive", "times zero", "zero features"])
optimizers = st.builds(
    dict,
    how=st.sampled_from(["one by one", "foreach", "fused"]),
    momentum=st.sampled_from([0.0, 0.9]),
)


@dataclass(eq=False)
class Batch:
    """Activations, the leaf that they come from, and targets."""

    x: Tensor
    h: Tensor
    targets: Tensor

    def call(self, **options: bool) -> Call:
        return Call(self.h.detach().double().clone(), self.targets.tolist(), **options)


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


class Failed(Exception):
    """The error of a user's hook."""


class Machine(RuleBasedStateMachine):
    """A head and its optimizer, and their model."""

    @initialize(
        classes=st.integers(1, 4),
        bias=st.booleans(),
        limit=st.sampled_from([0, 2, 5, 50]),
        scale=st.sampled_from(["match", 1.0, 0.5]),
        center=st.booleans(),
        dtype=st.sampled_from([torch.float64, *DTYPES]),
        optimizer=optimizers,
    )
    def start(
        self,
        classes: int,
        bias: bool,
        limit: int,
        scale: float | str,
        center: bool,
        dtype: torch.dtype,
        optimizer: dict[str, Any],
    ) -> None:
        torch.manual_seed(0)
        self.options: dict[str, Any] = {"gamma": 0.3, "limit": limit, "scale": scale, "center": center, "bias": bias}
        self.head = HebbianSoftmax(FEATURES, classes, dtype=dtype, **self.options)
        self.model = NaiveHead.of(self.head)
        self.losses: list[Loss] = []
        self.held: list[Held] = []
        self.snapshot: tuple[dict[str, Tensor], NaiveHead] | None = None
        self._make_optimizer(optimizer)
        self._attach()

    @invariant()
    def agrees(self) -> None:
        self.model.compare(self.head, self.optimizer)
        assert self.head.num_classes == self.head.weight.shape[0] == self.model.classes
        attachment = self.head.attachment
        assert (attachment is not None and attachment.active) == self.model.attached

    # Losses

    @rule(
        labels=labels,
        seed=seeds,
        kind=kinds,
        life=lives,
        remember=st.sampled_from([True, True, True, False]),
        reduction=st.sampled_from(["mean", "sum", "none"]),
        grad=st.sampled_from([True, True, True, False]),
    )
    def loss(
        self, labels: list[int], seed: int, kind: str, life: str, remember: bool, reduction: str, grad: bool
    ) -> None:
        batch = self._batch(labels, seed, kind, life)
        remembers = remember and grad
        with self._may_warn(remembers), nullcontext() if grad else torch.no_grad():
            value = self.head.loss(batch.h, batch.targets, reduction=reduction, remember=remember)
        calls = [batch.call()] if remembers and self._remembers() else []
        graph = self.model.cross_entropy(batch.h, batch.targets.tolist(), calls, mean=reduction == "mean")
        self._add(value.sum(), batch, graph, life)

    @rule(
        labels=labels,
        seed=seeds,
        kind=kinds,
        life=lives,
        order=st.sampled_from(["remember first", "head first", "functional", "not remembered"]),
    )
    def loss_of_ones_own(self, labels: list[int], seed: int, kind: str, life: str, order: str) -> None:
        batch = self._batch(labels, seed, kind, life)
        calls = []
        if order in ("remember first", "functional"):
            calls = self._remember(batch)
        logits = self._logits(batch.h, order == "functional")
        if order == "head first":
            calls = self._remember(batch)
        self._add_own(logits, batch, calls, life)

    @rule(labels=labels, seed=seeds, kind=kinds)
    def remember(self, labels: list[int], seed: int, kind: str) -> None:
        batch = self._batch(labels, seed, kind, "alive")
        calls = self._remember(batch)
        if calls and len(self.held) < MOST_LOSSES:
            self.held.append(Held(batch, calls[0]))

    @precondition(lambda self: self.held)
    @rule(index=which, functional=st.booleans(), keep=st.booleans(), life=lives)
    def use_what_was_remembered(self, index: int, functional: bool, keep: bool, life: str) -> None:
        held = self._pick(self.held, index, keep)
        self._add_own(self._logits(held.batch.h, functional), held.batch, [held.call], life)

    @precondition(lambda self: self.held)
    @rule(index=which)
    def never_use_what_was_remembered(self, index: int) -> None:
        self._pick(self.held, index)

    @precondition(lambda self: self.losses)
    @rule(index=which)
    def never_use_a_loss(self, index: int) -> None:
        self._pick(self.losses, index)

    # Backward passes

    @precondition(lambda self: self.losses)
    @rule(index=which, retain=st.booleans(), only_weight=st.booleans())
    def backward(self, index: int, retain: bool, only_weight: bool) -> None:
        loss = self._pick(self.losses, index, retain)
        only_weight = only_weight and not self.model.frozen
        if loss.outgrown:
            with pytest.raises(RuntimeError, match="add_classes|modified by an inplace operation"):
                loss.value.backward(retain_graph=retain)
            return
        try:
            loss.value.backward(retain_graph=retain, inputs=[self.head.weight] if only_weight else None)
        except RuntimeError as error:
            if self._is_stale(loss) and "modified by an inplace operation" in str(error):
                self.losses = [each for each in self.losses if each is not loss]
                return
            raise
        self.model.backward(loss.graph, only_weight=only_weight)

    @precondition(lambda self: len(self.losses) > 1)
    @rule(first=which, second=which)
    def backward_of_a_sum(self, first: int, second: int) -> None:
        one, other = self._pick(self.losses, first, True), self._pick(self.losses, second, True)
        if one is other or any(loss.outgrown or self._is_stale(loss) for loss in (one, other)):
            return
        (one.value + other.value).backward()
        for loss in (one, other):
            self.losses.remove(loss)
            self.model.backward(loss.graph)

    @precondition(lambda self: self.losses and not self.model.frozen)
    @rule(index=which)
    def gradient_of_the_input_alone(self, index: int) -> None:
        loss = self._pick(self.losses, index, True)
        if loss.x.requires_grad and not self._is_stale(loss) and not loss.outgrown:
            torch.autograd.grad(loss.value, loss.x, retain_graph=True)

    @precondition(lambda self: self.losses and not self.model.frozen)
    @rule(index=which)
    def backward_that_fails(self, index: int) -> None:
        loss = self._pick(self.losses, index, True)
        if not loss.x.requires_grad or self._is_stale(loss) or loss.outgrown:
            return

        def fail(_: Tensor) -> None:
            raise Failed

        hook = loss.x.register_hook(fail)
        before = {name: parameter.grad is not None for name, parameter in self.head.named_parameters()}
        versions = {name: _version(parameter.grad) for name, parameter in self.head.named_parameters()}
        with pytest.raises(Failed):
            loss.value.backward(retain_graph=True)
        hook.remove()
        came = [
            name
            for name, parameter in self.head.named_parameters()
            if before[name] != (parameter.grad is not None) or versions[name] != _version(parameter.grad)
        ]
        self.model.add_gradients(loss.graph, came)

    @precondition(lambda self: self.losses and not self.model.frozen)
    @rule(index=which)
    def step_with_a_gradient_given_by_hand(self, index: int) -> None:
        loss = self._pick(self.losses, index, True)
        if loss.outgrown or self._is_stale(loss):
            return
        self.losses.remove(loss)
        (gradient,) = torch.autograd.grad(loss.value, self.head.weight)
        old = self.head.weight.grad
        self.head.weight.grad = gradient if old is None else old + gradient
        self.model.backward(loss.graph, only_weight=True)
        self.model.changed(self.model.gradients)
        self.step()

    # Gradients

    @rule(to_none=st.booleans(), whose=st.sampled_from(["optimizer", "head", "by hand"]))
    def clear(self, to_none: bool, whose: str) -> None:
        parameters = list(self.head.parameters())
        if whose == "optimizer" and self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=to_none)
        elif whose == "head":
            self.head.zero_grad(set_to_none=to_none)
        else:
            for parameter in parameters:
                if to_none:
                    parameter.grad = None
                elif parameter.grad is not None:
                    parameter.grad.zero_()
        if to_none:
            self.model.set_to_none()
        else:
            old = self.model.gradients
            self.model.changed({name: None if each is None else 0 * each for name, each in old.items()})

    @rule(norm=st.sampled_from([1e-3, 1e3]), foreach=st.booleans())
    def clip(self, norm: float, foreach: bool) -> None:
        nn.utils.clip_grad_norm_(self.head.parameters(), norm, foreach=foreach)
        self._adopt_gradients()

    @rule(new_tensor=st.booleans())
    def halve_the_gradient(self, new_tensor: bool) -> None:
        gradient = self.head.weight.grad
        if gradient is None:
            return
        if new_tensor:
            self.head.weight.grad = gradient * 0.5
        else:
            gradient.mul_(0.5)
        self._adopt_gradients()

    # Steps

    @rule()
    def step(self) -> None:
        if self.optimizer is not None:
            self.optimizer.step()
            self.model.step()

    @rule(labels=labels, seed=seeds, kind=kinds)
    def usual_step(self, labels: list[int], seed: int, kind: str) -> None:
        self.clear(True, "optimizer")
        self.loss(labels, seed, kind, "alive", True, "mean", True)
        if self.losses:
            self.backward(len(self.losses) - 1, False, False)
        self.step()

    @rule()
    def step_that_fails(self) -> None:
        def fail() -> float:
            raise Failed

        if self.optimizer is not None:
            with pytest.raises(Failed):
                self.optimizer.step(fail)

    @precondition(lambda self: self.optimizer is not None and self.optimizer.defaults["fused"])
    @rule()
    def step_skipped_inside_a_fused_optimizer(self) -> None:
        if self.model.momentum:  # torch leaves a momentum without values if the first step is skipped
            return
        self.optimizer.found_inf = torch.ones(())
        self.optimizer.step()
        del self.optimizer.found_inf

    @rule(labels=labels, seed=seeds, value=st.sampled_from(["nan", "inf", "largest"]))
    def step_with_activations_that_are_not_finite(self, labels: list[int], seed: int, value: str) -> None:
        if self.optimizer is None:
            return
        batch = self._batch(labels, seed, "frozen", "alive")
        if batch.h.numel() == 0:
            return
        batch.h[0] = torch.finfo(batch.h.dtype).max if value == "largest" else float(value)
        with self._may_warn(True):
            loss = self.head.loss(batch.h, batch.targets)
        if not loss.requires_grad:
            return
        loss.backward()
        for parameter in self.head.parameters():
            if parameter.grad is not None:
                parameter.grad.nan_to_num_(0.01, 0.01, 0.01).clamp_(-1, 1)
        calls = [batch.call()] if self._remembers() else []
        nothing = {name: torch.zeros_like(each) for name, each in self.model.parameters.items()}
        self.model.backward(Graph(0.0, nothing, calls, 1.0))
        self._adopt_gradients()
        self.step()

    @rule(labels=labels, seed=seeds, value=st.sampled_from([1.0, 1.0, 0.0, float("nan"), float("inf")]))
    def memorize(self, labels: list[int], seed: int, value: float) -> None:
        batch = self._batch(labels, seed, "frozen", "alive")
        batch.h[:1] *= value
        self.head.memorize(batch.h, batch.targets)
        self.model.write(list(zip(batch.h, batch.targets.tolist(), strict=True)))

    # Modes

    @rule()
    def change_mode(self) -> None:
        self.head.train(not self.head.training)
        self.held = []

    @rule()
    def change_memorizing(self) -> None:
        self.head.memorizing = self.model.memorizing = not self.head.memorizing

    @precondition(lambda self: not self.losses and not self.held and not self.model.pending)
    @rule()
    def freeze_or_thaw(self) -> None:
        if self.head.weight.grad is None:
            self.model.frozen = not self.model.frozen
            self.head.weight.requires_grad_(not self.model.frozen)

    # Growth, copies and states

    @rule(n=st.integers(1, 2))
    def add_classes(self, n: int) -> None:
        old = self.head.num_classes
        if old + n > MOST_CLASSES:
            return
        self.head.add_classes(n, self.optimizer)
        rows = self.head.weight.detach()[old:]
        assert float(rows.abs().max()) <= FEATURES**-0.5 * 1.01
        self.model.grow(rows)
        self.held = []  # a graph of the old rows
        for loss in self.losses:
            loss.outgrown = True

    @rule(dtype=st.sampled_from(DTYPES))
    def change_dtype(self, dtype: torch.dtype) -> None:
        self._forget_losses()
        self.head.to(dtype)
        if self.optimizer is not None:
            self.optimizer.load_state_dict(self.optimizer.state_dict())  # casts the momentum
        self.model.convert(dtype)

    @rule()
    def take_a_snapshot(self) -> None:
        self.snapshot = ({name: value.clone() for name, value in self.head.state_dict().items()}, self.model.saved())

    @precondition(lambda self: self.snapshot is not None)
    @rule()
    def return_to_the_snapshot(self) -> None:
        assert self.snapshot is not None
        state, saved = self.snapshot
        if saved.classes == self.model.classes:
            self.head.load_state_dict(state)
            self.model.load(saved)
        else:
            with pytest.raises(ValueError, match="add_classes"):
                self.head.load_state_dict(state)

    @rule(optimizer=optimizers)
    def save_and_load(self, optimizer: dict[str, Any]) -> None:
        if self.optimizer is None:
            return
        file = io.BytesIO()
        torch.save({"head": self.head.state_dict(), "optimizer": self.optimizer.state_dict()}, file)
        file.seek(0)
        state = torch.load(file)
        head = HebbianSoftmax(FEATURES, self.head.num_classes, dtype=self.head.weight.dtype, **self.options)
        head.load_state_dict(state["head"])
        velocity, momentum = self.model.velocity, self.model.momentum
        self._continue_with(head)
        self._make_optimizer(optimizer | {"momentum": momentum})
        self.optimizer.load_state_dict(state["optimizer"])
        self.model.velocity = velocity
        self._attach()

    @rule(keep_original=st.booleans(), optimizer=optimizers)
    def copy(self, keep_original: bool, optimizer: dict[str, Any]) -> None:
        head = copy.deepcopy(self.head)
        assert head.attachment is None
        if keep_original:
            return
        warned = self.model.warned
        memorizing, training = self.head.memorizing, self.head.training
        self._continue_with(head)
        self.model.warned, self.model.memorizing = warned, memorizing
        assert (head.memorizing, head.training) == (memorizing, training)
        self._make_optimizer(optimizer)
        self._attach()

    # Attaching

    @rule()
    def detach(self) -> None:
        attachment = self.head.attachment
        if attachment is not None:
            attachment.remove()
        self._lose()

    @rule(optimizer=optimizers, same=st.booleans())
    def attach(self, optimizer: dict[str, Any], same: bool) -> None:
        if self.model.attached:
            with pytest.raises(RuntimeError, match="attached"):
                self.head.attach(self.optimizer)
            return
        if not same:
            self._make_optimizer(optimizer)
        self._attach()

    # Errors, after which everything must be as it was

    @rule(
        what=st.sampled_from(["target", "shape", "features", "float targets", "foreign optimizer", "no classes"]),
        call=st.sampled_from(["loss", "remember", "memorize"]),
    )
    def refuse(self, what: str, call: str) -> None:
        like: Any = {"dtype": self.head.weight.dtype}
        h, targets = torch.ones(2, FEATURES, **like), torch.zeros(2, dtype=torch.int64)
        use: Callable[[Tensor, Tensor], Any] = getattr(self.head, call)
        if what == "foreign optimizer":
            with pytest.raises(RuntimeError if self.model.attached else ValueError):
                self.head.attach(torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1))
        elif what == "no classes":
            with pytest.raises(ValueError, match="n must be"):
                self.head.add_classes(0)
        elif what == "float targets":
            with pytest.raises(TypeError, match="targets"):
                use(h, targets + 0.5)
        else:
            wrong = {
                "target": (h, targets + self.head.num_classes),
                "shape": (h, targets[:1]),
                "features": (h[:, 1:], targets),
            }
            with pytest.raises(ValueError, match=r"targets|features|shape"):
                use(*wrong[what])

    # What the rules share

    def _batch(self, labels: list[int], seed: int, kind: str, life: str) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        x = 2 * torch.randn(len(labels), FEATURES, generator=generator, dtype=torch.float64)
        x = (0 * x if life == "zero features" else x).to(self.head.weight.dtype).requires_grad_(kind != "frozen")
        classes = self.head.num_classes
        targets = [IGNORED if label < 0 else label % classes for label in labels]
        return Batch(x, x * 1 if kind == "graph" else x, torch.tensor(targets, dtype=torch.int64))

    def _remembers(self) -> bool:
        return self.head.training and self.model.attached

    def _remember(self, batch: Batch) -> list[Call]:
        with self._may_warn(True):
            self.head.remember(batch.h, batch.targets)
        return [batch.call(needs_gradient_of_h=batch.h.grad_fn is not None)] if self._remembers() else []

    def _logits(self, h: Tensor, functional: bool) -> Tensor:
        return F.linear(h, self.head.weight, self.head.bias) if functional else self.head(h)

    def _add_own(self, logits: Tensor, batch: Batch, calls: list[Call], life: str) -> None:
        value = F.cross_entropy(logits, batch.targets, ignore_index=IGNORED, reduction="sum")
        graph = self.model.cross_entropy(batch.h.detach(), batch.targets.tolist(), calls, mean=False)
        self._add(value, batch, graph, life)

    def _add(self, value: Tensor, batch: Batch, graph: Graph, life: str) -> None:
        """Check the value of a loss, and keep the loss for a backward pass."""
        eps = torch.finfo(self.head.weight.dtype).eps
        assert value.item() == pytest.approx(graph.value, rel=16 * eps, abs=16 * eps * max(1.0, graph.size))
        if life == "times zero":
            value, graph = value * 0, graph.scaled(0.0)
        if value.requires_grad and len(self.losses) < MOST_LOSSES:
            self.losses.append(Loss(value, batch.x, graph, _version(self.head.weight)))

    def _pick(self, items: list[Any], index: int, keep: bool = False) -> Any:
        index %= len(items)
        return items[index] if keep else items.pop(index)

    def _is_stale(self, loss: Loss) -> bool:
        """Return whether the weight has changed since, which autograd refuses if it needs the weight."""
        return loss.weight_version != _version(self.head.weight)

    def _adopt_gradients(self) -> None:
        """Tell the model of gradients that the user has changed."""
        found = {name: parameter.grad for name, parameter in self.head.named_parameters()}
        self.model.changed({name: None if each is None else each.double().clone() for name, each in found.items()})

    @contextmanager
    def _may_warn(self, remembers: bool) -> Iterator[None]:
        """Check that the head says once that it is not attached, and nothing else."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
        expected = remembers and self.head.training and not self.model.attached and not self.model.warned
        assert ["not attached" in str(each.message) for each in caught] == [True] * expected
        self.model.warned |= expected

    def _make_optimizer(self, options: dict[str, Any]) -> None:
        how, momentum = options["how"], options["momentum"]
        self.optimizer = torch.optim.SGD(
            self.head.parameters(), lr=0.1, momentum=momentum, foreach=how == "foreach", fused=how == "fused"
        )
        self.model.lr, self.model.momentum, self.model.velocity = 0.1, momentum, {}

    def _attach(self) -> None:
        handle = self.head.attach(self.optimizer)
        assert self.head.attachment is handle
        self.model.attached = True

    def _lose(self) -> None:
        calls = [call for loss in self.losses for call in loss.graph.calls] + [held.call for held in self.held]
        self.model.lose(calls)
        self.model.attached = False

    def _forget_losses(self) -> None:
        self.losses, self.held = [], []

    def _continue_with(self, head: HebbianSoftmax) -> None:
        """Go on with another head that has the state of this one."""
        self._forget_losses()
        self.head, self.model = head, self.model.saved()
        self.model.frozen = not head.weight.requires_grad


def _version(tensor: Tensor | None) -> int:
    return -1 if tensor is None else tensor._version


TestHundredsOfSteps = Machine.TestCase
TestHundredsOfSteps.settings = settings(max_examples=30, stateful_step_count=30)


@pytest.mark.slow
class TestThousandsOfSteps(Machine.TestCase):
    settings = settings(max_examples=400, stateful_step_count=60)
