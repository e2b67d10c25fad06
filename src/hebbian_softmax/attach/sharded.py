"""The activations that await the next step of a weight that is sharded over ranks, by ``shard_rows`` or by FSDP2."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from hebbian_softmax._torch import is_sharded, local_rows
from hebbian_softmax.attach.pending import Pending
from hebbian_softmax.distributed import groups_of_shards
from hebbian_softmax.rule import ClassSums
from hebbian_softmax.write.activations import Activations

if TYPE_CHECKING:
    from hebbian_softmax.layer import HebbianSoftmax


class ShardedPending(Pending):
    """Pending for a weight that is sharded over ranks: each rank sees only its own rows of the gradient.

    Versions tell nothing there (foreach operations do not raise a DTensor's), so the shard itself is looked at:
    a shard that was not zero at the end of a backward pass and is zero now was cleared. A rank whose shard of the
    gradient was zero all along, for example because it has no rows, cannot tell and learns it from the others at the
    step.
    """

    def __init__(self, head: HebbianSoftmax, parameter: Tensor, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(head, parameter, optimizer)
        self._pass_ended = False
        self._nonzero = torch.zeros((), dtype=torch.bool, device=local_rows(parameter).device)
        self._cleared = torch.zeros((), dtype=torch.int64, device=local_rows(parameter).device)
        """As far as this rank can see, the gradients of passes before this number were cleared."""

    def drop_cleared(self) -> None:
        """Count the backward passes, too."""
        self._pass += self._pass_ended
        self._pass_ended = False
        super().drop_cleared()

    def take(self) -> list[Activations | ClassSums]:
        """Start counting passes anew, too."""
        taken = super().take()
        if self.parameter.grad is not None:  # true on all ranks or on none, so they go on counting alike
            self._pass, self._cleared = 0, torch.zeros_like(self._cleared)
        return taken

    def _check(self, grad: Tensor) -> None:
        self._seen = weakref.ref(grad)
        cleared = self._nonzero & ~local_rows(grad).any()
        self._cleared = torch.where(cleared, self._pass, self._cleared)
        if self._entries:
            self._keep_where(~cleared)

    def _note(self, grad: Tensor) -> None:
        self._seen, self._nonzero = weakref.ref(grad), local_rows(grad).any()

    def _settle(self) -> None:
        assert is_sharded(self.parameter)
        groups = groups_of_shards(self.parameter)
        if not groups:
            return
        cleared = self._cleared.to(self.parameter.device_mesh.device_type, copy=True)
        for group in groups:
            dist.all_reduce(cleared, dist.ReduceOp.MAX, group=group)
        for entry in self._entries:
            alive = cleared <= entry.born
            entry.alive = alive if entry.alive is None else entry.alive.to(alive.device) & alive

    def _add(self, activations: Activations) -> None:
        super()._add(activations)
        self._pass_ended = True


class FsdpPending(ShardedPending):
    """ShardedPending for FSDP2, which brings the gradient to the shard by itself and at a time of its own choice."""

    def gradient_added(self) -> None:
        """Note that FSDP has added to the gradient; if there was none, what belonged to the old one is forgotten."""
        self.note_gradient_came()
        grad = self.parameter.grad
        if grad is not None and not self._is_seen(grad):
            self._drop_with_gradient()

    def _gave_weight_a_gradient(self, number: int) -> bool:
        return True
