"""How large should `make demo` be? Both heads on Glyphs over several seeds, at several learning rates.

Tuning seeds choose one learning rate for both heads: the one with which plain softmax reaches the most classes. Other
seeds then show the result of the demonstration, and the result of a softmax over the active classes only. Each trial is
stored when it is done, so a second call continues after the last one.

    python -m benchmarks.demo_size FOLDER [--steps 2000] [--filters 32] [--tuning-seeds 2] [--seeds 6]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch

from hebbian_softmax.lab.base import environment
from hebbian_softmax.lab.base.files import write_atomic
from hebbian_softmax.lab.base.json_files import to_json
from hebbian_softmax.lab.base.statistics import mean_and_spread
from hebbian_softmax.lab.images.curriculum import History
from hebbian_softmax.lab.images.fleet import Store, Trial, run_trials
from hebbian_softmax.lab.images.glyphs import make_glyphs
from hebbian_softmax.lab.images.learner import Method

FIRST_TUNING_SEED = 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder for the trials and summary.json")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--filters", type=int, default=32)
    parser.add_argument("--rates", type=float, nargs="+", default=[2e-3, 4e-3, 8e-3, 1.6e-2])
    parser.add_argument("--tuning-seeds", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--active-only-seeds", type=int, default=3)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    data = make_glyphs()
    store = Store(options.folder / "trials")

    def carry_out(label: str, trials: list[Trial]) -> dict[Trial, History]:
        device = torch.device("cpu")
        return run_trials(trials, store, data, device=device, together=2, filters=options.filters, label=label)

    def both(stage: str, rate: float, seeds: range, **changes: Any) -> list[Trial]:
        return [
            Trial(f"{stage}-{name}-{rate:g}", Method(name == "hebbian", rate, **changes), seed, options.steps)
            for seed in seeds
            for name in ("plain", "hebbian")
        ]

    began = time.monotonic()
    tuning_seeds = range(FIRST_TUNING_SEED, FIRST_TUNING_SEED + options.tuning_seeds)
    tuning = carry_out("tuning", [trial for rate in options.rates for trial in both("tuning", rate, tuning_seeds)])

    def plain_reach(rate: float) -> float:
        chosen = [each.reached for trial, each in tuning.items() if trial.method == Method(False, rate)]
        return mean_and_spread(chosen)[0]

    best = max(options.rates, key=plain_reach)
    held_out = carry_out("held out", both("held-out", best, range(options.seeds)))
    seeds = range(options.active_only_seeds)
    active_only = carry_out("active only", both("active-only", best, seeds, active_only=True))
    for trial, history in {**tuning, **held_out, **active_only}.items():
        reached = [history.classes_at(step) for step in range(250, options.steps + 1, 250)]
        print(f"{trial.key:28} classes after every 250 steps: {reached}")
    record = {
        "data": data.identity,
        "arguments": {name: value for name, value in vars(options).items() if name != "folder"},
        "learning_rate": best,
        "seconds": time.monotonic() - began,
        "versions": environment.versions(),
        "hardware": environment.hardware(),
        "trials": store.records(),
    }
    write_atomic(options.folder / "summary.json", (to_json(record) + "\n").encode())
    print(f"learning rate {best:g}; {options.folder / 'summary.json'}")


if __name__ == "__main__":
    main()
