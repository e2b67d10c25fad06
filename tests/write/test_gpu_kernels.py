"""The write's kernels against the write in torch's operations and against the paper's loops.

Where there is no GPU, Triton's interpreter runs them.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hebbian_softmax import (
    ConstantRate,
    Euclidean,
    HebbianSoftmax,
    InclusiveRate,
    InnerProduct,
    InverseCountRate,
    PaperRate,
    RecentRate,
)
from hebbian_softmax._triton import kernels_on_cpu
from hebbian_softmax.write import any_nonzero, in_torch, kernels_suit, write
from hebbian_softmax.write.activations import Activations
from hebbian_softmax.write.timing import AT_ONCE, Timing
from tests.closeness import assert_exact, assert_rounded_once, assert_states_as_close
from tests.heads import assert_same_bits, early_head, unchanged
from tests.interpreter import compile_apart, interpreted, quiet
from tests.oracle import IGNORED, Oracle

pytestmark = quiet
FEATURES, CLASSES = 13, 11


@pytest.fixture(params=[pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    with kernels_on_cpu() if request.param == "cpu" else nullcontext():
        yield request.param


def head_of(device: str, **options: object) -> HebbianSoftmax:
    return early_head(FEATURES, CLASSES, **({"gamma": 0.2, "limit": 6, "device": device} | options))


def batch(device: str, n: int, top: int = CLASSES, dtype: torch.dtype = torch.float32) -> Activations:
    """Zipf-like labels, activations with a common part."""
    h, y = torch.randn(n, FEATURES) + 0.5, (torch.rand(n) ** 2 * top).long()
    return Activations(h.to(device, dtype), y.to(device))


def compare(head: HebbianSoftmax, batches: list[list[Activations]], timing: Timing = AT_ONCE) -> None:
    """Write batches by kernels, by torch's operations, and by the same in float64, and compare them."""
    twin, exact = copy.deepcopy(head), copy.deepcopy(head).double()
    for calls in batches:
        assert kernels_suit(head, head.weight)
        write(head, calls, head.weight, None, timing)
        in_torch.write(twin, calls, twin.weight, None, timing)
        in_torch.write(exact, calls, exact.weight, None, timing)
        assert_states_as_close(head.state_dict(), twin.state_dict(), exact.state_dict())


def scaled(counts: Tensor, n: Tensor) -> Tensor:
    return n / (counts + n + 1.0)


def alike(counts: Tensor, n: Tensor) -> Tensor:
    return torch.tensor(0.3, device=counts.device).expand_as(counts)


class Halved(PaperRate):
    def __call__(self, counts: Tensor, n: Tensor) -> Tensor:
        return super().__call__(counts, n) / 2


class Slower(RecentRate):
    """A rate that the kernels do not know, and that shortens memories all the same."""

    def __call__(self, counts: Tensor, n: Tensor, *more: Any) -> Tensor:
        return super().__call__(counts, n, *more) / 2


class AsItIs(Euclidean):
    """The same objective, and a class of its own, which the kernels do not know."""


class Doubled(Euclidean):
    def __call__(self, h: Tensor, rows: Tensor, classes: Tensor, weight: Tensor) -> Tensor:
        return 2 * h


OPTIONS: dict[str, dict[str, object]] = {
    "default": {},
    "literal": {"write": "literal"},
    "scaled": {"scale": -0.5},
    "match, not centred": {"write": "literal", "scale": "match"},
    "across": {"write": "across"},
    "across, not matched": {"write": "across", "scale": 0.7},
    "ball": {"objective": Euclidean(0.7)},
    "sphere": {"objective": InnerProduct(3.0)},
    "inclusive": {"rate": InclusiveRate(0.3, 9)},
    "growing": {"rate": RecentRate(0.3), "limit": None},
    "constant": {"rate": ConstantRate(0.3)},
    "constant, limited": {"rate": ConstantRate(1, 4)},
    "inverse": {"rate": InverseCountRate()},
    "inverse, limited": {"rate": InverseCountRate(5)},
    "callable": {"rate": scaled},
    "callable, expanded": {"rate": alike},
    "paper's, changed": {"rate": Halved(0.2, 6)},
    "never": {"limit": 0},
    "ignore a class": {"ignore_index": 2},
}


REPEATED = {"scaled", "constant", "inverse, limited", "callable, expanded"}
"""Options of which another one goes the same way through the kernels."""


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[pytest.mark.slow] if each in REPEATED else []) for each in OPTIONS]
)
def test_the_kernels_are_the_torch_write(name: str, device: str) -> None:
    sizes = (1, 14, 10)
    head = head_of(device, **OPTIONS[name])
    if name == "growing":  # T is 106
        head.counts.copy_(torch.randint(95, 115, (CLASSES,)))
        head.running.seen.fill_(4 * CLASSES * 106 + 5)
        head.running.batches[1] = 20 * 108
    compare(head, [[batch(device, n, CLASSES - 4 if n == 14 else CLASSES)] for n in sizes])


