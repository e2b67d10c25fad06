"""The command `hebbian` with a small set of images in place of Glyphs and Omniglot, saving all the time.

python -m tests.lab.images.toy_compare compare glyphs …
"""

import sys

import torch

from hebbian_softmax.lab.cli import main
from hebbian_softmax.lab.images import compare as images
from hebbian_softmax.lab.images import learner
from hebbian_softmax.lab.images import reproduce as omniglot
from tests.lab.images.toyset import toy_set


def replace_data() -> None:
    images.make_glyphs = lambda **_: toy_set()  # type: ignore[assignment]
    images.load_omniglot = omniglot.load_omniglot = lambda *_, **__: toy_set()  # type: ignore[assignment]
    images.CHECKPOINT_SECONDS = 0.05
    learner.BATCH = 4


if __name__ == "__main__":
    torch.set_num_threads(1)
    replace_data()
    sys.exit(main())
