"""The command `hebbian` on one thread, with steps that take a moment, so that a test can stop it.

python -m tests.lab.language.toy_words SECONDS train ...
"""

import sys
import time

import torch
from torch import Tensor

from hebbian_softmax.lab.cli import main
from hebbian_softmax.lab.language.model import MODELS
from hebbian_softmax.lab.language.model.lstm import WordLSTM


class Slow(WordLSTM):
    """The LSTM with a pause before every loss."""

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        time.sleep(float(sys.argv[1]))
        return super().forward(inputs, targets)


if __name__ == "__main__":
    torch.set_num_threads(1)
    MODELS["lstm"] = Slow
    sys.exit(main(sys.argv[2:]))
