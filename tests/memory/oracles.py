"""The memories by their definitions, one position and one entry at a time, in float64."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from hebbian_softmax import MbPA

on_every_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def stream(length: int, features: int, classes: int, *, seed: int = 0, batch: int | None = None, scale: float = 1.0):
    generator = torch.Generator().manual_seed(seed)
    shape = (length,) if batch is None else (batch, length)
    h = torch.randn(*shape, features, dtype=torch.float64, generator=generator) * scale
    return h, torch.randint(classes, shape, generator=generator)


def cache_log_prob(h: Tensor, targets: Tensor, size: int, theta: float) -> Tensor:
    """Return equation 1 as a double loop over one stream (T, d); NaN where nothing is stored."""
    found = []
    for t in range(len(h)):
        numerator, total = 0.0, 0.0
        for i in range(max(0, t - size), t):
            value = math.exp(theta * float(h[t] @ h[i]))
            total += value
            numerator += value * (int(targets[i]) == int(targets[t]))
        if total == 0:
            found.append(math.nan)
        else:
            found.append(math.log(numerator / total) if numerator else -math.inf)
    return torch.tensor(found, dtype=torch.float64)


def mbpa_distribution(query: Tensor, keys: Tensor, labels: Tensor, head: nn.Linear, mbpa: MbPA) -> Tensor:
    """Return log p(· | query, θ̃) of a head that is really copied and adapted by autograd, with the settings of mbpa."""
    adapted = copy.deepcopy(head)
    if len(keys):
        distance = (keys - query).square().sum(1)
        nearest = distance.argsort()[: mbpa.neighbours]
        kernel = 1 / (mbpa.epsilon + distance[nearest])
        weights = kernel / kernel.sum()
        optimizer = torch.optim.SGD(adapted.parameters(), lr=mbpa.learning_rate)
        for _ in range(mbpa.steps):
            optimizer.zero_grad()
            log_prob = adapted(keys[nearest]).log_softmax(1)[torch.arange(len(nearest)), labels[nearest]]
            pairs = zip(adapted.parameters(), head.parameters(), strict=True)
            pull = sum((a - b.detach()).square().sum() for a, b in pairs)
            (mbpa.l2 / 2 * pull - (weights * log_prob).sum()).backward()
            optimizer.step()
    return adapted(query).log_softmax(0).detach()


def mbpa_log_prob(h: Tensor, targets: Tensor, head: nn.Linear, mbpa: MbPA) -> Tensor:
    """Return log p of each target of one stream (T, d) given the positions before it that mbpa would hold."""
    found = []
    for t in range(len(h)):
        past = slice(max(0, t - mbpa.memory_size), t)
        found.append(mbpa_distribution(h[t], h[past], targets[past], head, mbpa)[targets[t]])
    return torch.stack(found)
