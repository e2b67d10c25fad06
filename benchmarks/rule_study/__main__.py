"""Train many models with different writes on one GPU, some at a time, and keep every result.

    python -m benchmarks.rule_study trials.json --data FOLDER --json runs.jsonl --budget 500 --workers 3

``trials.json`` is a list of objects with the fields of ``Trial`` and ``Variant``: the ``Trial`` of ``train.py`` where
they name a ``corpus``, that of ``images.py`` where they name a ``task``, which is trained on the CPU with one thread.
Results are appended line by line as they come; trials that are in the file already are not run again. After
``--budget`` seconds nothing new is begun, and what would not be finished in time is left out.
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

from benchmarks.rule_study.train import work


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trials", type=Path)
    parser.add_argument("--data", type=Path, help="folder of prepared corpora; by default that of the laboratory")
    parser.add_argument("--json", type=Path, default=Path("runs.jsonl"), help="file that results are appended to")
    parser.add_argument("--budget", type=float, default=3e7, help="seconds")
    parser.add_argument("--workers", type=int, default=3, help="models that are trained at the same time")
    options = parser.parse_args()
    begun, device = time.time(), "cuda" if torch.cuda.is_available() else "cpu"
    known = set()
    if options.json.exists():
        known = {_key(json.loads(line)["given"]) for line in options.json.read_text().splitlines()}
    wanted = [each for each in json.loads(options.trials.read_text()) if _key(each) not in known]
    mp.set_start_method("spawn")
    todo: Any = mp.Queue()
    done: Any = mp.Queue()
    for each in wanted:
        todo.put(each)
    arguments = todo, done, device, options.data, begun + options.budget
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


def _key(given: dict[str, Any]) -> str:
    return json.dumps(given, sort_keys=True)


def _line(result: dict[str, Any]) -> str:
    name = result["given"].get("name", "")
    if "error" in result:
        return f"{name}: {result['error'].splitlines()[-1]}"
    buckets = "  ".join(f"{key} {value:.4g}" for key, value in result["test"].items() if value is not None)
    valid = f"valid {result['valid']['all']:.2f}  " if "valid" in result else ""
    return f"{name:40s} {valid}test {buckets}  ({result['seconds']:.0f} s)"


if __name__ == "__main__":
    main()
