"""The network behind the page: a small convnet and its softmax layer, trained once on many characters and then kept.

It never sees the characters that are left out of its training, so that a visitor can teach them.
"""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hebbian_softmax.lab.base.arrays import DAMAGES, read_arrays
from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.base.files import cannot_write, locked, remove_temporary, write_atomic
from hebbian_softmax.lab.base.seeds import derive_seed
from hebbian_softmax.lab.data.root import cache_root
from hebbian_softmax.lab.images.convnet import augment, convnet, count_features
from hebbian_softmax.lab.images.data import SIZE, ImageSet
from hebbian_softmax.lab.images.omniglot import ARCHIVES

PREPARATION = "1"  # raise this when the same images give another network, so that older files are not used
FILTERS = 32
BORDER = 2  # pixels of paper around a drawing: 32×32 pixels leave four places of the last block, so 128 features
FEATURES = count_features(FILTERS, SIZE + 2 * BORDER, SIZE + 2 * BORDER)
BATCH = 64
STEPS = 2500
LEARNING_RATE = 0.01
WARM_UP = 0.15  # the share of the training in which the learning rate rises
DROPOUT = 0.1
ROTATION = 15.0  # degrees: a character turned further may be another one
KEPT = 5  # drawings of each class whose activations are kept, so that old classes can be rehearsed
UNSEEN = 50  # classes that are left out of the training where the image set has no division of its own

Tell = Callable[[int, int], None]
"""Is told how many steps of how many are done."""


class EqualLength(nn.Module):
    """Gives all activations the same length, so that the rows of new characters have the same length, too."""

    def forward(self, features: Tensor) -> Tensor:
        return math.sqrt(features.shape[-1]) * F.normalize(features, dim=-1)


@dataclass(frozen=True, eq=False)
class Knowledge:
    """A trained network, its softmax layer, and activations (classes, KEPT, features) of drawings that it knows."""

    network: nn.Sequential
    head: nn.Linear
    activations: Tensor

    @torch.no_grad()
    def embed(self, drawings: Tensor) -> Tensor:
        """Return the activations (n, features) of drawings (n, 28, 28) in uint8, where ink is 255."""
        features: Tensor = self.network(drawings.unsqueeze(1) / 255)
        return features


def divide(images: ImageSet) -> tuple[ImageSet, ImageSet]:
    """Divide an image set into the classes that the network learns and those that it never sees.

    Omniglot has its official division; of another set, 50 classes are drawn at random.
    """
    if images.name == "omniglot":
        background = len(ARCHIVES[0].classes)
        return _part(images, range(background)), _part(images, range(background, len(images.images)))
    draws = torch.Generator().manual_seed(derive_seed(0, "unseen"))
    order = torch.randperm(len(images.images), generator=draws).tolist()
    return _part(images, sorted(order[UNSEEN:])), _part(images, order[:UNSEEN])


def _part(images: ImageSet, classes: range | list[int]) -> ImageSet:
    names = [images.class_names[number] for number in classes]
    return replace(images, images=images.images[torch.tensor(classes)], class_names=names)


def prepare(
    known: ImageSet, steps: int, seed: int, tell: Tell, *, normalised: bool = True, cache_dir: Path | None = None
) -> Knowledge:
    """Return the trained network that is kept in `cache_dir` (default: `play` in the cache root), or train it.

    Without `normalised`, the network ends with the convnet's own activations.
    """
    recipe = FILTERS, BORDER, BATCH, LEARNING_RATE, WARM_UP, DROPOUT, ROTATION, KEPT, normalised
    key = hashlib.sha256(repr((PREPARATION, known.identity, steps, seed, recipe)).encode()).hexdigest()[:16]
    folder = cache_root() / "play" if cache_dir is None else cache_dir
    path = folder / f"{known.name}-{key}.npz"
    if (found := _read(path, len(known.images), normalised)) is not None:
        return found
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder, wait=True):  # two processes that want the same network train it once
            if (found := _read(path, len(known.images), normalised)) is not None:
                return found
            remove_temporary(folder)
            knowledge = learn(known, steps, seed, tell, normalised)
            _write(path, knowledge)
            return knowledge
    except OSError as error:
        raise LabError(f"{cannot_write(path, error)}, with HEBBIAN_CACHE") from error


def learn(known: ImageSet, steps: int, seed: int, tell: Tell, normalised: bool = True) -> Knowledge:
    """Train the network and its softmax layer on the training drawings of each class.

    The optimizer is Adam, and the learning rate rises at first and then falls to zero.
    """
    draws = torch.Generator().manual_seed(derive_seed(seed, "play"))
    network, head = _new(len(known.images), normalised, draws)
    optimizer = torch.optim.Adam([*network.parameters(), *head.parameters()], lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _strength((step + 1) / steps))
    for step in range(1, steps + 1):
        labels = torch.randint(len(known.images), (BATCH,), generator=draws)
        chosen = torch.randint(known.train.shape[1], (BATCH,), generator=draws)
        features = network(augment(known.train[labels, chosen].unsqueeze(1), draws, rotation=ROTATION))
        kept = torch.rand(features.shape, generator=draws) >= DROPOUT
        loss = F.cross_entropy(head(features * kept / (1 - DROPOUT)), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        tell(step, steps)
    network.eval().requires_grad_(False)
    head.requires_grad_(False)
    knowledge = Knowledge(network, head, torch.empty(0))
    parts = [knowledge.embed(drawings.flatten(0, 1)) for drawings in known.train[:, :KEPT].split(100)]
    return replace(knowledge, activations=torch.cat(parts).view(len(known.images), -1, FEATURES))


def _strength(part: float) -> float:
    """Return the learning rate after this part of the training, relative to the highest one."""
    return part / WARM_UP if part < WARM_UP else 0.5 + 0.5 * math.cos(math.pi * (part - WARM_UP) / (1 - WARM_UP))


def _new(classes: int, normalised: bool, draws: torch.Generator | None = None) -> tuple[nn.Sequential, nn.Linear]:
    head = nn.Linear(FEATURES, classes, bias=False)
    nn.init.xavier_uniform_(head.weight, generator=draws)
    # The normalisation at the end takes away what the activations of all characters have in common.
    last = [nn.BatchNorm1d(FEATURES, affine=False), EqualLength()] if normalised else []
    return nn.Sequential(nn.ZeroPad2d(BORDER), *convnet(FILTERS, draws), *last), head


def _write(path: Path, knowledge: Knowledge) -> None:
    import numpy as np

    tensors = {"activations": knowledge.activations}
    for name in ("network", "head"):
        tensors |= {f"{name}.{key}": value for key, value in getattr(knowledge, name).state_dict().items()}
    arrays: dict[str, Any] = {name: tensor.numpy() for name, tensor in tensors.items()}
    write_atomic(path, lambda file: np.savez(file, **arrays))


def _read(path: Path, classes: int, normalised: bool) -> Knowledge | None:
    """Return what a file holds, or None if the file is missing or damaged."""
    try:
        tensors = {name: torch.from_numpy(array) for name, array in read_arrays(path).items()}
        network, head = _new(classes, normalised)
        for name, module in (("network", network), ("head", head)):
            own = {key: value for key, value in tensors.items() if key.startswith(f"{name}.")}
            module.load_state_dict({key.removeprefix(f"{name}."): value for key, value in own.items()})
            module.eval().requires_grad_(False)
        return Knowledge(network, head, tensors["activations"])
    except DAMAGES:
        return None
