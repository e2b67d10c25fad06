"""A literal version of models with memories: word by word, with dense softmaxes and a layer that is copied."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from hebbian_softmax import MbPA
from hebbian_softmax.lab.language.memories.cache import CacheSettings
from hebbian_softmax.lab.language.memories.mbpa import MbpaSettings
from hebbian_softmax.lab.language.memories.memory import Memories
from hebbian_softmax.lab.language.model import LanguageModel
from tests.closeness import FACTOR, ULPS
from tests.lab.language import toy
from tests.memory.oracles import cache_log_prob, mbpa_log_prob


def model(**changes: Any) -> LanguageModel:
    """Return a model whose activations and rows are far enough apart that memories make a difference."""
    made = toy.model(**changes)
    with torch.no_grad():
        made.head.weight.mul_(3)
        made.projection.mul_(4)
    return made.eval()


def activations(model: LanguageModel, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return activations (T, d) in the model's precision, and the targets."""
    state, found = None, []
    for now, _ in pairwise(ids):
        with torch.no_grad():
            features, state = model.features(now.view(1, 1).long(), state)
        found.append(features.view(-1))
    return torch.stack(found), ids[1:].long()


def parts_of(model: LanguageModel, ids: Tensor, memories: Memories) -> dict[str, Tensor]:
    """Return log p of every word under each part, computed in the model's precision."""
    h, targets = activations(model, ids)
    weight = model.head.weight.detach()
    parts = {"model": (h @ weight.T).log_softmax(1).gather(1, targets[:, None])[:, 0]}
    if (cache := memories.of(CacheSettings)) is not None:
        parts["cache"] = cache_log_prob(h, targets, cache.size, cache.theta).to(h.dtype)
    if (mbpa := memories.of(MbpaSettings)) is not None:
        head = nn.Linear(*reversed(weight.shape), bias=False, dtype=h.dtype)
        with torch.no_grad():
            head.weight.copy_(weight)
        memory = MbPA(mbpa.size, mbpa.neighbours, mbpa.steps, mbpa.rate, mbpa.l2)
        parts["mbpa"] = mbpa_log_prob(h, targets, head, memory)
    return parts


def losses_of(parts: dict[str, Tensor], memories: Memories) -> list[float]:
    """Return -log of (1 − Σ λ) p + Σ λ p_memory; the share of an empty cache is the model's."""
    losses = []
    for t in range(len(parts["model"])):
        given = {each.key: float(parts[each.key][t]) for each in memories.used}
        terms = [(each.share, math.exp(given[each.key])) for each in memories.used if not math.isnan(given[each.key])]
        left = 1 - sum(share for share, _ in terms)
        losses.append(-math.log(left * math.exp(parts["model"][t]) + sum(share * p for share, p in terms)))
    return losses


def perplexity_of(losses: Sequence[float]) -> float:
    return math.exp(sum(losses) / len(losses))


def tolerance(model: LanguageModel, ids: Tensor, *several: Memories) -> float:
    """Return how far losses of words in float32 may be from the exact ones, by the rule of tests/closeness.py.

    A mixture's loss errs by no more than the log-probabilities of its parts do, and the logarithm of a perplexity by no
    more than the losses. `several` are memories whose float32 loops show the error of the parts.
    """
    allowed = 0.0
    for memories in several:
        rounded, exact = (parts_of(each, ids, memories) for each in (model, toy.exactly(model)))
        for name, values in exact.items():
            error = (rounded[name].double() - values).nan_to_num(0.0, 0.0, 0.0).abs().max()
            size = values.nan_to_num(0.0, 0.0, 0.0).abs().max()
            allowed = max(allowed, float(FACTOR * error + ULPS * torch.finfo(torch.float32).eps * size))
    assert allowed < 1e-3
    return allowed
