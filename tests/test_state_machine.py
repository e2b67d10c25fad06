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
from tests.naive_head import Batch, Call, Graph, NaiveHead
from tests.oracle import IGNORED

FEATURES = 3
MOST_CLASSES, MOST_LOSSES = 9, 6
DTYPES = [torch.float64, torch.float32, torch.bfloat16]

Drawn = dict[str, Any]
batches = st.fixed_dictionaries(
    {
        "labels": st.lists(st.integers(-1, MOST_CLASSES - 1), min_size=1, max_size=4),
        "seed": st.integers(0, 99),
        "kind": st.sampled_from(["graph", "leaf", "frozen"]),
        "life": st.sampled_from(["alive", "alive", "times zero", "zero features", "empty"]),
    }
)
which = st.integers(0, MOST_LOSSES - 1)
WAYS = ["loss", "remember first", "head first", "functional", "not remembered"]
PASSES = ["backward", "only weight", "input alone", "failure", "by hand"]
acts = st.lists(st.sampled_from(["step", "clear", "zero", "backward", *PASSES]), min_size=1, max_size=5)
REDUCTIONS = ["mean", "sum", "none"]
optimizers = st.fixed_dictionaries(
    {"how": st.sampled_from(["one by one", "foreach", "fused"]), "momentum": st.sampled_from([0.0, 0.9])}
)


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


class UserError(Exception):
    """The error of a user's hook."""


