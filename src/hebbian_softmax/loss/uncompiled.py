"""The autograd nodes of the losses as torch.compile sees them: calls that are not traced, at the cost of a graph break.

Tracing would unroll the loop over tiles into one graph, and the choices by value in backward (an upstream gradient of
1, a kept graph) would break that graph anyway. Tracing the reference instead would hold all logits, which this loss is
there to avoid. Small problems are traced as the reference, without a break. This module is imported only while
compiling, because the decorator imports torch's compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from hebbian_softmax.loss.function import LinearCrossEntropy
from hebbian_softmax.loss.log_prob import LinearLogProb

cross_entropy = torch.compiler.disable(LinearCrossEntropy.apply)
log_prob = torch.compiler.disable(LinearLogProb.apply)

_T = TypeVar("_T")


@torch.compiler.disable
def call(function: Callable[..., _T], *arguments: Any, **options: Any) -> _T:
    """Call a function whose ranks exchange something, of which a graph should know nothing."""
    return function(*arguments, **options)
