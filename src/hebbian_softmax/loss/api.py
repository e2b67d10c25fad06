"""The losses of a linear layer, without its logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hebbian_softmax.loss import checks, reference, selection
from hebbian_softmax.loss.function import LinearCrossEntropy, Settings
from hebbian_softmax.loss.problem import Problem
from hebbian_softmax.loss.weighting import Weighting

_DEFAULTS = "mean", None, 0.0, "auto", None
_IGNORED = -100
"""``ignore_index`` where none is given."""


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    impl: str = "auto",
    workspace: int | None = None,
) -> Tensor:
    r"""``F.cross_entropy(F.linear(input, linear_weight, linear_bias), target, ...)`` without the N × V logits.

    .. math::
        \ell_i = -\log \frac{\exp(h_i \cdot W_{y_i})}{\sum_v \exp(h_i \cdot W_v)}

    Names and meaning are those of torch 2.13's ``F.linear_cross_entropy`` with class indices. Gradients are exact, and
    computed only for what requires them.

    Args:
        input: h, (d,) or (N, d).
        linear_weight: W, (V, d).
        target: class indices, () or (N,).
        linear_bias: (V,).
        weight: class weights, (V,).
        reduction: ``mean``, ``sum`` or ``none``.
        ignore_index: targets of this value take no part; None is -100.
        label_smoothing: ε in [0, 1], as in ``F.cross_entropy``.
        impl: ``reference`` builds all logits; ``chunked`` works through them in tiles; ``triton`` in fused kernels
            (CUDA of capability 9.0, bfloat16, d divisible by 8). ``auto`` takes the fastest that fits, and
            ``reference`` for small problems, under ``torch.func``, in forward-mode differentiation and for
            ``torch.export``. Only ``reference`` can be differentiated twice.
        workspace: bytes that may be held besides inputs, results and a few numbers for each row and class; by default
            on a CPU half of the logits (half precision: a quarter) within 2 … 128 MiB, and on a GPU one and a half
            times the matrix in float32, within 0.45 … 3.6 GB (``chunked``: 1 GiB). Apart from it, operands of another
            layout, or under autocast of another dtype, are copied, and a gradient in half precision that is summed
            over several tiles has a sum in float32.

    >>> h, W = torch.randn(4, 8), torch.randn(1000, 8)
    >>> loss = linear_cross_entropy(h, W, torch.tensor([3, 14, 15, 92]), impl="chunked", workspace=20_000)
    >>> torch.allclose(loss, torch.nn.functional.cross_entropy(h @ W.T, torch.tensor([3, 14, 15, 92])))
    True
    """
    options = reduction, ignore_index, label_smoothing, impl, workspace
    plain = linear_bias is None and weight is None and options == _DEFAULTS
    ignore_index = _IGNORED if ignore_index is None else ignore_index
    if plain and checks.is_usual(input, linear_weight, target):
        if selection.is_tiny(input, linear_weight, workspace):
            return F.cross_entropy(F.linear(input, linear_weight), target)
    else:
        checks.check_options(reduction, ignore_index, label_smoothing)
        checks.check_how(impl, workspace)
        checks.check_operands(input, linear_weight, linear_bias, target)
        checks.check_class_weight(weight, linear_weight)
    return cross_entropy(
        input,
        linear_weight,
        target,
        linear_bias=linear_bias,
        weight=weight,
        reduction=reduction,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        impl=impl,
        workspace=workspace,
    )


def cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    impl: str = "auto",
    workspace: int | None = None,
    zero_if_empty: bool = False,
    copy: Tensor | None = None,
) -> Tensor:
    """The same for checked arguments.

    With ``zero_if_empty`` a mean over no target is 0, with zero gradients. ``copy`` is ``linear_weight`` in the dtype
    of ``input``, where it is at hand: products use it, and the gradient goes to ``linear_weight`` in its own dtype.
    """
    target = target.long()
    if (
        impl == "auto"
        and copy is None
        and (
            selection.is_tiny(input, linear_weight, workspace)
            or selection.needs_reference(input, linear_weight, linear_bias)
        )
    ):
        impl = "reference"
    if impl == "reference":
        return reference.cross_entropy(
            input, linear_weight, target, linear_bias, weight, reduction, ignore_index, label_smoothing, zero_if_empty
        )
    if torch.compiler.is_compiling():
        from hebbian_softmax.loss.uncompiled import apply
    else:
        apply = LinearCrossEntropy.apply
    products = selection.product_dtype(input)
    wide = torch.promote_types(products, torch.float32)
    settings = Settings(
        impl=impl,
        workspace=workspace,
        products=products,
        result=selection.result_dtype(input) if copy is None else linear_weight.dtype,
        reduction=reduction,
        ignore_index=ignore_index,
        differentiable=torch.is_grad_enabled(),
        zero_if_empty=zero_if_empty,
    )
    weighting = Weighting(None if weight is None else weight.to(wide), float(label_smoothing))
    loss: Tensor = apply(
        input.reshape(-1, input.shape[-1]), linear_weight, linear_bias, target.reshape(-1), copy, weighting, settings
    )
    return loss.reshape(target.shape) if reduction == "none" else loss


@torch.no_grad()
def linear_log_prob(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    ignore_index: int | None = None,
    impl: str = "auto",
    workspace: int | None = None,
) -> tuple[Tensor, Tensor]:
    r"""log p(target) and log Σ_v exp(z_v) of each row of ``input``, without the N × V logits and without gradients.

    Both have the shape of ``target`` and at least float32; both are 0 where the target is ``ignore_index``. The
    arguments are those of :func:`linear_cross_entropy`.

    >>> h, W = torch.randn(4, 8), torch.randn(1000, 8)
    >>> log_prob, log_normaliser = linear_log_prob(h, W, torch.tensor([3, 14, 15, 92]))
    >>> torch.allclose(log_normaliser, (h @ W.T).logsumexp(1))
    True
    """
    ignore_index = _IGNORED if ignore_index is None else ignore_index
    checks.check_options("none", ignore_index, 0.0)
    checks.check_how(impl, workspace)
    checks.check_operands(input, linear_weight, linear_bias, target)
    target = target.long()  # before it is compared: as uint8, 156 equals -100
    checks.check_values(target, linear_weight.shape[0], ignore_index)
    problem = Problem.of(
        input.reshape(-1, input.shape[-1]),
        linear_weight,
        linear_bias,
        torch.where(target == ignore_index, -1, target).reshape(-1),
        selection.product_dtype(input),
    )
    if impl == "reference" or (impl == "auto" and selection.is_tiny(input, linear_weight, workspace)):
        found = reference.log_prob(problem.input, problem.weight, problem.target, problem.bias)
    else:
        engine = selection.engine(impl, problem)
        terms = engine.row_terms(problem, workspace or selection.default_workspace(engine, problem))
        found = -terms.nll, terms.normaliser
    return found[0].reshape(target.shape), found[1].reshape(target.shape)
