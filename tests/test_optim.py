"""The one-pass optimizers against torch's, and against the write that follows a step.

On a CPU their steps are torch's; the kernels run on a GPU, or in Triton's interpreter.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hebbian_softmax import InnerProduct, OnePassAdam, OnePassRMSprop
from hebbian_softmax.optim import OnePass
from tests.closeness import assert_states_as_close
from tests.heads import early_head
from tests.interpreter import quiet
from tests.on_gpu import make_steps, no_waiting
from tests.one_pass import (
    CLASSES,
    FEATURES,
    PAIRS,
    SmallAdam,
    ThreeWays,
    any_device,
    batch,
    both,
    every_pair,
    model,
    train,
)

pytestmark = quiet
device = any_device


@every_pair
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_steps_are_torchs(name: str, dtype: torch.dtype, device: str) -> None:
    ours, theirs, settings = PAIRS[name]
    nets = [model(device).to(kind) for kind in (dtype, dtype, torch.float64)]
    # On a GPU steps are counted in float32, as torch counts them if a CUDA graph may hold them.
    torchs = theirs(nets[1].parameters(), **settings, capturable=device == "cuda")
    optimizers = [ours(nets[0].parameters(), **settings), torchs, theirs(nets[2].parameters(), **settings)]
    for net, optimizer in zip(nets, optimizers, strict=True):
        train(net, optimizer, range(4), remember=False)
    assert_states_as_close(*(net.state_dict() for net in nets))
    for index in range(len(list(nets[0].parameters()))):
        states = [optimizer.state_dict()["state"][index] for optimizer in optimizers]
        assert_states_as_close(*({key: value.cpu() for key, value in state.items()} for state in states))


@both
def test_defaults_are_torchs(name: str) -> None:
    ours, theirs, _ = PAIRS[name]
    parameters = [torch.zeros(1, requires_grad=True)]
    given, expected = ours(parameters).defaults, theirs(parameters).defaults
    assert given == {key: expected[key] for key in given}


adam_or_slowly_both = pytest.mark.parametrize("name", ["adam", pytest.param("rmsprop", marks=pytest.mark.slow)])
"""For what the two optimizers have in common: states, layouts, growing."""

OPTIONS: dict[str, dict[str, Any]] = {
    "match": {},
    "literal": {"write": "literal"},
    "sphere": {"objective": InnerProduct(2.0)},
    "callable": {"rate": lambda c, n: n / (1.0 + c + n)},
}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("rmsprop", "match"),
        ("rmsprop", "callable"),
        ("rmsprop-decay", "sphere"),
        ("adam", "match"),
        ("adam", "sphere"),
        ("adam-decay", "literal"),
    ],
)
def test_step_and_write_in_one_are_a_step_and_a_write(name: str, options: str, device: str) -> None:
    ways = ThreeWays(name, device, **OPTIONS[options])
    for number in range(4):
        ways.train(range(number, number + 1))
        ways.check()
    assert int(ways.found["head"].counts.sum()) == 4 * 8


@pytest.mark.parametrize(
    ("name", "as_tensor"),
    [
        ("rmsprop", False),
        ("adam", True),
        pytest.param("rmsprop", True, marks=pytest.mark.slow),
        pytest.param("adam", False, marks=pytest.mark.slow),
    ],
)
def test_writes_that_begin_later_and_fade(name: str, as_tensor: bool, device: str) -> None:
    """After 3,000 batches the rate is raised up to γ as the learning rate falls: 20/(c + 20) is more than 3/(c + 3)."""
    ways = ThreeWays(name, device, start=3001, fade=True, gamma=0.9, limit=50)
    for net, _ in ways:
        net["head"].counts.copy_(torch.arange(CLASSES) + 10)
        net["head"].running.batches[1] = 3000
    rates = [0.0, 0.02, 0.01, 0.004]
    for number, rate in enumerate(rates):
        for net, optimizer in ways:
            for group in optimizer.param_groups:
                group["lr"] = torch.tensor(rate, device=device) if as_tensor else rate
            train(net, optimizer, range(number, number + 1))
        ways.check()
    for optimizer in ways.optimizers:
        assert float(optimizer.param_groups[0]["highest_lr"]) == pytest.approx(0.02)
    assert int(ways.found["head"].since_start.sum()) == 3 * 8


def test_a_limit_that_grows(device: str) -> None:
    ways = ThreeWays("adam", device, limit=None)
    for net, _ in ways:
        head = net["head"]
        head.counts.copy_(torch.arange(CLASSES) + CLASSES - 1)
        head.running.seen.fill_(4 * CLASSES * (CLASSES + 2))  # so T is CLASSES + 2
        head.running.batches[1] = 20 * (CLASSES + 3)
    ways.train(range(4))
    ways.check()
    assert int(ways.found["head"].counts.max()) > CLASSES + 2


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("adam", {"parts": 3}),
        pytest.param("rmsprop", {"clip": True}, marks=pytest.mark.slow),
        pytest.param("adam", {"to_none": False}, marks=pytest.mark.slow),
        ("rmsprop", {"parts": 2, "clip": True, "to_none": False}),
    ],
    ids=["accumulation", "clipping", "zeroing", "all"],
)
def test_ways_to_train(name: str, how: dict[str, Any], device: str) -> None:
    ways = ThreeWays(name, device)
    ways.train(range(3), **how)
    ways.check()
    assert int(ways.found["head"].counts.sum()) == 3 * 8 * how.get("parts", 1)


@both
def test_autograd_sees_the_step(name: str, device: str) -> None:
    net = model(device)
    optimizer = PAIRS[name][0](net.parameters(), head=net["head"])
    weights = [net["net"].weight, net["head"].weight]
    products = [torch.ones(1, p.shape[1], device=device, requires_grad=True) @ p.mT for p in weights]
    train(net, optimizer, range(1))
    for product in products:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()


@pytest.mark.parametrize("change", ["folded", "not memorizing"])
def test_folded_activations_follow_the_step_and_memorizing_false_counts(change: str, device: str) -> None:
    """Kernels take activations; sums of them are written by torch's operations."""
    ways = ThreeWays("adam", device)
    for net in ways.nets:
        net["head"].memorizing = change != "not memorizing"
        net["head"].attachment.pending.fold_rows = 10 if change == "folded" else None
    ways.train(range(2), parts=3)
    ways.check()
    assert int(ways.found["head"].counts.sum()) == 2 * 8 * 3


