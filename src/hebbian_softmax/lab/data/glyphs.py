"""Glyphs: characters of the fonts that matplotlib ships, distorted as a hand would; the task without a download."""

from pathlib import Path

from hebbian_softmax.lab.data.images import ImageSet


def make_glyphs(seed: int = 0, *, cache_dir: Path | None = None, quiet: bool = False) -> ImageSet:
    """At least 1,000 classes, 28×28; the same seed gives the same set."""
    raise NotImplementedError
