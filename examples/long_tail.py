"""A long tail: many classes have a handful of training examples, and all classes count alike in the test.

Four heads on the same network, with the same first weights and the same batches: a plain softmax, balanced softmax (the
logarithms of the class frequencies are `prior=` of the loss, and are left out in the test), the Hebbian rule, and both
together. Each has the learning rate that was chosen for it in results/long-tails, where five seeds were measured.

    python examples/long_tail.py                    # 1,000 invented classes with Zipf's frequencies, a minute or two
    python examples/long_tail.py --task digits      # ten digits with 100 to 1 images; needs scikit-learn
    python examples/long_tail.py --quick            # only to see that it runs

It prints the test accuracy of each head, for all classes, for rare ones and for frequent ones.
"""

# %%
from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hebbian_softmax import HebbianSoftmax

# %% [markdown]
# ## The task
# A class of the invented task is a point in a small space. An example is the point and some noise, followed by as many
# numbers that say nothing about the class; a fixed random network mixes all of them. The k-th class has 1/k of the
# examples of the first, as words have in a text. The test set has equally many examples of every class.


# %%
class Task(NamedTuple):
    """Examples for training and for the test, the number of training examples of each class, and a network's maker."""

    inputs: Tensor
    targets: Tensor
    test_inputs: Tensor
    test_targets: Tensor
    counts: Tensor
    network: Callable[[], nn.Module]


def zipf(classes: int, seed: int, *, rarest: int = 4, tests: int = 10, noise: float = 0.2) -> Task:
    """Invent classes whose frequencies follow Zipf's law."""
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(classes, 8, generator=generator)
    mixing = [torch.randn(16, 64, generator=generator) / 4, torch.randn(64, 64, generator=generator) / 8]

    def draw(targets: Tensor) -> Tensor:
        telling = points[targets] + noise * torch.randn(len(targets), 8, generator=generator)
        inputs = torch.cat([telling, torch.randn(len(targets), 8, generator=generator)], 1)
        for matrix in mixing:
            inputs = torch.sin(inputs @ matrix)
        return inputs

    counts = (rarest * classes / torch.arange(1, classes + 1)).round().long()
    targets, test_targets = torch.arange(classes).repeat_interleave(counts), torch.arange(classes).repeat(tests)
    return Task(draw(targets), targets, draw(test_targets), test_targets, counts, mlp)


