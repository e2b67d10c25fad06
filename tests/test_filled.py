"""Heads built on the meta device whose buffers are allocated and never filled, and weights that others resize."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from hebbian_softmax import HebbianSoftmax
from tests.heads import early_head

OK = {"gamma": 0.3, "limit": 9}


def allocated_head(**options: object) -> HebbianSoftmax:
    """Return a head with rows of its own and with memory garbage in its buffers."""
    with torch.device("meta"):
        head = early_head(4, 6, **OK, **options)
    head.to_empty(device="cpu")
    with torch.no_grad():
        head.weight.normal_()
        for buffer in head.buffers():
            buffer.fill_(94_839_416_011_088 if buffer.dtype == torch.int64 else 1e30)
    return head


def attach(head: HebbianSoftmax) -> object:
    return head.attach(torch.optim.SGD(head.parameters(), lr=0.1))


def memorize(head: HebbianSoftmax) -> None:
    head.memorize(torch.randn(1, 4), torch.tensor([1]))


@pytest.mark.parametrize(
    "use", [attach, memorize, lambda head: head.add_classes(1)], ids=["attach", "memorize", "grow"]
)
def test_garbage_is_refused_at_first_use(use) -> None:
    head = allocated_head()
    with pytest.raises(RuntimeError, match=r"never filled.*head\.reset_memory\(\).*head\.reset_memory\(head\.limit\)"):
        use(head)


@pytest.mark.parametrize(
    ("given", "counts"), [((), [0] * 6), ((9,), [9] * 6), ((torch.arange(6),), [0, 1, 2, 3, 4, 5])]
)
def test_reset_memory_fills_the_buffers(given: tuple[Tensor | int, ...], counts: list[int]) -> None:
    head = allocated_head()
    rows = head.weight.detach().clone()
    head.reset_memory(*given)
    assert head.counts.tolist() == counts
    assert torch.equal(head.weight, rows)
    assert not head.running.mean.any()
    attach(head)
    memorize(head)


@pytest.mark.parametrize("bad", [-1, 0.5, torch.zeros(5, dtype=torch.int64)])
def test_bad_counts_are_refused(bad: object) -> None:
    head = early_head(4, 6, **OK)
    with pytest.raises(ValueError, match="counts must be integers"):
        head.reset_memory(bad)


def test_reset_parameters_and_loading_fill_the_buffers() -> None:
    head = allocated_head()
    head.reset_parameters()
    attach(head)
    saved = early_head(4, 6, **OK)
    memorize(saved)
    for assign in (False, True):
        loaded = allocated_head()
        loaded.load_state_dict(saved.state_dict(), assign=assign)
        attach(loaded)
        assert torch.equal(loaded.counts, saved.counts)


def test_a_state_saved_before_there_was_the_constant_is_valid() -> None:
    saved = early_head(4, 6, **OK)
    memorize(saved)
    state = saved.state_dict()
    del state["filled"]
    head = allocated_head()
    head.load_state_dict(state)
    attach(head)
    assert torch.equal(head.counts, saved.counts)


def test_a_state_with_garbage_is_refused_and_changes_nothing() -> None:
    head = early_head(4, 6, **OK)
    before = head.weight.detach().clone()
    with pytest.raises(ValueError, match="memory garbage"):
        head.load_state_dict(allocated_head().state_dict())
    assert torch.equal(head.weight, before)


def marked_by_transformers(*names: str) -> HebbianSoftmax:
    """Return a head as transformers leaves it that has loaded what is named, and allocated or initialised the rest."""
    head = allocated_head()
    head._is_hf_initialized = True
    loaded = early_head(4, 6, **OK)
    loaded.reset_memory(torch.arange(6))
    for name in names:
        tensor = head.get_buffer(name) if name != "weight" else head.weight
        tensor.data.copy_(loaded.state_dict()[name])
        tensor._is_hf_initialized = True
    return head


MEMORY = [name for name in early_head(4, 6, **OK).state_dict() if name != "weight"]


@pytest.mark.parametrize("use", ["attach", "deepcopy", "save"])
@pytest.mark.parametrize(
    ("names", "counts"),
    [
        (["weight"], [9] * 6),
        ([], [0] * 6),
        (["weight", *MEMORY], [0, 1, 2, 3, 4, 5]),
        (["weight", *(name for name in MEMORY if name != "filled")], [0, 1, 2, 3, 4, 5]),
        (["weight", *(name for name in MEMORY if name not in ("filled", "since_start"))], [0, 1, 2, 3, 4, 5]),
        ([name for name in MEMORY if name != "counts"], [0] * 6),
    ],
    ids=["plain checkpoint", "new rows", "whole", "saved without the constant", "version 0.1", "other classes"],
)
def test_transformers_says_what_it_has_loaded(names: list[str], counts: list[int], use: str) -> None:
    head = marked_by_transformers(*names)
    if use == "deepcopy":  # loses the marks on tensors
        head = copy.deepcopy(head)
    elif use == "save":
        state, head = head.state_dict(), early_head(4, 6, **OK)
        head.load_state_dict(state)
    attach(head)
    assert head.counts.tolist() == counts
    assert head.since_start.tolist() == (counts if "counts" in names and "since_start" not in names else [0] * 6)
    assert (head.calibration is None) == (counts != [9] * 6)  # rows with counts of their own were trained here
    assert not head.running.mean.any()


@pytest.mark.parametrize("kept", [["weight", "filled"], ["weight", "counts"], ["counts"], ["filled"]], ids=" ".join)
def test_a_part_of_a_state_does_not_vouch_for_the_rest(kept: list[str]) -> None:
    state = early_head(4, 6, **OK).state_dict()
    head = allocated_head()
    head.load_state_dict({name: state[name] for name in kept}, strict=False)
    with pytest.raises(RuntimeError, match="never filled"):
        attach(head)
    head = early_head(4, 6, **OK)
    head.load_state_dict({name: state[name] for name in kept}, strict=False)
    attach(head)


def test_averaged_states_are_valid() -> None:
    head = early_head(4, 6, **OK)
    state = head.state_dict()
    average = {name: value.clone() for name, value in state.items()}
    for step in range(20):
        decay = min(0.95, (1 + step) / (10 + step))
        for name, value in average.items():
            value.copy_(decay * value + (1 - decay) * state[name])
    head.load_state_dict(average)
    attach(head)


def test_a_head_emptied_after_attach_is_found_at_the_step() -> None:
    head = early_head(4, 6, **OK)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    head.attach(optimizer)
    head.to_empty(device="cpu")
    head.filled.zero_()
    head.loss(torch.randn(2, 4), torch.tensor([1, 2])).backward()
    with pytest.raises(RuntimeError, match="never filled"):
        optimizer.step()


def test_moving_and_casting_keep_the_constant() -> None:
    head = early_head(4, 6, **OK).double().bfloat16()
    attach(head)
    head.detach()
    head.to_empty(device="cpu")
    head.filled.zero_()
    with pytest.raises(RuntimeError, match="never filled"):
        attach(head)


def tied() -> tuple[HebbianSoftmax, nn.Embedding]:
    head, embedding = early_head(4, 6, **OK), nn.Embedding(6, 4)
    head.weight = embedding.weight
    return head, embedding


def resize(head: HebbianSoftmax, embedding: nn.Embedding, rows: int) -> None:
    """Resize a tied embedding as transformers does."""
    embedding.weight.data = torch.cat([embedding.weight.data, torch.randn(rows - 6, 4)])
    head.weight = embedding.weight
    head.out_features = embedding.num_embeddings = rows


@pytest.mark.parametrize("use", ["attach", "memorize", "loss", "targets", "add_classes"])
def test_counts_follow_a_tied_weight_that_was_resized(use: str) -> None:
    head, embedding = tied()
    memorize(head)
    resize(head, embedding, 8)
    h, y = torch.randn(2, 4), torch.tensor([7, 1])
    if use == "attach":
        attach(head)
    elif use == "memorize":
        head.memorize(h, y)
    elif use == "loss":
        with pytest.warns(UserWarning, match="not attached"):
            head.loss(h, y)
    elif use == "targets":
        with pytest.warns(UserWarning, match="not attached"), head.targets(y):
            head(h)
    else:
        head.add_classes(2)
    expected = [0, 1, 0, 0, 0, 0, 0, 0]
    if use == "memorize":
        expected = [0, 2, 0, 0, 0, 0, 0, 1]
    assert head.counts.tolist() == expected + [0, 0] * (use == "add_classes")
    assert head.num_classes == len(head.counts)


def test_a_weight_resized_under_an_optimizer_is_told() -> None:
    head, embedding = tied()
    attach(head)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    head.attach(optimizer, replace=True)
    resize(head, embedding, 8)
    h, y = torch.randn(2, 4), torch.tensor([7, 1])
    for call in (lambda: head.loss(h, y), lambda: head.remember(h, y), lambda: head.memorize(h, y)):
        with pytest.raises(RuntimeError, match="replace=True"):
            call()
    head.attach(torch.optim.SGD(head.parameters(), lr=0.1), replace=True)
    assert head.counts.numel() == 8
