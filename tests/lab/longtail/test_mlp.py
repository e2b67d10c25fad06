"""The network of the long-tailed demonstration."""

import torch

from hebbian_softmax.lab.longtail.mlp import mlp


def test_maps_inputs_to_features_that_gradients_reach() -> None:
    network = mlp(inputs=5, hidden=7, features=3)
    features = network(torch.randn(11, 5))
    assert features.shape == (11, 3)
    assert (features >= 0).all()
    features.sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in network.parameters())
