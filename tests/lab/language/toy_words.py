"""The command `hebbian` on one thread, with steps that take a moment, so that a test can stop it.

python -m tests.lab.language.toy_words SECONDS train ...
"""

import sys
import time
from typing import Any

import torch

from hebbian_softmax.lab.cli import main
from hebbian_softmax.lab.language.task import WordTask


def slow_down(seconds: float) -> None:
    step = WordTask.train_step

    def stepping(self: WordTask) -> Any:
        time.sleep(seconds)
        return step(self)

    WordTask.train_step = stepping  # type: ignore[method-assign]


if __name__ == "__main__":
    torch.set_num_threads(1)
    slow_down(float(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
