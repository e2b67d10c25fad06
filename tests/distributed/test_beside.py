"""Data that ranks exchange, and with whom; mixed precision; calls beside the training step."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from hebbian_softmax import HebbianSoftmax
from tests.closeness import assert_exact
from tests.distributed.pool import Pool
from tests.distributed.training import (
    FEATURES,
    Batch,
    Setup,
    Step,
    Training,
    assert_same,
    check,
    make_steps,
    snapshot,
    train,
    whole,
)

Sent = list[tuple[str, int]]
"""The name of each collective and the bytes that this process gave to it."""


def record_exchanges(monkeypatch: pytest.MonkeyPatch) -> Sent:
    """DDP and FSDP make their own exchanges by other ways than these functions."""
    sent: Sent = []

    def wrap(name: str, given: str) -> None:
        original = getattr(dist, name)
        signature = inspect.signature(original)

        def recorded(*args: Any, **kwargs: Any) -> Any:
            tensor = signature.bind(*args, **kwargs).arguments[given]
            sent.append((name, tensor.numel() * tensor.element_size()))
            return original(*args, **kwargs)

        monkeypatch.setattr(dist, name, recorded)

    for name in ("all_reduce", "broadcast", "all_gather"):
        wrap(name, "tensor")
    wrap("all_gather_into_tensor", "input_tensor")
    for name in ("reduce_scatter_tensor", "all_to_all_single"):
        wrap(name, "input")
    return sent


def exchanges_of_training(setup: Setup, steps: list[Step], how: str) -> Sent:
    training = Training(setup, how)
    with pytest.MonkeyPatch.context() as monkeypatch:
        sent = record_exchanges(monkeypatch)
        if how != "ddp":
            original = training.optimizer.step
            monkeypatch.setattr(training.optimizer, "step", lambda: (sent.clear(), original()))
        training.run(steps)
        return sent


@pytest.mark.parametrize(("how", "scale"), [("ddp", 1.0), ("ddp", "match"), ("root", "match")])
def test_only_what_is_written_crosses_the_wire(pool: Pool, how: str, scale: float | str) -> None:
    """The index and count of each class seen, the sum of each class with λ > 0, one more vector and one number.

    FSDP sends two numbers more: whether gradients were cleared, and the norms of the familiar rows.
    """
    setup = Setup(classes=1000, head={"scale": scale}, counts=(9,) * 100 + (0,) * 900)
    targets = [torch.tensor([100, 100, 5, 999]), torch.tensor([5, 7])]
    steps = make_steps(setup, [4, 2], steps=1, targets=lambda rank, drawn: targets[rank])
    most_seen, written = 3, 2  # the classes of rank 0; 100 and 999, for 5 and 7 are past the limit
    expected = [
        ("all_gather", 2 * 8),
        ("all_gather", most_seen * 2 * 8),
        ("all_reduce", ((written + 1) * FEATURES + 1) * 8),
    ]
    if how == "root":
        expected = [("all_reduce", 8), *expected, ("all_reduce", 8)]
    assert pool.run(2, exchanges_of_training, setup, steps, how) == [expected, expected]


def test_where_nobody_saw_anything_one_exchange_says_so(pool: Pool) -> None:
    setup = Setup()
    steps = make_steps(setup, [2, 2], steps=1, targets=lambda rank, drawn: drawn * 0 - 100)
    assert pool.run(2, exchanges_of_training, setup, steps, "ddp") == [[("all_gather", 2 * 8)]] * 2


def train_in_group(setup: Setup, steps: list[Step], members: list[int]) -> dict[str, Tensor] | None:
    group = dist.new_group(members)
    others = dist.new_group([rank for rank in range(dist.get_world_size()) if rank not in members])
    if dist.get_rank() in members:
        return train(setup, steps, "ddp", process_group=group)
    model = setup.model()
    optimizer = setup.make_optimizer(model)
    with pytest.raises(ValueError, match=f"process_group does not have this rank, {dist.get_rank()}"):
        model.head.attach(optimizer, process_group=group)
    model.head.attach(optimizer, process_group=others)  # a group of one exchanges nothing and waits for nobody
    model.head.loss(torch.ones(1, FEATURES, dtype=setup.dtype), torch.tensor([3])).backward()
    optimizer.step()
    assert model.head.counts.tolist() == [0, 0, 0, 1, 0, 0, 0]
    return None


@pytest.mark.parametrize("members", [[0, 1], [0, 2]], ids=str)
def test_an_explicit_group_exchanges_only_within(pool: Pool, members: list[int]) -> None:
    setup = Setup()
    steps = make_steps(setup, [4, 4])
    results = pool.run(3, train_in_group, setup, steps, members)
    assert_same([results[rank] for rank in members], train(setup, steps, "alone"))


def local_state(model: nn.Module) -> list[Tensor]:
    state = model.state_dict().values()
    return [value.to_local().clone() if isinstance(value, DTensor) else value.clone() for value in state]


def train_after_dummy_step(setup: Setup, steps: list[Step], how: str) -> dict[str, Tensor]:
    training = Training(setup, how)
    if how != "alone" and training.rank == 0:
        before = local_state(training.model)
        assert get_optimizer_state_dict(training.model, training.optimizer)["state"]
        assert all(map(torch.equal, local_state(training.model), before))
        training.optimizer.state.clear()  # the dummy step counts as one for Adam, and on this rank only
    return training.run(steps)


@pytest.mark.parametrize("how", ["ddp", "head"])
def test_the_dummy_step_of_a_checkpoint_on_one_rank(pool: Pool, how: str) -> None:
    """It steps the optimizer once, which must cause no write and no exchange that other ranks would have to join."""
    check(pool, how, Setup(optimizer="adam"), [4, 4], train_after_dummy_step)


def raising(*args: Tensor) -> Tensor:
    raise ArithmeticError


def memorize_after_a_fault(setup: Setup, batches: list[Batch], how: str, name: str) -> dict[str, Tensor]:
    """A rate or an objective is the same on every rank, so it raises on every rank."""
    training = Training(setup, how)
    right = getattr(training.head, name)
    for wrong in (right, raising, right):
        setattr(training.head, name, wrong)
        with nullcontext() if wrong is right else pytest.raises(ArithmeticError):
            training.head.memorize(*training.own(batches))
    return snapshot(training.model)


@pytest.mark.parametrize(("how", "name"), [("ddp", "rate"), ("ddp", "objective"), ("head", "rate")])
def test_a_write_that_raises_on_all_ranks_changes_none(pool: Pool, how: str, name: str) -> None:
    setup = Setup()
    batches = [(torch.randn(n, FEATURES, dtype=setup.dtype), torch.randint(7, (n,))) for n in (3, 5)]
    alone = memorize_after_a_fault(setup, batches, "alone", name)
    assert int(alone["head.counts"].sum()) == 16
    assert_same(pool.run(2, memorize_after_a_fault, setup, batches, how, name), alone)


def memorize(setup: Setup, batches: list[Batch], how: str, attached: bool) -> dict[str, Tensor]:
    training = Training(setup, how)
    if not attached:
        training.head.attachment.remove()
    x, any_targets = torch.ones(1, 4, dtype=setup.dtype), torch.tensor([0])
    with torch.no_grad():
        for _ in range(2):
            training.called(x, any_targets)  # FSDP leaves the root's gathered parameters in place
            training.head.memorize(*training.own(batches))
        loss = training.called(x, any_targets)
    return snapshot(training.model) | {"loss": loss}


@pytest.mark.parametrize(
    ("how", "attached"), [("ddp", True), ("root", True), ("root", False), ("head", True), ("head", False)]
)
@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_memorize_on_all_ranks(pool: Pool, world_size: int, how: str, attached: bool) -> None:
    setup = Setup()
    h, targets = torch.randn(7, FEATURES, dtype=setup.dtype), torch.tensor([0, 1, 1, 6, 0, 1, 5])
    h[3, 2] = torch.nan
    batches = [(h[rank::world_size], targets[rank::world_size]) for rank in range(world_size)]
    alone = memorize(setup, batches, "alone", attached)
    assert alone["head.counts"].tolist() == [4, 6, 0, 0, 0, 2, 0]
    assert alone["head.nonfinite_count"] == 2
    assert_same(pool.run(world_size, memorize, setup, batches, how, attached), alone)


class WithoutHead(nn.Module):
    """Holds the head's weight as that of an embedding."""

    def __init__(self, head: HebbianSoftmax) -> None:
        super().__init__()
        self.embedding = nn.Embedding(head.num_classes, FEATURES, dtype=head.weight.dtype)
        self.embedding.weight = head.weight


