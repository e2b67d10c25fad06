"""Recommendations without a network: the most popular items, and items that the same users took (item-kNN)."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.recommend.data import Items, Lesson

CELLS = 1 << 22
"""How many scores or cosines are computed at once."""
ENTRY, WORKSPACE = 64, 1 << 28
"""About how many bytes item-kNN takes at most for each cosine that is not 0, and besides."""


def pairs(histories: Sequence[Tensor], items: int, device: str) -> tuple[Tensor, Tensor]:
    """Return the number of the history and the item, for each item of each history that is in the catalogue."""
    lengths = torch.tensor([len(history) for history in histories])
    rows, taken = torch.arange(len(histories)).repeat_interleave(lengths), torch.cat(list(histories))
    known = taken < items
    return rows[known].to(device), taken[known].to(device)


def sparse(rows: Tensor, columns: Tensor, values: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return a sparse matrix of entries that are sorted by row and column."""
    places = torch.stack([rows, columns])
    return torch.sparse_coo_tensor(places, values, shape, is_coalesced=True, check_invariants=False)


def sparse_table(histories: Sequence[Tensor], items: int) -> Tensor:
    """Return 1 where a history has an item, else 0: a sparse matrix (histories, items)."""
    rows, taken = pairs(histories, items, "cpu")
    cells = torch.unique(rows * items + taken)
    return sparse(cells // items, cells % items, torch.ones(len(cells)), (len(histories), items))


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return the product of two sparse matrices, which is sparse, too."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta", UserWarning)  # used inside of torch
        found: Tensor = torch.sparse.mm(a, b).coalesce()
    return found


class Baseline(ABC):
    """A table of who took what, from which scores of all items are computed."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.histories: dict[int, Items] = {}
        self.items = 0

    def learn(self, lessons: Sequence[Lesson], items: int) -> None:
        """Take in what users have taken by now; the catalogue has ``items`` items."""
        self.histories |= {lesson.user: lesson.history for lesson in lessons}
        self.items = items
        self.prepare(items)

    def recommend(self, histories: Sequence[Items], k: int, batch: int = 512) -> Tensor:
        """Return the k best items of each history, best first, without its own: (histories, k); -1 where none is left.

        Among equal scores the item with the lowest number comes first.
        """
        found = []
        batch = min(batch, max(1, CELLS // self.items))
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
    cosines count; of a history, the last ``recent`` items. Cosines are computed for some items at a time, and only
    those that are not 0 are kept, so that a large catalogue needs no matrix of items by items. All is done on the CPU,
    where it takes seconds.
    """

    def __init__(self, neighbours: int, recent: int) -> None:
        super().__init__("cpu")
        self.neighbours, self.recent = neighbours, recent

    def prepare(self, items: int) -> None:
        taken = sparse_table([torch.as_tensor(history) for history in self.histories.values()], items)
        users, each = taken.indices()
        order = each.argsort(stable=True)
        users, each = users[order], each[order]  # the items in their order, and the users of each
        size = torch.bincount(each, minlength=items).clamp_min(1).float().sqrt()
        step = max(1, CELLS // items)
        blocks = []
        for start in range(0, items, step):
            shape = min(step, items - start), len(self.histories)
            first, last = torch.searchsorted(each, torch.tensor([start, start + step])).tolist()
            some = sparse(each[first:last] - start, users[first:last], torch.ones(last - first), shape)
            together = product(some, taken)
            rows, columns = together.indices()
            cosines = together.values() / size[columns] / size[rows + start]
            cosines[rows + start == columns] = 0
            kept = (cosines > 0) & (cosines >= self._least(rows, columns, cosines, items)[rows])
            blocks.append((rows[kept] + start, columns[kept], cosines[kept]))
        rows, columns, values = map(torch.cat, zip(*blocks, strict=True))
        self.cosines = sparse(rows, columns, values, (items, items))

    def _least(self, rows: Tensor, columns: Tensor, cosines: Tensor, items: int) -> Tensor:
        """Return for each row the least cosine that counts: 0 where there are no more than the neighbours."""
        least = torch.zeros(1 + int(rows.max()) if len(rows) else 0)
        many = torch.bincount(rows, minlength=len(least)) > self.neighbours
        if many.any():
            table = torch.zeros(len(least), items)
            table[rows, columns] = cosines
            least[many] = table[many].topk(self.neighbours, dim=1).values[:, -1]
        return least

    def scores(self, histories: Sequence[Tensor]) -> Tensor:
        known = [history[history < self.items] for history in histories]
        recent = sparse_table([history[-self.recent :] for history in known], self.items)
        return product(recent, self.cosines).to_dense()


def memory_of_neighbours(sequences: Sequence[Items], items: int, neighbours: int) -> int:
    """Return about how many bytes item-kNN takes at most; the sequences are the whole histories of all users."""
    pairs_of_items = sum(len(history) ** 2 for history in sequences)
    return WORKSPACE + ENTRY * min(pairs_of_items, items * min(items, neighbours))
