"""Evaluation-time memories: what a trained model adds to itself while it reads (docs/memory.md)."""

from hebbian_softmax.memory.cache import NeuralCache
from hebbian_softmax.memory.mixture import mix

__all__ = ["NeuralCache", "mix"]
