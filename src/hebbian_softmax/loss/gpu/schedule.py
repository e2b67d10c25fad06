"""How the GPU's engine divides its work: into chunks of rows or of classes, within a workspace."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hebbian_softmax.loss.problem import Needs, Problem

TILE_ROWS, TILE_CLASSES, TILE_FEATURES = 128, 256, 64
"""The tile of logits that one program computes, and how many features it reads at a time."""

PADDING = 64
"""Classes are padded to a multiple of this."""

_FEWEST_ROWS = 640
"""With fewer rows in a chunk, reading and writing the float32 sum of dW for every chunk (8 bytes an entry) takes longer
than computing the logits twice (2·rows operations an entry), at an H200's 4.3 TB/s and 700 TFLOP/s."""

_MOST_SPLITS = 8


def padded(size: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``size``.

    >>> padded(267_735, 64)
    267776
    """
    return -(-size // multiple) * multiple


def default_workspace(problem: Problem, needs: Needs) -> int:
    """Return the bytes of one and a half times the matrix in float32, within 0.6 … 3.6 GB.

    Chunks are then so large that the sum of dW is read and written only a few times. A gradient in half precision is
    rounded from a sum that takes two thirds of this, so it may have a fifth more, and 3.9 GB at most.
    """
    entries = problem.planned_classes * problem.weight.shape[1]
    if needs.weight in (None, torch.float32):
        return min(max(6 * entries, 600_000_000), 3_600_000_000)
    return min(max(6 * entries * 6 // 5, 600_000_000), 3_900_000_000)


@dataclass(frozen=True)
class Schedule:
    """The sizes of the chunks."""

    rows: int
    """Rows in a chunk; a multiple of ``TILE_ROWS``."""
    classes: int
    """Classes in a chunk."""
    splits: int
    """The number of products, each over a part of the classes, into which that of dh is split to fill the device."""

    @staticmethod
    def of_rows(problem: Problem, needs: Needs, workspace: int, processors: int) -> Schedule | None:
        """Return a schedule of chunks of rows with all classes; None where chunks of classes are better.

        Ranks that share the rows of the matrix all find the same chunks.
        """
        rows, features = problem.input.shape
        classes = problem.planned_classes
        size = problem.input.element_size()
        per_row = size * padded(classes, PADDING) + 4 * -(-classes // TILE_CLASSES) + size * features
        rounded = needs.weight not in (None, torch.float32)
        most = -(-rows // TILE_ROWS) if needs.weight is None else rows // _FEWEST_ROWS
        for chunks in range(1, max(most, 1) + 1):
            chunk = padded(max(-(-rows // chunks), 1), TILE_ROWS)
            splits = _splits(chunk, classes, features, processors)
            once = chunk >= rows and needs.weight == problem.input.dtype
            total = 4 * padded(classes, PADDING) * features if rounded and not once else 0  # the float32 sum of dW
            if chunk * (per_row + 4 * splits * features) + total <= workspace:
                return Schedule(chunk, problem.weight.shape[0], splits)
        return None

    @staticmethod
    def of_classes(problem: Problem, needs: Needs, workspace: int, processors: int) -> Schedule:
        """Return a schedule of chunks of classes with the rows that fit, at least one tile of rows by 16 of classes."""
        rows, features = problem.input.shape
        classes = problem.weight.shape[0]
        size = problem.input.element_size()
        splits = 1
        if needs.input is not None:
            total = 4 * padded(max(rows, 1), TILE_ROWS) * features
            splits = max(min(_splits(rows, classes, features, processors), workspace // 2 // total), 1)
            workspace -= splits * total
        least = min(padded(classes, PADDING), 16 * TILE_CLASSES)
        per_row = size * least + 4 * -(-least // TILE_CLASSES) + size * features
        chunk = min(padded(max(rows, 1), TILE_ROWS), max(workspace // per_row // TILE_ROWS, 1) * TILE_ROWS)
        per_class = size * chunk + 4 * chunk // TILE_CLASSES
        width = max((workspace - size * features * chunk) // per_class // TILE_CLASSES * TILE_CLASSES, least)
        width = min(width, padded(classes, PADDING))
        chunks = -(-classes // width)
        width = min(padded(-(-classes // chunks), TILE_CLASSES), classes)
        splits = 1 if rows > chunk else min(splits, _splits(rows, width, features, processors))
        if width < classes:  # Only after the last chunk are classes left over added, so all others must divide evenly.
            splits = 1 << (splits.bit_length() - 1)
        return Schedule(chunk, width, splits)


def _splits(rows: int, classes: int, features: int, processors: int) -> int:
    """Return the number of products with the fewest idle processors in their last round; a split costs a little, too.

    >>> _splits(1408, 267_735, 512, processors=132)
    6
    """
    tiles = -(-max(rows, 1) // TILE_ROWS) * -(-features // TILE_CLASSES)
    most = max(min(_MOST_SPLITS, classes // 4096), 1)

    def cost(splits: int) -> float:
        rounds = -(-tiles * splits // processors)
        return rounds * processors / (tiles * splits) + 0.01 * splits

    return min(range(1, most + 1), key=cost)
