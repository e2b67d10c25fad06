"""Glyphs: Omniglot's task without a download, made from the characters of the fonts that matplotlib ships.

A class is a shape that at least 8 faces have. Characters that look alike (A, Α, А) are one class, and characters that
are too near to another class are left out (`shapes`). Each of a class's 20 drawings is the character of one face,
distorted as by a hand: turned, slanted, stretched and moved as a whole, bent in places, drawn with a finer or a
broader pen.

The faces of a class come in random order, each as often as any other or once more, and independently of which
drawings are for testing (the first 5). So a test drawing mostly shows a face that the training drawings of its class
lack, though often its bold or slanted sibling is there, and no face is only for testing: a network must learn
what faces have in common, as in Omniglot, where each drawing of a class is by another person.
"""

import collections
import hashlib
import importlib.metadata
import itertools
import math
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.base.extras import require
from hebbian_softmax.lab.base.progress import Progress
from hebbian_softmax.lab.base.seeds import derive_seed
from hebbian_softmax.lab.images.curriculum import CurriculumSettings
from hebbian_softmax.lab.images.data import DRAWINGS, SIZE, ImageSet, ImageSource, cached

PREPARATION = "1"  # raise this when the same fonts and seed give other pixels, so that older caches are not used
CHUNK = 200  # drawings distorted at a time: few enough for the processor's cache

# Left out: LastResort has one picture for all characters of a block; cmex10 and STIXSiz* hold parts of large symbols,
# STIXNonUni* private code points, the Display faces a few dozen characters; cmsy10 has symbols under letters' codes.
FACES = (
    *(f"DejaVuSans{style}" for style in ("", "-Bold", "-Oblique", "-BoldOblique")),
    *(f"DejaVuSansMono{style}" for style in ("", "-Bold", "-Oblique", "-BoldOblique")),
    *(f"DejaVuSerif{style}" for style in ("", "-Bold", "-Italic", "-BoldItalic")),
    *(f"STIXGeneral{style}" for style in ("", "Bol", "Italic", "BolIta")),
    *("cmr10", "cmb10", "cmss10", "cmti10", "cmtt10", "cmmi10"),
)
MIN_FACES = 8  # faces that must have a shape
CELL = 56  # pixels a side of a bitmap
LONG_SIDE = 40  # pixels of the longer side of every character, whatever its size in the font
MEASURE = 1000  # font size at which outlines are measured
SMALLEST = 0.1  # smallest longer side, relative to the font size: a smaller character could be anything
ALIKE = 0.01  # distance below which two characters are one shape: A, Α and А are within 0.004
APART = 0.08  # smallest distance between two classes: E and F are 0.09 apart, À and Á less than 0.06

# Characters that do not stand for themselves: marks on others, modifiers, spaces, control, private use, unassigned.
SKIPPED_CATEGORIES = ("M", "Lm", "Sk", "Z", "C")
# Characters that differ only by their place in a cell, which a shape does not have: box drawing, blocks, braille.
SKIPPED_RANGES = (range(0x2500, 0x25A0), range(0x2800, 0x2900))

# The largest distortion of each kind, in both directions.
ANGLE = math.radians(12)
SLANT = 0.25  # relative to the height
STRETCH = 0.2  # of width and height separately, as a logarithm
MOVE = 1.5  # pixels of 28
BEND = 1.0  # one standard deviation, in pixels of 28
KNOTS = 5  # centres of bends along each axis
LINE, ONE = KNOTS, KNOTS + 1  # the columns of `_basis` that hold x and 1
PEN = (-0.5, 1.0)  # range of the pixels of 28 that strokes gain


@dataclass(frozen=True)
class Bitmaps:
    """The characters of one face: `cells` (n, 56, 56) in uint8 with ink 255, and their code points in order."""

    codes: list[int]
    cells: Tensor


Render = Callable[[Progress], list[Bitmaps]]


