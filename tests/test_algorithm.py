"""The layer against the paper's loops."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from hebbian_softmax import ConstantRate, HebbianSoftmax, InclusiveRate, InverseCountRate, PaperRate, RecentRate
from hebbian_softmax.write.timing import Timing
from tests.closeness import assert_rounded_once
from tests.heads import early_head
from tests.oracle import IGNORED, ManualLoop, Oracle, mean_rate, paper_rate, recent_rate, shortened

FEATURES, CLASSES = 5, 9

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, foreach=False),
    "sgd-momentum-decay": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, foreach=True),
    "sgd-fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, foreach=False),
    "rmsprop-foreach": lambda p: torch.optim.RMSprop(p, lr=0.01, foreach=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, foreach=False),
    "adam-foreach": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
    "adam-fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, fused=True),
}


def literal_head(**options: object) -> HebbianSoftmax:
    settings = {"gamma": 0.2, "limit": 12, "write": "literal", "dtype": torch.float64} | options
    return early_head(FEATURES, CLASSES, **settings)


def backbone() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, FEATURES)).double()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_hundred_steps_are_the_papers(name: str) -> None:
    net, head = backbone(), literal_head()
    twin, linear = copy.deepcopy(net), nn.Linear(FEATURES, CLASSES, bias=False).double()
    linear.load_state_dict({"weight": head.weight})
    optimizer = OPTIMIZERS[name]([*net.parameters(), *head.parameters()])
    head.attach(optimizer)
    oracle = Oracle(CLASSES, gamma=0.2, limit=12)
    manual = ManualLoop(twin, linear, OPTIMIZERS[name]([*twin.parameters(), *linear.parameters()]), oracle)
    for step in range(100):
        x = torch.randn(7, 4, dtype=torch.float64)
        # Zipf-like labels: some classes pass the limit soon, some are still new at the end.
        y = (torch.rand(7) ** 3 * (CLASSES if step > 50 else CLASSES - 3)).long()
        y[0] = IGNORED if step % 5 == 0 else y[0]
        optimizer.zero_grad()
        loss = head.loss(net(x), y)
        loss.backward()
        optimizer.step()
        assert loss.item() == pytest.approx(manual.step(x, y), abs=1e-9)
        torch.testing.assert_close(head.weight, linear.weight, rtol=1e-9, atol=1e-11)
    assert head.counts.tolist() == oracle.counts
    assert max(oracle.counts) > 12  # the limit was passed


labels = st.lists(st.one_of(st.integers(0, CLASSES - 1), st.just(IGNORED)), min_size=0, max_size=12)


@given(
    batches=st.lists(labels, min_size=1, max_size=6),
    gamma=st.floats(0, 1),
    limit=st.integers(0, 8),
    seed=st.integers(0, 1000),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
    leading=st.sampled_from([(), (1,), (1, 1)]),
)
def test_any_sequence_of_batches(batches, gamma, limit, seed, dtype, leading) -> None:
    torch.manual_seed(seed)
    head = literal_head(gamma=gamma, limit=limit, dtype=dtype)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    head.attach(optimizer)
    oracle = Oracle(CLASSES, gamma, limit)
    for batch in batches:
        y = torch.tensor(batch, dtype=torch.int64)
        h = 20 * torch.randn(len(batch), FEATURES, dtype=dtype)
        stepped = head.weight.detach().clone().requires_grad_()  # θ̂ of the same gradient step, made by hand
        plain = torch.optim.SGD([stepped], lr=0.1)
        shape = (*leading, len(batch))
        optimizer.zero_grad()
        head.loss(h.view(*shape, FEATURES), y.view(shape)).backward()
        stepped.grad = head.weight.grad.clone()
        plain.step()
        optimizer.step()
        assert_rounded_once(head.weight, oracle.update(stepped.detach().double(), h, y))
        assert head.counts.tolist() == oracle.counts


@given(
    counts=st.lists(st.integers(0, 40), min_size=1, max_size=8),
    n=st.integers(1, 5),
    gamma=st.floats(0, 1),
    limit=st.integers(0, 30),
)
def test_rates(counts, n, gamma, limit) -> None:
    before, many = torch.tensor(counts), torch.full((len(counts),), n)
    head = early_head(2, len(counts), gamma=gamma, limit=limit)
    assert head.mixing_rate(before, many).tolist() == [mean_rate(c, n, gamma, limit) for c in counts]
    assert PaperRate(gamma, limit)(before, many).tolist() == [paper_rate(c, gamma, limit) for c in counts]
    assert InclusiveRate(gamma, limit)(before, many).tolist() == [paper_rate(c + n, gamma, limit) for c in counts]
    cases = product((3, 520, 900), (900, 3300), (2, 17, 500, None), (1.0, 0.97, 0.5))
    for mean, batches, classes, strength in cases:
        fallen = min(1.0, 10 * (1 - strength))
        last = max(min(100, 500 if classes is None else classes), min(mean // 4, batches // 20))
        for number in (int, torch.tensor):
            arguments = number(mean), number(batches), classes, fallen
            found = RecentRate(gamma)(4 * before, many, *arguments)
            fixed = RecentRate(gamma, limit)(before, many, *arguments)
            if classes is None:
                assert found.tolist() == [mean_rate(4 * c, n, gamma, last) for c in counts]
                assert fixed.tolist() == [mean_rate(c, n, gamma, limit) for c in counts]
            else:
                assert found.tolist() == [recent_rate(4 * c, n, batches, gamma, last, strength) for c in counts]
                assert fixed.tolist() == [recent_rate(c, n, batches, gamma, limit, strength) for c in counts]
                lengths = [shortened(n, rate) for rate in found.tolist()]
                torch.testing.assert_close(RecentRate.length(many, found).tolist(), lengths)
    assert ConstantRate(gamma)(before, many).tolist() == [gamma] * len(counts)
    assert ConstantRate(gamma, limit)(before, many).tolist() == [gamma if c < limit else 0 for c in counts]
    assert InverseCountRate()(before, many).tolist() == [1 / max(c, 1) for c in counts]
    assert InverseCountRate(limit)(before, many).tolist() == [paper_rate(c, 0, limit) for c in counts]


def test_a_cosine_of_2024_steps_has_the_rate_that_does_not_ask_for_the_learning_rate() -> None:
    """So the final runs on words, which are of this length, stand for the rate that asks, too."""
    counts, n, rate, highest = torch.arange(400), torch.randint(1, 9, (400,)), RecentRate(0.2), 0.0
    for done in range(2024):
        lr = min(1, (done + 1) / 50) * 0.5 * (1 + math.cos(math.pi * done / 2024))
        highest = max(highest, lr)
        fallen = Timing(True, lr, highest).fallen(torch.device("cpu"))
        assert torch.equal(rate(counts, n, 0, done, 30_000, fallen), rate(counts, n, 0, done, 30_000, 1))


@pytest.mark.parametrize("rate", [ConstantRate(0.3), InverseCountRate(5), InclusiveRate(0.2, 12), lambda c, n: n / 10])
def test_other_rates_are_used(rate: Callable[[Tensor, Tensor], Tensor]) -> None:
    head, oracle = literal_head(rate=rate), Oracle(CLASSES, 0.2, 12)
    oracle.rate = lambda count, n: float(rate(torch.tensor([count]), torch.tensor([n])))
    for _ in range(6):
        h, y = torch.randn(8, FEATURES, dtype=torch.float64), torch.randint(CLASSES, (8,))
        expected = oracle.update(head.weight.detach(), h, y)
        head.memorize(h, y)
        torch.testing.assert_close(head.weight.detach(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("write", ["literal", "centred"])
@pytest.mark.parametrize("batches", [0, 450, 1000])
def test_steps_of_the_usual_rate_in_short_and_long_trainings(write: str, batches: int) -> None:
    """Each of its terms is the largest for some class; only activations without their mean are shortened, by a λ that
    has not faded yet."""
    rate, factor = RecentRate(0.3, 50), 0.7
    head = HebbianSoftmax(
        FEATURES, CLASSES, rate=rate, write=write, scale=factor, start=0, fade=True, dtype=torch.float64
    )
    head.counts.copy_(torch.arange(CLASSES) * 5 + 5)
    head.since_start.fill_(1)  # so that no write is the first of its class, which would not fade
    head.running.batches[1] = batches
    oracle = Oracle(CLASSES, 0.3, 50)
    oracle.counts[:] = head.counts.tolist()
    optimizer = torch.optim.SGD(head.parameters(), lr=1e-300)  # too small for a step, but it can be halved
    head.attach(optimizer)
    mean = torch.zeros(FEATURES, dtype=torch.float64)
    for done, left in enumerate((1.0, 0.9375, 0.5)):
        optimizer.param_groups[0]["lr"] = 1e-300 * left
        oracle.factor = lambda i, left=left: left
        oracle.rate = lambda count, n, before=batches + done, left=left: recent_rate(count, n, before, 0.3, 50, left)
        if write == "centred":
            oracle.length = lambda count, n: shortened(n, oracle.rate(count, n))
        h, y = torch.randn(12, FEATURES, dtype=torch.float64) + 1, torch.randint(CLASSES, (12,))
        expected = oracle.update(head.weight.detach(), factor * (h - mean), y)
        head.loss(h, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(head.weight.detach(), expected, rtol=1e-12, atol=1e-12)
        if write == "centred":
            mean = head.running.mean.clone()
    assert head.counts.tolist() == oracle.counts


def test_a_rate_that_extends_the_usual_one_takes_its_arguments() -> None:
    class Half(RecentRate):
        def __call__(self, counts: Tensor, n: Tensor) -> Tensor:  # type: ignore[override]
            return torch.full_like(counts, 0.5, dtype=torch.float64)

    with pytest.raises(
        TypeError, match=r"rate extends RecentRate.*\(counts, n, mean_count, batches, classes, fallen\)"
    ):
        HebbianSoftmax(FEATURES, CLASSES, rate=Half(0.2, 50))


def test_rows_are_geometric_averages_on_a_frozen_network() -> None:
    """Section 3.2: with constant λ and no gradient, θ ≈ Σ_j λ(1−λ)^{j−1} h of the j-th most recent occurrence."""
    rate, occurrences = 0.3, 60
    head = literal_head(rate=ConstantRate(rate))
    optimizer = torch.optim.SGD(head.parameters(), lr=0.0)
    head.attach(optimizer)
    history = []
    for _ in range(occurrences):
        h = torch.randn(1, FEATURES, dtype=torch.float64)
        head.loss(h, torch.tensor([4])).backward()
        optimizer.step()
        optimizer.zero_grad()
        history.append(h[0])
    expected = sum(rate * (1 - rate) ** (j - 1) * history[-j] for j in range(1, occurrences + 1))
    forgotten = (1 - rate) ** occurrences  # what is left of the initial row, the ≈ of the paper
    torch.testing.assert_close(head.weight[4].detach(), expected, rtol=0, atol=2 * forgotten)


def test_micro_batches_are_one_batch() -> None:
    """Order: n, h̄ and c are those of all losses before one step."""
    whole, parts = literal_head(), literal_head()
    parts.load_state_dict(whole.state_dict())
    h, y = torch.randn(12, FEATURES, dtype=torch.float64), torch.randint(4, (12,))
    for head, pieces in ((whole, 1), (parts, 3)):
        optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
        head.attach(optimizer)
        for _ in range(3):
            optimizer.zero_grad()
            for h_part, y_part in zip(h.chunk(pieces), y.chunk(pieces), strict=True):
                (head.loss(h_part, y_part) / pieces).backward()
            optimizer.step()
    torch.testing.assert_close(whole.weight, parts.weight, rtol=1e-12, atol=1e-12)
    assert whole.counts.equal(parts.counts)


def test_the_write_comes_after_the_step() -> None:
    """At λ = 1 the row is the activation exactly: no gradient step is left on top of it."""
    head = literal_head()
    optimizer = torch.optim.SGD(head.parameters(), lr=10.0)
    head.attach(optimizer)
    h = torch.randn(2, FEATURES, dtype=torch.float64)
    head.loss(h, torch.tensor([1, 7])).backward()
    optimizer.step()
    assert torch.equal(head.weight[[1, 7]], h)
