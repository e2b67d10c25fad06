"""Whole steps of the layer: ours, an optimizer, and the Hebbian write; and what the write's own kernels cost."""

from __future__ import annotations

import bisect
import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.output_layer.contenders import Contender, Run
from benchmarks.output_layer.problems import Problem
from hebbian_softmax import HebbianSoftmax, OnePassAdam, OnePassRMSprop

RULE_RANGES = ("hebbian_softmax::write", "hebbian_softmax::watch")
"""Profiler ranges in which the library launches the rule's kernels."""

MakeOptimizer = Callable[[list[Any], HebbianSoftmax], torch.optim.Optimizer]


def rmsprop(parameters: list[Any], _: HebbianSoftmax) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(parameters, lr=1e-5, foreach=True)


def adam(parameters: list[Any], _: HebbianSoftmax) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-5, fused=True)


def one_pass_rmsprop(parameters: list[Any], head: HebbianSoftmax) -> torch.optim.Optimizer:
    return OnePassRMSprop(parameters, head=head, lr=1e-5)


def one_pass_adam(parameters: list[Any], head: HebbianSoftmax) -> torch.optim.Optimizer:
    return OnePassAdam(parameters, head=head, lr=1e-5)


LIMIT, BATCHES = 500, 1_000
"""T of the paper's language models, and how many batches like this one the counts say have gone before."""


def step(
    make_optimizer: MakeOptimizer, write: bool, master: bool, every_class: bool = False
) -> Callable[[Problem], tuple[Run, str]]:
    """Loss, backward, optimizer step, and the write.

    Counts are those of a model in training: frequent classes are past the limit and are only counted. With
    ``every_class`` no class is, and every class of the batch is written in every step: the most that the rule can
    cost. With ``master`` the weight is fp32 and the products are in bf16, under autocast.
    """

    def build(problem: Problem) -> tuple[Run, str]:
        spec, weight = problem.spec, problem.weight.detach().clone()
        weight = weight.float() if master else weight
        limit = 10**9 if every_class else LIMIT
        head = HebbianSoftmax(
            spec.features, spec.classes, gamma=0.1, limit=limit, device=weight.device, dtype=weight.dtype
        )
        head.weight = nn.Parameter(weight)
        ranks = torch.arange(1, spec.classes + 1, device=weight.device, dtype=torch.float64)  # Zipf, as the targets
        head.counts.copy_((BATCHES * spec.n / ranks / (1 / ranks).sum()).long())
        optimizer = make_optimizer([head.weight], head)
        if write:
            head.attach(optimizer)  # ours, given the head, have done so
        h = problem.h.detach().clone().requires_grad_()

        def run() -> None:
            with torch.autocast(h.device.type, torch.bfloat16, enabled=master):
                loss = head.loss(h, problem.targets, remember=write)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            h.grad = None

        note = "every class of the batch is written" if every_class else f"T = {LIMIT}, after {BATCHES:,} batches"
        return run, note if write else "no rule"

    return build


OPTIMIZERS = {
    "OnePassRMSprop, fp32 master": (one_pass_rmsprop, True),
    "OnePassAdam, fp32 master": (one_pass_adam, True),
    "RMSprop (foreach)": (rmsprop, False),
    "Adam (fused)": (adam, False),
    "RMSprop (foreach), fp32 master": (rmsprop, True),
}
"""What makes each, and whether the weight is fp32 beside products in bf16."""


def contenders_of(name: str) -> list[Contender]:
    make, master = OPTIMIZERS[name]
    found = [
        Contender(f"step, {name}", "step", step(make, False, master)),
        Contender(f"step, {name} + write", "step with write", step(make, True, master)),
    ]
    if "RMSprop" in name and not name.startswith("RMSprop (foreach),"):
        most = step(make, True, master, every_class=True)
        found.append(Contender(f"step, {name} + write of every class", "step with every write", most))
    return found


STEPS = [contender for name in OPTIMIZERS for contender in contenders_of(name)]


def rule_kernels_ms(run: Run, names: Iterable[str] = RULE_RANGES, steps: int = 3) -> float:
    """Device milliseconds per step of the kernels launched within profiler ranges of these names."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(steps):
            run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return kernel_us_within(events, names) / steps / 1e3


def kernel_us_within(events: list[dict[str, Any]], names: Iterable[str]) -> float:
    """Sum of the device time of kernels, copies and fills whose launch lies within a range of one of ``names``.

    ``events`` are those of a Chrome trace, in microseconds. A kernel shares a correlation number with its launch and an
    external id with the operation that launched it; either lies in a range if it began on the same thread while the
    range was open.
    """
    wanted = set(names)
    ranges: dict[Any, list[tuple[float, float]]] = {}
    for event in events:
        if event.get("cat") in ("user_annotation", "cpu_op") and event.get("name") in wanted:
            ranges.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    kernels = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if not ranges:
        raise LookupError(f"no profiler range was named {' or '.join(sorted(wanted))}")
    if not kernels:
        raise LookupError("the profiler saw no kernels on the device")
    merged = {thread: _merge(spans) for thread, spans in ranges.items()}

    def inside(event: dict[str, Any]) -> bool:
        spans = merged.get(event["tid"], [])
        i = bisect.bisect_right(spans, (event["ts"], float("inf"))) - 1
        return i >= 0 and event["ts"] <= spans[i][1]

    def ids(categories: tuple[str, ...], key: str) -> set[Any]:
        found = (event for event in events if event.get("cat") in categories and key in event.get("args", {}))
        return {event["args"][key] for event in found if inside(event)}

    launches = ids(("cuda_runtime", "cuda_driver"), "correlation")
    operations = ids(("cpu_op", "user_annotation"), "External id")
    total = 0.0
    for kernel in kernels:
        args = kernel.get("args", {})
        if args.get("correlation") in launches or args.get("External id") in operations:
            total += kernel["dur"]
    return total


def _merge(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Sorted, with those that overlap made one: a range within a range counts once."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged
