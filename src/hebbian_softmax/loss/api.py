"""The losses of a linear layer without its logits, and which implementation computes them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hebbian_softmax import _torch, _triton
from hebbian_softmax.checks import check_flag
from hebbian_softmax.loss import checks, reference
from hebbian_softmax.loss.checks import Options
from hebbian_softmax.loss.dtypes import fast_dtype, product_dtype, wide
from hebbian_softmax.loss.function import LinearCrossEntropy, Settings
from hebbian_softmax.loss.graphs import outside_of_graphs
from hebbian_softmax.loss.log_prob import LinearLogProb, LogProbSettings
from hebbian_softmax.loss.weighting import Weighting
from hebbian_softmax.rows import RowPart

_DEFAULTS = "mean", None, 0.0, 1.0, 0.0, "auto", None
_IGNORED = -100
"""The ``ignore_index`` of a caller who gives none."""

_TINY = 2**16
"""Up to this number of logits, computing all of them at once takes less time than the bookkeeping of tiles."""
_TINY_IN_FULL_PRECISION = 2**20
"""Products in full precision need no conversion."""
_TINY_ON_GPU, _TINY_ON_GPU_IN_FULL_PRECISION = 2**26, 2**24
"""On a GPU launching the kernels of tiles takes longer. In full precision logits take more of the time."""
_FEW_ROWS = 16
"""With at most so many rows, the matrix and its gradient take most of the time, and what happens to logits little."""

_WHOLE_FROM = 2**23
"""Up to this number of logits, torch's own operations on them cost less than an autograd node in Python."""
_WHOLE_TO, _QUICK, _TRAFFIC = 2**26, 2**36, 300
"""In bfloat16 the fused kernels save time, but take 0.9 ms and more to launch. So they are left to problems of more
logits than the first number, and more than the second one over d + 300: moving a logit through memory takes about as
long as 300 of its products. With classes that are no multiple of 8, products with all logits are slow, and half as many
are enough."""
_WHOLE_TO_IN_FLOAT16 = 2**28
"""The same in float16, for which there are no fused kernels: half a gigabyte, about the least default workspace."""


