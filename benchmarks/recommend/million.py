"""Time and memory of a whole training step with a million items: the exact softmax in several ways, and a sampled one.

    python -m benchmarks.recommend.million FILE.jsonl [--items 1000000] [--budget 90]

Each contender makes the same step of the same Transformer: forward, backward and optimizer, in bfloat16 (autocast) with
weights in float32, and with dropout off, so that the exact losses can be compared. Results are appended to FILE.jsonl,
one contender a line; what has a line is not measured again.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from examples.recommender import Recommender
from torch import Tensor

from benchmarks.output_layer.measuring import between_ms, free_memory, mark, reason_of, synchronize
from benchmarks.recommend.records import append, origin, read_records
from hebbian_softmax import OnePassAdam

LENGTH = 64
"""The items in each history."""

RESERVE = 40.0
"""No contender is begun with fewer seconds left than this: compiling takes long."""

Step = Callable[[], Tensor]
"""Makes a step and returns its loss."""


class Problem:
    """A model and a batch: the same for every contender."""

    def __init__(self, items: int, users: int, features: int, device: str) -> None:
        torch.manual_seed(0)
        rule: dict[str, Any] = {"start": 0}
        self.model = Recommender(items, features=features, length=LENGTH, dropout=0.0, **rule).to(device).train()
        rare = torch.rand(users, LENGTH + 1, dtype=torch.float64)
        taken = (items**rare).long().clamp(1, items) - 1  # the n-th item is about n times as rare as the first
        self.inputs, self.targets = (each.contiguous().to(device) for each in (taken[:, :-1], taken[:, 1:]))
        self.device = device

    def features(self) -> Tensor:
        """Return the features (positions, features) of the batch."""
        found: Tensor = self.model(self.inputs).flatten(0, 1)
        return found

    def step(self, loss_of: Callable[[Tensor, Tensor], Tensor], *optimizers: torch.optim.Optimizer) -> Step:
        """Return a whole step with a loss of features and targets."""

        def step() -> Tensor:
            with torch.autocast(self.device, torch.bfloat16):
                loss = loss_of(self.features(), self.targets.flatten())
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            return loss.detach()

        return step

    def adam(self, *without: Tensor) -> torch.optim.Optimizer:
        """Return torch's fastest Adam for all parameters but those given."""
        some = [each for each in self.model.parameters() if all(each is not other for other in without)]
        return torch.optim.Adam(some, fused=True)


def head(problem: Problem, memorizing: bool) -> Step:
    """Return the step of this library, with or without the rule's write."""
    problem.model.head.memorizing = memorizing
    optimizer = OnePassAdam(problem.model.parameters(), head=problem.model.head)
    return problem.step(problem.model.head.loss, optimizer)


def cross_entropy(h: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(h, weight), targets)


def whole(problem: Problem, compiled: bool) -> Step:
    """Return a step that computes all logits."""
    weight = problem.model.head.weight
    loss: Callable[..., Tensor] = torch.compile(cross_entropy) if compiled else cross_entropy
    return problem.step(lambda h, targets: loss(h, weight, targets), problem.adam())


def sampled_loss(h: Tensor, weight: Tensor, targets: Tensor, negatives: Tensor, sparse: bool) -> Tensor:
    """Return the loss against items drawn uniformly, each of which stands for as many as were not drawn.

    Where an item drawn is the target itself it does not count. The sum of exponentials is right on average.
    """
    own = (h * F.embedding(targets, weight, sparse=sparse)).sum(-1, keepdim=True).float()
    others = F.linear(h, F.embedding(negatives, weight, sparse=sparse).to(h.dtype)).float()
    others = others + math.log((len(weight) - 1) / len(negatives))
    others = others.masked_fill(negatives == targets.unsqueeze(1), -torch.inf)
    return F.cross_entropy(torch.cat([own, others], 1), torch.zeros_like(targets))


def sampled(problem: Problem, sparse: bool, count: int = 8192) -> Step:
    """Return a step with a sampled softmax; a sparse one steps only the rows that it has touched."""
    weight = problem.model.head.weight
    problem.model.items.sparse = sparse

    def loss(h: Tensor, targets: Tensor) -> Tensor:
        negatives = torch.randint(len(weight), (count,), device=h.device)
        return sampled_loss(h, weight, targets, negatives, sparse)

    if sparse:
        return problem.step(loss, problem.adam(weight), torch.optim.SparseAdam([weight]))
    return problem.step(loss, problem.adam())


CONTENDERS: dict[str, Callable[[Problem], Step]] = {
    "head, plain": lambda problem: head(problem, False),
    "head with the rule": lambda problem: head(problem, True),
    "eager": lambda problem: whole(problem, False),
    "sampled, dense Adam": lambda problem: sampled(problem, False),
    "sampled, sparse Adam": lambda problem: sampled(problem, True),
    "torch.compile": lambda problem: whole(problem, True),
}


def measure(build: Callable[[Problem], Step], problem: Problem, steps: int, deadline: float) -> dict[str, Any]:
    """Return the time and the memory of a contender's step, and its first loss.

    ``kept_bytes`` are held between steps: weights, the optimizer's state, copies. ``peak_bytes`` has the rest, too.
    """
    device, begun = problem.device, time.perf_counter()
    step = build(problem)
    first_loss = float(step())
    for _ in range(2):  # the second step may compile, too
        step()
    synchronize(device)
    found: dict[str, Any] = {"first_loss": first_loss, "preparation_seconds": time.perf_counter() - begun}
    if device == "cuda":
        found["kept_bytes"] = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    marks = []
    for _ in range(steps):
        start = mark(device)
        step()
        marks.append((start, mark(device)))
        synchronize(device)
        if time.time() > deadline:
            break
    if device == "cuda":
        found["peak_bytes"] = torch.cuda.max_memory_allocated()
    found["samples"] = [between_ms(*pair) for pair in marks]
    return found | {"ms": statistics.median(found["samples"])}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="file that results are appended to")
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--users", type=int, default=64, help=f"histories of {LENGTH} items in a batch")
    parser.add_argument("--features", type=int, default=128)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--contenders", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--budget", type=float, default=600.0, help=f"seconds; in the last {RESERVE:g} none is begun")
    options = parser.parse_args(arguments)
    device, deadline = "cuda" if torch.cuda.is_available() else "cpu", time.time() + options.budget
    shape = {"items": options.items, "users": options.users, "features": options.features, "device": device}
    known = [record["given"] for record in read_records(options.file)]
    append(options.file, origin("benchmarks.recommend.million"))
    for name in options.contenders:
        given = {"contender": name, "steps": options.steps} | shape
        if given in known or time.time() + RESERVE > deadline:
            continue
        try:
            result = measure(CONTENDERS[name], Problem(**shape), options.steps, deadline)
        except Exception as error:
            result = {"error": reason_of(error)}
        free_memory(device)  # after the except block, because a traceback keeps tensors alive
        append(options.file, {"given": given} | result)
        print(f"{name:22s} {json.dumps({key: value for key, value in result.items() if key != 'samples'})}", flush=True)


if __name__ == "__main__":
    main()
