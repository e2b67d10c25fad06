"""The loss as one autograd node over an engine, and the choice of that engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hebbian_softmax import _torch, _triton
from hebbian_softmax.loss import chunked
from hebbian_softmax.loss.checks import Options, check_values
from hebbian_softmax.loss.dtypes import wide
from hebbian_softmax.loss.problem import Engine, Gradients, Needs, Problem, RowTerms, Scales
from hebbian_softmax.loss.ranks import join_gradients, local_needs
from hebbian_softmax.loss.weighting import Weighting
from hebbian_softmax.rows import RowPart


@dataclass(frozen=True)
class Settings:
    """What is computed, and how."""

    impl: str
    workspace: int | None
    products: torch.dtype
    """The dtype of the matrix products."""
    options: Options
    differentiable: bool
    """Whether gradients are recorded, which cannot be asked inside of the node."""
    zero_if_empty: bool
    """Whether a mean over no target is 0, instead of the NaN of ``F.cross_entropy``."""
    part: RowPart | None = None
    """Which rows of the matrix this rank has, where ranks share them."""


class LinearCrossEntropy(torch.autograd.Function):
    """The cross-entropy of a linear layer, with gradients computed in forward where that is possible.

    For ``mean`` and ``sum`` the gradient that comes from upstream is one number. So forward computes the gradients for
    an upstream gradient of 1 along with the loss, in one pass over the logits, and backward multiplies them. For
    ``none`` backward computes the logits again. It also does so in float16, in which gradients that are not yet
    multiplied by a loss scale vanish.
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
        """Return the loss; ``copy`` stands for ``weight`` in the products where it is given."""
        with torch.autocast(input.device.type, enabled=False):
            wanted = [
                each.dtype if each is not None and needed and settings.differentiable else None
                for each, needed in zip((input, weight, bias), ctx.needs_input_grad, strict=False)
            ]
            ctx.needs, ctx.weighting, ctx.settings = Needs(*wanted), weighting, settings
            classes = weight.shape[0] if settings.part is None else settings.part.total
            prepared = prepare(target, classes, weighting, settings)
            target, share = prepared.target, prepared.share
            reduction = settings.options.reduction
            problem = _problem(input, weight if copy is None else copy, bias, target, weighting, settings)
            engine, workspace = choose_engine(settings.impl, problem, settings.workspace, ctx.needs)
            sum_of_rows = weighting.sum_of_rows(problem)
            ctx.early = reduction != "none" and settings.products != torch.float16
            if ctx.needs.any() and ctx.early:
                scale = prepared.scale
                scales = weighting.scales(problem, share) if scale is None else Scales(scale, scale)
                needs = local_needs(problem, ctx.needs)
                terms, gradients = engine.row_terms_and_gradients(problem, scales, needs, workspace)
                gradients = weighting.corrected(problem, scales, gradients, sum_of_rows)
                gradients = join_gradients(problem, ctx.needs, gradients)
                # Saved tensors are released before they are accumulated, so .grad becomes the buffer and not a copy.
                ctx.save_for_backward(input, weight, gradients.input, gradients.weight, gradients.bias)
            else:
                terms = engine.row_terms(problem, workspace)
                if ctx.needs.any():
                    found = (terms.nll, terms.target_logit, terms.normaliser)
                    ctx.save_for_backward(input, weight, bias, target, copy, share, sum_of_rows, *found)
            losses = weighting.losses(problem, terms, sum_of_rows)
            if prepared.masked is not None:
                losses = losses.masked_fill(prepared.masked, torch.inf)
            if reduction != "none":
                losses = losses.sum() * share
            return losses

    @staticmethod
    def backward(ctx: Any, *upstreams: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of input, weight and bias."""
        (upstream,) = upstreams
        if _torch.is_batched(upstream):
            raise RuntimeError(
                "linear_cross_entropy was given several gradients at once (is_grads_batched), which only its "
                'plain computation takes: pass impl="reference"'
            )
        saved = ctx.saved_tensors  # Checkpointing refuses to give them out a second time.
        input, weight = saved[:2]
        with torch.autocast(input.device.type, enabled=False), torch.no_grad():
            if ctx.early:
                found = scaled(saved[2:], upstream, in_place=not _torch.backward_keeps_graph())
            else:
                computed = _computed(ctx, saved, upstream)
                found = [computed.input, computed.weight, computed.bias]
        if torch.is_grad_enabled():  # create_graph=True
            found = [None if each is None else Once.apply(each, input, weight, upstream) for each in found]
        return (*found, None, None, None, None)


def _computed(ctx: Any, saved: tuple[Any, ...], upstream: Tensor) -> Gradients:
    """Compute the gradients from the terms that forward saved."""
    input, weight, bias, target, copy, share, sum_of_rows, *terms = saved
    settings: Settings = ctx.settings
    weighting: Weighting = ctx.weighting
    problem = _problem(input, weight if copy is None else copy, bias, target, weighting, settings)
    engine, workspace = choose_engine(settings.impl, problem, settings.workspace, ctx.needs)
    scales = weighting.scales(problem, upstream.to(share.dtype) * share)
    gradients = engine.gradients(problem, RowTerms(*terms), scales, local_needs(problem, ctx.needs), workspace)
    return join_gradients(problem, ctx.needs, weighting.corrected(problem, scales, gradients, sum_of_rows))


def _problem(
    input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, weighting: Weighting, settings: Settings
) -> Problem:
    """Return the problem for an engine; ``weight`` may be the copy of the matrix in another dtype."""
    problem = Problem.of(input, weight, bias, target, settings.products, settings.options, settings.part)
    return weighting.completed(problem)


class Once(torch.autograd.Function):
    """The identity, for gradients that cannot be differentiated again."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *because_of: Tensor) -> Tensor:
        return gradient

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        raise RuntimeError(
            "a loss of linear_cross_entropy or linear_log_prob was differentiated twice, which only the plain "
            "computation allows: "
            'pass impl="reference"'
        )


def choose_engine(
    impl: str, problem: Problem, workspace: int | None, needs: Needs, entropy: bool = False
) -> tuple[Engine, int]:
    """Return the engine for ``impl``, which is ``auto``, ``chunked`` or ``triton``, and its workspace in bytes."""
    h = problem.input
    if entropy and impl == "triton":
        raise RuntimeError('impl="triton" has no entropy. Use impl="auto"')
    suits = h.is_cuda and h.dtype == torch.bfloat16 and h.shape[1] % 8 == 0
    if impl == "triton" or (impl == "auto" and suits and not entropy):
        engine = _triton.load("loss.gpu.engine")
        if engine is not None and engine.available(problem):
            return engine, workspace or engine.default_workspace(problem, needs)
        if impl == "triton":
            if problem.spread is not None:
                raise RuntimeError('impl="triton" has no label smoothing behind a softcap. Use impl="auto"')
            raise RuntimeError(
                f'impl="triton" is not available for {h.dtype} on {h.device}: it needs a CUDA device of capability 9.0 '
                "or more with 210 KiB of shared memory, Triton, bfloat16 (in float16 it would overflow), "
                "a number of features divisible by 8, and input and linear_weight that start at a "
                f'multiple of 16 bytes; got {h.shape[1]} features. Use impl="auto"'
            )
    return chunked, workspace or chunked.default_workspace(problem, needs)


@dataclass(frozen=True)
class Prepared:
    """The targets of a loss as its engine needs them, and their shares in the result."""

    target: Tensor
    """(N,): -1 in ignored rows."""
    share: Tensor
    """(): the factor of each row's loss in the result: 1, or 1 over the weight of all targets."""
    scale: Tensor | None = None
    """(N,): ``share`` where the row is not ignored, else 0; None unless the options are plain."""
    masked: Tensor | None = None
    """(N,): where the prior masks the target, so that the loss is infinite. Engines ignore such rows, since without a
    class that is not masked there is no distribution. None without a prior."""


def prepare(target: Tensor, classes: int, weighting: Weighting, settings: Settings) -> Prepared:
    """Check the values of ``target`` (N,) and prepare them; with ``zero_if_empty`` no target at all weighs 1, not 0.

    On a GPU one kernel does all of this, because launching single operations takes longer than computing small losses.
    """
    options, dtype = settings.options, wide(settings.products)
    ignore_index, mean = options.ignore_index, options.reduction == "mean"
    kernels = _kernels(target) if options.plain and dtype == torch.float32 and target.numel() else None
    if kernels is not None:
        return Prepared(*kernels.prepare(target, classes, ignore_index, mean, settings.zero_if_empty))
    check_values(target, classes, ignore_index)
    counted = torch.where(target == ignore_index, -1, target)
    if weighting.token_weight is not None:  # A token without weight takes no part, even if its loss is infinite.
        counted = counted.masked_fill(weighting.token_weight == 0, -1)
    if not mean:
        share = torch.ones((), dtype=dtype, device=target.device)
    else:
        total = weighting.total_weight(counted, dtype)
        share = (torch.where(total == 0, 1, total) if settings.zero_if_empty else total).reciprocal()
    if options.prior is None:
        return Prepared(counted, share)
    masked = (counted >= 0) & (options.prior[counted.clamp(min=0)] == -torch.inf)
    return Prepared(counted.masked_fill(masked, -1), share, masked=masked)


def scaled(gradients: Sequence[Tensor | None], upstream: Tensor, in_place: bool) -> list[Tensor | None]:
    """Return each gradient times the number ``upstream``, in the gradient's dtype, without waiting for the device.

    ``in_place`` allows overwriting a gradient with its result.
    """
    if upstream.device.type == "cpu" and upstream.item() == 1.0:  # Reading the number on a GPU would wait for it.
        return [each if in_place or each is None else each.clone() for each in gradients]
    present = [each for each in gradients if each is not None]
    kernels = _kernels(upstream) if in_place else None
    if kernels is not None and all(each.device == upstream.device and each.is_contiguous() for each in present):
        kernels.multiply(present, upstream)
        return list(gradients)
    factor = upstream.to(wide(upstream.dtype))  # A tensor without dimensions does not change the dtype of a product.
    if in_place:
        return [None if each is None else each.mul_(factor) for each in gradients]
    return [None if each is None else each * factor for each in gradients]


def _kernels(tensor: Tensor) -> Any:
    """Return the kernels for the ends of the loss; None without Triton or on GPUs on which nobody has tried them."""
    return _triton.load("loss.gpu.ends") if tensor.is_cuda and _triton.is_hopper(tensor.device) else None