@outside_of_graphs(only_with="rows")
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
    prior: Tensor | None = None,
    token_weight: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    impl: str = "auto",
    workspace: int | None = None,
    rows: RowPart | None = None,
) -> Tensor:
    r"""Return ``F.cross_entropy(F.linear(input, linear_weight, linear_bias), target, ...)`` without the N × V logits.

    .. math::
        \ell_i = -\log \frac{\exp(h_i \cdot W_{y_i})}{\sum_v \exp(h_i \cdot W_v)}

    The arguments are those of torch 2.13's ``F.linear_cross_entropy`` with class indices, and ``impl`` and
    ``workspace``. The loss of operands in half precision is in float32. Gradients are exact, in the dtype of their
    operands, and computed only for those that require them.

    Args:
        input: the activations h, (d,) or (N, d).
        linear_weight: the matrix W, (V, d).
        target: class indices, () or (N,).
        linear_bias: (V,).
        weight: class weights, (V,).
        reduction: ``mean``, ``sum`` or ``none``.
        ignore_index: targets of this value take no part in the loss; None means -100.
        label_smoothing: ε in [0, 1], as in ``F.cross_entropy``.
        prior: a constant that is added to each class's logits, (V,): log π for a balanced softmax or for logit
            adjustment; -inf masks a class, whose probability, gradient and share of the smoothing are then 0. On a CPU
            a masked target is refused; elsewhere its loss is inf, and the row has no gradient.
        token_weight: a constant that multiplies the loss of each row, of the shape of ``target``. ``mean`` divides by
            the sum of the weights, as it does with class weights, so with weights that may be negative take ``sum``. A
            row with weight 0 takes no part.
        temperature: the logits, without the prior, are divided by it.
        softcap: c of c · tanh(z / c), which is applied to the logits z before temperature and prior.
        z_loss: ζ of ζ · (log Σ_v exp(z_v))², which is added to the loss of each row.
        impl: ``reference`` builds all logits; ``chunked`` computes them tile by tile; ``triton`` uses fused kernels (on
            CUDA devices of capability 9.0 or more, in bfloat16 and not float16, with d divisible by 8). ``auto`` takes
            the fastest that fits. For small problems it builds all logits: on a GPU up to 2²⁴, in bfloat16 up to 2²⁶,
            and in float16 up to 2²⁸ for the mean without options where no workspace is given. Under ``torch.func``, in
            forward-mode differentiation and for ``torch.export`` it is ``reference``. Only where all logits are built
            can the loss be differentiated twice.
        workspace: the bytes that may be held besides inputs, results and a few numbers for each row and class. The
            default on a CPU is half of the logits (in half precision a quarter) within 8 … 128 MiB, and on a GPU one
            and a half times the matrix in float32, within 0.6 … 3.6 GB, with dW in half precision a fifth more, at most
            3.9 GB (for ``chunked`` 1 GiB). Not counted are copies of operands that are not contiguous or that autocast
            converts, up to 128 MiB that label smoothing converts at a time on a GPU, and the float32 sum of a gradient
            in half precision that is added up over several tiles, unless the fused kernels have room for it, too.
        rows: where several ranks share the rows of the matrix, the part of this one. ``linear_weight`` and
            ``linear_bias`` are then this rank's, and so are their gradients; ``target``, ``weight`` and ``prior`` are
            of the classes of all ranks. All other arguments are equal on these ranks, and so are the loss and the
            gradient of ``input``. Every rank makes the call, and the backward pass. There is no ``reference``.

    >>> h, W = torch.randn(4, 8), torch.randn(1000, 8)
    >>> loss = linear_cross_entropy(h, W, torch.tensor([3, 14, 15, 92]), impl="chunked", workspace=20_000)
    >>> torch.allclose(loss, torch.nn.functional.cross_entropy(h @ W.T, torch.tensor([3, 14, 15, 92])))
    True
    """
    numbers = label_smoothing, temperature, z_loss
    plain = linear_bias is weight is prior is token_weight is None and softcap is None and rows is None
    if plain and all(type(each) is float for each in numbers):  # A tensor would compare to a tensor.
        plain = (reduction, ignore_index, *numbers, impl, workspace) == _DEFAULTS
    else:
        plain = False
    usual = plain and checks.is_usual(input, linear_weight, target)
    if usual:
        loss = _at_once(input, linear_weight, target)
        if loss is not None:
            return loss
    ignore_index = _IGNORED if ignore_index is None else ignore_index
    options = Options(
        weight, reduction, ignore_index, label_smoothing, prior, token_weight, temperature, softcap, z_loss
    )
    if not usual:
        with checks.agreement(rows, input) as alike:
            checks.check_how(impl, workspace)
            if rows is not None:
                checks.check_part(rows, impl, linear_weight, linear_bias, input)
            checks.check_operands(input, linear_weight, linear_bias, target)
            options.check(linear_weight, target.shape, rows)
            if rows is not None:
                if target.device.type == "cpu":  # An accelerator checks them later, on all ranks alike.
                    check_targets(target, options, rows.total)
                alike += decisive(input, linear_weight, linear_bias), options.decisive(), impl, workspace
    return cross_entropy(input, linear_weight, target, linear_bias, options, impl=impl, workspace=workspace, part=rows)


def decisive(input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None) -> list[object]:
    """Return what of the operands decides on exchanges between the ranks that share the rows."""
    wanted = [each is not None and each.requires_grad for each in (input, linear_weight, linear_bias)]
    dtype, device = product_dtype(input), input.device
    # Engines and their tiles depend on the processor, too.
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else fast_dtype(dtype, device)
    # The workspace and with it the chunks depend on the dtype of dW.
    called = linear_weight.dtype, linear_bias is None, torch.is_grad_enabled(), wanted
    return [tuple(input.shape), dtype, machine, _triton.runs_on(device), *called]


def check_targets(target: Tensor, options: Options, classes: int) -> None:
    """Check that every target that counts is a class, and one that is not masked, as far as values can be read."""
    target = target.long()  # Before the comparison with ignore_index: as uint8, 156 equals -100.
    checks.check_values(target, classes, options.ignore_index)
    if classes > 0:
        _check_unmasked(target, options)


