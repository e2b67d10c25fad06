"""The cache's kernel against the products in float64: every edge of the band, several calls, several streams.

Without a GPU it runs in Triton's interpreter, in float32, and mostly in tiles so small that short texts have many; on a
GPU in bfloat16 and in its own tiles, as in use.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from hebbian_softmax import NeuralCache
from hebbian_softmax.memory import banded
from hebbian_softmax.memory.history import Timeline
from tests.interpreter import compile_apart, interpreted, quiet
from tests.loss.test_memory import Watch
from tests.memory.oracles import cache_log_prob, stream

pytest.importorskip("triton", reason="the kernel needs Triton")
fused = pytest.importorskip("hebbian_softmax.memory.fused")
pytestmark = quiet
THETA = 0.4


class Engine:
    """The module, and how often it was asked."""

    def __init__(self) -> None:
        self.calls = 0

    def log_prob(self, *arguments: Any) -> Tensor:
        self.calls += 1
        return fused.log_prob(*arguments)


@pytest.fixture(params=[pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def engine(device: str, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """In use for float32 on the CPU, and on a GPU where it would be."""
    engine = Engine()

    def choose(timeline: Timeline) -> Engine | None:
        h = timeline.sequence[0]
        return engine if (h.dtype == torch.float32 if device == "cpu" else fused.available(timeline)) else None

    monkeypatch.setattr(banded, "fused", choose)
    if device == "cpu":
        for name, size in (("TILE_ROWS", 16), ("TILE_KEYS", 32), ("TILE_FEATURES", 16)):
            monkeypatch.setattr(fused, name, size)
    return engine


def text(length: int, features: int, classes: int, device: str, **options: Any) -> tuple[Tensor, Tensor]:
    """With values that the kernel's dtype holds exactly."""
    h, targets = stream(length, features, classes, **options)
    return h.to(device, torch.float32 if device == "cpu" else torch.bfloat16), targets.to(device)


def read(h: Tensor, targets: Tensor, size: int, cuts: tuple[int, ...] = (), **options: Any) -> Tensor:
    cache = NeuralCache(size, THETA)
    bounds = itertools.pairwise((0, *cuts, h.shape[-2]))
    parts = [cache.sequence_log_prob(h[..., a:b, :], targets[..., a:b], **options) for a, b in bounds]
    return torch.cat(parts, -1)


def check(found: Tensor, h: Tensor, targets: Tensor, size: int) -> None:
    assert found.dtype == torch.float32
    close(found, read(h.double(), targets, size))


