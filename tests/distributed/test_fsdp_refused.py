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

from hebbian_softmax import OnePassAdam, prepare_fsdp
from tests.distributed.pool import Pool
from tests.distributed.training import FEATURES, Model, Setup, Training, make_steps, mesh, wrap

SETUP = Setup()
[STEP] = make_steps(SETUP, [2, 2, 2], steps=1)
X, TARGETS = torch.ones(1, 4, dtype=SETUP.dtype), torch.tensor([1])


def sharded(setup: Setup = SETUP) -> Model:
    model = setup.model()
    wrap(model, "root")
    return model


def hybrid(setup: Setup) -> Model:
    model = setup.model()
    wrap(model, "root", mesh=init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicas", "shards")))
    return model


def replicated(setup: Setup) -> Model:
    model = setup.model()
    model.head.weight = nn.Parameter(distribute_tensor(model.head.weight.detach(), mesh(), [Replicate()]))
    return model


def tensor_parallel(setup: Setup) -> Model:
    """Rows over ranks as with FSDP, but every rank sees the same batch."""
    model = setup.model()
    parallelize_module(model.head, mesh(), ColwiseParallel())
    return model


def refuse(build: Callable[[Setup], Model], match: str, setup: Setup) -> None:
    model = build(setup)
    optimizer = setup.make_optimizer(model)
    with pytest.raises(ValueError, match=match):
        model.head.attach(optimizer)
    with pytest.raises(ValueError, match=match):
        model.head.memorize(torch.ones(1, FEATURES, dtype=setup.dtype), TARGETS)
    assert int(model.head.counts.sum()) == 0


@pytest.mark.parametrize(
    ("build", "match", "setup"),
    [
        (hybrid, r"2-D mesh; the rule works with fully_shard on a 1-D mesh", SETUP),
        (replicated, r"Replicate\(\),\) on a 1-D mesh, not by fully_shard; the rule works with fully_shard", SETUP),
        (tensor_parallel, r"\(Shard\(dim=0\),\) on a 1-D mesh, not by fully_shard; the rule works with", SETUP),
        (sharded, 'use objective="l2" or "ip" with FSDP', Setup(head={"objective": "svm"})),
        (sharded, 'use objective="l2" or "ip" with FSDP', Setup(head={"objective": "smax"})),
    ],
    ids=["hybrid", "replicated", "tensor parallel", "svm", "smax"],
)
def test_other_layouts_and_objectives_that_look_at_other_rows_are_refused(
    pool: Pool, build: Callable[[Setup], Model], match: str, setup: Setup
) -> None:
    pool.run(2, refuse, build, match, setup)


def sharded_columns() -> None:
    model = SETUP.model()
    model.head = type(model.head)(4, SETUP.classes, gamma=0.1, limit=3, dtype=SETUP.dtype)  # columns must divide
    wrap(model, "root", shard_placement_fn=lambda p: Shard(1) if p is model.head.weight else None)
    with pytest.raises(ValueError, match=r"Shard\(dim=1\).*the rule works with fully_shard on a 1-D mesh"):
        model.head.attach(SETUP.make_optimizer(model))


def attaching_before_fully_shard() -> None:
    training = Training(SETUP, "alone")
    fully_shard(training.model, mesh=mesh())
    training.model(*STEP[0][dist.get_rank()]).backward()
    with pytest.raises(RuntimeError, match="tie, load and fully_shard first, make the optimizer, then attach"):
        training.optimizer.step()
    assert training.head.counts.sum() == 0


def an_optimizer_from_before_fully_shard() -> None:
    model = SETUP.model()
    optimizer = SETUP.make_optimizer(model)
    wrap(model, "root")
    with pytest.raises(ValueError, match="make the optimizer from the parameters that are trained now"):
        model.head.attach(optimizer)


def a_one_pass_optimizer_with_the_head() -> None:
    model = sharded()
    with pytest.raises(ValueError, match="sharded by FSDP2"):
        OnePassAdam(model.parameters(), head=model.head)


def a_replaced_shard() -> None:
    training = Training(SETUP, "root")
    state = {name: value.clone() for name, value in training.model.state_dict().items()}
    training.model.load_state_dict(state, assign=True)
    training.backward(STEP, STEP[0])
    with pytest.raises(RuntimeError, match="replaced after head"):
        training.optimizer.step()


def growing_a_sharded_head() -> None:
    for how in ("root", "head"):
        model = SETUP.model()
        model.head.add_classes(2)
        wrap(model, how)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="grow it before fully_shard"):
                model.head.add_classes(1)
            assert model.head.num_classes == SETUP.classes + 2
            with torch.no_grad():
                model(X, TARGETS)  # may leave the rows gathered


def a_group_other_than_that_of_the_shards() -> None:
    group = dist.new_group([0, 1])
    model = sharded()
    optimizer = SETUP.make_optimizer(model)
    if dist.get_rank() < 2:
        with pytest.raises(ValueError, match=r"ranks \[0, 1\], but the rows are sharded over \[0, 1, 2\]"):
            model.head.attach(optimizer, process_group=group)
    assert dist.group.WORLD is not None
    model.head.attach(optimizer, process_group=dist.group.WORLD)


def prepare_fsdp_before_fully_shard() -> None:
    with pytest.raises(TypeError, match="prepare_fsdp needs a head that fully_shard"):
        prepare_fsdp(SETUP.model().head)


def a_head_sharded_apart_without_prepare_fsdp() -> None:
    model = SETUP.model()
    fully_shard(model.head, mesh=mesh())
    fully_shard(model, mesh=mesh())
    with pytest.raises(RuntimeError, match=r"after fully_shard\(head\) call prepare_fsdp\(head\)"):
        model(X, TARGETS)


@pytest.mark.parametrize(
    ("ranks", "refused"),
    [
        (2, sharded_columns),
        (2, attaching_before_fully_shard),
        (2, an_optimizer_from_before_fully_shard),
        (2, a_one_pass_optimizer_with_the_head),
        (2, a_replaced_shard),
        (2, growing_a_sharded_head),
        (3, a_group_other_than_that_of_the_shards),
        (2, prepare_fsdp_before_fully_shard),
        (2, a_head_sharded_apart_without_prepare_fsdp),
    ],
)
def test_refused(pool: Pool, ranks: int, refused: Callable[[], None]) -> None:
    pool.run(ranks, refused)
