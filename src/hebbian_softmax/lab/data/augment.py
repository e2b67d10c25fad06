"""The paper's augmentation (section 4.1): a random rotation in ±30° and a random translation."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def augment(
    images: Tensor, generator: torch.Generator | None = None, *, rotation: float = 30.0, shift: float = 2.0
) -> Tensor:
    """Rotate each image by up to ±`rotation` degrees and move it by up to ±`shift` pixels along each axis.

    Takes images (..., height, width), uint8 (0 to 255) or floating point (left in its range), and gives floating
    point of the same shape, uint8 as values in [0, 1]. Each image has its own angle and shift, drawn uniformly;
    what comes in from outside is paper (0). It stays on the images' device and never waits for it, so it can be
    captured in a CUDA graph. `generator` must be on the same device.
    """
    height, width = images.shape[-2:]
    flat = images.reshape(-1, 1, height, width)
    flat = flat.float() / 255 if flat.dtype == torch.uint8 else flat
    draws = torch.rand(3, len(flat), generator=generator, device=flat.device, dtype=flat.dtype) * 2 - 1
    angle = draws[0] * math.radians(rotation)
    moved = rotate_and_shift(flat, angle, draws[1] * shift, draws[2] * shift)
    return moved.reshape(images.shape)


def rotate_and_shift(images: Tensor, angle: Tensor, right: Tensor, down: Tensor) -> Tensor:
    """Images (n, 1, height, width) turned counter-clockwise by `angle` (radians), then moved by pixels."""
    height, width = images.shape[-2:]
    cos, sin = angle.cos(), angle.sin()
    # Pixel coordinates from the centre: where does each output pixel come from? Rotating pixels and not
    # grid_sample's [-1, 1] keeps right angles right in images that are not square.
    x = torch.arange(width, device=images.device, dtype=images.dtype) - (width - 1) / 2
    y = torch.arange(height, device=images.device, dtype=images.dtype) - (height - 1) / 2
    x = x.view(1, 1, -1) - right.view(-1, 1, 1)
    y = y.view(1, -1, 1) - down.view(-1, 1, 1)
    cos, sin = cos.view(-1, 1, 1), sin.view(-1, 1, 1)
    source_x, source_y = cos * x - sin * y, sin * x + cos * y
    # With align_corners=False, -1 and 1 are the outer edges of the border pixels.
    grid = torch.stack([source_x * (2 / width), source_y * (2 / height)], dim=-1)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
