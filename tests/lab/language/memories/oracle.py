"""A model with memories as the definitions read: one word after the other, dense softmaxes, a layer that is copied."""

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from hebbian_softmax.lab.language.learner import make_model
from hebbian_softmax.lab.language.memories.reading import CacheSettings, MbpaSettings, Memories
from hebbian_softmax.lab.language.model import LanguageModel
from tests.lab.language.toy import WORDS, device, settings
from tests.memory.oracles import cache_log_prob, mbpa_log_prob


def model(**changes: Any) -> LanguageModel:
    """With activations and rows far enough apart that it and its memories have something to say."""
    made = make_model(settings(**changes), WORDS, hebbian=True, device=device())
    with torch.no_grad():
        made.head.weight.mul_(3)
        assert made.projection is not None
        made.projection.mul_(4)
    return made.eval()


def activations(model: LanguageModel, ids: Tensor) -> tuple[Tensor, Tensor]:
    """(T, d) in float64, and the targets."""
    state, found = None, []
    for now, _ in pairwise(ids):
        with torch.no_grad():
            features, state = model.features(now.view(1, 1).long(), state)
        found.append(features.view(-1).double())
    return torch.stack(found), ids[1:].long()


def parts_of(model: LanguageModel, ids: Tensor, memories: Memories) -> dict[str, Tensor]:
    """log p of every word under each part."""
    h, targets = activations(model, ids)
    weight = model.head.weight.detach().double()
    parts = {"model": (h @ weight.T).log_softmax(1).gather(1, targets[:, None])[:, 0]}
    if memories.cache is not None:
        parts["cache"] = cache_log_prob(h, targets, memories.cache.size, memories.cache.theta)
    if (mbpa := memories.mbpa) is not None:
        head = nn.Linear(*reversed(weight.shape), bias=False, dtype=torch.float64)
        with torch.no_grad():
            head.weight.copy_(weight)
        options = {"neighbours": mbpa.neighbours, "steps": mbpa.steps, "learning_rate": mbpa.rate, "l2": mbpa.l2}
        parts["mbpa"] = mbpa_log_prob(h, targets, head, mbpa.size, **options, epsilon=1e-3)
    return parts


def losses_of(parts: dict[str, Tensor], cache: CacheSettings | None, mbpa: MbpaSettings | None) -> list[float]:
    """-log of (1 − λ_c − λ_m) p + λ_c p_c + λ_m p_m; the share of an empty cache is the model's."""
    losses = []
    for t in range(len(parts["model"])):
        terms = []
        if cache is not None and not math.isnan(parts["cache"][t]):
            terms.append((cache.share, math.exp(parts["cache"][t])))
        if mbpa is not None:
            terms.append((mbpa.share, math.exp(parts["mbpa"][t])))
        left = 1 - sum(share for share, _ in terms)
        losses.append(-math.log(left * math.exp(parts["model"][t]) + sum(share * p for share, p in terms)))
    return losses


def perplexity_of(losses: list[float]) -> float:
    return math.exp(sum(losses) / len(losses))
