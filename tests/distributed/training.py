"""The training that the tests of data parallelism compare: in one process on the joined batch, and on ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from hebbian_softmax import OnePassAdam, prepare_fsdp, shard_rows
from tests.distributed.pool import Pool
from tests.heads import early_head

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
    decay: float = 1.0
    """The factor on all learning rates after each step."""
    set_to_none: bool = True
    frozen: bool = False
    device: str = "cpu"
    kind: type[Model] | None = None

    def model(self) -> Model:
        torch.manual_seed(1)
        return (self.kind or Model)(self).to(self.device)

    def make_optimizer(self, model: Model) -> torch.optim.Optimizer:
        if self.optimizer == "slow":
            return torch.optim.SGD(model.parameters(), lr=1e-3)
        if self.optimizer == "sgd":
            return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=0.01)
        if self.optimizer == "one-pass" and dist.is_initialized():
            head = None if isinstance(model.head, FSDPModule) or isinstance(model, FSDPModule) else model.head
            return OnePassAdam(model.parameters(), lr=0.05, head=head)
        if self.optimizer == "spread" and dist.is_initialized():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # importing it uses torch.jit.script
                from torch.distributed.optim import ZeroRedundancyOptimizer
            return ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.05)
        # In a list, which is the default on a GPU, torch takes no mixture of meshes, nor of DTensors and plain tensors.
        groups = [{"params": model.body.parameters()}, {"params": model.head.parameters()}]
        return torch.optim.Adam(groups, lr=0.05, foreach=True if self.optimizer == "foreach" else None)


class Model(nn.Module):
    """A body and a head; the loss is the sum over targets, to be divided by their number over all ranks."""

    remember = True

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        options = {"gamma": 0.2, "limit": 6} | setup.head
        self.embedding = nn.Embedding(setup.classes, FEATURES, dtype=setup.dtype) if setup.tied else None
        self.body = nn.Linear(FEATURES if setup.tied else INPUTS, FEATURES, dtype=setup.dtype)
        self.head = early_head(FEATURES, setup.classes, dtype=setup.dtype, **options)
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


def join(batches: list[Batch]) -> Batch:
    x, targets = zip(*batches, strict=True)
    return torch.cat(x), torch.cat(targets)


def mesh(device: str = "cpu") -> DeviceMesh:
    return init_device_mesh(device, (dist.get_world_size(),))


def mesh_of_rows(how: str, device: str = "cpu") -> DeviceMesh:
    """Return the mesh of batch ranks × row ranks; 1 or 2 ranks share the batch."""
    if device == "cuda":
        torch.cuda.set_device(0)  # all ranks of a test share it; torch warns of a mesh without a chosen device
    batch_ranks = 1 if how in ("rows", "rows-apart") else 2
    shape = batch_ranks, dist.get_world_size() // batch_ranks
    return init_device_mesh(device, shape, mesh_dim_names=("batch", "rows"))


def wrap(model: Model, how: str, **options: Any) -> nn.Module:
    """Return what is called in place of ``model``; :class:`Training` tells what ``how`` may be."""
    if how.startswith("rows"):
        shard_rows(model.head, options["mesh"]["rows"])
        how, options = how.removeprefix("rows").removeprefix("-"), options | {"mesh": options["mesh"]["batch"]}
        if how == "ddp":
            group = options["mesh"].get_group()
            model.body = DistributedDataParallel(model.body, process_group=group)  # type: ignore[assignment]
            fully_shard(model.head, **options)
            prepare_fsdp(model.head)
            return model
    if how in ("alone", ""):
        return model
    if how == "ddp":
        with warnings.catch_warnings():
            if "broadcast_buffers" in options:  # torch 2.13 renames it to forward_sync_buffers, unknown to 2.11
                warnings.simplefilter("ignore", FutureWarning)
            return DistributedDataParallel(model, **options)
    options.setdefault("mesh", mesh(model.head.weight.device.type))
    if how == "head":
        fully_shard(model.head, **options)
        prepare_fsdp(model.head)
    return fully_shard(model, **options)


class Training:
    """A model, its optimizer, and its head attached, in the order that the documentation gives.

    ``how`` is ``alone`` (one process on the joined batch), ``ddp``, or a way of FSDP2: ``root`` shards the model as a
    whole, ``head`` the head apart and then the rest. ``options`` are those of DistributedDataParallel or fully_shard.

    With ``rows`` all ranks share the rows and see the same batch. With ``rows-root`` and ``rows-head`` two groups of
    such ranks share the batch by FSDP2; with ``rows-ddp`` the body is in DDP and the head in FSDP2.
    """

    def __init__(self, setup: Setup, how: str, **options: Any) -> None:
        self.setup, self.how = setup, how
        group = options.get("process_group")
        if how.startswith("rows"):
            options["mesh"] = mesh_of_rows(how, setup.device)
            self.rank, self.ranks = options["mesh"]["batch"].get_local_rank(), options["mesh"]["batch"].size()
        else:
            self.rank, self.ranks = (0, 1) if how == "alone" else (dist.get_rank(group), dist.get_world_size(group))
        self.model = setup.model()
        self.head = self.model.head
        self.called: Callable[..., Tensor] = wrap(self.model, how, **options)
        self.optimizer = setup.make_optimizer(self.model)
        self.head.attach(self.optimizer, process_group=group)

    def own(self, batches: list[Batch]) -> Batch:
        """Return this rank's batch, or all of them as one."""
        x, targets = join(batches) if self.how == "alone" else batches[self.rank]
        return x.to(self.setup.device), targets.to(self.setup.device)

    def backward(self, step: Step, batches: list[Batch]) -> None:
        """Backpropagate the mean loss of a step; gradients are averaged over ranks, hence the factor."""
        (self.called(*self.own(batches)) * self.ranks / max(1, count_targets(step))).backward()

    @contextmanager
    def unsynced(self) -> Iterator[None]:
        with ExitStack() as stack:
            for module in (self.called, *self.model.modules()):
                if isinstance(module, DistributedDataParallel):
                    stack.enter_context(module.no_sync())
                elif isinstance(module, FSDPModule):
                    module.set_requires_gradient_sync(False)
                    stack.callback(module.set_requires_gradient_sync, True)
            yield

    def finish_step(self) -> None:
        if self.setup.clip is not None:
            self.clip(self.setup.clip)
        self.optimizer.step()
        for group in self.optimizer.param_groups:
            group["lr"] *= self.setup.decay
        self.optimizer.zero_grad(set_to_none=self.setup.set_to_none)

    def clip(self, norm: float) -> None:
        if not self.how.startswith("rows"):
            nn.utils.clip_grad_norm_(self.model.parameters(), norm)
            return
        parts = [list(self.model.body.parameters()), list(self.head.parameters())]  # torch takes no mixture of meshes
        norms = [nn.utils.get_total_norm([p.grad for p in part if p.grad is not None]) for part in parts]
        total = torch.stack([each.full_tensor() if isinstance(each, DTensor) else each for each in norms]).norm()
        for part in parts:
            nn.utils.clip_grads_with_norm_(part, norm, total)

    def run(self, steps: list[Step]) -> dict[str, Tensor]:
        """Train, and return the state; alone, all micro-batches and ranks of a step are one batch."""
        for step in steps:
            parts = [[each for part in step for each in part]] if self.how == "alone" else step
            for i, batches in enumerate(parts):
                with nullcontext() if i == len(parts) - 1 else self.unsynced():
                    self.backward(step, batches)
            self.finish_step()
        return snapshot(self.model)


