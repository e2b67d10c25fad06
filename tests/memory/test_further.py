"""Two and more steps of MbPA: what they cost, over tiles, groups and precisions, and the kernels of their passes."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hebbian_softmax import MbPA
from hebbian_softmax._triton import kernels_on_cpu
from hebbian_softmax.memory import passes
from hebbian_softmax.memory.adaptation import Layer, Neighbours
from hebbian_softmax.memory.further import Plan, Steps, adapted_logits, further_steps, plan_of
from hebbian_softmax.memory.mbpa import nearest
from hebbian_softmax.memory.passes import Moved
from hebbian_softmax.memory.products import product_dtype, wide_bmm
from tests.closeness import assert_as_close, assert_exact
from tests.interpreter import interpreted, quiet, recorded_launches
from tests.memory.oracles import mbpa_distribution, mbpa_log_prob, stream
from tests.operations import Watch

pytestmark = quiet
devices = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=pytest.mark.gpu)]
)
EXACT = {"rtol": 1e-9, "atol": 1e-9}


def head_of(features: int, classes: int, bias: bool = True) -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(features, classes, bias=bias, dtype=torch.float64)


def layer_of(head: nn.Linear, dtype: torch.dtype = torch.float64, product: torch.dtype | None = None) -> Layer:
    bias = None if head.bias is None else head.bias.detach().to(dtype)
    return Layer(head.weight.detach().to(dtype), bias, product or dtype)


def near_of(layer: Layer, queries: Tensor, keys: Tensor, labels: Tensor, k: int, epsilon: float) -> Neighbours:
    queries, keys = queries.to(layer.weight.dtype), keys.to(layer.weight.dtype)
    distance, indices = nearest(queries, keys, k)
    weights = 1 / (epsilon + distance)
    normalisers = layer.logits(keys, range(layer.classes)).logsumexp(1)
    return Neighbours(queries, keys, labels, normalisers, indices, weights / weights.sum(1, keepdim=True))


@pytest.mark.parametrize("steps", [2, 4])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("width", "at_once"), [(48, 9), (48, 2), (16, 1)])
@pytest.mark.parametrize(("stored", "k"), [(20, 6), (8, 8)])
def test_tiles_and_groups(steps: int, bias: bool, width: int, at_once: int, stored: int, k: int) -> None:
    h, labels = stream(stored + 5, 4, 40, scale=1.5)
    head, mbpa = head_of(4, 40, bias), MbPA(20, k, steps, 0.4, 0.7)
    layer = layer_of(head)
    near = near_of(layer, h[stored:], h[:stored], labels[:stored], k, mbpa.epsilon)
    found = h.new_empty(5, 40)
    for tile, logits in adapted_logits(layer, near, Steps(steps, 0.4, 0.7), width, at_once):
        found[:, tile.start : tile.stop] = logits
    expected = torch.stack([mbpa_distribution(q, h[:stored], labels[:stored], head, mbpa) for q in h[stored:]])
    torch.testing.assert_close(found.log_softmax(1), expected, **EXACT)


@pytest.mark.parametrize("steps", [2, 3])
@pytest.mark.parametrize("workspace", [1, 60_000, 120_000, 2**24])
def test_any_workspace_gives_the_same_and_little_more_is_used(steps: int, workspace: int) -> None:
    h, targets = stream(66, 8, 90)
    head, mbpa = head_of(8, 90), MbPA(60, 16, steps)
    mbpa.observe(h[:60], targets[:60])
    with Watch() as watch:
        found = mbpa.probabilities(h[60:], head.weight, head.bias, workspace=workspace)
    expected = torch.stack([mbpa_distribution(q, h[:60], targets[:60], head, mbpa) for q in h[60:]])
    torch.testing.assert_close(found.log(), expected, **EXACT)
    if workspace >= 60_000:
        assert watch.most <= 1.2 * workspace


def operations(watch: Watch) -> int:
    """Return the multiplications of all matrix products."""
    found = 0
    for left, right in watch.products:
        found += torch.Size(left).numel() * right[-1]
    return found


def test_what_two_steps_multiply() -> None:
    """Each query needs one product of K × K times K × V; the rest is shared, or has no factor V."""
    h, targets = stream(400, 32, 500)
    head, k, d, n, v = head_of(32, 500), 32, 32, 100, 512
    mbpa = MbPA(300, k, 2)
    mbpa.observe(h[:300], targets[:300])
    with Watch() as watch:
        mbpa.sequence_log_prob(h[300:], targets[300:], head.weight, head.bias, block=n, workspace=2**28)
    own, shared = n * (k * k * v + k * v + k * k * d), (400 * 2 + n) * d * v + n * 400 * (v + 2 * d)
    assert operations(watch) <= own + shared


@pytest.mark.parametrize(("queries", "room", "tiles"), [(64, 2**30, 1), (64, 6 * 2**20, 1), (64, 2**20, 105)])
def test_all_classes_are_one_tile_if_one_query_fits(queries: int, room: int, tiles: int) -> None:
    keys, k, classes = 2000, 32, 5003
    layer = Layer(torch.empty(classes, 64), None, torch.float32)
    indices = torch.zeros(queries, k, dtype=torch.int64)
    near = Neighbours(torch.empty(queries, 64), torch.empty(keys, 64), indices[0], indices[0], indices, indices)
    plan = plan_of(layer, near, Steps(2, 0.3, 0.5), 0, room)
    assert plan.width % 16 == 0
    assert -(-classes // plan.width) == tiles
    assert (plan.width >= classes) == (tiles == 1)
    if room == 2**30:
        assert plan == Plan(queries, 5008, queries)
    assert 1 <= plan.at_once <= plan.rows <= queries


@pytest.mark.parametrize("steps", [2, 3])
def test_equal_keys_and_more_neighbours_than_entries(steps: int) -> None:
    h, targets = stream(4, 3, 20)
    h, targets = h.repeat(5, 1), targets.repeat(5)
    head, mbpa = head_of(3, 20), MbPA(20, 20, steps)
    found = mbpa.sequence_log_prob(h, targets, head.weight, head.bias)
    torch.testing.assert_close(found, mbpa_log_prob(h, targets, head, mbpa), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("steps", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_precisions(steps: int, dtype: torch.dtype) -> None:
    """On a CPU everything is summed and multiplied in at least float32."""
    h, targets = stream(24, 4, 20)
    h, head, mbpa = h.to(dtype), head_of(4, 20).to(dtype), MbPA(12, 5, steps)
    found = mbpa.sequence_log_prob(h, targets, head.weight, head.bias)
    assert found.dtype == torch.float32
    expected = mbpa_log_prob(h.double(), targets, head.double(), mbpa)
    assert_exact(found, expected, ulps=256)


def test_the_dtype_of_the_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    before = torch.get_float32_matmul_precision()
    try:
        for precision, expected in (("highest", torch.float32), ("high", torch.float32), ("medium", torch.bfloat16)):
            torch.set_float32_matmul_precision(precision)
            assert product_dtype(torch.float32, gpu) == expected
            assert product_dtype(torch.float32, cpu) == product_dtype(torch.bfloat16, cpu) == torch.float32
            assert product_dtype(torch.float16, gpu) == product_dtype(torch.bfloat16, gpu) == torch.bfloat16
            assert product_dtype(torch.float64, gpu) == product_dtype(torch.float64, cpu) == torch.float64
    finally:
        torch.set_float32_matmul_precision(before)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert product_dtype(torch.bfloat16, gpu) == torch.float32


def test_products_in_bfloat16_sum_in_float32() -> None:
    a, b = torch.randn(2, 3, 70).bfloat16(), torch.randn(2, 70, 4).bfloat16()
    found = wide_bmm(a, b)
    assert found.dtype == torch.float32
    assert_exact(found, torch.bmm(a.double(), b.double()))


def test_bfloat16_products_change_little() -> None:
    """They round errors and kernels to eight bits, and the sums of both remain in float32."""
    h, targets = stream(140, 32, 300, scale=0.6)
    head = head_of(32, 300)
    found = {}
    for product in (torch.float32, torch.bfloat16):
        layer = layer_of(head, torch.float32, product)
        near = near_of(layer, h[100:], h[:100], targets[:100], 40, 1e-3)
        ((_, _, logits),) = further_steps(layer, near, Steps(2, 0.3, 0.5), 2**28)
        found[product] = logits.log_softmax(1).gather(1, targets[100:, None])
    exact, rounded = found.values()
    assert not torch.equal(exact, rounded)
    assert float((exact - rounded).abs().max()) < 0.02
    assert abs(float((exact - rounded).mean())) < 1e-3


@pytest.fixture
def kernels() -> ModuleType:
    pytest.importorskip("triton", reason="the kernels need Triton")
    return pytest.importorskip("hebbian_softmax.memory.gpu.passes")


def moved_logits(shape: tuple[int, int, int, int], changed: bool, device: str) -> tuple[Moved, dict[str, Tensor]]:
    """Return logits of M keys, R queries and K neighbours in a tile, and the operands of the passes, in float64."""
    keys, queries, k, width = shape
    generator = torch.Generator().manual_seed(0)

    def normal(*size: int) -> Tensor:
        return 4 * torch.randn(*size, dtype=torch.float64, generator=generator).float().double().to(device)

    model = normal(keys, width)
    model[:, -3:] = -torch.inf  # as the columns beyond a tile
    indices = torch.randint(keys, (queries, k), generator=generator).to(device)
    columns = torch.randint(-width, 2 * width, (queries, k), generator=generator).to(device)
    columns[:, 0] = 2
    moved = Moved(model, indices, columns, normal(queries, k, width) if changed else None)
    return moved, {"normalisers": passes.log_sum_exp(moved).float().double(), "weights": normal(queries, k)}


def rounded(moved: Moved) -> Moved:
    change = None if moved.change is None else moved.change.float()
    return Moved(moved.model.float(), moved.indices, moved.columns, change)


@devices
@pytest.mark.parametrize("changed", [False, True])
@pytest.mark.parametrize("shape", [(5, 2, 3, 16), (4, 1, 33, 16), (2, 1, 2, 144), (2, 1, 1, 4112)])
def test_the_kernels_do_what_torch_does(
    shape: tuple[int, int, int, int], changed: bool, device: str, kernels: Any
) -> None:
    moved, known = moved_logits(shape, changed, device)
    low, normalisers, weights = rounded(moved), known["normalisers"], known["weights"]
    calls = {
        "log_sum_exp": (),
        "errors": (normalisers.float(), torch.float32),
        "weighted_errors": (normalisers.float(), weights.float()),
    }
    exact = {"log_sum_exp": (), "errors": (normalisers, torch.float64), "weighted_errors": (normalisers, weights)}
    for name, options in calls.items():
        found, expected = getattr(kernels, name)(low, *options), getattr(passes, name)(low, *options)
        assert_as_close(found, expected, getattr(passes, name)(moved, *exact[name]), name, ulps=64)
    coarse = kernels.errors(low, normalisers.float(), torch.bfloat16)
    assert coarse.dtype == torch.bfloat16
    torch.testing.assert_close(coarse.double(), passes.errors(moved, *exact["errors"]), rtol=2**-7, atol=1e-30)


@devices
def test_the_kernels_where_logits_are_far_apart(device: str, kernels: Any) -> None:
    model = torch.tensor([[-1e30, 2e4, -2e4, -torch.inf] * 4, [-torch.inf] * 16], device=device)
    moved = Moved(model, torch.tensor([[0, 1]], device=device), torch.tensor([[1, 5]], device=device))
    found = kernels.log_sum_exp(moved)
    assert_exact(found[0, 0], torch.tensor(2e4).double() + torch.tensor(4.0).double().log())
    assert found[0, 1] == -torch.inf


@devices
@pytest.mark.parametrize(("steps", "workspace"), [(2, 2**28), (3, 1)])
def test_mbpa_uses_the_kernels(steps: int, workspace: int, device: str, kernels: Any) -> None:
    h, targets = stream(6, 4, 20)
    h, head, mbpa = h.float(), head_of(4, 20).float(), MbPA(4, 3, steps)
    operands = (each.to(device) for each in (h, targets, head.weight, head.bias))
    with kernels_on_cpu(), recorded_launches() as launches:
        found = mbpa.sequence_log_prob(*operands, workspace=workspace)
    assert {"row_log_sum_exp", "row_errors", "column_errors"} <= {launch.kernel for launch in launches}
    expected = mbpa_log_prob(h.double(), targets, head.double(), mbpa)
    assert_exact(found.cpu(), expected, ulps=256)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["highest", "high", "medium", "bfloat16", "float16"])
def test_precisions_on_a_gpu(precision: str) -> None:
    h, targets = stream(700, 64, 2000, scale=0.5)
    head, mbpa = head_of(64, 2000), MbPA(500, 128, 2)
    dtype = getattr(torch, precision, torch.float32)
    h, weight, bias = (each.detach().to("cuda", dtype) for each in (h, head.weight, head.bias))
    before = torch.get_float32_matmul_precision()
    if dtype == torch.float32:
        torch.set_float32_matmul_precision(precision)
    try:
        found = mbpa.sequence_log_prob(h, targets.cuda(), weight, bias)
    finally:
        torch.set_float32_matmul_precision(before)
    mbpa.reset()
    exact = mbpa.sequence_log_prob(h.double(), targets.cuda(), weight.double(), bias.double())
    assert found.dtype == torch.float32
    assert float((found - exact).abs().max()) < (1e-4 if precision == "highest" else 0.05)
    assert abs(float((found - exact).mean())) < 1e-4
