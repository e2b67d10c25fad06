"""Scale, centring and precision: what is written, beyond the paper's literal rule."""

from __future__ import annotations

import math
import pickle

import pytest
import torch
from torch import Tensor

from hebbian_softmax import HebbianSoftmax
from hebbian_softmax.write.running import HORIZON
from tests.heads import assert_same_bits, early_head, unchanged
from tests.oracle import AlongTheMean, mean_rate, paper_rate

FEATURES, CLASSES = 8, 12


def make(**options: object) -> HebbianSoftmax:
    settings = {"gamma": 0.25, "limit": 30, "dtype": torch.float64} | options
    return early_head(FEATURES, CLASSES, **settings)


class SlowStatistics:
    """Running values written out: plain averages over 100 batches, then exponential forgetting."""

    def __init__(self) -> None:
        self.mean, self.activations, self.rows = torch.zeros(FEATURES, dtype=torch.float64), 0.0, 0.0
        self.batches, self.row_batches = 0, 0
        self.along = AlongTheMean()

    def see(self, head: HebbianSoftmax, counts: list[int], rows: Tensor, h: Tensor, y: Tensor) -> None:
        center = self.mean if head.write != "literal" else torch.zeros_like(self.mean)
        self.used = center
        rare = [(counts[i], rows[i]) for i in sorted(set(y.tolist())) if 0 < counts[i] < head.limit]
        self.along.see(self.mean, self.activations, rare)
        self.along.see_returning(counts, y.tolist(), self.batches)
        familiar = [i for i in range(CLASSES) if counts[i] > 0 and (i in y.tolist() or self.row_batches == 0)]
        if familiar:
            self.row_batches += 1
            norm = sum(float(rows[i].norm()) for i in familiar) / len(familiar)
            self.rows += (norm - self.rows) / min(self.row_batches, HORIZON)
        self.batches += 1
        share = 1 / min(self.batches, HORIZON)
        norm = sum(float((h[j] - center).norm()) for j in range(len(y))) / len(y)
        self.activations += share * (norm - self.activations)
        self.mean = self.mean + share * (h.mean(0) - self.mean)

    def scale(self) -> float:
        return self.rows / self.activations if self.row_batches else 1.0


@pytest.mark.parametrize("scale", ["match", 1.0, 0.5])
@pytest.mark.parametrize("write", ["literal", "centred", "across"])
def test_trajectories_against_slow_statistics(scale: float | str, write: str) -> None:
    head, slow = make(scale=scale, write=write), SlowStatistics()
    counts = [0] * CLASSES
    for step in range(130):  # past the horizon
        y = (torch.rand(5) ** 2 * CLASSES).long() if step else torch.tensor([0, 0, 1, 2, 2])
        h = 7 * torch.randn(5, FEATURES, dtype=torch.float64) + 3
        rows = head.weight.detach().clone()
        slow.see(head, counts, rows, h, y)
        expected = rows.clone()
        for i in set(y.tolist()):
            n = int((y == i).sum())
            rate = paper_rate(counts[i], 0.25, 30) if write == "literal" else mean_rate(counts[i], n, 0.25, 30)
            mean = h[y == i].mean(0) - slow.used
            mean = mean * (slow.scale() if scale == "match" else scale)
            if write == "across":
                mean = slow.along.kept(mean, rows[i], counts[i] == 0)
            expected[i] = rate * mean + (1 - rate) * rows[i]
            counts[i] += n
        head.memorize(h, y)
        torch.testing.assert_close(head.weight.detach(), expected, rtol=1e-9, atol=1e-9)
    assert head.counts.tolist() == counts


def test_the_first_batch_is_raw() -> None:
    """No familiar row to match and no mean to subtract yet."""
    head = make(write="centred")
    h = torch.randn(2, FEATURES, dtype=torch.float64)
    head.memorize(h, torch.tensor([3, 4]))
    assert torch.equal(head.weight[[3, 4]], h)


