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

from hebbian_softmax import HebbianSoftmax, pending
from tests.oracle import Oracle

FEATURES, CLASSES = 4, 6
TO_NONE = pytest.mark.parametrize("to_none", [True, False], ids=["to-none", "in-place"])


class Lab:
    """A head, its optimizer, and the oracle's rows beside it."""

    def __init__(self, lr: float = 0.1, **options: object) -> None:
        settings = {"gamma": 0.3, "limit": 100, "scale": 1.0, "center": False, "dtype": torch.float64} | options
        self.head = HebbianSoftmax(FEATURES, CLASSES, **settings)
        self.model = nn.Sequential(nn.Linear(3, FEATURES).double(), self.head)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr)
        self.handle = self.head.attach(self.optimizer)
        self.oracle = Oracle(CLASSES, 0.3, 100)

    def batch(self, *labels: int, grad: bool = True) -> tuple[Tensor, Tensor]:
        x = torch.randn(len(labels), 3, dtype=torch.float64)
        h = self.model[0](x)
        return (h if grad else h.detach()), torch.tensor(labels)

    def step_writes(self, *batches: tuple[Tensor, Tensor], step: bool = True) -> None:
        """Step, and check that just these batches, as one, were written on top of the gradient step."""
        before = self.head.weight.detach().clone()
        grad = self.head.weight.grad
        after_step = before if grad is None else before - self.optimizer.param_groups[0]["lr"] * grad
        if step:
            self.optimizer.step()
        expected = after_step
        if batches:
            h = torch.cat([h.detach() for h, _ in batches])
            expected = self.oracle.update(after_step, h, torch.cat([y for _, y in batches]))
        torch.testing.assert_close(self.head.weight.detach(), expected, rtol=1e-12, atol=1e-12)
        assert self.head.counts.tolist() == self.oracle.counts
        assert len(self.handle.pending) == 0


@TO_NONE
def test_zero_grad_before_the_loss(to_none: bool) -> None:
    lab = Lab()
    for labels in ((1, 2), (2, 3)):
        lab.optimizer.zero_grad(set_to_none=to_none)
        batch = lab.batch(*labels)
        lab.head.loss(*batch).backward()
        lab.step_writes(batch)


@TO_NONE
def test_zero_grad_between_loss_and_backward(to_none: bool) -> None:
    lab = Lab()
    for labels in ((1, 2), (2, 3)):
        batch = lab.batch(*labels)
        loss = lab.head.loss(*batch)
        lab.optimizer.zero_grad(set_to_none=to_none)
        loss.backward()
        lab.step_writes(batch)


@TO_NONE
def test_zero_grad_after_the_step(to_none: bool) -> None:
    lab = Lab()
    for labels in ((1, 2), (2, 3)):
        batch = lab.batch(*labels)
        lab.head.loss(*batch).backward()
        lab.step_writes(batch)
        lab.optimizer.zero_grad(set_to_none=to_none)


@TO_NONE
@pytest.mark.parametrize("whose", ["optimizer", "model", "by hand"])
def test_zero_grad_between_backward_and_step_drops_the_batch(to_none: bool, whose: str) -> None:
    lab = Lab()
    lab.head.loss(*lab.batch(1, 2)).backward()
    clear(lab, to_none, whose)
    lab.step_writes()
    batch = lab.batch(3)
    lab.head.loss(*batch).backward()
    lab.step_writes(batch)


@TO_NONE
@pytest.mark.parametrize("whose", ["optimizer", "model", "by hand"])
@pytest.mark.parametrize("then", ["loss", "remember", "not remembered", "plain"])
def test_a_batch_whose_gradient_was_cleared_does_not_join_the_next(to_none: bool, whose: str, then: str) -> None:
    lab = Lab()
    lab.head.loss(*lab.batch(1, 2)).backward()
    clear(lab, to_none, whose)
    h, y = lab.batch(3, 3, 4)
    if then == "loss":
        lab.head.loss(h, y).backward()
    elif then == "not remembered":
        lab.head.loss(h, y, remember=False).backward()
    else:
        if then == "remember":
            lab.head.remember(h, y)
        nn.functional.cross_entropy(lab.head(h), y).backward()
    lab.step_writes(*([(h, y)] if then in ("loss", "remember") else []))


