"""Taking over state: from a state dict of a head, or from the plain ``nn.Linear`` that a head replaces."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hebbian_softmax.rule import LARGEST_COUNT

if TYPE_CHECKING:
    from hebbian_softmax.layer import HebbianSoftmax

_log = logging.getLogger("hebbian_softmax")


def tell_familiar(head: HebbianSoftmax, how: str) -> None:
    """Log what happens to rows that come from a plain nn.Linear, and ``how`` to change that.

    It is a warning only where the rule goes on to write trained rows.
    """
    count = torch.tensor([head.limit])
    rate = float(head.rate(count, torch.ones_like(count)))
    _log.log(
        logging.INFO if rate == 0 else logging.WARNING,
        "The %d classes of a plain nn.Linear count as familiar (counts = limit = %d): %s. %s overrides that.",
        head.num_classes,
        head.limit,
        "the rule leaves their rows alone and memorises only classes added later"
        if rate == 0
        else f"the given rate still writes them, with λ = {rate:g}; give it a limit to leave their rows alone",
        how,
    )


def adopt_linear(head: HebbianSoftmax, linear: nn.Linear, counts: Tensor | int | None) -> None:
    """Give a ``head`` made on the meta device the parameters of ``linear`` and the counts for them."""
    new_counts = torch.full((linear.out_features,), head.limit, dtype=torch.int64)
    if counts is None:
        tell_familiar(head, "The argument counts=")
    else:
        new_counts.copy_(_checked_counts(counts, linear.out_features))
    head.to_empty(device=linear.weight.device)
    head.weight, head.bias = linear.weight, linear.bias
    head.counts.copy_(new_counts)
    head.nonfinite_count.zero_()
    head.running.reset()


def _checked_counts(counts: Tensor | int, classes: int) -> Tensor:
    """Return ``counts`` as int64 if they are integers that fit, one or as many as there are classes."""
    try:
        given = torch.as_tensor(counts)
        # As int64, numbers too large for it are negative.
        good = not given.dtype.is_floating_point and not given.dtype.is_complex and given.dtype != torch.bool
        good = good and given.shape in ((), (classes,)) and not bool((given.long() < 0).any())
    except (TypeError, ValueError, RuntimeError, OverflowError):
        good = False
    if not good:
        raise ValueError(
            f"counts must be integers >= 0, one or {classes} of them, each at most {LARGEST_COUNT}, got {counts!r}"
        )
    return given.long()


def adopt_state(head: HebbianSoftmax, state: dict[str, Any], prefix: str) -> None:
    """Check that ``state`` fits before anything is copied; complete the state of a plain ``nn.Linear``."""
    ours = {prefix + name: tensor for name, tensor in head.state_dict(keep_vars=True).items()}
    _check_bias(head, state, prefix)
    for key, tensor in ours.items():
        value = state.get(key)
        if isinstance(value, Tensor) and value.shape != tensor.shape:
            raise ValueError(
                f"{key} of the loaded state has shape {tuple(value.shape)}, the head's has {tuple(tensor.shape)}; "
                "make the head with the classes of the state, or grow it with add_classes(n)"
            )
    memory = {key for key in ours if key not in (prefix + "weight", prefix + "bias")}
    if prefix + "weight" in state and not memory & state.keys():
        tell_familiar(head, "Setting head.counts")
        for key in memory:
            device = state[prefix + "weight"].device if ours[key].is_meta else ours[key].device
            state[key] = torch.zeros_like(ours[key], device=device)
        state[prefix + "counts"].fill_(head.limit)


def _check_bias(head: HebbianSoftmax, state: dict[str, Any], prefix: str) -> None:
    """Refuse a state with a bias for a head without one, or the other way round, since that changes all logits.

    This also holds with ``strict=False``, which a module is not told about.
    """
    loaded, own = prefix + "bias" in state, head.bias is not None
    if prefix + "weight" in state and loaded != own:
        raise ValueError(
            f"the loaded state has {'a' if loaded else 'no'} bias and the head was made with bias={own}; "
            f"make it with bias={loaded}"
        )
