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
from typing import Any

import torch
from torch import Tensor

HORIZON = 100
"""Running values are plain averages of the first 100 batches, and forget with rate 1/100 after them."""
SMALL_MEAN = 0.05
"""Below this share of the mean norm of the activations, their mean has no direction, and P = I."""
FEW = 5
"""Rows seen less often than this say what along m a class has that was seen once."""
RECENT, LEAST_FIT = 10, 0.2
"""The batches of a recent mean, and the fit below which activations say too little of their class to be written."""
MOST_SCATTER = 4.0
"""How many occurrences at most chance is said to be worth where that is measured."""
SAMPLED = 1024
"""The classes on which it is measured whether features have settled."""


@dataclass(frozen=True)
class Variant:
    """One form of the rule; the defaults are plain softmax."""

    write: str = "none"
    """none, literal, centred or across."""
    library: dict[str, Any] | None = None
    """Let the library's own head write, made with these options, and nothing else of this class; none of them are its
    defaults."""
    rate: str = "annealed"
    """annealed: max(1/c, γ); constant: γ; jump: 1 for a class never seen, then γ; polynomial: γ/(c - 1 + γ), at least
    ``floor``, a mean that weighs late occurrences more; kalman: a gain with drift γ. Each while c < T."""
    counted: str = "always"
    """always: c counts every occurrence; start: those since writing began."""
    gamma: float = 0.05
    limit: float = 100
    floor: float = 0.0
    """The least λ of a polynomial rate below T."""
    within: float = 0.0
    """Let that least λ be not more than the share that a batch has in a class's occurrences of so many batches."""
    falling: float = 0.0
    """Let that share have its full weight only where the learning rate has fallen: the weight is this times
    (1 - lr / highest), at most 1; 0 gives it its full weight always."""
    soft: float = 0.0
    """Let λ fall as 1/(1 + (c/T) to this power) in place of ending at T."""
    limit_per_step: float = 0.0
    """T is at least this times the steps so far, so that it stands for a frequency in long trainings."""
    limit_of_mean: float = 0.0
    """T is at least this times the mean count of all classes, so that it stands for a frequency whatever the batch."""
    start: float = 0.0
    """The share of training after which writing begins."""
    start_step: int = 0
    """The steps after which writing begins, where nobody knows how long training will be."""
    settled: float = 0.0
    """Begin once the second of the fits, cos(h - m, memory - m), has reached this; 0 does not wait."""
    caught_up: float = 0.0
    """Begin once that fit has risen no further: it is at least this times its mean of the last ten batches."""
    stop: float = 1.0
    fade: bool = False
    """Multiply λ by lr / highest lr."""
    fading: float = 1.0
    """The power of lr / highest lr by which λ fades."""
    first: bool = False
    """Let the first write of a class keep λ = 1 while λ fades."""
    average: float = 0.0
    """Write the running mean of a class's activations, which forgets with this rate, in place of the batch's mean."""
    shorten: float | str = 0.0
    """Write memories k / (k + this) times as long, because a mean of few is mostly chance: k = n (2/λ - 1) occurrences
    have a plain mean that varies as much as the running mean of a class that mixes n of them in with rate λ. (Up to
    2026-11-18 k was kept for each class and followed the rates it had been written with.) "fit" measures this number:
    the squared distance of an activation from its class mean over that of the class mean from m is 1/f² - 1, where f is
    the second of the fits, if memories are near the class means."""
    lessen: float = 0.0
    """Multiply λ by k / (k + this), with the k of ``shorten``: a memory of few activations changes a row less, where a
    shorter one takes as much of the row away and gives less for it."""
    prior: float = 0.0
    """Let the row as it is count as so many occurrences before the batch, in a polynomial rate."""
    whole: bool = False
    """Let a first write set the component along m at once, whatever λ is."""
    surprise: float = 0.0
    """Multiply λ by (1 - p of the target) to this power."""
    seen: bool = False
    """Leave classes that never occurred out of the softmax."""
    base: bool | str = False
    """Set the component along m of a class that occurs for the first time to the mean of that of all rows seen, or with
    "rare" to the running mean of that of the batches' rows that were seen fewer than T times, or with "line" to what
    the line through that component and log c of these rows gives for c = 1, or with "few" as with "rare", but from rows
    that were seen fewer than 5 times. "return" reads that line at another c, from 1 up to T: the count that a
    class would have by now if it came as often as classes seen once come. That is large in a curriculum, where a new
    class comes as often as the others from then on. "aged" is the same, but each class counts by the batches since it
    came first, so that a word that comes again soon, within one article, is not taken for one that comes often, and the
    line is read at its middle at most, also where no class was seen once. The library does that with a sample.
    "rise" raises the row's own component by what makes its logit larger by the logarithm of how much more often a class
    comes that was seen once than one that never was."""
    common: bool = False
    """Leave the part along the running mean of rare rows alone, too, and treat it as that along m: gradients push rows
    of rare classes away in one direction, which need not be that of m where an optimizer scales each feature."""
    match: str = "norm"
    """How activations get the form of rows. norm: one factor, so that their norms are equal; least squares: the factor
    that predicts a familiar class's row best from the mean of as many of its activations as were written, which is
    smaller for fewer of them; feature: a factor for each feature, which predicts it best for classes seen T times, at
    the norm of rows; map: the linear map that predicts these rows best; map norm: the same, at the norm of rows."""
    shrink: bool = False
    """Multiply the optimizer's first moment of a written row by 1 - λ."""
    gate: float = 0.0
    """Scale gradients that push a row away by min(1, its share of the occurrences / (gate × the mean share))."""