def _check_unmasked(target: Tensor, options: Options) -> None:
    """Refuse targets that count and that the prior masks, as far as values can be read."""
    if options.prior is not None:
        if options.token_weight is not None:
            target = target.masked_fill(options.token_weight.reshape(target.shape) == 0, options.ignore_index)
        checks.check_possible(target, options.prior, options.ignore_index)


def cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    options: Options,
    *,
    impl: str = "auto",
    workspace: int | None = None,
    zero_if_empty: bool = False,
    copy: Tensor | None = None,
    part: RowPart | None = None,
) -> Tensor:
    """Return the loss of arguments that the caller has checked.

    With ``zero_if_empty``, a mean over no target is 0 with zero gradients instead of NaN. ``copy`` is ``linear_weight``
    in the dtype of ``input``, for callers who hold one: products use the copy, and the gradient goes to
    ``linear_weight`` in the dtype of ``linear_weight``. With ``part``, the checks have been made in its agreement.
    """
    target = target.long()
    if (linear_weight.shape[0] if part is None else part.total) == 0:
        checks.check_values(target, 0, options.ignore_index)
        return reference.without_classes(input, linear_weight, linear_bias, options.reduction, zero_if_empty)
    if part is None:
        _check_unmasked(target, options)
        if impl == "auto" and copy is None and _suits_reference(input, linear_weight, linear_bias, workspace):
            impl = "reference"
    if impl == "reference":
        return reference.cross_entropy(input, linear_weight, target, linear_bias, options, zero_if_empty)
    if _torch.is_transforming():
        checks.refuse_engine_in_transform(impl)
    if torch.compiler.is_compiling():
        from hebbian_softmax.loss.uncompiled import cross_entropy as apply
    else:
        apply = LinearCrossEntropy.apply
    products = product_dtype(input)
    settings = Settings(
        impl=impl,
        workspace=workspace,
        products=products,
        options=options,
        differentiable=torch.is_grad_enabled(),
        zero_if_empty=zero_if_empty,
        part=part,
    )
    weighting = Weighting.of(options, wide(products))
    loss: Tensor = apply(_rows(input), linear_weight, linear_bias, target.reshape(-1), copy, weighting, settings)
    return loss.reshape(target.shape) if options.reduction == "none" else loss


@outside_of_graphs(only_with="rows")
def linear_log_prob(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    ignore_index: int | None = None,
    prior: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    entropy: bool = False,
    impl: str = "auto",
    workspace: int | None = None,
    rows: RowPart | None = None,
) -> tuple[Tensor, ...]:
    r"""Return log p(target) and log Σ_v exp(z_v) for each row of ``input``, without the N × V logits.

    With ``entropy``, -Σ_v p_v log p_v is a third result, from the same pass; the fused kernels do not have it, so
    ``auto`` then takes ``chunked``. All results are differentiable, have the shape of ``target`` and at least float32,
    and are 0 where the target is ``ignore_index``. The arguments are those of :func:`linear_cross_entropy`. On a CPU a
    target that ``prior`` masks is refused; elsewhere its log p is -inf, without a gradient.

    >>> h, W = torch.randn(4, 8), torch.randn(1000, 8)
    >>> log_prob, log_normaliser, entropy = linear_log_prob(h, W, torch.tensor([3, 14, 15, 92]), entropy=True)
    >>> torch.allclose(log_normaliser, (h @ W.T).logsumexp(1))
    True
    >>> torch.allclose(entropy, torch.distributions.Categorical(logits=h @ W.T).entropy(), atol=1e-5)
    True
    """
    ignore_index = _IGNORED if ignore_index is None else ignore_index
    options = Options(ignore_index=ignore_index, prior=prior, temperature=temperature, softcap=softcap)
    with checks.agreement(rows, input) as alike:
        entropy = check_flag("entropy", entropy)
        checks.check_how(impl, workspace)
        if rows is not None:
            checks.check_part(rows, impl, linear_weight, linear_bias, input)
        checks.check_operands(input, linear_weight, linear_bias, target)
        options.check(linear_weight, (), rows)
        check_targets(target, options, linear_weight.shape[0] if rows is None else rows.total)
        if rows is not None:
            alike += decisive(input, linear_weight, linear_bias), options.decisive(), impl, workspace, entropy
    target = target.long()
    products, results = product_dtype(input), 3 if entropy else 2
    if (linear_weight.shape[0] if rows is None else rows.total) == 0:
        nothing = reference.without_classes(input, linear_weight, linear_bias, "none", False)
        return tuple(nothing.to(wide(products)).clone() for _ in range(results))
    counted = torch.where(target == ignore_index, -1, target).reshape(-1)
    if impl == "auto" and rows is None and _suits_reference(input, linear_weight, linear_bias, workspace):
        impl = "reference"
    if impl == "reference":
        found = reference.log_prob(_rows(input), linear_weight, linear_bias, counted, options, entropy)
    else:
        if _torch.is_transforming():
            checks.refuse_engine_in_transform(impl)
        if torch.compiler.is_compiling():
            from hebbian_softmax.loss.uncompiled import log_prob as apply
        else:
            apply = LinearLogProb.apply
        settings = LogProbSettings(impl, workspace, products, options, entropy, torch.is_grad_enabled(), rows)
        found = apply(_rows(input), linear_weight, linear_bias, counted, settings)
    return tuple(each.reshape(target.shape) for each in found)


