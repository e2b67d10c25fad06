"""A small set of images that is easily learned: each class a random pattern, each drawing with some pixels flipped."""

import torch

from hebbian_softmax.lab.images.data import DRAWINGS, SIZE, ImageSet


def toy_set(classes: int = 60, noise: float = 0.02) -> ImageSet:
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(classes, 1, 7, 7, generator=generator) > 0.6
    patterns = coarse.repeat_interleave(SIZE // 7, 2).repeat_interleave(SIZE // 7, 3)
    flipped = torch.rand(classes, DRAWINGS, SIZE, SIZE, generator=generator) < noise
    return ImageSet("toy", ((patterns ^ flipped) * 255).to(torch.uint8), [str(number) for number in range(classes)])