def test_steps_without_the_head_and_a_frozen_one(device: str) -> None:
    ways = ThreeWays("rmsprop", device)
    for net, optimizer in ways:
        train(net, optimizer, range(2))
        optimizer.zero_grad()
        net["net"](batch(5, device, dtype=net["head"].weight.dtype)[0]).sum().backward()
        optimizer.step()
        train(net, optimizer, range(6, 7), remember=False)
        net["head"].weight.requires_grad_(False)
        train(net, optimizer, range(7, 8))
    ways.check()
    assert int(ways.found["head"].counts.sum()) == 3 * 8


@both
def test_counts_stay_at_the_largest_number(name: str, any_device: str) -> None:
    ways = ThreeWays(name, any_device)
    for net, _optimizer in ways:
        net["head"].counts.fill_(2**63 - 3)
    ways.train(range(3))
    ways.check()
    assert bool((ways.found["head"].counts >= 2**63 - 3).all())
    assert int(ways.found["head"].counts.max()) == 2**63 - 1


@adam_or_slowly_both
def test_states_go_both_ways(name: str, device: str) -> None:
    """Two steps with the one, two with the other from its state dict, are four with either."""
    ours, theirs, settings = PAIRS[name]
    nets = [model(device) for _ in range(3)] + [model(device).double()]
    kinds = [(theirs, theirs), (ours, theirs), (theirs, ours), (theirs, theirs)]
    for (first, second), net in zip(kinds, nets, strict=True):
        before = first(net.parameters(), **settings)
        handle = net["head"].attach(before)
        train(net, before, range(2))
        handle.remove()
        after = second(net.parameters(), lr=1.0)
        after.load_state_dict(copy.deepcopy(before.state_dict()))
        assert after.param_groups[0]["lr"] == settings["lr"]
        net["head"].attach(after)
        train(net, after, range(2, 4))
    for net in nets[1:3]:
        assert_states_as_close(net.state_dict(), nets[0].state_dict(), nets[3].state_dict())


@adam_or_slowly_both
def test_a_loaded_state_may_have_another_layout(name: str, device: str) -> None:
    """A model may have been channels-last when it was saved."""
    ways = ThreeWays(name, device)
    for net, optimizer in ways:
        train(net, optimizer, range(2))
        state = copy.deepcopy(optimizer.state_dict())
        for values in state["state"].values():
            values.update({key: value.mT.contiguous().mT for key, value in values.items() if value.dim() == 2})
        optimizer.load_state_dict(state)
        train(net, optimizer, range(2, 4))
    ways.check()


def test_gradients_in_another_layout(device: str) -> None:
    ways = ThreeWays("adam", device)
    for net, optimizer in ways:
        for number in range(2):
            x, y = batch(number, device, dtype=net["head"].weight.dtype)
            optimizer.zero_grad()
            net["head"].loss(net["net"](x), y).backward()
            for parameter in (net["net"].weight, net["head"].weight):
                parameter.grad = parameter.grad.mT.contiguous().mT
            optimizer.step()
    ways.check()


