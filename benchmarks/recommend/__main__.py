"""Compare recommenders: popularity, item-kNN, and a network with a plain softmax and with the rule.

    python -m benchmarks.recommend FILE.jsonl --data FOLDER [--tasks beauty] [--workers 6] [--budget 300]

FOLDER has ``recommend/amazon-beauty.txt.xz`` and ``recommend/movielens-100k.inter.xz``. ``--interactions`` takes a file
of your own in place of these two: tab-separated lines of user, item and, last, time after a header, or a line for each
user with the user's items in the order of time. Results are appended to FILE.jsonl, one trial a line; what has a line
is not run again, so a program that was stopped goes on where it was.
``python -m benchmarks.recommend.table FILE.jsonl`` shows the results.
"""

from __future__ import annotations

import argparse
import os
import queue
import time
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from benchmarks.recommend.plan import due
from benchmarks.recommend.records import Record, append, origin, read_records
from benchmarks.recommend.trials import LAST, TASKS, TIME, Trial, split_of, work

MARGIN, GRACE = 10.0, 2.0
"""Seconds before the end of the budget when trials are ended, and seconds that workers then have to end themselves."""


def compare(path: Path, root: Path, tasks: list[str], workers: int, deadline: float) -> bool:
    """Run what is due until nothing is, or until the deadline; return whether everything has a result."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    records = read_records(path)
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
        new = [trial for trial in due(tasks, records) if trial not in given]
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
    return not due(tasks, records)


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
    scores = "  ".join(f"{split} {record[split]['all']['ndcg']:.4f}" for split in ("valid", "test") if split in record)
    return f"{name:40s} NDCG {scores}  ({record['seconds']:.1f} s)"


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
    parser.add_argument("--workers", type=int, default=6, help="processes that train at the same time")
    parser.add_argument("--budget", type=float, default=3600.0, help="seconds after which the program ends")
    options = parser.parse_args(arguments)
    tasks: list[str] = options.tasks
    if options.interactions is not None:
        file = options.interactions.resolve()
        tasks = [f"{LAST if options.split == 'last' else TIME}{file}"]
        try:
            split_of(tasks[0], file.parent)  # now, before workers are started
        except (OSError, ValueError) as error:
            parser.error(f"{error}" + ("; without times give --split last" if options.split == "time" else ""))
    elif options.data is None:
        parser.error("--data FOLDER is needed, or the environment variable HEBBIAN_DATA, or --interactions FILE")
    deadline = time.time() + options.budget - MARGIN
    append(options.file, origin("benchmarks.recommend"))
    whole = compare(options.file, options.data or Path(), tasks, options.workers, deadline)
    print("everything has a result" if whole else "out of time: run the same command again to go on")


if __name__ == "__main__":
    main()
