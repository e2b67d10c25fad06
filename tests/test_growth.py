"""add_classes: new rows in place."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hebbian_softmax import HebbianSoftmax
from tests.closeness import assert_exact
from tests.heads import attached_head, early_head, train

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
    head, optimizer = attached_head(lr=0.0, bias=True, write="literal")
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
    head = early_head(4, 6, **OK)
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
    head, other = early_head(4, 6, **OK), nn.Linear(4, 6, bias=True)
    other.weight = head.weight
    with pytest.raises(ValueError, match="shared with Linear"):
        head.add_classes(2)
    assert head.weight.shape == (6, 4)
    assert head.out_features == 6


def test_parameter_groups() -> None:
    net, head = nn.Linear(3, 4), early_head(4, 6, bias=True, **OK)
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
            early_head(4, 6, **OK).add_classes(bad)
    with pytest.raises(TypeError, match="optimizer must be"):
        early_head(4, 6, **OK).add_classes(1, optimizer="adam")
    with pytest.raises(ValueError, match="meta device"):
        early_head(4, 6, device="meta", **OK).add_classes(1)


def test_growing_often_leaves_one_hook() -> None:
    head = early_head(4, 6, bias=True, **OK)
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


def grown_head(**options: Any) -> tuple[HebbianSoftmax, torch.optim.Optimizer]:
    """Return a head of 64 classes and one, with spare rows, gradients and Adam's state."""
    head, optimizer = attached_head(partial(torch.optim.Adam, amsgrad=True), lr=0.01, classes=64, bias=True, **options)
    train(head, optimizer, (1, 2, 5))
    head.add_classes(1)
    return head, optimizer


