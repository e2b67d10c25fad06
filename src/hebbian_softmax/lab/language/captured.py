"""A step of training as a CUDA graph: of small models the host's launches take longer than the device's work."""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

Take = Callable[[Tensor, Tensor], Tensor]
"""A step on words (length + 1, columns) with a learning rate; its value is the loss."""

WARM_UP = 3
"""Steps before a capture, in which no kernel can be loaded: optimizers make their state, cuDNN chooses."""


class CapturedSteps:
    """Takes the first steps as they are, and replays one capture of a step from then on.

    What a step depends on beside its arguments must stay where it is, or `forget` be called. Dropout is drawn anew: a
    replay takes the generator's seed at that time.
    """

    _words: Tensor
    _rate: Tensor
    _loss: Tensor

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin anew, because something is elsewhere."""
        self._graph: torch.cuda.CUDAGraph | None = None
        self._like: tuple[torch.Size, bool] | None = None
        self._before = 0

    def __call__(self, take: Take, words: Tensor, learning_rate: float, memorizing: bool) -> Tensor:
        """`take` is not kept: its owner would keep itself. `memorizing` is what the step is captured for."""
        like = words.shape, memorizing
        if self._like != like:  # other kernels, which must be loaded before they are captured
            self.forget()
            self._like = like
            self._words, self._rate = torch.empty_like(words), torch.empty((), device=words.device)
        self._words.copy_(words)
        self._rate.fill_(learning_rate)
        if self._before < WARM_UP:
            self._before += 1
            return self._first(take)
        if self._graph is None:
            self._graph = self._capture(take)
        self._graph.replay()
        return self._loss.clone()

    def _first(self, take: Take) -> Tensor:
        here, side = torch.cuda.current_stream(self._words.device), _side_stream(self._words.device)
        side.wait_stream(here)
        with torch.cuda.stream(side):
            loss = take(self._words, self._rate)
        here.wait_stream(side)
        return loss

    def _capture(self, take: Take) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        side = _side_stream(self._words.device)
        with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
            self._loss = take(self._words, self._rate)
        return graph


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Of first steps and captures: libraries keep memory for every stream. Not that of replays."""
    return torch.cuda.Stream(device)
