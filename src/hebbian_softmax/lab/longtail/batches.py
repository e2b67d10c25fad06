"""Which examples come when."""

import torch
from torch import Tensor

from hebbian_softmax.lab.base.seeds import derive_seed


class ShuffledBatches:
    """Indices of examples in batches: every epoch all of them once, in a new order.

    The order follows from `seed` and the number of batches drawn alone, so that number is the whole state. A last
    batch that would be smaller is left out; its examples come in other epochs.
    """

    def __init__(self, examples: int, batch: int, seed: int) -> None:
        if not 1 <= batch <= examples:
            raise ValueError(f"batch must be between 1 and the {examples} examples, not {batch}")
        self.examples, self.batch, self.seed = examples, batch, seed
        self.drawn = 0
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.long)

    def next(self) -> Tensor:
        """The indices of the next batch."""
        epoch, position = divmod(self.drawn, self.examples // self.batch)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(derive_seed(self.seed, "order", epoch))
            self._epoch, self._order = epoch, torch.randperm(self.examples, generator=generator)
        self.drawn += 1
        return self._order[position * self.batch : (position + 1) * self.batch]

    def state_dict(self) -> dict[str, int]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.drawn = state["drawn"]
