"""The frozen default beside plain softmax: both tuned over the same grid on the validation text, then fresh seeds.

    python -m benchmarks.rule_study.final wikitext reuters --data FOLDER --json runs.jsonl --budget 500

For each task both heads first train over a grid of learning rate and dropout, with seed 100. While the best point of a
head lies at an edge, the grid grows there for both. With ``--finalists`` the best few points of each head are trained
with two seeds more, and the best mean decides. Then each head trains with its best point and the task's final
seeds, some of them also for other numbers of epochs. With ``--memories`` some of these models are also measured with a
cache and with MbPA; those that an earlier run has only trained are trained once more. Only final seeds are reported on
the test text. Results are appended to the file as they come, and what is in it is not run again, so that the program
goes on where it was stopped. The last lines are the tables.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.rule_study.__main__ import fleets
from benchmarks.rule_study.fleet import shape_of, train_fleet
from benchmarks.rule_study.plans import NOVELS, REUTERS, STRONG, TRANSFORMER, WIKITEXT
from benchmarks.rule_study.train import Trial, train

Given = dict[str, Any]
Result = dict[str, Any]
Point = tuple[float, ...]
"""A value of each axis of the grid."""

TUNING_SEED, FURTHER_SEEDS = 100, (101, 102)
HEADS: dict[str, Given] = {"plain": {}, "rule": {"library": {}}}


class Task(NamedTuple):
    """What all trials share, the axes of the grid, each ascending, and the final seeds."""

    common: Given
    axes: dict[str, tuple[float, ...]]
    seeds: range
    with_memories: int = 0
    """How many of the final seeds are also measured with a cache, and with a cache and MbPA."""
    most_points: int = 24
    """The grid has at most so many points, for each head."""
    other_epochs: tuple[float, ...] = ()
    """Numbers of epochs for which the final seeds are also trained, with the same settings."""
    finalists: int = 1
    """How many of the best points of each head are tried with further seeds, if more than one."""

    def lengths(self) -> tuple[float, ...]:
        """Return all numbers of epochs of final runs."""
        return (self.common.get("epochs", Trial.epochs), *self.other_epochs)


TASKS = {
    "wikitext": Task(
        WIKITEXT | {"input_dropout": 0.5},
        {"learning_rate": (0.003, 0.0042, 0.006), "output_dropout": (0.3, 0.4, 0.5)},
        range(10),
        with_memories=2,
    ),
    "reuters": Task(REUTERS, {"learning_rate": (0.003, 0.0042, 0.006), "output_dropout": (0.2, 0.3, 0.4)}, range(10)),
    "novels": Task(
        NOVELS | {"corpus": "novels", "epochs": 5.0, "hidden": 2048},
        {"learning_rate": (0.003,), "output_dropout": (0.05, 0.15, 0.25)},
        range(3),
        with_memories=2,
        other_epochs=(2.0,),
    ),
    "strong": Task(
        STRONG,
        {"input_dropout": (0.6, 0.7), "output_dropout": (0.5, 0.6), "recurrent_dropout": (0.5, 0.6)},
        range(3),
        most_points=12,
    ),
    "transformer": Task(TRANSFORMER, {"learning_rate": (5e-4, 1e-3), "residual_dropout": (0.2, 0.3, 0.4)}, range(3)),
}


def asked(task: Task, count: int, first_seed: int) -> Task:
    """Return a task with so many finalists, and with final seeds from another one on."""
    seeds = range(first_seed, first_seed + len(task.seeds))
    if count < 1 or first_seed < 0 or {TUNING_SEED, *FURTHER_SEEDS} & {*seeds}:
        raise SystemExit("--finalists must be 1 or more, and final seeds must not be tuning seeds")
    return task._replace(finalists=count, seeds=seeds)


def given(task: Task, head: str, point: Sequence[float], seed: int, **more: Any) -> Given:
    """Return a trial as it stands in the file of results."""
    settings = dict(zip(task.axes, point, strict=True)) | more
    name = ", ".join([head, *(f"{key} {value:g}" for key, value in settings.items()), f"seed {seed}"])
    return task.common | settings | HEADS[head] | {"name": name, "seed": seed}


def finals_of(task: Task, points: dict[str, Point], epochs: float) -> list[Given]:
    """Return the final trials of one length: of each seed those of all heads."""
    own = {} if epochs == task.lengths()[0] else {"epochs": epochs}
    return [given(task, head, points[head], seed, **own) for seed in task.seeds for head in HEADS]


def with_memories(task: Task, points: dict[str, Point]) -> list[Given]:
    """Return the trials that are measured with a cache and with MbPA."""
    seeds = task.seeds[: task.with_memories]
    return [given(task, head, points[head], seed, memories=True) for seed in seeds for head in HEADS]


class Runs:
    """Results by trial, kept in a file. A run that was also measured with memories stands for one that was not."""

    def __init__(self, file: Path) -> None:
        self.file = file
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        self.known = {_key(each["given"]): each for each in map(json.loads, lines) if "error" not in each}

    def of(self, trial: Given) -> Result | None:
        return self.known.get(_key(trial)) or self.known.get(_key(trial | {"memories": True}))

    def add(self, trial: Given, result: Result) -> None:
        line = {"given": trial} | result
        self.known[_key(trial)] = line
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def best_of(
    task: Task, head: str, points: Iterable[Point], seeds: Sequence[int], runs: Runs, count: int
) -> list[Point]:
    """Return the points with the lowest mean perplexity on the validation text over these seeds, the best one first."""

    def of(point: Point) -> float:
        found = [runs.of(given(task, head, point, seed)) for seed in seeds]
        value = math.fsum(math.inf if each is None else each["valid"]["all"] for each in found)
        return value if math.isfinite(value) else math.inf

    return sorted(points, key=of)[:count]


def tuned(task: Task, runs: Runs) -> Iterator[dict[str, list[float]]]:
    """Yield the axes of the grid, round after round; all of a round is to be run before the next."""
    axes = {name: list(values) for name, values in task.axes.items()}
    while True:
        yield axes
        grown = False
        for head in HEADS:
            (best,) = best_of(task, head, product(*axes.values()), (TUNING_SEED,), runs, 1)
            for (name, values), value in zip(axes.items(), best, strict=True):
                further = _beyond(name, values, value)
                points = math.prod(map(len, axes.values())) // len(values) * (len(values) + 1)
                if further is not None and points <= task.most_points:
                    values.append(further)
                    values.sort()
                    grown = True
        if not grown:
            return


def finalists(task: Task, runs: Runs) -> dict[str, list[Point]]:
    """Return the best points of each head on the grid as far as it has been run."""
    *_, axes = tuned(task, runs)
    points = list(product(*axes.values()))
    return {head: best_of(task, head, points, (TUNING_SEED,), runs, task.finalists) for head in HEADS}


def best_points(task: Task, runs: Runs) -> dict[str, Point]:
    """Return the best point of each head: where there are several finalists, by the mean over all tuning seeds."""
    found = finalists(task, runs)
    if task.finalists == 1:
        return {head: points[0] for head, points in found.items()}
    seeds = (TUNING_SEED, *FURTHER_SEEDS)
    return {head: best_of(task, head, points, seeds, runs, 1)[0] for head, points in found.items()}


def wanted(task: Task, runs: Runs, memories: bool = False) -> Iterator[list[Given]]:
    """Yield trials that are to be run next, round after round: the grid, what it grows by, and the final seeds."""
    for axes in tuned(task, runs):
        yield [given(task, head, point, TUNING_SEED) for head in HEADS for point in product(*axes.values())]
    if task.finalists > 1:
        found = finalists(task, runs)
        yield [given(task, head, point, seed) for head in HEADS for point in found[head] for seed in FURTHER_SEEDS]
    points = best_points(task, runs)
    if memories:
        yield with_memories(task, points)
    for epochs in task.lengths():
        yield finals_of(task, points, epochs)


def _beyond(name: str, values: list[float], best: float) -> float | None:
    """Return the next value beyond an end of an axis, if the best one is there; dropout stays within 0 and 0.9."""
    if len(values) == 1 or best not in (values[0], values[-1]):
        return None
    if name == "learning_rate":
        factor = values[1] / values[0]
        return best / factor if best == values[0] else best * factor
    step = values[1] - values[0]
    further = round(best - step if best == values[0] else best + step, 4)
    return further if 0 <= further <= 0.9 else None


def tables(task: Task, runs: Runs) -> Iterator[str]:
    """Yield, for each number of epochs, the differences of the final seeds on the test text, with 95 % intervals."""
    points = best_points(task, runs)
    yield f"settings {', '.join(task.axes)}: {points}"
    for epochs in task.lengths():
        yield table(epochs, pairs_of(finals_of(task, points, epochs), runs))
    measured = [[each["memories"] for each in pair] for pair in pairs_of(with_memories(task, points), runs)]
    for k, row in enumerate(measured[0][0] if measured else []):
        yield line(row["name"], [[each[k]["scores"]["test"]["perplexity"] for each in pair] for pair in measured])


def pairs_of(trials: list[Given], runs: Runs) -> list[list[Result]]:
    """Return the results of trials that follow each other, a list for each seed, where all heads have one."""
    each = [[runs.of(trials[i + k]) for k in range(len(HEADS))] for i in range(0, len(trials), len(HEADS))]
    pairs = [[result for result in pair if result is not None] for pair in each]
    return [pair for pair in pairs if len(pair) == len(HEADS)]


def table(epochs: float, pairs: list[list[Result]]) -> str:
    """Return the table of pairs of a plain run and one of the rule."""
    if not pairs:
        return f"{epochs:g} epochs: no final pair of seeds yet"
    lines = [f"{epochs:g} epochs, {len(pairs)} seeds, test text"]
    lines += [
        line(bucket, [[each["test"][bucket] for each in pair] for pair in pairs]) for bucket in pairs[0][0]["test"]
    ]
    began = sorted({pair[1]["began"] for pair in pairs})
    return "\n".join([*filter(None, lines), f"writing began with batch {began[0]} to {began[-1]}"])


def line(name: str, values: list[list[float | None]]) -> str:
    """Return the means over seeds of both heads and their differences in per cent; nothing where a value is missing."""
    known = [(plain, rule) for plain, rule in values if plain is not None and rule is not None]
    if len(known) < len(values):
        return ""
    changes = [100 * (rule / plain - 1) for plain, rule in known]
    mean, each = statistics.mean(changes), " ".join(f"{change:+.2f}" for change in changes)
    plain, rule = (statistics.mean(column) for column in zip(*known, strict=True))
    return f"{name:>16s}  {plain:10.5g} {rule:10.5g}  {mean:+6.2f} ± {half_width(changes):.2f} %  {each}"


T_QUANTILES = {1: 12.71, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
"""Of Student's distribution, 97.5 %, by degrees of freedom."""


