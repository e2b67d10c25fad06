"""Heads used in any order, against a naive model of what should happen.

Hypothesis chooses the calls: losses, backward passes, steps, cleared gradients, new classes, copies, other dtypes,
attaching and detaching. After each of them the head must be what the model of :mod:`tests.naive_head` says. A failure
is shown as the shortest sequence of calls that hypothesis finds.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor, nn

from tests.side_by_side import FEATURES, MOST_CLASSES, MOST_LOSSES, Drawn, SideBySide, UserError, fail

DTYPES = [torch.float64, torch.float32, torch.bfloat16]
WAYS = ["loss", "soft loss", "targets", "remember first", "head first", "functional", "not remembered"]
"""How a loss is computed and whether it is remembered."""
PASSES = ["backward", "only weight", "input alone", "failure", "by hand"]
"""What gets the gradient of a backward pass: everything; the weight; the input; nothing, since a hook raises; and
``weight.grad``, but assigned by the user."""

batches = st.fixed_dictionaries(
    {
        "labels": st.lists(st.integers(-1, MOST_CLASSES - 1), min_size=1, max_size=4),
        "seed": st.integers(0, 99),
        "kind": st.sampled_from(
            ["graph", "leaf", "frozen"]
        ),  # of activations: computed, or a leaf with a gradient or not
        "life": st.sampled_from(["alive", "alive", "times zero", "zero features", "empty"]),  # most have zero gradients
    }
)
optimizers = st.fixed_dictionaries(
    {"how": st.sampled_from(["one by one", "foreach", "fused"]), "momentum": st.sampled_from([0.0, 0.9])}
)
which = st.integers(0, MOST_LOSSES - 1)
# What is done with a loss right after it is computed. Without these, few of the steps would write anything.
acts = st.lists(
    st.sampled_from(
        ["backward", "step", "backward", "step", "backward", "another", "clear", "zero", "skip", "grow", *PASSES]
    ),
    min_size=2,
    max_size=6,
)


class Machine(SideBySide, RuleBasedStateMachine):
    """The calls that hypothesis chooses from."""

    @initialize(
        classes=st.sampled_from([3, 1, 0]),
        bias=st.booleans(),
        limit=st.sampled_from([0, 2, 5, 50]),
        grows=st.booleans(),
        scale=st.sampled_from(["match", 1.0, 0.5]),
        write=st.sampled_from(["across", "centred", "literal"]),
        start=st.sampled_from([0, 3, "auto"]),
        fade=st.booleans(),
        dtype=st.sampled_from([torch.float64, *DTYPES]),
        optimizer=optimizers,
    )
    def start(self, **options: Any) -> None:
        self.begin(**options)

    @invariant()
    def agrees(self) -> None:
        self.compare()

    # Losses and backward passes

    @rule(batch=batches, way=st.sampled_from(WAYS), mode=st.sampled_from(["train", "eval", "no grad"]))
    def loss(self, batch: Drawn, way: str, mode: str) -> None:
        """Compute a loss that is used later or never."""
        self.head.train(mode != "eval")
        with torch.set_grad_enabled(mode != "no grad"):
            self.compute(batch, way)
        self.head.train()

    @rule(batch=batches, way=st.sampled_from(["loss", "soft loss", "loss not remembered"]), acts=acts)
    def micro_batch(self, batch: Drawn, way: str, acts: list[str]) -> None:
        self._train(batch, way, acts)

    @rule(batch=batches, way=st.sampled_from(["remember first", "head first", "functional"]), acts=acts)
    def micro_batch_remembered(self, batch: Drawn, way: str, acts: list[str]) -> None:
        self._train(batch, way, acts)

    @rule(batch=batches, way=st.sampled_from(["targets", "targets shifted", "not remembered"]), acts=acts)
    def micro_batch_in_a_context(self, batch: Drawn, way: str, acts: list[str]) -> None:
        self._train(batch, way, acts)

    def _train(self, batch: Drawn, way: str, acts: list[str]) -> None:
        """Compute a loss, and do things that concern it."""
        loss = self.compute(batch, way)
        for act in acts:
            self.compare()
            if act == "step":
                self.step()
            elif act in ("clear", "zero"):
                self.clear(act == "clear", "optimizer")
            elif act == "skip":
                skip_inside_a_fused_optimizer(self)
            elif act == "grow":
                self.add_classes(int(self.model.classes < MOST_CLASSES))
            elif act == "another":
                loss = self.compute(batch, way)
            elif loss in self.losses:
                self.backward(loss, act)

    @rule(batch=batches)
    def remember_for_later(self, batch: Drawn) -> None:
        self.hold(self.batch(batch | {"life": "alive"}))

    @precondition(lambda self: self.held and self.model.classes)
    @rule(index=which, functional=st.booleans(), again=st.booleans())
    def use_what_was_remembered(self, index: int, functional: bool, again: bool) -> None:
        held = self.held[index % len(self.held)]
        self.use(held, functional and not self.model.frozen)
        if not again:
            self.held.remove(held)

    @rule(drawn=batches, value=st.sampled_from(["nan", "inf", "largest"]))
    def micro_batch_that_is_not_finite(self, drawn: Drawn, value: str) -> None:
        batch = self.batch(drawn | {"kind": "frozen"})
        batch.h[:1] = torch.finfo(batch.h.dtype).max if value == "largest" else float(value)
        self.train_on_broken(batch)

    @precondition(lambda self: self.losses)
    @rule(index=which, how=st.sampled_from(PASSES), retain=st.booleans())
    def backward_of_an_earlier_loss(self, index: int, how: str, retain: bool) -> None:
        loss = self.losses[index % len(self.losses)]
        self.backward(loss, how, retain)
        if not retain and loss in self.losses:
            self.losses.remove(loss)

    @precondition(lambda self: len(self.losses) > 1)
    @rule(first=which, second=which)
    def backward_of_two_losses(self, first: int, second: int) -> None:
        both = [self.losses[index % len(self.losses)] for index in (first, second)]
        if both[0] is not both[1] and not any(loss.outgrown or self.is_stale(loss) for loss in both):
            self.backward_of_a_sum(*both)

    # Gradients and steps

    @rule(to_none=st.booleans(), whose=st.sampled_from(["optimizer", "head", "by hand"]))
    def skip(self, to_none: bool, whose: str) -> None:
        self.clear(to_none, whose)

    @precondition(lambda self: self.weight.grad is not None)
    @rule(how=st.sampled_from(["clip", "clip with foreach", "halve", "halve in place"]))
    def change_the_gradient(self, how: str) -> None:
        gradient = self.weight.grad
        assert gradient is not None
        if how == "halve":
            self.weight.grad = gradient * 0.5
        elif how == "halve in place":
            gradient.mul_(0.5)
        else:
            nn.utils.clip_grad_norm_(self.head.parameters(), 0.1, foreach=how == "clip with foreach")
        self.adopt_gradients()

    @rule(lr=st.sampled_from([0.1, 0.03, 0.0, 0.2, 0.007]))
    def schedule(self, lr: float) -> None:
        self.change_learning_rate(lr)

    @precondition(lambda self: self.weight.grad is not None or self.model.frozen)
    @rule()
    def make_a_step(self) -> None:
        self.step()

    @rule(drawn=batches, value=st.sampled_from([1.0, 1.0, float("nan"), float("inf")]))
    def memorize(self, drawn: Drawn, value: float) -> None:
        batch = self.batch(drawn | {"kind": "frozen"})
        batch.h[:1] *= value
        self.head.memorize(batch.h, batch.targets)
        self.model.write(list(zip(batch.h, batch.targets.tolist(), strict=True)))

    # Changes of the head

    @rule(n=st.integers(1, 2))
    def grow(self, n: int) -> None:
        self.add_classes(min(n, MOST_CLASSES - self.model.classes))

    @rule(what=st.sampled_from(["memorizing", "frozen"]))
    def switch(self, what: str) -> None:
        if what == "memorizing":
            self.head.memorizing = self.model.memorizing = not self.head.memorizing
        elif self.weight.grad is None and not (self.losses or self.held or self.model.pending):
            self.model.frozen = not self.model.frozen
            self.weight.requires_grad_(not self.model.frozen)

    @rule(back=st.booleans())
    def take_a_snapshot_or_return_to_it(self, back: bool) -> None:
        if back and self.snapshot is not None:
            self.return_to_snapshot()
        else:
            self.take_snapshot()

    @rule(
        what=st.sampled_from(["dtype", "save and load", "copy", "copy both", "detach", "replace"]),
        dtype=st.sampled_from(DTYPES),
        optimizer=optimizers,
    )
    def go_on_with(self, what: str, dtype: torch.dtype, optimizer: Drawn) -> None:
        """Go on with another dtype, another head or another attachment."""
        if what == "dtype":
            self.change_dtype(dtype)
        elif what == "save and load":
            self.save_and_load(optimizer)
        elif what in ("copy", "copy both"):
            self.copy(optimizer if what == "copy" else None)
        elif what == "detach":
            self.detach()
        else:
            self.make_optimizer(optimizer)
            self.attach(replace=True)

    @precondition(lambda self: not self.model.attached)
    @rule(same=st.booleans(), optimizer=optimizers)
    def attach_again(self, same: bool, optimizer: Drawn) -> None:
        if not same:
            self.make_optimizer(optimizer)
        self.attach()

    @rule(what=st.deferred(lambda: st.sampled_from(list(HARMLESS))))
    def change_nothing(self, what: str) -> None:
        HARMLESS[what](self)


def step_without_gradient(machine: Machine) -> None:
    if machine.weight.grad is None:
        machine.step()


def fail_to_step(machine: Machine) -> None:
    with pytest.raises(UserError):
        machine.optimizer.step(fail)


def skip_inside_a_fused_optimizer(machine: Machine) -> None:
    optimizer: Any = machine.optimizer
    if optimizer.param_groups[0]["fused"]:
        optimizer.found_inf = torch.ones(())
        optimizer.step()
        del optimizer.found_inf


def copy_for_nobody(machine: Machine) -> None:
    head, optimizer = copy.deepcopy((machine.head, machine.optimizer))
    head.memorize(torch.ones(head.num_classes, FEATURES, dtype=head.weight.dtype), torch.arange(head.num_classes))
    optimizer.step()
    optimizer.zero_grad()


def attach_to_another(machine: Machine) -> None:
    other = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    with pytest.raises(ValueError, match="optimizer does not hold"):
        machine.head.attach(other, replace=True)
    if machine.model.attached:
        with pytest.raises(RuntimeError, match="attached"):
            machine.head.attach(machine.optimizer)


def misuse_the_context(machine: Machine) -> None:
    head = machine.head
    h, y = torch.ones(1, FEATURES, dtype=machine.weight.dtype), torch.tensor([-100])
    with machine.may_warn(True), pytest.raises(RuntimeError, match="second time"), head.targets(y):
        head(h) + head(h)
    with pytest.raises(RuntimeError, match="outside of"), head.targets(y):
        head.loss(h, y)
    with pytest.raises(ValueError, match="shape"), head.targets(y.repeat(2)):
        head(h)


def refuse(error: type[Exception], h: Tensor, targets: Tensor) -> Callable[[Machine], None]:
    def try_them(machine: Machine) -> None:
        head = machine.head
        for use in (head.loss, head.remember, head.memorize):
            with pytest.raises(error, match=r"targets|shape"):
                use(h.to(machine.weight.dtype), targets)
        with pytest.raises(ValueError, match="n must be"):
            head.add_classes(0)

    return try_them


TWO = torch.zeros(2, dtype=torch.int64)
HARMLESS: dict[str, Callable[[Machine], None]] = {
    "a step without a gradient": step_without_gradient,
    "a step that fails": fail_to_step,
    "a step skipped inside a fused optimizer": skip_inside_a_fused_optimizer,
    "a copy": copy_for_nobody,
    "wrong optimizers": attach_to_another,
    "contexts that raise": misuse_the_context,
    "a target that is no class": refuse(ValueError, torch.ones(2, FEATURES), TWO + MOST_CLASSES),
    "targets of another shape": refuse(ValueError, torch.ones(1, FEATURES), TWO),
    "other features": refuse(ValueError, torch.ones(2, FEATURES + 1), TWO),
    "targets that are truth values": refuse(TypeError, torch.ones(2, FEATURES), TWO > 0),
}

TestHundredsOfSteps = Machine.TestCase
TestHundredsOfSteps.settings = settings(max_examples=8, stateful_step_count=30)


@pytest.mark.slow
@pytest.mark.timeout(1200)
class TestThousandsOfSteps(Machine.TestCase):
    settings = settings(max_examples=400, stateful_step_count=50)
