"""The data that ranks exchange, and with whom; and calls outside of the training step on ranks of one batch."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.nn.parallel import DistributedDataParallel

from hebbian_softmax import HebbianSoftmax
from tests.distributed.pool import Pool
from tests.distributed.training import (
    FEATURES,
    Setup,
    Step,
    assert_same,
    make_steps,
    snapshot,
    train_alone,
    train_on_ranks,
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


def exchanges_of_training(setup: Setup, steps: list[Step]) -> Sent:
    ddp = DistributedDataParallel(setup.model())
    optimizer = setup.make_optimizer(ddp.parameters())
    ddp.module.head.attach(optimizer)
    with pytest.MonkeyPatch.context() as monkeypatch:
        sent = record_exchanges(monkeypatch)
        train_on_ranks(setup, steps, ddp, optimizer)
    return sent


@pytest.mark.parametrize("scale", [1.0, "match"])
def test_only_what_is_written_crosses_the_wire(pool: Pool, scale: float | str) -> None:
    """The index and count of each class seen, the sum of each class with λ > 0, one more vector and one number."""
    setup = Setup(classes=1000, head={"scale": scale}, counts=(9,) * 100 + (0,) * 900)
    [[batches]] = make_steps(setup, [4, 2], steps=1)
    targets = [torch.tensor([100, 100, 5, 999]), torch.tensor([5, 7])]
    step: Step = [[(x, own) for (x, _), own in zip(batches, targets, strict=True)]]
    most_seen, written = 3, 2  # the classes of rank 0; 100 and 999, for 5 and 7 are past the limit
    expected = [
        ("all_gather", 2 * 8),
        ("all_gather", most_seen * 2 * 8),
        ("all_reduce", ((written + 1) * FEATURES + 1) * 8),
    ]
    assert pool.run(2, exchanges_of_training, setup, [step]) == [expected, expected]


def test_where_nobody_saw_anything_one_exchange_says_so(pool: Pool) -> None:
    setup = Setup()
    steps = make_steps(setup, [2, 2], steps=1, targets=lambda rank, drawn: drawn * 0 - 100)
    assert pool.run(2, exchanges_of_training, setup, steps) == [[("all_gather", 2 * 8)]] * 2


def train_in_group(setup: Setup, steps: list[Step], members: list[int]) -> dict[str, Tensor] | None:
    group = dist.new_group(members)
    others = dist.new_group([rank for rank in range(dist.get_world_size()) if rank not in members])
    if dist.get_rank() not in members:
        head = setup.model().head
        with pytest.raises(ValueError, match=f"process_group does not have this rank, {dist.get_rank()}"):
            head.attach(setup.make_optimizer(head.parameters()), process_group=group)
        # A group of one exchanges nothing and waits for nobody.
        head.attach(optimizer := setup.make_optimizer(head.parameters()), process_group=others)
        head.loss(torch.ones(1, FEATURES, dtype=setup.dtype), torch.tensor([3])).backward()
        optimizer.step()
        assert head.counts.tolist() == [0, 0, 0, 1, 0, 0, 0]
        return None
    ddp = DistributedDataParallel(setup.model(), process_group=group)
    optimizer = setup.make_optimizer(ddp.parameters())
    ddp.module.head.attach(optimizer, process_group=group)
    own = members.index(dist.get_rank())
    for step in steps:
        x, targets = step[0][own]
        (ddp(x, targets) / targets.numel()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return snapshot(ddp.module)


@pytest.mark.parametrize("members", [[0, 1], [0, 2]], ids=str)
def test_an_explicit_group_exchanges_only_within(pool: Pool, members: list[int]) -> None:
    setup = Setup()
    steps = make_steps(setup, [4, 4])
    results = pool.run(3, train_in_group, setup, steps, members)
    assert_same([results[rank] for rank in members], train_alone(setup, steps))


def train_after_dummy_step(setup: Setup, steps: list[Step]) -> dict[str, Tensor]:
    ddp = DistributedDataParallel(setup.model())
    optimizer = setup.make_optimizer(ddp.parameters())
    ddp.module.head.attach(optimizer)
    before = snapshot(ddp.module)
    if dist.get_rank() == 0:
        assert get_optimizer_state_dict(ddp.module, optimizer)["state"]
        assert all(torch.equal(value, before[name]) for name, value in snapshot(ddp.module).items())
        optimizer.state.clear()  # the dummy step counts as one for Adam, and on this rank only
    train_on_ranks(setup, steps, ddp, optimizer)
    return snapshot(ddp.module)


def test_the_dummy_step_of_a_checkpoint_on_one_rank(pool: Pool) -> None:
    """It steps the optimizer once, which must cause no write and no exchange that other ranks would have to join."""
    setup = Setup(optimizer="adam")
    steps = make_steps(setup, [4, 4])
    assert_same(pool.run(2, train_after_dummy_step, setup, steps), train_alone(setup, steps))


def memorize(setup: Setup, h: Tensor, targets: Tensor) -> dict[str, Tensor]:
    model = setup.model()
    part = slice(None)
    if dist.is_initialized():
        model = DistributedDataParallel(model).module
        model.head.attach(setup.make_optimizer(model.parameters()))
        part = slice(dist.get_rank(), None, dist.get_world_size())
    for _ in range(2):
        model.head.memorize(h[part], targets[part])
    return snapshot(model)


@pytest.mark.parametrize("world_size", [2, 3])
def test_memorize_on_all_ranks(pool: Pool, world_size: int) -> None:
    setup = Setup()
    h, targets = torch.randn(7, FEATURES, dtype=setup.dtype), torch.tensor([0, 1, 1, 6, 0, 1, 5])
    h[3, 2] = torch.nan
    alone = memorize(setup, h, targets)
    assert alone["head.counts"].tolist() == [4, 6, 0, 0, 0, 2, 0]
    assert alone["head.nonfinite_count"] == 2
    assert_same(pool.run(world_size, memorize, setup, h, targets), alone)


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
