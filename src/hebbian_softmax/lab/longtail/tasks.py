"""Tasks with long tails: a synthetic one with many classes, and ten handwritten digits."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hebbian_softmax.lab.base.extras import require
from hebbian_softmax.lab.base.seeds import derive_seed

LATENT = 8  # numbers that depend on the class, and as many that do not
INPUTS = 64  # numbers that the network sees
NOISE = 0.2  # standard deviation of the numbers that depend on the class; between classes it is 1
FOLDING = 1.0  # gain of the random network: the higher, the further from linear
RAREST = 4  # training examples of the rarest class
TEST_EXAMPLES = 10  # test examples of each class

HIDDEN = 256
FEATURES = 128  # the width of the last activations, which the head sees

DIGITS = (100, 60, 36, 22, 13, 8, 5, 3, 2, 1)  # training images of the ten digits, from 100 to 1 in equal ratios
TEST_IMAGES, VALIDATION_IMAGES = 50, 20  # of each digit


@dataclass(frozen=True)
class LongTail:
    """The task: inputs (examples, …), targets (examples,), and each class's number of training examples.

    The test set has equally many examples of every class, in the order of the classes. `network` makes an untrained
    network from inputs to FEATURES activations.
    """

    train_inputs: Tensor
    train_targets: Tensor
    test_inputs: Tensor
    test_targets: Tensor
    counts: Tensor
    network: Callable[[], nn.Module]


def longtail(classes: int, seed: int) -> LongTail:
    """Draw a synthetic classification task with rare classes; the same arguments give the same task.

    Each class is a point in a small space. An example is that point plus a little noise, followed by as many random
    numbers that say nothing about the class, and all of them pass through a fixed random network that mixes the two
    parts. A network must learn from all classes together to separate the parts again. The k-th class has about 1/k
    of the training examples of the first, like words in a text (Zipf's law); every class has equally many test
    examples.
    """
    generator = torch.Generator().manual_seed(derive_seed(seed, "longtail"))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    prototypes = normal(classes, LATENT)
    folds = [FOLDING * normal(2 * LATENT, INPUTS) / (2 * LATENT) ** 0.5, FOLDING * normal(INPUTS, INPUTS) / INPUTS**0.5]

    def draw_inputs(targets: Tensor) -> Tensor:
        telling = prototypes[targets] + NOISE * normal(len(targets), LATENT)
        inputs = torch.cat([telling, normal(len(targets), LATENT)], dim=1)
        for fold in folds:
            inputs = torch.sin(inputs @ fold)
        return inputs

    counts = (RAREST * classes / torch.arange(1, classes + 1)).round().long()
    train_targets = torch.arange(classes).repeat_interleave(counts)
    test_targets = torch.arange(classes).repeat_interleave(TEST_EXAMPLES)
    return LongTail(
        draw_inputs(train_targets),
        train_targets,
        draw_inputs(test_targets),
        test_targets,
        counts,
        lambda: mlp(INPUTS, HIDDEN, FEATURES),
    )


def digits(seed: int, validation: bool = False) -> LongTail:
    """Draw a task with 100 training images of one digit and 1 of another, from scikit-learn's 8×8 images.

    The seed decides which digit is the k-th frequent, which is class k, and the training images. The test images are
    the same for all seeds. With `validation` others take their place, so that settings can be chosen without them.
    """
    require("sklearn")
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.from_numpy(data.images).float().div(16).unsqueeze(1)
    generator = torch.Generator().manual_seed(derive_seed(seed, "digits"))
    train, test = [], []
    for digit, count in zip(torch.randperm(10, generator=generator).tolist(), DIGITS, strict=True):
        fixed = torch.Generator().manual_seed(derive_seed(0, "test images", digit))
        found = images[torch.from_numpy(data.target == digit)]
        found = found[torch.randperm(len(found), generator=fixed)]
        others = found[TEST_IMAGES:]
        others = others[torch.randperm(len(others), generator=generator)]
        train.append(others[:count])
        test.append(others[-VALIDATION_IMAGES:] if validation else found[:TEST_IMAGES])
    counts = torch.tensor(DIGITS)
    return LongTail(
        torch.cat(train),
        torch.arange(10).repeat_interleave(counts),
        torch.cat(test),
        torch.arange(10).repeat_interleave(len(test[0])),
        counts,
        convnet,
    )


def mlp(inputs: int, hidden: int, features: int) -> nn.Sequential:
    """Return a network of three layers with ReLU. The head sees its last activations, of width `features`."""
    return nn.Sequential(
        nn.Linear(inputs, hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, features),
        nn.ReLU(),
    )


def convnet() -> nn.Sequential:
    """Return a small network for images of 8×8 pixels.

    >>> convnet()(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 128])
    """
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128, FEATURES),
        nn.ReLU(),
    )
