"""Log-probabilities, log-normalisers and entropies as one autograd node over an engine.

With the gradients g, k and e that come from upstream for log p(y), the normaliser and the entropy H of a row, that of
its logits is

.. math::
    dz_v = p_v \\big((k - g) - e\\,(\\log p_v + H)\\big) + g\\,[v = y]

which is what the engines compute for a = k - g and b = -g. Only the chunked engine has the entropy's part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hebbian_softmax import _torch
from hebbian_softmax.loss.checks import Options
from hebbian_softmax.loss.function import Once, choose_engine
from hebbian_softmax.loss.problem import SMALLEST_SCALE, Needs, Problem, RowTerms, Scales
from hebbian_softmax.loss.ranks import join_gradients, local_needs
from hebbian_softmax.rows import RowPart


@dataclass(frozen=True)
class LogProbSettings:
    """What is computed, and how."""

    impl: str
    workspace: int | None
    products: torch.dtype
    """The dtype of the matrix products."""
    options: Options
    entropy: bool
    differentiable: bool
    """Whether gradients are recorded, which cannot be asked inside of the node."""
    part: RowPart | None = None
    """Which rows of the matrix this rank has, where ranks share them."""


class LinearLogProb(torch.autograd.Function):
    """The log-probabilities of targets, the log-normalisers and, where wanted, the entropies of a linear layer."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, settings: LogProbSettings
    ) -> tuple[Tensor, ...]:
        """Return them for each row; ``target`` is -1 in ignored rows."""
        with torch.autocast(input.device.type, enabled=False):
            wanted = [
                each.dtype if each is not None and needed and settings.differentiable else None
                for each, needed in zip((input, weight, bias), ctx.needs_input_grad, strict=False)
            ]
            ctx.needs, ctx.settings = Needs(*wanted), settings
            problem = _problem(input, weight, bias, target, settings)
            engine, workspace = choose_engine(settings.impl, problem, settings.workspace, ctx.needs, settings.entropy)
            if settings.entropy:
                terms = engine.row_terms(problem, workspace, entropy=True)
            else:
                terms = engine.row_terms(problem, workspace)
            if ctx.needs.any():
                found = terms.nll, terms.target_logit, terms.normaliser, terms.entropy
                ctx.save_for_backward(input, weight, bias, target, *found)
            results = [-terms.nll, terms.normaliser.clone()]
            if terms.entropy is not None:
                results.append(terms.entropy.clone())
            prior = settings.options.prior
            if prior is not None:  # With no class left, log p is NaN.
                masked = (target >= 0) & (prior[target.clamp(min=0)] == -torch.inf)
                results[0] = results[0].masked_fill(masked, -torch.inf)
            return tuple(results)

    @staticmethod
    def backward(ctx: Any, *upstreams: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of input, weight and bias."""
        if any(_torch.is_batched(each) for each in upstreams):
            raise RuntimeError(
                "linear_log_prob was given several gradients at once (is_grads_batched), which only its plain "
                'computation takes: pass impl="reference"'
            )
        input, weight, bias, target, nll, target_logit, normaliser, entropy = ctx.saved_tensors
        settings: LogProbSettings = ctx.settings
        with torch.autocast(input.device.type, enabled=False), torch.no_grad():
            counted = target >= 0
            of_log_prob = torch.where(counted & (nll < torch.inf), upstreams[0], 0)
            if settings.options.prior is not None:  # A row without a class that is not masked has no gradient.
                counted = counted & (normaliser > -torch.inf)
                target = target.masked_fill(~counted, -1)
                target_logit, normaliser = (each.masked_fill(~counted, 0) for each in (target_logit, normaliser))
            problem = _problem(input, weight, bias, target, settings)
            b = -of_log_prob * problem.scale
            a = torch.where(counted, upstreams[1] * problem.scale, 0) + b
            a = a.masked_fill((a == 0) & (b != 0), SMALLEST_SCALE)
            terms = RowTerms(nll, target_logit, normaliser, entropy=entropy)
            engine, workspace = choose_engine(settings.impl, problem, settings.workspace, ctx.needs, settings.entropy)
            of_entropy = torch.where(counted, upstreams[2] * problem.scale, 0) if settings.entropy else None
            scales, needs = Scales(a, b, entropy=of_entropy), local_needs(problem, ctx.needs)
            found = engine.gradients(problem, terms, scales, needs, workspace)
            found = join_gradients(problem, ctx.needs, found)
        gradients = [found.input, found.weight, found.bias]
        if torch.is_grad_enabled():  # create_graph=True
            gradients = [None if each is None else Once.apply(each, input, weight, *upstreams) for each in gradients]
        return (*gradients, None, None)


def _problem(input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, settings: LogProbSettings) -> Problem:
    return Problem.of(input, weight, bias, target, settings.products, settings.options, settings.part)