def make_glyphs(
    seed: int = 0, *, cache_dir: Path | None = None, quiet: bool = False, render: Render | None = None
) -> ImageSet:
    """Return more than 1,000 classes of 28×28 pixels, made in seconds and kept in `cache_dir`.

    The default folder is `images` under HEBBIAN_CACHE, or else under the user's cache folder. The seed decides the
    faces and the distortions, not the classes. The same seed gives the same bits whenever matplotlib, Pillow (with
    its FreeType) and torch are the same; another version may draw an outline or round a pixel differently, which
    `identity` shows. `render` makes the bitmaps of the faces (default: `render_faces`).
    """
    require("numpy", "matplotlib", "PIL")
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("matplotlib", "Pillow", "torch")]
    key = hashlib.sha256("\n".join([PREPARATION, str(seed), *versions]).encode()).hexdigest()[:16]
    return cached("glyphs", key, lambda: make_anew(seed, quiet, render or render_faces), cache_dir)


def make_anew(seed: int, quiet: bool, render: Render) -> ImageSet:
    """Render the faces, find the classes and draw them."""
    with Progress("glyphs", total=len(FACES), unit="faces", quiet=quiet) as progress:
        faces = render(progress)
    classes = shapes(faces)
    images = draw(faces, list(classes), seed, quiet)
    return ImageSet("glyphs", images, ["".join(map(chr, alike)) for alike in classes.values()])


SOURCE = ImageSource(
    name="glyphs",
    help="new classes of printed characters keep coming; no download, one to three minutes",
    settings=CurriculumSettings,  # the defaults are `make demo`, chosen by measurement: see results/glyphs-demo
    load=lambda settings, quiet: make_glyphs(quiet=quiet),
)


def render_faces(progress: Progress) -> list[Bitmaps]:
    """Render every character that at least 8 faces have, in each face that has it."""
    paths = [_path(face) for face in FACES]
    charmaps = [_charmap(path) for path in paths]
    counts = collections.Counter(itertools.chain.from_iterable(charmaps))
    wanted = {code for code, count in counts.items() if count >= MIN_FACES and _stands_for_itself(code)}
    rendered = []
    for path, charmap in zip(paths, charmaps, strict=True):
        rendered.append(_render(path, sorted(charmap & wanted)))
        progress.update(len(rendered))
    return rendered


def _path(face: str) -> Path:
    import matplotlib

    path = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{face}.ttf"
    if not path.is_file():
        raise LabError(f"matplotlib's font {path} is missing: install matplotlib again from PyPI")
    return path


def _charmap(path: Path) -> set[int]:
    """Return the code points that a face has. Others would give matplotlib's warnings and boxes for missing ones."""
    from matplotlib.ft2font import FT2Font

    codes = set(FT2Font(str(path)).get_charmap())
    if path.stem.startswith("cm"):  # TeX's encoding agrees with Unicode only on these
        return {code for code in codes if code < 128 and chr(code).isalnum()}
    return codes


def _stands_for_itself(code: int) -> bool:
    category = unicodedata.category(chr(code))
    return not category.startswith(SKIPPED_CATEGORIES) and not any(code in skipped for skipped in SKIPPED_RANGES)


def _render(path: Path, codes: list[int]) -> Bitmaps:
    """Draw each character in the middle of its cell, in the font size that makes its longer side 40 pixels.

    So o and O, or a comma and a quotation mark, are the same shape, and small characters are as sharp as large ones.
    """
    import numpy as np
    from matplotlib.ft2font import FT2Font
    from PIL import Image, ImageDraw, ImageFont

    outlines = FT2Font(str(path))
    outlines.set_size(MEASURE, 72)  # one point is one pixel; this is so large that hinting moves nothing
    fonts: dict[int, ImageFont.FreeTypeFont] = {}
    kept: list[int] = []
    sheet = Image.new("L", (CELL, CELL * len(codes)))  # one cell below the other
    draw = ImageDraw.Draw(sheet)
    for code in codes:
        # The outline is measured because the boxes that Pillow returns include the advance.
        left, bottom, right, top = (value / 64 / MEASURE for value in outlines.load_char(code).bbox)  # in ems
        extent = max(right - left, top - bottom)
        if extent < SMALLEST:  # this leaves blanks out, too
            continue
        size = round(LONG_SIDE / extent)
        if size not in fonts:
            fonts[size] = ImageFont.truetype(str(path), size, layout_engine=ImageFont.Layout.BASIC)
        x, baseline = (CELL - (left + right) * size) / 2, (CELL + (top + bottom) * size) / 2
        draw.text((x, baseline + CELL * len(kept)), chr(code), font=fonts[size], fill=255, anchor="ls")
        kept.append(code)
    cells = torch.from_numpy(np.array(sheet)).view(-1, CELL, CELL)[: len(kept)]
    return Bitmaps(kept, cells)


