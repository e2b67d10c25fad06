"""Sets of small grey images in classes: what they have in common, how one is declared, and where they are kept."""

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hebbian_softmax.lab.base.arrays import DAMAGES, read_arrays
from hebbian_softmax.lab.base.console import say
from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.base.files import cannot_write, locked, remove_temporary, write_atomic
from hebbian_softmax.lab.base.json_files import from_json, to_json
from hebbian_softmax.lab.data.root import cache_root
from hebbian_softmax.lab.images.curriculum import CurriculumSettings

DRAWINGS = 20  # drawings of each class in Omniglot and Glyphs
SIZE = 28  # pixels a side in Omniglot and Glyphs
TEST_DRAWINGS = 5  # the first drawings of each class; the paper's split (section 4.1)


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Images (classes, drawings, height, width) in uint8, where ink is 255 and paper 0, and each class's name."""

    name: str
    images: Tensor
    class_names: list[str]

    @property
    def train(self) -> Tensor:
        """A view of the drawings of each class after the first 5."""
        return self.images[:, TEST_DRAWINGS:]

    @property
    def test(self) -> Tensor:
        """A view of the first 5 drawings of each class."""
        return self.images[:, :TEST_DRAWINGS]

    @cached_property
    def identity(self) -> str:
        """The name, the shape, and a checksum of class names and pixels, for a run's manifest."""
        digest = hashlib.sha256("\n".join([self.name, *self.class_names]).encode())
        digest.update(self.images.contiguous().cpu().numpy().data)
        shape = "x".join(str(length) for length in self.images.shape)
        return f"{self.name}-{shape}-{digest.hexdigest()[:16]}"


@dataclass(frozen=True)
class ImageSource:
    """The declaration of an image set: all that commands need to know about it.

    A new set is one module with its `SOURCE` and one line in `compare.SOURCES`.
    """

    name: str
    """The second word of `hebbian compare NAME`."""
    help: str
    settings: type[CurriculumSettings]
    load: Callable[[Any, bool], ImageSet]
    """Returns the set, given the settings and whether to be quiet."""


def cached(name: str, key: str, make: Callable[[], ImageSet], cache_dir: Path | None) -> ImageSet:
    """Return the set kept under `name` and `key` in `cache_dir` (default: `images` in the cache root), or make it.

    `key` stands for everything that the set depends on. A damaged file is made again. The file gets its name once it
    is whole, and processes that want the same set at the same time make it once.
    """
    folder = cache_root() / "images" if cache_dir is None else cache_dir
    path = folder / f"{name}-{key}.npz"
    if (found := _read(path, name)) is not None:
        return found
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder, wait=True):
            if (found := _read(path, name)) is not None:
                return found
            if path.exists():
                say(f"{path} is damaged; making it again")
            remove_temporary(folder)  # the lock is ours, so temporary files here are from processes that died
            with _one_thread():
                images = make()
            _write(path, images)
            return images
    except OSError as error:
        raise LabError(f"{cannot_write(path, error)}, with HEBBIAN_CACHE") from error


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Let torch use one thread: making a set is many small steps, and threads would wait for each other after each.

    On two cores that had other work too, Glyphs took 28 s of processor time with two threads and 8 s with one.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _write(path: Path, images: ImageSet) -> None:
    import numpy as np

    names = np.array(to_json(images.class_names))
    try:
        write_atomic(path, lambda file: np.savez(file, images=images.images.numpy(), class_names=names))
    except LabError as error:
        raise LabError(f"{error}, with HEBBIAN_CACHE") from error


def _read(path: Path, name: str) -> ImageSet | None:
    """Return the set in a file, or None if the file is missing or the archive's own checksums show damage."""
    try:
        arrays = read_arrays(path)
        images, class_names = torch.from_numpy(arrays["images"]), from_json(str(arrays["class_names"]))
    except DAMAGES:
        return None
    if not isinstance(class_names, list) or not all(isinstance(each, str) for each in class_names):
        return None
    if images.dtype != torch.uint8 or images.ndim != 4 or len(images) != len(class_names):
        return None
    return ImageSet(name, images, class_names)
