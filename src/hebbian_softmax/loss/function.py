"""The loss as one autograd node over an engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hebbian_softmax.loss import selection
from hebbian_softmax.loss.preparing import prepare
from hebbian_softmax.loss.problem import Gradients, Needs, Problem, RowTerms
from hebbian_softmax.loss.scaling import scaled
from hebbian_softmax.loss.weighting import Scales, Weighting


@dataclass(frozen=True)
class Settings:
    impl: str
    workspace: int | None
    products: torch.dtype
    """What the products run in."""
    result: torch.dtype
    """The dtype of the loss."""
    reduction: str
    ignore_index: int
    differentiable: bool
    """Whether gradients are recorded; inside the node torch no longer says."""
    zero_if_empty: bool
    """Whether a mean over no target is 0, and not the NaN of ``F.cross_entropy``."""


class LinearCrossEntropy(torch.autograd.Function):
    """For ``mean`` and ``sum`` the gradient that comes from upstream is one number, so forward computes the gradients
    for upstream 1 along with the loss, in one pass over the logits, and backward multiplies. For ``none`` backward
    computes the logits again; so it does for float16, in which gradients not yet multiplied by a loss scale vanish.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        copy: Tensor | None,
        weighting: Weighting,
        settings: Settings,
    ) -> Tensor:
        with torch.autocast(input.device.type, enabled=False):
            wanted = [
                each.dtype if each is not None and needed and settings.differentiable else None
                for each, needed in zip((input, weight, bias), ctx.needs_input_grad, strict=False)
            ]
            ctx.needs, ctx.weighting, ctx.settings = Needs(*wanted), weighting, settings
            prepared = prepare(
                target,
                weight.shape[0],
                settings.ignore_index,
                weighting,
                mean=settings.reduction == "mean",
                zero_if_empty=settings.zero_if_empty,
                dtype=torch.promote_types(settings.products, torch.float32),
            )
            target, share = prepared.target, prepared.share
            problem = Problem.of(input, weight if copy is None else copy, bias, target, settings.products)
            engine = selection.engine(settings.impl, problem)
            workspace = settings.workspace or selection.default_workspace(engine, problem)
            ctx.early = settings.reduction != "none" and settings.products != torch.float16
            if ctx.needs.any() and ctx.early:
                scale = prepared.scale
                scales = weighting.scales(problem, share) if scale is None else Scales(scale, scale, None)
                terms, gradients = engine.row_terms_and_gradients(
                    problem, scales.normaliser, scales.target, ctx.needs, workspace
                )
                gradients = weighting.corrected(problem, scales, gradients)
                # Saved here they are let go of before they are accumulated, so .grad becomes the buffer, not a copy.
                ctx.save_for_backward(input, weight, gradients.input, gradients.weight, gradients.bias)
            else:
                terms = engine.row_terms(problem, workspace)
                if ctx.needs.any():
                    found = (terms.nll, terms.target_logit, terms.normaliser)
                    ctx.save_for_backward(input, weight, bias, target, copy, share, *found)
            losses = weighting.losses(problem, terms)
            if settings.reduction != "none":
                losses = losses.sum() * share
            return losses.to(settings.result)

    @staticmethod
    def backward(ctx: Any, *upstreams: Tensor) -> tuple[Tensor | None, ...]:
        (upstream,) = upstreams
        if _is_batched(upstream):
            raise RuntimeError(
                "linear_cross_entropy was given several gradients at once (is_grads_batched), which only its "
                'plain computation takes: pass impl="reference"'
            )
        saved = ctx.saved_tensors  # once: checkpointing refuses a second look
        input, weight = saved[:2]
        with torch.autocast(input.device.type, enabled=False), torch.no_grad():
            if ctx.early:
                in_place = not _graph_is_kept()
                found = scaled(saved[2:], upstream, in_place)
            else:
                computed = _computed(ctx, saved, upstream)
                found = [computed.input, computed.weight, computed.bias]
        if torch.is_grad_enabled():  # create_graph=True
            found = [None if each is None else _Once.apply(each, input, weight, upstream) for each in found]
        return (*found, None, None, None, None)


def _computed(ctx: Any, saved: tuple[Any, ...], upstream: Tensor) -> Gradients:
    input, weight, bias, target, copy, share, *terms = saved
    settings: Settings = ctx.settings
    problem = Problem.of(input, weight if copy is None else copy, bias, target, settings.products)
    engine = selection.engine(settings.impl, problem)
    workspace = settings.workspace or selection.default_workspace(engine, problem)
    scales = ctx.weighting.scales(problem, upstream.to(share.dtype) * share)
    gradients = engine.gradients(problem, RowTerms(*terms), scales.normaliser, scales.target, ctx.needs, workspace)
    corrected: Gradients = ctx.weighting.corrected(problem, scales, gradients)
    return corrected


def _is_batched(upstream: Tensor) -> bool:
    """Whether it stands for several gradients, as autograd's is_grads_batched makes them."""
    batched = torch._C._dispatch_key_parse("Batched")
    return bool(torch._C._dispatch_keys(upstream).has(batched))


def _graph_is_kept() -> bool:
    """Whether this graph may be gone through again, which then needs what was saved as it is."""
    ask = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if ask is None else bool(ask())


class _Once(torch.autograd.Function):
    """The identity, for gradients that cannot be differentiated again."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *because_of: Tensor) -> Tensor:
        return gradient

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        raise RuntimeError(
            "linear_cross_entropy was differentiated twice, which only its plain computation allows: "
            'pass impl="reference"'
        )
