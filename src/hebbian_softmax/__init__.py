"""Softmax layers that memorise: fast learning of rare and new classes."""