def train(setup: Setup, steps: list[Step], how: str, **options: Any) -> dict[str, Tensor]:
    return Training(setup, how, **options).run(steps)


def check(
    pool: Pool,
    how: str,
    setup: Setup,
    sizes: list[int],
    function: Callable[..., dict[str, Tensor]] = train,
    options: dict[str, Any] | None = None,
    device: str = "cpu",
    row_ranks: int = 1,
    tolerance: float = 1e-10,
    **batches: Any,
) -> dict[str, Tensor]:
    """Check that ranks with batches of ``sizes`` do in ``function`` what one process does; return its result.

    Each batch is given to ``row_ranks`` ranks. ``options`` are further arguments of ``function``, and ``batches`` those
    of :func:`make_steps`.
    """
    steps = make_steps(setup, sizes, **batches)
    alone = function(setup, steps, "alone", **(options or {}))
    ranks = len(sizes) * row_ranks
    found = pool.run(ranks, function, replace(setup, device=device), steps, how, **(options or {}))
    assert_same(found, alone, tolerance)
    return alone


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    """Return all parameters and buffers, gathered from their shards."""
    state = {name.replace("body.module.", "body."): tensor for name, tensor in model.state_dict().items()}
    return {name: whole(tensor) for name, tensor in state.items()}


def whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor.cpu().clone()
    if tensor.device.type == "cpu":
        return tensor.full_tensor()
    shards: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shards, tensor.to_local().cpu())  # full_tensor() crashes over gloo on a GPU
    return torch.cat(shards)


def assert_same(ranks: list[dict[str, Tensor]], alone: dict[str, Tensor], tolerance: float = 1e-10) -> None:
    """Check that every rank equals one process, counts exactly, and that ranks equal each other bit for bit.

    Trainings are in float64 unless they say otherwise, so the tolerance lies far above rounding and far below an error.
    """
    for rank, values in enumerate(ranks):
        assert values.keys() == alone.keys()
        for name, expected in alone.items():
            assert torch.equal(values[name], ranks[0][name]), f"{name} of rank {rank} differs from rank 0"
            atol = {torch.float64: tolerance, torch.float32: 1e-6}.get(expected.dtype, 0)
            torch.testing.assert_close(
                values[name], expected, rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
            )
