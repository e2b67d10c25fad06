"""Live progress in words: how many, how many a second, the time left, the loss and the validation perplexity."""

import time
from collections.abc import Mapping
from typing import TextIO

from hebbian_softmax.lab.base.progress import LINE_SECONDS, Progress

REDRAW_SECONDS = 1.0  # on a terminal: to know the loss is to wait for the GPU
SHOWN = ("loss", "valid_perplexity")  # how the names end that are worth a place on the line


class WordsProgress(Progress):
    """The loop counts steps; people count words."""

    def __init__(
        self,
        label: str,
        *,
        step_words: int,
        total: int,
        start: int = 0,
        quiet: bool = False,
        stream: TextIO | None = None,
    ) -> None:
        super().__init__(
            label, total=total * step_words, start=start * step_words, unit="words", quiet=quiet, stream=stream
        )
        self.step_words = step_words

    def due(self) -> bool:
        return time.monotonic() - self._drawn >= (REDRAW_SECONDS if self.live else LINE_SECONDS)

    def update(self, done: int, metrics: Mapping[str, float] | None = None) -> None:
        shown = {name: value for name, value in (metrics or {}).items() if name.endswith(SHOWN)}
        super().update(done * self.step_words, None if metrics is None else shown)
