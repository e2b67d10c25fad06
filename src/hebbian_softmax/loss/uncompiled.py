"""The autograd node as torch.compile sees it: one call that it does not look into.

Traced, its loop over tiles would be unrolled into one graph, a node a tile, and its choices by value (upstream 1, kept
graph) would break that graph anyway; tracing the reference instead would hold all logits, which is what the loss is
there to avoid. So there is one graph break. Small problems are traced as the reference, without any.

Imported only while compiling: the decorator imports torch's compiler.
"""

from __future__ import annotations

import torch

from hebbian_softmax.loss.function import LinearCrossEntropy

apply = torch.compiler.disable(LinearCrossEntropy.apply)
