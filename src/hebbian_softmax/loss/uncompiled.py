"""The autograd node of the loss as torch.compile sees it: one call that is not traced, at the cost of one graph break.

Tracing would unroll the loop over tiles into one graph, and the choices by value in backward (an upstream gradient of
1, a kept graph) would break that graph anyway. Tracing the reference instead would hold all logits, which this loss is
there to avoid. Small problems are traced as the reference, without a break. This module is imported only while
compiling, because the decorator imports torch's compiler.
"""

from __future__ import annotations

import torch

from hebbian_softmax.loss.function import LinearCrossEntropy

apply = torch.compiler.disable(LinearCrossEntropy.apply)
