"""Growing a head in place: new rows for new classes, the same parameters, the optimizer's state kept."""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hebbian_softmax._torch import is_sharded, own_parameter
from hebbian_softmax.checks import check_weight
from hebbian_softmax.distributed import fsdp_modules, live_modules

if TYPE_CHECKING:
    from hebbian_softmax.layer import HebbianSoftmax

OUTGROWN = "this loss was computed before add_classes and its gradient has the old size; compute it again"


def grow(head: HebbianSoftmax, n: int, optimizers: list[torch.optim.Optimizer]) -> None:
    """Append ``n`` rows to weight, bias, counts, their gradients and the optimizers' per-row state."""
    if is_sharded(head.weight) or fsdp_modules(head):
        raise RuntimeError("add_classes cannot grow a head sharded by FSDP; grow it before fully_shard")
    weight = check_weight(head)
    sharers = [module for module in _modules_holding(weight) if module is not head]
    _refuse_what_cannot_grow(head, sharers)
    parameters = [weight] if head.bias is None else [weight, head.bias]
    new_rows = head.new_rows(n)
    new_bias = weight.new_zeros(n)
    with torch.no_grad():
        for parameter, rows in zip(parameters, (new_rows, new_bias), strict=False):
            old = parameter.shape[0]
            _extend(parameter, rows.to(parameter.dtype))
            if id(parameter) not in head.checked_gradients:
                head.checked_gradients.add(id(parameter))
                parameter.register_hook(partial(_check_gradient, weakref.ref(parameter)))
            for optimizer in optimizers:
                _grow_state(optimizer, parameter, old, n)
    head.counts = torch.cat([head.counts, head.counts.new_zeros(n)])
    for module in (head, *sharers):
        _follow(module, weight.shape[0])


def _extend(parameter: Tensor, rows: Tensor) -> None:
    """Append rows to a parameter and zeros to its gradient.

    ``set_`` keeps the parameter's identity and gives it a new gradient accumulator, so that graphs made before
    do not constrain the backward passes made after; assigning ``.data`` would not.
    """
    grad = parameter.grad
    parameter.grad = None
    parameter.set_(torch.cat([parameter.detach(), rows]))  # type: ignore[call-overload]
    if grad is not None:
        parameter.grad = torch.cat([grad, torch.zeros_like(rows, dtype=grad.dtype)])


def _check_gradient(reference: weakref.ref[Tensor], grad: Tensor) -> None:
    """Without this, the backward of a loss made before would leave the parameter a gradient of the old size."""
    parameter = reference()
    if parameter is not None and grad.shape[0] < parameter.shape[0]:
        raise RuntimeError(OUTGROWN)


def _grow_state(optimizer: torch.optim.Optimizer, parameter: Tensor, old: int, n: int) -> None:
    """Give new rows the state that the optimizer starts with."""
    state = optimizer.state.get(parameter, {})
    group = next((each for each in optimizer.param_groups if any(p is parameter for p in each["params"])), {})
    starts = {"step_size": group.get("lr", 0.0), "sum": group.get("initial_accumulator_value", 0.0)}  # Rprop, Adagrad
    for name, value in state.items():
        per_row = isinstance(value, Tensor) and value.dim() == parameter.dim() and value.shape[0] == old
        if per_row and name != "col_var":  # Adafactor's other factor, which has one row
            state[name] = torch.cat([value, value.new_full((n, *value.shape[1:]), float(starts.get(name, 0.0)))])


def _refuse_what_cannot_grow(head: HebbianSoftmax, sharers: list[nn.Module]) -> None:
    if dist.is_available() and dist.is_initialized() and _wrapped_by_ddp(head.weight):
        raise RuntimeError("add_classes cannot grow a head inside DistributedDataParallel; grow it before wrapping")
    for module in sharers:
        own_bias = getattr(module, "bias", None) is not head.bias and getattr(module, "bias", None) is not None
        if own_bias or hasattr(module, "counts"):
            raise ValueError(
                f"weight is shared with {type(module).__name__}, which has per-class state of its own that add_classes "
                "does not grow"
            )


def _follow(module: nn.Module, classes: int) -> None:
    for attribute, kind in (("out_features", nn.Linear), ("num_embeddings", nn.Embedding)):
        if isinstance(module, kind):
            setattr(module, attribute, classes)


def _modules_holding(parameter: Tensor) -> list[nn.Module]:
    """Every module that has ``parameter`` as its weight: a head tied to an embedding does not know the embedding."""
    return [module for module in live_modules() if own_parameter(module, "weight") is parameter]


def _wrapped_by_ddp(weight: Tensor) -> bool:
    wrappers = [module for module in live_modules() if isinstance(module, nn.parallel.DistributedDataParallel)]
    return any(parameter is weight for wrapper in wrappers for parameter in wrapper.parameters())
