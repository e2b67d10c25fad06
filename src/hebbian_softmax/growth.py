"""Growing a head in place: new rows for new classes in the same parameters, with the optimizer's state.

A single new class must not cost a pass over the matrix. So on a CPU what grows has memory with spare rows
(:func:`appended`), and the modules that share the weight are searched for once (:func:`_holders_of`).
"""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from hebbian_softmax._torch import is_sharded, own_parameter
from hebbian_softmax.checks import check_integer, check_weight
from hebbian_softmax.distributed import fsdp_modules, live_modules, wrapped_by_ddp
from hebbian_softmax.state import ensure_filled, follow_weight

if TYPE_CHECKING:
    from hebbian_softmax.layer import HebbianSoftmax

OUTGROWN = "this loss was computed before add_classes and its gradient has the old size; compute it again"

_SPARE = 8
"""Memory that is too small for new rows is replaced by memory for an eighth more rows than are needed."""


@dataclass
class _Reserve:
    """Memory with spare rows. The tensor that uses it keeps it alive, and nothing here does."""

    storage: weakref.ref[torch.UntypedStorage]
    used: int
    """The bytes that belong to a tensor."""


@dataclass(frozen=True)
class _Holders:
    """The modules that have a parameter as their weight: a head does not know an embedding tied to it."""

    parameter: weakref.ref[Tensor]
    modules: list[weakref.ref[nn.Module]]


_reserves: dict[int, _Reserve] = {}
"""By the address of the memory."""
_holders: dict[int, _Holders] = {}
"""By the ``id`` of the parameter."""


def grow(head: HebbianSoftmax, n: int, optimizer: torch.optim.Optimizer | None) -> None:
    """Append ``n`` rows to weight, bias, counts, their gradients and the per-row state of the optimizers."""
    n = check_integer("n", n, 1)
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    attached = None if head.attachment is None else head.attachment.optimizer()
    optimizers = {id(each): each for each in (optimizer, attached) if each is not None}.values()
    ensure_filled(head)
    follow_weight(head)
    weight = check_weight(head)
    if head.row_mesh is not None:
        raise RuntimeError(
            "add_classes cannot grow a head whose rows are shared by ranks; grow it before shard_rows, or load its "
            "full state dict into a new head, grow that, and share its rows"
        )
    if is_sharded(weight) or fsdp_modules(head):
        raise RuntimeError("add_classes cannot grow a head sharded by FSDP; grow it before fully_shard")
    sharers = [module for module in _holders_of(weight) if module is not head]
    _refuse_what_cannot_grow(head, sharers)
    parameters = [weight] if head.bias is None else [weight, head.bias]
    pending = None if head.attachment is None else head.attachment.pending
    if pending is not None:
        pending.drop_cleared()
    with torch.no_grad():
        new_rows, new_bias = _new_rows(head, weight, n)
        for parameter, rows in zip(parameters, (new_rows, new_bias), strict=False):
            old = parameter.shape[0]
            _extend(parameter, rows.to(parameter.dtype))
            if id(parameter) not in head.checked_gradients and parameter.requires_grad:
                head.checked_gradients.add(id(parameter))
                parameter.register_hook(partial(_check_gradient, weakref.ref(parameter)))
            for optimizer in optimizers:
                _grow_state(optimizer, parameter, old, n)
    head.counts, head.since_start = (appended(each, each.new_zeros(n)) for each in (head.counts, head.since_start))
    head.running.grow(weight.shape[0])
    if head.settling is not None:
        head.settling.grow(weight.shape[0])
    for module in (head, *sharers):
        _follow(module, weight.shape[0])
    if pending is not None:
        pending.note_gradient()  # which is a new tensor


