"""Which trials are due: all methods are tuned on validation alone, both heads in the same way, then get new seeds.

In the first round both heads try the same grid: learning rate, dropout and the length of training or, for the split by
time, how much is learned after each period. In two further rounds each head goes on around its own best point, in the
same way; where these points differ, so may the numbers of trials, because none is tried twice. The rule has its usual
settings throughout. What decides is the NDCG of all questions, whatever it means for those about new items.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import product
from typing import Any

from benchmarks.recommend.records import Record
from benchmarks.recommend.trials import Trial, task_of

METHODS = ("popularity", "neighbours", "plain", "rule")
TUNING_SEED = 1000
FINAL_SEEDS = (1, 2, 3, 4, 5)
MANY = 10_000
"""Neighbours that are all of them where there are no more items."""
NEIGHBOURS = [
    {"neighbours": k, "recent": recent} for k, recent in product((20, 100, 500, MANY), (1, 2, 3, 5, 10, 20, 1000))
]


def third_axis(task: str) -> list[dict[str, Any]]:
    """Return what is tried beside learning rate and dropout."""
    lengths, periods = task_of(task).epochs, task_of(task).periods
    learned = [{"period_rate": rate, "passes": passes} for rate, passes in ((0.25, 1), (1.0, 1), (0.25, 4), (1.0, 4))]
    return [{"epochs": epochs} | more for epochs in lengths for more in (learned if periods else [{}])]


def grid(task: str) -> list[dict[str, Any]]:
    """Return the settings that both heads try."""
    rates, dropouts = (1e-3, 3e-3), (0.2, 0.5)
    return [{"learning_rate": lr, "dropout": p} | third for lr, p, third in product(rates, dropouts, third_axis(task))]


def around(best: Trial) -> list[Trial]:
    """Return what is tried around a point.

    Steps up and down cancel each other, so that a later round recognises what an earlier one has tried. No later period
    is learned with more than the learning rate of the training.
    """
    rates = (float(f"{best.learning_rate * factor:.2g}") for factor in (0.6, 1 / 0.6))
    changes: list[dict[str, Any]] = [{"learning_rate": rate} for rate in rates]
    changes += [{"dropout": min(0.8, max(0.0, round(best.dropout + more, 2)))} for more in (-0.15, 0.15)]
    if task_of(best.task).periods:
        changes += [{"passes": number} for number in {max(1, best.passes // 2), min(8, 2 * best.passes)}]
        changes += [{"period_rate": min(1.0, best.period_rate * factor)} for factor in (0.5, 2)]
    else:
        changes += [{"epochs": round(best.epochs * factor)} for factor in (2 / 3, 3 / 2)]
    return [replace(best, **change) for change in changes]


def bases(task: str, methods: Sequence[str] = METHODS, data: str = "", protocol: str = "") -> list[Trial]:
    """Return for each method the trial whose settings are then chosen; the others have its data and protocol."""
    return [Trial(task, method, TUNING_SEED, data=data, protocol=protocol) for method in methods]


def rounds(base: Trial, records: Sequence[Record]) -> Iterator[list[Trial]]:
    """Yield the trials of one method round after round, as far as the results of earlier rounds are in ``records``.

    The last round is the final one.
    """
    method = base.method
    if method == "popularity":
        yield [replace(base, final=True)]
        return
    tried = [replace(base, **point) for point in (NEIGHBOURS if method == "neighbours" else grid(base.task))]
    yield tried
    best = best_of(tried, records)
    if best is None:
        return
    if method == "neighbours":
        yield [replace(best, final=True)]
        return
    for _ in range(2):
        further = [trial for trial in around(best) if trial not in tried]
        yield further
        tried += further
        best = best_of(tried, records)
        if best is None:
            return
    yield [replace(best, seed=seed, final=True) for seed in FINAL_SEEDS]


def best_of(tried: Sequence[Trial], records: Sequence[Record]) -> Trial | None:
    """Return the trial with the best NDCG on validation, of those that did not fail.

    Return None while one was not run, and where all have failed.
    """
    results = [find(trial, records) for trial in tried]
    known = [result for result in results if result is not None]
    if len(known) < len(tried):
        return None
    values = [result["valid"]["all"]["ndcg"] if "valid" in result else None for result in known]
    found = [value for value in values if value is not None]
    return tried[values.index(max(found))] if found else None


def find(trial: Trial, records: Sequence[Record]) -> Record | None:
    """Return the result of a trial, or its error, if there is one."""
    given = asdict(trial)
    return next((record for record in records if record.get("given") == given), None)


def due(starts: Sequence[Trial], records: Sequence[Record]) -> list[Trial]:
    """Return the trials that can be run now and are not in ``records``; ``starts`` are those of :func:`bases`."""
    return [
        trial for base in starts for some in rounds(base, records) for trial in some if find(trial, records) is None
    ]
