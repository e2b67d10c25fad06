r"""When steps write, and how strongly: not before ``start``, and less as the learning rate falls.

A step's write multiplies the rate of a class by a factor. With c the occurrences of the class since writing began, and
lr the learning rate of the parameter group that holds the weight,

.. math::
    \lambda \leftarrow \lambda \cdot \mathbb{I}\{\text{writing has begun}\} \cdot
    \begin{cases} 1 & c = 0 \\ \mathrm{lr} / \max \mathrm{lr} & \text{otherwise} \end{cases}

Writing begins after ``start`` batches, or with ``start="auto"`` once features have settled
(:mod:`hebbian_softmax.write.settling`). The highest learning rate is kept in the group, so it is saved and loaded with
the optimizer, and a new optimizer begins anew. What is written on demand, by ``memorize``, has the factor 1, and before
writing has begun it is not counted in c.
"""

from __future__ import annotations

from ctypes import c_float
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from hebbian_softmax.rule import FALLEN, RecentRate

if TYPE_CHECKING:
    from hebbian_softmax.layer import HebbianSoftmax

HIGHEST_LR = "highest_lr"
"""The key of a parameter group for the highest learning rate that it has had."""


class Timing(NamedTuple):
    """The moment of a write: whether it waits for the start, and the learning rate beside the highest so far."""

    waits: bool
    lr: float | Tensor
    highest: float | Tensor

    def strength(self) -> float | Tensor:
        """Return lr / highest in float64, or 1 where no learning rate was above 0; no device is waited for."""
        if not isinstance(self.lr, Tensor) or not isinstance(self.highest, Tensor):  # on_device, for type checkers
            return float(self.lr) / float(self.highest) if self.highest > 0 else 1.0
        lr, highest = self.lr.double().reshape(()), self.highest.double().reshape(())
        return torch.where(highest > 0, lr / torch.where(highest > 0, highest, 1), 1)

    def fallen(self, device: torch.device) -> float | Tensor:
        """Return min(1, 10 (1 - lr / highest)), rounded to float32: a factor of the last batches in ``RecentRate``.

        It is a tensor on ``device`` if the learning rate is a tensor.
        """
        strength = self.strength()
        if isinstance(strength, Tensor):
            return (FALLEN * (1 - strength)).clamp_max(1).float().to(device)
        return c_float(min(1.0, FALLEN * (1 - strength))).value

    def on_device(self) -> bool:
        """Return whether the learning rate is a tensor, as for optimizers in CUDA graphs."""
        return isinstance(self.lr, Tensor) and isinstance(self.highest, Tensor)


AT_ONCE = Timing(False, 1.0, 1.0)
"""The timing of ``memorize``."""


def has_begun(head: HebbianSoftmax) -> Tensor:
    """Return whether steps write, as a tensor: after ``start`` batches, or once features have settled."""
    if head.settling is not None:
        return head.settling.began >= 0
    assert isinstance(head.start, int)
    return head.running.batches_seen() >= head.start


def shortens(head: HebbianSoftmax, timing: Timing) -> bool:
    """Return whether memories of few activations are written shorter, as ``RecentRate.length`` says: in steps."""
    return timing.waits and head.write != "literal" and isinstance(head.rate, RecentRate)


def begin_group(group: dict[str, Any]) -> None:
    """Give a parameter group the key for its highest learning rate, so that loaders of checkpoints know it."""
    lr = group.get("lr")
    if HIGHEST_LR not in group and lr is not None:
        group[HIGHEST_LR] = torch.zeros_like(lr) if _is_on_device(lr) else 0.0


def timing_of_step(group: dict[str, Any] | None) -> Timing:
    """Return the timing of a step that is made with the learning rate of ``group``, and note that rate there.

    Without a group, writes do not fade.
    """
    lr = None if group is None else group.get("lr")
    if group is None or lr is None:
        return Timing(True, 1.0, 1.0)
    highest = group.get(HIGHEST_LR, 0.0)
    if _is_on_device(lr):
        lr = lr.detach()
        if not isinstance(highest, Tensor) or highest.device != lr.device:
            highest = torch.as_tensor(highest, dtype=lr.dtype, device=lr.device)
        highest = group[HIGHEST_LR] = highest.reshape(lr.shape)
        return Timing(True, lr, torch.maximum(highest, lr, out=highest))
    lr, highest = float(lr), float(highest)
    highest = group[HIGHEST_LR] = max(lr, highest)
    return Timing(True, lr, highest)


def _is_on_device(lr: float | Tensor) -> bool:
    """Return whether a learning rate is a tensor whose value cannot be read without waiting."""
    return isinstance(lr, Tensor) and lr.device.type != "cpu"
