"""When an activation becomes pending, and what ends that (the fourth decided semantics).

Every test trains a literal head and asks two things of it: which activations were counted, and that the rows are
those the oracle writes for exactly these.
"""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.attach.pending_lab import CLASSES, FEATURES, Lab
from tests.heads import early_head


def test_loss_without_backward() -> None:
    lab = Lab()
    lab.head.loss(*lab.batch(1, 2))
    lab.step_writes(lab.learn(3))


def test_nothing_pending_nothing_written() -> None:
    lab = Lab()
    lab.head.weight.grad = torch.randn_like(lab.head.weight)
    lab.step_writes()


def test_retain_graph_twice_is_once() -> None:
    lab = Lab()
    batch = lab.batch(1, 1, 2)
    loss = lab.head.loss(*batch)
    loss.backward(retain_graph=True)
    loss.backward()
    lab.step_writes(batch)


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_around_the_loss(reentrant: bool) -> None:
    lab = Lab()
    for labels in ((1, 2, 2), (2, 5)):
        h, y = lab.batch(*labels)
        checkpoint(lab.head.loss, h, y, use_reentrant=reentrant).backward()
        lab.step_writes((h, y))
        lab.optimizer.zero_grad()


def test_several_losses_a_step() -> None:
    lab = Lab()
    first, second, third = lab.batch(1, 2), lab.batch(2, 3), lab.batch(2, grad=False)
    (lab.head.loss(*first) + 2 * lab.head.loss(*second)).backward()
    lab.head.loss(*third).backward()
    lab.step_writes(first, second, third)


def test_gradients_by_autograd_grad_and_assigned_by_hand() -> None:
    lab = Lab()
    first, second = lab.batch(1, 2), lab.batch(3)
    grads = [torch.autograd.grad(lab.head.loss(*batch), lab.head.weight)[0] for batch in (first, second)]
    lab.head.weight.grad = grads[0] + grads[1]
    lab.step_writes(first, second)


def test_nothing_becomes_pending_in_eval_or_without_grad() -> None:
    lab = Lab()
    h, y = lab.batch(1, 2)
    lab.head.eval()
    (lab.head.loss(h, y) + lab.head(h).sum()).backward()
    lab.head.remember(h, y)
    lab.head.train()
    with torch.no_grad():
        lab.head.loss(h, y)
        lab.head.remember(h, y)
    lab.head.loss(h.detach(), y, remember=False).backward()
    lab.step_writes()


def test_an_unattached_head_warns_once_and_remembers_nothing() -> None:
    head = early_head(FEATURES, CLASSES, gamma=0.3, limit=9)
    h, y = torch.randn(2, FEATURES), torch.tensor([1, 2])
    with pytest.warns(UserWarning, match=r"head\.attach\(optimizer\)") as caught:
        loss = head.loss(h, y)
    assert caught[0].filename == __file__
    head.loss(h, y).backward()  # a second warning would be an error
    head.remember(h, y)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    head.attach(optimizer)
    loss.backward()
    with pytest.warns(UserWarning, match="nothing was remembered"):
        optimizer.step()
    assert int(head.counts.sum()) == 0


def test_a_closure_evaluated_once_is_a_step() -> None:
    lab = Lab(lr=0.0)
    batch = lab.batch(1, 2)

    def closure() -> Tensor:
        lab.optimizer.zero_grad()
        loss = lab.head.loss(*batch)
        loss.backward()
        return loss

    lab.optimizer.step(closure)
    lab.step_writes(batch, step=False)


def test_memory_does_not_grow_when_nobody_backpropagates() -> None:
    lab = Lab()
    alive = []
    for _ in range(5):
        h, y = lab.batch(1, 2)
        alive.append(weakref.ref(h))
        loss = lab.head.loss(h, y)
        lab.head.remember(h, y)
        lab.head.remember(h.detach(), y)
    del h, y, loss
    gc.collect()
    assert [ref() for ref in alive] == [None] * 5


def test_memory_does_not_grow_when_nobody_steps() -> None:
    lab = Lab()
    lab.handle.pending.fold_rows = 16
    batches = []
    for _ in range(40):
        batches.append(lab.learn(*torch.randint(CLASSES, (5,)).tolist()))
        assert lab.handle.pending.rows() <= 16
    lab.step_writes(*batches)


def test_a_step_after_remove_writes_nothing_and_pending_is_forgotten() -> None:
    lab = Lab()
    lab.learn(1, 2)
    lab.handle.remove()
    lab.handle.remove()
    lab.step_writes()
    with pytest.warns(UserWarning, match="not attached"):
        lab.learn(1)
    lab.handle = lab.head.attach(lab.optimizer)
    batch = lab.batch(3)
    lab.optimizer.zero_grad()
    lab.head.loss(*batch).backward()
    lab.step_writes(batch)


