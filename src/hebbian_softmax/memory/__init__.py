"""Evaluation-time memories: what a trained model adds to itself while it reads (docs/memory.md)."""

from hebbian_softmax.memory.cache import NeuralCache
from hebbian_softmax.memory.geometric import GeometricCache, Tracking, track
from hebbian_softmax.memory.mbpa import MbPA
from hebbian_softmax.memory.mixture import mix

__all__ = ["GeometricCache", "MbPA", "NeuralCache", "Tracking", "mix", "track"]
