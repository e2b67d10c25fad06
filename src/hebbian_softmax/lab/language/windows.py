"""Which words a training step sees: windows of the training text, in a new order every epoch."""

import torch
from torch import Tensor

from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.base.seeds import derive_seed

RESIDENT_SHARE = 0.25  # of a GPU's free memory that the ids may take


class Windows:
    """Batches of `batch` sequences of `length` words, each with the word after it.

    An epoch cuts the text into neighbouring windows, beginning at an offset of its own, and takes them in an order of
    its own; what does not fill a batch is left out. Both follow from the seed and the epoch, so the number of a step
    says all about its batch. A rank takes its share of the columns.
    """

    def __init__(
        self,
        ids: Tensor,
        *,
        batch: int,
        length: int,
        seed: int,
        device: torch.device | str = "cpu",
        rank: int = 0,
        ranks: int = 1,
        name: str = "the training split",
    ) -> None:
        windows = max(0, len(ids) - length) // length
        if windows < batch:
            raise LabError(
                f"{name} has {len(ids):,} words, too few for a batch of {batch} sequences of {length}, "
                f"which needs {(batch + 1) * length:,}: give --batch or --sequence a smaller number"
            )
        self.batch, self.length, self.seed, self.device = batch, length, seed, torch.device(device)
        self.epoch_steps = windows // batch
        """Steps of an epoch."""
        self._windows, self._rank, self._ranks = windows, rank, ranks
        self._resident = _fits(ids, self.device)
        self._ids = ids.to(self.device) if self._resident else ids
        self._steps = torch.arange(length + 1, device=self._ids.device).unsqueeze(1)
        self._epoch, self._starts = -1, torch.empty(0, dtype=torch.long)

    def at(self, step: int) -> Tensor:
        """The words of a step as int64 (length + 1, columns of this rank), on the device."""
        epoch, position = divmod(step, self.epoch_steps)
        if epoch != self._epoch:
            self._epoch, self._starts = epoch, self.starts(epoch).to(self._ids.device)
        share = self.batch // self._ranks
        first = position * self.batch + self._rank * share
        words = self._ids[self._starts[first : first + share] + self._steps]
        if not self._resident:  # copied while the GPU computes
            words = words.pin_memory().to(self.device, non_blocking=True)
        return words.long()

    def starts(self, epoch: int) -> Tensor:
        """Where the windows of an epoch begin, in the order they come."""
        draws = torch.Generator().manual_seed(derive_seed(self.seed, "order", epoch))
        offset = torch.randint(self.length, (), generator=draws)
        return offset + self.length * torch.randperm(self._windows, generator=draws)


def _fits(ids: Tensor, device: torch.device) -> bool:
    if device.type != "cuda":
        return True
    free, _ = torch.cuda.mem_get_info(device)
    return ids.numel() * ids.element_size() <= RESIDENT_SHARE * free
