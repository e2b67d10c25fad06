r"""The writes that are compared: what is written, when, and with which rate, over all classes at once.

This is a laboratory's form of the rule: dense tensors of (classes, features), every number on the device, so that one
CUDA graph holds a whole step and every variant costs the same. With :math:`\bar h_i` the mean activation of class i in
the batch, m the running mean of all activations before the batch and s the scale that matches norms, a write is

.. math::
    \theta_i \leftarrow \hat\theta_i + \lambda_i P (w^*_i - \hat\theta_i)

    \text{literal: } w^* = \bar h_i, P = I, \qquad \text{centred: } w^* = s(\bar h_i - m), P = I, \qquad
    \text{across: the same with } P = I - \hat m \hat m^\top
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

HORIZON = 100
"""Running values are plain averages of the first 100 batches, and forget with rate 1/100 after them."""
SMALL_MEAN = 0.05
"""Below this share of the mean norm of the activations, their mean has no direction, and P = I."""
SAMPLED = 1024
"""The classes on which it is measured whether features have settled."""


@dataclass(frozen=True)
class Variant:
    """One form of the rule; the defaults are plain softmax."""

    write: str = "none"
    """none, literal, centred or across."""
    rate: str = "annealed"
    """annealed: max(1/c, γ) while c < T; constant: γ while c < T; kalman: a gain with drift γ, for ever or to T."""
    counted: str = "always"
    """always: c counts every occurrence; start: those since writing began."""
    gamma: float = 0.05
    limit: float = 100
    start: float = 0.0
    """The share of training after which writing begins."""
    stop: float = 1.0
    fade: bool = False
    """Multiply λ by lr / highest lr."""
    first: bool = False
    """Let the first write of a class keep λ = 1 while λ fades."""
    surprise: float = 0.0
    """Multiply λ by (1 - p of the target) to this power."""
    seen: bool = False
    """Leave classes that never occurred out of the softmax."""


class Rule:
    """The state of the rule, and one write after each step."""

    def __init__(self, variant: Variant, weight: Tensor, peak: float, seed: int) -> None:
        classes, features = weight.shape
        self.variant, self.weight, self.peak = variant, weight, peak
        zeros = weight.new_zeros
        self.counts, self.since = zeros(classes), zeros(classes)
        self.variance = zeros(classes)
        """Of a class's row, in units of the scatter of its activations; kalman only."""
        self.mean, self.mean_norm, self.row_norm = zeros(features), zeros(()), zeros(())
        self.batches, self.lr, self.progress = zeros(()), zeros(()), zeros(())
        self.prior = torch.full((classes,), 0.0, device=weight.device)
        generator = torch.Generator().manual_seed(seed)
        self.sample = torch.randperm(classes, generator=generator)[:SAMPLED].to(weight.device)
        self.memory = zeros(len(self.sample), features)
        """The mean activation of each sampled class, each occurrence with rate max(1/c, 0.1)."""
        self.fits = zeros(3)
        """Running values over the sampled classes of a batch: cos(h - m, row), cos(h - m, memory - m), and share."""

    def before_loss(self, targets: Tensor) -> Tensor | None:
        """Return the additive term that leaves out classes which never occurred, if that is wanted."""
        if not self.variant.seen:
            return None
        self.prior.fill_(-torch.inf).masked_fill_(self.counts > 0, 0.0)
        return self.prior.index_fill_(0, targets, 0.0)

    @torch.no_grad()
    def after_step(self, h: Tensor, targets: Tensor, nll: Tensor) -> None:
        """Write a batch: activations (N, d) before dropout, their classes (N,), and -log p of them (N,)."""
        v, weight = self.variant, self.weight
        h = h.float()
        n = torch.zeros_like(self.counts).index_add_(0, targets, torch.ones_like(nll))
        seen, per_class = n > 0, n.clamp(min=1)
        means = torch.zeros_like(weight).index_add_(0, targets, h) / per_class[:, None]
        self.batches += 1
        share = (1 / self.batches).clamp(min=1 / HORIZON)
        centred = v.write != "literal"
        center = self.mean if centred else torch.zeros_like(self.mean)
        self.mean_norm.lerp_((h - center).norm(dim=1).mean(), share)
        familiar = seen & (self.counts > 0)
        norm = (weight.norm(dim=1) * familiar).sum() / familiar.sum().clamp(min=1)
        self.row_norm.copy_(torch.where(familiar.any(), self.row_norm.lerp(norm, share), self.row_norm))
        self._measure(means, seen, share)
        if v.write != "none":
            self._write(means - center, n, seen, per_class, targets, nll)
        self.mean.lerp_(h.mean(0), share)
        self.counts += n

    def _write(
        self, memories: Tensor, n: Tensor, seen: Tensor, per_class: Tensor, targets: Tensor, nll: Tensor
    ) -> None:
        v, weight = self.variant, self.weight
        scale = 1.0 if v.write == "literal" else self.row_norm / self.mean_norm.clamp(min=1e-9)
        on = ((self.progress >= v.start) & (self.progress <= v.stop)).to(n.dtype)
        away = scale * memories - weight
        if v.write == "across":
            size = self.mean.norm()
            direction = self.mean / size.clamp(min=1e-9) * (size > SMALL_MEAN * self.mean_norm)
            away -= (away @ direction)[:, None] * direction
        rate = self._rate(n, seen)
        if v.surprise:
            sure = torch.zeros_like(n).index_add_(0, targets, (-nll).exp()) / per_class
            rate = rate * (1 - sure).clamp(min=0) ** v.surprise
        strength = self.lr / self.peak if v.fade else torch.ones_like(self.lr)
        if v.first:
            strength = torch.where(self.since == 0, 1.0, strength)
        weight += (rate * strength * on * seen)[:, None] * away
        self.since += n * on

    def _rate(self, n: Tensor, seen: Tensor) -> Tensor:
        v = self.variant
        before = self.since if v.counted == "start" else self.counts
        below = before < v.limit
        if v.rate == "constant":
            return v.gamma * below
        if v.rate == "kalman":
            # Rows drift from where they should be while the network learns: by gamma² of the scatter at the highest lr.
            self.variance += v.gamma**2 * (self.lr / self.peak) ** 2
            gain = self.variance * n / (self.variance * n + 1)
            gain = torch.where(self.since == 0, 1.0, gain)
            after = torch.where(self.since == 0, 1 / n.clamp(min=1), self.variance * (1 - gain))
            self.variance.copy_(torch.where(seen, after, self.variance))
            return gain * below
        return (1 / (before + n).clamp(min=1)).clamp(min=v.gamma) * below

    def _measure(self, means: Tensor, seen: Tensor, share: Tensor) -> None:
        """Compare what a row and what a memory say of the activations of the sampled classes in this batch."""
        at, here = self.sample, seen[self.sample] & (self.counts[self.sample] > 0)
        h = means[at] - self.mean
        rows, memory = self.weight[at], self.memory - self.mean
        number = here.sum().clamp(min=1)
        cosines = [(torch.cosine_similarity(h, each, dim=1) * here).sum() / number for each in (rows, memory)]
        found = torch.stack([*cosines, here.float().mean()])
        self.fits.copy_(torch.where(here.any(), self.fits.lerp(found, share), self.fits))
        rate = (1 / (self.counts[at] + 1)).clamp(min=0.1) * seen[at]
        self.memory.lerp_(means[at], rate[:, None])
