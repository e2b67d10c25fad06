"""Omniglot: 1,623 handwritten characters of 50 alphabets, 20 drawings each (Lake et al., 2015)."""

from pathlib import Path

from hebbian_softmax.lab.data.images import ImageSet


def load_omniglot(data_root: str | None = None, *, cache_dir: Path | None = None, quiet: bool = False) -> ImageSet:
    """All 1,623 classes, background set first, resized to 28×28."""
    raise NotImplementedError