@pytest.mark.parametrize("classes", [CLASSES, 1030])
@pytest.mark.parametrize("once", ["come again", "come often", "never come", "there are none"])
def test_first_writes_ask_how_often_classes_seen_once_return(once: str, classes: int, device: str) -> None:
    """Of 1,030 classes every second is looked at."""
    head = early_head(FEATURES, classes, gamma=0.2, limit=30, device=device, write="across")
    counts = torch.tensor([0, 2, 1, 3, 7, 0, 2, 1, 0, 1, 4] + [0, 2, 3] * (classes // 3))[:classes]
    head.reset_memory(counts.clamp_min(2) if once == "there are none" else counts)
    head.counts[torch.tensor([0, 8])] = 0
    head.weight.data += 3 * head.counts.clamp_max(4).unsqueeze(1)  # so that the line rises
    head.running.batches[1] = 40 if once == "come often" else 4
    targets = [1, 1, 3, 4, 4, 6, 10], [8, 8, 0, 1, 3, 4, 6]
    if once.startswith("come"):
        targets[0].extend([2, 2, 7, 5])
    for head.memorizing, each in zip((False, True), targets, strict=True):  # first there must be a mean to write across
        compare(head, [[Activations(torch.randn(len(each), FEATURES).to(device) + 0.5, torch.tensor(each).to(device))]])
    came, waited = head.running.returning.tolist()
    assert (came > 0, waited > 0) == (once.startswith("come"), once != "there are none")
    assert head.running.first.any()


@pytest.mark.parametrize("rate", [RecentRate(0.3, 30), Slower(0.3, 30)], ids=["known", "given"])
@pytest.mark.parametrize("batches", [0, 700], ids=["early", "late"])
@pytest.mark.parametrize("lr", [0.5, 0.92], ids=["half", "nearly whole"])
def test_steps_of_the_usual_rate(rate: RecentRate, batches: int, lr: float, device: str) -> None:
    """Each of its terms is the largest for some class: c = 1 to 26, γ = 0.3, and 700/150 or 0.8 of it in place of 3."""
    head = head_of(device, rate=rate, limit=30)
    head.counts.copy_(torch.arange(CLASSES) * 5 // 2 + 1)
    head.running.batches[1] = batches
    compare(head, [[batch(device, n)] for n in (14, 10)], Timing(True, lr, 1.0))


@pytest.mark.parametrize(
    ("rate", "strength"),
    [
        pytest.param(None, (0.03, 0.1), id="paper's, numbers"),
        pytest.param(scaled, "tensors", id="callable, tensors"),
        pytest.param(None, "tensors", id="paper's, tensors", marks=pytest.mark.slow),
        pytest.param(None, (0.0, 0.0), id="paper's, zeros"),
        pytest.param(scaled, (0.03, 0.1), id="callable, numbers", marks=pytest.mark.slow),
        pytest.param(scaled, (0.0, 0.0), id="callable, zeros", marks=pytest.mark.slow),
    ],
)
def test_timing(
    strength: tuple[float, float] | str, rate: Callable[[Tensor, Tensor], Tensor] | None, device: str
) -> None:
    lr, highest = (torch.tensor(each, device=device) for each in (0.03, 0.1)) if strength == "tensors" else strength
    head = head_of(device, limit=50, rate=rate, start=2)
    before = head.weight.detach().clone()
    compare(head, [[batch(device, 14, CLASSES - 4)], [batch(device, 14, CLASSES - 4)]], Timing(True, lr, highest))
    assert torch.equal(head.weight, before)
    assert head.counts.sum() == 28
    assert not head.since_start.any()
    compare(head, [[batch(device, 14, CLASSES - 2)], [batch(device, 14)]], Timing(True, lr, highest))
    assert head.since_start.sum() == 28
    assert not torch.equal(head.weight, before)
    head.memorizing = False
    compare(head, [[batch(device, 5)]], Timing(True, lr, highest))
    assert head.since_start.sum() == 28


@pytest.mark.parametrize("in_step", [True, False])
def test_a_limit_that_is_the_number_of_classes(in_step: bool, device: str) -> None:
    head = head_of(device, limit=None)
    head.counts.copy_(torch.tensor([0, 1, 9, 10, 11, 12, 98, 99, 100, 101, 5]))
    before = head.weight.detach().clone()
    calls = [Activations(torch.randn(CLASSES, FEATURES, device=device), torch.arange(CLASSES, device=device))]
    compare(head, [calls], Timing(in_step, 1.0, 1.0))
    written = (head.weight != before).any(1).nonzero().squeeze(1).tolist()
    assert written == ([0, 1, 2, 3, 10] if in_step else [0, 1, 2, 3, 4, 5, 6, 7, 10])


@pytest.mark.parametrize("classes", [CLASSES, pytest.param(3000, marks=pytest.mark.slow)])
def test_features_that_settle(classes: int, device: str) -> None:
    """Activations are those of their class after two batches; every other class of 3,000 is sampled.

    The head begins as one that has seen 90 batches, and whose fit has not quite caught up.
    """
    head = early_head(
        FEATURES,
        classes,
        gamma=0.2,
        limit=60,
        start="auto",
        write="across" if classes == CLASSES else "literal",
        device=device,
    )
    assert head.settling is not None
    for buffer, value in ((head.settling.batches, 90), (head.settling.fit, 0.78), (head.settling.recent, 1.0)):
        buffer.fill_(value)
    torch.manual_seed(0)
    own = torch.randn(classes, FEATURES)
    calls = []
    for step in range(18):
        y = torch.cat([torch.randint(CLASSES, (24,)), torch.full((20,), 2)])
        h = own[y] + (2.5 if step < 2 else 0.02) * torch.randn(len(y), FEATURES)
        calls.append([Activations(h.to(device), y.to(device))])
    before = head.weight.detach().clone()
    compare(head, calls[:2], Timing(True, 1.0, 1.0))
    assert torch.equal(head.weight, before)
    compare(head, calls[2:], Timing(True, 1.0, 1.0))
    assert 2 < int(head.settling.began) < 18
    assert not torch.equal(head.weight, before)
    assert 0 < int(head.since_start.sum()) < 16 * 44
    if classes == 3000:
        assert head.settling.memory[:6].any(1).all()
        assert not head.settling.memory[6:].any()


def test_a_program_may_have_several_positions(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from hebbian_softmax.write.gpu import rows, settle

    for module, programs in ((rows, 3), (settle, 2)):
        monkeypatch.setattr(module, "_PROGRAMS", programs)
    head = head_of(device, limit=8, start="auto", write="across")
    compare(head, [[batch(device, n)] for n in (7, 12)], Timing(True, 1.0, 1.0))  # features are compared
    assert head.settling is not None
    head.settling.began.fill_(2)
    before = head.weight.detach().clone()
    compare(head, [[batch(device, n)] for n in (13, 10)], Timing(True, 0.5, 1.0))  # and these are written
    assert (head.weight != before).any(1).sum() > 3


@pytest.mark.parametrize("timing", [AT_ONCE, Timing(True, 0.5, 1.0)], ids=["on demand", "in a step"])
@pytest.mark.parametrize("rate", [PaperRate, RecentRate, InclusiveRate])
def test_counts_stay_at_the_largest_number(rate: type, timing: Timing, device: str) -> None:
    most = 2**63 - 1
    head = head_of(device, limit=most, rate=rate(0.2, most))
    head.counts[:2], head.counts[2] = most, most - 3
    call = batch(device, 12)
    call.targets[:] = torch.arange(12, device=device) % 4
    head.running.batches[1] = 700
    compare(head, [[call], [call]], timing)
    assert head.counts[:4].tolist() == [most, most, most, 6]


def test_all_targets_equal(device: str) -> None:
    call = batch(device, 40)
    call.targets.fill_(3)
    compare(head_of(device), [[call], [call]])


@pytest.mark.parametrize("lengths", [(16,), (15, 33), (1, 130, 3), (40, 0, 28, 20)])
def test_long_runs_are_summed_in_blocks(lengths: tuple[int, ...], device: str) -> None:
    call = batch(device, sum(lengths))
    call.targets.copy_(torch.repeat_interleave(torch.tensor(lengths))[torch.randperm(sum(lengths))])
    compare(head_of(device, limit=150), [[call], [call]])


@pytest.mark.parametrize("classes", [2**15, 2**15 + 1])
def test_keys_are_as_wide_as_the_classes_need(classes: int, device: str) -> None:
    head = early_head(2, classes, gamma=0.2, limit=6, device=device, scale=1.0)
    last = torch.tensor([classes - 1, 0, classes - 1, IGNORED, 5], device=device)
    compare(head, [[Activations(torch.randn(5, 2, device=device), last)]])


@pytest.mark.parametrize("between", ["nothing", "memorize", "accumulate", "change h", "off", "ignore", "reset"])
def test_what_was_seen_while_copying_holds_at_the_step(between: str, device: str) -> None:
    """The activations are inspected again if something that the inspection depends on has changed since."""
    kernels, plain = head_of(device), head_of(device, objective=AsItIs())
    plain.load_state_dict(kernels.state_dict())
    exact = copy.deepcopy(plain).double()
    calls = [batch(device, n) for n in (20, 9)]
    for head in (kernels, plain, exact):
        assert kernels_suit(head, head.weight) == (head is kernels)
        optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
        head.attach(optimizer)
        for call in calls:
            h = call.h.to(head.weight.dtype, copy=True)
            head.loss(h, call.targets).backward()
            if between == "memorize":
                head.memorize(calls[0].h.to(h.dtype), calls[0].targets)
            elif between == "accumulate":
                head.loss(2 * h, call.targets).backward()
            elif between == "change h":
                h.zero_()
            elif between == "off":
                head.write = "literal" if head.write == "across" else "across"
            elif between == "ignore":
                head.ignore_index = int(call.targets[0])
            elif between == "reset":
                head.running.reset()
            optimizer.step()
            optimizer.zero_grad()
    assert_states_as_close(kernels.state_dict(), plain.state_dict(), exact.state_dict())


@pytest.mark.parametrize("label", [IGNORED, -1, CLASSES, 2**40])
def test_nothing_valid_changes_nothing(label: int, device: str) -> None:
    head, call, nothing = head_of(device), batch(device, 20), batch(device, 5)
    write(head, [call], head.weight, None)
    nothing.targets.fill_(label)
    with unchanged(head):
        write(head, [nothing], head.weight, None)
        write(head, [batch(device, 0)], head.weight, None)


def test_some_left_out(device: str) -> None:
    calls = [batch(device, 12) for _ in range(4)]
    for index, value in enumerate((torch.nan, torch.inf, -torch.inf)):
        calls[index].h[index, 4] = value
    calls[2].targets[5:9] = IGNORED
    calls[3].h.fill_(torch.nan)
    head = head_of(device)
    compare(head, [[call] for call in calls])
    assert int(head.nonfinite_count) == 3 + 12


def test_several_calls_and_dtypes_are_one_batch(device: str) -> None:
    calls = [batch(device, 5), batch(device, 0), batch(device, 9, dtype=torch.float16), batch(device, 1)]
    whole = Activations(torch.cat([call.h.float() for call in calls]), torch.cat([call.targets for call in calls]))
    head = head_of(device)
    twin = copy.deepcopy(head)
    compare(head, [calls])
    write(twin, [whole], twin.weight, None)
    assert torch.equal(head.weight, twin.weight)


def test_memorizing_false_counts_only(device: str) -> None:
    head = head_of(device)
    head.memorizing = False
    before = head.weight.detach().clone()
    compare(head, [[batch(device, 20)], [batch(device, 20)]])
    assert torch.equal(head.weight, before)
    assert int(head.counts.sum()) == 40


def test_familiar_rows_are_seen_at_first_and_those_of_the_batch_later(device: str) -> None:
    head = head_of(device)
    head.counts[2:9] = 3
    compare(head, [[batch(device, 3)], [batch(device, 20)], [batch(device, 6)]])
    assert head.running.batches.tolist() == [3, 3]


@pytest.mark.parametrize("batches", [98, 500])
def test_running_values_forget(batches: int, device: str) -> None:
    head = head_of(device)
    head.counts[2:9] = 3
    head.running.batches.fill_(batches)
    head.running.norms.fill_(2.0)
    compare(head, [[batch(device, 20)] for _ in range(3)])


@pytest.mark.parametrize("features", [1, 8, 300])
def test_widths(features: int, device: str) -> None:
    head = early_head(features, 5, gamma=0.2, limit=6, device=device)
    calls = [[Activations(torch.randn(9, features).to(device), torch.randint(5, (9,)).to(device))] for _ in range(2)]
    compare(head, calls)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_weights_are_rounded_once(dtype: torch.dtype, device: str) -> None:
    """A row is off by one unit in the last place at most; the interpreter rounds bfloat16 towards 0."""
    head = head_of(device, dtype=dtype)
    for _ in range(3):
        calls, exact = [batch(device, 20, dtype=dtype)], copy.deepcopy(head).double()
        write(head, calls, head.weight, None)
        in_torch.write(exact, calls, exact.weight, None)
        assert_exact(head.running.norms, exact.running.norms)
        assert_rounded_once(head.weight, exact.weight, units=1)


def test_what_is_too_large_for_the_dtype_leaves_the_row(device: str) -> None:
    head, call = head_of(device, dtype=torch.float16, write="literal"), batch(device, 3)
    call.h[1] = 1e6
    call.targets.copy_(torch.tensor([1, 2, 3]))
    old = head.weight.detach().clone()
    write(head, [call], head.weight, None)
    assert torch.equal(head.weight[2], old[2])
    for label, row in ((1, 0), (3, 2)):
        assert_exact(head.weight[label], call.h[row].half(), ulps=1)


def test_the_papers_loops(device: str) -> None:
    head, oracle = head_of(device, write="literal"), Oracle(CLASSES, 0.2, 6)
    for n in (6, 20, 1, 13):
        call = batch(device, n)
        call.targets[0] = IGNORED
        exact = oracle.update(head.weight.detach().cpu().double(), call.h.cpu(), call.targets.cpu())
        write(head, [call], head.weight, None)
        assert_exact(head.weight, exact)
    assert head.counts.tolist() == oracle.counts


@pytest.mark.parametrize(
    "rate", [PaperRate(0.1, 50), RecentRate(0.3, 99), InclusiveRate(0.013, 40), InverseCountRate(), ConstantRate(0.3)]
)
@pytest.mark.parametrize(("in_step", "lr"), [(False, 1.0), (True, 1.0), (True, 0.93), (True, 0.5)])
@pytest.mark.parametrize("on_device", [False, True], ids=["number", "tensor"])
def test_known_rates_have_the_bits_of_float64_rounded(
    rate: Callable[[Tensor, Tensor], Tensor], in_step: bool, lr: float, on_device: bool, device: str
) -> None:
    from hebbian_softmax.write.gpu.runs import find_runs

    head = head_of(device, rate=rate)
    head.counts.copy_(torch.tensor([0, 1, 2, 3, 7, 11, 49, 50, 98, 2**24 + 1, 2**40]))
    head.since_start[::2] = 1
    head.running.batches[1] = 701
    y = torch.arange(CLASSES).repeat(3)[:-4].to(device)
    calls = [Activations(torch.randn(len(y), FEATURES).to(device), y)]
    at, highest = (torch.tensor(each, device=device) for each in (lr, 1.0)) if on_device else (lr, 1.0)
    timing = Timing(in_step, at, highest)
    twin = copy.deepcopy(head)
    runs = find_runs(head, calls, head.weight, timing)
    starts = runs.n > 0
    assert runs.n[starts].sum() == len(y)
    n, fallen = runs.n[starts].long(), timing.fallen(torch.device(device))
    wanted = twin.mixing_rate(runs.before[starts], n, in_step=in_step, fallen=fallen).float()
    written = wanted * torch.as_tensor(timing.strength(), dtype=torch.float32, device=device)
    assert torch.equal(runs.rate[starts], torch.where(head.since_start[runs.keys[starts].long()] > 0, written, wanted))


def test_the_same_input_gives_the_same_bits(device: str) -> None:
    head, calls = head_of(device), [batch(device, 30), batch(device, 30)]
    twin = copy.deepcopy(head)
    for each in (head, twin):
        write(each, calls, each.weight, None)
    assert_same_bits(head.state_dict(), twin.state_dict())


def test_autograd_sees_the_change(device: str) -> None:
    head = head_of(device)
    product = (torch.randn(3, FEATURES, device=device, requires_grad=True) @ head.weight.T).sum()
    write(head, [batch(device, 9)], head.weight, None)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


@pytest.mark.parametrize("at", [None, 0, 1500, 4999])
@pytest.mark.parametrize("value", [1e-30, torch.nan])
def test_any_nonzero(at: int | None, value: float, device: str) -> None:
    grad = torch.zeros(50, 100, device=device)
    if at is not None:
        grad.view(-1)[at] = value
    found = any_nonzero(grad)
    assert found.dtype == torch.bool
    assert bool(found) == bool(grad.any())


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": torch.float64},
        {"features": 16_385},
        {"objective": "svm"},
        {"objective": Doubled()},
        {"objective": lambda h, rows, classes, weight: h},
    ],
)
def test_what_the_kernels_do_not_do(change: dict[str, object]) -> None:
    options: dict[str, Any] = {"features": 4, "classes": 5, "gamma": 0.2, "limit": 6} | change
    head = early_head(**options)
    with kernels_on_cpu():
        assert not kernels_suit(head, head.weight)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="there is no Triton")
@pytest.mark.slow
def test_the_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    """This needs no GPU. It runs in a process of its own, since Triton may be interpreted in this one."""
    compile_apart("write/compile_kernels.py", tmp_path)