def test_a_state_that_asks_for_more_is_refused() -> None:
    for kind, other in (
        (OnePassRMSprop, torch.optim.RMSprop(nn.Linear(2, 2).parameters(), momentum=0.9)),
        (OnePassAdam, torch.optim.Adam(nn.Linear(2, 2).parameters(), amsgrad=True)),
        (OnePassAdam, torch.optim.AdamW(nn.Linear(2, 2).parameters())),
    ):
        with pytest.raises(ValueError, match="does not offer"):
            kind(nn.Linear(2, 2).parameters()).load_state_dict(other.state_dict())


@adam_or_slowly_both
def test_growth(name: str, device: str) -> None:
    ways = ThreeWays(name, device)
    new = torch.randn(2, FEATURES)
    for net, optimizer in ways:
        train(net, optimizer, range(2))
        net["head"].add_classes(2)
        with torch.no_grad():
            net["head"].weight[-2:] = new  # float64 draws others
        train(net, optimizer, range(2, 4))
    assert ways.found["head"].weight.shape == (CLASSES + 2, FEATURES)
    ways.check()


def test_tied_to_an_embedding(device: str) -> None:
    heads = []
    adam = torch.optim.Adam
    for kind, dtype in ((SmallAdam, torch.float32), (adam, torch.float32), (adam, torch.float64)):
        torch.manual_seed(0)
        embedding = nn.Embedding(CLASSES, FEATURES).to(device, dtype)
        head = early_head(FEATURES, CLASSES, gamma=0.3, limit=7, device=device, dtype=dtype)
        head.weight = embedding.weight
        optimizer = kind(head.parameters(), lr=0.01, eps=1e-3, **({"head": head} if kind is SmallAdam else {}))
        head.attach(optimizer)
        for number in range(3):
            _, y = batch(number, device)
            optimizer.zero_grad()
            head.loss(embedding(y.roll(1)).tanh(), y).backward()
            optimizer.step()
        heads.append(head)
    assert_states_as_close(*(head.state_dict() for head in heads))


def test_lr_as_a_tensor_groups_and_closure(device: str) -> None:
    nets = [model(device), model(device), model(device).double()]
    for kind, net in zip((SmallAdam, torch.optim.Adam, torch.optim.Adam), nets, strict=True):
        capturable = {} if kind is SmallAdam or device == "cpu" else {"capturable": True}
        group = {"params": net["head"].parameters(), "lr": torch.tensor(0.02, device=device)}
        optimizer = kind([group], eps=1e-3, **capturable)
        optimizer.add_param_group({"params": net["net"].parameters(), "lr": 0.005})
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for number in range(3):
            x, y = batch(number, device, dtype=net["head"].weight.dtype)

            def closure(net: Any = net, optimizer: Any = optimizer, x: Tensor = x, y: Tensor = y) -> Tensor:
                optimizer.zero_grad()
                loss = net["head"].loss(net["net"](x), y, remember=False)
                loss.backward()
                return loss

            assert float(optimizer.step(closure).detach()) > 0
            scheduler.step()
    assert_states_as_close(*(net.state_dict() for net in nets))


def test_constructing_with_a_head_attaches(device: str) -> None:
    net = model(device)
    head = net["head"]
    optimizer = OnePassAdam(net.parameters(), head=head)
    assert optimizer.head is head
    assert head.attach(optimizer) is head.attachment
    with pytest.raises(RuntimeError, match="attached to an optimizer already"):
        head.attach(torch.optim.SGD(head.parameters(), lr=0.1))
    with pytest.raises(RuntimeError, match="attached to an optimizer already"):
        OnePassAdam(net.parameters(), head=head)
    head.attachment.remove()
    assert optimizer.head is None
    train(net, optimizer, range(0))
    copied = pickle.loads(pickle.dumps(OnePassAdam(net.parameters(), head=head)))
    assert copied.head is None


@pytest.mark.parametrize("hooked", [False, True])
def test_the_write_comes_after_the_whole_step_of_a_subclass(hooked: bool, device: str) -> None:
    class Inner(OnePassRMSprop):
        step = OnePass.step  # torch has not hooked it: it hooks the step of a class with its first instance

    class Shrinking(Inner):
        def step(self, closure: Any = None) -> None:
            super().step()
            for group in self.param_groups:
                torch._foreach_mul_([parameter.detach() for parameter in group["params"]], 0.5)

    if hooked:
        Inner([torch.zeros(1)])  # from now on its step runs hooks itself
    head = early_head(FEATURES, CLASSES, gamma=0.3, limit=7, write="literal", device=device)
    optimizer = Shrinking(head.parameters(), head=head)
    h = torch.randn(1, FEATURES, device=device)
    head.loss(h, torch.tensor([3], device=device)).backward()
    optimizer.step()
    assert torch.equal(head.weight[3], h[0])
    assert int(head.counts[3]) == 1


