"""Processes that train one model together, as torchrun starts them. Usually there is only one.

Every rank computes, and only the first one writes files. The ranks share what one of them notices, such as a signal
or that it is time to save, so that all stop and save at the same step.
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hebbian_softmax.lab.base.errors import LabError


@dataclass(frozen=True)
class Ranks:
    """The place of this process among those that train together."""

    rank: int = 0
    count: int = 1

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes files."""
        return self.rank == 0

    def any(self, *flags: bool) -> tuple[bool, ...]:
        """Return for each flag whether any rank has set it. The CPUs exchange them, so nothing waits for a GPU."""
        if self.count == 1:
            return flags
        together = torch.tensor(flags, dtype=torch.int32)
        dist.all_reduce(together, dist.ReduceOp.MAX)
        return tuple(bool(flag) for flag in together)

    def shared(self, text: str | None) -> str:
        """Return the text of the first rank on all ranks."""
        texts = [text]
        if self.count > 1:
            dist.broadcast_object_list(texts, src=0, device=torch.device("cpu"))
        assert texts[0] is not None
        return texts[0]

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean over ranks of a scalar on the device, without waiting for it."""
        if self.count > 1:
            value = value.clone()
            dist.all_reduce(value)
            value /= self.count
        return value


def current_ranks() -> Ranks:
    """Return the place of this process in its process group, or that of the only process."""
    if dist.is_available() and dist.is_initialized():
        return Ranks(dist.get_rank(), dist.get_world_size())
    return Ranks()


@contextlib.contextmanager
def joined(device: str) -> Iterator[Ranks]:
    """Join the processes that torchrun started, if the environment says so, or keep the caller's process group.

    `device` is cpu, cuda or auto.
    """
    if current_ranks().count > 1 or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield current_ranks()
        return
    on_gpu = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    if on_gpu:
        local = int(os.environ.get("LOCAL_RANK", "0"))
        if local >= torch.cuda.device_count():
            raise LabError(
                f"torchrun started process {local + 1} on a machine with {torch.cuda.device_count()} GPUs: "
                "give --nproc-per-node a smaller number, or use --device cpu"
            )
        torch.cuda.set_device(local)
    # NCCL carries tensors on the GPU, gloo what ranks agree on.
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    try:
        yield current_ranks()
    finally:
        dist.destroy_process_group()
