"""A matrix whose rows are shared among ranks: which part this rank holds, and what the ranks tell each other.

The ranks that share the rows see the same batch; they are another group than the ranks that share the batch. Every
exchange is made by all ranks of the group, in the same order, so whatever decides on one must be equal on all of them.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hebbian_softmax import _torch

_REFUSED = 2**32
"""What a rank says of its arguments when it refuses them; checksums are smaller."""


@dataclass(frozen=True)
class RowPart:
    """The rows of a matrix that this rank holds: the classes ``start`` … ``start + rows - 1`` of ``total``.

    The parts of the ranks follow each other in the order of the group, and need not be equally large.

    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # under torchrun: no arguments
    >>> part = RowPart.of(torch.randn(5, 8))
    >>> part.start, part.rows, part.total
    (0, 5, 5)
    >>> dist.destroy_process_group()
    """

    group: dist.ProcessGroup
    """The ranks that share the rows."""
    start: int
    """The class of this rank's first row."""
    rows: int
    """The number of this rank's rows; it may be 0."""
    total: int
    """The number of all classes."""
    largest: int
    """The number of rows of the rank that has the most, from which all ranks plan alike."""

    @classmethod
    def of(
        cls, weight: Tensor, group: dist.ProcessGroup | None = None, *, mesh_dim: int | str | None = None
    ) -> RowPart:
        """Return the part that this rank has of ``weight``, which is a DTensor, or a plain tensor with its rows alone.

        Args:
            weight: (rows, features). For a plain tensor the ranks tell each other their numbers of rows, once, so all
                ranks of the group must call this. A DTensor knows them.
            group: the ranks that share a plain tensor's rows; None means all ranks. A DTensor knows them, too.
            mesh_dim: the dimension of a DTensor's mesh whose ranks share the rows during the computation. It is
                needed only if the weight is sharded along other dimensions as well, as FSDP2 stores it.
        """
        if not isinstance(weight, Tensor):
            raise TypeError(f"weight must be a tensor with the rows of this rank, got {type(weight).__name__}")
        if _torch.is_sharded(weight):
            if group is not None:
                raise ValueError("group is for plain tensors; the ranks that share a DTensor are those of its mesh")
            return cls._of_mesh(weight, mesh_dim)
        if mesh_dim is not None:
            raise ValueError(f"mesh_dim is for DTensors, got {mesh_dim!r} with a {type(weight).__name__}")
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError("RowPart needs the ranks that share the rows: call dist.init_process_group before")
        group = dist.group.WORLD if group is None else group
        if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
            raise ValueError(f"group must be a process group with this rank, {dist.get_rank()}, got {group!r}")
        return cls._agreed(weight, group)

    @classmethod
    def _of_mesh(cls, weight: Any, mesh_dim: int | str | None) -> RowPart:
        from torch.distributed.tensor import Shard

        mesh, placements = weight.device_mesh, weight.placements
        names = mesh.mesh_dim_names or ()
        if mesh_dim is not None and mesh_dim not in (*names, *range(mesh.ndim)):
            raise ValueError(f"mesh_dim must be a dimension of the mesh, {names or range(mesh.ndim)}, got {mesh_dim!r}")
        if isinstance(mesh_dim, str):
            mesh_dim = names.index(mesh_dim)
        if mesh_dim is None:
            sharded = [i for i, each in enumerate(placements) if not each.is_replicate()]
            if len(sharded) != 1:
                raise ValueError(f"mesh_dim must say which ranks share the rows of a weight laid out as {placements}")
            (mesh_dim,) = sharded
        if placements[mesh_dim] != Shard(0):
            raise ValueError(
                f"the ranks that share the rows hold them as Shard(dim=0), got {placements[mesh_dim]} in {placements}"
            )
        total, ranks = weight.shape[0], mesh.size(mesh_dim)
        parts = [Shard.local_shard_size_and_offset(total, ranks, rank) for rank in range(ranks)]
        rows, start = parts[mesh.get_local_rank(mesh_dim)]
        return cls(mesh.get_group(mesh_dim), start, rows, total, max(rows for rows, _ in parts))

    @classmethod
    def _agreed(cls, weight: Tensor, group: dist.ProcessGroup) -> RowPart:
        shape = tuple(weight.shape)
        mine = torch.tensor(shape if len(shape) == 2 else (-1, -1), device=weight.device)
        sizes = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(sizes, mine, group=group)
        shapes = torch.stack(sizes).tolist()
        if len({features for _, features in shapes}) > 1 or [-1, -1] in shapes:
            given = ", ".join("no matrix" if rows < 0 else f"({rows}, {features})" for rows, features in shapes)
            raise ValueError(
                f"the parts of weight must be matrices (rows, features) of the same features on all ranks, got {given}"
            )
        rows = [count for count, _ in shapes]
        rank = dist.get_rank(group)
        return cls(group, sum(rows[:rank]), rows[rank], sum(rows), max(rows))

    @property
    def stop(self) -> int:
        """The class after this rank's last one."""
        return self.start + self.rows

    def sum_(self, tensor: Tensor) -> Tensor:
        """Add up what the ranks have, in place, and return it; ``tensor`` is contiguous."""
        if tensor.numel():
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def max_(self, tensor: Tensor) -> Tensor:
        """Take the largest of what the ranks have, in place, and return it; ``tensor`` is contiguous."""
        if tensor.numel():
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)
        return tensor

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return what each rank has, in the order of their rows."""
        found = [torch.empty_like(tensor) for _ in range(dist.get_world_size(self.group))]
        if tensor.numel():
            dist.all_gather(found, tensor.contiguous(), group=self.group)
        return found

    @contextmanager
    def agreement(self, like: Any) -> Iterator[list[Any]]:
        """Check arguments inside of this context, so that what one rank refuses is refused on all of them.

        Otherwise the others would wait for that rank in vain. The context gives a list, to be filled with what must be
        equal on all ranks because it decides on the exchanges: shapes, dtypes, options. ``like`` is a tensor on the
        device of the exchange. A CPU raises; an accelerator checks by itself, as it checks targets.
        """
        elsewhere = "cuda" if dist.get_backend(self.group) == "nccl" else "cpu"
        device = like.device if isinstance(like, Tensor) else torch.device(elsewhere)
        alike: list[Any] = []
        try:
            yield alike
        except Exception:
            self._tell(_REFUSED, device)
            raise
        largest, negated = self._tell(zlib.crc32(repr(alike).encode()), device)
        if device.type != "cpu":
            message = "ranks that share the rows need valid arguments of the same shapes and options, and the same GPUs"
            _torch.assert_on_device(largest == -negated, message)
        elif int(largest) == _REFUSED:
            raise RuntimeError("another rank that shares the rows has refused its arguments; its error says why")
        elif int(largest) != -int(negated):
            raise RuntimeError(
                f"the ranks that share the rows must be given inputs of the same shape and the same options; this one "
                f"has {alike}"
            )

    def _tell(self, number: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the largest of the numbers of all ranks, and the largest of the negated ones."""
        both = torch.full((2,), number, dtype=torch.int64, device=device)
        both[1].neg_()
        largest, negated = self.max_(both)
        return largest, negated