def half_width(values: Sequence[float]) -> float:
    """Return half of the 95 % interval of a mean; infinite for one value."""
    if len(values) < 2:
        return math.inf
    return T_QUANTILES[len(values) - 1] * statistics.stdev(values) / math.sqrt(len(values))


def _key(trial: Given) -> str:
    return json.dumps({key: value for key, value in trial.items() if key != "name"}, sort_keys=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="+", choices=list(TASKS))
    parser.add_argument("--data", type=Path, help="folder of prepared corpora; by default that of the laboratory")
    parser.add_argument("--json", type=Path, default=Path("runs.jsonl"), help="file that results are appended to")
    parser.add_argument("--budget", type=float, default=3e7, help="seconds after which nothing is trained any more")
    parser.add_argument("--fleet", type=int, default=8, help="language models that share the launches of a step")
    parser.add_argument("--finalists", type=int, default=1, help="points of each head tried with further seeds")
    parser.add_argument("--first-seed", type=int, default=0, help="the first of the final seeds")
    parser.add_argument("--memories", action="store_true", help="measure some models with a cache and with MbPA, too")
    options = parser.parse_args()
    begun, device = time.time(), "cuda" if torch.cuda.is_available() else "cpu"
    runs = Runs(options.json)
    tasks = {name: asked(TASKS[name], options.finalists, options.first_seed) for name in options.tasks}
    try:
        for name, task in tasks.items():
            for trials in wanted(task, runs, options.memories):
                for some in fleets([each for each in trials if runs.of(each) is None], options.fleet):
                    run(some, runs, device, options.data, begun + options.budget)
                    for each in some:
                        result = runs.known[_key(each)]
                        print(f"{time.time() - begun:5.0f} s  {name}: {each['name']}: {result['valid']['all']:.2f}")
    except TimeoutError as error:
        print(f"stopped: {error}")
    for name, task in tasks.items():
        for text in tables(task, runs):
            print(f"\n{name}, {text}")


def run(some: list[Given], runs: Runs, device: str, data: Path | None, deadline: float) -> None:
    """Train what can be trained together, and keep the results."""
    trials = [Trial.of(each) for each in some]
    if shape_of(trials[0]) is None:
        results = [train(trial, device, data, deadline) for trial in trials]
    else:
        results = train_fleet(trials, device, data, deadline)
    for each, result in zip(some, results, strict=True):
        runs.add(each, result)
    if device == "cuda":
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