def shapes(faces: list[Bitmaps]) -> dict[int, list[int]]:
    """Return the classes: the code point that gives each its shape, and all that look like it, including the first.

    In the order of code points, a character within `ALIKE` of an earlier class joins the nearest such class, one that
    is near but not alike is left out, and any other begins a class. Comparing only with the first character of a
    class keeps chains of small differences from joining characters that do not look alike.
    """
    codes, distance = distances(faces)
    classes: dict[int, list[int]] = {}
    firsts: list[int] = []  # positions in `codes`
    for position, code in enumerate(codes):
        to_firsts = distance[position, firsts]
        nearest = int(to_firsts.argmin()) if firsts else -1
        if not firsts or to_firsts[nearest] >= APART:
            firsts.append(position)
            classes[code] = [code]
        elif to_firsts[nearest] < ALIKE:
            classes[codes[firsts[nearest]]].append(code)
    return classes


def distances(faces: list[Bitmaps]) -> tuple[list[int], Tensor]:
    """Return the code points that at least 8 faces show, and the mean distance of any two in the faces showing both.

    In one face the distance of the bitmaps a and b at 14×14 pixels is
    ‖a − b‖² / (‖a‖² + ‖b‖²) = 1 − 2a·b / (‖a‖² + ‖b‖²).
    Pixels are whole numbers up to 255, so the products are exact in float32 in any order, and the classes do not
    depend on the number of threads. Two code points that share no face are at infinity.
    """
    counts = collections.Counter(code for face in faces for code in face.codes)
    codes = sorted(code for code, count in counts.items() if count >= MIN_FACES)
    likeness = torch.zeros(len(codes), len(codes))
    shown = torch.zeros(len(faces), len(codes))
    for face, shows in zip(faces, shown, strict=True):
        row = {code: index for index, code in enumerate(face.codes)}
        here = [index for index, code in enumerate(codes) if code in row]
        pixels = F.avg_pool2d(face.cells[[row[codes[index]] for index in here]].float(), 4).round().flatten(1)
        small = torch.zeros(len(codes), pixels.shape[1]).index_copy_(0, torch.tensor(here), pixels)
        shows[here] = 1
        squares = small.square().sum(1) + (1 - shows)  # 1 instead of 0 for a code point that this face lacks
        likeness.addcdiv_(small @ small.T, squares[:, None] + squares, value=2)
    shared = shown.T @ shown
    return codes, torch.where(shared > 0, 1 - likeness / shared, torch.inf)


def draw(faces: list[Bitmaps], codes: list[int], seed: int, quiet: bool, chunk: int = CHUNK) -> Tensor:
    """Draw the shapes of the code points `codes`: images (classes, 20, 28, 28), `chunk` of them at a time."""
    generator = torch.Generator().manual_seed(derive_seed(seed, "glyphs"))
    cells = torch.cat([face.cells for face in faces])
    chosen = choose(faces, codes, generator).flatten()
    coefficients = places(len(chosen), generator)
    pen = PEN[0] + (PEN[1] - PEN[0]) * torch.rand(len(chosen), generator=generator)
    parts: list[Tensor] = []
    with Progress("glyphs", total=len(chosen), unit="drawings", quiet=quiet) as progress:
        for part in torch.arange(len(chosen)).split(chunk):
            parts.append(distort(cells[chosen[part]], coefficients[part], pen[part]))
            progress.update(int(part[-1]) + 1)
    return torch.cat(parts).view(len(codes), DRAWINGS, SIZE, SIZE)


