"""The training that the tests of data parallelism compare: in one process on the joined batch, and on ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hebbian_softmax import HebbianSoftmax

INPUTS, FEATURES = 4, 5

Batch = tuple[Tensor, Tensor]
Step = list[list[Batch]]
"""The batches of one optimizer step: ``step[micro_batch][rank]``."""


@dataclass(frozen=True)
class Setup:
    """A model and how it is trained."""

    classes: int = 7
    head: dict[str, Any] = field(default_factory=dict)
    optimizer: str = "sgd"
    tied: bool = False
    counts: tuple[int, ...] | None = None
    dtype: torch.dtype = torch.float64
    clip: float | None = None
    set_to_none: bool = True
    frozen: bool = False
    device: str = "cpu"

    def model(self) -> Model:
        torch.manual_seed(1)
        return Model(self).to(self.device)

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        if self.optimizer == "sgd":
            return torch.optim.SGD(parameters, lr=0.2, momentum=0.9, weight_decay=0.01)
        return torch.optim.Adam(parameters, lr=0.05)


class Model(nn.Module):
    """A body and a head; the loss is the sum over targets, to be divided by their number over all ranks."""

    remember = True

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        options = {"gamma": 0.2, "limit": 6} | setup.head
        self.embedding = nn.Embedding(setup.classes, FEATURES, dtype=setup.dtype) if setup.tied else None
        self.body = nn.Linear(FEATURES if setup.tied else INPUTS, FEATURES, dtype=setup.dtype)
        self.head = HebbianSoftmax(FEATURES, setup.classes, dtype=setup.dtype, **options)
        if self.embedding is not None:
            self.head.weight = self.embedding.weight
        self.head.weight.requires_grad_(not setup.frozen)
        if setup.counts is not None:
            self.head.counts.copy_(torch.tensor(setup.counts))

    def hidden(self, x: Tensor) -> Tensor:
        return torch.tanh(self.body(x if self.embedding is None else self.embedding(x))) + 0.5

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return self.head.loss(self.hidden(x), targets, reduction="sum", remember=self.remember)


def make_steps(
    setup: Setup,
    sizes: list[int],
    *,
    steps: int = 4,
    micro_batches: int = 1,
    targets: Callable[[int, Tensor], Tensor] | None = None,
) -> list[Step]:
    """Random batches of ``sizes[rank]`` examples; ``targets(rank, drawn)`` may replace the targets of a rank."""
    generator = torch.Generator().manual_seed(2)

    def batch(rank: int) -> Batch:
        drawn = torch.randint(setup.classes, (sizes[rank],), generator=generator)
        if setup.tied:
            x = torch.randint(setup.classes, (sizes[rank],), generator=generator)
        else:
            x = torch.randn(sizes[rank], INPUTS, generator=generator, dtype=torch.float64).to(setup.dtype)
        return x, drawn if targets is None else targets(rank, drawn)

    return [[[batch(rank) for rank in range(len(sizes))] for _ in range(micro_batches)] for _ in range(steps)]


def count_targets(step: Step) -> int:
    return sum(int((targets != -100).sum()) for batches in step for _x, targets in batches)


def joined(steps: list[Step]) -> list[Step]:
    """As for one rank: the batches of all ranks joined, micro-batch by micro-batch."""
    return [[[_join(batches)] for batches in step] for step in steps]


def _join(batches: list[Batch]) -> Batch:
    x, targets = zip(*batches, strict=True)
    return torch.cat(x), torch.cat(targets)


def train_alone(setup: Setup, steps: list[Step]) -> dict[str, Tensor]:
    """In this process, all micro-batches and ranks of a step joined into one batch."""
    model = setup.model()
    optimizer = setup.make_optimizer(model.parameters())
    model.head.attach(optimizer)
    for step in steps:
        x, targets = _join([batch for batches in step for batch in batches])
        (model(x, targets) / max(1, count_targets(step))).backward()
        finish_step(setup, model, optimizer)
    return snapshot(model)


def train_on_ranks(
    setup: Setup,
    steps: list[Step],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    unsynced: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> None:
    """This rank's part: gradients are averaged over ranks, hence the factor before the global number of targets."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for step in steps:
        for i, batches in enumerate(step):
            with contextlib.nullcontext() if i == len(step) - 1 else unsynced():
                x, targets = (each.to(setup.device) for each in batches[rank])
                (model(x, targets) * world_size / max(1, count_targets(step))).backward()
        finish_step(setup, model, optimizer)


def finish_step(setup: Setup, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if setup.clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), setup.clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=setup.set_to_none)


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers, whole."""
    return {name: whole(tensor) for name, tensor in model.state_dict().items()}


def whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor.cpu().clone()
    shards: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shards, tensor.to_local().cpu())  # full_tensor() crashes over gloo on a GPU
    return torch.cat(shards)


def assert_same(ranks: list[dict[str, Tensor]], alone: dict[str, Tensor]) -> None:
    """Check that every rank equals one process, counts exactly, and that ranks equal each other bit for bit.

    Trainings are in float64 unless a test says otherwise, so 1e-6 lies far above rounding and far below an error.
    """
    for rank, values in enumerate(ranks):
        assert values.keys() == alone.keys()
        for name, expected in alone.items():
            assert torch.equal(values[name], ranks[0][name]), f"{name} of rank {rank} differs from rank 0"
            tolerance = 1e-6 if expected.is_floating_point() else 0
            torch.testing.assert_close(
                values[name], expected, rtol=0, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
            )
