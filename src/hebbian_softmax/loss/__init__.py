"""Cross-entropy of a linear layer without its logits."""

from hebbian_softmax.loss.api import linear_cross_entropy, linear_log_prob
from hebbian_softmax.loss.reference import target_weight
from hebbian_softmax.loss.topk import linear_topk

__all__ = ["linear_cross_entropy", "linear_log_prob", "linear_topk", "target_weight"]
