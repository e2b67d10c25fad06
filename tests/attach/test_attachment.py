"""The bond with the optimizer: what it accepts, refuses and survives."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

from tests.attach.pending_lab import Lab
from tests.heads import attached_head, early_head, train

OK = {"gamma": 0.3, "limit": 9}


def test_lbfgs_and_an_optimizer_without_the_weight_are_refused() -> None:
    head, other = early_head(4, 6, **OK), nn.Linear(4, 6)
    with pytest.raises(ValueError, match=r"does not hold head\.weight"):
        head.attach(torch.optim.SGD(other.parameters(), lr=0.1))
    with pytest.raises(TypeError, match=r"must be a torch\.optim\.Optimizer, got Linear"):
        head.attach(other)
    with pytest.raises(TypeError, match="LBFGS"):
        head.attach(torch.optim.LBFGS(head.parameters()))
    assert head.attachment is None


def test_attaching_twice_is_refused_until_the_first_is_removed_or_gone() -> None:
    head, first = attached_head()
    for optimizer in (first, torch.optim.SGD(head.parameters(), lr=0.1)):
        with pytest.raises(RuntimeError, match="attached to an optimizer already"):
            head.attach(optimizer)
    train(head, first)
    assert head.counts.tolist() == [0, 1, 1, 0, 0, 0]  # once, not twice
    head.attachment.remove()
    second = torch.optim.SGD(head.parameters(), lr=0.1)
    head.attach(second)
    train(head, second)
    assert head.counts.tolist() == [0, 2, 2, 0, 0, 0]
    del second, optimizer
    gc.collect()
    third = torch.optim.SGD(head.parameters(), lr=0.1)
    head.attach(third)
    train(head, third)
    assert head.counts.tolist() == [0, 3, 3, 0, 0, 0]


def test_attaching_anew_with_replace_lets_go_of_the_old_optimizer() -> None:
    lab = Lab()
    lab.learn(1)
    optimizer = torch.optim.SGD(lab.model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match="replace=True"):
        lab.head.attach(optimizer)
    with pytest.raises(ValueError, match="does not hold"):
        lab.head.attach(torch.optim.SGD([torch.zeros(1)]), replace=True)
    assert lab.head.attachment is lab.handle
    handle = lab.head.attach(optimizer, replace=True)
    assert not lab.handle.active
    assert handle.active
    with torch.no_grad():
        lab.optimizer.step()
    assert int(lab.head.counts.sum()) == 0  # what waited for the old optimizer is forgotten
    lab.optimizer.zero_grad()
    lab.optimizer, lab.handle = optimizer, handle
    lab.step_writes(lab.learn(2))


def test_detach() -> None:
    lab = Lab()
    lab.learn(1)
    lab.head.detach()
    lab.head.detach()
    lab.optimizer.step()
    assert lab.head.attachment is None
    assert int(lab.head.counts.sum()) == 0


class Wrapper(torch.optim.Optimizer):
    """An optimizer that carries another, as accelerate's does: without the hooks of torch.optim.Optimizer."""

    def __init__(self, optimizer: object) -> None:
        self.optimizer = optimizer

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.optimizer.step()


class OtherWrapper:
    """Not an optimizer at all, as Lightning's."""

    def __init__(self, optimizer: object) -> None:
        self.optimizer = optimizer


def test_wrapped_optimizers_are_unwrapped() -> None:
    lab = Lab()
    wrapper = Wrapper(lab.optimizer)
    lab.handle = lab.head.attach(OtherWrapper(wrapper), replace=True)
    assert lab.handle.optimizer() is lab.optimizer
    batch = lab.learn(1, 2)
    before, grad = lab.head.weight.detach().clone(), lab.head.weight.grad
    wrapper.step()
    expected = lab.oracle.update(before - 0.1 * grad, batch[0].detach(), batch[1])
    torch.testing.assert_close(lab.head.weight.detach(), expected, rtol=1e-12, atol=1e-12)
    with pytest.raises(TypeError, match="has no step hooks"):
        lab.head.attach(Wrapper(None), replace=True)
    with pytest.raises(TypeError, match="must be a torch"):
        lab.head.attach(OtherWrapper(None), replace=True)


