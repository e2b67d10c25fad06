"""Live progress in words: how many, how many a second, the time left, the loss and the validation perplexity."""

from collections.abc import Mapping
from typing import TextIO

from hebbian_softmax.lab.progress import Progress

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

    def update(self, done: int, metrics: Mapping[str, float] | None = None) -> None:
        shown = {name: value for name, value in (metrics or {}).items() if name.endswith(SHOWN)}
        super().update(done * self.step_words, None if metrics is None else shown)
