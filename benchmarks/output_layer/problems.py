"""The problems to measure: sizes, and random activations, weights and targets of these sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Spec:
    """One problem: N activations of d features against V classes."""

    name: str
    n: int
    features: int
    classes: int
    dtype: torch.dtype = torch.bfloat16
    logits: str = "random"

    @property
    def flops(self) -> int:
        """The operations of three products (logits, dh and dW), which every exact computation needs."""
        return 6 * self.n * self.features * self.classes

    def title(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.name}: {self.n:,} x {self.features:,} x {self.classes:,}, {dtype}, {self.logits} logits"


A = Spec("A", 51_200, 2_048, 267_735)
B = Spec("B", 8_192, 1_024, 32_768)
C = Spec("C", 4_096, 512, 267_735)
D, D1, D16 = (Spec(name, n, 4_096, 128_256) for name, n in (("D", 4_096), ("D1", 1_024), ("D16", 16_384)))
E = Spec("E", 16_384, 2_048, 248_320)
F = Spec("F", 8_192, 576, 49_152)
CUDA = [B, C, F, D1, D, D16, E, A]
"""Short ones first, so that a spent budget leaves out as few as possible."""
CPU_SIZES = [(32, 64, 1_623), (256, 128, 10_000), (512, 256, 33_278), (512, 256, 267_735), (2_048, 128, 50_257)]
CPU = [Spec(f"{i + 1}", *size, dtype=t) for i, size in enumerate(CPU_SIZES) for t in (torch.float32, torch.bfloat16)]
QUICK = [
    Spec("A", 48, 32, 203),
    Spec("B", 32, 16, 128),
    Spec("C", 32, 16, 203, dtype=torch.float32),
    Spec("D", 32, 64, 256),
]


@dataclass
class Problem:
    """The tensors of a spec. Only padded problems have a ``bias``, which is -inf on the padding."""

    spec: Spec
    h: Tensor
    weight: Tensor
    targets: Tensor
    bias: Tensor | None = None

    @cached_property
    def padded(self) -> Problem:
        """The problem with zero rows appended to W: matrix products are fast, and every package takes it."""
        multiple = 256
        rows = -self.spec.classes % multiple
        if not rows:
            raise ValueError(f"{self.spec.classes:,} classes need no padding")
        weight = torch.cat([self.weight.detach(), self.weight.new_zeros(rows, self.spec.features)]).requires_grad_()
        bias = self.weight.new_zeros(self.spec.classes + rows)
        bias[self.spec.classes :] = -math.inf
        return replace(self, weight=weight, bias=bias)


def draw(spec: Spec, device: str, seed: int = 0) -> Problem:
    """Draw W ~ N(0, 1/d), Zipfian targets, and h ~ N(0, 1) ("random") or near the row of its class ("peaked").

    Random logits are like those of an untrained model: about N(0, 1), the target no likelier than the rest. Peaked
    logits are like those of a trained one: h_i = s_i W[y_i] / ‖W[y_i]‖² + noise of size 1/2, so the target's logit is
    about s_i. That is the log of the other classes' sum plus a margin drawn from N(1.5, 1.5²), so that the mean
    p(target) is about 0.75.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device)

    weight = torch.empty(spec.classes, spec.features, device=device, dtype=spec.dtype)
    weight.normal_(0, spec.features**-0.5, generator=generator)
    ranks = torch.arange(1, spec.classes + 1, dtype=torch.float64, device=device)
    targets = torch.multinomial(1 / ranks, spec.n, replacement=True, generator=generator)
    h = normal(spec.n, spec.features)
    if spec.logits == "peaked":
        noise = 0.5
        others = math.log(spec.classes)
        for _ in range(20):  # A fixed point: log Σ exp of the others' logits, N(0, ‖h‖²/d), depends on h.
            others = math.log(spec.classes) + (others**2 / spec.features + noise**2) / 2
        rows = weight[targets].float()
        size = others + 1.5 + 1.5 * normal(spec.n)
        h = noise * h + (size / rows.square().sum(1))[:, None] * rows
    return Problem(spec, h.to(spec.dtype).requires_grad_(), weight.requires_grad_(), targets)


@dataclass
class Reference:
    """The loss and sampled gradients in float64."""

    loss: float
    target_probability: float
    rows: Tensor
    h_gradient: Tensor
    classes: Tensor
    weight_gradient: Tensor
    """Rows of dW for ``classes``, of which the first half are targets of the batch and the others any classes."""


@torch.no_grad()
def reference(problem: Problem, sample: int = 64, chunk_bytes: int = 2**31) -> Reference:
    """Return the float64 truth for ``sample`` rows of h and ``sample`` rows of W.

    A row of dh needs only the logits of that row. A row of dW needs its own logit and the log-sum-exp of every row of
    h, which is one float64 product in chunks of rows.
    """
    spec, targets = problem.spec, problem.targets
    h, weight = problem.h.double(), problem.weight.double()
    step = max(1, chunk_bytes // (8 * spec.classes))
    lse = torch.cat([(part @ weight.T).logsumexp(1) for part in h.split(step)])
    log_p = (h * weight[targets]).sum(1) - lse

    def spread(count: int, total: int) -> Tensor:
        return torch.linspace(0, total - 1, min(count, total), device=h.device, dtype=torch.float64).long()

    rows = spread(sample, spec.n)
    p = torch.exp(h[rows] @ weight.T - lse[rows, None])
    p[torch.arange(len(rows), device=h.device), targets[rows]] -= 1
    h_gradient = p @ weight / spec.n

    classes = torch.cat([targets[spread(sample // 2, spec.n)], spread(sample // 2, spec.classes)])
    p = torch.exp(h @ weight[classes].T - lse[:, None]) - (targets[:, None] == classes).double()
    weight_gradient = p.T @ h / spec.n
    return Reference(-float(log_p.mean()), float(log_p.exp().mean()), rows, h_gradient, classes, weight_gradient)
