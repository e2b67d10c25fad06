"""Train many models with different writes, and keep every result.

    python -m benchmarks.rule_study trials.json --data FOLDER --json runs.jsonl --budget 500 --fleet 8

``trials.json`` is a list of objects with the fields of ``Trial`` and ``Variant``: the ``Trial`` of ``train.py`` where
they name a ``corpus``, that of ``images.py`` where they name a ``task``, which is trained on the CPU with one thread.
Language models of one shape are trained together, up to ``--fleet`` of them. Results are appended line by line as they
come; trials that are in the file already are not run again. After ``--budget`` seconds nothing new is begun, and what
would not be finished in time is left out.

What is printed is of the validation text, so that nobody chooses by the test; both are in the file.
"""

from __future__ import annotations

import argparse
import json
import queue
import time
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from benchmarks.rule_study.fleet import shape_of
from benchmarks.rule_study.train import Trial
from benchmarks.rule_study.worker import Given, work


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trials", type=Path)
    parser.add_argument("--data", type=Path, help="folder of prepared corpora; by default that of the laboratory")
    parser.add_argument("--json", type=Path, default=Path("runs.jsonl"), help="file that results are appended to")
    parser.add_argument("--budget", type=float, default=3e7, help="seconds")
    parser.add_argument("--fleet", type=int, default=8, help="language models that share the launches of a step")
    parser.add_argument("--workers", type=int, default=1, help="processes that train at the same time")
    parser.add_argument("--seconds", type=float, default=0.0, help="begin no fleet with less time left than this")
    options = parser.parse_args()
    begun, device = time.time(), "cuda" if torch.cuda.is_available() else "cpu"
    known = set()
    if options.json.exists():
        known = {_key(json.loads(line)["given"]) for line in options.json.read_text().splitlines()}
    wanted = [each for each in json.loads(options.trials.read_text()) if _key(each) not in known]
    mp.set_start_method("spawn")
    todo: Any = mp.Queue()
    done: Any = mp.Queue()
    for some in fleets(wanted, options.fleet):
        todo.put(some)
    arguments = todo, done, device, options.data, begun + options.budget, options.seconds
    workers = [mp.Process(target=work, args=arguments, daemon=True) for _ in range(options.workers)]
    for worker in workers:
        worker.start()
    for _ in wanted:
        while True:
            try:
                result = done.get(timeout=2)
                break
            except queue.Empty:
                if not any(worker.is_alive() for worker in workers):
                    return
        with options.json.open("a") as file:
            file.write(json.dumps(result) + "\n")
        print(f"{time.time() - begun:5.0f} s  {_line(result)}", flush=True)


def fleets(wanted: list[Given], most: int) -> list[list[Given]]:
    """Return the trials in their order, those that can be trained together in lists of at most ``most``.

    >>> [len(some) for some in fleets([{"corpus": "a", "seed": i} for i in range(5)] + [{"task": "glyphs"}], 2)]
    [2, 2, 1, 1]
    """
    found: list[list[Given]] = []
    for given in wanted:
        shape = None if "task" in given else shape_of(Trial.of(given))
        last = found[-1] if found else []
        alike = shape is not None and last and "task" not in last[0] and shape_of(Trial.of(last[0])) == shape
        if alike and len(last) < most:
            last.append(given)
        else:
            found.append([given])
    return found


def _key(given: Given) -> str:
    return json.dumps(given, sort_keys=True)


def _line(result: dict[str, Any]) -> str:
    name = result["given"].get("name", "")
    if "error" in result:
        return f"{name}: {result['error'].splitlines()[-1]}"
    chosen_by = result.get("valid", result["test"])
    buckets = "  ".join(f"{key} {value:.4g}" for key, value in chosen_by.items() if value is not None)
    return f"{name:40s} {buckets}  ({result['seconds']:.0f} s)"


if __name__ == "__main__":
    main()
