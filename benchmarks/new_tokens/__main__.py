"""Measure the rows that new tokens get. Settings are chosen on some tokens, and results are of others.

python -m benchmarks.new_tokens choose --json runs/choose.json
python -m benchmarks.new_tokens test --chosen runs/choose.json --json runs/test.json
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.new_tokens import alternatives
from benchmarks.new_tokens.features import WHEEL, load
from benchmarks.new_tokens.protocol import Split, prepare
from hebbian_softmax import NewClasses

RATES = (0.001, 0.002, 0.003, 0.005)
HOLDS = (0, 2)


def starts(split: Split) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return the rows that Adam may start from, in a head that was given a bias."""
    return {
        "mean row": alternatives.mean_row(split),
        "line and prior": alternatives.line_and_prior(split, bias=True),
        "write": split.written(NewClasses(), bias=True),
    }


def one_write(split: Split) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return all rows that need no gradients."""
    rows, bias = split.written(NewClasses(), bias=True)
    return {
        "the trained rows": (split.trained_rows(), torch.zeros(len(split.new))),
        "mean row": alternatives.mean_row(split),
        "line and prior, with a bias": alternatives.line_and_prior(split, bias=True),
        "line and prior, without a bias": alternatives.line_and_prior(split, bias=False),
        "write, whitened, with a bias": (rows, bias),
        "write, isotropic, with a bias": split.written(NewClasses(whiten=False), bias=True),
        "write, whitened, without a bias": split.written(NewClasses(), bias=False),
        "write, isotropic, without a bias": split.written(NewClasses(whiten=False), bias=False),
        "write, whitened, bias along the mean": alternatives.folded_into_mean(split, rows, bias),
    }


def choose(split: Split) -> dict[str, Any]:
    """Judge settings by tokens that take no part in the test."""
    found: dict[str, Any] = {"new tokens": len(split.new), "one write": {}, "shrinkage": {}, "map": {}, "adam": {}}
    for name, (rows, bias) in one_write(split).items():
        found["one write"][name] = show(name, split.judge(rows, bias))
    for whiten in (True, False):
        for k in (0.5, 1, 2, 3, 5):
            name = f"{'whitened' if whiten else 'isotropic'}, k = {k}"
            settings = NewClasses(whiten=whiten, shrinkage=k)
            found["shrinkage"][name] = show(name, split.judge(*split.written(settings, bias=True)))
    for ridge in (0.01, 0.03, 0.1, 0.3):
        found["map"][str(ridge)] = show(f"map, ridge {ridge}", split.judge(*alternatives.learned_map(split, ridge)))
    for name, (rows, bias) in starts(split).items():
        for hold in HOLDS if name == "write" else (0,):
            for lr in RATES:
                key = f"{name}, from {hold}, lr {lr}"
                found["adam"][key] = [show(key, each) for each in split.adam(rows, bias, lr, 2, hold)]
    return found


def best_rates(chosen: dict[str, Any]) -> dict[str, list[float]]:
    """Return the learning rate that was best after one epoch and after two, for each start and hold."""
    best: dict[str, list[float]] = {}
    for key in {key.rpartition(", lr ")[0] for key in chosen["adam"]}:
        runs = {float(k.rpartition(" ")[2]): v for k, v in chosen["adam"].items() if k.rpartition(", lr ")[0] == key}
        best[key] = [min(runs, key=lambda lr: runs[lr][epoch]["perplexity"]) for epoch in (0, 1)]
    return best


def test(split: Split, rates: dict[str, list[float]]) -> dict[str, Any]:
    """Judge the chosen settings by the tokens of a test."""
    found: dict[str, Any] = {"new tokens": len(split.new), "one write": {}, "adam": {}}
    for name, (rows, bias) in one_write(split).items():
        found["one write"][name] = show(name, split.judge(rows, bias))
    begun = starts(split)
    for key, (first, second) in sorted(rates.items()):
        name, _, hold = key.partition(", from ")
        runs = {lr: split.adam(*begun[name], lr, 2 if lr == second else 1, int(hold)) for lr in {first, second}}
        found["adam"][key] = {
            "one epoch": show(f"{key}, lr {first}, one epoch", runs[first][0]) | {"lr": first},
            "two epochs": show(f"{key}, lr {second}, two epochs", runs[second][1]) | {"lr": second},
        }
    return found


def show(name: str, judged: dict[str, float]) -> dict[str, float]:
    """Print a line for what was judged, and return it."""
    numbers = "  ".join(f"{value:8.2f}" for value in judged.values())
    print(f"{name:44s} {numbers}", flush=True)
    return judged


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=["choose", "test"])
    parser.add_argument("--model", type=Path, default=Path("runs/smollm2"), help=f"the folder with {WHEEL}")
    parser.add_argument("--data-root", type=Path, default=Path("../shared/data"), help="the folder with wikitext-2/")
    parser.add_argument("--chosen", type=Path, help="for the test: what the stage 'choose' has written")
    parser.add_argument("--splits", type=int, default=3, help="the number of tests")
    parser.add_argument("--json", type=Path, required=True, help="where the numbers are written")
    options = parser.parse_args()
    import transformers

    features = load(options.model, options.data_root)
    chosen, *tests = prepare(features, options.splits, options.model / f"log-normalisers-{options.splits}.pt")
    result: dict[str, Any] = {
        "stage": options.stage,
        "date": time.strftime("%Y-%m-%d"),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__, "model": WHEEL},
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "positions": len(features.targets),
    }
    if options.stage == "choose":
        result |= choose(chosen())
        result["best rates"] = best_rates(result)
    else:
        rates = json.loads(options.chosen.read_text())["best rates"]
        result["rates"] = rates
        result["splits"] = []
        for make in tests:
            result["splits"].append(test(make(), rates))
            options.json.write_text(json.dumps(result, indent=1))
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
