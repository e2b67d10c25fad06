"""Reading a batch of activations on a GPU, once: which take part, their norms, their sum, and a copy on the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.profiler import record_function

from hebbian_softmax.attach.activations import Activations, Call, own_copy
from hebbian_softmax.write.gpu import device
from hebbian_softmax.write.running import HORIZON

if TYPE_CHECKING:
    from hebbian_softmax.layer import HebbianSoftmax

_PARTS = 512
"""Programs that share a pass over the activations: each leaves a partial sum of every column."""


@dataclass(frozen=True)
class Inspection:
    keys: Tensor
    """int16 or int32 (N,): the class; -1 for what is left out."""
    column_sums: Tensor
    """float32 (parts, features)."""
    norm_sums: Tensor
    """float32 (parts,): of the centred activations."""
    kept: Tensor
    """int32 (parts,)."""
    nonfinite: Tensor
    """int32 (parts,)."""
    share: Tensor
    """float32 (1,): of this batch in the running values."""
    settings: tuple[object, ...]
    """What it depends on besides the batch."""


def inspect(head: HebbianSoftmax, h: Tensor, targets: Tensor, copies: tuple[Tensor, Tensor] | None) -> Inspection:
    """Look at contiguous activations (N, features), N > 0; copy them and their targets if told where to."""
    n, features = h.shape
    shape, running = device.tile(features), head.running
    parts = min(_PARTS, -(-n // shape["ROWS"]))
    # Fewer bits are sorted in fewer passes.
    keys = torch.empty_like(targets, dtype=torch.int16 if head.num_classes <= 2**15 else torch.int32)
    sums = h.new_empty(parts, features, dtype=torch.float32)
    norms, kept, nonfinite = sums.new_empty(parts), *keys.new_empty(2, parts, dtype=torch.int32)
    share = sums.new_empty(1)
    with torch.cuda.device_of(h):
        device.kernels().inspect[(parts,)](
            h,
            targets,
            running.mean,
            running.batches,
            keys,
            sums,
            norms,
            kept,
            nonfinite,
            share,
            *(copies or (h, targets)),
            n,
            features,
            head.num_classes,
            head.ignore_index,
            HORIZON,
            CENTER=head.center,
            COPY=copies is not None,
            STAGES=3 if shape["BLOCK"] <= 4096 else 1,  # what is fetched ahead must fit in shared memory
            **shape,
        )
    return Inspection(keys, sums, norms, kept, nonfinite, share, _settings(head))


def copied(head: HebbianSoftmax, h: Tensor, targets: Tensor, call: Call) -> Activations:
    """``own_copy``, looked at on the way where the kernels will write it."""
    weight = head.weight
    ready = (
        not torch.compiler.is_compiling()
        and device.on_gpu(weight)
        and device.suits(head, weight)
        and device.on_gpu(h)
        and h.device == weight.device
        and h.shape[0] > 0
    )
    if not ready:
        return own_copy(h, targets, call)
    with record_function("hebbian_softmax::watch"):
        own = torch.empty_like(h), torch.empty_like(targets)
        inspection = inspect(head, h.detach(), targets.contiguous(), own)
        return Activations(own[0].detach(), own[1], call, inspection)


def inspection_of(head: HebbianSoftmax, contents: Sequence[Activations], h: Tensor, targets: Tensor) -> Inspection:
    """That of the batch: made with its copy, if it has not changed since and nothing that it depends on has."""
    early = contents[0].inspection
    if len(contents) == 1 and isinstance(early, Inspection) and early.settings == _settings(head):
        return early
    return inspect(head, h, targets, None)


def _settings(head: HebbianSoftmax) -> tuple[object, ...]:
    mean = head.running.mean  # the running values change together
    return head.num_classes, head.ignore_index, head.center, mean.data_ptr(), mean._version
