"""Launching the gradient step on a GPU: of any parameter, and of the head's weight together with the rule's write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.profiler import record_function

from hebbian_softmax.write.gpu.device import kernels, tile
from hebbian_softmax.write.gpu.rows import find_runs, objective_of
from hebbian_softmax.write.gpu.update import Update

if TYPE_CHECKING:
    from hebbian_softmax.attach.activations import Activations
    from hebbian_softmax.layer import HebbianSoftmax

_BLOCK = 2048


def step_elements(parameter: Tensor, update: Update) -> None:
    """The gradient step of a parameter of any shape."""
    values, kind = update.arguments()
    n = parameter.numel()
    with torch.cuda.device_of(parameter):
        kernels().step_elements[(-(-n // _BLOCK),)](parameter, n, *values, **kind, BLOCK=_BLOCK)
    torch.autograd.graph.increment_version((parameter,))


class RowStep:
    """The step of a head's weight: each row is read, stepped, mixed where λ > 0, and written, once."""

    def __init__(self) -> None:
        self._slots: Tensor | None = None
        """Where the run of each class starts, -1 where it has none: so between steps everywhere."""

    def step(self, head: HebbianSoftmax, weight: Tensor, update: Update, contents: Sequence[Activations]) -> None:
        """Equation 3 on top of the gradient step."""
        slots, self._slots = self._empty_slots(weight), None  # not kept where an exception leaves entries
        with torch.cuda.device_of(weight):
            with record_function("hebbian_softmax::write"):
                runs = find_runs(head, contents, weight, update, slots) if contents else None
            keeper = head.low_precision
            copy = weight if keeper is None else keeper.room_for(weight)
            values, kind = update.arguments()
            objective, radius = objective_of(head)
            # Without runs nothing reads what belongs to them.
            of_runs = (
                [slots, runs.h, runs.order, runs.blocks, runs.before, runs.n, runs.rate, runs.center, runs.scale]
                if runs is not None
                else [slots] * 9
            )
            kernels().step_rows[(head.num_classes,)](
                weight, copy, *values, *of_runs, head.counts, head.in_features, float(radius),
                **kind, COPY=keeper is not None, WRITE=runs is not None, MEMORIZING=head.memorizing,
                OBJECTIVE=objective, **tile(head.in_features),
            )  # fmt: skip
        torch.autograd.graph.increment_version((weight, copy, head.counts))
        if keeper is not None:
            keeper.note(weight)
        self._slots = slots

    def _empty_slots(self, weight: Tensor) -> Tensor:
        slots = self._slots
        if slots is None or slots.shape[0] != weight.shape[0] or slots.device != weight.device:
            slots = torch.full((weight.shape[0],), -1, dtype=torch.int32, device=weight.device)
        return slots
