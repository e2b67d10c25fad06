"""The write and the optimizers' steps on a GPU: a few Triton kernels in place of dynamic shapes.

The semantics are those of :mod:`hebbian_softmax.write.in_torch` in one process. A stable sort of the targets brings the
activations of a class together; such a stretch of the sorted batch is called a *run*. Every kernel works on shapes that
depend on the number of activations alone and decides on the device, so the host never waits, and a CUDA graph can hold
a whole training step. No float is added atomically, so the same input gives the same bits. A program holds a row of d
values, padded to the power of two ``BLOCK``, in its registers.

Each module here defines kernels together with the functions that launch them, and imports Triton; so they are imported
only through :func:`hebbian_softmax._triton.load`. One write goes through them in this order:

1. ``inspect``: which activations take part, their norms, their sum; a copy on the way.
2. ``sort``: the stable sort of their classes.
3. ``runs``: n[i], c[i] and λ[i] of each run, and the norms of the familiar rows; ``settle``, where the head waits for
   features to settle: how near sampled classes are to memories of them.
4. ``statistics``: the running values advance.
5. ``rows``: the mean of each run (``means``) is mixed into the row of its class; or ``step``, where the optimizer's
   step is made in the same pass over the matrix (``update`` is that step of a single element).
"""

from __future__ import annotations

from hebbian_softmax._triton import power_of_two

_VALUES = 4_096
"""Values that a program holds of several activations at once."""


def tile(features: int) -> dict[str, int]:
    """Return how many activations a program holds at once, of how many values, with how many warps."""
    block = power_of_two(features)
    rows = max(1, min(4, _VALUES // block))
    return {"ROWS": rows, "BLOCK": block, "num_warps": min(16, max(1, rows * block // 1024, block // 512))}
