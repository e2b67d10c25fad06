"""The losses to compare: ours, plain torch, and a short loop over chunks. Other packages are in peers.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.output_layer.problems import Problem, Spec
from hebbian_softmax.loss import linear_cross_entropy
from hebbian_softmax.loss.api import cross_entropy
from hebbian_softmax.loss.checks import Options

Gradients = tuple[Tensor, Tensor, Tensor]
"""The mean loss, the gradient of h and the gradient of W."""
Run = Callable[[], Gradients | None]
Loss = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""A function (h, W, targets, bias) -> mean loss."""


class UnavailableError(Exception):
    """Raised by a contender that does not run on this device or at this size: it is skipped and has not failed."""


@dataclass(frozen=True)
class Contender:
    """One way to compute the loss; ``build(problem)`` returns a run and a note, or raises the reason why it cannot."""

    name: str
    kind: str
    """ours, variant (of ours, without a bar), baseline, peer (with its defaults), tuned, padded, approximate, product,
    graph, step, step with write."""
    build: Callable[[Problem], tuple[Run, str]]
    compiles: bool = False
    """Whether it takes a compilation by torch.compile, which can be left out."""
    operations: Callable[[Spec], int] = lambda spec: spec.flops
    """The operations of one run, by which its rate is computed."""
    fp32_gradient: bool = False
    """Whether dW is in fp32 though W is in bf16."""


def differentiate(loss: Loss, problem: Problem) -> Run:
    """Return a run of forward and backward."""

    def run() -> Gradients:
        value = loss(problem.h, problem.weight, problem.targets, problem.bias)
        h_gradient, weight_gradient = torch.autograd.grad(value, (problem.h, problem.weight))
        return value.detach(), h_gradient, weight_gradient

    return run


def plain(loss: Loss, note: str = "") -> Callable[[Problem], tuple[Run, str]]:
    """Return the ``build`` of a loss that needs no preparation."""
    return lambda problem: (differentiate(loss, problem), note)


def ours(problem: Problem, workspace: int | None = None) -> tuple[Run, str]:
    """Build our loss."""

    def loss(h: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None) -> Tensor:
        return linear_cross_entropy(h, weight, targets, linear_bias=bias, workspace=workspace)

    return differentiate(loss, problem), "" if workspace is None else f"workspace of {workspace / 1e9:g} GB"


def ours_master(problem: Problem) -> tuple[Run, str]:
    """Build our loss for mixed precision: the gradient goes to an fp32 W, and products read its bf16 copy."""
    copy = problem.weight.detach()
    if copy.dtype != torch.bfloat16:
        raise UnavailableError("the weight is in float32 already")
    master = copy.float().requires_grad_()

    def run() -> Gradients:
        value = cross_entropy(problem.h, master, problem.targets, None, Options(), copy=copy)  # As in head.loss.
        h_gradient, weight_gradient = torch.autograd.grad(value, (problem.h, master))
        return value.detach(), h_gradient, weight_gradient

    return run, "gradient of W in fp32"


def ours_graph(problem: Problem) -> tuple[Run, str]:
    """Build our loss as a CUDA graph, which has no cost of launches."""
    if problem.h.device.type != "cuda":
        raise UnavailableError("CUDA graphs need a CUDA device")
    run, _ = ours(problem)
    return captured(run), "replay of one capture"


def captured(run: Run) -> Run:
    """Return the replay of a CUDA graph of ``run``."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run()

    def replay() -> Gradients | None:
        graph.replay()
        return outputs

    return replay


def eager(h: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None) -> Tensor:
    return F.cross_entropy(F.linear(h, weight, bias), targets)


def eager_fp32(h: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None) -> Tensor:
    return F.cross_entropy(F.linear(h, weight, bias).float(), targets)


def compiled(problem: Problem) -> tuple[Run, str]:
    torch._dynamo.config.recompile_limit = 64  # Each problem compiles the function again.
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # It would run without compilation otherwise.
    return differentiate(torch.compile(eager_fp32, dynamic=False), problem), "logits upcast in the loss"


class ChunkedLoop(torch.autograd.Function):
    """A simple loop over chunks: the gradients of some rows at a time, in the forward pass."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, rows: int) -> Tensor:
        loss = torch.zeros((), device=h.device)
        h_gradient = torch.empty_like(h)
        weight_gradient = torch.zeros_like(weight, dtype=torch.float32)
        for start in range(0, len(h), rows):
            x, y = h[start : start + rows], targets[start : start + rows, None]
            z = F.linear(x, weight, bias).float()
            lse = z.logsumexp(1, keepdim=True)
            loss += (lse - z.gather(1, y)).sum()
            p = z.sub_(lse).exp_()
            p.scatter_add_(1, y, torch.full_like(y, -1, dtype=p.dtype))  # In fp32, because p - 1 cancels near p = 1.
            dz = p.div_(len(h)).to(h.dtype)
            h_gradient[start : start + rows] = dz @ weight
            weight_gradient += dz.T @ x
        ctx.save_for_backward(h_gradient, weight_gradient.to(weight.dtype))
        return loss / len(h)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override, unused-ignore]
        h_gradient, weight_gradient = ctx.saved_tensors
        return (
            h_gradient * grad.to(h_gradient.dtype),
            weight_gradient * grad.to(weight_gradient.dtype),
            None,
            None,
            None,
        )


def chunked_loop(h: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None) -> Tensor:
    loss: Tensor = ChunkedLoop.apply(h, weight, targets, bias, 1024)
    return loss


OURS = [Contender("ours", "ours", ours), Contender("ours, fp32 master", "ours", ours_master, fp32_gradient=True)]
SMALLER_WORKSPACE = Contender("ours, smaller workspace", "variant", partial(ours, workspace=450_000_000))
"""All logits of B take 537 MB in bf16, so this one cuts them into chunks."""
GRAPH = Contender("ours, CUDA graph", "graph", ours_graph)
TORCH = [
    Contender("eager", "peer", plain(eager, "logits of W's dtype")),
    Contender("eager, fp32 logits", "peer", plain(eager_fp32)),
    Contender("chunked torch loop", "baseline", plain(chunked_loop, "1024 rows, dW in fp32")),
    Contender("torch.compile", "peer", compiled, compiles=True),
]
