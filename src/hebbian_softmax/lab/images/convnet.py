"""The convolutional network of the image curriculum and the augmentation of its inputs (section 4.1)."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BLOCKS = 4  # each halves the image: 28×28 pixels become 14, 7, 3 and 1


def convnet(filters: int = 64, generator: torch.Generator | None = None) -> nn.Sequential:
    """Return the network of Matching Networks: (n, 1, 28, 28) to (n, filters).

    It has four blocks of 3×3 convolution, batch normalisation, ReLU and 2×2 max pooling, with Glorot's initialisation
    drawn from `generator`. The convolutions have no bias, since the normalisation after them would remove it again.
    The ReLU comes after the pooling, which gives the same values with a quarter of the work.

    >>> convnet(8)(torch.zeros(2, 1, 28, 28)).shape
    torch.Size([2, 8])
    """
    layers: list[nn.Module] = []
    for block in range(BLOCKS):
        convolution = nn.Conv2d(filters if block else 1, filters, kernel_size=3, padding=1, bias=False)
        nn.init.xavier_uniform_(convolution.weight, generator=generator)
        layers += [convolution, nn.BatchNorm2d(filters), nn.MaxPool2d(2), nn.ReLU(inplace=True)]
    # Channels last: a fifth faster on the CPUs tried, and the layout that GPUs prefer.
    return nn.Sequential(*layers, nn.Flatten()).to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def count_features(filters: int, height: int, width: int) -> int:
    """Return how many features `convnet` makes of an image.

    >>> count_features(64, 28, 28), count_features(64, 32, 48)
    (64, 384)
    """
    return filters * (height >> BLOCKS) * (width >> BLOCKS)


def augment(
    images: Tensor, generator: torch.Generator | None = None, *, rotation: float = 30.0, shift: float = 2.0
) -> Tensor:
    """Rotate each image by up to ±`rotation` degrees and move it by up to ±`shift` pixels along each axis.

    Takes images (..., height, width), uint8 or floats from 0 to 1, and returns floats from 0 to 1 in the same shape.
    Each image has its own angle and shift, drawn uniformly; what comes in from outside the image is paper (0). All of
    it happens on the images' device without waiting for it, so a CUDA graph can capture it (register your own
    `generator` with the graph first). `generator` must be on that device.
    """
    height, width = images.shape[-2:]
    flat = images.reshape(-1, 1, height, width)
    flat = flat / 255 if flat.dtype == torch.uint8 else flat.float()
    draws = 2 * torch.rand(3, len(flat), generator=generator, device=flat.device) - 1
    moved = rotate_and_shift(flat, draws[0] * math.radians(rotation), draws[1] * shift, draws[2] * shift)
    return moved.reshape(images.shape)


def rotate_and_shift(images: Tensor, angle: Tensor, right: Tensor, down: Tensor) -> Tensor:
    """Turn images (n, 1, height, width) counter-clockwise by `angle` (radians), then move them by pixels."""
    height, width = images.shape[-2:]
    # The place each pixel comes from is computed in pixels from the centre: turning the coordinates of grid_sample,
    # from -1 to 1 along both axes, would distort images that are not square.
    x = torch.arange(width, device=images.device) - (width - 1) / 2
    y = torch.arange(height, device=images.device) - (height - 1) / 2
    x = x.view(1, 1, -1) - right.view(-1, 1, 1)
    y = y.view(1, -1, 1) - down.view(-1, 1, 1)
    cos, sin = angle.cos().view(-1, 1, 1), angle.sin().view(-1, 1, 1)
    # With align_corners=False, -1 and 1 are the outer edges of the border pixels.
    grid = torch.stack([(cos * x - sin * y) * (2 / width), (sin * x + cos * y) * (2 / height)], dim=-1)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
