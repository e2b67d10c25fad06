"""Shared rows: what is refused, with an error that says what works."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from hebbian_softmax import OnePassAdam, shard_rows
from tests.distributed.pool import Pool
from tests.distributed.training import FEATURES, Model, Setup, Training, make_steps, mesh, mesh_of_rows

SETUP = Setup()
[STEP] = make_steps(SETUP, [2, 2], steps=1)
H, TARGETS = torch.ones(1, FEATURES, dtype=SETUP.dtype), torch.tensor([1])


def shared(setup: Setup = SETUP) -> Model:
    model = setup.model()
    shard_rows(model.head, mesh())
    return model


def attach(model: Model, setup: Setup = SETUP, **options: dist.ProcessGroup) -> None:
    model.head.attach(setup.make_optimizer(model), **options)


def calls_that_come_too_late() -> None:
    late = "call shard_rows first, then fully_shard, make the optimizer, and attach"
    training = Training(SETUP, "alone")
    with pytest.raises(RuntimeError, match=f"attached to an optimizer.*{late}"):
        shard_rows(training.head, mesh())
    model = SETUP.model()
    fully_shard(model, mesh=mesh())
    with pytest.raises(RuntimeError, match=f"sharded already; {late}"):
        shard_rows(model.head, mesh())
    model = SETUP.model()
    wrapper = DistributedDataParallel(model)
    with pytest.raises(RuntimeError, match=f"inside DistributedDataParallel.*{late}"):
        shard_rows(wrapper.module.head, mesh())
    with pytest.raises(RuntimeError, match="shared already"):
        shard_rows(shared().head, mesh())
    model = SETUP.model()
    optimizer = SETUP.make_optimizer(model)
    shard_rows(model.head, mesh())
    with pytest.raises(ValueError, match="make the optimizer from the parameters that are trained now"):
        model.head.attach(optimizer)


def wrong_arguments() -> None:
    head = SETUP.model().head
    with pytest.raises(ValueError, match=r'must have one dimension.*got 2; give a part of it, such as mesh\["rows"\]'):
        shard_rows(head, mesh_of_rows("rows"))
    with pytest.raises(TypeError, match="mesh must be a DeviceMesh, got ProcessGroup"):
        shard_rows(head, dist.group.WORLD)
    with pytest.raises(TypeError, match="head must be a HebbianSoftmax, got Linear"):
        shard_rows(nn.Linear(2, 3), mesh())
    tied = Setup(tied=True).model()
    with pytest.raises(ValueError, match="weight is shared with Embedding"):
        shard_rows(tied.head, mesh())


def objectives_that_look_at_other_rows() -> None:
    for objective in ("svm", "smax"):
        setup = Setup(head={"objective": objective})
        model = shared(setup)
        with pytest.raises(ValueError, match='use objective="l2" or "ip" with FSDP and shard_rows'):
            attach(model, setup)
        with pytest.raises(ValueError, match='use objective="l2" or "ip" with FSDP and shard_rows'):
            model.head.memorize(H, TARGETS)


def growing() -> None:
    model = SETUP.model()
    model.head.add_classes(2)
    shard_rows(model.head, mesh())
    with pytest.raises(RuntimeError, match="grow it before shard_rows, or load its full state dict into a new head"):
        model.head.add_classes(1)
    assert model.head.num_classes == SETUP.classes + 2


def ddp_around_the_head() -> None:
    meshes = init_device_mesh("cpu", (1, 2), mesh_dim_names=("batch", "rows"))
    model = Setup(classes=8).model()
    shard_rows(model.head, meshes["rows"])
    wrapper = DistributedDataParallel(model, device_mesh=meshes["batch"])
    with pytest.raises(ValueError, match=r"device_mesh=.*wrap only the rest of the model in DDP"):
        attach(wrapper.module)


def different_targets_on_ranks_that_share_rows() -> None:
    training = Training(SETUP, "rows")
    x, targets = STEP[0][0]
    training.model(x, (targets + dist.get_rank()) % SETUP.classes).backward()
    with pytest.raises(RuntimeError, match="were given different targets, and must see the same batches"):
        training.optimizer.step()


def different_shapes_on_ranks_that_share_rows() -> None:
    training = Training(SETUP, "rows")
    x, targets = STEP[0][0]
    few = 1 + dist.get_rank()
    with pytest.raises(RuntimeError, match="must be given inputs of the same shape"):
        training.model(x[:few], targets[:few])


def tensors_that_are_not_what_they_seem() -> None:
    model = shared()
    with pytest.raises(TypeError, match=r"h must be a plain tensor.*, got a DTensor"):
        model.head.loss(distribute_tensor(H, mesh(), [Replicate()]), TARGETS)
    model.head.weight = SETUP.model().head.weight
    for call in (lambda: model.head.loss(H, TARGETS), lambda: model.head(H), lambda: attach(model)):
        with pytest.raises(ValueError, match="weight was replaced by a plain tensor after shard_rows"):
            call()


def a_plain_state() -> None:
    state = SETUP.model().state_dict()
    with pytest.raises(ValueError, match="of the loaded state is a plain tensor, and the head's is sharded"):
        shared().load_state_dict(state)


def a_shard_of_fsdp_outside_of_forward() -> None:
    model = Training(SETUP, "rows-root").model
    for call in (lambda: model.head.loss(H, TARGETS), lambda: model.head(H)):
        with pytest.raises(RuntimeError, match=r"head\.weight is sharded here"):
            call()


def a_one_pass_optimizer_with_the_head_and_fsdp() -> None:
    model = Training(SETUP, "rows-root").model
    with pytest.raises(ValueError, match="sharded by FSDP2"):
        OnePassAdam(model.parameters(), head=model.head)


def groups_that_do_not_say_who_shares_the_batch() -> None:
    meshes = mesh_of_rows("rows-root")
    model = SETUP.model()
    shard_rows(model.head, meshes["rows"])
    with pytest.raises(ValueError, match="shared by 2 of 4 ranks; say what the others do"):
        attach(model)
    assert dist.group.WORLD is not None
    for group in (dist.group.WORLD, meshes["rows"].get_group()):
        with pytest.raises(ValueError, match="of which some share the rows of this one"):
            attach(model, process_group=group)
    attach(model, process_group=meshes["batch"].get_group())
    sharded = Training(SETUP, "rows-root")
    with pytest.raises(ValueError, match="but the rows are sharded over"):
        sharded.head.attach(sharded.optimizer, dist.group.WORLD, replace=True)


def fsdp_and_a_rank_without_rows() -> None:
    with pytest.raises(ValueError, match="1 classes leave one of 2 ranks without rows, which fully_shard"):
        Training(Setup(classes=1), "rows-root")


REFUSED = {
    2: [
        calls_that_come_too_late,
        wrong_arguments,
        objectives_that_look_at_other_rows,
        growing,
        ddp_around_the_head,
        different_targets_on_ranks_that_share_rows,
        different_shapes_on_ranks_that_share_rows,
        tensors_that_are_not_what_they_seem,
        a_plain_state,
    ],
    4: [
        a_shard_of_fsdp_outside_of_forward,
        a_one_pass_optimizer_with_the_head_and_fsdp,
        groups_that_do_not_say_who_shares_the_batch,
        fsdp_and_a_rank_without_rows,
    ],
}


def refuse_all(ranks: int) -> None:
    for refused in REFUSED[ranks]:
        refused()


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_refused(pool: Pool, ranks: int) -> None:
    """One run for all: making groups of ranks takes most of the time."""
    pool.run(ranks, refuse_all, ranks)
