"""The gradient step of a head's weight and the rule's write in one pass over the matrix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.profiler import record_function

from hebbian_softmax.write.gpu import tile
from hebbian_softmax.write.gpu.rows import kept_along, memory_of_run, mixed, objective_of
from hebbian_softmax.write.gpu.runs import Runs, count_run, find_runs
from hebbian_softmax.write.gpu.update import Update, step_elements, stepped, store_moments
from hebbian_softmax.write.timing import shortens

if TYPE_CHECKING:
    from hebbian_softmax.layer import HebbianSoftmax
    from hebbian_softmax.write.activations import Activations
    from hebbian_softmax.write.timing import Timing


class RowStep:
    """The step of a head's weight: each row is read, stepped, mixed where λ > 0, and written, once."""

    def __init__(self) -> None:
        self._slots: Tensor | None = None
        """Where the run of each class starts, -1 where it has none; between steps all are -1."""

    def step(
        self, head: HebbianSoftmax, weight: Tensor, update: Update, contents: Sequence[Activations], timing: Timing
    ) -> None:
        """Make the gradient step, and equation 3 on top of it; if the rate raises, make the gradient step alone."""
        slots, self._slots = self._empty_slots(weight), None  # an exception may leave entries: do not keep those
        with torch.cuda.device_of(weight):
            with record_function("hebbian_softmax::write"):
                try:
                    runs = find_runs(head, contents, weight, timing, update, slots) if contents else None
                except Exception:
                    step_elements(weight, update)
                    raise
            keeper = head.low_precision
            copy = weight if keeper is None else keeper.room_for(weight)
            arguments, kind = update.arguments()
            objective, radius = objective_of(head)
            step_rows_kernel[(head.num_classes,)](
                weight, copy, arguments, slots,
                Runs(*[slots] * len(Runs._fields)) if runs is None else runs,  # without runs nothing reads them
                head.counts, head.since_start, head.in_features, float(radius),
                **kind, SHORTENS=shortens(head, timing), COPY=keeper is not None, WRITE=runs is not None,
                MEMORIZING=head.memorizing, OBJECTIVE=objective, ACROSS=head.write == "across",
                **tile(head.in_features),
            )  # fmt: skip
        torch.autograd.graph.increment_version((weight, copy, head.counts, head.since_start))
        if keeper is not None:
            keeper.note(weight)
        self._slots = slots

    def _empty_slots(self, weight: Tensor) -> Tensor:
        slots = self._slots
        if slots is None or slots.shape[0] != weight.shape[0] or slots.device != weight.device:
            slots = torch.full((weight.shape[0],), -1, dtype=torch.int32, device=weight.device)
        return slots


@triton.jit
def step_rows_kernel(
    weight, copy, step, slots, runs, counts, since_start, features, radius,
    KIND: tl.constexpr, LR_TENSOR: tl.constexpr, SHORTENS: tl.constexpr, COPY: tl.constexpr, WRITE: tl.constexpr,
    MEMORIZING: tl.constexpr, OBJECTIVE: tl.constexpr, ACROSS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Step one row in each program and, where its class has a run with λ > 0, mix it; read and write it once."""
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < features
    at = row.to(tl.int64) * features + column
    w, m, v = stepped(weight, at, inside, step, KIND, LR_TENSOR)
    if WRITE:
        position = tl.load(slots + row)
        if position >= 0:
            tl.debug_barrier()  # every warp has read the slot
            tl.store(slots + row, -1)  # empty again for the next step
            n = tl.load(runs.n + position)
            count_run(runs, position, n, counts + row, since_start + row, MEMORIZING)
            if MEMORIZING:
                rate = tl.load(runs.rate + position)
                if rate > 0:
                    memory = memory_of_run(runs, position, n, features, radius, SHORTENS, OBJECTIVE, ROWS, BLOCK)
                    if ACROSS:
                        memory = kept_along(runs, position, memory, w, features, BLOCK)
                    w = mixed(w, memory, rate, weight.dtype.element_ty).to(tl.float32)
    tl.store(weight + at, w, mask=inside)
    store_moments(step, at, inside, m, v, KIND)
    if COPY:
        tl.store(copy + at, w, mask=inside)
