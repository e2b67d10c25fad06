"""Compare recommenders: popularity, item-kNN, and a network with a plain softmax and with the rule.

    python -m benchmarks.recommend FILE.jsonl --data FOLDER [--tasks beauty] [--workers 6] [--budget 300]

FOLDER has ``recommend/amazon-beauty.txt.xz`` and ``recommend/movielens-100k.inter.xz``. ``--interactions`` takes a file
of your own in place of these two, as text or compressed (.xz, .gz), in one of two formats:

    interactions   a header line, then a line for each: user, item, anything, and last the time in seconds; tabs between
    sequences      a line for each user: the user, then the user's items in the order of time; spaces or tabs between

``--split time`` needs times. Results are appended to FILE.jsonl, one trial a line, with fingerprints of the data and of
the split; what has a result is not run again, so a program that was stopped goes on where it was, and trials that
failed are tried again.
``python -m benchmarks.recommend.table FILE.jsonl`` shows the results.
"""

from __future__ import annotations

import argparse
import os
import queue
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.multiprocessing as mp

from benchmarks.recommend.baselines import memory_of_neighbours
from benchmarks.recommend.plan import MANY, METHODS, bases, due
from benchmarks.recommend.records import Record, append, origin, read_records
from benchmarks.recommend.scores import Scores
from benchmarks.recommend.trials import LAST, TASKS, TIME, Course, Trial, course_of, work
from hebbian_softmax.lab.base.progress import format_bytes

MARGIN, GRACE = 10.0, 2.0
"""Seconds before the end of the budget when trials are ended, and seconds that workers then have to end themselves."""


class Outcome(NamedTuple):
    """How a run has ended: whether nothing is left to run, and the errors of what failed."""

    whole: bool
    failed: list[Record]


def compare(path: Path, root: Path, starts: Sequence[Trial], workers: int, deadline: float) -> Outcome:
    """Run what is due until nothing is, or until the deadline. What failed in an earlier run is tried again, once."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    records = [record for record in read_records(path) if "error" not in record]
    context = mp.get_context("spawn")
    todo: Any = context.Queue()
    done: Any = context.Queue()
    arguments = todo, done, root, device, deadline
    pool = [context.Process(target=work, args=arguments, daemon=True) for _ in range(workers)]
    for process in pool:
        process.start()
    given: list[Trial] = []
    waiting, begun = 0, time.time()
    while time.time() < deadline:
        new = [trial for trial in due(starts, records) if trial not in given]
        for trial in new:
            todo.put(trial)
        given += new
        waiting += len(new)
        if not waiting:
            break
        try:
            record = done.get(timeout=1)
        except queue.Empty:
            if not all(process.is_alive() for process in pool):
                raise RuntimeError("a worker has ended, perhaps for want of memory; use fewer --workers") from None
            continue
        waiting -= 1
        if record is not None:
            records.append(record)
            append(path, record)
            print(f"{time.time() - begun:5.0f} s  {line_of(record)}", flush=True)
    _stop(pool, todo, workers)
    return Outcome(not due(starts, records), [record for record in records if "error" in record])


def _stop(pool: list[Any], todo: Any, workers: int) -> None:
    """Let idle workers end, and end those that are still busy."""
    for _ in range(workers):
        todo.put(None)
    limit = time.time() + GRACE
    for process in pool:
        process.join(max(0.0, limit - time.time()))
        if process.is_alive():
            process.terminate()
            process.join()
    todo.cancel_join_thread()


def line_of(record: Record) -> str:
    """Return one line about a result."""
    given = record["given"]
    name = f"{given['task']}, {given['method']}, seed {given['seed']}"
    if "error" in record:
        return f"{name}: {record['error'].splitlines()[-1]}"
    scores = "  ".join(f"{split} {_shown(record[split])}" for split in ("valid", "test") if split in record)
    return f"{name:40s} NDCG {scores}  ({record['seconds']:.1f} s)"


def _shown(scores: Scores) -> str:
    ndcg = scores["all"]["ndcg"]
    return "-" if ndcg is None else f"{ndcg:.4f}"


def too_large(course: Course, workers: int, memory: int) -> str:
    """Return why item-kNN is left out where all workers may need more than half of ``memory``, in bytes, for it."""
    needed = memory_of_neighbours(course.sequences, course.split.periods[-1].items, MANY)
    if workers * needed <= memory / 2:
        return ""
    return (
        f"item-kNN is left out, because it may take {format_bytes(needed)} in each of {workers} processes, together "
        f"more than half of this machine's {format_bytes(memory)}; --workers N sets how many there are"
    )


def machine_memory() -> int:
    """Return the bytes of memory of this machine, or a great number if the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return sys.maxsize


def prepared(task: str, root: Path, workers: int, methods: Sequence[str]) -> list[Trial]:
    """Read a task, say what was read, and return the trials to start from. Raise ValueError if it cannot be read."""
    course = course_of(task, root)
    print(f"{task}: {course.summary}", flush=True)
    if "neighbours" in methods and (why := too_large(course, workers, machine_memory())):
        print(f"{task}: {why}", flush=True)
        methods = [method for method in methods if method != "neighbours"]
    return bases(task, methods, course.data, course.protocol)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="file that results are appended to")
    parser.add_argument("--data", type=Path, default=os.environ.get("HEBBIAN_DATA"), help="folder of the data")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--interactions", type=Path, help="a file of your own, in place of --tasks")
    parser.add_argument(
        "--split",
        choices=("last", "time"),
        default="time",
        help="of your own file: ask for the last item of each user, or for all that comes after the first 40 %%",
    )
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS, help="by default all")
    parser.add_argument("--workers", type=int, default=6, help="processes that train at the same time")
    parser.add_argument("--budget", type=float, default=3600.0, help="seconds after which the program ends")
    options = parser.parse_args(arguments)
    tasks: list[str] = options.tasks
    if options.interactions is not None:
        file = options.interactions.resolve()
        tasks = [f"{LAST if options.split == 'last' else TIME}{file}"]
    elif options.data is None:
        parser.error("--data FOLDER is needed, or the environment variable HEBBIAN_DATA, or --interactions FILE")
    deadline = time.time() + options.budget - MARGIN
    root = options.data or Path()
    try:  # all data is read before any worker is started
        starts = [trial for task in tasks for trial in prepared(task, root, options.workers, options.methods)]
    except ValueError as error:
        parser.error(str(error))
    append(options.file, origin("benchmarks.recommend"))
    finish(compare(options.file, root, starts, options.workers, deadline))


def finish(outcome: Outcome) -> None:
    """Say how the run has ended; end the program with 1 if trials failed."""
    if not outcome.whole:
        print("out of time: run the same command again to go on")
    elif not outcome.failed:
        print("everything has a result")
    if outcome.failed:
        count = len(outcome.failed)
        print(f"{count} {'trial' if count == 1 else 'trials'} failed; the same command tries again what failed:")
        print("\n".join(map(line_of, outcome.failed)))
        sys.exit(1)


if __name__ == "__main__":
    main()
