"""The write: what happens to a head after an optimizer step, or in ``memorize``.

It is made by torch's operations (:mod:`hebbian_softmax.write.in_torch`), on any device and over any number of
processes, or by the kernels of :mod:`hebbian_softmax.write.gpu`. This module chooses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from hebbian_softmax import _triton
from hebbian_softmax.objectives import Euclidean, InnerProduct
from hebbian_softmax.rule import ClassSums
from hebbian_softmax.write import in_torch, trained
from hebbian_softmax.write.activations import Activations, Call
from hebbian_softmax.write.timing import AT_ONCE, Timing

if TYPE_CHECKING:
    from hebbian_softmax.layer import HebbianSoftmax

_WIDEST = 16_384
"""Features beyond this do not fit in a program's registers."""


@torch.no_grad()
def write(
    head: HebbianSoftmax,
    contents: Sequence[Activations | ClassSums],
    weight: Tensor,
    group: dist.ProcessGroup | None,
    timing: Timing = AT_ONCE,
) -> None:
    """Make one iteration of Algorithm 1 after its gradient step.

    ``weight`` is the parameter itself: all rows, or with FSDP2 the rows of this rank, at full precision.
    """
    with record_function("hebbian_softmax::write"):
        if head.calibration is not None and head.calibration.ready:
            trained.write(head, contents, weight, group, timing)
        elif group is None and kernels_can_write(head, contents, weight):
            _triton.load("write.gpu.rows").write(head, contents, weight, timing)
        else:
            in_torch.write(head, contents, weight, group, timing)


def kernels_can_write(head: HebbianSoftmax, contents: Sequence[Activations | ClassSums], weight: Tensor) -> bool:
    """Return whether kernels can write this batch into ``weight`` if this process holds all of its rows, alone."""
    return kernels_suit(head, weight) and not any(isinstance(each, ClassSums) for each in contents)


def kernels_suit(head: HebbianSoftmax, weight: Tensor) -> bool:
    """Return whether kernels can work on ``weight`` and can do what ``head`` is set to."""
    return (
        _reaches(weight)
        and type(head.objective) in (Euclidean, InnerProduct)  # a subclass may compute something else
        and (head.calibration is None or head.new_classes.gradients_from == 0)  # rows are given back before the write
        and head.running.mean.dtype == torch.float32
        and (head.settling is None or head.settling.memory.dtype == torch.float32)
        and head.counts.device == weight.device
        and head.in_features <= _WIDEST
        and 0 < head.num_classes < 2**31 - 1
        and not (head.calibration is not None and head.calibration.ready)
    )


def copied(head: HebbianSoftmax, weight: Tensor, h: Tensor, targets: Tensor, call: Call) -> Activations:
    """Copy activations; kernels that will write them inspect them on the way, so that they are read once."""
    inspects = not torch.compiler.is_compiling() and kernels_suit(head, weight) and _reaches(h)
    if not inspects or h.device != weight.device or h.shape[0] == 0:
        return plain_copy(h, targets, call)
    with record_function("hebbian_softmax::watch"):
        found: Activations = _triton.load("write.gpu.inspect").copy_and_inspect(head, h, targets, call)
        return found


def plain_copy(h: Tensor, targets: Tensor, call: Call) -> Activations:
    """Copy activations into memory that stays as it is until the step: users refill buffers and optimise leaves."""
    if torch.compiler.is_compiling():
        return Activations(h.detach().clone(), targets.clone(), call)
    with record_function("hebbian_softmax::watch"):
        own = h.detach().clone(memory_format=torch.contiguous_format)  # the layout that the kernels read
        return Activations(own, targets.clone(), call)


def any_nonzero(values: Tensor) -> Tensor:
    """Return ``values.any()``; on a GPU the search ends once a value is found, and the host does not wait for it."""
    if not _reaches(values):
        return values.any()
    found: Tensor = _triton.load("write.gpu.search").any_nonzero(values)
    return found


def _reaches(tensor: Tensor) -> bool:
    """Return whether kernels can work on ``tensor``; a CPU tensor is refused by its device alone."""
    return _triton.runs_on(tensor.device) and _triton.works_on(tensor)
