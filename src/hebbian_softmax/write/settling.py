r"""When features have settled, so that steps begin to write: measured on at most 1,024 of the classes.

While features are random, what the rule writes is worth nothing a few steps later, and harms rows that gradients have
begun to learn. So for each sampled class i there is a memory :math:`\mu_i` of its mean activations, and with m the
running mean of all activations, both before the batch,

.. math::
    \mathrm{fit} = \mathrm{mean}_i \cos(\bar h_i - m,\ \mu_i - m), \qquad
    \mu_i \leftarrow \mu_i + \max(1 / (c_i + 1),\ 0.1)\, (\bar h_i - \mu_i)

over the sampled classes of the batch that were seen before. Features learn fast at first, and the fit rises; how far
depends on the task. Writing begins when it rises no longer: when its mean over the last 100 batches has caught up with
that over the last ten, to ``CAUGHT_UP`` of it. Everything is in buffers, from sums that are joined over ranks, and
nothing is measured afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hebbian_softmax.write.running import HORIZON

SAMPLED = 1024
"""The most classes that are measured."""
RECENT = 10
"""The batches of the shorter mean of the fit; the longer one has ``HORIZON``."""
CAUGHT_UP = 0.8
"""The share of the shorter mean that the longer one must reach."""
LEAST_FIT = 0.2
"""Below this, activations say too little of their class to be written."""
LEAST_RATE = 0.1
"""A memory is the mean of about so many of the last batches with its class: one over this."""


class Settling(nn.Module):
    """The memories of the sampled classes, the running fit, and when writing began.

    Every ``stride``-th class is sampled, beginning with the first. Classes that a head gains are sampled while there
    are fewer than ``SAMPLED``.
    """

    memory: Tensor
    fit: Tensor
    recent: Tensor
    batches: Tensor
    began: Tensor
    stride: Tensor

    def __init__(self, features: int, classes: int, *, device: torch.device | str | None, dtype: torch.dtype) -> None:
        super().__init__()
        stride = max(1, classes // SAMPLED)
        sampled = min(SAMPLED, -(-classes // stride))
        self.register_buffer("memory", torch.zeros(sampled, features, device=device, dtype=dtype))
        self.register_buffer("fit", torch.zeros((), device=device, dtype=dtype))
        self.register_buffer("recent", torch.zeros((), device=device, dtype=dtype))
        self.register_buffer("batches", torch.zeros((), device=device, dtype=torch.int64))
        self.register_buffer("began", torch.full((), -1, device=device, dtype=torch.int64))
        """The number of batches that the head had seen when writing began; -1 before that."""
        self.register_buffer("stride", torch.full((), stride, device=device, dtype=torch.int64))
        self._has_begun, self._stride = False, stride

    def reset(self, begun: bool) -> None:
        """Forget everything; ``begun`` says that features have settled already, as those of a trained network."""
        for buffer in (self.memory, self.fit, self.recent, self.batches):
            buffer.zero_()
        self.began.fill_(0 if begun else -1)
        self.stride.fill_(self._stride)  # which has no value yet if the head was made on the meta device
        self._has_begun = begun

    def grow(self, classes: int) -> None:
        """Follow a head that has ``classes`` classes now."""
        more = min(SAMPLED, -(-classes // int(self.stride))) - self.memory.shape[0]
        if more > 0:
            self.memory = torch.cat([self.memory, self.memory.new_zeros(more, self.memory.shape[1])])

    def measures(self) -> bool:
        """Return whether writing has not begun. Until it has, this reads from the device."""
        self._has_begun = self._has_begun or int(self.began) >= 0
        return not self._has_begun

    def sampled(self, classes: Tensor) -> Tensor:
        """Return which of these classes are sampled."""
        return (classes % self.stride == 0) & (classes // self.stride < self.memory.shape[0])

    def see(self, classes: Tensor, means: Tensor, before: Tensor, mean: Tensor, seen: Tensor) -> None:
        """Take in the mean activations (K, features) of sampled classes, counted ``before``.

        ``mean`` is the running mean, and ``seen`` the number of batches that the head had seen, both before this batch.
        """
        at = classes // self.stride
        means = means.to(self.memory.dtype)
        known = before > 0
        if bool(known.any()):
            found = _cosine(means[known] - mean, self.memory[at[known]] - mean).mean()
            self.batches += 1
            self.fit += (found - self.fit) / self.batches.clamp_max(HORIZON)
            self.recent += (found - self.recent) / self.batches.clamp_max(RECENT)
        rate = (1 / (before + 1).to(means.dtype)).clamp_min(LEAST_RATE).unsqueeze(1)
        self.memory[at] += rate * (means - self.memory[at])
        caught_up = (self.fit >= LEAST_FIT) & (self.fit >= CAUGHT_UP * self.recent) & (self.batches >= HORIZON)
        self.began.copy_(torch.where((self.began < 0) & caught_up, seen + 1, self.began))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Settling:
        before = {name: getattr(self, name) for name in ("memory", "fit", "recent")}
        super()._apply(fn, recurse)
        for name, old in before.items():  # like the other running values
            new = getattr(self, name)
            if torch.finfo(new.dtype).bits < 32:
                setattr(self, name, old.to(new.device, torch.promote_types(new.dtype, torch.float32)))
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        self._has_begun = False
        super()._load_from_state_dict(*args)


def _cosine(a: Tensor, b: Tensor) -> Tensor:
    """Return the cosine of each pair of rows; 0 where one of them is 0."""
    norms = torch.linalg.vector_norm(a, dim=1) * torch.linalg.vector_norm(b, dim=1)
    return torch.where(norms > 0, (a * b).sum(1) / torch.where(norms > 0, norms, 1), 0)
