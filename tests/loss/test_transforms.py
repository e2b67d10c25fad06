"""Transforms of torch.func over the losses: per-sample gradients, ensembles, Jacobians and Hessians."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, stack_module_state, vmap
from torch.utils._pytree import tree_leaves, tree_map

from hebbian_softmax import linear_cross_entropy, linear_log_prob, linear_topk
from tests.closeness import assert_exact
from tests.heads import early_head

SAMPLES, ROWS, FEATURES, CLASSES = 4, 3, 5, 7
CLASS_WEIGHT = torch.linspace(0.1, 1.0, CLASSES, dtype=torch.float64)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "smoothed": {"label_smoothing": 0.1},
    "weighted": {"weight": CLASS_WEIGHT},
    "both": {"weight": CLASS_WEIGHT, "label_smoothing": 0.3},
    "another index": {"ignore_index": 2},
}
TRANSFORMS = {"jacrev": jacrev, "jacfwd": jacfwd, "hessian": hessian}
Parameters = dict[str, Tensor]

every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
every_reduction = pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
either_sample = pytest.mark.parametrize("shape", [(SAMPLES,), (SAMPLES, ROWS)], ids=["a row each", "rows each"])
forward_mode_warns = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class Loss(nn.Module):
    """The layer's loss as the output of a module, for ``functional_call``."""

    def __init__(self, options: dict[str, Any], **of_head: Any) -> None:
        super().__init__()
        self.options = {name: value for name, value in options.items() if name != "ignore_index"}
        of_head |= {"bias": True, "dtype": torch.float64, "ignore_index": options.get("ignore_index", -100)}
        self.head = early_head(FEATURES, CLASSES, gamma=0.1, limit=5, **of_head)

    def forward(self, h: Tensor, y: Tensor) -> Tensor:
        return self.head.loss(h, y, remember=False, **self.options)


def of_layer(
    options: dict[str, Any], **of_head: Any
) -> tuple[Parameters, Callable[[Parameters, Tensor, Tensor], Tensor]]:
    """Return the parameters of a layer, and its loss as a function of them."""
    module = Loss(options, **of_head)
    return tree_map(Tensor.detach, dict(module.named_parameters())), lambda *call: functional_call(
        module, call[0], call[1:]
    )


def eager(options: dict[str, Any]) -> Callable[[Parameters, Tensor, Tensor], Tensor]:
    """Return the same loss with all logits."""
    return lambda parameters, h, y: F.cross_entropy(
        F.linear(h, parameters["head.weight"], parameters["head.bias"]), y, **options
    )


