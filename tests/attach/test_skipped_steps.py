"""A step that did not happen, or a backward pass that failed, writes nothing and loses nothing."""

from __future__ import annotations

import pytest
import torch

from tests.attach.pending_lab import CLASSES, FEATURES, TO_NONE, Lab
from tests.heads import early_head


def fail(*_: object) -> None:
    """Fail as a hook."""
    raise RuntimeError("failed")


@TO_NONE
def test_a_step_that_the_scaler_skips_writes_nothing_and_the_next_good_one_does(to_none: bool) -> None:
    lab = Lab(dtype=torch.float32)
    lab.model.float()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for bad in (True, False, True, False):
        h, y = lab.model[0](torch.randn(2, 3)), torch.tensor([1, 2])
        lab.optimizer.zero_grad(set_to_none=to_none)
        scaler.scale(lab.head.loss(h, y)).backward()
        if bad:
            lab.model[0].weight.grad[0, 0] = torch.inf
        before, counts = lab.head.weight.detach().clone(), lab.head.counts.clone()
        scaler.step(lab.optimizer)
        scaler.update()
        if bad:
            assert torch.equal(lab.head.weight, before)
            assert torch.equal(lab.head.counts, counts)
        else:
            assert lab.head.counts.tolist() == [0, *[int(counts[1]) + 1] * 2, 0, 0, 0]


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_a_fused_optimizers_own_skip_writes_nothing(optimizer: type[torch.optim.Optimizer]) -> None:
    head = early_head(FEATURES, CLASSES, gamma=0.3, limit=9)
    fused = optimizer(head.parameters(), lr=0.1, fused=True)
    head.attach(fused)
    for inf, seen in ((1.0, 0), (0.0, 1), (1.0, 1), (0.0, 2)):
        fused.zero_grad()
        head.loss(torch.randn(1, FEATURES), torch.tensor([2])).backward()
        before = head.weight.detach().clone()
        fused.grad_scale, fused.found_inf = torch.tensor(1.0), torch.tensor(inf)  # as GradScaler.step sets them
        fused.step()
        del fused.grad_scale, fused.found_inf
        assert int(head.counts[2]) == seen
        assert torch.equal(head.weight, before) == bool(inf)


def test_the_dummy_step_of_distributed_checkpoint_writes_nothing() -> None:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    lab = Lab()
    lab.optimizer = torch.optim.Adam(lab.model.parameters(), lr=0.1)
    lab.handle.remove()
    lab.handle = lab.head.attach(lab.optimizer)
    lab.learn(1, 2)
    lab.optimizer.zero_grad()  # the dummy step is made only where no gradient is
    before = lab.head.weight.detach().clone()
    state = get_optimizer_state_dict(lab.model, lab.optimizer)
    assert state["state"]  # the dummy step happened
    assert torch.equal(lab.head.weight, before)
    assert int(lab.head.counts.sum()) == 0


@TO_NONE
def test_an_exception_in_backward_and_then_going_on(to_none: bool) -> None:
    lab = Lab()
    lab.step_writes(lab.learn(1))
    lab.optimizer.zero_grad(set_to_none=to_none)
    h, y = lab.batch(1, 2)
    h.register_hook(fail)
    with pytest.raises(RuntimeError, match="failed"):
        lab.head.loss(h, y).backward()
    lab.optimizer.zero_grad(set_to_none=to_none)
    lab.step_writes(lab.learn(3))


def test_an_exception_before_the_weight_got_its_gradient_and_then_going_on() -> None:
    lab = Lab()
    hook = lab.head.weight.register_hook(fail)
    with pytest.raises(RuntimeError, match="failed"):
        lab.learn(1, 2)
    hook.remove()
    lab.optimizer.zero_grad()
    lab.step_writes(lab.learn(3))


def test_an_exception_in_the_step_writes_nothing() -> None:
    lab = Lab()
    hook = lab.optimizer.register_step_pre_hook(fail)
    batch = lab.learn(1, 2)
    before = lab.head.weight.detach().clone()
    with pytest.raises(RuntimeError, match="failed"):
        lab.optimizer.step()
    assert torch.equal(lab.head.weight, before)
    hook.remove()
    lab.step_writes(batch)  # the gradient is still there, so the next real step completes it


def test_backward_again_after_it_failed() -> None:
    lab = Lab()
    h, y = lab.batch(2)
    hook = h.register_hook(fail)
    loss = lab.head.loss(h, y)
    with pytest.raises(RuntimeError, match="failed"):
        loss.backward(retain_graph=True)
    hook.remove()
    lab.optimizer.zero_grad()
    loss.backward()
    lab.step_writes((h, y))
