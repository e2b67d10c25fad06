"""Training a head whose rows are shared: row ranks see the same batch, batch ranks different parts of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from hebbian_softmax import prepare_fsdp, shard_rows
from tests.distributed.pool import Pool
from tests.distributed.training import Model, Setup, Step, Training, assert_same, make_steps

CLOSE = 1e-10
"""The largest difference from one process, in float64."""


class Options(Model):
    """A loss with most of the options of ``head.loss``."""

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        classes = torch.arange(self.head.num_classes, dtype=x.dtype)
        return self.head.loss(
            self.hidden(x),
            targets,
            reduction="sum",
            label_smoothing=0.1,
            weight=1 + classes / 10,
            prior=torch.where(classes == 2, -torch.inf, -classes / 5),
            temperature=1.3,
            softcap=4.0,
            z_loss=0.01,
        )


class Soft(Model):
    """Probabilities as targets, which have more than half at the target."""

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        probabilities = (F.one_hot(targets, self.head.num_classes) + 0.3 / self.head.num_classes) / 1.3
        return self.head.loss(self.hidden(x), probabilities.to(x.dtype), reduction="sum", label_smoothing=0.1)


def mesh_of(batch_ranks: int) -> DeviceMesh:
    shape = batch_ranks, dist.get_world_size() // batch_ranks
    return init_device_mesh("cpu", shape, mesh_dim_names=("batch", "rows"))


class RowsTraining(Training):
    """As :class:`Training`; ``how`` is ``rows`` (no rank shares the batch) or a way to share the batch.

    ``rows-root`` and ``rows-head`` are FSDP2 as in :class:`Training`; ``rows-ddp`` is DDP for the body and FSDP2 for the
    head.
    """

    def __init__(self, setup: Setup, how: str, batch_ranks: int = 1) -> None:
        self.setup, self.how = setup, how
        self.mesh = mesh_of(batch_ranks)
        self.rank, self.ranks = self.mesh["batch"].get_local_rank(), batch_ranks
        self.model = setup.model()
        self.head = self.model.head
        shard_rows(self.head, self.mesh["rows"])
        self.share_batch(self.mesh["batch"])
        self.called = self.model
        self.optimizer = setup.make_optimizer(self.model)
        self.head.attach(self.optimizer)

    def share_batch(self, mesh: DeviceMesh) -> None:
        if self.how in ("rows-head", "rows-ddp"):
            fully_shard(self.head, mesh=mesh)
            prepare_fsdp(self.head)
        if self.how == "rows-ddp":
            self.model.body = DistributedDataParallel(self.model.body, process_group=mesh.get_group())
        elif self.how != "rows":
            fully_shard(self.model, mesh=mesh)

    @contextmanager
    def unsynced(self) -> Iterator[None]:
        sharded = {"rows": None, "rows-ddp": self.head}.get(self.how, self.model)
        if sharded is not None:
            sharded.set_requires_gradient_sync(False)
        if self.how == "rows-ddp":
            with self.model.body.no_sync():
                yield
        else:
            yield
        if sharded is not None:
            sharded.set_requires_gradient_sync(True)

    def clip(self, norm: float) -> None:
        clip_gradients(self.model, self.head, norm)


def clip_gradients(model: nn.Module, head: nn.Module, norm: float) -> None:
    of_head = list(head.parameters())
    parts = [[p for p in model.parameters() if all(p is not each for each in of_head)], of_head]
    norms = [nn.utils.get_total_norm([p.grad for p in part if p.grad is not None]) for part in parts]
    total = torch.stack([each.full_tensor() if isinstance(each, DTensor) else each for each in norms]).norm()
    for part in parts:
        nn.utils.clip_grads_with_norm_(part, norm, total)


def train_rows(setup: Setup, steps: list[Step], how: str, **options: Any) -> dict[str, Tensor]:
    training = Training(setup, how) if how == "alone" else RowsTraining(setup, how, **options)
    state = training.run(steps)
    return {name.replace("body.module.", "body."): value for name, value in state.items()}


def check_rows(
    pool: Pool, how: str, setup: Setup, shape: tuple[int, int], function: Any = train_rows, **batches: Any
) -> dict[str, Tensor]:
    """Check that batch ranks × row ranks do in ``function`` what one process does; return its result."""
    batch_ranks, row_ranks = shape
    steps = make_steps(setup, [3, 4, 2][:batch_ranks], **batches)
    alone = function(setup, steps, "alone")
    assert_same(pool.run(batch_ranks * row_ranks, function, setup, steps, how, batch_ranks=batch_ranks), alone, CLOSE)
    return alone
