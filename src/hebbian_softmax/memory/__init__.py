"""Memories for evaluation: what a trained model remembers of a text while it reads (docs/memory.md)."""

from hebbian_softmax.memory.cache import NeuralCache
from hebbian_softmax.memory.mbpa import MbPA
from hebbian_softmax.memory.mixture import mix, mix_memories

__all__ = ["MbPA", "NeuralCache", "mix", "mix_memories"]