@pytest.mark.parametrize(
    ("kind", "options", "match"),
    [
        (OnePassRMSprop, {"lr": -1.0}, "lr must be at least 0"),
        (OnePassAdam, {"lr": torch.tensor([0.1, 0.2])}, "lr must be a number or a tensor of one"),
        (OnePassRMSprop, {"alpha": 2}, "alpha must be in"),
        (OnePassAdam, {"betas": (0.9, 1.0)}, r"betas\[1\] must be below 1"),
        (OnePassAdam, {"betas": (0.9,)}, r"betas must be two numbers, got \(0\.9,\)"),
        (OnePassAdam, {"eps": -1e-8}, "eps must be at least 0"),
    ],
)
def test_bad_settings(kind: type[OnePass], options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        kind(nn.Linear(2, 2).parameters(), **options)


def test_bad_parameters() -> None:
    head = early_head(4, 5, gamma=0.3, limit=7)
    with pytest.raises(ValueError, match=r"does not hold head\.weight"):
        OnePassAdam(nn.Linear(2, 2).parameters(), head=head)
    assert head.attachment is None
    with pytest.raises(TypeError, match="must be real"):
        OnePassAdam([nn.Parameter(torch.zeros(2, dtype=torch.complex64))])
    embedding = nn.Embedding(5, 4, sparse=True)
    optimizer = OnePassAdam(embedding.parameters())
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse=False"):
        optimizer.step()


def test_a_scaler_skips(device: str) -> None:
    net = model(device)
    optimizer = OnePassAdam(net.parameters(), head=net["head"])
    scaler = torch.amp.GradScaler(device, init_scale=16.0)
    for number, bad in enumerate((False, True, False)):
        optimizer.zero_grad()
        x, y = batch(number, device)
        scaler.scale(net["head"].loss(net["net"](x), y)).backward()
        if bad:
            net["net"].weight.grad[0, 0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
    assert int(net["head"].counts.sum()) == 2 * 8


@pytest.mark.gpu
def test_wide_rows_and_many_of_them() -> None:
    """Warps of one program are not in step there."""
    heads = [early_head(1024, 4000, gamma=0.1, limit=10**6, device="cuda")]
    heads += [copy.deepcopy(heads[0]), copy.deepcopy(heads[0]).double()]
    settings = {"lr": 1e-4, "eps": 1e-3}
    optimizers = [OnePassRMSprop(heads[0].parameters(), **settings, head=heads[0])]
    optimizers += [torch.optim.RMSprop(head.parameters(), **settings) for head in heads[1:]]
    for head, optimizer in zip(heads, optimizers, strict=True):
        head.attach(optimizer)
    for _ in range(4):
        h, y = torch.randn(3000, 1024, device="cuda"), (torch.rand(3000, device="cuda") ** 3 * 4000).long()
        for head, optimizer in zip(heads, optimizers, strict=True):
            head.loss(h.to(head.weight.dtype), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_states_as_close(*(head.state_dict() for head in heads))


@pytest.mark.gpu
@both
def test_a_step_does_not_wait_for_the_device(name: str) -> None:
    net = model("cuda")
    optimizer = PAIRS[name][0](net.parameters(), lr=0.01, head=net["head"])
    train(net, optimizer, range(2))
    x, y = batch(2, "cuda")
    with no_waiting():
        for _ in range(2):
            optimizer.zero_grad()
            net["head"].loss(net["net"](x), y).backward()
            optimizer.step()
    assert int(net["head"].counts.sum()) == 4 * 8


@pytest.mark.gpu
@both
def test_a_whole_step_in_a_graph(name: str) -> None:
    def run(graphed: bool, dtype: torch.dtype = torch.float32) -> tuple[dict[str, Tensor], Tensor]:
        net = model("cuda").to(dtype)
        optimizer = PAIRS[name][0](net.parameters(), lr=0.01, eps=1e-3, head=net["head"])
        x, y = batch(0, "cuda", dtype=dtype)

        def step() -> None:
            optimizer.zero_grad()
            net["head"].loss(net["net"](x), y).backward()
            optimizer.step()

        make_steps(step, (x, y), [batch(number, "cuda") for number in range(8)], graphed)
        return net.state_dict(), optimizer.state[net["head"].weight]["step"]

    (found, found_steps), (expected, expected_steps) = run(True), run(False)
    assert_states_as_close(found, expected, run(False, torch.float64)[0])
    assert float(found_steps) == float(expected_steps) == 8
