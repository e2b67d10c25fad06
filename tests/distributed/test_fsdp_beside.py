"""FSDP2: mixed precision, calls beside the training step, gradients that come by other ways."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy

from tests.closeness import assert_exact
from tests.distributed.pool import Pool
from tests.distributed.sharding import shard, sharded_model
from tests.distributed.test_exchange import Sent, record_exchanges
from tests.distributed.training import (
    FEATURES,
    Model,
    Setup,
    Step,
    assert_same,
    finish_step,
    joined,
    make_steps,
    snapshot,
    train_alone,
    train_on_ranks,
    whole,
)


def write_in_bfloat16(setup: Setup, x: Tensor, targets: Tensor, how: str) -> tuple[Tensor, Tensor, Tensor]:
    """The activations as the head got them, and the row of the one class before and after the write."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = shard(setup.model(), how, mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)  # the rows move by the write alone
    model.head.attach(optimizer)
    hidden = model.hidden
    seen: list[Tensor] = []
    model.hidden = lambda x: seen.append(hidden(x)) or seen[0]  # type: ignore[func-returns-value]
    before = whole(model.head.weight)
    model(x, targets).backward()
    assert model.head.weight.grad.dtype == torch.float32
    optimizer.step()
    return seen[0].detach(), before, whole(model.head.weight)


@pytest.mark.parametrize("how", ["root", "head"])
def test_mixed_precision_writes_the_full_precision_shard(pool: Pool, how: str) -> None:
    setup = Setup(dtype=torch.float32, head={"scale": 1.0, "center": False}, counts=(3,) * 7)
    [[[(x, _)]]] = make_steps(setup, [3], steps=1)
    (h, before, after), other = pool.run(2, write_in_bfloat16, setup, x, torch.tensor([2, 2, 2]), how)
    assert h.dtype == torch.bfloat16
    assert after.dtype == torch.float32
    assert torch.equal(after, other[2])
    assert_exact(after[2], h.double().mean(0) / 3 + before[2].double() * 2 / 3)
    assert not torch.equal(after[2], after[2].bfloat16().float())
    assert torch.equal(after[:2], before[:2])
    assert torch.equal(after[3:], before[3:])


def memorize(setup: Setup, h: Tensor, targets: Tensor, how: str | None, attached: bool) -> dict[str, Tensor]:
    model = setup.model()
    part = slice(None)
    if how is not None:
        shard(model, how)
        part = slice(dist.get_rank(), None, dist.get_world_size())
    if attached:
        model.head.attach(setup.make_optimizer(model.parameters()))
    x, any_targets = torch.ones(1, 4, dtype=setup.dtype), torch.tensor([0])
    for _ in range(2):
        with torch.no_grad():
            model(x, any_targets)  # FSDP leaves the root's gathered parameters in place
        model.head.memorize(h[part], targets[part])
    with torch.no_grad():
        loss = model(x, any_targets)
    return snapshot(model) | {"loss": loss}