def a_batch(*shape: int, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return activations and targets, of which one in four is ignored, and all of the second sample."""
    h, y = torch.randn(*shape, FEATURES, dtype=torch.float64), torch.randint(CLASSES, shape)
    y.view(-1)[3::4] = y[1] = options.get("ignore_index", -100)
    return h, y


def summed(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *call: loss(*call).sum()


def assert_same(found: Any, one_by_one: list[Any]) -> None:
    """Compare the results of all samples at once with those of each."""
    for mine, *theirs in zip(tree_leaves(found), *map(tree_leaves, one_by_one), strict=True):
        assert_exact(mine, torch.stack(theirs))


@either_sample
@every_reduction
@every_option
def test_per_sample_gradients_of_the_layer(options, reduction, shape) -> None:
    options = options | {"reduction": reduction}
    parameters, loss = of_layer(options)
    h, y = a_batch(*shape, options=options)
    found = vmap(grad(summed(loss)), in_dims=(None, 0, 0))(parameters, h, y)
    each = [grad(summed(eager(options)))(parameters, *sample) for sample in zip(h, y, strict=True)]
    # The layer has no NaN for a sample without targets, and no gradient either.
    assert_same(found, tree_map(lambda gradient: gradient.nan_to_num(0.0), each))
    values = vmap(loss, in_dims=(None, 0, 0))(parameters, h, y)
    assert_exact(
        values, torch.stack([eager(options)(parameters, *pair).nan_to_num(0.0) for pair in zip(h, y, strict=True)])
    )


@either_sample
@every_reduction
@every_option
def test_per_sample_gradients_of_the_function(options, reduction, shape) -> None:
    options = options | {"reduction": reduction}
    h, y = a_batch(*shape, options=options)
    w, b = torch.randn(CLASSES, FEATURES, dtype=torch.float64), torch.randn(CLASSES, dtype=torch.float64)

    def ours(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
        # The workspace forbids all logits at once, where they are not needed.
        return linear_cross_entropy(h, w, y, linear_bias=b, workspace=1, **options).sum()

    def theirs(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(h, w, b), y, **options).sum()

    operands = 0, 1, 2
    each = [grad(theirs, operands)(sample, w, b, wanted) for sample, wanted in zip(h, y, strict=True)]
    assert_same(vmap(grad(ours, operands), in_dims=(0, None, None, 0))(h, w, b, y), each)
    # A layer for each sample, along other dimensions.
    ws, bs = w + torch.randn(SAMPLES, *w.shape, dtype=w.dtype), b + torch.randn(SAMPLES, CLASSES, dtype=w.dtype)
    each = [grad(theirs, operands)(*sample) for sample in zip(h, ws, bs, y, strict=True)]
    found = vmap(grad(ours, operands), in_dims=(0, 2, 1, -1))(h, ws.movedim(0, 2), bs.movedim(0, 1), y.movedim(0, -1))
    assert_same(found, each)


@pytest.mark.parametrize("transform", TRANSFORMS)
@every_reduction
@forward_mode_warns
def test_jacobians_and_hessians(transform, reduction) -> None:
    for options in OPTIONS.values():
        chosen = options | {"reduction": reduction}
        parameters, loss = of_layer(chosen)
        h, y = a_batch(SAMPLES, options=chosen)
        found = TRANSFORMS[transform](loss)(parameters, h, y)
        expected = TRANSFORMS[transform](eager(chosen))(parameters, h, y)
        assert_same(tree_map(lambda each: each.unsqueeze(0), found), [expected])


@forward_mode_warns
def test_a_hessian_for_each_sample() -> None:
    parameters, loss = of_layer({})
    h, y = a_batch(SAMPLES, ROWS, options={})
    y[1, 0] = 3
    each = [hessian(eager({}))(parameters, *sample) for sample in zip(h, y, strict=True)]
    assert_same(vmap(hessian(loss), in_dims=(None, 0, 0))(parameters, h, y), each)


def test_an_ensemble_of_layers() -> None:
    """One batch for all layers: the targets are not a sample of anything, so their values are still checked."""
    models = [Loss({}) for _ in range(SAMPLES)]
    parameters, buffers = stack_module_state(models)

    def loss(parameters: Parameters, buffers: Parameters, h: Tensor, y: Tensor) -> Tensor:
        return functional_call(models[0], (parameters, buffers), (h, y))

    h, y = a_batch(ROWS, options={})
    found = vmap(grad(loss), in_dims=(0, 0, None, None))(parameters, buffers, h, y)
    assert_same(found, [grad(eager({}))(dict(model.named_parameters()), h, y) for model in models])
    y[0] = CLASSES
    with pytest.raises(ValueError, match=rf"targets must be in \[0, {CLASSES - 1}\].*got {CLASSES}"):
        vmap(loss, in_dims=(0, 0, None, None))(parameters, buffers, h, y)


@pytest.mark.parametrize("randomness", ["different", "same"])
def test_dropout_in_a_transform(randomness: str) -> None:
    """A dropped feature has no gradient, and one that was kept has its value times 1 / (1 - p)."""
    parameters, loss = of_layer({}, dropout=0.5)
    h, y = torch.ones(64, FEATURES, dtype=torch.float64), torch.zeros(64, dtype=torch.int64)
    found = vmap(grad(loss), in_dims=(None, 0, 0), randomness=randomness)(parameters, h, y)
    of_weight, of_bias = found["head.weight"], found["head.bias"]
    kept = (of_weight / of_bias.unsqueeze(2))[:, 0]
    assert set(kept.round(decimals=9).flatten().tolist()) == {0.0, 2.0}
    assert (kept == kept[0]).all() == (randomness == "same")
    with pytest.raises(RuntimeError, match="randomness"):  # As in torch.
        vmap(loss, in_dims=(None, 0, 0))(parameters, h, y)


@either_sample
@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_log_probabilities_and_likeliest_classes(impl, shape) -> None:
    h, y = a_batch(*shape, options={})
    ws = torch.randn(SAMPLES, CLASSES, FEATURES, dtype=torch.float64)
    for w, all_of_w, in_dims in ((ws[0], ws[:1].expand_as(ws), (0, None, 0)), (ws, ws, (0, 0, 0))):
        found = vmap(lambda h, w, y: linear_log_prob(h, w, y, impl=impl, workspace=1), in_dims=in_dims)(h, w, y)
        each = [linear_log_prob(*sample) for sample in zip(h, all_of_w, y, strict=True)]
        assert_same(found, each)
        found = vmap(lambda h, w: linear_topk(h, w, 3, workspace=1), in_dims=in_dims[:2])(h, w)
        each = [linear_topk(*sample, 3) for sample in zip(h, all_of_w, strict=True)]
        assert_same(found, each)


def test_a_sample_that_is_no_class_is_refused_by_torch() -> None:
    parameters, loss = of_layer({})
    h, y = a_batch(SAMPLES, options={})
    y[2] = CLASSES
    with pytest.raises((RuntimeError, IndexError), match="out of bounds"):
        vmap(loss, in_dims=(None, 0, 0))(parameters, h, y)


@pytest.mark.parametrize("impl", ["chunked", "triton"])
def test_an_engine_asked_for_by_name_says_that_it_cannot_be_transformed(impl: str) -> None:
    h, y = a_batch(SAMPLES, options={})
    w = torch.randn(CLASSES, FEATURES, dtype=torch.float64)

    def loss(h: Tensor, y: Tensor) -> Tensor:
        return linear_cross_entropy(h, w, y, impl=impl)

    for transformed in (vmap(loss), grad(loss), vmap(grad(loss))):
        with pytest.raises(RuntimeError, match=r'torch\.func.*impl="reference"'):
            transformed(h, y)
    with pytest.raises(RuntimeError, match=r'torch\.func.*impl="reference"'):
        vmap(lambda h, y: linear_log_prob(h, w, y, impl=impl))(h, y)


def test_nothing_is_remembered_in_a_transform() -> None:
    """The transforms differentiate copies, which no optimizer steps."""
    body, module = nn.Linear(FEATURES, FEATURES, dtype=torch.float64), Loss({})
    head = module.head
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)
    head.attach(optimizer)
    h, y = a_batch(SAMPLES, options={})

    def by_loss(w: Tensor, h: Tensor, y: Tensor) -> Tensor:
        return head.loss(F.linear(h, w), y)

    def by_remember(w: Tensor, h: Tensor, y: Tensor) -> Tensor:
        made = F.linear(h, w)
        head.remember(made, y)
        return F.cross_entropy(head(made), y, reduction="sum")

    for loss in (by_loss, by_remember):
        vmap(grad(loss), in_dims=(None, 0, 0))(body.weight.detach(), h, y)
        grad(loss)(body.weight.detach(), h, y)
    head.weight.grad = torch.ones_like(head.weight)
    optimizer.step()
    assert not head.counts.any()
    head.loss(body(h), y).backward()
    optimizer.step()
    assert head.counts.sum() == (y >= 0).sum()