def clear(lab: Lab, to_none: bool, whose: str) -> None:
    if whose == "optimizer":
        lab.optimizer.zero_grad(set_to_none=to_none)
    elif whose == "model":
        lab.model.zero_grad(set_to_none=to_none)
    elif to_none:
        lab.head.weight.grad = None
    else:
        lab.head.weight.grad.zero_()


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
    head = HebbianSoftmax(FEATURES, CLASSES, gamma=0.3, limit=9)
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
    lab.head.loss(*lab.batch(1, 2)).backward()
    lab.optimizer.zero_grad()  # the dummy step is made only where no gradient is
    before = lab.head.weight.detach().clone()
    state = get_optimizer_state_dict(lab.model, lab.optimizer)
    assert state["state"]  # the dummy step happened
    assert torch.equal(lab.head.weight, before)
    assert int(lab.head.counts.sum()) == 0


def test_loss_without_backward() -> None:
    lab = Lab()
    lab.head.loss(*lab.batch(1, 2))
    batch = lab.batch(3)
    lab.head.loss(*batch).backward()
    lab.step_writes(batch)


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


@TO_NONE
def test_an_exception_in_backward_and_then_going_on(to_none: bool) -> None:
    lab = Lab()
    batch = lab.batch(1)
    lab.head.loss(*batch).backward()
    lab.step_writes(batch)
    lab.optimizer.zero_grad(set_to_none=to_none)

    def fail(grad: Tensor) -> None:
        raise RuntimeError("backbone failed")

    h, y = lab.batch(1, 2)
    h.register_hook(fail)
    with pytest.raises(RuntimeError, match="backbone failed"):
        lab.head.loss(h, y).backward()
    lab.optimizer.zero_grad(set_to_none=to_none)
    batch = lab.batch(3)
    lab.head.loss(*batch).backward()
    lab.step_writes(batch)


def test_an_exception_before_the_weight_got_its_gradient_and_then_going_on() -> None:
    lab = Lab()

    def fail(grad: Tensor) -> None:
        raise RuntimeError("no gradient")

    hook = lab.head.weight.register_hook(fail)
    with pytest.raises(RuntimeError, match="no gradient"):
        lab.head.loss(*lab.batch(1, 2)).backward()
    hook.remove()
    lab.optimizer.zero_grad()
    batch = lab.batch(3)
    lab.head.loss(*batch).backward()
    lab.step_writes(batch)


def test_an_exception_in_the_step_writes_nothing() -> None:
    lab = Lab()

    def fail(*_: object) -> None:
        raise RuntimeError("step failed")

    hook = lab.optimizer.register_step_pre_hook(fail)
    batch = lab.batch(1, 2)
    lab.head.loss(*batch).backward()
    before = lab.head.weight.detach().clone()
    with pytest.raises(RuntimeError, match="step failed"):
        lab.optimizer.step()
    assert torch.equal(lab.head.weight, before)
    hook.remove()
    lab.step_writes(batch)  # the gradient is still there, so the next real step completes it


def test_several_losses_a_step() -> None:
    lab = Lab()
    first, second, third = lab.batch(1, 2), lab.batch(2, 3), lab.batch(2, grad=False)
    (lab.head.loss(*first) + 2 * lab.head.loss(*second)).backward()
    lab.head.loss(*third).backward()
    lab.step_writes(first, second, third)


def test_clipping_and_scaling_the_gradient_keep_what_is_pending() -> None:
    lab = Lab()
    batch = lab.batch(1, 2)
    lab.head.loss(*batch).backward()
    nn.utils.clip_grad_norm_(lab.model.parameters(), 1e-3)
    lab.step_writes(batch)
    lab.optimizer.zero_grad()
    batch = lab.batch(2, 4)
    lab.head.loss(*batch).backward()
    lab.head.weight.grad = lab.head.weight.grad * 0.5
    lab.step_writes(batch)