def per_row(head: HebbianSoftmax, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return every tensor with a row for each class."""
    named = dict(head.named_parameters())
    tensors = named | {f"{name}.grad": p.grad for name, p in named.items()} | {"counts": head.counts}
    states = {f"{name}.{key}": v for name, p in named.items() for key, v in optimizer.state[p].items() if v.dim()}
    return tensors | states


def test_single_classes_are_added_without_copying_what_is_there() -> None:
    head, optimizer = grown_head()
    tensors = per_row(head, optimizer)
    assert len(tensors) == 11
    addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    for _ in range(8):
        head.add_classes(1)
    assert {name: tensor.data_ptr() for name, tensor in per_row(head, optimizer).items()} == addresses
    head.add_classes(1)  # more than an eighth
    assert head.weight.data_ptr() != addresses["weight"]


@pytest.mark.parametrize("save", [torch.save, pickle.dump])
def test_no_file_has_spare_rows(save: Callable[..., None], tmp_path: Path) -> None:
    head, optimizer = grown_head()
    for tensor in per_row(head, optimizer).values():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
    fresh, its_optimizer = attached_head(partial(torch.optim.Adam, amsgrad=True), lr=0.01, classes=65, bias=True)
    train(fresh, its_optimizer, (1, 2, 5))
    sizes = []
    for each in ((head, optimizer), (fresh, its_optimizer)):
        head.weight.grad = fresh.weight.grad = None
        for index, content in enumerate((each[0].state_dict(), each[1].state_dict(), copy.deepcopy(each[0]))):
            with open(tmp_path / f"{index}", "wb") as file:
                save(content, file)
        sizes.append([(tmp_path / f"{index}").stat().st_size // 512 for index in range(3)])
    assert sizes[0] == sizes[1]


MOVES: dict[str, Callable[[HebbianSoftmax], Any]] = {
    "half": lambda head: head.half().float(),
    "shared": lambda head: head.share_memory(),
    "data": lambda head: setattr(head.weight, "data", head.weight.data.clone()),
    "loaded": lambda head: head.load_state_dict(head.state_dict()),
    "transposed": lambda head: setattr(head.weight, "data", head.weight.data.T.contiguous().T),
    "cleared": lambda head: head.zero_grad(),
    "smaller": lambda head: setattr(head.weight, "grad", head.weight.grad[:].clone()),
}


@pytest.mark.parametrize("move", MOVES)
def test_a_head_that_has_changed_its_memory_grows_as_before(move: str) -> None:
    head, optimizer = grown_head()
    MOVES[move](head)
    before = {name: value.detach().clone() for name, value in per_row(head, optimizer).items() if value is not None}
    for _ in range(3):
        head.add_classes(1)
    for name, value in per_row(head, optimizer).items():
        assert name not in before or torch.equal(value[:65], before[name]), name
        assert value is None or value.shape[0] == 68
    optimizer.zero_grad()
    train(head, optimizer, (66, 67))
    assert head.counts[64:].tolist() == [0, 0, 1, 1]


def test_what_shares_the_memory_keeps_its_own_new_rows() -> None:
    """A head that was given the tensors of another one, and not copies, does not write into its spare rows."""
    head, _optimizer = grown_head()
    twin = early_head(4, 65, bias=True, **OK)
    twin.load_state_dict(head.state_dict(), assign=True)
    assert twin.weight.data_ptr() == head.weight.data_ptr()
    for each in (head, twin):
        each.add_classes(1)
    rows = head.weight[65].detach().clone()
    with torch.no_grad():
        twin.weight[65:] = 7
    assert torch.equal(head.weight[65], rows)
    twin.add_classes(1)
    assert not (head.weight == 7).any()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda head: pickle.loads(pickle.dumps(head))])
def test_a_copy_grows_alone(copied: Callable[[HebbianSoftmax], HebbianSoftmax]) -> None:
    head, _optimizer = grown_head()
    twin = copied(head)
    before = head.weight.detach().clone()
    for _ in range(3):
        twin.add_classes(1)
    with torch.no_grad():
        twin.weight.fill_(7)
    assert torch.equal(head.weight, before)
    head.add_classes(1)
    assert torch.equal(head.weight[:65], before)


def test_modules_that_come_to_share_the_weight_later_follow() -> None:
    head, _optimizer = grown_head()
    embedding, other = nn.Embedding(65, 4), nn.Linear(4, 65)
    embedding.weight = head.weight
    head.add_classes(1)
    assert embedding.num_embeddings == 66
    embedding.weight = nn.Parameter(torch.zeros(3, 4))
    head.add_classes(1)
    assert embedding.num_embeddings == 66
    other.weight = head.weight
    with pytest.raises(ValueError, match="shared with Linear"):
        head.add_classes(1)
    del other
    head.add_classes(1)


def test_memory_with_spare_rows_goes_with_the_tensors_that_use_it() -> None:
    head, optimizer = attached_head(torch.optim.Adam, classes=50_000)
    train(head, optimizer)
    head.add_classes(1)
    memory = [weakref.ref(tensor.untyped_storage()) for tensor in per_row(head, optimizer).values()]
    gradient = weakref.ref(head.weight.grad)
    head.zero_grad()
    assert gradient() is None
    del head, optimizer
    gc.collect()
    assert all(reference() is None for reference in memory)


def test_a_state_of_fewer_classes_is_refused_when_it_is_loaded_or_attached() -> None:
    head = HebbianSoftmax(4, 10)
    optimizer = torch.optim.Adam(head.parameters())
    head.attach(optimizer)
    head.loss(torch.randn(3, 4), torch.tensor([1, 2, 3])).backward()
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    head.add_classes(2)
    now = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=r"'exp_avg' has 10 classes and the head has 12; load such a state before"):
        optimizer.load_state_dict(before)
    assert optimizer.state[head.weight]["exp_avg"].shape == (12, 4)  # nothing was loaded
    smaller = HebbianSoftmax(4, 10)
    optimizer = torch.optim.Adam(smaller.parameters())
    smaller.attach(optimizer)
    with pytest.raises(ValueError, match="has 12 classes and the head has 10; call add_classes before such a state"):
        optimizer.load_state_dict(now)

    other = HebbianSoftmax(4, 10)
    optimizer = torch.optim.Adam(other.parameters())
    other.loss(torch.randn(3, 4), torch.tensor([1, 2, 3]), remember=False).backward()
    optimizer.step()
    other.add_classes(2)  # nobody knows of this optimizer
    with pytest.raises(ValueError, match="has 10 classes and the head has 12"):
        other.attach(optimizer)


@pytest.mark.parametrize("classes", [1, 10])
@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.Adam])
def test_states_of_one_row_are_told_from_states_of_one_class(kind: type[torch.optim.Optimizer], classes: int) -> None:
    head = HebbianSoftmax(4, classes)
    optimizer = kind(head.parameters())
    head.attach(optimizer)
    head.loss(torch.randn(3, 4), torch.zeros(3, dtype=torch.int64)).backward()
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(before)
    head.add_classes(2)
    optimizer.load_state_dict(optimizer.state_dict())
    with pytest.raises(ValueError, match=f"has {classes} classes and the head has {classes + 2}"):
        optimizer.load_state_dict(before)


class Preconditioned(torch.optim.SGD):
    """An optimizer that keeps a matrix for the features of each parameter, as Shampoo does."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["preconditioner"] = torch.eye(parameter.shape[-1])
        return super().step(closure)


def test_a_state_of_unknown_meaning_is_accepted() -> None:
    head = HebbianSoftmax(4, 10)
    optimizer = Preconditioned(head.parameters(), lr=0.1)
    handle = head.attach(optimizer)
    head.loss(torch.randn(3, 4), torch.tensor([1, 2, 3])).backward()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    handle.remove()
    head.attach(optimizer)
