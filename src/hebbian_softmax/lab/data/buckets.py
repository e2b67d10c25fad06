"""The frequency buckets of the paper's table 2: how often a word occurs in the training text."""

import torch
from torch import Tensor

BUCKETS = (">10K", "1K–10K", "100–1K", "<100")  # the columns of the paper's frequency table
_BOUNDS = torch.tensor([100, 1_000, 10_001])  # the first count of the next bucket


def bucket_of(counts: Tensor) -> Tensor:
    """Return, for each count of training occurrences, the index of its bucket in `BUCKETS`.

    >>> bucket_of(torch.tensor([0, 99, 100, 999, 1_000, 10_000, 10_001])).tolist()
    [3, 3, 2, 2, 1, 1, 0]
    """
    return len(_BOUNDS) - torch.bucketize(counts, _BOUNDS.to(counts.device), right=True)