def grow(setup: Setup, head_inside: bool) -> list[int]:
    model = setup.model()
    model.head.add_classes(2)  # before wrapping it may grow
    ddp = DistributedDataParallel(model if head_inside else WithoutHead(model.head))
    with pytest.raises(RuntimeError, match="grow it before wrapping"):
        model.head.add_classes(1)
    assert model.head.num_classes == setup.classes + 2
    del ddp
    return list(model.head.weight.shape)


@pytest.mark.parametrize("head_inside", [True, False])
def test_a_wrapped_head_cannot_grow(pool: Pool, head_inside: bool) -> None:
    assert pool.run(2, grow, Setup(), head_inside) == [[9, FEATURES]] * 2


def attach_after_evaluation(setup: Setup, steps: list[Step], how: str) -> dict[str, Tensor]:
    training = Training(setup, how)
    training.head.attachment.remove()
    with torch.no_grad():
        training.called(*training.own(steps[0][0]))
    training.head.attach(training.optimizer)
    return training.run(steps)


def test_attach_after_a_forward_without_backward(pool: Pool) -> None:
    check(pool, "root", Setup(), [3, 3], attach_after_evaluation)


def write_in_bfloat16(setup: Setup, x: Tensor, targets: Tensor, how: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return the activations as the head got them, and the rows before and after the write."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    training = Training(setup, how, mp_policy=policy)
    training.optimizer.param_groups[0]["lr"] = 0.0  # the rows move by the write alone
    model, hidden = training.model, training.model.hidden
    seen: list[Tensor] = []
    model.hidden = lambda x: seen.append(hidden(x)) or seen[0]  # type: ignore[func-returns-value]
    before = whole(model.head.weight)
    model(x, targets).backward()
    assert model.head.weight.grad.dtype == torch.float32
    training.optimizer.step()
    return seen[0].detach(), before, whole(model.head.weight)


@pytest.mark.parametrize("how", ["root", "head"])
def test_mixed_precision_writes_the_full_precision_shard(pool: Pool, how: str) -> None:
    setup = Setup(dtype=torch.float32, head={"write": "literal"}, counts=(3,) * 7)
    [[[(x, _)]]] = make_steps(setup, [3], steps=1)
    (h, before, after), other = pool.run(2, write_in_bfloat16, setup, x, torch.tensor([2, 2, 2]), how)
    assert h.dtype == torch.bfloat16
    assert after.dtype == torch.float32
    assert torch.equal(after, other[2])
    assert_exact(after[2], h.double().mean(0) / 3 + before[2].double() * 2 / 3)
    assert not torch.equal(after[2], after[2].bfloat16().float())
    assert torch.equal(after[:2], before[:2])
    assert torch.equal(after[3:], before[3:])