class Machine(RuleBasedStateMachine):
    """A head and its optimizer, and their model."""

    @initialize(
        classes=st.sampled_from([3, 1]),
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
        optimizer: Drawn,
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

    @rule(batch=batches, way=st.sampled_from(WAYS), mode=st.sampled_from(["train", "eval", "no grad"]))
    def loss(self, batch: Drawn, way: str, mode: str) -> None:
        """Compute a loss that is used later or never."""
        self.head.train(mode != "eval")
        with torch.set_grad_enabled(mode != "no grad"):
            self._compute(batch, way)
        self.head.train()

    @rule(batch=batches, way=st.sampled_from(["loss", "loss not remembered"]), acts=acts)
    def micro_batch(self, batch: Drawn, way: str, acts: list[str]) -> None:
        self._train(batch, way, acts)

    @rule(batch=batches, way=st.sampled_from(["remember first", "head first", "functional"]), acts=acts)
    def micro_batch_remembered(self, batch: Drawn, way: str, acts: list[str]) -> None:
        self._train(batch, way, acts)

    def _train(self, batch: Drawn, way: str, acts: list[str]) -> None:
        loss = self._compute(batch, way)
        for act in acts:
            self.agrees()
            if act == "step":
                self.step()
            elif act in ("clear", "zero"):
                self.clear(act == "clear", "optimizer")
            elif loss in self.losses:
                self._pass(loss, act)

    @rule(drawn=batches)
    def remember(self, drawn: Drawn) -> None:
        batch = self._batch(drawn)
        calls = self._remember(batch)
        self.held = [*self.held, *(Held(batch, call) for call in calls)][-MOST_LOSSES:]

    @precondition(lambda self: self.held)
    @rule(index=which, how=st.sampled_from(["head", "functional", "never"]), keep=st.booleans())
    def use_what_was_remembered(self, index: int, how: str, keep: bool) -> None:
        held = self._pick(self.held, index)
        if how != "never":
            self._add_own(self._logits(held.batch, how == "functional"), held.batch, [held.call], "alive")
        if how == "never" or not keep:
            self.held.remove(held)

    @rule(drawn=batches, value=st.sampled_from(["nan", "inf", "largest"]))
    def loss_of_activations_that_are_not_finite(self, drawn: Drawn, value: str) -> None:
        batch = self._batch(drawn | {"kind": "frozen"})
        batch.h[:1] = torch.finfo(batch.h.dtype).max if value == "largest" else float(value)
        with self._may_warn():
            loss = self.head.loss(batch.h, batch.targets)
        if not loss.requires_grad:
            return
        loss.backward()
        for parameter in self.head.parameters():
            if parameter.grad is not None:
                parameter.grad.nan_to_num_(0.01, 0.01, 0.01).clamp_(-1, 1)
        calls = [batch.call()] if self._remembers() else []
        unknown = {name: torch.zeros_like(each) for name, each in self.model.parameters.items()}
        self.model.backward(Graph(0.0, unknown, calls, 1.0))
        self._adopt_gradients()

    # Backward passes

    @precondition(lambda self: self.losses)
    @rule(index=which, how=st.sampled_from(PASSES), retain=st.booleans())
    def backward(self, index: int, how: str, retain: bool) -> None:
        loss = self._pick(self.losses, index)
        self._pass(loss, how, retain)
        if not retain and loss in self.losses:
            self.losses.remove(loss)

    def _pass(self, loss: Loss, how: str, retain: bool = True) -> None:
        """Make a backward pass through a loss."""
        if loss.outgrown:
            with pytest.raises(RuntimeError, match=r"add_classes|modified by an inplace operation"):
                loss.value.backward(retain_graph=retain)
        elif how == "backward" or self.model.frozen:
            self._backpropagate(loss, retain, None)
        elif how == "only weight":
            self._backpropagate(loss, retain, [self.head.weight])
        elif self._is_stale(loss):
            return
        elif how == "by hand":
            (gradient,) = torch.autograd.grad(loss.value, self.head.weight, retain_graph=retain)
            old = self.head.weight.grad
            self.head.weight.grad = gradient if old is None else old + gradient
            self.model.backward(loss.graph, only_weight=True)
            self._adopt_gradients()
            self.step()  # nobody could see that a gradient given by hand is cleared again
        elif loss.x.requires_grad and how == "input alone":
            torch.autograd.grad(loss.value, loss.x, retain_graph=retain)
        elif loss.x.requires_grad and how == "failure":
            self._fail_in_backward(loss)

    def _backpropagate(self, loss: Loss, retain: bool, inputs: list[Tensor] | None) -> None:
        try:
            loss.value.backward(retain_graph=retain, inputs=inputs)
        except RuntimeError as error:
            if not self._is_stale(loss) or "modified by an inplace operation" not in str(error):
                raise
            self.losses.remove(loss)
            return
        self.model.backward(loss.graph, only_weight=inputs is not None)

    def _fail_in_backward(self, loss: Loss) -> None:
        def versions() -> dict[str, int]:
            return {name: _version(parameter.grad) for name, parameter in self.head.named_parameters()}

        before = versions()
        hook = loss.x.register_hook(_fail)
        with pytest.raises(UserError):
            loss.value.backward(retain_graph=True)
        hook.remove()
        self.model.add_gradients(loss.graph, [name for name, now in versions().items() if now != before[name]])

    @precondition(lambda self: len(self.losses) > 1)
    @rule(first=which, second=which)
    def backward_of_a_sum(self, first: int, second: int) -> None:
        both = [self._pick(self.losses, first), self._pick(self.losses, second)]
        if both[0] is not both[1] and not any(loss.outgrown or self._is_stale(loss) for loss in both):
            (both[0].value + both[1].value).backward()
            for loss in both:
                self.losses.remove(loss)
                self.model.backward(loss.graph)

    # Gradients and steps

    @rule(to_none=st.booleans(), whose=st.sampled_from(["optimizer", "head", "by hand"]))
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
            self._adopt_gradients()

    @precondition(lambda self: self.head.weight.grad is not None)
    @rule(how=st.sampled_from(["clip", "clip with foreach", "halve", "halve in place"]))
    def change_the_gradient(self, how: str) -> None:
        gradient = self.head.weight.grad
        assert gradient is not None
        if how == "halve":
            self.head.weight.grad = gradient * 0.5
        elif how == "halve in place":
            gradient.mul_(0.5)
        else:
            nn.utils.clip_grad_norm_(self.head.parameters(), 0.1, foreach=how == "clip with foreach")
        self._adopt_gradients()

    @precondition(lambda self: self.head.weight.grad is not None or self.model.frozen)
    @rule()
    def step(self) -> None:
        self.optimizer.step()
        self.model.step()

    @rule(drawn=batches, value=st.sampled_from([1.0, 1.0, float("nan"), float("inf")]))
    def memorize(self, drawn: Drawn, value: float) -> None:
        batch = self._batch(drawn | {"kind": "frozen"})
        batch.h[:1] *= value
        self.head.memorize(batch.h, batch.targets)
        self.model.write(list(zip(batch.h, batch.targets.tolist(), strict=True)))

    # Changes of the head

    @rule(n=st.integers(1, 2))
    def add_classes(self, n: int) -> None:
        old = self.head.num_classes
        if old + n > MOST_CLASSES:
            return
        self.head.add_classes(n, self.optimizer)
        rows = self.head.weight.detach()[old:]
        assert float(rows.abs().max()) <= FEATURES**-0.5 * 1.01
        self.model.grow(rows)
        for loss in self.losses:
            loss.outgrown = True

    @rule(what=st.sampled_from(["memorizing", "frozen", "snapshot", "return"]))
    def switch(self, what: str) -> None:
        if what == "memorizing":
            self.head.memorizing = self.model.memorizing = not self.head.memorizing
        elif what == "frozen" and self.head.weight.grad is None:
            if not (self.losses or self.held or self.model.pending):
                self.model.frozen = not self.model.frozen
                self.head.weight.requires_grad_(not self.model.frozen)
        elif what == "snapshot":
            state = {name: value.clone() for name, value in self.head.state_dict().items()}
            self.snapshot = state, self.model.saved()
        elif what == "return" and self.snapshot is not None:
            state, saved = self.snapshot
            if saved.classes == self.model.classes:
                self.head.load_state_dict(state)
                self.model.load(saved)
            else:
                with pytest.raises(ValueError, match="add_classes"):
                    self.head.load_state_dict(state)

    @rule(
        what=st.sampled_from(["dtype", "save and load", "copy", "copy both", "detach", "attach"]),
        dtype=st.sampled_from(DTYPES),
        how=optimizers,
    )
    def go_on_with(self, what: str, dtype: torch.dtype, how: Drawn) -> None:
        """Go on with another dtype, another head or another attachment."""
        if what == "dtype":
            self._change_dtype(dtype)
        elif what == "save and load":
            self._save_and_load(how)
        elif what in ("copy", "copy both"):
            self._copy(how, what == "copy both")
        else:
            self._detach()
            if what == "attach":
                self._make_optimizer(how)
                self._attach()

    @precondition(lambda self: not self.model.attached)
    @rule(same=st.booleans(), how=optimizers)
    def attach(self, same: bool, how: Drawn) -> None:
        if not same:
            self._make_optimizer(how)
        self._attach()

    # Nothing changes

    @rule(what=st.deferred(lambda: st.sampled_from(list(HARMLESS))))
    def nothing_changes(self, what: str) -> None:
        HARMLESS[what](self)

    def _fail_to_step(self) -> None:
        with pytest.raises(UserError):
            self.optimizer.step(_fail)

    def _skip_inside_a_fused_optimizer(self) -> None:
        if self.optimizer.param_groups[0]["fused"]:
            self.optimizer.found_inf = torch.ones(())
            self.optimizer.step()
            del self.optimizer.found_inf

    def _copy_for_nobody(self) -> None:
        head, optimizer = copy.deepcopy((self.head, self.optimizer))
        optimizer.step()
        optimizer.zero_grad()
        head.memorize(torch.ones(1, FEATURES, dtype=head.weight.dtype), torch.tensor([0]))

    def _attach_to_another(self) -> None:
        others = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
        with pytest.raises(RuntimeError if self.model.attached else ValueError):
            self.head.attach(others)
        if self.model.attached:
            with pytest.raises(RuntimeError, match="attached"):
                self.head.attach(self.optimizer)

    def _refuse(self, error: type[Exception], h: Tensor, targets: Tensor) -> None:
        h = h.to(self.head.weight.dtype)
        for use in (self.head.loss, self.head.remember, self.head.memorize):
            with pytest.raises(error, match=r"targets|shape"):
                use(h, targets)
        with pytest.raises(ValueError, match="n must be"):
            self.head.add_classes(0)

    # What the rules share

    def _batch(self, drawn: Drawn) -> Batch:
        labels = [] if drawn["life"] == "empty" else drawn["labels"]
        generator = torch.Generator().manual_seed(drawn["seed"])
        x = 2 * torch.randn(len(labels), FEATURES, generator=generator, dtype=torch.float64)
        x = (0 * x if drawn["life"] == "zero features" else x).to(self.head.weight.dtype)
        x.requires_grad_(drawn["kind"] != "frozen")
        targets = [IGNORED if label < 0 else label % self.head.num_classes for label in labels]
        return Batch(x, x.clone() if drawn["kind"] == "graph" else x, torch.tensor(targets, dtype=torch.int64))

    def _remembers(self) -> bool:
        return self.head.training and torch.is_grad_enabled() and self.model.attached

    def _remember(self, batch: Batch) -> list[Call]:
        with self._may_warn():
            self.head.remember(batch.h, batch.targets)
        return [batch.call(needs_gradient_of_h=batch.h.grad_fn is not None)] if self._remembers() else []

    def _compute(self, drawn: Drawn, way: str) -> Loss:
        """Compute a loss in one of ``WAYS``."""
        batch, life, reduction = self._batch(drawn), drawn["life"], REDUCTIONS[drawn["seed"] % len(REDUCTIONS)]
        calls = self._remember(batch) if way in ("remember first", "functional") else []
        if way not in ("loss", "loss not remembered"):
            logits = self._logits(batch, way == "functional")
            return self._add_own(logits, batch, self._remember(batch) if way == "head first" else calls, life)
        remember = way == "loss"
        with self._may_warn() if remember else nullcontext():
            value = self.head.loss(batch.h, batch.targets, reduction=reduction, remember=remember)
        calls = [batch.call()] if remember and self._remembers() else []
        graph = self.model.cross_entropy(batch, calls, mean=reduction == "mean")
        return self._add(value.sum(), batch, graph, life)

    def _logits(self, batch: Batch, functional: bool) -> Tensor:
        return F.linear(batch.h, self.head.weight, self.head.bias) if functional else self.head(batch.h)

    def _add_own(self, logits: Tensor, batch: Batch, calls: list[Call], life: str) -> Loss:
        value = F.cross_entropy(logits, batch.targets, ignore_index=IGNORED, reduction="sum")
        return self._add(value, batch, self.model.cross_entropy(batch, calls, mean=False), life)

    def _add(self, value: Tensor, batch: Batch, graph: Graph, life: str) -> Loss:
        """Check the value of a loss, and keep the loss for backward passes."""
        eps = torch.finfo(self.head.weight.dtype).eps
        assert value.item() == pytest.approx(graph.value, abs=16 * eps * max(1.0, graph.size))
        if life == "times zero":
            value, graph = value * 0, graph.scaled(0.0)
        loss = Loss(value, batch.x, graph, _version(self.head.weight))
        if value.requires_grad:
            self.losses = [*self.losses, loss][-MOST_LOSSES:]
        return loss

    def _pick(self, items: list[Any], index: int) -> Any:
        return items[index % len(items)]

    def _is_stale(self, loss: Loss) -> bool:
        """Return whether the weight has changed since, which autograd refuses if it needs the weight."""
        return loss.weight_version != _version(self.head.weight)

    def _adopt_gradients(self) -> None:
        """Tell the model of gradients that the user has changed."""
        found = {name: parameter.grad for name, parameter in self.head.named_parameters()}
        self.model.changed({name: None if each is None else each.double().clone() for name, each in found.items()})

    @contextmanager
    def _may_warn(self) -> Iterator[None]:
        """Check that a head that would remember says once that it is not attached, and nothing else."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
        wants = self.head.training and torch.is_grad_enabled()
        expected = wants and not self.model.attached and not self.model.warned
        assert ["not attached" in str(each.message) for each in caught] == [True] * expected
        self.model.warned |= expected

    def _make_optimizer(self, options: Drawn) -> None:
        how, momentum = options["how"], options["momentum"]
        # torch's fused SGD is wrong in bfloat16, and with momentum fails if parameters get gradients one by one.
        fused = how == "fused" and not momentum and self.head.weight.dtype != torch.bfloat16
        self.optimizer = torch.optim.SGD(
            self.head.parameters(), lr=0.1, momentum=momentum, foreach=how == "foreach", fused=fused
        )
        self.model.lr, self.model.momentum, self.model.velocity = 0.1, momentum, {}

    def _attach(self) -> None:
        handle = self.head.attach(self.optimizer)
        assert self.head.attachment is handle
        self.model.attached = True

    def _detach(self) -> None:
        if self.head.attachment is not None:
            self.head.attachment.remove()
        calls = [call for loss in self.losses for call in loss.graph.calls] + [held.call for held in self.held]
        self.model.lose(calls)
        self.model.attached = False

    def _change_dtype(self, dtype: torch.dtype) -> None:
        self.losses, self.held = [], []
        self.head.to(dtype)
        self.optimizer.load_state_dict(self.optimizer.state_dict())  # casts the momentum
        self.optimizer.param_groups[0]["fused"] &= dtype != torch.bfloat16
        self.model.convert(dtype)

    def _save_and_load(self, how: Drawn) -> None:
        file = io.BytesIO()
        torch.save({"head": self.head.state_dict(), "optimizer": self.optimizer.state_dict()}, file)
        file.seek(0)
        state = torch.load(file)
        head = HebbianSoftmax(FEATURES, self.head.num_classes, dtype=self.head.weight.dtype, **self.options)
        head.load_state_dict(state["head"])
        old = self._replace_head(head)
        self._make_optimizer(how | {"momentum": old.momentum})
        self.optimizer.load_state_dict(state["optimizer"])
        self.model.velocity = old.velocity
        self._attach()

    def _copy(self, how: Drawn, both: bool) -> None:
        head, optimizer = copy.deepcopy((self.head, self.optimizer))
        assert head.attachment is None
        old = self._replace_head(head)
        assert head.memorizing == old.memorizing
        self.model.warned, self.model.memorizing = old.warned, old.memorizing
        if both:
            self.optimizer = optimizer
            self.model.lr, self.model.momentum, self.model.velocity = old.lr, old.momentum, old.velocity
        else:
            self._make_optimizer(how)
        self._attach()

    def _replace_head(self, head: HebbianSoftmax) -> NaiveHead:
        """Go on with another head that has the state of this one; return the old model."""
        old = self.model
        self.losses, self.held = [], []
        self.head, self.model = head, old.saved()
        self.model.frozen = not head.weight.requires_grad
        return old


def _version(tensor: Tensor | None) -> int:
    return -1 if tensor is None else tensor._version


def _fail(*_: Tensor) -> float:
    raise UserError


TWO = torch.zeros(2, dtype=torch.int64)
HARMLESS: dict[str, Callable[[Machine], None]] = {
    "a step without a gradient": lambda self: None if self.head.weight.grad is not None else self.step(),
    "a step that fails": Machine._fail_to_step,
    "a step skipped inside a fused optimizer": Machine._skip_inside_a_fused_optimizer,
    "a copy": Machine._copy_for_nobody,
    "wrong optimizers": Machine._attach_to_another,
    "a target that is no class": lambda self: self._refuse(ValueError, torch.ones(2, FEATURES), TWO + MOST_CLASSES),
    "targets of another shape": lambda self: self._refuse(ValueError, torch.ones(1, FEATURES), TWO),
    "other features": lambda self: self._refuse(ValueError, torch.ones(2, FEATURES + 1), TWO),
    "targets that are no integers": lambda self: self._refuse(TypeError, torch.ones(2, FEATURES), TWO + 0.5),
}

TestHundredsOfSteps = Machine.TestCase
TestHundredsOfSteps.settings = settings(max_examples=30, stateful_step_count=30)


@pytest.mark.slow
class TestThousandsOfSteps(Machine.TestCase):
    settings = settings(max_examples=400, stateful_step_count=60)
