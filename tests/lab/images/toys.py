"""A small set of images that is easily learned, and the commands that run on it: `compare toy`, `reproduce toy`."""

import torch

from hebbian_softmax.lab import experiments
from hebbian_softmax.lab.cli import main
from hebbian_softmax.lab.images.compare import comparing
from hebbian_softmax.lab.images.data import DRAWINGS, SIZE, ImageSet, ImageSource
from hebbian_softmax.lab.images.omniglot import OmniglotSettings
from hebbian_softmax.lab.images.reproduce import reproducing


def toy_set(classes: int = 60, noise: float = 0.02, drawings: int = DRAWINGS, size: int = SIZE) -> ImageSet:
    """Each class is a random pattern, and each drawing shows it with some pixels flipped."""
    generator = torch.Generator().manual_seed(0)
    side = 7 if size % 7 == 0 else 8
    coarse = torch.rand(classes, 1, side, side, generator=generator) > 0.6
    patterns = coarse.repeat_interleave(size // side, 2).repeat_interleave(size // side, 3)
    flipped = torch.rand(classes, drawings, size, size, generator=generator) < noise
    return ImageSet("toy", ((patterns ^ flipped) * 255).to(torch.uint8), [str(number) for number in range(classes)])


TOY = ImageSource("toy", "patterns", OmniglotSettings, lambda settings, quiet: toy_set())
experiments.add(comparing(TOY))
experiments.add(reproducing(TOY))


def compare_toys(words: list[str]) -> int:
    """Run `hebbian` and save a checkpoint all the time."""
    experiments.add(comparing(TOY, checkpoint_seconds=0.05))
    return main(words)
