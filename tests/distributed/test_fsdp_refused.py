"""FSDP2: what is refused, with an error that says what works."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from hebbian_softmax import prepare_fsdp
from tests.distributed.pool import Pool
from tests.distributed.sharding import mesh, shard, sharded_model
from tests.distributed.training import FEATURES, Model, Setup, Step, make_steps


def refuse(build: Callable[[Setup], Model], error: type[Exception], match: str, setup: Setup) -> None:
    model = build(setup)
    optimizer = setup.make_optimizer(model.parameters())
    with pytest.raises(error, match=match):
        model.head.attach(optimizer)
    with pytest.raises(error, match=match):
        model.head.memorize(torch.ones(1, FEATURES, dtype=setup.dtype), torch.tensor([1]))
    assert int(model.head.counts.sum()) == 0


def hybrid(setup: Setup) -> Model:
    return shard(setup.model(), "root", mesh=init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicas", "shards")))


def by_columns(setup: Setup) -> Model:
    model = setup.model()
    model.head = type(model.head)(4, setup.classes, gamma=0.1, limit=3, dtype=setup.dtype)  # columns must divide
    return shard(model, "root", shard_placement_fn=lambda p: Shard(1) if p is model.head.weight else None)


def replicated(setup: Setup) -> Model:
    model = setup.model()
    model.head.weight = nn.Parameter(distribute_tensor(model.head.weight.detach(), mesh(), [Replicate()]))
    return model


def tensor_parallel(setup: Setup) -> Model:
    """Rows over ranks as with FSDP, but every rank sees the same batch."""
    model = setup.model()
    parallelize_module(model.head, mesh(), ColwiseParallel())
    return model


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (hybrid, r"2-D mesh; the rule works with fully_shard on a 1-D mesh"),
        (replicated, r"Replicate\(\),\) on a 1-D mesh, not by fully_shard; the rule works with fully_shard"),
        (tensor_parallel, r"\(Shard\(dim=0\),\) on a 1-D mesh, not by fully_shard; the rule works with"),
    ],
)
def test_other_layouts_are_refused(pool: Pool, build: Callable[[Setup], Model], match: str) -> None:
    pool.run(2, refuse, build, ValueError, match, Setup())


def refuse_columns() -> None:
    model = by_columns(Setup())
    with pytest.raises(ValueError, match=r"Shard\(dim=1\).*the rule works with fully_shard on a 1-D mesh"):
        model.head.attach(torch.optim.SGD(model.parameters()))


def test_sharded_columns_are_refused(pool: Pool) -> None:
    pool.run(2, refuse_columns)


@pytest.mark.parametrize("objective", ["svm", "smax"])
def test_objectives_that_look_at_other_rows_are_refused(pool: Pool, objective: str) -> None:
    match = 'use objective="l2" or "ip" with FSDP'
    pool.run(2, refuse, root, ValueError, match, Setup(head={"objective": objective}))


def root(setup: Setup) -> Model:
    return shard(setup.model(), "root")


def attach_first(setup: Setup, step: Step) -> None:
    model = setup.model()
    optimizer = setup.make_optimizer(model.parameters())
    model.head.attach(optimizer)
    fully_shard(model, mesh=mesh())
    model(*step[0][dist.get_rank()]).backward()
    with pytest.raises(RuntimeError, match="tie, load and fully_shard first, make the optimizer, then attach"):
        optimizer.step()
    assert model.head.counts.sum() == 0


def test_attach_comes_after_fully_shard(pool: Pool) -> None:
    setup = Setup()
    pool.run(2, attach_first, setup, make_steps(setup, [2, 2], steps=1)[0])


def stale_optimizer(setup: Setup) -> None:
    model = setup.model()
    optimizer = setup.make_optimizer(model.parameters())
    shard(model, "root")
    with pytest.raises(ValueError, match="make the optimizer from the parameters that are trained now"):
        model.head.attach(optimizer)


def test_the_optimizer_comes_after_fully_shard(pool: Pool) -> None:
    pool.run(2, stale_optimizer, Setup())


def replaced_shard(setup: Setup, step: Step) -> None:
    model, optimizer = sharded_model(setup, "root")
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    model(*step[0][dist.get_rank()]).backward()
    with pytest.raises(RuntimeError, match="replaced after head"):
        optimizer.step()


def test_a_replaced_shard_is_noticed(pool: Pool) -> None:
    setup = Setup()
    pool.run(2, replaced_shard, setup, make_steps(setup, [2, 2], steps=1)[0])


def grow(setup: Setup, how: str) -> None:
    model = setup.model()
    model.head.add_classes(2)
    shard(model, how)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="grow it before fully_shard"):
            model.head.add_classes(1)
        assert model.head.num_classes == setup.classes + 2
        with torch.no_grad():
            model(torch.ones(1, 4, dtype=setup.dtype), torch.tensor([1]))  # may leave the rows gathered


@pytest.mark.parametrize("how", ["root", "head"])
def test_a_sharded_head_cannot_grow(pool: Pool, how: str) -> None:
    pool.run(2, grow, Setup(), how)


def other_group(setup: Setup) -> None:
    group = dist.new_group([0, 1])
    model = shard(setup.model(), "root")
    optimizer = setup.make_optimizer(model.parameters())
    if dist.get_rank() < 2:
        with pytest.raises(ValueError, match=r"ranks \[0, 1\], but the rows are sharded over \[0, 1, 2\]"):
            model.head.attach(optimizer, process_group=group)
    assert dist.group.WORLD is not None
    model.head.attach(optimizer, process_group=dist.group.WORLD)


def test_a_group_other_than_that_of_the_shards_is_refused(pool: Pool) -> None:
    pool.run(3, other_group, Setup())


def prepare_too_early(setup: Setup) -> None:
    model = setup.model()
    with pytest.raises(TypeError, match="prepare_fsdp needs a head that fully_shard"):
        prepare_fsdp(model.head)


def test_prepare_fsdp_comes_after_fully_shard(pool: Pool) -> None:
    pool.run(2, prepare_too_early, Setup())


def unprepared(setup: Setup) -> None:
    model = setup.model()
    fully_shard(model.head, mesh=mesh())
    fully_shard(model, mesh=mesh())
    with pytest.raises(RuntimeError, match=r"after fully_shard\(head\) call prepare_fsdp\(head\)"):
        model(torch.ones(1, 4, dtype=setup.dtype), torch.tensor([1]))


def test_a_head_sharded_apart_needs_prepare_fsdp(pool: Pool) -> None:
    pool.run(2, unprepared, Setup())