def choose(faces: list[Bitmaps], codes: list[int], generator: torch.Generator) -> Tensor:
    """Choose the bitmap of each drawing (classes, 20), as positions in the cells of all faces, one after the other."""
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
    """Draw the distortions at random, as coefficients (drawings, 2, knots + 2, knots + 2) of `_basis`.

    A pixel at (x, y) shows the point Σ_kl c_kl φ_k(y) φ_l(x) of the bitmap, for each of its two coordinates: φ = x and
    φ = 1 make the affine part, and the bumps at the knots bend it.
    """

    def uniform(limit: float) -> Tensor:
        return limit * (2 * torch.rand(drawings, generator=generator) - 1)

    angle, slant = uniform(ANGLE), uniform(SLANT)
    width, height = uniform(STRETCH).exp(), uniform(STRETCH).exp()
    right, down = uniform(MOVE), uniform(MOVE)
    cos, sin = angle.cos(), angle.sin()
    # Turning, then slanting and stretching back gives the point that the pixel comes from.
    matrix = [[(cos + slant * sin) / width, (slant * cos - sin) / width], [sin / height, cos / height]]
    coefficients = torch.zeros(drawings, 2, KNOTS + 2, KNOTS + 2)
    coefficients[:, :, :KNOTS, :KNOTS] = BEND * torch.randn(drawings, 2, KNOTS, KNOTS, generator=generator)
    for coordinate, (of_x, of_y) in enumerate(matrix):
        coefficients[:, coordinate, ONE, LINE] = of_x
        coefficients[:, coordinate, LINE, ONE] = of_y
        coefficients[:, coordinate, ONE, ONE] = -of_x * right - of_y * down
    return coefficients


def _basis() -> Tensor:
    """Return (56, knots + 2): a smooth bump at each knot, then x, then 1, at the pixels' centres in pixels of 28."""
    axis = (torch.arange(CELL) + 0.5) * (SIZE / CELL) - SIZE / 2
    knots = torch.linspace(-SIZE / 2, SIZE / 2, KNOTS)
    breadth = 0.5 * SIZE / (KNOTS - 1)
    bumps = torch.exp(-0.5 * ((axis[:, None] - knots) / breadth).square())
    return torch.cat([bumps, axis[:, None], torch.ones(CELL, 1)], dim=1)


def distort(cells: Tensor, coefficients: Tensor, pen: Tensor) -> Tensor:
    """Turn bitmaps (n, 56, 56) into drawings (n, 28, 28) moved by `coefficients`, with strokes `pen` pixels broader."""
    basis = _basis() * (2 / SIZE) ** 0.5  # grid_sample's edges are at ±1
    grid = (basis @ coefficients @ basis.T).permute(0, 2, 3, 1)
    ink = F.grid_sample(_redraw(cells, pen).unsqueeze(1), grid, align_corners=False)
    return F.avg_pool2d(ink, CELL // SIZE).squeeze(1).round().to(torch.uint8)


def _redraw(cells: Tensor, pen: Tensor) -> Tensor:
    """Make strokes `pen` pixels of 28 broader: blend each bitmap with one in which ink spreads to the neighbours.

    One neighbour on each side is one pixel of 28, since two of these pixels make one of those. A negative `pen` lets
    the paper spread instead, by less than one pixel, since otherwise hairlines would vanish.
    """
    broad = _spread(cells)
    fine = 255 - _spread(255 - cells)
    pen = pen.view(-1, 1, 1)
    return cells.float().lerp(torch.where(pen > 0, broad, fine).float(), pen.abs())


def _spread(cells: Tensor) -> Tensor:
    """Return the maximum of each pixel and its eight neighbours; on bytes this is much faster than max_pool2d."""
    for axis in (1, 2):
        spread = cells.clone()
        inner = cells.shape[axis] - 1
        for to, source in ((0, 1), (1, 0)):
            target = spread.narrow(axis, to, inner)
            torch.maximum(target, cells.narrow(axis, source, inner), out=target)
        cells = spread
    return cells
