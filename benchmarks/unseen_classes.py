"""Should classes never seen take part in the softmax? Glyphs with plain softmax and three settings of the rule.

Each arm is trained with and without the mask of `seen_only`. Checks, which decide when classes are added, are over all
classes, except in the arms that say otherwise. One thread trains one arm after the other. Every run is appended to the
file as it ends, and runs that are in it already are not made again.

    OMP_NUM_THREADS=1 python -m benchmarks.unseen_classes results/study/images/unseen.jsonl [--seeds 0 1 2]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from hebbian_softmax.lab.base import environment
from hebbian_softmax.lab.images.curriculum import CHECK_EVERY, CurriculumSettings, History
from hebbian_softmax.lab.images.data import TEST_DRAWINGS, ImageSet
from hebbian_softmax.lab.images.fleet import Runner
from hebbian_softmax.lab.images.glyphs import make_glyphs
from hebbian_softmax.lab.images.learner import Learner, Method

DEMO = CurriculumSettings()
_RULE = Method(True, DEMO.learning_rate, gamma=0.1, limit=50, write="centred", rate="paper", start=0, fade=False)
WITHOUT = {
    "plain": Method(False, DEMO.learning_rate),
    "centred": _RULE,
    "centred, auto, fade": replace(_RULE, start="auto", fade=True),
    "across 0.2 100, auto, fade": replace(_RULE, gamma=0.2, limit=100, write="across", start="auto", fade=True),
}
MASKED = {f"{name}, mask": replace(method, seen_only=True) for name, method in WITHOUT.items()}
IN_CHECKS = {f"{name} in checks, too": replace(method, checks_seen_only=True) for name, method in MASKED.items()}
ARMS = WITHOUT | MASKED | IN_CHECKS


def trained(data: ImageSet, method: Method, seed: int, steps: int) -> dict[str, Any]:
    """Train one learner and return its curve, and its accuracy at the end with and without classes never seen."""
    learner = Learner(data, method, seed, filters=DEMO.filters)
    runner, history = Runner(learner), History(learner.start)
    for _ in range(steps // CHECK_EVERY):
        runner.steps(CHECK_EVERY)
        runner.check()
        history.add(*runner.read())
    active = int(learner.active)
    final: dict[str, float] = {}
    for name, seen_only in (("all", False), ("seen", True)):
        learner.head.seen_only = seen_only
        if learner.counting or not seen_only:
            final[name] = int(learner.right_answers(active)) / (TEST_DRAWINGS * active)
    begun = None if learner.head.settling is None else int(learner.head.settling.began)
    return {"reached": history.reached, "final_accuracy": final, "began": begun, "curve": history.state_dict()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", default=[*WITHOUT, *MASKED], choices=list(ARMS), metavar="ARM")
    parser.add_argument("--steps", type=int, default=DEMO.steps)
    parser.add_argument("--budget", type=float, default=3e7, help="begin no further run after this many seconds")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = options.file.read_text(encoding="utf-8").splitlines() if options.file.exists() else []
    known = {(run["arm"], run["seed"], run["steps"]) for run in map(json.loads, lines)}
    data, begun = make_glyphs(), time.monotonic()
    where = {"versions": environment.versions(), "hardware": environment.hardware(), "commit": environment.commit()}
    for seed in options.seeds:
        for arm in options.arms:
            if (arm, seed, options.steps) in known:
                continue
            if time.monotonic() - begun > options.budget:
                return
            start = time.monotonic()
            run = {"arm": arm, "seed": seed, "steps": options.steps, "method": asdict(ARMS[arm])}
            run |= trained(data, ARMS[arm], seed, options.steps)
            run |= {"seconds": round(time.monotonic() - start, 1), "command": " ".join(sys.argv[1:]), **where}
            with options.file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(run) + "\n")
            print(f"{arm:45} seed {seed}: {run['reached']} classes ({run['seconds']:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
