"""add_classes: new rows in place."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from hebbian_softmax import HebbianSoftmax
from tests.closeness import assert_exact
from tests.heads import attached_head, train

OK = {"gamma": 0.3, "limit": 9}
OPTIMIZERS = {
    "sgd": torch.optim.SGD,
    "momentum": partial(torch.optim.SGD, momentum=0.9),
    "rmsprop": partial(torch.optim.RMSprop, momentum=0.5, centered=True),
    "adam": partial(torch.optim.Adam, amsgrad=True),
    "adamw-fused": partial(torch.optim.AdamW, fused=True),
    "adafactor": torch.optim.Adafactor,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("attached", [True, False])
def test_everything_old_keeps_its_bits(name: str, bias: bool, attached: bool) -> None:
    head, optimizer = attached_head(OPTIMIZERS[name], lr=0.01, bias=bias)
    for _ in range(3):
        train(head, optimizer, (1, 2, 5))
    if not attached:
        head.attachment.remove()
    weight, old_bias = head.weight, head.bias
    rows = weight.detach().clone()
    h = torch.randn(3, 4)
    logits = head(h).detach()
    state = {p: copy.deepcopy(dict(optimizer.state[p])) for p in head.parameters()}

    head.add_classes(2, optimizer=None if attached else optimizer)

    assert head.weight is weight
    assert head.bias is old_bias
    assert head.weight.shape == (8, 4)
    assert head.out_features == head.num_classes == 8
    assert torch.equal(head.weight[:6], rows)
    assert head.counts.tolist() == [0, 3, 3, 0, 0, 3, 0, 0]
    assert float(head.weight[6:].detach().abs().max()) <= 0.5  # 1/sqrt(4), the head's own initialisation
    assert float(head.weight[6:].detach().abs().max()) > 0
    if bias:
        assert head.bias[6:].tolist() == [0, 0]
    assert_exact(head(h)[:, :6], logits, scale=float((h.abs() @ rows.abs().T).max()) + 1)  # the sizes of the terms
    for parameter, before in state.items():
        for key, value in before.items():
            now = optimizer.state[parameter][key]
            if isinstance(value, Tensor) and value.dim() and value.shape[0] == 6:
                assert torch.equal(now[:6], value)
                assert now.shape[0] == 8
                assert not now[6:].any()
            elif isinstance(value, Tensor):
                assert torch.equal(now, value)
    if not attached:
        head.attach(optimizer)
    train(head, optimizer, (6, 7, 1))
    assert head.counts.tolist() == [0, 4, 3, 0, 0, 3, 1, 1]


def test_grown_training_equals_training_that_had_the_rows_from_the_start() -> None:
    """The rows of the new classes and their optimizer state, such as momentum, are zero in both."""
    small, first = attached_head(OPTIMIZERS["momentum"], classes=3)
    large, second = attached_head(OPTIMIZERS["momentum"], classes=5)
    small.add_classes(2)
    with torch.no_grad():
        large.weight.copy_(small.weight)
    for head, optimizer in ((small, first), (large, second)):
        torch.manual_seed(2)
        for _ in range(4):
            train(head, optimizer, (0, 3, 4))
    assert torch.equal(small.weight, large.weight)


def test_with_a_graph_alive_and_gradients_pending() -> None:
    head, optimizer = attached_head(lr=0.0, bias=True, scale=1.0, center=False)
    h = torch.randn(1, 4)
    alive = head.loss(torch.randn(2, 4), torch.tensor([0, 1]))  # never backpropagated, and kept
    head.loss(h, torch.tensor([3])).backward()
    grads = {p: p.grad.clone() for p in head.parameters()}
    head.add_classes(3)
    for parameter, grad in grads.items():
        assert torch.equal(parameter.grad[:6], grad)
        assert not parameter.grad[6:].any()
        assert parameter.grad.shape == parameter.shape
    new = torch.randn(1, 4)
    head.loss(new, torch.tensor([8])).backward()
    optimizer.step()
    assert head.counts.tolist() == [0, 0, 0, 1, 0, 0, 0, 0, 1]
    assert torch.equal(head.weight[[3, 8]], torch.cat([h, new]))
    with pytest.raises(RuntimeError, match="computed before add_classes"):
        alive.backward()


@pytest.mark.parametrize("remember", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_a_loss_from_before_is_refused_without_harm(remember: bool, frozen: bool) -> None:
    head, optimizer = attached_head()
    h = torch.randn(2, 4, requires_grad=not frozen)
    alive = head.loss(h, torch.tensor([0, 1]), remember=remember)
    head.add_classes(3)
    with pytest.raises(RuntimeError, match=r"computed before add_classes|modified by an inplace operation"):
        alive.backward()
    assert head.weight.grad is None
    train(head, optimizer, (8,))
    assert head.counts.tolist() == [0] * 8 + [1]


def test_tied_embedding_follows() -> None:
    embedding = nn.Embedding(6, 4)
    head = HebbianSoftmax(4, 6, **OK)
    head.weight = embedding.weight
    optimizer = torch.optim.Adam([head.weight], lr=0.1)
    head.attach(optimizer)
    train(head, optimizer, (1, 2))
    head.add_classes(2)
    assert embedding.num_embeddings == 8
    assert embedding.weight is head.weight
    assert embedding(torch.tensor([7])).shape == (1, 4)
    optimizer.zero_grad()
    head.loss(embedding(torch.tensor([7])), torch.tensor([6])).backward()
    optimizer.step()
    assert int(head.counts[6]) == 1


def test_a_sharer_with_state_of_its_own_is_refused_and_nothing_changes() -> None:
    head, other = HebbianSoftmax(4, 6, **OK), nn.Linear(4, 6, bias=True)
    other.weight = head.weight
    with pytest.raises(ValueError, match="shared with Linear"):
        head.add_classes(2)
    assert head.weight.shape == (6, 4)
    assert head.out_features == 6


def test_parameter_groups() -> None:
    net, head = nn.Linear(3, 4), HebbianSoftmax(4, 6, bias=True, **OK)
    optimizer = torch.optim.AdamW(
        [{"params": net.parameters()}, {"params": [head.weight], "lr": 0.1}, {"params": [head.bias]}], lr=0.01
    )
    head.attach(optimizer)
    groups = [[id(p) for p in group["params"]] for group in optimizer.param_groups]
    train(head, optimizer, (1, 2))
    head.add_classes(1)
    assert [[id(p) for p in group["params"]] for group in optimizer.param_groups] == groups
    train(head, optimizer, (6,))


def test_bad_arguments_and_a_head_on_meta() -> None:
    for bad in (0, -1, 1.5, True):
        with pytest.raises((ValueError, TypeError), match="n must be"):
            HebbianSoftmax(4, 6, **OK).add_classes(bad)
    with pytest.raises(TypeError, match="optimizer must be"):
        HebbianSoftmax(4, 6, **OK).add_classes(1, optimizer="adam")
    with pytest.raises(ValueError, match="meta device"):
        HebbianSoftmax(4, 6, device="meta", **OK).add_classes(1)


def test_growing_often_leaves_one_hook() -> None:
    head = HebbianSoftmax(4, 6, bias=True, **OK)
    for _ in range(5):
        head.add_classes(1)
    assert len(head.weight._backward_hooks) == len(head.bias._backward_hooks) == 1
    twin = copy.deepcopy(head)
    twin.add_classes(1)
    alive = twin.loss(torch.randn(1, 4), torch.tensor([0]), remember=False)
    twin.add_classes(1)
    with pytest.raises(RuntimeError, match="computed before add_classes"):
        alive.backward()


@pytest.mark.parametrize(
    ("kind", "options", "name", "start"),
    [
        (torch.optim.Rprop, {}, "step_size", 0.02),
        (torch.optim.Adagrad, {"initial_accumulator_value": 0.1}, "sum", 0.1),
        (torch.optim.Adafactor, {}, "row_var", 0.0),
    ],
)
@pytest.mark.parametrize("classes", [1, 6])
def test_new_rows_start_as_the_optimizer_starts(kind, options, name, start, classes) -> None:
    head, optimizer = attached_head(partial(kind, **options), lr=0.02, classes=classes)
    train(head, optimizer, (0,))
    head.add_classes(2)
    new = optimizer.state[head.weight][name][classes:]
    assert torch.equal(new, torch.full_like(new, start))
    train(head, optimizer, (classes,))
