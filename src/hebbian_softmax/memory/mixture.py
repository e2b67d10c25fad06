"""The mixture of a model with its memories."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hebbian_softmax.checks import check_number


def mix(
    model: Tensor,
    *,
    cache: Tensor | None = None,
    cache_weight: float = 0.0,
    mbpa: Tensor | None = None,
    mbpa_weight: float = 0.0,
) -> Tensor:
    r"""Return log((1 − λ_c − λ_m) p + λ_c p_c + λ_m p_m) from log-probabilities.

    These may be of the targets alone or of whole distributions. Shapes are broadcast, so that the (θ, n, T) of a sweep
    goes with the (T,) of the model. Where a memory gives NaN it was empty, and the model takes its share.

    Args:
        model: log p.
        cache: log p_c, from :class:`~hebbian_softmax.NeuralCache`.
        cache_weight: λ_c.
        mbpa: log p_m, from :class:`~hebbian_softmax.MbPA`.
        mbpa_weight: λ_m.

    >>> p, p_c = torch.tensor([0.5, 0.5, 0.5]), torch.tensor([0.9, 0.0, torch.nan])
    >>> mix(p.log(), cache=p_c.log(), cache_weight=0.1).exp()
    tensor([0.5400, 0.4500, 0.5000])
    """
    return mix_memories(model, {"cache": (cache, cache_weight), "mbpa": (mbpa, mbpa_weight)})


def mix_memories(model: Tensor, memories: Mapping[str, tuple[Tensor | None, float]]) -> Tensor:
    """Return the mixture of ``model`` with any memories, each given by its name, log-probabilities and weight.

    >>> p, p_c = torch.tensor([0.5, 0.5]), torch.tensor([0.9, 0.0])
    >>> mix_memories(p.log(), {"cache": (p_c.log(), 0.1), "another": (p_c.log(), 0.1)}).exp()
    tensor([0.5800, 0.4000])
    """
    if not isinstance(memories, Mapping) or not all(_is_pair(each) for each in memories.values()):
        raise TypeError(f"memories must map names to pairs of log-probabilities and a weight, got {memories!r}")
    total = sum(check_number(f"{name}_weight", weight, 0, 1) for name, (_, weight) in memories.items())
    if total > 1 + 1e-12:
        names = " + ".join(f"{name}_weight" for name in memories)
        given = " + ".join(repr(weight) for _, weight in memories.values())
        raise ValueError(f"{names} must be at most 1, got {given}")
    _check("model", model, model)
    left = torch.ones_like(model)
    terms = []
    for name, (log_prob, weight) in memories.items():
        if log_prob is None:
            if weight:
                raise ValueError(f"{name} must be given to go with {name}_weight={weight!r}")
            continue
        _check(name, log_prob, model)
        absent = log_prob.isnan()
        left = left - weight * (~absent).to(model.dtype)
        terms.append(torch.where(absent, -torch.inf, log_prob) + (math.log(weight) if weight else -torch.inf))
    result = model + left.clamp_min(0).log()
    for term in terms:
        result = torch.logaddexp(result, term)
    return result


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2


def _check(name: str, value: Tensor, model: Tensor) -> None:
    """Check that log-probabilities go with those of the model."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor of log-probabilities, got {type(value).__name__}")
    if not value.is_floating_point():
        raise TypeError(f"{name} must be floating point, got {value.dtype}")
    if value.device != model.device:
        raise ValueError(f"{name} must be on the device of model, {model.device}, got {value.device}")
    try:
        torch.broadcast_shapes(value.shape, model.shape)
    except RuntimeError:
        shapes = f"{tuple(model.shape)}, got {tuple(value.shape)}"
        raise ValueError(f"{name} must have a shape that goes with model's, {shapes}") from None
