"""The paper's network and its augmentation, which moves images and does nothing else."""

import math

import pytest
import torch
from torch import nn

from hebbian_softmax.lab.images.convnet import augment, convnet, count_features, rotate_and_shift

ULP = torch.finfo(torch.float32).eps
MOVED = 28 * 8 * ULP
"""The error of a pixel: coordinates of up to 28 pixels are rounded a few times, and neighbours differ by at most 1."""


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


@pytest.mark.parametrize(("height", "width"), [(28, 28), (32, 32), (17, 50)])
def test_features_are_counted_right(height: int, width: int) -> None:
    assert convnet(3)(torch.rand(2, 1, height, width)).shape == (2, count_features(3, height, width))


def test_the_order_of_relu_and_pooling_is_the_papers_in_effect() -> None:
    """Compare in float64, where the rounding of small gradients stays far below the tolerance."""
    network = convnet(8).double()
    blocks = list(network)[:-1]
    papers = nn.Sequential(*(blocks[4 * block + index] for block in range(4) for index in (0, 1, 3, 2)), nn.Flatten())
    inputs = torch.rand(4, 1, 28, 28, dtype=torch.double)
    gradients = []
    for model in (network, papers):
        model.zero_grad()
        outputs = model(inputs)
        outputs.square().sum().backward()
        gradients.append([outputs.detach(), *(parameter.grad for parameter in network.parameters())])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-9 * one.abs().max().item())


def test_without_rotation_and_shift_images_stay() -> None:
    images = torch.randint(256, (3, 4, 28, 28), dtype=torch.uint8)
    result = augment(images, rotation=0, shift=0)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, images / 255, atol=MOVED, rtol=0)


@pytest.mark.parametrize("turns", [-1, 1, 2, 3])
def test_right_angles_are_counter_clockwise_turns(turns: int) -> None:
    images = torch.rand(5, 1, 28, 28)
    turned = rotate_and_shift(images, torch.full((5,), turns * math.pi / 2), torch.zeros(5), torch.zeros(5))
    torch.testing.assert_close(turned, torch.rot90(images, turns, (2, 3)), atol=MOVED, rtol=0)


def test_images_that_are_not_square_turn_without_distortion() -> None:
    images = torch.rand(2, 1, 8, 14)
    turned = rotate_and_shift(images, torch.full((2,), math.pi / 2), torch.zeros(2), torch.zeros(2))
    inner = torch.rot90(images, 1, (2, 3))[:, :, 3:11]  # what of the upright image a lying frame shows
    torch.testing.assert_close(turned[:, :, :, 3:11], inner, atol=MOVED, rtol=0)


def test_whole_shifts_move_pixels_right_and_down_and_bring_in_paper() -> None:
    images = torch.rand(1, 1, 10, 10)
    moved = rotate_and_shift(images, torch.zeros(1), torch.tensor([3.0]), torch.tensor([2.0]))
    torch.testing.assert_close(moved[0, 0, 2:, 3:], images[0, 0, :-2, :-3], atol=MOVED, rtol=0)
    assert moved[0, 0, :2].abs().max() < MOVED
    assert moved[0, 0, :, :3].abs().max() < MOVED


def test_the_same_generator_gives_the_same_and_each_image_its_own() -> None:
    images = torch.rand(28, 28).expand(64, 28, 28)
    first = augment(images, torch.Generator().manual_seed(3))
    assert torch.equal(first, augment(images, torch.Generator().manual_seed(3)))
    assert not torch.equal(first, augment(images, torch.Generator().manual_seed(4)))
    assert len({image.numpy().tobytes() for image in first}) == 64


def test_values_stay_between_0_and_1_and_shapes_stay() -> None:
    for shape in [(28, 28), (0, 28, 28), (2, 3, 20, 24)]:
        result = augment(torch.full(shape, 255, dtype=torch.uint8), rotation=180, shift=5)
        assert result.shape == shape
        assert result.numel() == 0 or (result.min() >= 0 and result.max() <= 1 + 1e-6)


def test_angles_and_shifts_fill_their_range_and_keep_to_it() -> None:
    """A dot at the right edge of the image shows where rotation and shift move it."""
    images = torch.zeros(2000, 41, 41)
    images[:, 20, 36] = 1
    y, x = torch.meshgrid(torch.arange(41.0) - 20, torch.arange(41.0) - 20, indexing="ij")

    def centre(result: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mass = result.sum((1, 2))
        return (result * x).sum((1, 2)) / mass, (result * y).sum((1, 2)) / mass

    right, down = centre(augment(images, rotation=30, shift=0))
    angle = torch.rad2deg(torch.atan2(-down, right))
    assert -31 < angle.min() < -28
    assert 28 < angle.max() < 31
    right, down = centre(augment(images, rotation=0, shift=2))
    for moved in (right - 16, down):
        assert -2.01 < moved.min() < -1.9
        assert 1.9 < moved.max() < 2.01


@pytest.mark.gpu
def test_a_cuda_graph_captures_it_and_each_replay_draws_anew() -> None:
    images = torch.randint(256, (32, 1, 28, 28), dtype=torch.uint8, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        augment(images)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = augment(images)
    graph.replay()
    first = result.clone()
    graph.replay()
    assert not torch.equal(first, result)
    assert first.isfinite().all()
    generator = torch.Generator("cuda").manual_seed(0)
    torch.testing.assert_close(augment(images, generator, rotation=0, shift=0), images / 255, atol=MOVED, rtol=0)
