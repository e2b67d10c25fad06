"""The paper's augmentation (section 4.1): a random rotation in ±30° and a random translation."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def augment(
    images: Tensor, generator: torch.Generator | None = None, *, rotation: float = 30.0, shift: float = 2.0
) -> Tensor:
    """Rotate each image by up to ±`rotation` degrees and move it by up to ±`shift` pixels along each axis.

    Takes images (..., height, width), uint8 or floats from 0 to 1, and gives float32 from 0 to 1 in the same shape.
    Each image has its own angle and shift, drawn uniformly; what comes in from outside is paper (0). All of it happens
    on the images' device without waiting for it, so it can be captured in a CUDA graph (register a `generator` of your
    own with the graph first). `generator` must be on that device.
    """
    height, width = images.shape[-2:]
    flat = images.reshape(-1, 1, height, width)
    flat = flat / 255 if flat.dtype == torch.uint8 else flat.float()
    draws = 2 * torch.rand(3, len(flat), generator=generator, device=flat.device) - 1
    moved = rotate_and_shift(flat, draws[0] * math.radians(rotation), draws[1] * shift, draws[2] * shift)
    return moved.reshape(images.shape)


def rotate_and_shift(images: Tensor, angle: Tensor, right: Tensor, down: Tensor) -> Tensor:
    """Images (n, 1, height, width) turned counter-clockwise by `angle` (radians), then moved by pixels."""
    height, width = images.shape[-2:]
    # Where does each pixel come from? In pixels from the centre, since turning grid_sample's [-1, 1] would distort
    # images that are not square.
    x = torch.arange(width, device=images.device) - (width - 1) / 2
    y = torch.arange(height, device=images.device) - (height - 1) / 2
    x = x.view(1, 1, -1) - right.view(-1, 1, 1)
    y = y.view(1, -1, 1) - down.view(-1, 1, 1)
    cos, sin = angle.cos().view(-1, 1, 1), angle.sin().view(-1, 1, 1)
    # With align_corners=False, -1 and 1 are the outer edges of the border pixels.
    grid = torch.stack([(cos * x - sin * y) * (2 / width), (sin * x + cos * y) * (2 / height)], dim=-1)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
