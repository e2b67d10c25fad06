"""Recommendations without a network: the most popular items, and items that the same users took (item-kNN)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.recommend.data import Items, Lesson


def pairs(histories: Sequence[Tensor], items: int, device: str) -> tuple[Tensor, Tensor]:
    """Return the number of the history and the item, for each item of each history that is in the catalogue."""
    lengths = torch.tensor([len(history) for history in histories])
    rows, taken = torch.arange(len(histories)).repeat_interleave(lengths), torch.cat(list(histories))
    known = taken < items
    return rows[known].to(device), taken[known].to(device)


class Baseline(ABC):
    """A table of who took what, from which scores of all items are computed."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.histories: dict[int, Items] = {}

    def learn(self, lessons: Sequence[Lesson], items: int) -> None:
        """Take in what users have taken by now; the catalogue has ``items`` items."""
        self.histories |= {lesson.user: lesson.history for lesson in lessons}
        self.prepare(items)

    def recommend(self, histories: Sequence[Items], k: int, batch: int = 512) -> Tensor:
        """Return the k best items of each history, best first, without its own: (histories, k); -1 where none is left.

        Among equal scores the item with the lowest number comes first.
        """
        found = []
        for start in range(0, len(histories), batch):
            some = [torch.as_tensor(history) for history in histories[start : start + batch]]
            scores = self.scores(some)
            scores[pairs(some, scores.shape[1], self.device)] = -torch.inf
            values, order = scores.sort(dim=1, descending=True, stable=True)
            best = order[:, :k].masked_fill(values[:, :k] == -torch.inf, -1)
            found.append(torch.nn.functional.pad(best, (0, k - best.shape[1]), value=-1).cpu())
        return torch.cat(found)

    @abstractmethod
    def prepare(self, items: int) -> None:
        """Compute what scores need, from the histories."""

    @abstractmethod
    def scores(self, histories: Sequence[Tensor]) -> Tensor:
        """Return finite scores (histories, items)."""


class Popularity(Baseline):
    """The score of an item is how often it was taken so far."""

    def prepare(self, items: int) -> None:
        taken = torch.cat([torch.as_tensor(history) for history in self.histories.values()])
        self.counts = torch.bincount(taken, minlength=items).to(self.device, torch.float32)

    def scores(self, histories: Sequence[Tensor]) -> Tensor:
        return self.counts.expand(len(histories), -1).clone()


class Neighbours(Baseline):
    """Item-kNN: the score of an item is the sum of its cosines with the last items of the history.

    The cosine is that of the sets of users who took the two items. Of each item, only the ``neighbours`` largest
    cosines count; of a history, the last ``recent`` items.
    """

    def __init__(self, device: str, neighbours: int, recent: int) -> None:
        super().__init__(device)
        self.neighbours, self.recent = neighbours, recent

    def prepare(self, items: int) -> None:
        taken = self._table([torch.as_tensor(history) for history in self.histories.values()], items)
        together = taken.T @ taken
        size = together.diagonal().clamp_min(1).sqrt()
        cosines = together / size / size.unsqueeze(1)
        cosines.fill_diagonal_(0)
        if self.neighbours < items:
            least = cosines.topk(self.neighbours, dim=1).values[:, -1:]
            cosines = torch.where(cosines >= least, cosines, 0)
        self.cosines = cosines

    def scores(self, histories: Sequence[Tensor]) -> Tensor:
        known = [history[history < len(self.cosines)] for history in histories]
        return self._table([history[-self.recent :] for history in known], len(self.cosines)) @ self.cosines

    def _table(self, histories: Sequence[Tensor], items: int) -> Tensor:
        """Return 1 where a history has an item, else 0: (histories, items)."""
        table = torch.zeros(len(histories), items, device=self.device)
        table[pairs(histories, items, self.device)] = 1
        return table
