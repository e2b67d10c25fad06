"""``with head.targets(y):`` around any model that ends in the head."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hebbian_softmax.attach import targets as target_context
from tests.attach.pending_lab import CLASSES, FEATURES, Lab
from tests.heads import early_head


class Loop:
    """A model that ends in the head, and the loop that users write around it."""

    def __init__(self, lab: Lab, forward: Callable[[Tensor], Tensor] | None = None) -> None:
        self.lab, self.forward = lab, forward or lab.model

    def backward(self, *labels: int, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        """Backpropagate a batch, and return its activations and targets."""
        x, y = torch.randn(len(labels), 3, dtype=torch.float64), torch.tensor(labels)
        with self.lab.head.targets(y):
            loss = F.cross_entropy(self.forward(x), y)
        (loss * scale).backward()
        return self.lab.model[0](x), y


def test_one_call_in_the_context_is_memorised() -> None:
    lab = Lab()
    loop = Loop(lab)
    for labels in ((1, 1, 2), (2, 5), (1, 0)):
        lab.step_writes(loop.backward(*labels))
        lab.optimizer.zero_grad()


def test_it_equals_loss() -> None:
    torch.manual_seed(0)
    one, other = Lab(write="centred"), Lab(write="centred")
    other.model.load_state_dict(one.model.state_dict())
    x, y = torch.randn(7, 3, dtype=torch.float64), torch.tensor([1, 2, 1, 0, 0, 5, 1])
    for _ in range(3):
        for lab in (one, other):
            lab.optimizer.zero_grad()
        one.head.loss(one.model[0](x), y).backward()
        with other.head.targets(y):
            loss = F.cross_entropy(other.model(x), y)
        loss.backward()
        one.optimizer.step()
        other.optimizer.step()
    torch.testing.assert_close(one.head.weight, other.head.weight, rtol=1e-12, atol=1e-12)
    assert torch.equal(one.head.counts, other.head.counts)


def test_accumulation_and_a_batch_that_is_skipped() -> None:
    lab = Lab()
    loop = Loop(lab)
    first = loop.backward(1, 2, scale=0.5)
    with lab.head.targets(torch.tensor([5])):
        F.cross_entropy(lab.model(torch.randn(1, 3, dtype=torch.float64)), torch.tensor([5]))  # no backward pass
    second = loop.backward(2, 3, scale=0.5)
    lab.step_writes(first, second)
    loop.backward(4)
    lab.optimizer.zero_grad()
    lab.step_writes(loop.backward(3))


def test_backward_inside_the_context_and_twice() -> None:
    lab = Lab()
    x, y = torch.randn(2, 3, dtype=torch.float64), torch.tensor([1, 2])
    with lab.head.targets(y):
        loss = F.cross_entropy(lab.model(x), y)
        loss.backward(retain_graph=True)
        loss.backward()
    lab.step_writes((lab.model[0](x), y))


def test_frozen_features_and_a_frozen_weight() -> None:
    for frozen in (False, True):
        lab = Lab(frozen=frozen)
        h, y = lab.batch(1, 2, grad=frozen)
        before = h.detach().clone()
        with lab.head.targets(y):
            loss = F.cross_entropy(lab.head(h), y)
        loss.backward()
        lab.step_writes((before, y))


def test_activations_of_more_dimensions_and_shifted_labels() -> None:
    lab = Lab()
    x = torch.randn(2, 3, 3, dtype=torch.float64)
    labels = torch.tensor([[4, 1, 2], [5, -100, 3]])
    with lab.head.targets(labels, shift=True):
        logits = lab.model(x)
    F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()).backward()
    h = lab.model[0](x)
    lab.step_writes((torch.stack([h[0, 0], h[0, 1], h[1, 1]]), torch.tensor([1, 2, 3])))


@pytest.mark.parametrize("way", ["targets", "remember", "memorize"])
def test_soft_targets_are_memorised_for_the_class_of_most_probability(way: str) -> None:
    lab = Lab(lr=0.0)
    h, _ = lab.batch(0, 0, 0)
    soft = torch.zeros(3, CLASSES, dtype=torch.float64)
    soft[0, 1], soft[0, 2] = 0.7, 0.3
    soft[1, 3], soft[1, 4] = 0.5, 0.5  # no class has more than half
    soft[2, 5] = 1.0
    expected = (h[[0, 2]], torch.tensor([1, 5]))
    if way == "memorize":
        lab.head.memorize(h, soft)
        lab.optimizer.zero_grad()
        assert lab.head.counts.tolist() == [0, 1, 0, 0, 0, 1]
        return
    if way == "remember":
        lab.head.remember(h, soft)
        F.cross_entropy(lab.head(h), soft).backward()
    else:
        with lab.head.targets(soft):
            loss = F.cross_entropy(lab.head(h), soft)
        loss.backward()
    lab.step_writes(expected)


def test_nothing_is_remembered_in_eval_mode_and_under_no_grad() -> None:
    lab = Lab()
    x, y = torch.randn(2, 3, dtype=torch.float64), torch.tensor([1, 2])
    lab.model.eval()
    with lab.head.targets(y):
        F.cross_entropy(lab.model(x), y).backward()
    with pytest.warns(UserWarning, match=r"the head was in eval mode: call model\.train\(\)"):
        lab.step_writes()
    lab.model.train()
    lab.optimizer.zero_grad()
    with torch.no_grad(), lab.head.targets(y):
        lab.model(x)
    lab.step_writes(Loop(lab).backward(3))


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("whole", [False, True], ids=["body", "body and head"])
def test_checkpointing(reentrant: bool, whole: bool) -> None:
    lab = Lab()

    def forward(x: Tensor) -> Tensor:
        x.requires_grad_()
        if whole:
            return checkpoint(lab.model, x, use_reentrant=reentrant)
        return lab.head(checkpoint(lab.model[0], x, use_reentrant=reentrant))

    loop = Loop(lab, forward)
    lab.step_writes(loop.backward(1, 2, 2))
    lab.optimizer.zero_grad()
    lab.step_writes(loop.backward(3), loop.backward(2, 4))
    assert len(lab.handle.calls_in_graphs.calls) <= 2


def test_reentrant_checkpoints_of_equal_activations() -> None:
    """Dead units give every batch the same activations; only the checkpoint knows which call is repeated."""
    lab = Lab(lr=0.0)
    h = torch.zeros(2, FEATURES, dtype=torch.float64)

    def call(label: int) -> Tensor:
        y = torch.full((2,), label)
        with lab.head.targets(y):
            logits = checkpoint(lambda h: lab.head(h.transpose(0, 1).transpose(0, 1)), h, use_reentrant=True)
        return F.cross_entropy(logits, y)

    h.requires_grad_()
    with torch.no_grad(), lab.head.targets(torch.tensor([5, 5])):
        lab.head(h)
    losses = [call(label) for label in (1, 2, 3)]
    for loss in reversed(losses):
        loss.backward()
    lab.step_writes(*((h, torch.full((2,), label)) for label in (1, 2, 3)))


def test_buffers_that_are_refilled_before_the_backward_pass() -> None:
    lab = Lab(lr=0.0, dtype=torch.float32)
    h, y, losses, batches = torch.empty(2, FEATURES), torch.empty(2, dtype=torch.int64), [], []
    for label in (1, 2, 3):
        h.normal_()
        y.fill_(label)
        with torch.autocast("cpu", torch.bfloat16), lab.head.targets(y):  # saves a cast of h
            losses.append(lab.head(h)[:, label].sum())
        batches.append((h.clone(), y.clone()))
    sum(losses).backward()
    lab.optimizer.step()
    for h, y in batches:
        torch.testing.assert_close(lab.head.weight[y[0]], h.mean(0))
    assert lab.head.counts.tolist() == [0, 2, 2, 2, 0, 0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute")
def test_inductor_reuses_the_memory_of_the_activations() -> None:
    head = early_head(64, 64, gamma=0.3, limit=100, write="literal")
    model = nn.Sequential(nn.Linear(16, 64), head)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    head.attach(optimizer)
    compiled = torch.compile(lambda x, y: F.cross_entropy(model(x), y))
    x, y = torch.randn(64, 16), torch.arange(64)
    with head.targets(y):
        loss = compiled(x, y)
    loss.backward()
    optimizer.step()
    torch.testing.assert_close(head.weight, model[0](x))


@pytest.mark.parametrize("frozen", [False, True], ids=["trained body", "frozen features"])
def test_compiled_models_stay_one_graph(frozen: bool) -> None:
    lab = Lab()
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Tensor]:
        graphs.append(graph)
        from torch._dynamo.backends.debugging import aot_eager

        return aot_eager(graph, inputs)

    model: nn.Module = lab.head if frozen else lab.model
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for labels in ((1, 2, 2), (3, 0, 1)):
        x, y = torch.randn(3, FEATURES if frozen else 3, dtype=torch.float64), torch.tensor(labels)
        with lab.head.targets(y):
            loss = F.cross_entropy(compiled(x), y)
        loss.backward()
        lab.step_writes((x if frozen else lab.model[0](x), y))
        lab.optimizer.zero_grad()
    compiled(x)  # outside of a context: another graph
    assert len(graphs) == 2
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's compiler looks at it after a graph break
def test_the_context_inside_of_a_compiled_step() -> None:
    lab = Lab()

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        with lab.head.targets(y):
            return F.cross_entropy(lab.model(x), y)

    compiled = torch.compile(loss_of, backend="aot_eager")
    for labels in ((1, 2, 2), (3, 0, 1)):
        x, y = torch.randn(3, 3, dtype=torch.float64), torch.tensor(labels)
        compiled(x, y).backward()
        lab.step_writes((lab.model[0](x), y))
        lab.optimizer.zero_grad()
    torch._dynamo.reset()


def test_a_compiled_model_with_checkpointing() -> None:
    lab = Lab()
    compiled = torch.compile(lambda x: checkpoint(lab.model, x, use_reentrant=False), backend="aot_eager")
    loop = Loop(lab, compiled)
    lab.step_writes(loop.backward(1, 2, 2), loop.backward(2, 0, 5))
    torch._dynamo.reset()


def test_compiled_calls_whose_loss_is_dropped_are_forgotten() -> None:
    lab = Lab()
    compiled = torch.compile(lab.model, backend="aot_eager")
    for _ in range(5):
        y = torch.tensor([1, 2, 3])
        with lab.head.targets(y):
            compiled(torch.randn(3, 3, dtype=torch.float64))
        lab.step_writes(Loop(lab).backward(3))
        lab.optimizer.zero_grad()
    assert len(lab.handle.calls_in_graphs.calls) <= 2
    torch._dynamo.reset()


def test_misuse_is_refused_and_changes_nothing() -> None:
    lab = Lab()
    x, y = torch.randn(2, 3, dtype=torch.float64), torch.tensor([1, 2])
    with pytest.raises(RuntimeError, match="second time"), lab.head.targets(y):
        lab.model(x) + lab.model(x)
    with pytest.raises(ValueError, match="shape"), lab.head.targets(torch.tensor([1, 2, 3])):
        lab.model(x)
    with pytest.raises(ValueError, match="targets must be in"), lab.head.targets(torch.tensor([1, CLASSES])):
        lab.model(x)
    with pytest.warns(UserWarning, match="not called"), lab.head.targets(y):
        pass
    with pytest.raises(RuntimeError, match="remembers by itself"), lab.head.targets(y):
        lab.head.loss(*lab.batch(1))
    with pytest.raises(RuntimeError, match="remembers by itself"), lab.head.targets(y):
        lab.head.remember(*lab.batch(1))
    with pytest.raises(RuntimeError, match="open already"), lab.head.targets(y), lab.head.targets(y):
        pass
    with pytest.raises(TypeError, match="tensor"):
        lab.head.targets([1, 2])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="shift"):
        lab.head.targets(y, shift=1)  # type: ignore[arg-type]
    for bad in (torch.tensor(1), torch.rand(2, CLASSES)):
        with pytest.raises(ValueError, match="class indices"):
            lab.head.targets(bad, shift=True)
    with pytest.raises(ZeroDivisionError), lab.head.targets(y):
        raise ZeroDivisionError
    lab.step_writes(Loop(lab).backward(1))


def test_an_unattached_head_warns() -> None:
    head = early_head(FEATURES, CLASSES, gamma=0.3, limit=9)
    with pytest.warns(UserWarning, match=r"head\.attach\(optimizer\)"), head.targets(torch.tensor([1])):
        head(torch.randn(1, FEATURES))


def test_a_plain_loop_warns_once_that_nothing_is_memorised() -> None:
    lab = Lab()
    x, y = torch.randn(2, 3, dtype=torch.float64), torch.tensor([1, 2])
    F.cross_entropy(lab.model(x), y).backward()
    with pytest.warns(UserWarning, match=r"with head\.targets\(y\)"):
        lab.optimizer.step()
    F.cross_entropy(lab.model(x), y).backward()
    lab.optimizer.step()  # a second warning would be an error


@pytest.mark.parametrize("other", ["targets", "remember"])
def test_what_is_remembered_and_never_reached_does_not_hide_the_warning(other: str) -> None:
    lab = Lab()
    h, y = lab.batch(1, 2)
    if other == "remember":
        lab.head.remember(h * 1, y)
    else:
        with lab.head.targets(y):
            lab.head(h)
    F.cross_entropy(lab.head(h), y).backward()
    with pytest.warns(UserWarning, match="nothing was remembered") as caught:
        lab.optimizer.step()
    assert caught[0].filename == __file__


@pytest.mark.parametrize("loss", ["loss", "logits"])
def test_a_step_in_eval_mode_warns_once(loss: str) -> None:
    lab = Lab()
    h, y = lab.batch(1, 2)
    lab.model.eval()
    for again in (False, True):
        (lab.head.loss(h, y) if loss == "loss" else F.cross_entropy(lab.head(h), y)).backward()
        with contextlib.nullcontext() if again else pytest.warns(UserWarning, match="was in eval mode") as caught:
            lab.optimizer.step()
        assert again or caught[0].filename == __file__
        lab.optimizer.zero_grad()
        h, y = lab.batch(1, 2)
    assert int(lab.head.counts.sum()) == 0


def test_the_mode_of_the_step_says_nothing() -> None:
    lab = Lab()
    h, y = lab.batch(1, 2)
    F.cross_entropy(lab.head(h), y).backward()
    lab.model.eval()
    with pytest.warns(UserWarning, match=r"with head\.targets\(y\)"):
        lab.optimizer.step()


@pytest.mark.parametrize("before", ["no backward pass", "cleared", "zeroed"])
def test_evaluation_before_a_step_is_not_its_cause(before: str) -> None:
    lab = Lab()
    h, y = lab.batch(1, 2)
    lab.model.eval()
    loss = lab.head.loss(h, y)
    if before != "no backward pass":
        loss.backward()
        lab.optimizer.zero_grad(set_to_none=before == "cleared")
    lab.model.train()
    F.cross_entropy(lab.model(torch.randn(2, 3, dtype=torch.float64)), y).backward()
    with pytest.warns(UserWarning, match=r"with head\.targets\(y\)"):
        lab.optimizer.step()


@pytest.mark.parametrize(
    "case",
    ["remember=False", "remember=False, eval", "ignored", "memorizing=False", "memorizing=False, eval", "no gradient"],
)
def test_who_asked_for_nothing_is_not_warned(case: str) -> None:
    lab = Lab()
    h, y = lab.batch(1, 2)
    if case.startswith("remember=False"):
        lab.model.train("eval" not in case)
        lab.head.loss(h, y, remember=False).backward()
    elif case == "ignored":
        lab.head.loss(h, torch.full_like(y, -100)).backward()
    elif case == "no gradient":
        lab.model[0](torch.randn(2, 3, dtype=torch.float64)).sum().backward()
    else:
        lab.model.train("eval" not in case)
        lab.head.memorizing = False
        F.cross_entropy(lab.head(h), y).backward()
    lab.optimizer.step()
    assert int(lab.head.counts.sum()) == 0


def test_threads_that_attach_at_once_define_the_operators_once(monkeypatch: pytest.MonkeyPatch) -> None:
    defined: list[int] = []

    def define() -> None:
        time.sleep(0.05)  # so that the others come meanwhile
        defined.append(1)

    monkeypatch.setattr(target_context, "_are_operators_defined", False)
    monkeypatch.setattr(target_context, "_define_call_and_reach", define)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: target_context._define_operators(), range(4)))
    assert defined == [1]
