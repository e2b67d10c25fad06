"""The paper's network: its shape, its initialisation, and that pooling before the ReLU changes nothing."""

import torch
from torch import nn

from hebbian_softmax.lab.images.convnet import convnet


def test_four_blocks_of_64_filters() -> None:
    network = convnet()
    assert network(torch.rand(2, 1, 28, 28)).shape == (2, 64)
    convolutions = [layer for layer in network if isinstance(layer, nn.Conv2d)]
    assert [tuple(layer.weight.shape) for layer in convolutions] == [(64, 1, 3, 3)] + 3 * [(64, 64, 3, 3)]
    for layer in convolutions:  # Glorot: uniform within ±sqrt(6 / (inputs + outputs))
        bound = (6 / (9 * (layer.in_channels + layer.out_channels))) ** 0.5
        assert 0.9 * bound < layer.weight.abs().max() <= bound


def test_the_generator_makes_the_weights() -> None:
    one, same, other = (convnet(4, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(one[0].weight, same[0].weight)
    assert not torch.equal(one[0].weight, other[0].weight)


def test_the_order_of_relu_and_pooling_is_the_papers_in_effect() -> None:
    network = convnet(8)
    blocks = list(network)[:-1]
    papers = nn.Sequential(*(blocks[4 * block + index] for block in range(4) for index in (0, 1, 3, 2)), nn.Flatten())
    inputs = torch.rand(4, 1, 28, 28)
    gradients = []
    for model in (network, papers):
        model.zero_grad()
        outputs = model(inputs)
        outputs.square().sum().backward()
        gradients.append([outputs.detach(), *(parameter.grad for parameter in network.parameters())])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)