def test_buffers_filled_anew_do_not_change_what_is_pending() -> None:
    lab = Lab(lr=0.0)
    h, y = torch.empty(1, FEATURES, dtype=torch.float64), torch.empty(1, dtype=torch.int64)
    batches = []
    for value in (1, 2):
        h.fill_(value)
        y.fill_(value)
        batches.append((h.clone(), y.clone()))
        lab.head.loss(h, y).backward()
    h.zero_()
    lab.step_writes(*batches)


@pytest.mark.parametrize("kind", ["loss", "remember"])
def test_an_activation_that_the_step_itself_changes(kind: str) -> None:
    lab = Lab(lr=0.0)
    h = nn.Parameter(torch.ones(1, FEATURES, dtype=torch.float64))
    lab.optimizer.add_param_group({"params": [h], "lr": 1.0})
    before = (h.detach().clone(), torch.tensor([3]))
    if kind == "loss":
        lab.head.loss(h, before[1]).backward()
    else:
        for _ in range(3):
            lab.head.remember(h, before[1])  # the first two are never backpropagated
            logits = lab.head(h)
        assert not h._backward_hooks
        lab.oracle.rate = lambda count, n: 1.0
        nn.functional.cross_entropy(logits, before[1]).backward()
    h.grad.fill_(5.0)
    lab.optimizer.step()
    assert float(h.detach()[0, 0]) == -4
    assert torch.equal(lab.head.weight[3], before[0][0])


def test_an_optimizer_that_steps_within_backward() -> None:
    lab = Lab(lr=0.0)

    def step_now(_: Tensor) -> None:
        lab.optimizer.step()
        lab.optimizer.zero_grad()

    lab.head.weight.register_post_accumulate_grad_hook(step_now)
    for step in range(3):
        lab.learn(step)
        assert lab.head.counts.tolist() == [1] * (step + 1) + [0] * (CLASSES - step - 1)


def test_a_gradient_that_passes_the_weight_by_makes_nothing_pending() -> None:
    lab = Lab()
    h, y = lab.batch(1, 2)
    lab.head.remember(h, y)
    nn.functional.cross_entropy(lab.head(h), y)  # discarded
    h.square().sum().backward()  # an auxiliary loss of h alone
    lab.step_writes()
    lab.optimizer.zero_grad()
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    (attack,) = torch.autograd.grad(lab.head.loss(lab.model[0](x), y), x)
    h = lab.model[0](x.detach() + 0.1 * attack.sign())
    lab.head.loss(h, y).backward()
    lab.step_writes((h, y))  # the attacked example, not the clean one too


def test_folding_changes_nothing_but_memory() -> None:
    results = []
    for rows in (4, 10_000):
        torch.manual_seed(5)
        lab = Lab(write="centred")
        lab.handle.pending.fold_rows = rows
        for _ in range(4):
            lab.optimizer.zero_grad()
            for _ in range(5):
                h, y = lab.batch(*torch.randint(CLASSES, (3,)).tolist(), grad=False)
                h[0, 0] = torch.nan if float(h[0, 1]) > 0 else h[0, 0]
                lab.head.loss(torch.nan_to_num(h), y, remember=False).backward()
                lab.head.remember(h, y)
                (lab.head(h) * torch.isfinite(h).all(1, keepdim=True)).nan_to_num().sum().backward()
                lab.head.weight.grad.nan_to_num_()
            lab.optimizer.step()
        results.append({name: value.clone() for name, value in lab.head.state_dict().items()})
    assert int(results[0]["nonfinite_count"]) > 0
    for name, value in results[1].items():
        torch.testing.assert_close(results[0][name], value, rtol=1e-10, atol=1e-10)


def test_activations_without_a_gradient_yet_survive_folding_and_a_step() -> None:
    """autograd.grad leaves weight.grad alone: what it reached waits until a gradient is there to step with."""
    lab = Lab()
    lab.handle.pending.fold_rows = 1
    first, second = lab.batch(1, 2), lab.batch(3, 3)
    grads = [torch.autograd.grad(lab.head.loss(*batch), lab.head.weight)[0] for batch in (first, second)]
    lab.optimizer.step()  # no gradient: no step of this weight
    assert int(lab.head.counts.sum()) == 0
    lab.head.weight.grad = sum(grads)
    lab.step_writes(first, second)


def test_a_loss_that_outlives_its_head_is_not_folded() -> None:
    head = early_head(4, 5, gamma=0.1, limit=9)
    weight = head.weight
    optimizer = torch.optim.SGD([weight], lr=0.1)
    head.attach(optimizer).pending.fold_rows = 3
    loss = head.loss(torch.randn(8, 4), torch.arange(8) % 5)
    del head
    gc.collect()
    loss.backward()
    optimizer.step()
    assert weight.grad is not None
