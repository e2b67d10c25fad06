"""Where data are: in `--data-root`, else the environment's HEBBIAN_DATA, else the user's cache folder.

Files that are made from data go to HEBBIAN_CACHE, else the user's cache folder, because the data root may be read-only
and shared.
"""

import os
from pathlib import Path

from hebbian_softmax.lab.base.errors import LabError


def data_root(option: str | None = None) -> Path:
    """Return the folder with one subfolder for each data set. One given as `option` must exist: it may be mistyped."""
    if option:
        given = Path(option).expanduser()
        if not given.is_dir():
            raise LabError(f"--data-root: there is no folder {given}: correct the path, or make the folder first")
        return given
    return _configured("HEBBIAN_DATA")


def cache_root() -> Path:
    """Return the folder for files that are made once and read often; all of it may be deleted at any time."""
    return _configured("HEBBIAN_CACHE")


def _configured(variable: str) -> Path:
    """Return the folder that an environment variable names, else the one in the user's cache folder."""
    if configured := os.environ.get(variable):
        return Path(configured).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG rules say to ignore a relative path.
    base = Path(cache) if os.path.isabs(cache) else Path.home() / ".cache"
    return base / "hebbian-softmax"
