"""Cross-entropy of a linear layer."""

from hebbian_softmax.loss.reference import linear_cross_entropy, target_weight

__all__ = ["linear_cross_entropy", "target_weight"]
