"""Models sharded by FSDP2 in the ways that the documentation names."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from hebbian_softmax import prepare_fsdp
from tests.distributed.training import Model, Setup, Step, snapshot, train_on_ranks


def mesh(device: str = "cpu") -> DeviceMesh:
    return init_device_mesh(device, (dist.get_world_size(),))


def shard(model: Model, how: str, **options: Any) -> Model:
    """``root``: the model as a whole. ``head``: the head apart, then the rest."""
    options.setdefault("mesh", mesh())
    if how == "head":
        fully_shard(model.head, **options)
        prepare_fsdp(model.head)
    fully_shard(model, **options)
    return model


def sharded_model(setup: Setup, how: str, options: dict[str, Any] | None = None) -> tuple[Model, torch.optim.Optimizer]:
    """Shard, make the optimizer, attach: the order that the documentation gives."""
    model = shard(setup.model(), how, **{"mesh": mesh(setup.device)} | (options or {}))
    optimizer = setup.make_optimizer(model.parameters())
    model.head.attach(optimizer)
    return model, optimizer


@contextlib.contextmanager
def unsynced(model: Any) -> Iterator[None]:
    model.set_requires_gradient_sync(False)
    yield
    model.set_requires_gradient_sync(True)


def train_fsdp(setup: Setup, steps: list[Step], how: str, options: dict[str, Any] | None = None) -> dict[str, Tensor]:
    model, optimizer = sharded_model(setup, how, options)
    train_on_ranks(setup, steps, model, optimizer, partial(unsynced, model))
    return snapshot(model)
