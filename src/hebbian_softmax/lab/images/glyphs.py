"""Glyphs: the task of Omniglot with no download, from the characters of the fonts that matplotlib ships.

A class is a shape that at least 8 faces have; characters that look alike (A, Α, А) are one class, and those that are
too near to another are left out (`fonts.shapes`). Each of a class's 20 drawings is one face's character, distorted as
by a hand: turned, slanted, stretched and moved as a whole, bent in places, drawn with a finer or a broader pen.

The faces of a class come in random order, each as often as any other or once more, and this is independent of which
drawings are for testing (the first 5). So a test drawing mostly shows a face that the class's training drawings
lack, though often its bold or slanted sibling is there, and no face is only for testing: a network must learn
what faces have in common, as in Omniglot, where each drawing of a class is by another person.
"""

import hashlib
import importlib.metadata
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from hebbian_softmax.lab.base.extras import require
from hebbian_softmax.lab.base.progress import Progress
from hebbian_softmax.lab.base.seeds import derive_seed
from hebbian_softmax.lab.images.cache import cached
from hebbian_softmax.lab.images.data import DRAWINGS, SIZE, ImageSet
from hebbian_softmax.lab.images.fonts import CELL, FACES, Bitmaps, render_faces, shapes

PREPARATION = "1"  # raise it when the same fonts and seed give other pixels, and caches of before are not used
CHUNK = 200  # drawings distorted at a time: few enough for the processor's cache

# How far each distortion goes at most, both ways.
ANGLE = math.radians(12)
SLANT = 0.25  # of the height
STRETCH = 0.2  # of width and height, each by itself, as a logarithm
MOVE = 1.5  # pixels of 28
BEND = 1.0  # pixels of 28, one standard deviation
KNOTS = 5  # along each axis, where bends have their centres
LINE, ONE = KNOTS, KNOTS + 1  # where `_basis` has x and 1
PEN = (-0.5, 1.0)  # pixels of 28 that strokes gain


def make_glyphs(seed: int = 0, *, cache_dir: Path | None = None, quiet: bool = False) -> ImageSet:
    """More than 1,000 classes, 28×28; made in seconds and kept in `cache_dir`.

    That is `images` under HEBBIAN_CACHE by default, else under the user's cache folder. The seed fixes faces and
    distortions, not the classes. The same seed gives the same bits whenever matplotlib, Pillow (and the FreeType in
    it) and torch are the same; another version may draw an outline or round a pixel otherwise. `identity` tells.
    """
    require("numpy", "matplotlib", "PIL")
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("matplotlib", "Pillow", "torch")]
    key = hashlib.sha256("\n".join([PREPARATION, str(seed), *versions]).encode()).hexdigest()[:16]
    return cached("glyphs", key, lambda: _make(seed, quiet), cache_dir)


def _make(seed: int, quiet: bool) -> ImageSet:
    with Progress("glyphs", total=len(FACES), unit="faces", quiet=quiet) as progress:
        faces = render_faces(progress)
    classes = shapes(faces)
    images = draw(faces, list(classes), seed, quiet)
    return ImageSet("glyphs", images, ["".join(map(chr, alike)) for alike in classes.values()])


def draw(faces: list[Bitmaps], codes: list[int], seed: int, quiet: bool) -> Tensor:
    """Images (classes, 20, 28, 28): the drawings of the shapes that `codes` have."""
    generator = torch.Generator().manual_seed(derive_seed(seed, "glyphs"))
    cells = torch.cat([face.cells for face in faces])
    chosen = choose(faces, codes, generator).flatten()
    coefficients = places(len(chosen), generator)
    pen = PEN[0] + (PEN[1] - PEN[0]) * torch.rand(len(chosen), generator=generator)
    parts: list[Tensor] = []
    with Progress("glyphs", total=len(chosen), unit="drawings", quiet=quiet) as progress:
        for part in torch.arange(len(chosen)).split(CHUNK):
            parts.append(distort(cells[chosen[part]], coefficients[part], pen[part]))
            progress.update(int(part[-1]) + 1)
    return torch.cat(parts).view(len(codes), DRAWINGS, SIZE, SIZE)


