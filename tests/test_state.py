"""State: checkpoints in every format, plain nn.Linear weights, export, compile."""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hebbian_softmax import ConstantRate, HebbianSoftmax, InclusiveRate, PaperRate
from tests.heads import assert_same_bits, attached_head, copied_state, early_head, unchanged

OK = {"gamma": 0.3, "limit": 9}
# torch's compiler reads .grad of what it traces, and pays no heed to filters made errors.
COMPILES = pytest.mark.filterwarnings("ignore:The .grad attribute")


def train_for(head: HebbianSoftmax, optimizer: torch.optim.Optimizer, steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        head.loss(3 + torch.randn(5, 4), torch.randint(6, (5,))).backward()
        optimizer.step()


def torch_save(state: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
    torch.save(state, folder / "head.pt")
    return torch.load(folder / "head.pt", weights_only=True)


def safetensors_save(state: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file, save_file

    save_file(state, folder / "head.safetensors")
    return load_file(folder / "head.safetensors")


def dcp_save(state: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
    import torch.distributed.checkpoint as dcp

    dcp.save(state, checkpoint_id=folder / "dcp", no_dist=True)
    empty = {name: torch.zeros_like(value) for name, value in state.items()}
    dcp.load(empty, checkpoint_id=folder / "dcp", no_dist=True)
    return empty


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # what no_dist=True asks for
@pytest.mark.parametrize("scale", ["match", 1.0])
@pytest.mark.parametrize("after", [0, 1, 2, 5])
@pytest.mark.parametrize("save", [torch_save, safetensors_save, dcp_save])
def test_a_checkpoint_resumes_bit_for_bit(save, after: int, scale: float | str, tmp_path: Path) -> None:
    head, optimizer = attached_head(torch.optim.Adam, lr=0.01, bias=True, scale=scale)
    train_for(head, optimizer, after, seed=1)
    resumed, new_optimizer = attached_head(torch.optim.Adam, lr=0.01, bias=True, scale=scale)
    resumed.load_state_dict(save(copied_state(head), tmp_path))
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    new_optimizer.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    for each, its_optimizer in ((head, optimizer), (resumed, new_optimizer)):
        train_for(each, its_optimizer, 4, seed=2)
    assert_same_bits(resumed.state_dict(), head.state_dict())


def test_state_dict_holds_all_and_only_tensors() -> None:
    head = early_head(4, 6, bias=True, **OK)
    names = "mean", "norms", "along", "returning", "batches", "along_batches", "seen", "first"
    running = [f"running.{name}" for name in names]
    memory = ["counts", "since_start", "nonfinite_count", "filled", *running]
    assert list(head.state_dict()) == ["weight", "bias", *memory]
    assert head.counts.dtype == torch.int64


@pytest.mark.parametrize("nested", [True, False])
def test_a_plain_linears_state_counts_as_familiar(nested: bool, caplog: pytest.LogCaptureFixture) -> None:
    linear, head = nn.Linear(4, 6), early_head(4, 6, bias=True, **OK)
    head.memorize(torch.randn(3, 4), torch.tensor([0, 1, 2]))
    source, target = (nn.Sequential(linear), nn.Sequential(head)) if nested else (linear, head)
    with caplog.at_level(logging.INFO, "hebbian_softmax"):
        target.load_state_dict(source.state_dict())
    assert "6 classes" in caplog.text
    assert "familiar" in caplog.text
    assert {record.levelno for record in caplog.records} == {logging.INFO}
    assert torch.equal(head.weight, linear.weight)
    assert head.counts.tolist() == [9] * 6
    assert not head.running.mean.any()
    head.memorize(torch.randn(3, 4), torch.tensor([0, 1, 2]))
    assert torch.equal(head.weight, linear.weight)  # the rule leaves familiar rows alone


@pytest.mark.parametrize("bias", [True, False])
def test_from_linear(bias: bool, caplog: pytest.LogCaptureFixture) -> None:
    linear = nn.Linear(4, 6, bias=bias).double().eval()
    with caplog.at_level(logging.INFO, "hebbian_softmax"):
        head = HebbianSoftmax.from_linear(linear, **OK, dropout=0.5)
    assert "familiar" in caplog.text
    assert {record.levelno for record in caplog.records} == {logging.INFO}
    assert "counts=" in caplog.text
    assert head.weight is linear.weight
    assert head.bias is linear.bias
    assert not head.training
    assert head.dropout == 0.5
    assert head.counts.tolist() == [9] * 6
    assert head.running.mean.dtype == torch.float64
    h = torch.randn(2, 4).double()
    assert torch.equal(head(h), linear(h))
    before = linear.weight.detach().clone()
    head.add_classes(1)
    head.memorize(h, torch.tensor([0, 6]))
    assert torch.equal(head.weight[:6], before)
    assert head.counts.tolist() == [10, 9, 9, 9, 9, 9, 1]


def test_from_linear_with_counts_of_ones_own(caplog: pytest.LogCaptureFixture) -> None:
    linear = nn.Linear(4, 3)
    with caplog.at_level(logging.INFO, "hebbian_softmax"):
        assert HebbianSoftmax.from_linear(linear, counts=0, **OK).counts.tolist() == [0, 0, 0]
        assert HebbianSoftmax.from_linear(linear, counts=torch.tensor([3, 1, 2]), **OK).counts.tolist() == [3, 1, 2]
    assert caplog.text == ""
    too_large = torch.tensor([1, 2, 2**63], dtype=torch.uint64)
    for bad in (torch.tensor([1, 2]), -1, 0.5, True, "many", 2**63, torch.tensor([1, 2, -1]), too_large):
        with pytest.raises(ValueError, match="counts must be integers >= 0, one or 3"):
            HebbianSoftmax.from_linear(linear, counts=bad, **OK)
    with pytest.raises(TypeError, match=r"linear must be an nn\.Linear"):
        HebbianSoftmax.from_linear(nn.Embedding(3, 4), **OK)
    with pytest.raises(ValueError, match="meta device"):
        HebbianSoftmax.from_linear(nn.Linear(4, 3, device="meta"), **OK)


@pytest.mark.parametrize(
    ("other", "match"),
    [
        (nn.Linear(4, 6, bias=True), "loaded state has a bias and the head was made with bias=False"),
        (nn.Linear(4, 7, bias=False), r"weight of the loaded state has shape \(7, 4\).*add_classes"),
        (nn.Linear(5, 6, bias=False), r"weight of the loaded state has shape \(6, 5\)"),
        (early_head(4, 7, **OK), r"shape \(7, 4\)"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(other: nn.Module, match: str) -> None:
    head = early_head(4, 6, **OK)
    with unchanged(head), pytest.raises(ValueError, match=match):
        head.load_state_dict(other.state_dict())


@pytest.mark.parametrize("strict", [True, False])
def test_a_missing_bias_is_told(strict: bool) -> None:
    head = early_head(4, 6, bias=True, **OK)
    with pytest.raises(ValueError, match="no bias and the head was made with bias=True"):
        nn.Sequential(head).load_state_dict(nn.Sequential(nn.Linear(4, 6, bias=False)).state_dict(), strict=strict)


def test_pending_is_not_saved() -> None:
    head, _optimizer = attached_head()
    with unchanged(head):
        head.loss(torch.randn(1, 4), torch.tensor([1])).backward()


def test_loading_and_reset_parameters_forget() -> None:
    head = early_head(4, 6, **OK)
    for _ in range(2):
        head.memorize(torch.randn(3, 4), torch.tensor([0, 1, 2]))
    assert head.running.knows_rows()
    fresh = early_head(4, 6, **OK).state_dict()
    head.load_state_dict(fresh)
    assert not head.running.knows_rows()  # loading looks for familiar rows anew
    head.memorize(torch.randn(3, 4), torch.tensor([0, 1, 2]))
    head.reset_parameters()
    assert_same_bits(head.state_dict(), fresh | {"weight": head.weight})
    assert not head.running.knows_rows()


def test_deferred_initialisation_on_meta() -> None:
    with torch.device("meta"):
        head = early_head(4, 6, **OK)
    head.to_empty(device="cpu")
    head.reset_parameters()
    assert head.counts.tolist() == [0] * 6
    head.memorize(torch.randn(1, 4), torch.tensor([2]))


def test_export_of_the_inference_path() -> None:
    model = nn.Sequential(nn.Linear(3, 4), early_head(4, 6, bias=True, **OK)).eval()
    x = torch.randn(2, 3)
    exported = torch.export.export(model, (x,))
    torch.testing.assert_close(exported.module()(x), model(x))


class Classifier(nn.Module):
    def __init__(self, **options: object) -> None:
        super().__init__()
        self.head = early_head(4, 6, **(OK | options))
        self.net = nn.Linear(3, 4, dtype=self.head.weight.dtype)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.head.loss(self.net(x).tanh(), y)


def attached_classifier(**options: object) -> tuple[Classifier, torch.optim.Optimizer]:
    """Return a model to compile, and its optimizer; forget what was compiled before."""
    torch._dynamo.reset()
    model = Classifier(**options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model.head.attach(optimizer)
    return model, optimizer


@COMPILES
@pytest.mark.parametrize("kind", ["loss", "remember"])
def test_compiled_training_is_eager_training(kind: str) -> None:
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model, optimizer = attached_classifier(dtype=torch.float64)  # so that only a real difference is seen

        def loss_of(x: Tensor, y: Tensor, model: Classifier = model) -> Tensor:
            if kind == "loss":
                return model(x, y)
            h = model.net(x).tanh()
            model.head.remember(h, y)
            return F.cross_entropy(model.head(h), y)

        run = torch.compile(loss_of, backend="aot_eager") if compiled else loss_of
        for _ in range(6):
            x, y = torch.randn(5, 3, dtype=torch.float64), torch.randint(6, (5,))
            optimizer.zero_grad()
            run(x, y).backward()
            optimizer.step()
        results.append(copied_state(model))
    assert int(results[0]["head.counts"].sum()) == 30
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value, rtol=1e-9, atol=1e-9)


@COMPILES
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("attached", [True, False])
def test_a_model_that_ends_in_the_head_is_one_graph(attached: bool, training: bool) -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(3, 4), early_head(4, 6, **OK)).train(training)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if attached:
        model[1].attach(optimizer)
    for x in (torch.randn(5, 3), torch.randn(5, 3).requires_grad_()):
        assert torch._dynamo.explain(model)(x).graph_count == 1
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), model(x))
        assert torch._dynamo.explain(model[1])(torch.randn(5, 4)).graph_count == 1  # frozen features


@COMPILES
def test_loss_costs_at_most_one_graph_break() -> None:
    model, _optimizer = attached_classifier()
    x, y = torch.randn(5, 3), torch.randint(6, (5,))
    assert torch._dynamo.explain(model)(x, y).graph_break_count <= 1
    model.eval()
    torch._dynamo.reset()
    assert torch._dynamo.explain(model)(x, y).graph_break_count == 0
    torch._dynamo.reset()
    large = early_head(64, 20_000, gamma=0.1, limit=9)  # too large to be traced as the reference
    h, targets = torch.randn(600, 64, requires_grad=True), torch.randint(20_000, (600,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of torch's own code
        warnings.filterwarnings("error", ".*lru_cache.*", UserWarning)
        found = torch._dynamo.explain(lambda: large.loss(h, targets, remember=False))()
    assert found.graph_break_count == 1


@COMPILES
def test_a_compiled_model_recompiles_after_growth() -> None:
    model, optimizer = attached_classifier()
    compiled = torch.compile(model, backend="aot_eager")
    for classes in (6, 8):
        for _ in range(2):
            optimizer.zero_grad()
            x, y = torch.randn(5, 3), torch.randint(classes, (5,))
            y[0] = classes - 1
            loss = compiled(x, y)
            torch.testing.assert_close(loss.item(), F.cross_entropy(model.head(model.net(x).tanh()), y).item())
            loss.backward()
            optimizer.step()
        model.head.add_classes(2)
    assert int(model.head.counts.sum()) == 20


@COMPILES
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor uses what torch deprecates
@pytest.mark.slow
def test_compiled_by_inductor() -> None:
    model, optimizer = attached_classifier(write="literal")
    compiled = torch.compile(model)
    for _ in range(3):
        optimizer.zero_grad()
        compiled(torch.randn(5, 3), torch.randint(6, (5,))).backward()
        optimizer.step()
    assert int(model.head.counts.sum()) == 15


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("classes", [0, 6])
def test_to_linear_is_the_inverse_of_from_linear(bias: bool, classes: int) -> None:
    head = early_head(4, classes, bias=bias, dtype=torch.float64, **OK).eval()
    linear = head.to_linear()
    assert type(linear) is nn.Linear
    assert linear.weight is head.weight
    assert linear.bias is head.bias
    assert (linear.in_features, linear.out_features, linear.training) == (4, classes, False)
    h = torch.randn(3, 4, dtype=torch.float64)
    assert torch.equal(linear(h), head(h))
    head.add_classes(2)
    assert linear.out_features == classes + 2
    assert torch.equal(linear(h), head(h))
    back = HebbianSoftmax.from_linear(linear, **OK)
    assert back.weight is head.weight
    assert not back.training


def test_to_linear_refuses_a_weight_that_is_computed() -> None:
    head = nn.utils.parametrizations.weight_norm(early_head(4, 6, **OK))
    with pytest.raises(TypeError, match="weight must be a parameter"):
        head.to_linear()


@pytest.mark.parametrize("source", ["from_linear", "loaded"])
@pytest.mark.parametrize("rate", [PaperRate, InclusiveRate])
def test_counts_stay_at_the_largest_number_and_rows_stay_familiar(source: str, rate: type) -> None:
    linear = nn.Linear(4, 3, bias=False)
    options = {"gamma": 0.3, "limit": sys.maxsize, "rate": rate(0.3, sys.maxsize)}
    if source == "from_linear":
        head = HebbianSoftmax.from_linear(linear, **options)
    else:
        head = early_head(4, 3, **options)
        head.load_state_dict(linear.state_dict())
    before = head.weight.detach().clone()
    for _ in range(2):
        head.memorize(torch.randn(3, 4), torch.tensor([1, 1, 2]))
    assert torch.equal(head.weight, before)
    assert head.counts.tolist() == [sys.maxsize] * 3
    head.counts[0] = sys.maxsize - 2
    head.memorize(torch.randn(1, 4), torch.tensor([0]))
    assert int(head.counts[0]) == sys.maxsize - 1


def test_from_linear_says_when_a_rate_does_not_leave_familiar_rows_alone(caplog: pytest.LogCaptureFixture) -> None:
    HebbianSoftmax.from_linear(nn.Linear(4, 6), rate=ConstantRate(0.25), **OK)
    assert {record.levelno for record in caplog.records} == {logging.WARNING}
    assert "still writes them, with λ = 0.25" in caplog.text


def test_a_plain_state_assigned_to_a_head_on_meta() -> None:
    with torch.device("meta"):
        head = early_head(4, 6, **OK)
    head.load_state_dict(nn.Linear(4, 6, bias=False).state_dict(), assign=True)
    assert {value.device.type for value in head.state_dict().values()} == {"cpu"}
    assert head.counts.tolist() == [9] * 6
    head.memorize(torch.randn(1, 4), torch.tensor([1]))


def test_a_cast_state_assigned_keeps_counts_and_running_values_exact() -> None:
    head = early_head(4, 6, **OK)
    state = {name: value.half() for name, value in head.state_dict().items()}
    head.load_state_dict(state, assign=True)
    assert head.counts.dtype == torch.int64
    assert head.running.mean.dtype == head.running.norms.dtype == torch.float32
