"""Which trials are due: both heads are tuned with equally many trials on validation alone, and then get new seeds.

In the first round both heads try the same grid: learning rate, dropout and the length of training, or in place of the
length, for the split by time, the learning rate of later periods. The rule has its usual settings there. In the second
round each head goes on from its own best point, again with equally many trials: plain softmax with learning rates and
dropout around that point, the rule with other settings of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import product
from typing import Any

from benchmarks.recommend.records import Record
from benchmarks.recommend.trials import Trial

TUNING_SEED = 1000
FINAL_SEEDS = (1, 2, 3, 4, 5)
THIRD: dict[str, list[dict[str, Any]]] = {
    "beauty": [{"epochs": 15}, {"epochs": 30}],
    "movielens": [{"epochs": 40}, {"epochs": 80}],
    "movielens by time": [{"epochs": 60, "period_rate": 0.25}, {"epochs": 60, "period_rate": 1.0}],
}
"""The third axis of the grid, beside learning rate and dropout."""
RULE: list[dict[str, Any]] = [
    {"gamma": 0.02},
    {"gamma": 0.3},
    {"limit": 20},
    {"limit": 500},
    {"start": 0},
    {"fade": False},
]
"""What the second round changes of the rule, one setting at a time."""
NEIGHBOURS = [{"neighbours": k, "recent": recent} for k, recent in product((20, 100, 500), (1, 1000))]


def grid(task: str) -> list[dict[str, Any]]:
    """Return the settings that both heads try."""
    rates, dropouts = (1e-3, 3e-3), (0.2, 0.5)
    return [{"learning_rate": lr, "dropout": p} | third for lr, p, third in product(rates, dropouts, THIRD[task])]


def around(best: Trial) -> list[Trial]:
    """Return what the second round tries for plain softmax: as many trials as for the rule."""
    points = [(0.4, 0.0), (0.6, 0.0), (1.7, 0.0), (1.0, -0.15), (1.0, 0.15), (0.6, 0.15)]
    return [
        replace(best, learning_rate=best.learning_rate * factor, dropout=round(best.dropout + more, 2))
        for factor, more in points
    ]


def rounds(task: str, method: str, records: Sequence[Record]) -> Iterator[list[Trial]]:
    """Yield the trials of one method round after round, as far as the results of earlier rounds are in ``records``.

    The last round is the final one.
    """
    base = Trial(task, method, TUNING_SEED)
    if method == "popularity":
        yield [replace(base, final=True)]
        return
    tried = [replace(base, **point) for point in (NEIGHBOURS if method == "neighbours" else grid(task))]
    yield tried
    best = best_of(tried, records)
    if best is None:
        return
    if method == "neighbours":
        yield [replace(best, final=True)]
        return
    second = around(best) if method == "plain" else [replace(best, **change) for change in RULE]
    yield second
    best = best_of(tried + second, records)
    if best is not None:
        yield [replace(best, seed=seed, final=True) for seed in FINAL_SEEDS]


def best_of(tried: Sequence[Trial], records: Sequence[Record]) -> Trial | None:
    """Return the trial with the best NDCG on validation; None while one has no result. Failed trials come last."""
    results = [find(trial, records) for trial in tried]
    known = [result for result in results if result is not None]
    if len(known) < len(tried):
        return None
    values = [result["valid"]["all"]["ndcg"] if "valid" in result else -1.0 for result in known]
    return tried[values.index(max(values))]


def find(trial: Trial, records: Sequence[Record]) -> Record | None:
    """Return the result of a trial, if there is one."""
    given = asdict(trial)
    return next((record for record in records if record.get("given") == given), None)


METHODS = ("popularity", "neighbours", "plain", "rule")


def due(tasks: Sequence[str], records: Sequence[Record]) -> list[Trial]:
    """Return the trials that can be run now and have no result."""
    return [
        trial
        for task in tasks
        for method in METHODS
        for some in rounds(task, method, records)
        for trial in some
        if find(trial, records) is None
    ]