def digits(seed: int, *, tests: int = 50) -> Task:
    """Take ten handwritten digits, 8 × 8 pixels, with 100 training images of one and a single one of another."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise SystemExit("--task digits needs scikit-learn: pip install 'hebbian-softmax[sklearn]'") from None
    images, labels = (torch.as_tensor(each) for each in load_digits(return_X_y=True))
    images = images.float().view(-1, 1, 8, 8) / 16
    generator = torch.Generator().manual_seed(seed)
    counts = torch.tensor([100, 60, 36, 22, 13, 8, 5, 3, 2, 1])
    train, test = [], []
    for digit, count in zip(torch.randperm(10, generator=generator).tolist(), counts.tolist(), strict=True):
        found = images[labels == digit]
        found = found[torch.randperm(len(found), generator=generator)]
        train.append(found[tests : tests + count])
        test.append(found[:tests])
    classes = torch.arange(10)
    shown = torch.cat(train), classes.repeat_interleave(counts), torch.cat(test), classes.repeat_interleave(tests)
    return Task(*shown, counts, convnet)


def mlp() -> nn.Module:
    """Return a small network for the 64 numbers of an invented example."""
    first, second = [nn.Linear(64, 256), nn.ReLU()], [nn.Linear(256, 256), nn.ReLU()]
    return nn.Sequential(*first, *second, nn.Linear(256, 128), nn.ReLU())


def convnet() -> nn.Module:
    """Return a small network for images of 8 × 8 pixels."""
    first = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    second = [nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(128, 128), nn.ReLU())


# %% [markdown]
# ## The four heads
# All four are a `HebbianSoftmax`. With `memorizing = False` it is a plain softmax. `prior=` is added to the logits in
# the loss alone, so that the head learns what is left when the frequencies are taken away.


# %%
class Method(NamedTuple):
    """How a head is trained; `rates` are learning rates by task."""

    title: str
    memorizing: bool
    balanced: bool
    rates: dict[str, float]


METHODS = [
    Method("plain softmax", False, False, {"zipf": 0.0012, "digits": 0.0067}),
    Method("balanced softmax (prior=)", False, True, {"zipf": 0.0018, "digits": 0.0028}),
    Method("Hebbian rule", True, False, {"zipf": 0.002, "digits": 0.008}),
    Method("both together", True, True, {"zipf": 0.001, "digits": 0.002}),
]


def train(task: Task, method: Method, rate: float, *, steps: int, batch: int, seed: int) -> nn.Sequential:
    """Train a network with a head, and return both."""
    torch.manual_seed(seed)  # the same first weights and batches for every method
    network, head = task.network(), HebbianSoftmax(128, len(task.counts))
    head.memorizing = method.memorizing
    model = nn.Sequential(network, head)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    head.attach(optimizer)
    prior = (task.counts / task.counts.sum()).log() if method.balanced else None
    order = torch.empty(0, dtype=torch.int64)
    for _ in range(steps):
        if len(order) < batch:
            order = torch.randperm(len(task.targets))
        some, order = order[:batch], order[batch:]
        head.loss(network(task.inputs[some]), task.targets[some], prior=prior).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


@torch.no_grad()
def class_accuracies(model: nn.Module, task: Task) -> Tensor:
    """Return the share of right answers in each class."""
    parts = task.test_inputs.split(2048)
    right = (torch.cat([model(part).argmax(1) for part in parts]) == task.test_targets).double()
    return torch.zeros(len(task.counts)).double().index_add(0, task.test_targets, right) / task.test_targets.bincount()


# %%
def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--task",
        choices=["zipf", "digits"],
        default="zipf",
        help="invented classes, or ten digits (default: %(default)s)",
    )
    parser.add_argument(
        "--classes", type=int, default=1000, help="the number of invented classes, at least 50 (default: %(default)s)"
    )
    parser.add_argument("--steps", type=positive, help="training steps; 1,500 for invented classes and 300 for digits")
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of the task, the first weights and the order of examples (default: %(default)s)",
    )
    parser.add_argument("--quick", action="store_true", help="a few steps with few classes, to see that it runs")
    options = parser.parse_args(arguments)
    if options.classes < 50:
        parser.error(f"--classes must be at least 50, so that there is a tail, got {options.classes}")
    if options.quick:
        options.classes, options.steps = 50, 20
    return options


# %% [markdown]
# ## Train and compare


# %%
def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    if options.task == "zipf":
        task, steps, batch, rare, frequent = zipf(options.classes, options.seed), 1500, 128, 10, 100
    else:
        task, steps, batch, rare, frequent = digits(options.seed), 300, 32, 5, 30
    steps = options.steps or steps
    print(f"{len(task.counts):,} classes with {task.counts.max():,} to {task.counts.min()} training examples")

    # %%
    groups = {"all": task.counts > 0, f"< {rare}": task.counts < rare, f"≥ {frequent}": task.counts >= frequent}
    print(f"test accuracy in % for classes by their number of training examples, after {steps:,} steps, one seed")
    print(f"{'':26}" + "".join(f"{name:>8}" for name in groups) + f"{'seconds':>10}")
    for method in METHODS:
        start = time.perf_counter()
        model = train(task, method, method.rates[options.task], steps=steps, batch=batch, seed=options.seed)
        found = class_accuracies(model, task)
        cells = [f"{100 * found[which].mean():8.1f}" if which.any() else f"{'–':>8}" for which in groups.values()]
        print(f"{method.title:26}" + "".join(cells) + f"{time.perf_counter() - start:10.1f}", flush=True)
    if options.quick:
        print("This was a quick run to see that it works: after a few steps the numbers mean nothing.")


if __name__ == "__main__":
    main()
