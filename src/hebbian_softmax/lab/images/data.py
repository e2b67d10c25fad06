"""Sets of small images in classes, 20 drawings each: what Omniglot and Glyphs have in common."""

import hashlib
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

DRAWINGS = 20  # of each class
TEST_DRAWINGS = 5  # the first ones; the paper's split (section 4.1)
SIZE = 28  # pixels a side


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Images (classes, 20, 28, 28) in uint8: ink is 255, paper 0. `class_names` has one name a class, in order."""

    name: str
    images: Tensor
    class_names: list[str]

    @property
    def train(self) -> Tensor:
        """The last 15 drawings of each class, a view."""
        return self.images[:, TEST_DRAWINGS:]

    @property
    def test(self) -> Tensor:
        """The first 5 drawings of each class, a view."""
        return self.images[:, :TEST_DRAWINGS]

    @cached_property
    def identity(self) -> str:
        """Names this very set in a run's manifest: its name, its shape and a checksum of names and pixels."""
        digest = hashlib.sha256("\n".join([self.name, *self.class_names]).encode())
        digest.update(self.images.contiguous().cpu().numpy().data)
        shape = "x".join(str(length) for length in self.images.shape)
        return f"{self.name}-{shape}-{digest.hexdigest()[:16]}"