def close(found: Tensor, expected: Tensor) -> None:
    tolerance = 2e-4 if found.is_cuda else 2e-5  # tensor cores sum float32 coarsely
    assert_close(found.double(), expected, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("size", [1, 7, 33, 1000])
@pytest.mark.parametrize(("length", "cuts"), [(1, ()), (60, (1, 40)), (70, (17, 49, 50))])
def test_windows_and_calls_in_a_row(length: int, cuts: tuple[int, ...], size: int, device: str, engine: Engine) -> None:
    h, targets = text(length, 24, 5, device)
    check(read(h, targets, size, cuts), h, targets, size)
    assert engine.calls == len(cuts) + 1


@pytest.mark.parametrize("size", [1, 5, 100])
def test_the_double_loop(size: int, device: str, engine: Engine) -> None:
    h, targets = text(40, 8, 4, device)
    expected = cache_log_prob(h.double().cpu(), targets.cpu(), size, THETA)
    close(read(h, targets, size, (22,)), expected.to(device))
    assert engine.calls == 2


@pytest.mark.parametrize("features", [8, 16, 40, 136])
def test_widths(features: int, device: str, engine: Engine) -> None:
    h, targets = text(50, features, 5, device, scale=0.5)
    check(read(h, targets, 20, (30,)), h, targets, 20)


@pytest.mark.parametrize(("size", "cuts"), [(9, ()), (9, (11,)), (64, (50, 53))])
def test_streams(size: int, cuts: tuple[int, ...], device: str, engine: Engine) -> None:
    h, targets = text(75, 16, 5, device, batch=3)
    check(read(h, targets, size, cuts), h, targets, size)


@pytest.mark.parametrize(("length", "size", "cuts"), [(500, 300, (350,)), (400, 1000, (150,))])
def test_its_own_tiles(
    length: int, size: int, cuts: tuple[int, ...], device: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, each in (("TILE_ROWS", 128), ("TILE_KEYS", 256), ("TILE_FEATURES", 64)):
        monkeypatch.setattr(fused, name, each)
    h, targets = text(length, 72, 50, device, batch=2, scale=0.4)
    check(read(h, targets, size, cuts), h, targets, size)


@pytest.mark.parametrize("edge", ["itself", "the next", "the last seen", "one too far"])
def test_the_ends_of_the_window_to_the_position(edge: str, device: str, engine: Engine) -> None:
    """One other position holds the target of one query, or only the query itself: it is seen or it is not."""
    size, at, length = 21, 60, 80
    other = {"itself": at, "the next": at + 1, "the last seen": at - size, "one too far": at - size - 1}[edge]
    h, targets = text(length, 8, 4, device)
    targets[at] = targets[other] = 9
    for cuts in ((), (50,)):
        found = read(h, targets, size, cuts)[at]
        assert bool(found.isfinite()) == (edge == "the last seen")
        assert not found.isnan()


@pytest.mark.parametrize("edge", ["the query itself", "one too far", "one beyond the keys"])
def test_tiles_that_one_position_takes_over_the_edge(edge: str, device: str, engine: Engine) -> None:
    """They must not pass for tiles within the band, of which no score is masked."""
    rows, keys = fused.TILE_ROWS, fused.TILE_KEYS
    size, length, cuts = {
        "the query itself": (2 * keys - 1, 2 * keys + rows, ()),
        "one too far": (keys + rows - 2, keys + rows, ()),
        "one beyond the keys": (2 * keys + rows, 2 * keys - 1 + 2 * rows, (2 * keys - 1,)),
    }[edge]
    h, targets = text(length, 16, 5, device)
    check(read(h, targets, size, cuts), h, targets, size)


def test_a_window_of_one_is_the_word_before(device: str, engine: Engine) -> None:
    h, targets = text(60, 8, 3, device)
    same = torch.where(targets[1:] == targets[:-1], 0.0, -torch.inf)
    found = read(h, targets, 1, (33,))
    assert found[0].isnan()
    assert torch.equal(found[1:], same)


@pytest.mark.parametrize("cuts", [(), (2,)])
def test_scores_far_apart_neither_overflow_nor_vanish(cuts: tuple[int, ...], device: str, engine: Engine) -> None:
    h = torch.zeros(3, 8, device=device, dtype=torch.float32 if device == "cpu" else torch.bfloat16)
    h[:, 0] = torch.tensor([60.0, 1.0, 60.0])  # exp(1440) and exp(24)
    found = read(h, torch.tensor([0, 1, 1], device=device), 10, cuts)
    assert_close(found[2].cpu(), torch.tensor(-1416.0))


def test_targets_are_compared_whole(device: str, engine: Engine) -> None:
    h, targets = text(40, 8, 3, device)
    targets += 2**32 * (torch.arange(40, device=device) % 2)
    check(read(h, targets, 20, (13,)), h, targets, 20)


def test_a_sure_target_has_no_more_than_probability_one(device: str, engine: Engine) -> None:
    h, targets = text(50, 8, 1, device)
    found = read(h, targets, 30, (20,))
    assert (found[1:] <= 0).all()
    assert_close(found[1:], torch.zeros_like(found[1:]), rtol=0, atol=1e-6)


def test_ignored_targets_are_refused_as_ever(device: str, engine: Engine) -> None:
    h, targets = text(20, 8, 3, device)
    targets[7] = -100
    cache = NeuralCache(10, THETA)
    with pytest.raises(ValueError, match="targets must be at least 0, got -100"):
        cache.sequence_log_prob(h, targets)
    assert len(cache) == 0
    assert engine.calls == 0


def test_what_lies_around_the_window_in_memory_is_not_seen(device: str, engine: Engine) -> None:
    h, targets = text(60, 16, 4, device, batch=2)
    cache = NeuralCache(25, THETA)
    cache.observe(h[:, :20], targets[:, :20])
    cache.observe(h[:, 20:33], targets[:, 20:33])
    history = cache._history
    assert 0 < history._start < history._end < history._keys.shape[1]
    for around in (slice(0, history._start), slice(history._end, None)):
        history._keys[:, around] = torch.nan
        history._labels[:, around] = targets[0, 40]
    found = cache.sequence_log_prob(h[:, 33:], targets[:, 33:])
    close(found, read(h.double(), targets, 25)[:, 33:])


@pytest.mark.parametrize(
    "layout", ["streams last", "every other", "part of a row", "not at 16 bytes", "the same for all"]
)
def test_layouts(layout: str, device: str, engine: Engine) -> None:
    h, targets = text(40, 8, 4, device, batch=2)
    if layout == "streams last":
        h, targets = h.transpose(0, 1).contiguous().transpose(0, 1), targets.T.contiguous().T
    elif layout == "every other":
        h, targets = h.repeat_interleave(2, 1)[:, ::2], targets.repeat_interleave(2, 1)[:, ::2]
    elif layout == "part of a row":
        h = h.repeat(1, 1, 2)[..., 8:]
    elif layout == "not at 16 bytes":
        h = torch.cat([h.new_zeros(1), h.flatten()])[1:].view(h.shape)
    else:
        h, targets = h[:1].expand(2, -1, -1), targets[:1].expand(2, -1)
    expected = read(h.double().contiguous(), targets.contiguous(), 20)
    close(read(h, targets, 20, (17,)), expected)


def test_slices_change_nothing_and_the_same_input_gives_the_same_bits(
    device: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    length, size = (96, 200) if device == "cpu" else (2000, 1500)
    h, targets = text(length, 8, 4, device)
    made, choose = [], fused.slices_of

    def noted(*arguments: int) -> int:
        made.append(choose(*arguments))
        return made[-1]

    monkeypatch.setattr(fused, "slices_of", noted)
    one, many, again = (read(h, targets, size, (length // 2,), workspace=most) for most in (1, 2**30, 2**30))
    assert made[:3] == [1, 1, 1]
    assert max(made[3:]) > 1
    check(one, h, targets, size)
    check(many, h, targets, size)
    assert torch.equal(many[1:], again[1:])


class Launches:
    """In place of a kernel: counts."""

    def __init__(self) -> None:
        self.count = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self.launch

    def launch(self, *arguments: Any, **options: Any) -> None:
        self.count += 1


class Operations(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("stored", [0, 500])
def test_few_operations_and_little_memory_whatever_the_length(stored: int, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = Launches()
    for name in ("band", "join"):
        monkeypatch.setattr(fused.kernels, name, launches)
    for length in (10, 1000, 50_000):
        launches.count = 0
        before = torch.empty(1, stored, 16), torch.zeros(1, stored, dtype=torch.int64)
        timeline = Timeline(before, (torch.empty(1, length, 16), torch.zeros(1, length, dtype=torch.int64)))
        with Operations() as operations, Watch() as watch:
            fused.log_prob(timeline, THETA, 400, 2**14)
        assert launches.count == (3 if stored else 2)
        assert operations.count + launches.count <= 6
        assert watch.most <= 2 * max(2**14, 16 * length) + 4 * length  # never less than a slice for each part


def test_where_it_is_not_used(device: str, engine: Engine) -> None:
    h, targets = text(30, 8, 4, device)
    cache = NeuralCache(20, THETA)
    cache.sequence_log_prob(h, targets, thetas=[0.1, 0.2])
    cache.sequence_log_prob(h, targets, sizes=[5, 20])
    cache.reset()
    cache.sequence_log_prob(h.double(), targets)
    assert engine.calls == 0
    cache.reset()
    found = cache.sequence_log_prob(h, targets, thetas=[0.2], sizes=[5])  # one of each is no sweep
    assert engine.calls == 1
    assert found.shape == (1, 1, 30)
    close(found[0, 0], NeuralCache(5, 0.2).sequence_log_prob(h.double(), targets))


def test_nothing_to_do(device: str, engine: Engine) -> None:
    h, targets = text(5, 8, 4, device)
    cache = NeuralCache(20, THETA)
    assert cache.sequence_log_prob(h[:0], targets[:0]).shape == (0,)
    cache.observe(h, targets)
    assert cache.sequence_log_prob(h[:0], targets[:0]).shape == (0,)


def test_a_cpu_has_no_kernel() -> None:
    h, targets = stream(5, 8, 4)
    for dtype in (torch.bfloat16, torch.float32):
        sequence = h[None].to(dtype), targets[None]
        timeline = Timeline((sequence[0][:, :0], sequence[1][:, :0]), sequence)
        assert not fused.available(timeline)
        assert banded.fused(timeline) is None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_half_precision_uses_it(dtype: torch.dtype) -> None:
    h, targets = stream(3000, 512, 300, scale=0.2)
    h, targets = h.to("cuda", dtype), targets.cuda()
    timeline = Timeline((h[None, :0], targets[None, :0]), (h[None], targets[None]))
    assert (banded.fused(timeline) is fused) == (dtype != torch.float32)
    check(read(h, targets, 1000, (1500, 1501)), h, targets, 1000)


@pytest.mark.gpu
def test_it_is_repeatable_when_many_programs_run() -> None:
    h, targets = stream(20_000, 64, 300, scale=0.3)
    h, targets = h.to("cuda", torch.bfloat16), targets.cuda()
    first = read(h, targets, 5000, (7000,))
    assert all(torch.equal(first[1:], read(h, targets, 5000, (7000,))[1:]) for _ in range(5))
    check(first, h, targets, 5000)


def test_the_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    """Also without one. In a process of its own, since Triton may be interpreted in this one."""
    compile_apart("memory/compile_kernels.py", tmp_path)
