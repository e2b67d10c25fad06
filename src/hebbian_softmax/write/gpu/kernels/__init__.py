# mypy: ignore-errors
"""The Triton kernels of the write and of the optimizers on a GPU; ``device_*.py`` launch them.

A stable sort of the targets brings the activations of a class together: a *run*. Each kernel works on fixed shapes and
decides on the device, so nothing waits for it and a CUDA graph can hold the whole step. No float is added atomically,
so the same input gives the same bits. A row (of d values, padded to the power of two ``BLOCK``) is held in registers.
"""

from hebbian_softmax.write.gpu.kernels.batch import find_runs, inspect
from hebbian_softmax.write.gpu.kernels.rows import LENGTH, any_nonzero, sum_blocks, write_rows
from hebbian_softmax.write.gpu.kernels.running import statistics
from hebbian_softmax.write.gpu.kernels.sorting import merge_chunks, sort_chunks
from hebbian_softmax.write.gpu.kernels.step import step_elements, step_rows

BLOCK_LENGTH: int = LENGTH.value
GIVEN, BEFORE, INCLUSIVE, CONSTANT = 0, 1, 2, 3
"""RATE: λ computed outside, of the count before the batch, of the count with it, always the same."""
AS_IT_IS, INTO_BALL, ONTO_SPHERE = 0, 1, 2
"""OBJECTIVE: w* = h̄, h̄ projected into a ball, h̄ stretched to a sphere."""

__all__ = [
    "any_nonzero",
    "find_runs",
    "inspect",
    "merge_chunks",
    "sort_chunks",
    "statistics",
    "step_elements",
    "step_rows",
    "sum_blocks",
    "write_rows",
]