@pytest.mark.parametrize("attached", [True, False])
@pytest.mark.parametrize("how", ["root", "head"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_memorize_on_all_ranks(pool: Pool, world_size: int, how: str, attached: bool) -> None:
    setup = Setup()
    h, targets = torch.randn(7, FEATURES, dtype=setup.dtype), torch.tensor([0, 1, 1, 6, 0, 1, 5])
    alone = memorize(setup, h, targets, None, attached)
    assert_same(pool.run(world_size, memorize, setup, h, targets, how, attached), alone)


def attach_after_evaluation(setup: Setup, steps: list[Step]) -> dict[str, Tensor]:
    model = shard(setup.model(), "root")
    optimizer = setup.make_optimizer(model.parameters())
    with torch.no_grad():
        model(*steps[0][0][0])
    model.head.attach(optimizer)
    train_on_ranks(setup, steps, model, optimizer)
    return snapshot(model)


def test_attach_after_a_forward_without_backward(pool: Pool) -> None:
    setup = Setup()
    steps = make_steps(setup, [3, 3])
    assert_same(pool.run(2, attach_after_evaluation, setup, steps), train_alone(setup, steps))


class WithAuxiliaryLoss(Model):
    auxiliary = False

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return self.hidden(x).sum() if self.auxiliary else super().forward(x, targets)


def auxiliary_loss(setup: Setup, x: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """The head's gradients are cleared; then the tied weight gets others, of a loss that the head has no part in."""
    torch.manual_seed(1)
    model = WithAuxiliaryLoss(setup)
    if dist.is_initialized():
        shard(model, "root")
    model.head.attach(optimizer := setup.make_optimizer(model.parameters()))
    model(x, targets).backward()
    optimizer.zero_grad()
    model.auxiliary = True
    model(x, targets).backward()
    assert model.head.weight.grad is not None
    finish_step(setup, model, optimizer)
    return snapshot(model)


def test_gradients_from_elsewhere_do_not_bring_back_what_was_cleared(pool: Pool) -> None:
    setup = Setup(tied=True)
    [[[(x, targets)]]] = make_steps(setup, [4], steps=1)
    alone = auxiliary_loss(setup, x, targets)
    assert alone["head.counts"].sum() == 0
    assert_same(pool.run(2, auxiliary_loss, setup, x, targets), alone)


class OwnLoss(Model):
    """Frozen features, ``remember`` and a product with the weight that the head is not called for."""

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        h = self.hidden(x).detach()
        self.head.remember(h, targets)
        return F.cross_entropy(F.linear(h, self.head.weight), targets, reduction="sum") + self.body.weight.sum() * 0


def train_own_loss(setup: Setup, steps: list[Step]) -> dict[str, Tensor]:
    torch.manual_seed(1)
    model: Any = OwnLoss(setup)
    if dist.is_initialized():
        shard(model, "root")
    model.head.attach(optimizer := setup.make_optimizer(model.parameters()))
    for step in steps:
        x, targets = step[0][dist.get_rank() if dist.is_initialized() else 0]
        (model(x, targets) / targets.numel()).backward()
        finish_step(setup, model, optimizer)
    return snapshot(model)


def test_remember_frozen_features_without_calling_the_head(pool: Pool) -> None:
    setup = Setup()
    steps = make_steps(setup, [3, 3])
    alone = train_own_loss(setup, joined(steps))
    assert alone["head.counts"].sum() == 24
    assert_same(pool.run(2, train_own_loss, setup, steps), alone)


def train_after_dummy_step(setup: Setup, steps: list[Step]) -> dict[str, Tensor]:
    model, optimizer = sharded_model(setup, "head")
    before = model.head.weight.to_local().clone()
    if dist.get_rank() == 0:
        get_optimizer_state_dict(model, optimizer)
        assert torch.equal(model.head.weight.to_local(), before)
        optimizer.state.clear()  # the dummy step counts as one for Adam, and on this rank only
    train_on_ranks(setup, steps, model, optimizer)
    return snapshot(model)


def test_the_dummy_step_of_a_checkpoint_on_one_rank(pool: Pool) -> None:
    setup = Setup(optimizer="adam")
    steps = make_steps(setup, [4, 4])
    assert_same(pool.run(2, train_after_dummy_step, setup, steps), train_alone(setup, steps))


def exchanges_of_training(setup: Setup, steps: list[Step]) -> Sent:
    model, optimizer = sharded_model(setup, "root")
    with pytest.MonkeyPatch.context() as monkeypatch:
        sent = record_exchanges(monkeypatch)
        original = optimizer.step
        monkeypatch.setattr(optimizer, "step", lambda: (sent.clear(), original()))
        train_on_ranks(setup, steps, model, optimizer)
    return sent


def test_only_what_is_written_crosses_the_wire(pool: Pool) -> None:
    """As with DDP, and two numbers: whether gradients were cleared, and the norms of the familiar rows."""
    setup = Setup(classes=1000, counts=(9,) * 100 + (0,) * 900)
    [[batches]] = make_steps(setup, [2, 2], steps=1)
    step: Step = [[(x, torch.tensor([5, 999])) for x, _ in batches]]
    sums = ((1 + 1) * FEATURES + 1) * 8
    expected = [("all_reduce", 8), ("all_gather", 16), ("all_gather", 32), ("all_reduce", sums), ("all_reduce", 8)]
    assert pool.run(2, exchanges_of_training, setup, [step]) == [expected, expected]