def _new_rows(head: HebbianSoftmax, weight: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Return ``n`` rows and biases: in a trained head those of a very unlikely class, else those of a new head."""
    if head.calibration is None:
        new_rows = nn.init.kaiming_uniform_(weight.new_empty(n, head.in_features), a=math.sqrt(5))  # as in nn.Linear
        return new_rows, weight.new_zeros(n)
    row, constant = head.calibration.unseen(weight, head.bias, head.new_classes)
    return row.expand(n, -1), constant.expand(n)


def appended(tensor: Tensor, rows: Tensor) -> Tensor:
    """Return ``tensor`` followed by ``rows``; on a CPU, without copying ``tensor`` while its memory has spare rows.

    The storage of the result has the size of the result, so that no file and no copy holds spare rows. A tensor that
    was moved, loaded or made anew since its last growth has other memory, and is copied. GPUs copy fast and have little
    memory to spare, so there every growth is a copy.
    """
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.device.type != "cpu" or tensor.layout != torch.strided:
        return torch.cat([tensor, rows])
    old, size = tensor.shape[0], (tensor.shape[0] + rows.shape[0], *tensor.shape[1:])
    needed = math.prod(size) * tensor.element_size()
    storage = _spare_memory(tensor, needed)
    copies = storage is None
    if storage is None:
        storage = torch.UntypedStorage(needed + needed // _SPARE)
    grown = tensor.new_empty(0)
    grown.set_(storage[:needed], 0, size)  # type: ignore[call-overload]
    if copies:
        grown[:old] = tensor
        for address in [address for address, reserve in _reserves.items() if reserve.storage() is None]:
            del _reserves[address]
    grown[old:] = rows
    _reserves[storage.data_ptr()] = _Reserve(weakref.ref(storage), needed)
    return grown


def _spare_memory(tensor: Tensor, needed: int) -> torch.UntypedStorage | None:
    """Return memory of ``needed`` bytes or more that begins with ``tensor`` and is unused after it, if any is."""
    own = tensor.untyped_storage()
    reserve = _reserves.get(own.data_ptr())
    storage = None if reserve is None else reserve.storage()
    if reserve is None or storage is None or storage.nbytes() < needed:
        return None
    whole = tensor.is_contiguous() and tensor.storage_offset() == 0 and tensor.nbytes == own.nbytes()
    return storage if whole and reserve.used == tensor.nbytes else None


def _extend(parameter: Tensor, rows: Tensor) -> None:
    """Append rows to a parameter and zeros to its gradient.

    ``set_`` keeps the identity of the parameter and gives it a new gradient accumulator, so that graphs made before do
    not constrain later backward passes. Assigning ``.data`` would keep the old accumulator.
    """
    grad = parameter.grad
    parameter.grad = None
    parameter.set_(appended(parameter.detach(), rows))  # type: ignore[call-overload]
    if grad is not None:
        parameter.grad = appended(grad, torch.zeros_like(rows, dtype=grad.dtype))


def _check_gradient(reference: weakref.ref[Tensor], grad: Tensor) -> None:
    """Refuse a gradient of the old size, which the backward pass of a loss made before would leave."""
    parameter = reference()
    if parameter is not None and grad.shape[0] < parameter.shape[0]:
        raise RuntimeError(OUTGROWN)


def _grow_state(optimizer: torch.optim.Optimizer, parameter: Tensor, old: int, n: int) -> None:
    """Give the new rows the state that the optimizer starts with."""
    state = optimizer.state.get(parameter, {})
    group = next((each for each in optimizer.param_groups if any(p is parameter for p in each["params"])), {})
    starts = {"step_size": group.get("lr", 0.0), "sum": group.get("initial_accumulator_value", 0.0)}  # Rprop, Adagrad
    for name, value in state.items():
        per_row = isinstance(value, Tensor) and value.dim() == parameter.dim() and value.shape[0] == old
        if per_row and name != "col_var":  # Adafactor's other factor has a single row
            state[name] = appended(value, value.new_full((n, *value.shape[1:]), float(starts.get(name, 0.0))))


def _refuse_what_cannot_grow(head: HebbianSoftmax, sharers: list[nn.Module]) -> None:
    if wrapped_by_ddp(check_weight(head)):
        raise RuntimeError("add_classes cannot grow a head inside DistributedDataParallel; grow it before wrapping")
    for module in sharers:
        own_bias = getattr(module, "bias", None) is not head.bias and getattr(module, "bias", None) is not None
        if own_bias or hasattr(module, "counts"):
            raise ValueError(
                f"weight is shared with {type(module).__name__}, which has per-class state of its own that add_classes "
                "does not grow"
            )


def _follow(module: nn.Module, classes: int) -> None:
    """Tell a module that holds the weight its new size."""
    for attribute, kind in (("out_features", nn.Linear), ("num_embeddings", nn.Embedding)):
        if isinstance(module, kind):
            setattr(module, attribute, classes)


def _holders_of(parameter: Tensor) -> list[nn.Module]:
    """Return every module that has ``parameter`` as its weight.

    All modules of the process are looked at once; later ones are noted when the parameter is assigned to them.
    """
    _note_holders()
    known = _holders.get(id(parameter))
    if known is None or known.parameter() is not parameter:
        for key in [key for key, each in _holders.items() if each.parameter() is None]:
            del _holders[key]
        found = [weakref.ref(module) for module in live_modules() if own_parameter(module, "weight") is parameter]
        known = _holders[id(parameter)] = _Holders(weakref.ref(parameter), found)
    modules = {id(module): module for reference in known.modules if (module := reference()) is not None}
    holders = [module for module in modules.values() if own_parameter(module, "weight") is parameter]
    known.modules[:] = [weakref.ref(module) for module in holders]
    return holders


@cache
def _note_holders() -> None:
    register_module_parameter_registration_hook(_note_holder)


def _note_holder(module: nn.Module, name: str, parameter: Tensor | None) -> None:
    known = _holders.get(id(parameter))
    if name == "weight" and known is not None and known.parameter() is parameter:
        known.modules.append(weakref.ref(module))
