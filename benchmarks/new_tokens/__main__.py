"""Measure the rows that new tokens get. Settings are chosen on some tokens, and results are of others.

python -m benchmarks.new_tokens choose --json runs/choose.json
python -m benchmarks.new_tokens test --chosen runs/choose.json --json runs/test.json

With --without-adam, rows that need no gradients are judged alone, which takes a few minutes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.new_tokens import alternatives
from benchmarks.new_tokens.environment import described
from benchmarks.new_tokens.features import WHEEL, load
from benchmarks.new_tokens.protocol import Split, prepare
from hebbian_softmax import NewClasses

RATES = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.01)
HOLDS = (0, 2)
"""After the write, gradients move rows of tokens that were seen at least so often."""
SHRINKAGES = {"whitened": (0.5, 1, 2, 3, 5), "isotropic": (0.1, 0.25, 0.35, 0.5, 1, 2)}
RIDGES = (0.03, 0.1, 0.3, 1)


def starts(split: Split) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the rows that Adam may start from, in a head that was given a bias."""
    return {
        "mean row": alternatives.mean_row(split),
        "line and prior": alternatives.line_and_prior(split, bias=True),
        "write": split.written(NewClasses(), bias=True),
    }


def one_write(split: Split) -> dict[str, tuple[Tensor, Tensor]]:
    """Return all rows that need neither gradients nor settings."""
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


def shrunk(split: Split, kind: str, k: float) -> tuple[Tensor, Tensor]:
    """Return what a head with a bias writes with another shrinkage than the usual one."""
    return split.written(NewClasses(whiten=kind == "whitened", shrinkage=k), bias=True)


def choose(split: Split, found: dict[str, Any], save: Callable[[], None], adam: bool) -> None:
    """Judge settings by tokens that take no part in the test, and name the best."""
    found |= {"new tokens": len(split.new), "one write": {}, "shrinkage": {}, "map": {}, "adam": {}}
    for name, start in one_write(split).items():
        found["one write"][name] = show(name, split.judge(*start))
    for kind, values in SHRINKAGES.items():
        found["shrinkage"][kind] = {
            str(k): show(f"{kind}, k = {k}", split.judge(*shrunk(split, kind, k))) for k in values
        }
    for ridge in RIDGES:
        found["map"][str(ridge)] = show(f"map, ridge {ridge}", split.judge(*alternatives.learned_map(split, ridge)))
    save()
    for name, start in starts(split).items() if adam else ():
        for hold in HOLDS if name == "write" else (0,):
            runs = found["adam"][f"{name}, from {hold}"] = {}
            for lr in RATES:
                runs[str(lr)] = split.adam(*start, lr, 2, hold)
                for epoch, judged in enumerate(runs[str(lr)]):
                    show(f"{name}, from {hold}, lr {lr}, epoch {epoch + 1}", judged)
                save()
    found["best"] = {
        "shrinkage": {kind: best(runs) for kind, runs in found["shrinkage"].items()},
        "ridge": best(found["map"]),
        "rates": {
            name: [best({lr: judged[epoch] for lr, judged in runs.items()}) for epoch in (0, 1)]
            for name, runs in found["adam"].items()
        },
    }


def best(runs: dict[str, dict[str, float]]) -> float:
    """Return the setting with the lowest perplexity."""
    return float(min(runs, key=lambda setting: runs[setting]["perplexity"]))


def test(split: Split, chosen: dict[str, Any], found: dict[str, Any], save: Callable[[], None], adam: bool) -> None:
    """Judge the chosen settings by the tokens of a test."""
    found |= {"new tokens": len(split.new), "one write": {}, "adam": {}}
    for name, start in one_write(split).items():
        found["one write"][name] = show(name, split.judge(*start))
    for kind, k in chosen["shrinkage"].items():
        name = f"write, {kind}, with a bias, k = {k:g}"
        found["one write"][name] = show(name, split.judge(*shrunk(split, kind, k)))
    name = f"learned map, ridge {chosen['ridge']:g}"
    found["one write"][name] = show(name, split.judge(*alternatives.learned_map(split, chosen["ridge"])))
    save()
    if not adam:
        return
    begun = starts(split)
    for key, (first, second) in chosen["rates"].items():
        start, _, hold = key.partition(", from ")
        runs = {lr: split.adam(*begun[start], lr, 2 if lr == second else 1, int(hold)) for lr in {first, second}}
        found["adam"][key] = {
            "one epoch": show(f"{key}, lr {first}, one epoch", runs[first][0]) | {"lr": first},
            "two epochs": show(f"{key}, lr {second}, two epochs", runs[second][1]) | {"lr": second},
        }
        save()


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
    parser.add_argument("--only", type=int, help="the one of these tests that is made, from 1; all without it")
    parser.add_argument("--without-adam", action="store_true", help="judge only rows that need no gradients")
    parser.add_argument("--json", type=Path, required=True, help="where the numbers are written")
    options = parser.parse_args()
    if options.stage == "test" and options.chosen is None:
        parser.error("the stage 'test' needs --chosen")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    features = load(options.model, options.data_root)
    choosing, *tests = prepare(features, options.splits, options.model / f"log-normalisers-{options.splits}.pt")
    result: dict[str, Any] = described("benchmarks.new_tokens")
    result |= {"stage": options.stage, "positions": len(features.targets)}

    def save() -> None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")

    if options.stage == "choose":
        choose(choosing(), result, save, not options.without_adam)
    else:
        result["chosen"] = json.loads(options.chosen.read_text())["best"]
        result["splits"] = {}
        for number, make in enumerate(tests, 1):
            if options.only in (None, number):
                found = result["splits"][str(number)] = {}
                test(make(), result["chosen"], found, save, not options.without_adam)
    save()


if __name__ == "__main__":
    main()
