"""Arrays in .npz files, read only if they are whole."""

import zipfile
import zlib
from pathlib import Path
from typing import Any

from hebbian_softmax.lab.base.zips import open_zip

DAMAGES: tuple[type[Exception], ...] = (
    OSError, ValueError, TypeError, KeyError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error,
)  # fmt: skip
"""What damaged bytes raise in `read_arrays`. An unknown compression is a RuntimeError."""


def read_arrays(path: Path) -> dict[str, Any]:
    """Return all arrays of a file, or raise one of `DAMAGES`.

    NumPy stops reading where an array ends according to its own header, and so may never come to the checksum.
    """
    import numpy as np  # imported here because help and reports must work without numpy

    with open_zip(path) as archive:
        if (damaged := archive.testzip()) is not None:
            raise ValueError(f"the checksum of {damaged} in it is wrong")
    with open(path, "rb") as file, np.load(file, allow_pickle=False) as arrays:  # np.load leaves damaged files open
        return {name: arrays[name] for name in arrays.files}
