"""The differences of CUDA: no value is read back for a decision, fused optimizers skip on the device, heads move."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from tests.closeness import assert_states_as_close
from tests.heads import assert_same_bits, attached_head, early_head, train
from tests.on_gpu import make_steps, no_waiting

pytestmark = pytest.mark.gpu
OK = {"gamma": 0.3, "limit": 9}


def run(device: str, steps: int, to_none: bool = True, **options: object) -> dict[str, Tensor]:
    torch.manual_seed(0)
    net = nn.Linear(16, 8).double()
    head = early_head(8, 50, **(OK | options), dtype=torch.float64)
    batches = [(torch.randn(64, 16).double(), (torch.rand(64) ** 2 * 50).long()) for _ in range(steps)]
    net, head = net.to(device), head.to(device)
    optimizer = torch.optim.Adam([*net.parameters(), *head.parameters()], lr=0.01)
    head.attach(optimizer)
    for x, y in batches:
        optimizer.zero_grad(set_to_none=to_none)
        head.loss(net(x.to(device)), y.to(device)).backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)  # so that the gradient is looked at on the device
        optimizer.step()
    return {name: value.cpu() for name, value in head.state_dict().items()}


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("objective", ["l2", "ip", "svm", "smax"])
def test_cuda_is_the_cpu(objective: str, to_none: bool) -> None:
    expected, found = run("cpu", 6, objective=objective), run("cuda", 6, to_none, objective=objective)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-8, atol=1e-8)


def test_the_same_input_gives_the_same_bits() -> None:
    assert_same_bits(run("cuda", 4), run("cuda", 4))


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}], ids=str)
def test_a_gradient_cleared_by_a_foreach_operation_is_found(options: dict[str, bool]) -> None:
    """``torch._foreach_zero_`` does not raise the version of the gradient."""
    head = early_head(4, 6, device="cuda", **OK)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1, **options)
    head.attach(optimizer)

    def backward(label: int, factor: float = 1.0) -> None:
        (head.loss(torch.randn(1, 4, device="cuda"), torch.tensor([label], device="cuda")) * factor).backward()

    backward(1)
    optimizer.zero_grad(set_to_none=False)
    backward(3)
    optimizer.step()
    assert head.counts.tolist() == [0, 0, 0, 1, 0, 0]
    optimizer.zero_grad(set_to_none=False)
    backward(2)
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()
    assert head.counts.tolist() == [0, 0, 0, 1, 0, 0]
    backward(4, 0.0)
    backward(5, 0.0)
    optimizer.step()  # gradients that are zero and were not cleared
    assert head.counts.tolist() == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("frozen", [False, True], ids=["trained body", "frozen features"])
def test_the_targets_context(compiled: bool, frozen: bool) -> None:
    def train(device: str) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4).requires_grad_(not frozen), early_head(4, 6, **OK)).double()
        batches = [(torch.randn(5, 3).double(), torch.randint(6, (5,))) for _ in range(4)]
        model = model.to(device)
        head, optimizer = model[-1], torch.optim.Adam(model.parameters())
        head.attach(optimizer)
        call = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled and device == "cuda" else model
        for x, y in batches:
            x, y = x.to(device), y.to(device)
            with head.targets(y):
                loss = nn.functional.cross_entropy(call(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return {name: value.cpu() for name, value in model.state_dict().items()}

    expected, found = train("cpu"), train("cuda")
    assert int(expected["1.counts"].sum()) == 20
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("to_none", [True, False])
def test_a_cleared_gradient_is_found_on_the_device(to_none: bool) -> None:
    head, optimizer = attached_head(device="cuda")
    head.loss(torch.randn(2, 4, device="cuda"), torch.tensor([1, 2], device="cuda")).backward()
    optimizer.zero_grad(set_to_none=to_none)
    head.loss(torch.randn(1, 4, device="cuda"), torch.tensor([3], device="cuda")).backward()
    optimizer.step()
    assert head.counts.tolist() == [0, 0, 0, 1, 0, 0]
    head.loss(torch.randn(1, 4, device="cuda"), torch.tensor([3], device="cuda")).backward()
    optimizer.zero_grad(set_to_none=to_none)
    optimizer.step()
    assert head.counts.tolist() == [0, 0, 0, 1, 0, 0]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("to_none", [True, False])
def test_fp16_scaler_skips(fused: bool, kind: type[torch.optim.Optimizer], to_none: bool) -> None:
    net, head = nn.Linear(3, 4).cuda(), early_head(4, 6, device="cuda", **OK)
    optimizer = kind([*net.parameters(), *head.parameters()], lr=0.1, fused=fused)
    head.attach(optimizer)
    scaler = torch.amp.GradScaler("cuda", init_scale=16.0)
    seen = 0
    for bad in (True, False, True, False, False):
        optimizer.zero_grad(set_to_none=to_none)
        with torch.autocast("cuda", torch.float16):
            loss = head.loss(net(torch.randn(2, 3, device="cuda")), torch.tensor([1, 2], device="cuda"))
        scaler.scale(loss).backward()
        if bad:
            net.weight.grad[0, 0] = torch.inf
        before = head.weight.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        seen += not bad
        assert head.counts.tolist() == [0, seen, seen, 0, 0, 0]
        assert torch.equal(head.weight, before) == bad


def test_moving_between_devices_mid_training() -> None:
    head, optimizer = attached_head()
    train(head, optimizer)
    head.cuda()
    train(head, optimizer, (2, 3))
    head.loss(torch.randn(1, 4, device="cuda"), torch.tensor([4], device="cuda")).backward()
    head.cpu()
    optimizer.step()  # pending and its gradient came along
    train(head, optimizer, (5,))
    assert head.counts.tolist() == [0, 1, 2, 1, 1, 1]


def test_non_finite_activations_wait_on_the_device() -> None:
    head = early_head(4, 6, device="cuda", **OK)
    h = torch.randn(2, 4, device="cuda")
    h[0, 0] = torch.nan
    head.memorize(h, torch.tensor([1, 2], device="cuda"))
    with pytest.warns(RuntimeWarning, match="1 activations"):
        assert head.nonfinite == 1


def test_growth_with_a_fused_optimizer() -> None:
    head, optimizer = attached_head(partial(torch.optim.AdamW, fused=True), device="cuda")
    train(head, optimizer)
    head.add_classes(2)
    train(head, optimizer, (7,))
    assert head.counts.tolist() == [0, 1, 1, 0, 0, 0, 0, 1]


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rate": lambda c, n: 1 / (1.0 + c)},
        {"scale": 0.1, "objective": "ip"},
        {"start": 5, "fade": True},
        {"seen_only": True},
    ],
)
def test_a_whole_step_in_a_graph(options: dict[str, object], clip: bool) -> None:
    """Captured after three steps, then replayed with new data: the same training as without a graph."""

    def train(graphed: bool, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        torch.manual_seed(0)
        net, head = nn.Linear(16, 8).to("cuda", dtype), early_head(8, 50, **(OK | options)).to("cuda", dtype)
        lr = torch.tensor(0.01, device="cuda")
        optimizer = torch.optim.Adam([*net.parameters(), *head.parameters()], lr=lr, eps=1e-3, capturable=True)
        head.attach(optimizer)
        x, y = torch.empty(64, 16, device="cuda", dtype=dtype), torch.empty(64, device="cuda", dtype=torch.int64)

        def step() -> None:
            optimizer.zero_grad()
            head.loss(net(x), y).backward()
            if clip:
                nn.utils.clip_grad_norm_(head.parameters(), 0.1)
            optimizer.step()
            lr.mul_(0.9)

        batches = [(torch.randn(64, 16), (torch.rand(64) ** 2 * 50).long()) for _ in range(10)]
        make_steps(step, (x, y), batches, graphed)
        return {name: value.cpu() for name, value in head.state_dict().items()}

    assert_states_as_close(train(True), train(False), train(False, torch.float64))


@pytest.mark.parametrize("seen_only", [False, True])
def test_a_step_does_not_wait_for_the_device(seen_only: bool) -> None:
    head = early_head(8, 50, device="cuda", seen_only=seen_only, **OK)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    head.attach(optimizer)
    train(head, optimizer)
    h, y = torch.randn(64, 8, device="cuda"), torch.randint(50, (64,), device="cuda")
    with no_waiting():
        for _ in range(2):
            head.loss(h, y).backward()
            head.weight.grad.mul_(0.5)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    assert int(head.counts.sum()) == 2 + 128
