"""Taking over state: from a state dict of a head, or from the plain ``nn.Linear`` that a head replaces."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hebbian_softmax._torch import is_sharded, own_parameter
from hebbian_softmax.calibration import Calibration
from hebbian_softmax.checks import check_weight
from hebbian_softmax.objectives import Euclidean
from hebbian_softmax.rule import LARGEST_COUNT, PaperRate, RecentRate
from hebbian_softmax.write.running import level_line

if TYPE_CHECKING:
    from hebbian_softmax.layer import HebbianSoftmax

_log = logging.getLogger("hebbian_softmax")

_SIGNATURE = (173 << 8, 211 << 8, 139 << 8, 229 << 8)
"""The constant in the buffer ``filled``. It survives a cast to bfloat16 or float16, and memory garbage differs."""

_CALIBRATION = "calibration."

_OF_TRANSFORMERS = "_is_hf_initialized"
"""The attribute with which transformers marks modules, parameters and buffers that it has loaded or initialised."""


def signature(device: torch.device) -> Tensor:
    """Return the value of the buffer ``filled``, which tells buffers with values from buffers that are only allocated.

    Hugging Face and FSDP users build models on the meta device and allocate what a checkpoint lacks with
    ``torch.empty``. Counts that are memory garbage look like any other numbers.
    """
    return torch.tensor(_SIGNATURE, device=device)


def _is_signature(filled: Tensor) -> bool:
    """Return whether ``filled`` has its value; averages of states in integers may be off by some."""
    own: Tensor = filled.to_local() if is_sharded(filled) else filled  # tensor parallelism makes DTensors of buffers
    found = own.tolist()
    return len(found) == len(_SIGNATURE) and all(abs(a - b) * 64 <= b for a, b in zip(found, _SIGNATURE, strict=True))


def tell_familiar(head: HebbianSoftmax, how: str) -> None:
    """Log what happens to rows that come from a plain nn.Linear, and ``how`` to change that.

    It is a warning only where the rule goes on to write trained rows.
    """
    if head.seen_only and head.limit == 0:
        raise ValueError(
            "seen_only leaves out classes with count 0, and with limit=0 those of a plain nn.Linear have it; give "
            "counts=1 to from_linear, or make the head with a limit of at least 1"
        )
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


def described(head: HebbianSoftmax) -> str:
    """Return the settings of a head as its ``repr`` has them."""
    rate = f"gamma={head.gamma:g}, limit={head.limit}"
    if head.rate != (PaperRate if head.write == "literal" else RecentRate)(head.gamma, head.limit):
        rate += f", rate={head.rate!r}"
    return (
        f"in_features={head.in_features}, num_classes={head.num_classes}, {rate}, bias={head.bias is not None}, "
        f"dropout={head.dropout:g}, objective={head.objective!r}, write={head.write!r}, scale={head.scale!r}, "
        f"start={head.start!r}, fade={head.fade}, seen_only={head.seen_only}"
    )


def adopt_linear(head: HebbianSoftmax, linear: nn.Linear, counts: Tensor | int | None) -> None:
    """Give a ``head`` made on the meta device the parameters of ``linear`` and the counts for them."""
    new_counts = torch.full((linear.out_features,), head.limit, dtype=torch.int64)
    if counts is None:
        tell_familiar(head, "The argument counts=")
    else:
        new_counts.copy_(check_counts(counts, linear.out_features))
    head.to_empty(device=linear.weight.device)
    head.weight, head.bias = linear.weight, linear.bias
    head.reset_memory(new_counts)
    if head.settling is not None:
        head.settling.reset(begun=True)


def linear_of(head: HebbianSoftmax) -> nn.Linear:
    """Return a plain ``nn.Linear`` that has the parameters of ``head``."""
    weight = check_weight(head)
    linear = nn.Linear(head.in_features, 1, head.bias is not None, "meta", weight.dtype)
    linear.weight, linear.bias, linear.out_features = weight, head.bias, head.num_classes
    return linear.train(head.training)


@torch.no_grad()
def reset(head: HebbianSoftmax, counts: Tensor | int) -> None:
    """Set the counts and forget the running values; a head whose rows are all familiar is a trained one from now on."""
    head.counts.copy_(check_counts(counts, head.num_classes))
    head.since_start.zero_()
    head.nonfinite_count.zero_()
    head.running.reset()
    head.running.seen.copy_(sum_of(head.counts))
    if head.settling is not None:
        head.settling.reset(begun=bool(head.counts.any()))
    trained = head.num_classes > 0 and not head.counts.is_meta and bool((head.counts >= head.limit).all())
    head.calibration = _new_calibration(head) if trained else None
    if trained:
        keep_limit(head)
    head.filled.copy_(signature(head.filled.device))


def sum_of(counts: Tensor) -> Tensor:
    """Return the sum of counts, or about a half of the largest int64 where that is less."""
    return counts.double().sum().clamp_max(2.0**62).long()


def keep_limit(head: HebbianSoftmax) -> None:
    """Let T stay where it is: counts of familiar rows are no counts, so no mean of them says which class is rare."""
    if isinstance(head.rate, RecentRate) and head.rate.limit is None:
        head.rate = replace(head.rate, limit=head.limit)


def _new_calibration(head: HebbianSoftmax) -> Calibration | None:
    """Return an empty calibration; None where the settings ask for another write than the usual one."""
    usual = head.scale == "match" and head.write != "literal" and head.objective == Euclidean() and head.limit > 0
    return Calibration(torch.ones_like(head.counts, dtype=torch.bool)) if usual else None


def ensure_filled(head: HebbianSoftmax) -> None:
    """Give the buffers of a head their values if they were only allocated, or say how to give them."""
    if head.filled is head.checked_filled or head.filled.is_meta:
        return
    loaded = {name for name, buffer in head.named_buffers() if getattr(buffer, _OF_TRANSFORMERS, False)}
    valid = _is_signature(head.filled)
    # transformers loads each buffer by itself: one of another shape is only allocated, beside a constant that is right.
    if not valid or ("filled" in loaded and len(loaded) < len(list(head.buffers()))):
        _fill(head, loaded if valid or "filled" not in loaded else set())
    head.checked_filled = head.filled


def _fill(head: HebbianSoftmax, loaded: set[str]) -> None:
    """Fill the buffers that transformers has only allocated; raise an error where another library may have done it.

    Elsewhere nobody knows whether the rows are new or come from a trained layer.
    """
    if not getattr(head, _OF_TRANSFORMERS, False):
        raise RuntimeError(
            "the head's counts were never filled: its buffers were allocated (by to_empty, or by a library that builds "
            "models on the meta device), but neither loaded nor initialised. Call head.reset_memory() if the rows are "
            "new, or head.reset_memory(head.limit) if they come from a trained layer"
        )
    kept = {name: buffer.clone() for name, buffer in head.named_buffers() if name in loaded}
    trained = getattr(own_parameter(head, "weight"), _OF_TRANSFORMERS, False)
    head.reset_memory(head.limit if trained else 0)
    with torch.no_grad():
        for name, buffer in head.named_buffers():
            if name in kept:
                buffer.copy_(kept[name])
        if "counts" in kept and "since_start" not in kept:  # version 0.1 wrote from the first step on
            head.since_start.copy_(head.counts)
        if "counts" in kept and "running.seen" not in kept:
            head.running.seen.copy_(sum_of(head.counts))
    if "counts" in kept and not any(name.startswith(_CALIBRATION) for name in kept):
        head.calibration = None  # its rows were trained here
    if trained and "counts" not in kept:
        tell_familiar(head, "head.reset_memory(counts)")


def fill_if_known(head: HebbianSoftmax) -> None:
    """Fill the buffers before they are copied or saved, if it is known with what: marks on tensors are not copied."""
    with contextlib.suppress(RuntimeError):
        ensure_filled(head)


def follow_weight(head: HebbianSoftmax, attaching: bool = False) -> None:
    """Keep the counts in step with a weight that others have grown, as transformers resizes a tied embedding."""
    weight = own_parameter(head, "weight")
    if weight is None or weight.shape[0] <= head.counts.shape[0]:
        return  # a weight that is too small is refused where it is written
    rows, counted = weight.shape[0], head.counts.shape[0]
    if head.attachment is not None and head.attachment.active and not attaching:
        raise RuntimeError(
            f"head.weight has {rows} rows now, and had {counted} when the optimizer was made; make a new optimizer and "
            "call head.attach(optimizer, replace=True), or grow with head.add_classes(n), which keeps the optimizer"
        )
    if head.bias is not None and head.bias.shape[0] != rows:
        raise RuntimeError(f"head.weight has {rows} rows and head.bias {head.bias.shape[0]}; resize both")
    for name in ("counts", "since_start"):
        old = getattr(head, name)
        setattr(head, name, torch.cat([old, old.new_zeros(rows - counted)]))
    head.running.grow(rows)
    if head.settling is not None:
        head.settling.grow(rows)
    head.out_features = rows
    _log.info("The head's weight has grown from %d to %d rows; the new ones count as never seen.", counted, rows)


def check_counts(counts: Tensor | int, classes: int) -> Tensor:
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
    _check_bias(head, state, prefix)
    if isinstance(along := state.get(f"{prefix}running.along"), Tensor):
        state[f"{prefix}running.along"] = level_line(along)
    for key, tensor in _keyed(head, prefix).items():
        value = None if key.startswith(prefix + _CALIBRATION) else state.get(key)
        if isinstance(value, Tensor) and value.shape != tensor.shape:
            raise ValueError(
                f"{key} of the loaded state has shape {tuple(value.shape)}, the head's has {tuple(tensor.shape)}; "
                "make the head with the classes of the state, or grow it with add_classes(n)"
            )
        if isinstance(value, Tensor) and is_sharded(tensor) and not is_sharded(value):
            raise ValueError(
                f"{key} of the loaded state is a plain tensor, and the head's is sharded over ranks; load the state "
                "before sharding, or with set_model_state_dict and StateDictOptions(full_state_dict=True)"
            )
    if prefix + "counts" in state:  # Version 0.1 wrote from the first step on.
        state.setdefault(prefix + "since_start", state[prefix + "counts"].clone())
        for name in ("along", "along_batches", "returning", "first"):  # nor did it write across the mean
            state.setdefault(f"{prefix}running.{name}", torch.zeros_like(getattr(head.running, name), device="cpu"))
        state.setdefault(prefix + "running.seen", sum_of(state[prefix + "counts"]))
        _adopt_settling(head, state, prefix)
    filled = state.get(prefix + "filled")
    if filled is not None and not _is_signature(filled):
        raise ValueError(
            f"{prefix}filled of the loaded state is not the constant that every head saves, so the counts beside it "
            "are memory garbage; load a state that was saved from a head with values"
        )
    _adopt_calibration(head, state, prefix)
    ours, others = _keyed(head, prefix), (prefix + "weight", prefix + "bias", prefix + "filled")
    memory = {key for key in ours if key not in others and not key.startswith(prefix + "settling.")}
    if prefix + "weight" in state and filled is None and not memory & state.keys():
        tell_familiar(head, "Setting head.counts")
        for key in memory:
            device = state[prefix + "weight"].device if ours[key].is_meta else ours[key].device
            state[key] = torch.zeros_like(ours[key], device=device)
        state[prefix + "counts"].fill_(head.limit)
        keep_limit(head)
        if head.calibration is not None:
            state[prefix + _CALIBRATION + "familiar"].fill_(True)
        _adopt_settling(head, state, prefix)
    if memory <= state.keys():  # of a plain layer, saved before there was the constant, or whole
        state[prefix + "filled"] = signature(state[prefix + "counts"].device)
    else:  # a part of the memory says nothing about the rest of it
        state.pop(prefix + "filled", None)


def _adopt_settling(head: HebbianSoftmax, state: dict[str, Any], prefix: str) -> None:
    """Complete a state of a head that did not wait for features to settle, or leave out what this head does not need.

    Features of such a head have settled if anything was counted.
    """
    own = prefix + "settling."
    if head.settling is None:
        for key in [key for key in state if key.startswith(own)]:
            del state[key]
    elif own + "memory" not in state or own + "stride" not in state:
        begun = bool(state[prefix + "counts"].any())
        fresh = type(head.settling)(head.in_features, head.num_classes, device="cpu", dtype=head.running.mean.dtype)
        fresh.reset(begun)
        state.update({own + name: value for name, value in fresh.state_dict().items()})


def _keyed(head: HebbianSoftmax, prefix: str) -> dict[str, Tensor]:
    return {prefix + name: tensor for name, tensor in head.state_dict(keep_vars=True).items()}


def _adopt_calibration(head: HebbianSoftmax, state: dict[str, Any], prefix: str) -> None:
    """Give the head a calibration if the state has one, or is that of a plain ``nn.Linear``; else let it have none."""
    names = {key.removeprefix(prefix) for key in state if key.startswith(prefix)}
    if "weight" not in names:
        return
    calibration = _new_calibration(head) if names <= {"weight", "bias"} else None
    if any(name.startswith(_CALIBRATION) for name in names):
        calibration = Calibration(torch.zeros_like(head.counts, dtype=torch.bool))
        calibration.fit_to(state, prefix + _CALIBRATION, head.in_features)
        keep_limit(head)
    head.calibration = calibration


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