def test_new_classes_match_the_familiar_rows_of_a_trained_layer() -> None:
    """The batch may hold none of the familiar classes."""
    linear = torch.nn.Linear(FEATURES, CLASSES, bias=False, dtype=torch.float64)
    head = HebbianSoftmax.from_linear(linear, gamma=0.1, limit=9, counts=9, write="literal", scale="match")
    familiar = linear.weight.detach().clone()
    head.add_classes(1)
    h = 100 * torch.randn(1, FEATURES, dtype=torch.float64)
    head.memorize(h, torch.tensor([CLASSES]))
    assert torch.equal(head.weight[:CLASSES], familiar)
    assert head.weight[CLASSES].norm().item() == pytest.approx(familiar.norm(dim=1).mean().item(), rel=1e-12)
    torch.testing.assert_close(torch.cosine_similarity(head.weight[CLASSES], h[0], dim=0).item(), 1.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_are_rounded_once(dtype: torch.dtype) -> None:
    """Two thousand small terms: a sum in the weight's own dtype would stop growing."""
    head = make(dtype=dtype, write="literal")
    h = (1 + torch.rand(2000, FEATURES)).to(dtype)
    head.memorize(h, torch.full((2000,), 5))
    assert torch.equal(head.weight[5], h.double().mean(0).to(dtype))


def test_the_same_input_gives_the_same_bits() -> None:
    results = []
    for _ in range(2):
        torch.manual_seed(3)
        head = make(dtype=torch.float32)
        for _ in range(5):
            head.memorize(torch.randn(500, FEATURES), torch.randint(CLASSES, (500,)))
        results.append(head.state_dict())
    assert_same_bits(*results)


@pytest.mark.parametrize("convert", [lambda m: m.half(), lambda m: m.bfloat16(), lambda m: m.to(torch.float16)])
def test_running_values_stay_float32_through_half(convert) -> None:
    head = make(dtype=torch.float32)
    for _ in range(3):
        head.memorize(torch.randn(6, FEATURES), torch.randint(4, (6,)))
    with unchanged(head.running):
        convert(head)
    assert head.weight.dtype in (torch.float16, torch.bfloat16)
    assert head.counts.dtype == torch.int64
    assert head.running.mean.dtype == head.running.norms.dtype == torch.float32
    head.memorize(torch.randn(6, FEATURES).to(head.weight.dtype), torch.randint(4, (6,)))
    head.double()
    assert head.running.mean.dtype == torch.float64
    head.memorize(torch.randn(6, FEATURES).double(), torch.randint(4, (6,)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_mixing_is_rounded_once(dtype: torch.dtype) -> None:
    head = make(dtype=dtype, write="literal", gamma=0.3)
    head.counts.fill_(5)  # λ = 0.3
    old, h = head.weight.detach().clone(), torch.randn(CLASSES, FEATURES).to(dtype)
    head.memorize(h, torch.arange(CLASSES))
    rate = torch.tensor(0.3)  # in float32, as the mixing is
    assert torch.equal(head.weight, (rate * h.float() + (1 - rate) * old.float()).to(dtype))


def test_the_objective_sees_the_centred_and_scaled_activation() -> None:
    seen: list[Tensor] = []

    def objective(h: Tensor, rows: Tensor, classes: Tensor, weight: Tensor) -> Tensor:
        seen.append(h.clone())
        return 2 * h

    head = make(write="centred", scale=0.5, objective=objective)
    first, second = torch.randn(2, 1, FEATURES, dtype=torch.float64)
    head.memorize(first, torch.tensor([1]))
    head.memorize(second, torch.tensor([2]))
    torch.testing.assert_close(seen[1], 0.5 * (second - first))
    torch.testing.assert_close(head.weight[2].detach(), second[0] - first[0])


def test_running_values_go_on_while_nothing_is_written() -> None:
    head = make()
    head.memorizing = False
    head.memorize(torch.ones(2, FEATURES, dtype=torch.float64), torch.tensor([1, 2]))
    assert head.running.mean.tolist() == [1.0] * FEATURES


def test_a_tied_weight_of_a_higher_dtype_is_mixed_in_it() -> None:
    head = make(dtype=torch.float32, write="literal")
    head.weight = torch.nn.Embedding(CLASSES, FEATURES, dtype=torch.float64).weight
    h = torch.rand(3, FEATURES, dtype=torch.float64)
    head.memorize(h, torch.tensor([4, 4, 4]))
    torch.testing.assert_close(head.weight[4].detach(), h.mean(0), rtol=1e-14, atol=0)


@pytest.mark.parametrize("slope", [0.5, -0.5])
def test_a_new_class_is_given_what_rows_seen_so_often_have(slope: float) -> None:
    """Rows have 3 + slope · log c along the mean; a line that falls is taken for level."""
    running = make(write="across").running
    x = torch.tensor([1.0, 2.0, 5.0, 40.0], dtype=torch.float64).log()
    y = 3 + slope * x
    for _ in range(3):
        running.see_along(torch.stack([x, y, x * x, x * y]).sum(1), torch.tensor(4))
    running.batches[1] = 22
    for often, count in ((0.01, 1.0), (0.1, 2.1), (4.0, float(x.mean().exp()))):
        running.returning.copy_(torch.tensor([3 * often, 3.0]))
        expected = 3.0 + slope * math.log(count) if slope > 0 else float(y.mean())
        torch.testing.assert_close(float(running.usual_component()), expected)
    running.see_along(torch.zeros(4, dtype=torch.float64), torch.tensor(0))  # a batch without rare rows
    assert int(running.along_batches) == 3


def test_rows_seen_equally_often_give_no_slope() -> None:
    running = make(write="across").running
    x, y = torch.full((3,), 2.0, dtype=torch.float64), torch.tensor([1.0, 2.0, 6.0], dtype=torch.float64)
    running.see_along(torch.stack([x, y, x * x, x * y]).sum(1), torch.tensor(3))
    torch.testing.assert_close(float(running.usual_component()), 3.0)


def test_states_with_the_mean_component_alone_have_a_level_line() -> None:
    head = make(write="across")
    for _ in range(4):
        head.memorize(torch.randn(9, FEATURES, dtype=torch.float64) + 2, torch.arange(9))
    state = head.state_dict()
    state["running.along"] = torch.tensor(-1.5, dtype=torch.float64)
    again = make(write="across")
    again.load_state_dict(state)
    assert float(again.running.usual_component()) == -1.5
    head.running.along = torch.tensor(-2.5, dtype=torch.float64)  # as in a pickle of that time
    assert float(pickle.loads(pickle.dumps(head)).running.usual_component()) == -2.5
