"""Image sets that took seconds to make, kept as one array file each."""

import contextlib
import json
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import torch

from hebbian_softmax.lab.base.console import say
from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.base.files import cannot_write, locked, remove_temporary, write_atomic
from hebbian_softmax.lab.data.root import cache_root
from hebbian_softmax.lab.images.data import DRAWINGS, SIZE, ImageSet


def cached(name: str, key: str, make: Callable[[], ImageSet], cache_dir: Path | None) -> ImageSet:
    """The set kept under `name` and `key` in `cache_dir` (default: `images` in the cache root), or a new one.

    `key` stands for all that the set follows from. A file that is damaged is made again. The file gets its name
    once it is whole; processes that want the same set at once make it once.
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
            remove_temporary(folder)  # nobody else writes here now, so these are of processes that died
            with _one_thread():
                images = make()
            _keep(path, images)
            return images
    except OSError as error:
        raise _elsewhere(cannot_write(path, error)) from error


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Making a set is many small steps, after each of which threads would wait for each other: on two cores that had
    other work too, Glyphs took 28 s of processor time with two threads and 8 s with one.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _keep(path: Path, images: ImageSet) -> None:
    try:
        write_atomic(path, lambda file: _write(file, images))
    except LabError as error:
        raise _elsewhere(error) from error


def _elsewhere(error: LabError) -> LabError:
    return LabError(f"{error}, with HEBBIAN_CACHE")


def _write(file: IO[bytes], images: ImageSet) -> None:
    import numpy as np

    np.savez(file, images=images.images.numpy(), class_names=np.array(json.dumps(images.class_names)))


def _read(path: Path, name: str) -> ImageSet | None:
    """The set in a whole file; the archive's own checksums tell when bytes have changed."""
    import numpy as np

    try:
        with open(path, "rb") as stream, np.load(stream) as file:  # np.load leaves damaged files open
            images = torch.from_numpy(file["images"])
            class_names = json.loads(str(file["class_names"]))
    except (OSError, EOFError, ValueError, TypeError, KeyError, zipfile.BadZipFile, zlib.error, NotImplementedError):
        return None
    if images.dtype != torch.uint8 or images.shape != (len(class_names), DRAWINGS, SIZE, SIZE):
        return None
    return ImageSet(name, images, class_names)