class Rule:
    """The state of the rule, and one write after each step."""

    def __init__(self, variant: Variant, weight: Tensor, peak: float, seed: int) -> None:
        classes, features = weight.shape
        self.variant, self.weight, self.peak = variant, weight, peak
        zeros = weight.new_zeros
        self.counts, self.since = zeros(classes), zeros(classes)
        self.variance = zeros(classes)
        """Of a class's row, in units of the scatter of its activations; kalman only."""
        self.held = zeros(classes) + 1e-9
        """The number of occurrences whose plain mean would vary as much as what was written of a class."""
        self.mean, self.mean_norm, self.row_norm = zeros(features), zeros(()), zeros(())
        self.batches, self.row_batches, self.lr, self.progress = (zeros(()) for _ in range(4))
        self.begun = zeros(())
        """1 once features have settled, where the variant waits for that."""
        self.averages = zeros(classes, features) if variant.average else None
        self.moment: Tensor | None = None
        """The optimizer's running mean of the gradients of ``weight``, where it has one and the variant shrinks it."""
        self.prior = torch.full((classes,), 0.0, device=weight.device)
        generator = torch.Generator().manual_seed(seed)
        self.sample = torch.randperm(classes, generator=generator)[:SAMPLED].to(weight.device)
        self.memory = zeros(len(self.sample), features)
        """The mean activation of each sampled class, each occurrence with rate max(1/c, 0.1)."""
        self.fits = zeros(3)
        """Running values over the sampled classes of a batch: cos(h - m, row), cos(h - m, memory - m), and share."""
        self.base, self.base_batches = zeros(()), zeros(())
        """The component along m of rows that were seen a few times."""
        self.common = zeros(features)
        """The running mean of rows that were seen a few times."""
        self.common_line = zeros(4)
        """As ``line``, for the component along that mean, across m."""
        self.line = zeros(4)
        """Running means of x = log c and y, the component along m, of rows that were seen a few times: x, y, x², xy."""
        self.first = zeros(classes)
        """The batches before each class came first."""
        self.returning = zeros(2)
        """Running means over classes seen once, each times the batches since: how often they come, and their number."""
        self.firsts = zeros(2, 2)
        """Of classes never seen, and of those seen once: running means of how often they come, and of their number."""
        self.recent = zeros(())
        """The second of the fits over the last ten batches."""
        self.squares = zeros(2, features)
        """Products of activations, across m, with themselves and with the rows of classes seen T times, by feature."""
        self.products = zeros(2, features, features)
        """The same products of every feature with every other, not across m."""
        self.map, self.mapped_norm = torch.eye(features, device=weight.device), zeros(())
        self.logit, self.within, self.between, self.known_batches = (zeros(()) for _ in range(4))
        """Of classes seen at least T times, across m: the product of row and activation, the squared distance of an
        activation from the class mean, and that of the class mean from m."""

    def refresh(self) -> None:
        """Solve for the map anew, where there is one; this is no part of a CUDA graph."""
        if self.variant.match not in ("map", "map norm"):
            return
        a, b = self.products.double()
        ridge = 1e-2 * a.diagonal().mean()
        if ridge > 0:  # else no class has been seen T times
            self.map.copy_(torch.linalg.solve(a + ridge * torch.eye(len(a), device=a.device), b.T).T)

    def before_loss(self, targets: Tensor) -> Tensor | None:
        """Return the additive term that leaves out classes which never occurred, if that is wanted."""
        if not self.variant.seen:
            return None
        self.prior.fill_(-torch.inf).masked_fill_(self.counts > 0, 0.0)
        return self.prior.index_fill_(0, targets, 0.0)

    @torch.no_grad()
    def before_step(self, gradient: Tensor, h: Tensor, targets: Tensor, nll: Tensor) -> None:
        """Gate the gradient of the rows, given activations (N, d) as they entered the product of a mean loss."""
        if not self.variant.gate:
            return
        share = self.counts * len(self.counts) / self.counts.sum().clamp(min=1)
        gate = (share / self.variant.gate).clamp(max=1)[:, None]
        pulls = (1 - (-nll).exp())[:, None] * h / len(h)
        gradient.mul_(gate).sub_((1 - gate) * torch.zeros_like(gradient).index_add_(0, targets, pulls))

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
        self.row_batches += familiar.any()
        row_share = familiar.any() / self.row_batches.clamp(min=1, max=HORIZON)
        self.row_norm.lerp_(norm, row_share)
        if v.match in ("feature", "map", "map norm"):
            known = (means - center) * (seen & (self.counts >= v.limit))[:, None]
            if v.match == "feature":
                known = self._across(known)
                found = torch.stack([known * known, known * self._across(weight)])
                self.squares.lerp_(found.sum(1), share)
            else:
                self.products.lerp_(torch.stack([known.T @ known, weight.T @ known]), share)
            self.mapped_norm.lerp_(self._mapped(h - center).norm(dim=1).mean(), share)
        if v.match == "least squares":
            self._regress(h, targets, means, n, seen)
        self._measure(means, seen, share)
        if self.averages is not None:
            rate = (n / (self.counts + n).clamp(min=1)).clamp(min=v.average) * seen
            means = self.averages.lerp_(means, rate[:, None])
        if v.write != "none":
            self._write(means - center, n, seen, per_class, targets, nll)
        self.mean.lerp_(h.mean(0), share)
        self.counts += n

    def _across(self, vectors: Tensor) -> Tensor:
        """Return the part of vectors (..., d) that is across the mean activation."""
        direction = self.mean / self.mean.norm().clamp(min=1e-9)
        return vectors - (vectors @ direction)[..., None] * direction

    def _mapped(self, vectors: Tensor) -> Tensor:
        """Return activations (..., d) in the form that rows of familiar classes have."""
        if self.variant.match == "feature":
            return vectors * (self.squares[1] / self.squares[0].clamp(min=1e-9)).clamp(min=0)
        return vectors @ self.map.T

    def _regress(self, h: Tensor, targets: Tensor, means: Tensor, n: Tensor, seen: Tensor) -> None:
        """Take in how the rows of classes that were seen often depend on their activations."""
        known = (seen & (self.counts >= self.variant.limit)).to(h.dtype)
        many = known.sum()
        self.known_batches += many > 0
        share = (many > 0) / self.known_batches.clamp(min=1, max=HORIZON)
        scatter = (self._across(h - means[targets]).square().sum(1) * known[targets]).sum()
        within = scatter / ((n - 1) * known).sum().clamp(min=1)
        self.within.lerp_(within, share)
        found = self._across(means - self.mean)
        logit = ((found * self._across(self.weight)).sum(1) * known).sum() / many.clamp(min=1)
        squares = (found.square().sum(1) - self.within / n.clamp(min=1)) * known
        self.logit.lerp_(logit, share)
        self.between.lerp_(squares.sum() / many.clamp(min=1), share)

    def _on_line(
        self,
        line: Tensor,
        current: Tensor,
        rare: Tensor,
        share: Tensor,
        rising: bool = True,
        at: Tensor | None = None,
    ) -> Tensor:
        """Return the component that a row has whose class was seen once, by the line through those of rare rows.

        Given ``at``, it is that of a class seen so often.
        """
        x = self.counts.clamp(min=1).log()
        found = (torch.stack([x, current, x * x, x * current]) * rare).sum(1) / rare.sum().clamp(min=1)
        line.lerp_(found, share)
        mean_x, mean_y, square, product = line
        slope = (product - mean_x * mean_y) / (square - mean_x**2).clamp(min=1e-2)
        slope = slope.clamp(min=0) if rising else slope.clamp(max=0)
        away = (0 if at is None else at.log()) - mean_x
        return mean_y + slope * (away.clamp(max=0) if self.variant.base == "aged" else away)

    def _count_of_returning(self, n: Tensor) -> Tensor:
        """Return the count that a class would have by now if it came as often as classes seen once come."""
        if self.variant.base == "aged":
            ages = (self.batches - 1 - self.first) * (self.counts == 1)
            self.first.copy_(torch.where((self.counts == 0) & (n > 0), self.batches - 1, self.first))
            found = torch.stack([ages @ n, ages.sum()])
            often, number = self.returning.lerp_(found, (1 / self.batches).clamp(min=1 / HORIZON))
            count = often / torch.where(number > 0, number, 1.0) * (self.batches - 1)
            return torch.where(number > 0, count, torch.inf).clamp(min=1)
        _, (often, number) = self._see_firsts(n)
        return (often / number.clamp(min=1e-6) * (self.batches - 1)).clamp(min=1, max=self.variant.limit)

    def _rise(self, n: Tensor) -> Tensor:
        """Return the logarithm of how much more often a class comes that was seen once than one that never was."""
        firsts = self._see_firsts(n)
        never, once = (firsts[:, 0] / firsts[:, 1].clamp(min=1e-6)).clamp(min=1e-12)
        return (once / never).clamp(min=1).log()

    def _see_firsts(self, n: Tensor) -> Tensor:
        """Take the batch into the running values of classes never seen and seen once, and return these."""
        groups = torch.stack([self.counts == 0, self.counts == 1]).to(n.dtype)
        found = torch.stack([groups @ n, groups.sum(1)], 1)
        return self.firsts.lerp_(found, (1 / self.batches).clamp(min=1 / HORIZON))

    def _beside_common(self, away: Tensor, rare: Tensor) -> Tensor:
        """Take from changes of rows what is along the mean of rare rows, across m; new rows get that of rows seen once.

        The line through components along m has taken in this batch.
        """
        known = self.counts > 0
        rare = rare & known
        share = rare.any() / self.base_batches.clamp(min=1, max=HORIZON)
        self.common.lerp_((self.weight * rare[:, None]).sum(0) / rare.sum().clamp(min=1), share)
        part = self._across(self.common)
        direction = part / part.norm().clamp(min=1e-9)
        current = self.weight @ direction
        usual = self._on_line(self.common_line, current, rare, share, rising=False)
        along = away @ direction - (usual - current) * (~known & (self.base_batches > 0))
        return away - along[:, None] * direction

    def _write(
        self, memories: Tensor, n: Tensor, seen: Tensor, per_class: Tensor, targets: Tensor, nll: Tensor
    ) -> None:
        v, weight = self.variant, self.weight
        scale = self.row_norm / self.mean_norm.clamp(min=1e-9)
        scale = torch.where((self.row_batches == 0) | (v.write == "literal"), 1.0, scale)
        if v.match in ("feature", "map", "map norm"):
            memories = self._mapped(memories)
            scale = torch.ones_like(scale) if v.match == "map" else self.row_norm / self.mapped_norm.clamp(min=1e-9)
        if v.match == "least squares":
            rate = self._rate(n, seen)
            self.held.copy_(torch.where(seen, 1 / ((1 - rate) ** 2 / self.held + rate**2 / per_class), self.held))
            spread = self.between + self.within / self.held.clamp(min=1)
            scale = (self.logit / spread.clamp(min=1e-9)).clamp(min=0)[:, None] * (self.known_batches > 0)
        settled = self.fits[1] >= v.settled
        if v.caught_up:
            rises = (self.fits[1] < v.caught_up * self.recent) | (self.fits[1] < LEAST_FIT)
            settled = settled & ~rises & (self.batches >= HORIZON)
        self.begun.copy_(torch.maximum(self.begun, settled.to(n.dtype)))
        on = (self.progress >= v.start) & (self.progress <= v.stop) & (self.batches > v.start_step)
        on = on * self.begun
        rate = self._rate(n, seen)
        if v.shorten:
            # A running mean that forgets with rate λ varies as much as the plain mean of n (2/λ - 1) occurrences.
            held = n * (2 - rate)
            scatter = (1 / self.fits[1].clamp(min=1e-3) ** 2 - 1).clamp(max=MOST_SCATTER)
            chance = scatter if v.shorten == "fit" else float(v.shorten)
            memories = memories * (held / (held + chance * rate).clamp(min=1e-9))[:, None]
        if v.lessen:
            held = n * (2 - rate)
            rate = rate * held / (held + v.lessen * rate).clamp(min=1e-9)
        away = scale * memories - weight
        if v.write == "across":
            size = self.mean.norm()
            direction = self.mean / size.clamp(min=1e-9) * (size > SMALL_MEAN * self.mean_norm)
            along = away @ direction
            if v.base:
                known, current = self.counts > 0, weight @ direction
                usual, is_known = (current * known).sum() / known.sum().clamp(min=1), known.any()
                if v.base in ("rare", "few"):
                    rare = seen & known & (self.counts < (v.limit if v.base == "rare" else FEW))
                    self.base_batches += rare.any()
                    share = rare.any() / self.base_batches.clamp(min=1, max=HORIZON)
                    self.base.lerp_((current * rare).sum() / rare.sum().clamp(min=1), share)
                    usual, is_known = self.base, self.base_batches > 0
                if v.base in ("line", "return", "aged"):
                    rare = seen & known & (self.counts < v.limit)
                    self.base_batches += rare.any()
                    share = rare.any() / self.base_batches.clamp(min=1, max=HORIZON)
                    at = None if v.base == "line" else self._count_of_returning(n)
                    usual, is_known = self._on_line(self.line, current, rare, share, at=at), self.base_batches > 0
                if v.base == "rise":
                    usual, is_known = current + self._rise(n) / size.clamp(min=1e-9), size > 0
                sets = (usual - current) * (~known & is_known)
                along -= sets / rate.clamp(min=1e-9) if v.whole else sets
            away -= along[:, None] * direction
            if v.common:
                away = self._beside_common(away, seen & (self.counts < v.limit))
        if v.surprise:
            sure = torch.zeros_like(n).index_add_(0, targets, (-nll).exp()) / per_class
            rate = rate * (1 - sure).clamp(min=0) ** v.surprise
        strength = (self.lr / self.peak) ** v.fading if v.fade else torch.ones_like(self.lr)
        if v.first:
            strength = torch.where(self.since == 0, 1.0, strength)
        mixed = (rate * strength * on * seen)[:, None]
        weight += mixed * away
        if v.shrink and self.moment is not None:
            self.moment *= 1 - mixed
        self.since += n * on

    def _rate(self, n: Tensor, seen: Tensor) -> Tensor:
        v = self.variant
        before = self.since if v.counted == "start" else self.counts
        limit = (self.batches * v.limit_per_step).clamp(min=v.limit)
        if v.limit_of_mean:
            limit = torch.maximum(limit, v.limit_of_mean * self.counts.mean())
        below = 1 / (1 + (before / limit) ** v.soft) if v.soft else (before < limit).to(n.dtype)
        if v.rate == "constant":
            return v.gamma * below
        if v.rate == "jump":
            return torch.where(before == 0, 1.0, v.gamma) * below
        if v.rate == "polynomial":
            rate = v.gamma * n / (before + v.prior + v.gamma * n).clamp(min=1e-9)
            if v.within:
                recent = n * (self.batches - 1) / v.within
                if v.falling:
                    recent = recent * (v.falling * (1 - self.lr / self.peak)).clamp(max=1)
                return torch.maximum(rate, (recent / (before + recent).clamp(min=1e-9)).clamp(max=v.floor)) * below
            return rate.clamp(min=v.floor) * below
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
        lately = self.recent.lerp(found[1], share.clamp(min=1 / RECENT))
        self.recent.copy_(torch.where(here.any(), lately, self.recent))
        rate = (1 / (self.counts[at] + 1)).clamp(min=0.1) * seen[at]
        self.memory.lerp_(means[at], rate[:, None])
