"""A folder that keeps what a sweep has computed, so that a repeated or stopped sweep does not begin again."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hebbian_softmax.lab.base.arrays import DAMAGES, read_arrays
from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.base.files import cannot_write, remove_temporary, write_atomic
from hebbian_softmax.lab.language.model import LanguageModel


@dataclass(frozen=True)
class Store:
    """The arrays of one model on one corpus. Without a folder nothing is kept."""

    folder: Path | None
    prefix: str = ""
    """The beginning of the file names, which says which model the arrays are of."""
    identity: str = ""
    """A text that differs for other weights and for another corpus."""

    def get(
        self, name: str, settings: Mapping[str, Any], make: Callable[[], Mapping[str, Tensor]]
    ) -> dict[str, Tensor]:
        """Return the arrays called `name`: those on the disk if they are of these settings, else those of `make`."""
        if self.folder is None:
            return dict(make())
        import numpy as np

        path = self.folder / f"{self.prefix}{name}.npz"
        key = json.dumps([self.identity, dict(settings)], sort_keys=True)
        if (found := _read(path, key)) is not None:
            return found
        made = dict(make())
        arrays: dict[str, Any] = {array: values.numpy() for array, values in made.items()}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise cannot_write(path, error) from error
        remove_temporary(self.folder, path.name)
        write_atomic(path, lambda file: np.savez_compressed(file, key=np.array(key), **arrays))
        return made


def _read(path: Path, key: str) -> dict[str, Tensor] | None:
    """Return the arrays, or None if the file is absent, damaged or of something else, so that it is made again."""
    try:
        content = read_arrays(path)
        if str(content.pop("key")) != key:
            return None
        return {name: torch.from_numpy(array) for name, array in content.items()}
    except FileNotFoundError:
        return None
    except DAMAGES:
        if path.is_dir():
            raise LabError(f"{path} is a folder, but a sweep needs a file of this name: move the folder away") from None
        return None


def digest(model: LanguageModel) -> str:
    """Return a text that names these very weights and their precision."""
    total = hashlib.sha256(str(model.precision).encode())
    for name, value in sorted(model.state_dict().items()):
        total.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        total.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return total.hexdigest()[:16]
