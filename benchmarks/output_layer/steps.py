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
from hebbian_softmax import HebbianSoftmax

RULE_RANGES = ("hebbian_softmax::write", "hebbian_softmax::watch")
"""Profiler ranges in which the library launches the rule's kernels."""

MakeOptimizer = Callable[[list[Any], HebbianSoftmax], torch.optim.Optimizer]


def rmsprop(parameters: list[Any], _: HebbianSoftmax) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(parameters, lr=1e-5, foreach=True)


def adam(parameters: list[Any], _: HebbianSoftmax) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-5, fused=True)


def one_pass(name: str) -> MakeOptimizer:
    def make(parameters: list[Any], head: HebbianSoftmax) -> torch.optim.Optimizer:
        from hebbian_softmax import optim  # type: ignore[attr-defined, unused-ignore]

        if not hasattr(optim, name):
            raise ImportError(f"hebbian_softmax.optim has no {name}")
        optimizer: torch.optim.Optimizer = getattr(optim, name)(parameters, head=head, lr=1e-5)
        return optimizer

    return make


def step(make_optimizer: MakeOptimizer, write: bool, master: bool = False) -> Callable[[Problem], tuple[Run, str]]:
    """Loss, backward, optimizer step, and the write.

    No class is ever familiar (the limit is not reached), so every class of the batch is written in every step: the
    most that the rule can cost. With ``master`` the weight is fp32 and the step runs under autocast.
    """

    def build(problem: Problem) -> tuple[Run, str]:
        spec, weight = problem.spec, problem.weight.detach().clone()
        weight = weight.float() if master else weight
        head = HebbianSoftmax(
            spec.features, spec.classes, gamma=0.1, limit=10**9, device=weight.device, dtype=weight.dtype
        )
        head.weight = nn.Parameter(weight)
        optimizer = make_optimizer([head.weight], head)
        if write:
            try:
                head.attach(optimizer)
            except RuntimeError as error:  # an optimizer that was given the head may have attached it itself
                if "attached to an optimizer already" not in str(error):
                    raise
        h = problem.h.detach().clone().requires_grad_()

        def run() -> None:
            with torch.autocast(h.device.type, torch.bfloat16, enabled=master):
                loss = head.loss(h, problem.targets, remember=write)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            h.grad = None

        return run, "every class of the batch is written" if write else "no rule"

    return build


OPTIMIZERS = {
    "RMSprop (foreach)": rmsprop,
    "Adam (fused)": adam,
    "OnePassRMSprop": one_pass("OnePassRMSprop"),
    "OnePassAdam": one_pass("OnePassAdam"),
}
MASTERS = ("RMSprop (foreach)", "OnePassRMSprop")


def contender(name: str, write: bool, master: bool) -> Contender:
    title = f"step, {name}" + (", fp32 master" if master else "") + (" + write" if write else "")
    return Contender(title, "step with write" if write else "step", step(OPTIMIZERS[name], write, master))


STEPS = [
    *(contender(name, write, master=False) for name in OPTIMIZERS for write in (False, True)),
    *(contender(name, write, master=True) for name in MASTERS for write in (False, True)),
]


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
