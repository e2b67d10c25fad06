"""The frequency buckets of the paper's table 2: how often a word occurs in the training text."""

import torch
from torch import Tensor

BUCKETS = (">10K", "1K–10K", "100–1K", "<100")  # the columns of the paper's frequency table
_BOUNDS = torch.tensor([100, 1_000, 10_001])  # the first count of the next bucket


def bucket_of(counts: Tensor) -> Tensor:
    """Return, for each count of training occurrences, the index of its bucket in `BUCKETS`.

    >>> [BUCKETS[bucket] for bucket in bucket_of(torch.tensor([0, 99, 100, 999, 1_000, 10_000, 10_001]))]
    ['<100', '<100', '100–1K', '100–1K', '1K–10K', '1K–10K', '>10K']
    """
    return len(_BOUNDS) - torch.bucketize(counts, _BOUNDS.to(counts.device), right=True)
