"""A small multilayer perceptron."""

from torch import nn


def mlp(inputs: int, hidden: int, features: int) -> nn.Sequential:
    """Three layers with ReLU; its last activations, of width `features`, are what the head sees."""
    return nn.Sequential(
        nn.Linear(inputs, hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, features),
        nn.ReLU(),
    )