def test_a_weight_on_meta_or_computed_is_refused() -> None:
    head = early_head(4, 6, device="meta", **OK)
    with pytest.raises(ValueError, match="meta device"):
        head.attach(torch.optim.SGD(head.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="meta device"):
        head.memorize(torch.randn(1, 4), torch.tensor([1]))
    head = early_head(4, 6, **OK)
    nn.utils.parametrizations.weight_norm(head)
    with pytest.raises(TypeError, match="parametrizations"):
        head.attach(torch.optim.SGD(head.parameters(), lr=0.1))


class MasterCopy(torch.optim.Optimizer):
    """Keeps a float32 copy of each weight and writes it back, as mixed-precision and averaging optimizers do."""

    def __init__(self, parameters, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                master = self.state[parameter].setdefault("master", parameter.detach().float().clone())
                if parameter.grad is not None:
                    master -= group["lr"] * parameter.grad
                    parameter.copy_(master)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_optimizer_with_its_own_copy_of_the_weight_is_refused_at_its_first_step(dtype: torch.dtype) -> None:
    head, optimizer = attached_head(MasterCopy, dtype=dtype)
    with pytest.raises(RuntimeError, match="MasterCopy keeps its own copy of the weight"):
        train(head, optimizer)
    assert int(head.counts.sum()) == 0


def test_a_weight_replaced_after_attach_is_told() -> None:
    head, optimizer = attached_head()
    head.weight = nn.Parameter(torch.randn(6, 4))
    with pytest.raises(RuntimeError, match=r"replaced after head\.attach"):
        train(head, optimizer)


@pytest.mark.parametrize("copier", [copy.deepcopy, copy.copy, lambda head: pickle.loads(pickle.dumps(head))])
def test_copies_are_unattached_and_the_original_stays_attached(copier) -> None:
    head, optimizer = attached_head()
    head.loss(torch.randn(1, 4), torch.tensor([3])).backward()
    twin = copier(head)
    with pytest.warns(UserWarning, match="not attached"):
        twin.loss(torch.randn(1, 4), torch.tensor([4]))
    optimizer.step()
    assert head.counts.tolist() == [0, 0, 0, 1, 0, 0]
    new = torch.optim.SGD(twin.parameters(), lr=0.1)
    twin.attach(new)
    train(twin, new, (5,))
    assert int(twin.counts[5]) == 1
    assert "gamma=0.3" in repr(twin)


def test_copied_optimizers_do_not_write() -> None:
    head, optimizer = attached_head()
    twin = copy.deepcopy(optimizer)
    head.loss(torch.randn(1, 4), torch.tensor([3])).backward()
    twin.step()
    assert int(head.counts.sum()) == 0


def test_a_whole_model_is_copied_with_its_training() -> None:
    """deepcopy of (model, optimizer) together, as averaging and checkpointing code does."""
    head, optimizer = attached_head(torch.optim.Adam)
    train(head, optimizer)
    twin, twin_optimizer = copy.deepcopy((head, optimizer))
    twin.attach(twin_optimizer)
    for h, o in ((head, optimizer), (twin, twin_optimizer)):
        torch.manual_seed(1)
        train(h, o)
    assert torch.equal(head.weight, twin.weight)


def test_tied_to_an_embedding() -> None:
    embedding = nn.Embedding(6, 4)
    head = early_head(4, 6, write="literal", **OK)
    head.weight = embedding.weight
    model = nn.ModuleList([embedding, head])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    head.attach(optimizer)
    h = embedding(torch.tensor([0])) * 2
    head.loss(h, torch.tensor([5])).backward()
    optimizer.step()
    assert torch.equal(embedding.weight[5], h[0])  # the input embedding is written too


def test_parameter_groups_decay_and_clipping() -> None:
    """The write lands on top of whatever the step did, in whichever group the weight is."""
    net, head = nn.Linear(3, 4), early_head(4, 6, bias=True, write="literal", **OK)
    optimizer = torch.optim.AdamW(
        [{"params": net.parameters()}, {"params": [head.bias]}, {"params": [head.weight], "weight_decay": 0.5}], lr=0.1
    )
    head.attach(optimizer)
    h = net(torch.randn(2, 3))
    head.loss(h, torch.tensor([1, 2])).backward()
    nn.utils.clip_grad_norm_([*net.parameters(), *head.parameters()], 1e-2)
    bias = head.bias.detach().clone()
    optimizer.step()
    assert torch.equal(head.weight[[1, 2]], h)
    assert not torch.equal(head.bias, bias)  # the bias is the optimizer's alone


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_writes_full_precision(dtype: torch.dtype) -> None:
    net, head = nn.Linear(3, 4), early_head(4, 6, write="literal", **OK)
    optimizer = torch.optim.SGD([*net.parameters(), *head.parameters()], lr=0.1)
    head.attach(optimizer)
    with torch.autocast("cpu", dtype):
        h = net(torch.randn(2, 3))
        loss = head.loss(h, torch.tensor([1, 2]))
    assert h.dtype == dtype
    loss.backward()
    optimizer.step()
    assert head.weight.dtype == torch.float32
    assert torch.equal(head.weight[[1, 2]], h.float())
    assert head.counts.tolist() == [0, 1, 1, 0, 0, 0]


def test_fp16_autocast_with_a_scaler_learns() -> None:
    net, head = nn.Linear(3, 4), early_head(4, 6, **OK)
    optimizer = torch.optim.SGD([*net.parameters(), *head.parameters()], lr=0.1)
    head.attach(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)  # too large at first: skipped until it has come down
    steps = 0
    for _ in range(60):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = head.loss(net(torch.randn(2, 3)), torch.tensor([1, 2]))
        scaler.scale(loss).backward()
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        steps += scaler.get_scale() >= before
    assert 0 < steps < 60
    assert head.counts.tolist() == [0, steps, steps, 0, 0, 0]


def test_changing_dtype_mid_training() -> None:
    head, optimizer = attached_head(write="literal")
    train(head, optimizer)
    head.double()
    train(head, optimizer, (2, 3))
    assert head.counts.tolist() == [0, 1, 2, 1, 0, 0]
    head.loss(torch.randn(1, 4).double(), torch.tensor([4])).backward()  # pending across the change
    head.bfloat16()
    head.weight.grad = head.weight.grad.bfloat16()
    optimizer.step()
    train(head, optimizer, (5,))
    assert head.counts.tolist() == [0, 1, 2, 1, 1, 1]


def test_nothing_is_kept_alive_by_a_cycle() -> None:
    gc.collect()
    gc.disable()
    try:
        head, optimizer = attached_head()
        train(head, optimizer)
        gone = [weakref.ref(head), weakref.ref(head.weight), weakref.ref(optimizer)]
        del head, optimizer
        assert [reference() for reference in gone] == [None, None, None]
    finally:
        gc.enable()


def test_attaching_again_and_again_leaves_one_hook() -> None:
    head = early_head(4, 6, **OK)
    for _ in range(5):
        optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
        handle = head.attach(optimizer)
        train(head, optimizer)
        del optimizer
        gc.collect()
        assert not handle.active
    assert len(head.weight._backward_hooks) == 1
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    head.attach(optimizer).remove()
    assert len(head.weight._backward_hooks) == 0
    assert head.attachment is None


def test_a_head_whose_optimizer_is_gone_says_so() -> None:
    head = early_head(4, 6, **OK)
    head.attach(torch.optim.SGD(head.parameters(), lr=0.1))
    gc.collect()
    with pytest.warns(UserWarning, match="the attached optimizer no longer exists, so nothing is memorised; keep the"):
        head.loss(torch.randn(1, 4), torch.tensor([1])).backward()


@pytest.mark.parametrize("frozen", [True, False])
def test_a_backward_after_remove_changes_nothing(frozen: bool) -> None:
    head, optimizer = attached_head()
    head.attachment.remove()
    head.weight.requires_grad_(not frozen)
    handle = head.attach(optimizer)
    loss = head.loss(torch.randn(1, 4, requires_grad=True), torch.tensor([1]))
    handle.remove()
    loss.backward()
    assert len(handle.pending) == 0


def test_a_model_that_keeps_its_handle_can_be_saved_and_copied(tmp_path) -> None:
    head, _optimizer = attached_head()
    model = nn.Sequential(head)
    model.handle = head.attachment
    torch.save(model, tmp_path / "model.pt")
    for twin in (copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)):
        assert not twin.handle.active
        twin.handle.remove()


@pytest.mark.parametrize("optimizer_too", [False, True])
def test_a_loss_may_outlive_its_head(optimizer_too: bool) -> None:
    head, optimizer = attached_head()
    weight = head.weight
    loss = head.loss(torch.randn(2, 4), torch.tensor([1, 2]))
    del head
    if optimizer_too:
        del optimizer
    loss.backward()
    assert weight.grad is not None


def test_a_tied_weight_that_does_not_fit_is_refused() -> None:
    head = early_head(4, 6, **OK)
    head.weight = nn.Embedding(5, 4).weight
    with pytest.raises(ValueError, match=r"weight has shape \(5, 4\).*must have \(6, 4\)"):
        head.attach(torch.optim.SGD(head.parameters(), lr=0.1))
    with pytest.raises(ValueError, match=r"must have \(6, 4\)"):
        head.memorize(torch.randn(1, 4), torch.tensor([5]))


class Shrinking(torch.optim.SGD):
    """Does more after the step of its parent, whose hooks run within."""

    def step(self, closure: object = None) -> None:
        super().step()
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.mul_(0.5)


def test_the_write_comes_after_the_whole_step_of_a_subclass() -> None:
    torch.optim.SGD([torch.zeros(1)], lr=0.1)  # from now on SGD.step itself runs hooks
    head, optimizer = attached_head(Shrinking, write="literal")
    h = torch.randn(1, 4)
    head.loss(h, torch.tensor([3])).backward()
    optimizer.step()
    assert torch.equal(head.weight[3], h[0])
    assert int(head.counts[3]) == 1