def _rows(input: Tensor) -> Tensor:
    """Return (d,) or (N, d) as (N, d)."""
    return input if input.dim() == 2 else input.unsqueeze(0)


def _suits_reference(input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, workspace: int | None) -> bool:
    """Return whether ``auto`` takes the plain computation: for a tiny problem, or where something must trace it."""
    tensors = (input, linear_weight) if linear_bias is None else (input, linear_weight, linear_bias)
    return _is_tiny(input, linear_weight, workspace) or checks.must_be_traced(*tensors)


def _is_tiny(input: Tensor, linear_weight: Tensor, workspace: int | None) -> bool:
    """Return whether all logits at once are faster and fit: plain torch holds about three times their number."""
    rows, size = _rows(input).shape[0], input.element_size()
    logits = rows * linear_weight.shape[0]
    if input.is_cuda:
        products = product_dtype(input)
        if torch.compiler.is_compiling():  # Only all logits at once leave the graph whole.
            most = _TINY_ON_GPU
        elif products.itemsize >= 4:
            most = _TINY_ON_GPU_IN_FULL_PRECISION
        else:
            most = min(_TINY_ON_GPU, _most_at_once(products, *linear_weight.shape))
    else:
        most = _TINY_IN_FULL_PRECISION if size >= 4 or rows <= _FEW_ROWS else _TINY
    return logits <= most and (workspace is None or 3 * logits * size <= workspace)


def _most_at_once(dtype: torch.dtype, classes: int, features: int) -> int:
    """Return up to how many logits in half precision all of them at once are fastest on a GPU."""
    if dtype == torch.float16:
        return _WHOLE_TO_IN_FLOAT16
    most = max(_WHOLE_TO, _QUICK // (features + _TRAFFIC))
    return most if classes % 8 == 0 else most // 2


def _at_once(input: Tensor, linear_weight: Tensor, target: Tensor) -> Tensor | None:
    """Return the loss without options from all logits at once, where that is fastest; None elsewhere.

    The host of a GPU takes longer to launch such problems than the GPU to compute them, so each has its shortest form.
    """
    dtype, logits = input.dtype, input.shape[0] * linear_weight.shape[0]
    if (
        input.is_cuda
        and dtype in (torch.bfloat16, torch.float16)
        and not torch.compiler.is_compiling()
        and logits <= _most_at_once(dtype, *linear_weight.shape)
        and not torch.is_autocast_enabled("cuda")
        and not checks.must_be_traced(input, linear_weight)
    ):
        if logits <= _WHOLE_FROM:
            return F.nll_loss(torch.log_softmax(F.linear(input, linear_weight), 1, dtype=torch.float32), target)
        works = _triton.is_hopper(input.device) and _triton.works_on(input) and _triton.works_on(linear_weight)
        kernels = _triton.load("loss.gpu.whole") if works else None
        if kernels is not None:
            loss: Tensor = kernels.WholeCrossEntropy.apply(input, linear_weight, target, _IGNORED)
            return loss
    if _is_tiny(input, linear_weight, None):
        z = F.linear(input, linear_weight)
        return F.cross_entropy(z.to(wide(z.dtype)), target)
    return None
