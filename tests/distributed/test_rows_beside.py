"""Shared rows beside the training step: exchanges, copies, other libraries' parts, and a batch shared by hand."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from hebbian_softmax import OnePassAdam, linear_cross_entropy, shard_rows
from hebbian_softmax._triton import kernels_on_cpu, works_on
from tests.closeness import assert_exact
from tests.distributed.pool import Pool
from tests.distributed.test_beside import exchanges_of_training, write_in_bfloat16
from tests.distributed.training import (
    FEATURES,
    Setup,
    Step,
    Training,
    assert_same,
    check,
    make_steps,
    mesh,
    mesh_of_rows,
    snapshot,
    train,
    whole,
)
from tests.heads import early_head
from tests.interpreter import interpreted

slow = pytest.mark.slow

NUMBER, FLAG = 8, 16
"""Bytes of a number, and of the two numbers by which ranks find out whether they have seen the same."""


@pytest.mark.parametrize("how", ["rows", pytest.param("rows-root", marks=slow)])
def test_only_what_is_written_crosses_the_wire(pool: Pool, how: str) -> None:
    """Among row ranks nothing grows with the batch; batch ranks exchange what they exchange without shared rows."""
    setup = Setup(classes=1000, counts=(9,) * 100 + (0,) * 900)
    targets = [torch.tensor([100, 100, 5, 999]), torch.tensor([5, 7])]
    sizes = [4] if how == "rows" else [4, 2]
    steps = make_steps(setup, sizes, steps=1, targets=lambda rank, drawn: targets[rank])
    expected = [("all_reduce", NUMBER), ("all_reduce", FLAG), ("all_reduce", NUMBER)]
    if how == "rows-root":
        most_seen, written = 3, 2
        expected = [
            *[("all_reduce", NUMBER)] * 2,
            ("all_gather", 2 * NUMBER),
            ("all_gather", most_seen * 2 * NUMBER),
            ("all_reduce", FLAG),
            ("all_reduce", ((written + 1) * FEATURES + 1) * NUMBER),
            *[("all_reduce", NUMBER)] * 2,
        ]
    ranks = 2 * len(sizes)
    assert pool.run(ranks, exchanges_of_training, setup, steps, how) == [expected] * ranks


def train_by_hand(setup: Setup, steps: list[Step]) -> dict[str, Tensor]:
    """Average the gradients of the ranks that share the batch, without FSDP or DDP."""
    meshes = mesh_of_rows("rows-root")
    group, rank = meshes["batch"].get_group(), meshes["batch"].get_local_rank()
    model = setup.model()
    shard_rows(model.head, meshes["rows"])
    optimizer = setup.make_optimizer(model)
    model.head.attach(optimizer, process_group=group)
    for step in steps:
        total = sum(len(targets) for _x, targets in step[0])
        (model(*step[0][rank]) / total).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            local = parameter.grad.to_local() if parameter is model.head.weight else parameter.grad
            dist.all_reduce(local, group=group)
        optimizer.step()
        optimizer.zero_grad()
    return snapshot(model)


@slow
def test_a_batch_that_is_shared_by_hand(pool: Pool) -> None:
    setup = Setup(optimizer="adam")
    steps = make_steps(setup, [3, 4])
    assert_same(pool.run(4, train_by_hand, setup, steps), train(setup, steps, "alone"))


def train_with_scaler(setup: Setup, steps: list[Step], how: str) -> dict[str, Tensor]:
    """In the first step one rank finds an infinity in the gradient of its rows, and all ranks skip the step."""
    training = Training(setup, how)
    if how == "alone":
        return training.run(steps[1:])
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    warnings.filterwarnings("ignore", "Found a non-scalar tensor with numel=1")  # of torch, about the scale
    scaler = ShardedGradScaler("cpu", init_scale=16.0)
    inner, training.called = training.called, lambda *batch: scaler.scale(inner(*batch))
    for number, step in enumerate(steps):
        training.backward(step, step[0])
        if number == 0 and dist.get_rank() == 1:
            training.head.weight.grad.to_local()[0, 0] = torch.inf
        scaler.step(training.optimizer)
        scaler.update()
        training.optimizer.zero_grad()
    return snapshot(training.model)


@slow
def test_a_step_that_a_scaler_skips_on_all_ranks(pool: Pool) -> None:
    alone = check(pool, "rows-root", Setup(), [4, 4], train_with_scaler, row_ranks=2)
    assert alone["head.counts"].sum() == 3 * 8


def first_ranks_values() -> list[Tensor]:
    torch.manual_seed(dist.get_rank())
    head = early_head(FEATURES, 5, gamma=0.1, limit=9, bias=True)
    head.counts.fill_(dist.get_rank() + 3)
    before = [tensor.clone() for tensor in head.state_dict().values()]
    shard_rows(head, mesh())
    found = [whole(tensor) for tensor in head.state_dict().values()]
    if dist.get_rank() == 0:
        assert all(map(torch.equal, found, before))
    return found


def test_all_ranks_start_with_the_values_of_the_first(pool: Pool) -> None:
    first, second = pool.run(2, first_ranks_values)
    assert all(map(torch.equal, first, second))


def built_on_meta(state: dict[str, Tensor]) -> dict[str, Tensor]:
    head = early_head(FEATURES, 5, gamma=0.1, limit=9, bias=True, device="meta")
    shard_rows(head, mesh())
    head.to_empty(device="cpu")
    with pytest.raises(RuntimeError, match="counts were never filled"):
        head.memorize(torch.ones(1, FEATURES), torch.tensor([1]))
    set_model_state_dict(head, state, options=StateDictOptions(full_state_dict=True))
    assert head.weight.to_local().shape[0] < 5
    return snapshot(head)


def test_a_head_that_no_rank_holds_as_a_whole(pool: Pool) -> None:
    head = early_head(FEATURES, 5, gamma=0.1, limit=9, bias=True)
    head.memorize(torch.randn(3, FEATURES), torch.tensor([0, 4, 4]))
    state = head.state_dict()
    assert_same(pool.run(2, built_on_meta, state), state)


def copied(setup: Setup, steps: list[Step], how: str) -> dict[str, Tensor]:
    training = Training(setup, how)
    training.run(steps[:1])
    model = copy.deepcopy(training.model)
    optimizer = setup.make_optimizer(model)
    model.head.attach(optimizer)
    training.run(steps[1:])  # of the original
    model(*training.own(steps[1][0])).backward()
    optimizer.step()
    return snapshot(model)


@slow
def test_a_copy_of_the_model_shares_rows_too(pool: Pool) -> None:
    check(pool, "rows", Setup(), [4], copied, row_ranks=2, steps=2)


def losses_in_bfloat16() -> list[Tensor]:
    """The optimizer keeps a copy of the rows in bfloat16, which must follow steps, writes and loading."""
    model = Setup(dtype=torch.float32).model()
    head = model.head
    shard_rows(head, mesh())
    optimizer = OnePassAdam(head.parameters(), lr=0.1, head=head)
    h, targets = torch.randn(4, FEATURES, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 3, 6, 6])
    found = []
    for number in range(3):
        loss = head.loss(h.bfloat16(), targets)
        loss.backward()
        rounded = whole(head.weight).bfloat16()
        found.append(loss.detach() - linear_cross_entropy(h.bfloat16(), rounded, targets, impl="chunked"))
        if number == 0:
            optimizer.step()
        else:
            head.load_state_dict({**head.state_dict(), "weight": head.weight.detach() + 0.5})
        optimizer.zero_grad()
    assert head.low_precision is not None
    return found


def test_the_copy_in_bfloat16_follows_the_rows(pool: Pool) -> None:
    for found in pool.run(2, losses_in_bfloat16):
        torch.testing.assert_close(torch.stack(found), torch.zeros(3), rtol=0, atol=1e-5)


def train_with_kernels(setup: Setup, steps: list[Step], how: str) -> dict[str, Tensor]:
    training = Training(setup, how)
    if how == "alone":
        return training.run(steps)
    assert isinstance(training.optimizer, OnePassAdam)
    training.optimizer.large = 1
    with kernels_on_cpu():
        assert works_on(training.head.weight.detach().to_local())
        return training.run(steps)


@interpreted
@slow
@pytest.mark.parametrize(("how", "sizes"), [("rows", [4]), ("rows-root", [3, 2])])
def test_kernels_step_the_rows_of_each_rank(pool: Pool, how: str, sizes: list[int]) -> None:
    setup = Setup(optimizer="one-pass", head={"bias": True}, dtype=torch.float32)
    check(pool, how, setup, sizes, train_with_kernels, row_ranks=2)


@slow
def test_mixed_precision_writes_the_full_precision_shard(pool: Pool) -> None:
    setup = Setup(dtype=torch.float32, head={"write": "literal"}, counts=(3,) * 7)
    [[[(x, _)]]] = make_steps(setup, [3], steps=1)
    (h, before, after), *others = pool.run(4, write_in_bfloat16, setup, x, torch.tensor([2, 2, 2]), "rows-root")
    assert h.dtype == torch.bfloat16
    assert all(torch.equal(after, other[2]) for other in others)
    assert_exact(after[2], h.double().mean(0) / 3 + before[2].double() * 2 / 3)
    assert torch.equal(after[3:], before[3:])


def train_compiled(setup: Setup, steps: list[Step], how: str) -> dict[str, Tensor]:
    training = Training(setup, how)
    if how != "alone":
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")  # of the compiler, which looks at it
        training.called = torch.compile(training.model, backend="aot_eager")
    return training.run(steps)


@slow
def test_a_compiled_model(pool: Pool) -> None:
    check(pool, "rows", Setup(head={"bias": True}), [4], train_compiled, row_ranks=2)
