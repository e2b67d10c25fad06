"""Networks for tests: one that is not the LSTM, and ways to interfere with any of them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hebbian_softmax.lab.language.model import MODELS, LanguageModel
from hebbian_softmax.lab.language.model.lstm import WordLSTM

Hook = Callable[[LanguageModel, Tensor], object]
"""Is called with the model and the words (time, batch) before they are read."""


class Decay(LanguageModel):
    """A network with one parameter, whose features are a decaying mean of the words read so far."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.decay = nn.Parameter(torch.zeros(()))

    def features(self, inputs: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        words = F.embedding(inputs, self.head.weight).to(self.precision)
        keep = self.decay.sigmoid().to(self.precision)
        mean, found = torch.zeros_like(words[0]) if state is None else state, []
        for word in words:
            mean = keep * mean + (1 - keep) * word
            found.append(mean)
        return torch.stack(found), mean


def watch_lstm(monkeypatch: pytest.MonkeyPatch, hook: Hook) -> None:
    """Make `--model lstm` an LSTM that calls `hook` before it reads."""

    class Watched(WordLSTM):
        def features(self, inputs: Tensor, state: Any = None) -> Any:
            hook(self, inputs)
            return super().features(inputs, state)

    monkeypatch.setitem(MODELS, "lstm", Watched)


def out_of_memory(*_: object, **__: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
