"""Numbers that summarise several seeds."""

from collections.abc import Sequence


def mean_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and the standard deviation, which is 0 for a single value.

    >>> mean_and_spread([1, 2, 3]), mean_and_spread([2.0])
    ((2.0, 1.0), (2.0, 0.0))
    """
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, 0.0
    return mean, (sum((value - mean) ** 2 for value in values) / (len(values) - 1)) ** 0.5
