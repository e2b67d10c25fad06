"""Show image runs of the rule beside plain softmax with the same seeds.

    python -m benchmarks.rule_study.paired default.jsonl [EARLIER.jsonl ...]

Each task has a table in Markdown: the means of both heads, the mean of the paired differences with half of its 95 %
interval (Student's t), and the difference of every seed. A seed counts where both heads have a run; where several files
have the same run, the first of them counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.rule_study.final import half_width
from benchmarks.rule_study.images import Trial
from benchmarks.rule_study.write import Variant
from hebbian_softmax.lab.images.curriculum import CHECK_EVERY

Result = dict[str, Any]
SHOWN = {"glyphs": ("classes",), "longtail": ("all", "weighted", "frequent", "rare"), "digits": ("all", "rarest")}
STEPS = (250, 500, 750, 1000, 1500, 2000)


def heads_by_seed(results: list[Result]) -> dict[str, dict[str, dict[int, Result]]]:
    """Return the results by task, head and seed; the head is ``plain``, or its options as JSON."""
    found: dict[str, dict[str, dict[int, Result]]] = {}
    for each in results:
        trial = Trial.of(each["given"])
        if "error" in each:
            continue
        name = trial.task + (f", {trial.epochs:g} epochs" if trial.task == "digits" else f", {each['steps']:,} steps")
        name += (
            f", learning rate {trial.learning_rate:g}" * (trial.learning_rate > 0) + ", validation" * trial.validation
        )
        library, usual = trial.variant.library, asdict(Variant())
        own = {key: value for key, value in asdict(trial.variant).items() if value != usual[key]}
        head = json.dumps(own if library is None else library) if own else "plain"
        head = "the study's " * (bool(own) and library is None) + head
        found.setdefault(name, {}).setdefault(head, {}).setdefault(trial.seed, each)
    return found


def values(task: str, result: Result) -> dict[str, float]:
    """Return what is shown of a run."""
    shown = {name: float(result["test"][name]) for name in SHOWN[task]}
    if task == "glyphs":
        reached = result["curve"]["classes"]
        shown |= {f"after {step}": float(reached[step // CHECK_EVERY - 1]) for step in STEPS if step < result["steps"]}
    return shown


def table(task: str, plain: dict[int, Result], rule: dict[int, Result]) -> Iterator[str]:
    """Yield the lines of a table of one head beside plain softmax."""
    seeds = sorted(plain.keys() & rule.keys())
    if not seeds:
        return
    yield "| | plain | rule | difference | by seed |"
    yield "| --- | ---: | ---: | ---: | --- |"
    digits = 0 if task == "glyphs" else 1
    pairs = [(values(task, plain[seed]), values(task, rule[seed])) for seed in seeds]
    for name in pairs[0][0]:
        before, after = ([pair[i][name] for pair in pairs] for i in (0, 1))
        changes = [b - a for a, b in zip(before, after, strict=True)]
        means = " | ".join(f"{statistics.mean(each):.1f}" for each in (before, after))
        each = ", ".join(f"{change:+.{digits}f}" for change in changes)
        yield f"| {name} | {means} | {statistics.mean(changes):+.2f} ± {half_width(changes):.2f} | {each} |"
        yield f"| … every seed | {_joined(before, digits)} | {_joined(after, digits)} | | |"
    if task == "glyphs":
        curves = [[side[seed]["curve"]["classes"] for seed in seeds] for side in (plain, rule)]
        totals = [[sum(at) for at in zip(*curve, strict=True)] for curve in curves]
        ahead = [(b - a) / len(seeds) for a, b in zip(*totals, strict=True)]
        single = [b - a for one, other in zip(*curves, strict=True) for a, b in zip(one, other, strict=True)]
        least = min(ahead)
        steps = [CHECK_EVERY * (i + 1) for i, value in enumerate(ahead) if value == least]
        behind = [CHECK_EVERY * (i + 1) for i, value in enumerate(ahead) if value < 0]
        yield ""
        yield f"Least mean difference at a check: {least:+.2f} at {steps}; of a single seed {min(single):+d}."
        yield f"The mean is behind at {behind}."
    yield ""
    yield f"Seeds {seeds}; writing began with batch {[rule[seed].get('began') for seed in seeds]}."


def _joined(numbers: list[float], digits: int) -> str:
    return ", ".join(f"{number:.{digits}f}" for number in numbers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    files = parser.parse_args().files
    results = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    for name, heads in heads_by_seed(results).items():
        for head, runs in heads.items():
            lines = list(table(name.split(",")[0], heads.get("plain", {}), runs)) if head != "plain" else []
            if lines:
                print("\n".join(["", f"### {name}: {head}", "", *lines]))


if __name__ == "__main__":
    main()
