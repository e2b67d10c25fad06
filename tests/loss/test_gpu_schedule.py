"""The schedule of the GPU's engine stays within the workspace, and no class is left over."""

from __future__ import annotations

import itertools

import pytest
import torch

from hebbian_softmax.loss.gpu.schedule import PADDING, TILE_CLASSES, TILE_ROWS, Schedule, default_workspace, padded
from hebbian_softmax.loss.problem import Needs, Problem

SIZES = list(itertools.product([1, 100, 1408, 4096, 51_200], [8, 512, 2048], [1, 300, 32_768, 267_735, 4_000_000]))
ALL = Needs(torch.bfloat16, torch.float32, None)


def problem_of(n: int, d: int, v: int) -> Problem:
    h, w = (torch.empty(size, d, dtype=torch.bfloat16, device="meta") for size in (n, v))
    return Problem(h, w, None, torch.empty(n, dtype=torch.int64, device="meta"))


def held(problem: Problem, schedule: Schedule, input_rows: int) -> int:
    """Return the bytes of E, the sums of its tiles, the scaled activations and the parts of dh."""
    features = problem.input.shape[1]
    tiles = -(-schedule.classes // TILE_CLASSES)
    chunk = schedule.rows * (2 * padded(schedule.classes, PADDING) + 4 * tiles + 2 * features)
    return chunk + 4 * schedule.splits * padded(input_rows, TILE_ROWS) * features


@pytest.mark.parametrize("workspace", [10**7, 10**8, 10**9])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_chunks_of_classes_and_of_rows(size: tuple[int, int, int], workspace: int) -> None:
    problem = problem_of(*size)
    schedule = Schedule.of_classes(problem, ALL, workspace, processors=132)
    least = Schedule(TILE_ROWS, min(padded(size[2], PADDING), 16 * TILE_CLASSES), 1)
    assert held(problem, schedule, size[0]) <= max(workspace * 1.01, held(problem, least, size[0]))
    if schedule.classes < size[2]:
        assert schedule.classes % TILE_CLASSES == 0
        assert schedule.classes % (8 * schedule.splits) == 0
    schedule = Schedule.of_rows(problem, ALL, workspace, processors=132)
    if schedule is not None:
        assert schedule.classes == size[2]
        assert held(problem, schedule, schedule.rows) <= workspace


@pytest.mark.parametrize("wanted", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("n", [1408, 6656, 7040, 8320, 12_900])
@pytest.mark.parametrize(("d", "v"), [(512, 267_735), (4096, 32_768), (4096, 267_735)])
def test_the_sum_of_a_rounded_gradient_fits_beside_chunks_of_rows(n: int, d: int, v: int, wanted: torch.dtype) -> None:
    problem, needs = problem_of(n, d, v), Needs(torch.bfloat16, wanted, None)
    workspace = default_workspace(problem, needs)
    schedule = Schedule.of_rows(problem, needs, workspace, processors=132)
    if schedule is not None:
        once = schedule.rows >= n and wanted == problem.input.dtype
        assert held(problem, schedule, schedule.rows) + (0 if once else 4 * padded(v, PADDING) * d) <= workspace
