"""Perplexities over seeds, as cells of tables."""

import math
from collections.abc import Sequence

from hebbian_softmax.lab.base.statistics import mean_and_spread

NOT_FINITE = "not finite"


def shown(value: float) -> str:
    """Write a perplexity with two decimals, or with none from a thousand on.

    >>> shown(34.3), shown(62_634.2)
    ('34.30', '62,634')
    """
    return f"{value:.2f}" if value < 1000 else f"{value:,.0f}"


def spread_cell(values: Sequence[float | None]) -> str | None:
    """Write mean ± two standard deviations over seeds, or one seed's value; None if a value is missing.

    >>> spread_cell([30.0, 31.0, 32.0]), spread_cell([30.0]), spread_cell([30.0, math.inf])
    ('31.00 ± 2.00', '30.00', 'not finite')
    """
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None
    if not all(map(math.isfinite, known)):
        return NOT_FINITE
    mean, spread = mean_and_spread(known)
    return shown(mean) if len(known) == 1 else f"{shown(mean)} ± {shown(2 * spread)}"


def change_cell(before: Sequence[float | None], after: Sequence[float | None]) -> str | None:
    """Write the change from the mean of one to the mean of the other; None if a value is missing.

    >>> change_cell([50.0, 50.0], [45.0])
    '-10.0 %'
    """
    known = [[value for value in values if value is not None and math.isfinite(value)] for values in (before, after)]
    if not all(known) or sum(map(len, known)) < len(before) + len(after):
        return None
    first, second = (mean_and_spread(values)[0] for values in known)
    return f"{100 * (second / first - 1):+.1f} %"


def apart(one: Sequence[float], other: Sequence[float]) -> bool:
    """Return whether the ranges mean ± 2σ of both do not overlap."""
    (first, first_spread), (second, second_spread) = mean_and_spread(one), mean_and_spread(other)
    return abs(first - second) > 2 * (first_spread + second_spread)