def test_a_saturated_gradient_is_not_a_cleared_one() -> None:
    """Probability 1 for the target: its row gets no gradient, others get tiny ones, and the batch still counts."""
    lab = Lab(lr=0.0)
    with torch.no_grad():
        lab.head.weight.zero_()
        lab.head.weight[2, 0] = 50.0
    h = torch.tensor([[1.0, 0, 0, 0]], dtype=torch.float64)
    lab.head.loss(h, torch.tensor([2])).backward()
    assert float(lab.head.weight.grad[2].abs().max()) < 1e-15
    nn.utils.clip_grad_norm_(lab.head.parameters(), 1.0)
    lab.step_writes((h, torch.tensor([2])))


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
    head = HebbianSoftmax(FEATURES, CLASSES, gamma=0.3, limit=9)
    h, y = torch.randn(2, FEATURES), torch.tensor([1, 2])
    with pytest.warns(UserWarning, match=r"head\.attach\(optimizer\)") as caught:
        loss = head.loss(h, y)
    assert caught[0].filename == __file__
    head.loss(h, y).backward()  # a second warning would be an error
    head.remember(h, y)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    head.attach(optimizer)
    loss.backward()
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


def test_memory_does_not_grow_when_nobody_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending, "_FOLD_ROWS", 16)
    lab = Lab()
    batches = []
    for _ in range(40):
        batches.append(lab.batch(*torch.randint(CLASSES, (5,)).tolist()))
        lab.head.loss(*batches[-1]).backward()
        held = sum(pending._rows(entry) for entry in lab.handle.pending._entries)
        assert held <= 16
    lab.step_writes(*batches)


def test_a_step_after_remove_writes_nothing_and_pending_is_forgotten() -> None:
    lab = Lab()
    lab.head.loss(*lab.batch(1, 2)).backward()
    lab.handle.remove()
    lab.handle.remove()
    lab.step_writes()
    with pytest.warns(UserWarning, match="not attached"):
        lab.head.loss(*lab.batch(1)).backward()
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
        lab.head.loss(*lab.batch(step)).backward()
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


def test_backward_again_after_its_gradient_was_cleared() -> None:
    lab = Lab()
    batch = lab.batch(2, grad=False)
    loss = lab.head.loss(*batch)
    loss.backward(retain_graph=True)
    lab.optimizer.zero_grad()
    loss.backward(retain_graph=True)
    lab.step_writes(batch)
    lab.optimizer.zero_grad()
    loss.backward()  # written once already
    lab.step_writes()


def test_backward_again_after_it_failed() -> None:
    lab = Lab()
    h, y = lab.batch(2)
    failing = [True]

    def fail_once(grad: Tensor) -> None:
        if failing.pop():
            raise RuntimeError("backbone failed")

    h.register_hook(fail_once)
    loss = lab.head.loss(h, y)
    with pytest.raises(RuntimeError, match="backbone failed"):
        loss.backward(retain_graph=True)
    failing.append(False)
    lab.optimizer.zero_grad()
    loss.backward()
    lab.step_writes((h, y))


def test_folding_changes_nothing_but_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for rows in (4, 10_000):
        monkeypatch.setattr(pending, "_FOLD_ROWS", rows)
        torch.manual_seed(5)
        lab = Lab(scale="match", center=True)
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


def test_activations_without_a_gradient_yet_survive_folding_and_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """autograd.grad leaves weight.grad alone: what it reached waits until a gradient is there to step with."""
    monkeypatch.setattr(pending, "_FOLD_ROWS", 1)
    lab = Lab()
    first, second = lab.batch(1, 2), lab.batch(3, 3)
    grads = [torch.autograd.grad(lab.head.loss(*batch), lab.head.weight)[0] for batch in (first, second)]
    lab.optimizer.step()  # no gradient: no step of this weight
    assert int(lab.head.counts.sum()) == 0
    lab.head.weight.grad = sum(grads)
    lab.step_writes(first, second)
