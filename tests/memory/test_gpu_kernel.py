"""The cache's kernel against the products in float64: every edge of the band, several calls, several streams.

Without a GPU, Triton's interpreter runs the kernel in float32, mostly in tiles so small that short texts have many. On
a GPU it runs in bfloat16 and in its own tiles, as in use.
"""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hebbian_softmax import NeuralCache
from hebbian_softmax.memory.banded import banded_log_prob, kernel_for
from hebbian_softmax.memory.history import History, Timeline
from tests.closeness import assert_exact
from tests.interpreter import compile_apart, interpreted, quiet, recorded_launches
from tests.memory.oracles import stream
from tests.operations import Watch

pytest.importorskip("triton", reason="the kernel needs Triton")
gpu = pytest.importorskip("hebbian_softmax.memory.gpu.cache")
pytestmark = quiet
THETA = 0.4
WORKSPACE = 2**30


@pytest.fixture(params=[pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def tile_on(device: str) -> Any:
    return gpu.Tile(16, 32, 16) if device == "cpu" else gpu.Tile()


def text(length: int, features: int, classes: int, device: str, **options: Any) -> tuple[Tensor, Tensor]:
    """Return a stream with values that the kernel's dtype holds exactly."""
    h, targets = stream(length, features, classes, **options)
    return h.to(device, torch.float32 if device == "cpu" else torch.bfloat16), targets.to(device)


def read(
    h: Tensor, targets: Tensor, size: int, cuts: tuple[int, ...] = (), workspace: int = WORKSPACE, tile: Any = None
) -> Tensor:
    """Return what the kernel finds in a text that comes in pieces."""
    kernel = partial(gpu.log_prob, tile=tile or tile_on(h.device.type))
    streams, labels = (h, targets) if h.dim() == 3 else (h[None], targets[None])
    history, parts = History(size), []
    for low, high in itertools.pairwise((0, *cuts, h.shape[-2])):
        piece = streams[:, low:high], labels[:, low:high]
        timeline = Timeline(history.window(streams), piece)
        parts.append(banded_log_prob(timeline, [THETA], [size], None, workspace, kernel)[0, 0])
        history.append(*piece)
    return torch.cat(parts, -1).reshape(targets.shape)


def check(found: Tensor, h: Tensor, targets: Tensor, size: int) -> None:
    """Check log p_c of the last positions, up to roundings of the largest possible score."""
    assert found.dtype == torch.float32
    exact = NeuralCache(size, THETA).sequence_log_prob(h.double().contiguous(), targets.contiguous())
    largest = 1 + THETA * float(h.double().square().sum(-1).max())
    ulps = 256 if found.is_cuda else 16  # Tensor cores cut sums off instead of rounding them.
    assert_exact(found, exact[..., -found.shape[-1] :], scale=largest, ulps=ulps)


slowly = partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize("size", [slowly(1), 7, slowly(33), 1000])
@pytest.mark.parametrize(("length", "cuts"), [(1, ()), (60, (1, 40)), (70, (17, 49, 50))])
def test_windows_and_calls_in_a_row(length: int, cuts: tuple[int, ...], size: int, device: str) -> None:
    h, targets = text(length, 24, 5, device)
    check(read(h, targets, size, cuts), h, targets, size)


@pytest.mark.parametrize("features", [8, slowly(16), 40, slowly(136)])
def test_widths(features: int, device: str) -> None:
    h, targets = text(50, features, 5, device, scale=0.5)
    check(read(h, targets, 20, (30,)), h, targets, 20)


@pytest.mark.parametrize(("size", "cuts"), [(9, ()), (9, (11,)), (64, (50, 53))])
def test_streams(size: int, cuts: tuple[int, ...], device: str) -> None:
    h, targets = text(75, 16, 5, device, batch=3)
    check(read(h, targets, size, cuts), h, targets, size)


@pytest.mark.parametrize(("length", "size", "cuts"), [(500, 300, (350,)), slowly(400, 1000, (150,))])
def test_its_own_tiles(length: int, size: int, cuts: tuple[int, ...], device: str) -> None:
    h, targets = text(length, 72, 50, device, batch=2, scale=0.4)
    check(read(h, targets, size, cuts, tile=gpu.Tile()), h, targets, size)


@pytest.mark.parametrize("edge", ["itself", "the next", "the last seen", "one too far"])
def test_the_ends_of_the_window_to_the_position(edge: str, device: str) -> None:
    """One position holds the target of one query: itself, or another one that the query sees or does not see."""
    size, at, length = 21, 60, 80
    other = {"itself": at, "the next": at + 1, "the last seen": at - size, "one too far": at - size - 1}[edge]
    h, targets = text(length, 8, 4, device)
    targets[at] = targets[other] = 9
    for cuts in ((), (50,)):
        found = read(h, targets, size, cuts)[at]
        assert bool(found.isfinite()) == (edge == "the last seen")
        assert not found.isnan()


@pytest.mark.parametrize("edge", ["the query itself", "one too far", "one beyond the keys"])
def test_tiles_that_one_position_takes_over_the_edge(edge: str, device: str) -> None:
    """They must not be taken for tiles inside the band, in which no score is masked."""
    rows, keys, _ = tile_on(device)
    size, length, cuts = {
        "the query itself": (2 * keys - 1, 2 * keys + rows, ()),
        "one too far": (keys + rows - 2, keys + rows, ()),
        "one beyond the keys": (2 * keys + rows, 2 * keys - 1 + 2 * rows, (2 * keys - 1,)),
    }[edge]
    h, targets = text(length, 16, 5, device)
    check(read(h, targets, size, cuts), h, targets, size)


@pytest.mark.parametrize("cuts", [(), (2,)])
def test_scores_far_apart_neither_overflow_nor_vanish(cuts: tuple[int, ...], device: str) -> None:
    h = torch.zeros(3, 8, device=device, dtype=torch.float32 if device == "cpu" else torch.bfloat16)
    h[:, 0] = torch.tensor([60.0, 1.0, 60.0])  # exp(1440) and exp(24)
    found = read(h, torch.tensor([0, 1, 1], device=device), 10, cuts)
    assert_exact(found[2].cpu(), torch.tensor(-1416.0))


def test_targets_are_compared_whole(device: str) -> None:
    h, targets = text(40, 8, 3, device)
    targets += 2**32 * (torch.arange(40, device=device) % 2)
    check(read(h, targets, 20, (13,)), h, targets, 20)


def test_a_sure_target_has_no_more_than_probability_one(device: str) -> None:
    h, targets = text(50, 8, 1, device)
    found = read(h, targets, 30, (20,))
    assert (found[1:] <= 0).all()
    check(found, h, targets, 30)


def test_what_lies_around_the_window_in_memory_is_not_seen(device: str) -> None:
    h, targets = text(60, 16, 4, device, batch=2)
    keys, labels = torch.full_like(h[:, :50], torch.nan), torch.full_like(targets[:, :50], int(targets[0, 40]))
    keys[:, 8:33], labels[:, 8:33] = h[:, 8:33], targets[:, 8:33]
    timeline = Timeline((keys[:, 8:33], labels[:, 8:33]), (h[:, 33:], targets[:, 33:]))
    check(gpu.log_prob(timeline, THETA, 25, WORKSPACE, tile_on(device)), h, targets, 25)


@pytest.mark.parametrize("layout", ["streams last", "every other", "part of a row", "not at 16 bytes", "all the same"])
def test_layouts(layout: str, device: str) -> None:
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
    check(read(h, targets, 20, (17,)), h, targets, 20)


def test_slices_change_nothing_and_the_same_input_gives_the_same_bits(device: str) -> None:
    length, size = (96, 200) if device == "cpu" else (2000, 1500)
    h, targets = text(length, 8, 4, device)
    found, slices = [], []
    for workspace in (1, WORKSPACE, WORKSPACE):
        with recorded_launches() as launches:
            found.append(read(h, targets, size, (length // 2,), workspace=workspace))
        slices.append([each.grid[1] for each in launches if each.kernel == "band"])
    assert slices[0] == [1, 1, 1]
    assert max(slices[1]) > 1
    for each in found:
        check(each, h, targets, size)
    assert torch.equal(found[1][1:], found[2][1:])


@pytest.mark.parametrize("stored", [0, 500])
def test_few_operations_and_little_memory_whatever_the_length(stored: int) -> None:
    for length in (10, 1000, 50_000):
        before = torch.empty(1, stored, 16), torch.zeros(1, stored, dtype=torch.int64)
        timeline = Timeline(before, (torch.empty(1, length, 16), torch.zeros(1, length, dtype=torch.int64)))
        with recorded_launches(run=False) as launches, Watch() as watch:
            gpu.log_prob(timeline, THETA, 400, 2**14)
        assert len(launches) == (3 if stored else 2)
        assert watch.operations + len(launches) <= 6
        assert watch.most <= 2 * max(2**14, 16 * length) + 4 * length  # Each part has at least one slice.


def test_where_it_is_not_used() -> None:
    h, targets = (each[None] for each in stream(30, 8, 4))
    timeline = Timeline((h[:, :0], targets[:, :0]), (h, targets))
    calls: list[tuple[float, int]] = []

    def kernel(timeline: Timeline, theta: float, size: int, workspace: int) -> Tensor:
        calls.append((theta, size))
        return torch.zeros(targets.shape)

    for thetas, sizes in (([0.1, 0.2], [20]), ([0.1], [5, 20])):
        banded_log_prob(timeline, thetas, sizes, None, WORKSPACE, kernel)
    assert banded_log_prob(timeline, [0.2], [5], None, WORKSPACE, kernel).shape == (1, 1, 1, 30)
    assert calls == [(0.2, 5)]


def test_nothing_to_do(device: str) -> None:
    h, targets = text(5, 8, 4, device)
    assert read(h[:0], targets[:0], 20).shape == (0,)
    assert read(h, targets, 20, (5,)).shape == (5,)


def test_a_cpu_has_no_kernel() -> None:
    h, targets = stream(5, 8, 4)
    for dtype in (torch.bfloat16, torch.float32):
        timeline = Timeline((h[None, :0].to(dtype), targets[None, :0]), (h[None].to(dtype), targets[None]))
        assert not gpu.available(timeline)
        assert kernel_for(timeline) is None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_half_precision_uses_it(dtype: torch.dtype) -> None:
    h, targets = stream(3000, 512, 300, scale=0.2)
    h, targets = h.to("cuda", dtype), targets.cuda()
    timeline = Timeline((h[None, :0], targets[None, :0]), (h[None], targets[None]))
    assert (kernel_for(timeline) is gpu.log_prob) == (dtype != torch.float32)
    cache = NeuralCache(1000, THETA)
    pieces = (slice(0, 1500), slice(1500, 1501), slice(1501, 3000))
    check(torch.cat([cache.sequence_log_prob(h[piece], targets[piece]) for piece in pieces]), h, targets, 1000)


@pytest.mark.gpu
def test_it_is_repeatable_when_many_programs_run() -> None:
    h, targets = stream(20_000, 64, 300, scale=0.3)
    h, targets = h.to("cuda", torch.bfloat16), targets.cuda()
    first = read(h, targets, 5000, (7000,))
    assert all(torch.equal(first[1:], read(h, targets, 5000, (7000,))[1:]) for _ in range(5))
    check(first, h, targets, 5000)


@pytest.mark.slow
def test_the_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    """This needs no GPU, but a process of its own, because Triton may be interpreted in this one."""
    compile_apart("memory/compile_kernels.py", tmp_path)
