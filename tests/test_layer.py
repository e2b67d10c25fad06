"""The layer as a drop-in nn.Linear: forward, loss, memorize, suggest, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from hebbian_softmax import HebbianSoftmax, PaperRate, RecentRate
from hebbian_softmax.rule import sum_by_class
from tests.heads import attached_head, early_head, train, unchanged
from tests.oracle import Oracle

OK = {"gamma": 0.1, "limit": 10}


@pytest.mark.parametrize("bias", [True, False])
def test_it_is_nn_linear(bias: bool) -> None:
    torch.manual_seed(1)
    head = early_head(5, 7, bias=bias, dropout=0.5, **OK)
    torch.manual_seed(1)
    linear = nn.Linear(5, 7, bias=bias)
    assert isinstance(head, nn.Linear)
    assert [n for n, _ in head.named_parameters()] == [n for n, _ in linear.named_parameters()]
    for name, parameter in linear.named_parameters():
        assert torch.equal(head.get_parameter(name), parameter)
    h = torch.randn(2, 3, 5)
    assert torch.equal(head(h), linear(h))
    assert head.num_classes == head.out_features == 7
    assert "gamma=0.1, limit=10" in repr(head)


@given(
    shape=st.sampled_from([(0,), (1,), (6,), (2, 3), (2, 1, 3)]),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    smoothing=st.sampled_from([0.0, 0.1]),
    weighted=st.booleans(),
    bias=st.booleans(),
    ignored=st.floats(0, 1),
    ignore_index=st.sampled_from([-100, 2, -1]),
    seed=st.integers(0, 100),
)
def test_loss_is_cross_entropy(shape, reduction, smoothing, weighted, bias, ignored, ignore_index, seed) -> None:
    torch.manual_seed(seed)
    head = early_head(5, 7, bias=bias, ignore_index=ignore_index, dtype=torch.float64, **OK)
    h = torch.randn(*shape, 5, dtype=torch.float64, requires_grad=True)
    y = torch.randint(7, shape)
    y = torch.where(torch.rand(shape) < ignored, ignore_index, y)
    weight = torch.rand(7, dtype=torch.float64) if weighted else None
    options = {"reduction": reduction, "label_smoothing": smoothing, "weight": weight}
    loss = head.loss(h, y, remember=False, **options)
    logits = F.linear(h, head.weight, head.bias).reshape(-1, 7)
    expected = F.cross_entropy(logits, y.reshape(-1), ignore_index=ignore_index, **options)
    expected = expected.view(shape) if reduction == "none" else expected
    if bool((y == ignore_index).all()):
        expected = logits.sum() * 0 if reduction != "none" else expected
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    inputs = [h, *head.parameters()]
    for ours, theirs in zip(grads(loss, inputs), grads(expected, inputs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def grads(loss: Tensor, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss.sum(), inputs, retain_graph=True, materialize_grads=True)


@pytest.mark.parametrize("labels", [[], [-100, -100]])
def test_an_empty_or_ignored_batch_is_loss_zero_and_changes_nothing(labels: list[int]) -> None:
    head, optimizer = attached_head(bias=True)
    h = torch.randn(len(labels), 4, requires_grad=True)
    with unchanged(head):
        loss = head.loss(h, torch.tensor(labels, dtype=torch.int64))
        loss.backward()
        optimizer.step()
    assert loss.item() == 0
    assert not h.grad.any()
    assert not head.weight.grad.any()


def test_loss_may_be_changed_in_place() -> None:
    head, optimizer = attached_head()
    loss = head.loss(torch.randn(2, 4), torch.tensor([1, 2]))
    loss /= 2
    loss.backward()
    optimizer.step()
    assert int(head.counts.sum()) == 2


def test_dropout_is_for_the_loss_and_not_for_the_memory() -> None:
    head = early_head(64, 3, dropout=0.5, gamma=0.1, limit=10, write="literal")
    optimizer = torch.optim.SGD(head.parameters(), lr=0.0)
    head.attach(optimizer)
    h, y = torch.randn(1, 64, requires_grad=True), torch.tensor([1])
    losses = {head.loss(h, y, remember=False).item() for _ in range(4)}
    assert len(losses) == 4
    assert head.eval().loss(h, y).item() == F.cross_entropy(head(h), y).item()
    head.train().loss(h, y).backward()
    assert 10 < int((h.grad == 0).sum()) < 54  # about half of the features were dropped
    optimizer.step()
    assert torch.equal(head.weight[1], h[0])


@pytest.mark.parametrize("training", [True, False])
def test_memorize_writes_at_once_and_leaves_pending_alone(training: bool) -> None:
    head, optimizer = attached_head(lr=0.0, write="literal", dtype=torch.float64)
    oracle = Oracle(6, 0.3, 9)
    waiting, y_waiting = torch.randn(2, 4, dtype=torch.float64), torch.tensor([0, 5])
    head.loss(waiting, y_waiting).backward()
    head.train(training)
    for _ in range(4):
        h, y = torch.randn(2, 3, 4, dtype=torch.float64), torch.randint(6, (2, 3))
        expected = oracle.update(head.weight.detach(), h.view(6, 4), y.view(6))
        head.memorize(h.requires_grad_(), y)
        torch.testing.assert_close(head.weight.detach(), expected, rtol=1e-12, atol=1e-12)
        assert head.counts.tolist() == oracle.counts
        assert head.training == training
        assert len(head.attachment.pending) == 1
    expected = oracle.update(head.weight.detach(), waiting, y_waiting)
    optimizer.step()
    torch.testing.assert_close(head.weight.detach(), expected, rtol=1e-12, atol=1e-12)


def test_memorizing_false_stops_the_writes_and_goes_on_counting() -> None:
    head, optimizer = attached_head(lr=0.0)
    head.memorizing = False
    before = head.weight.detach().clone()
    for _ in range(3):
        train(head, optimizer)
    assert torch.equal(head.weight, before)
    assert head.counts.tolist() == [0, 3, 3, 0, 0, 0]
    head.memorizing = True
    train(head, optimizer)
    assert not torch.equal(head.weight, before)


def test_counting_goes_on_after_the_limit_and_rows_are_left_alone() -> None:
    head = early_head(4, 6, gamma=0.5, limit=3, write="literal")
    for seen in range(6):
        before = head.weight.detach().clone()
        head.memorize(torch.randn(1, 4), torch.tensor([2]))
        assert int(head.counts[2]) == seen + 1
        assert torch.equal(head.weight, before) == (seen >= 3)  # c < T, not ≤


def test_suggest() -> None:
    assert HebbianSoftmax.suggest(torch.tensor([100, 0, 20, 7]), epochs=10) == (1 / 7, 70)
    assert HebbianSoftmax.suggest([4, 3], epochs=2.5) == (1 / 3, 8)
    for counts, match in (([0, 0], "at least once"), ([], "at least once"), ([-1, 3], ">= 0"), ([1.5], "integers")):
        with pytest.raises(ValueError, match=match):
            HebbianSoftmax.suggest(counts, epochs=1)
    for epochs in (-1, float("nan"), float("inf"), "ten"):
        with pytest.raises(ValueError, match="epochs"):
            HebbianSoftmax.suggest([1], epochs=epochs)


@pytest.mark.parametrize("rarest", [1, 2, 3, 10])
def test_suggest_never_lets_an_occurrence_overwrite_the_whole_row(rarest: int) -> None:
    gamma, limit = HebbianSoftmax.suggest([rarest, 50], epochs=4)
    assert gamma == (1 / rarest if rarest > 1 else 0.5)
    assert limit == 4 * rarest
    early_head(4, 2, gamma=gamma, limit=limit)
    assert HebbianSoftmax.suggest([2**62], epochs=1e9)[1] == 2**63 - 1


BAD_ARGUMENTS = [
    ({"gamma": -0.1}, ValueError, r"gamma must be in \[0, 1\], got -0.1"),
    ({"gamma": 1.1}, ValueError, r"gamma must be in \[0, 1\], got 1.1"),
    ({"gamma": float("nan")}, ValueError, "gamma"),
    ({"gamma": "a"}, TypeError, "gamma must be a number, got 'a'"),
    ({"limit": -1}, ValueError, "limit must be at least 0, got -1"),
    ({"limit": 1.5}, TypeError, "limit must be an integer"),
    ({"limit": 2**63}, ValueError, "limit must be at most 9223372036854775807, got 9223372036854775808"),
    ({"dropout": 1.5}, ValueError, "dropout"),
    ({"scale": "max"}, ValueError, 'scale must be "match" or a number'),
    ({"scale": float("inf")}, ValueError, "scale"),
    ({"write": "central"}, ValueError, "write must be one of 'literal', 'centred', 'across'"),
    ({"objective": "hinge"}, ValueError, "objective"),
    ({"rate": 0.5}, TypeError, "rate must be a callable"),
    ({"rate": lambda c, n: 0.5}, ValueError, "one λ for each"),
    ({"rate": lambda c, n: c * 2.0}, ValueError, r"λ in \[0, 1\]"),
    ({"ignore_index": 0.5}, TypeError, "ignore_index"),
    ({"ignore_index": 2**63}, ValueError, "ignore_index must be at most"),
]


@pytest.mark.parametrize(("options", "error", "match"), BAD_ARGUMENTS, ids=[str(i) for i in range(len(BAD_ARGUMENTS))])
def test_bad_arguments(options: dict[str, object], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        early_head(4, 6, **(OK | options))


def test_bad_sizes() -> None:
    with pytest.raises(ValueError, match="in_features must be at least 1, got 0"):
        early_head(0, 5, **OK)
    with pytest.raises(ValueError, match="num_classes must be at least 0, got -1"):
        early_head(5, -1, **OK)


BAD_BATCHES = [
    (torch.randn(3, 5), torch.tensor([0, 1, 2]), ValueError, r"h must have shape \(\.\.\., 4\), got \(3, 5\)"),
    (torch.randn(3, 6), torch.tensor([0, 1, 2]), ValueError, "got .3, 6.; give the head's input, not its logits"),
    (torch.tensor(1.0), torch.tensor(0), ValueError, "h must have shape"),
    (torch.randn(3, 4), torch.eye(6).long()[:3], ValueError, r"got \(3, 6\); probabilities must be floating point"),
    (torch.randn(3, 4), torch.tensor([0, 1]), ValueError, r"targets must have shape \(3,\)"),
    (torch.randn(3, 4), torch.tensor([0.0, 1, 2]), TypeError, "integer dtype, got torch.float32"),
    (torch.randn(3, 4), torch.tensor([True, False, True]), TypeError, "integer dtype, got torch.bool"),
    (torch.randint(9, (3, 4)), torch.tensor([0, 1, 2]), TypeError, "h must be floating point"),
    (torch.randn(3, 4), torch.tensor([0, 6, 1]), ValueError, r"targets must be in \[0, 5\] or .*-100, got 6"),
    (torch.randn(3, 4), torch.tensor([0, -1, 1]), ValueError, "got -1"),
    ([[1.0] * 4], torch.tensor([0]), TypeError, "h must be a tensor, got list"),
]


@pytest.mark.parametrize("method", ["loss", "remember", "memorize"])
@pytest.mark.parametrize(("h", "y", "error", "match"), BAD_BATCHES, ids=[str(i) for i in range(len(BAD_BATCHES))])
def test_bad_batches_change_nothing(method, h, y, error, match) -> None:
    head, _optimizer = attached_head()
    with unchanged(head), pytest.raises(error, match=match):
        getattr(head, method)(h, y)
    assert len(head.attachment.pending) == 0


def test_bad_reduction() -> None:
    with pytest.raises(ValueError, match="reduction"):
        early_head(4, 6, **OK).loss(torch.randn(1, 4), torch.tensor([0]), reduction="avg")


def test_non_finite_activations_are_left_out_counted_and_told_of() -> None:
    head = early_head(4, 6, gamma=0.5, limit=9, write="literal")
    assert head.nonfinite == 0
    h = torch.randn(4, 4)
    h[1, 2], h[3, 0] = torch.nan, torch.inf
    before = head.weight.detach().clone()
    head.memorize(h, torch.tensor([0, 0, 1, 2]))
    assert head.counts.tolist() == [1, 1, 0, 0, 0, 0]
    assert torch.equal(head.weight[:2], h[[0, 2]])
    assert torch.equal(head.weight[2:], before[2:])
    assert int(head.state_dict()["nonfinite_count"]) == 2
    with pytest.warns(RuntimeWarning, match="2 activations"):
        assert head.nonfinite == 2
    assert head.nonfinite == 2  # told of once
    head.memorize(h[1:2], torch.tensor([-100]))  # ignored anyway
    assert head.nonfinite == 2


def test_non_finite_activations_in_training_never_raise() -> None:
    head, optimizer = attached_head(lr=0.0)
    head.loss(torch.full((2, 4), torch.nan), torch.tensor([1, 2])).backward()
    head.weight.grad.zero_()  # what a nan-guard does; then the batch is gone with its gradient
    head.loss(torch.full((1, 4), torch.inf), torch.tensor([3])).backward()
    optimizer.step()
    assert int(head.counts.sum()) == 0
    assert int(head.nonfinite_count) == 1


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_integer_targets_of_any_size(dtype: torch.dtype) -> None:
    head = early_head(4, 6, **OK)
    head.memorize(torch.randn(2, 4), torch.tensor([1, 5], dtype=dtype))
    head.loss(torch.randn(2, 4), torch.tensor([1, 5], dtype=dtype), remember=False)
    assert head.counts.tolist() == [0, 1, 0, 0, 0, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_no_infinity_is_written_and_running_values_stay_finite(dtype: torch.dtype) -> None:
    head = early_head(4, 6, dtype=dtype, **OK)
    head.memorize(torch.randn(3, 4, dtype=dtype), torch.tensor([0, 1, 2]))
    head.memorize(torch.full((2, 4), 3e38), torch.tensor([3, 3]))
    head.memorize(torch.full((1, 4), 1e20), torch.tensor([4]))
    assert int(head.nonfinite_count) == 3
    assert head.counts.tolist() == [1, 1, 1, 0, 0, 0]
    head.memorize(torch.full((1, 4), 1e6), torch.tensor([5]))  # finite, but not in float16
    head.memorize(torch.randn(3, 4, dtype=dtype), torch.tensor([0, 1, 2]))
    for name, value in head.state_dict().items():
        assert bool(torch.isfinite(value).all()), name


def test_a_value_too_large_for_the_weight_leaves_the_row() -> None:
    head = early_head(4, 6, dtype=torch.float16, write="literal", scale=4.0, **OK)
    before = head.weight.detach().clone()
    head.memorize(torch.full((1, 4), 3e4, dtype=torch.float16), torch.tensor([3]))
    assert torch.equal(head.weight, before)


@pytest.mark.parametrize("target", [-1, -7, 6, 10**9])
def test_targets_out_of_range_are_never_written(target: int) -> None:
    """Targets that the CPU refuses are left out on devices whose values are not read back."""
    settings = {"num_classes": 6, "ignore_index": -100, "center": torch.zeros(4), "dtype": torch.float32}
    sums = sum_by_class(torch.ones(2, 4), torch.tensor([target, 2]), **settings)
    assert sums.classes.tolist() == [2]
    assert int(sums.nonfinite) == 0


def test_loss_refuses_a_weight_without_values() -> None:
    head = early_head(4, 6, device="meta", **OK)
    with pytest.raises(ValueError, match="meta device"):
        head.loss(torch.randn(1, 4), torch.tensor([1]))


def test_a_mean_that_a_half_precision_sum_would_overflow() -> None:
    head = early_head(4, 6, dtype=torch.float16, **OK)
    with torch.no_grad():
        head.weight.zero_()
        head.weight[1] = -100.0
    h = torch.ones(1000, 4, dtype=torch.float16)
    loss = head.loss(h, torch.ones(1000, dtype=torch.int64), remember=False)
    assert loss.item() == pytest.approx(400 + 1.6, rel=1e-2)


def test_settings_that_the_rule_uses_cannot_be_changed_behind_its_back() -> None:
    head = early_head(4, 6, **OK)
    assert head.rate == RecentRate(0.1, 10)
    for name in ("gamma", "limit"):
        with pytest.raises(AttributeError):
            setattr(head, name, 0)
    head.rate = PaperRate(0.5, 5)
    assert head.mixing_rate(torch.tensor([4, 5]), torch.tensor([1, 1])).tolist() == [0.5, 0]


def test_nonfinite_is_told_again_after_a_reset() -> None:
    head = early_head(4, 6, **OK)
    for _ in range(2):
        head.memorize(torch.full((1, 4), torch.nan), torch.tensor([0]))
        with pytest.warns(RuntimeWarning, match="1 activations"):
            assert head.nonfinite == 1
        head.reset_parameters()
        assert head.nonfinite == 0


def test_torch_func_and_sparse_inputs_work_as_with_nn_linear() -> None:
    head, _optimizer = attached_head()
    h, y = torch.randn(2, 4), torch.tensor([1, 2])
    parameters = {"weight": head.weight.detach().clone()}

    def of_logits(parameters: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(head, parameters, (h,)), y)

    def of_loss(h: Tensor) -> Tensor:
        return head.loss(h, y)

    expected = torch.autograd.grad(F.cross_entropy(F.linear(h, head.weight), y), head.weight)[0]
    torch.testing.assert_close(torch.func.grad(of_logits)(parameters)["weight"], expected)
    assert torch.func.grad(of_loss)(h).shape == h.shape
    assert len(head.attachment.pending) == 0
    assert head(torch.eye(4).to_sparse()).shape == (4, 6)


def test_an_objective_of_the_wrong_shape() -> None:
    head = early_head(4, 6, objective=lambda h, rows, classes, weight: h[0], **OK)
    with pytest.raises(ValueError, match=r"objective must return w\* of shape \(2, 4\), got \(4,\)"):
        head.memorize(torch.randn(2, 4), torch.tensor([1, 2]))


def test_the_default_rule_and_the_papers_in_one_word() -> None:
    head, literal = HebbianSoftmax(4, 6), HebbianSoftmax(4, 6, write="literal")
    assert (head.rate, head.write, head.scale) == (RecentRate(0.2), "across", "match")
    assert (head.gamma, head.limit, head.start, head.fade) == (0.2, 100, "auto", True)
    assert (literal.rate, literal.scale, literal.start, literal.fade) == (PaperRate(0.2, 100), 1.0, 0, False)
    assert HebbianSoftmax(4, 6, limit=50).rate == RecentRate(0.2, 50)
    assert HebbianSoftmax(4, 6, rate=PaperRate(0.1, 500)).limit == 500
    assert HebbianSoftmax(4, 6, write="literal", start=3, fade=True).start == 3
    assert HebbianSoftmax.from_linear(nn.Linear(4, 6)).rate == RecentRate(0.2, 100)


def test_a_given_rate_keeps_its_gamma_and_takes_a_given_limit() -> None:
    assert HebbianSoftmax(4, 200, limit=50, rate=RecentRate(0.05)).rate == RecentRate(0.05, 50)
    assert HebbianSoftmax(4, 200, limit=50, rate=RecentRate(0.05, 70)).rate == RecentRate(0.05, 70)
    assert HebbianSoftmax(4, 200, rate=RecentRate(0.05)).limit_grows()
    trained = HebbianSoftmax.from_linear(nn.Linear(4, 6), rate=RecentRate(0.05))
    assert trained.rate == RecentRate(0.05, 100)
    head = HebbianSoftmax(4, 6, rate=RecentRate(0.05), objective="ip")
    head.reset_memory(100)
    assert head.rate == RecentRate(0.05, 100)


def test_the_default_limit_grows_with_the_mean_count_except_in_a_trained_head() -> None:
    head, y = HebbianSoftmax(4, 3), torch.tensor([0] * 99 + [1, 2])
    head.running.batches[1] = 20 * 130
    for _ in range(14):
        head.memorize(torch.randn(101, 4), y)
    assert head.running.seen == 14 * 101  # 471 for each class, so T is 117
    n = torch.ones(3, dtype=torch.int64)
    assert head.mixing_rate(torch.tensor([99, 116, 117]), n).tolist() == [0.2, 0.2, 0.0]
    head.memorize(torch.randn(1, 4), torch.tensor([-100]))
    assert head.running.seen == 14 * 101  # what is ignored does not count
    head.memorize(torch.randn(300, 4), torch.zeros(300, dtype=torch.int64))
    assert head.mixing_rate(torch.tensor([99, 129, 130]), n).tolist() == [0.2, 0.2, 0.0]  # 571 / 4 is more
    again = HebbianSoftmax(4, 3)
    again.load_state_dict(head.state_dict())
    assert again.mixing_rate(torch.tensor([129]), n[:1]).tolist() == [0.2]
    head.calibrate(torch.randn(20, 4))
    assert head.mixing_rate(torch.tensor([99, 100, 129]), n).tolist() == [0.2, 0.0, 0.0]


def test_the_default_limit_is_the_number_of_classes_in_steps_of_few_classes() -> None:
    head, n = HebbianSoftmax(4, 7), torch.ones(4, dtype=torch.int64)
    counts = torch.tensor([6, 7, 99, 100])
    rates = [3 / 9, 3 / 10, 3 / 102, 0]  # no batch was seen, so γ has no effect in steps
    assert head.mixing_rate(counts, n, in_step=True).tolist() == [rates[0], 0, 0, 0]
    assert head.mixing_rate(counts, n).tolist() == [0.2, 0.2, 0.2, 0]  # of memorize
    head.add_classes(3)
    assert head.mixing_rate(counts, n, in_step=True).tolist() == [*rates[:2], 0, 0]
    assert HebbianSoftmax(4, 7, limit=50).mixing_rate(counts, n, in_step=True).tolist() == [*rates[:2], 0, 0]
    assert HebbianSoftmax(4, 500).mixing_rate(counts, n, in_step=True).tolist() == rates


@pytest.mark.parametrize("options", [{}, {"objective": "ip"}], ids=["calibrated", "not calibrated"])
def test_familiar_rows_of_a_loaded_layer_stay_however_long_training_is(options: dict[str, Any]) -> None:
    head, linear = HebbianSoftmax(4, 3, **options), nn.Linear(4, 3, bias=False)
    head.load_state_dict(linear.state_dict())
    head.running.seen.fill_(10**6)
    head.running.batches[1] = 10**6
    before = head.weight.detach().clone()
    head.memorize(torch.randn(2, 4), torch.tensor([0, 2]))
    assert torch.equal(head.weight, before)


def test_the_default_head_begins_by_itself_and_then_writes_its_rare_classes() -> None:
    torch.manual_seed(0)
    centres, body = torch.randn(6, 8), nn.Linear(8, 4)
    head = HebbianSoftmax(4, 6)
    optimizer = torch.optim.Adam([*body.parameters(), *head.parameters()], lr=0.01)
    head.attach(optimizer)
    first_written = 0
    for step in range(1, 161):
        y = torch.randint(5, (16,)) if step < 160 else torch.tensor([5, 5, 5])
        loss = head.loss(body(centres[y] + 0.1 * torch.randn(len(y), 8)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        first_written = first_written or (step if head.since_start.any() else 0)
    assert head.settling is not None
    assert 100 <= int(head.settling.began) < first_written <= 150
    logits = head(body(centres[5:]))
    assert logits.argmax() == 5  # seen in the last step alone