def choose(faces: list[Bitmaps], codes: list[int], generator: torch.Generator) -> Tensor:
    """Which bitmap each drawing is of (classes, 20), as positions in all faces' cells, one face after the other."""
    where: dict[int, list[int]] = {}
    position = 0
    for face in faces:
        for code in face.codes:
            where.setdefault(code, []).append(position)
            position += 1

    def order(length: int) -> Tensor:
        return torch.randperm(length, generator=generator)

    chosen = []
    for code in codes:
        having = torch.tensor(where[code])
        rounds = [having[order(len(having))] for _ in range(math.ceil(DRAWINGS / len(having)))]
        chosen.append(torch.cat(rounds)[:DRAWINGS][order(DRAWINGS)])
    return torch.stack(chosen)


def places(drawings: int, generator: torch.Generator) -> Tensor:
    """What moves each drawing's points, as coefficients (drawings, 2, knots + 2, knots + 2) of `_basis`.

    A pixel at (x, y) shows the point Σ_kl c_kl φ_k(y) φ_l(x) of the bitmap, for each of its two coordinates: φ = x and
    φ = 1 make the affine part, the bumps at the knots bend it.
    """

    def uniform(limit: float) -> Tensor:
        return limit * (2 * torch.rand(drawings, generator=generator) - 1)

    angle, slant = uniform(ANGLE), uniform(SLANT)
    width, height = uniform(STRETCH).exp(), uniform(STRETCH).exp()
    right, down = uniform(MOVE), uniform(MOVE)
    cos, sin = angle.cos(), angle.sin()
    # Turned back, then slanted back and stretched back: the point that the pixel comes from.
    matrix = [
        [(cos + slant * sin) / width, (slant * cos - sin) / width],
        [sin / height, cos / height],
    ]
    coefficients = torch.zeros(drawings, 2, KNOTS + 2, KNOTS + 2)
    coefficients[:, :, :KNOTS, :KNOTS] = BEND * torch.randn(drawings, 2, KNOTS, KNOTS, generator=generator)
    for coordinate, (of_x, of_y) in enumerate(matrix):
        coefficients[:, coordinate, ONE, LINE] = of_x
        coefficients[:, coordinate, LINE, ONE] = of_y
        coefficients[:, coordinate, ONE, ONE] = -of_x * right - of_y * down
    return coefficients


def _basis() -> Tensor:
    """(56, knots + 2): a smooth bump at each knot, then x, then 1, at the pixels' centres in pixels of 28."""
    axis = (torch.arange(CELL) + 0.5) * (SIZE / CELL) - SIZE / 2
    knots = torch.linspace(-SIZE / 2, SIZE / 2, KNOTS)
    breadth = 0.5 * SIZE / (KNOTS - 1)
    bumps = torch.exp(-0.5 * ((axis[:, None] - knots) / breadth).square())
    return torch.cat([bumps, axis[:, None], torch.ones(CELL, 1)], dim=1)


def distort(cells: Tensor, coefficients: Tensor, pen: Tensor) -> Tensor:
    """Bitmaps (n, 56, 56) as drawings (n, 28, 28), moved by `coefficients` and with strokes `pen` pixels broader."""
    basis = _basis() * (2 / SIZE) ** 0.5  # grid_sample's edges are at ±1
    grid = (basis @ coefficients @ basis.T).permute(0, 2, 3, 1)
    ink = F.grid_sample(_redraw(cells, pen).unsqueeze(1), grid, align_corners=False)
    return F.avg_pool2d(ink, CELL // SIZE).squeeze(1).round().to(torch.uint8)


def _redraw(cells: Tensor, pen: Tensor) -> Tensor:
    """Bitmaps with strokes `pen` pixels of 28 broader: part of the way to each pixel taking its neighbours' ink.

    One neighbour on each side is one pixel of 28, since two of these make one. Finer is the same for the paper, and
    less than one pixel, or hairlines would vanish.
    """
    broad = _spread(cells)
    fine = 255 - _spread(255 - cells)
    pen = pen.view(-1, 1, 1)
    return cells.float().lerp(torch.where(pen > 0, broad, fine).float(), pen.abs())


def _spread(cells: Tensor) -> Tensor:
    """The largest of each pixel and its eight neighbours; on bytes much faster than max_pool2d on floats."""
    for axis in (1, 2):
        spread = cells.clone()
        inner = cells.shape[axis] - 1
        for to, source in ((0, 1), (1, 0)):
            target = spread.narrow(axis, to, inner)
            torch.maximum(target, cells.narrow(axis, source, inner), out=target)
        cells = spread
    return cells
