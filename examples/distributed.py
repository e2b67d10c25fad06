"""Training on several processes: DDP, or FSDP2 with the rows of the head shared among the processes.

Every process draws its own part of each batch. One step of the optimizer is one iteration of the rule over the whole
batch, whatever the number of processes, and all of them end with the same weights. docs/distributed.md has the details.

    torchrun --nproc-per-node 2 examples/distributed.py                      # DDP, half a minute on CPUs
    torchrun --nproc-per-node 2 examples/distributed.py --strategy fsdp2
    torchrun --nproc-per-node 2 examples/distributed.py --quick              # only to see that it runs

On GPUs, as many processes as there are GPUs take one each and talk by NCCL; on CPUs they talk by gloo. The first
process prints the loss and the test accuracy, and whether all processes have the same rows.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from hebbian_softmax import HebbianSoftmax, prepare_fsdp

NO_TORCHRUN = "start this with torchrun: torchrun --nproc-per-node 2 examples/distributed.py, and --quick if you like"


class Model(nn.Module):
    """A network with its head. With targets it returns the sum of the losses, else the likeliest classes."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU())
        self.head = HebbianSoftmax(64, classes)

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        if targets is None:
            return self.head(self.body(x)).argmax(1)
        return self.head.loss(self.body(x), targets, reduction="sum")


class Examples:
    """Invented examples: noisy copies of one pattern for each class. The k-th class is k times as rare as the first."""

    def __init__(self, classes: int, device: torch.device) -> None:
        shared = torch.Generator().manual_seed(0)  # the same patterns on every process
        self.patterns = torch.randn(classes, 32, generator=shared).to(device)
        self.shares = 1 / torch.arange(1, classes + 1, device=device)

    def draw(self, number: int) -> tuple[Tensor, Tensor]:
        """Return examples as often as their classes occur."""
        return self._of(torch.multinomial(self.shares, number, replacement=True))

    def even(self, number: int) -> tuple[Tensor, Tensor]:
        """Return examples of all classes alike, for the test."""
        return self._of(torch.randint(len(self.shares), (number,), device=self.shares.device))

    def _of(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        return self.patterns[targets] + 0.5 * torch.randn(len(targets), 32, device=targets.device), targets


def wrapped(model: Model, strategy: str, device: torch.device) -> nn.Module:
    """Return the model for several processes. The optimizer and `attach` come after this."""
    if strategy == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    fully_shard(model.head, mesh=mesh)
    prepare_fsdp(model.head)  # head.loss needs the gathered rows, as forward does
    fully_shard(model, mesh=mesh)
    return model


def on_all(value: Any, device: torch.device, op: Any = dist.ReduceOp.SUM) -> float:
    """Return the sum (or the maximum, …) of a number over all processes."""
    number = torch.as_tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(number, op)
    return number.item()


def spread(head: HebbianSoftmax, device: torch.device) -> float:
    """Return by how much the rows differ between processes: 0 if all is well."""
    weight = head.weight.full_tensor() if isinstance(head.weight, DTensor) else head.weight
    own = weight.detach().double().sum()
    return on_all(own, device, dist.ReduceOp.MAX) - on_all(own, device, dist.ReduceOp.MIN)


def run(options: argparse.Namespace, device: torch.device) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # DDP copies the weights of the first process; with FSDP2 all must make the same ones
    model = Model(options.classes).to(device)
    whole = wrapped(model, options.strategy, device)
    optimizer = torch.optim.Adam(whole.parameters(), lr=2e-3)
    model.head.attach(optimizer)
    examples = Examples(options.classes, device)
    torch.manual_seed(1 + rank)  # from now on each process draws its own examples
    if rank == 0:
        print(f"{options.strategy} on {ranks} processes with {dist.get_backend()}, {options.classes:,} classes")

    start = time.perf_counter()
    for step in range(1, options.steps + 1):
        x, targets = examples.draw(options.batch // ranks)
        number = on_all(len(targets), device)
        total = whole(x, targets)
        (total * ranks / number).backward()  # DDP and FSDP divide gradients by the number of processes
        optimizer.step()  # ends with the write, for the examples of all processes
        optimizer.zero_grad()
        if step % max(1, options.steps // 5) == 0:
            loss = on_all(total.detach(), device) / number
            if rank == 0:
                print(f"step {step:5} of {options.steps}: loss {loss:.3f}, {time.perf_counter() - start:.1f} s")

    with torch.no_grad():
        x, targets = examples.even(2000 // ranks)
        right = on_all((whole(x) == targets).sum(), device) / on_all(len(targets), device)
    difference = spread(model.head, device)
    seen = int(model.head.counts.sum())
    if rank == 0:
        print(f"test accuracy over all classes alike: {right:.1%}")
        print(f"the head has counted {seen:,} examples, those of all processes")
        print("all processes have the same rows" if difference == 0 else f"the rows differ by {difference}")
    if difference:
        raise SystemExit("the processes have different rows, which must not happen: please report it")


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", choices=["ddp", "fsdp2"], default="ddp", help="(default: %(default)s)")
    parser.add_argument(
        "--classes", type=positive, default=2000, help="the number of invented classes (default: %(default)s)"
    )
    parser.add_argument("--steps", type=positive, default=500, help="training steps (default: %(default)s)")
    parser.add_argument(
        "--batch", type=positive, default=256, help="examples in a step, over all processes (default: %(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="a few steps with few classes, to see that it runs")
    parser.add_argument(
        "--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: GPUs if enough (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    if options.quick:
        options.classes, options.steps = 50, 10
    if "LOCAL_RANK" not in os.environ:
        raise SystemExit(NO_TORCHRUN)
    if options.batch < int(os.environ["WORLD_SIZE"]):
        raise SystemExit("--batch must be at least the number of processes")
    local, here = int(os.environ["LOCAL_RANK"]), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    enough = torch.cuda.device_count() >= here
    if options.device == "cuda" and not enough:
        raise SystemExit(f"{here} processes need as many GPUs here, and there are {torch.cuda.device_count()}")
    device = torch.device("cuda", local) if enough and options.device != "cpu" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        torch.set_num_threads(max(1, torch.get_num_threads() // here))
        dist.init_process_group("gloo")
    try:
        run(options, device)
    finally:
        gc.collect()  # what FSDP2 leaves behind must not outlive its group: the process would end with SIGABRT
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
