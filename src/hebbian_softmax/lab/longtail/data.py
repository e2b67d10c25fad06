"""A synthetic long-tailed classification task that needs no download.

Each class is a point in a small space. An example is that point plus a little noise, joined by as many numbers that
have nothing to do with the class and vary as much, and all of it sent through a fixed random network that folds the
two parts into each other. A network must learn to tell them apart, from all classes together. The k-th class of the
training set has about 1/k of the examples of the first, as words in a text have (Zipf's law); the test set has the
same number of examples of every class.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hebbian_softmax.lab.base.seeds import derive_seed

LATENT = 8  # numbers that tell the class, and as many that do not
INPUTS = 64  # numbers that the network sees
NOISE = 0.2  # of the numbers that tell the class, against 1 between classes
FOLDING = 1.0  # gain of the random network: the higher, the further from linear
RAREST = 4  # training examples of the rarest class
TEST_EXAMPLES = 10  # per class


@dataclass(frozen=True)
class LongTail:
    """Inputs (examples, INPUTS), targets (examples,) and training examples of each class (classes,)."""

    train_inputs: Tensor
    train_targets: Tensor
    test_inputs: Tensor
    test_targets: Tensor
    counts: Tensor


def longtail(classes: int, seed: int) -> LongTail:
    """Draw the task; the same arguments give the same task."""
    generator = torch.Generator().manual_seed(derive_seed(seed, "longtail"))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    prototypes = normal(classes, LATENT)
    folds = [
        FOLDING * normal(2 * LATENT, INPUTS) / (2 * LATENT) ** 0.5,
        FOLDING * normal(INPUTS, INPUTS) / INPUTS**0.5,
    ]

    def draw(targets: Tensor) -> Tensor:
        telling = prototypes[targets] + NOISE * normal(len(targets), LATENT)
        inputs = torch.cat([telling, normal(len(targets), LATENT)], dim=1)
        for fold in folds:
            inputs = torch.sin(inputs @ fold)
        return inputs

    counts = (RAREST * classes / torch.arange(1, classes + 1)).round().long()
    train_targets = torch.arange(classes).repeat_interleave(counts)
    test_targets = torch.arange(classes).repeat_interleave(TEST_EXAMPLES)
    return LongTail(draw(train_targets), train_targets, draw(test_targets), test_targets, counts)
