"""Whole steps of the layer: ours, an optimizer, and the Hebbian write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.output_layer.contenders import Contender, Run, UnavailableError, captured
from benchmarks.output_layer.problems import Problem
from hebbian_softmax import HebbianSoftmax, OnePassAdam, OnePassRMSprop

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
"""T of the paper's language models, and the number of earlier batches that the counts stand for."""


def step(
    make_optimizer: MakeOptimizer, write: bool, master: bool, every_class: bool = False
) -> Callable[[Problem], tuple[Run, str]]:
    """Return the build of a whole step: loss, backward, optimizer step, and the write.

    Counts are those of a model in training: frequent classes are past the limit and are only counted. With
    ``every_class`` no class is past it, so every class of the batch is written in every step: the most that the rule
    can cost. With ``master`` the weight is fp32 and the products are in bf16, under autocast.
    """

    def build(problem: Problem) -> tuple[Run, str]:
        spec, weight = problem.spec, problem.weight.detach().clone()
        weight = weight.float() if master else weight
        limit = 10**9 if every_class else LIMIT
        head = HebbianSoftmax(
            spec.features, spec.classes, gamma=0.1, limit=limit, start=0, device=weight.device, dtype=weight.dtype
        )
        head.weight = nn.Parameter(weight)
        ranks = torch.arange(
            1, spec.classes + 1, device=weight.device, dtype=torch.float64
        )  # Zipf's frequencies, as for the targets.
        head.counts.copy_((BATCHES * spec.n / ranks / (1 / ranks).sum()).long())
        optimizer = make_optimizer([head.weight], head)
        if write:
            head.attach(optimizer)  # The one-pass optimizers, which are given the head, have attached it.
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
"""The function that makes each, and whether the weight is fp32 with products in bf16."""


def contenders_of(name: str) -> list[Contender]:
    """Return the steps of an optimizer without and with the write."""
    make, master = OPTIMIZERS[name]
    found = [
        Contender(f"step, {name}", "step", step(make, False, master)),
        Contender(f"step, {name} + write", "step with write", step(make, True, master)),
    ]
    if "RMSprop" in name and not name.startswith("RMSprop (foreach),"):
        most = step(make, True, master, every_class=True)
        found.append(Contender(f"step, {name} + write of every class", "step with every write", most))
    return found


def graphed(name: str, write: bool) -> Contender:
    """Return the whole step as a CUDA graph, which has no cost of launches."""
    make, master = OPTIMIZERS[name]

    def build(problem: Problem) -> tuple[Run, str]:
        if problem.h.device.type != "cuda":
            raise UnavailableError("CUDA graphs need a CUDA device")
        run, note = step(make, write, master)(problem)
        return captured(run), f"{note}; replay of one capture"

    return Contender(f"step, {name}{' + write' if write else ''}, CUDA graph", "step graph", build)


STEPS = [contender for name in OPTIMIZERS for contender in contenders_of(name)]
STEP_GRAPHS = [graphed("OnePassRMSprop, fp32 master", write) for write in (False, True)]
CPU_STEPS = [*contenders_of("RMSprop (foreach)")[:2], *contenders_of("OnePassRMSprop, fp32 master")[:2]]
