"""The characters of the fonts that matplotlib ships, as bitmaps, and which of them look alike."""

import collections
import itertools
import unicodedata
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.base.progress import Progress

# Left out: LastResort has one picture for all characters of a block; cmex10 and STIXSiz* hold parts of large symbols,
# STIXNonUni* private code points, the Display faces a few dozen characters; cmsy10 is symbols under letters' codes.
FACES = (
    *(f"DejaVuSans{style}" for style in ("", "-Bold", "-Oblique", "-BoldOblique")),
    *(f"DejaVuSansMono{style}" for style in ("", "-Bold", "-Oblique", "-BoldOblique")),
    *(f"DejaVuSerif{style}" for style in ("", "-Bold", "-Italic", "-BoldItalic")),
    *(f"STIXGeneral{style}" for style in ("", "Bol", "Italic", "BolIta")),
    *("cmr10", "cmb10", "cmss10", "cmti10", "cmtt10", "cmmi10"),
)
MIN_FACES = 8  # that a shape must have
CELL = 56  # pixels a side of a bitmap
LONG_SIDE = 40  # pixels of the longer side of every character, whatever its size in the font
MEASURE = 1000  # font size at which outlines are measured
SMALLEST = 0.1  # of the font size, for the longer side: what is smaller could be anything
ALIKE = 0.01  # distance below which two characters are one shape: A, Α and А are within 0.004
APART = 0.08  # distance that two classes have at least: E and F are 0.09 apart, À and Á less than 0.06

# Not characters that stand for themselves: marks on others, modifiers, spaces, control, private use, unassigned.
SKIPPED_CATEGORIES = ("M", "Lm", "Sk", "Z", "C")
# Told apart by their place in a cell, which a shape has not: box drawing and blocks, braille.
SKIPPED_RANGES = (range(0x2500, 0x25A0), range(0x2800, 0x2900))


@dataclass(frozen=True)
class Bitmaps:
    """The characters that one face has: `cells` (n, 56, 56) in uint8, ink 255, and their code points, ascending."""

    codes: list[int]
    cells: Tensor


def render_faces(progress: Progress) -> list[Bitmaps]:
    """Every character that at least 8 faces have, in each face that has it."""
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
    """Asking first avoids matplotlib's warnings and the boxes that stand for missing characters."""
    from matplotlib.ft2font import FT2Font

    codes = set(FT2Font(str(path)).get_charmap())
    if path.stem.startswith("cm"):  # TeX's encoding, which agrees with Unicode on these alone
        return {code for code in codes if code < 128 and chr(code).isalnum()}
    return codes


def _stands_for_itself(code: int) -> bool:
    category = unicodedata.category(chr(code))
    return not category.startswith(SKIPPED_CATEGORIES) and not any(code in skipped for skipped in SKIPPED_RANGES)


def _render(path: Path, codes: list[int]) -> Bitmaps:
    """Each character in the middle of its cell, in the font size that makes its longer side 40 pixels.

    So o and O, or a comma and a quotation mark, are the same shape, and small ones are as sharp as large ones.
    """
    import numpy as np
    from matplotlib.ft2font import FT2Font
    from PIL import Image, ImageDraw, ImageFont

    outlines = FT2Font(str(path))
    outlines.set_size(MEASURE, 72)  # points of which one is a pixel: so large that hinting moves nothing
    fonts: dict[int, ImageFont.FreeTypeFont] = {}
    kept: list[int] = []
    sheet = Image.new("L", (CELL, CELL * len(codes)))  # one cell below the other
    draw = ImageDraw.Draw(sheet)
    for code in codes:
        # From the outline, since the boxes that Pillow tells include the advance.
        left, bottom, right, top = (value / 64 / MEASURE for value in outlines.load_char(code).bbox)  # in ems
        extent = max(right - left, top - bottom)
        if extent < SMALLEST:  # blanks too
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
    """The classes: the code point that gives each its shape, and all that look like it, the first one included.

    In code-point order: one that lies within `ALIKE` of an earlier class joins the nearest; one that is near, though
    not alike, is left out; any other begins a class. Comparing with the first of a class alone keeps chains of small
    differences from joining what is not alike.
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
    """Code points that at least 8 faces show, and for any two of them the mean distance in the faces that show both.

    In one face the distance is ‖a − b‖² / (‖a‖² + ‖b‖²) = 1 − 2a·b / (‖a‖² + ‖b‖²), of the bitmaps at 14×14 pixels.
    Pixels are whole numbers up to 255, so that the products are exact in float32 in any order, and the classes
    do not hang on the number of threads. Two that share no face are at infinity.
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
        squares = small.square().sum(1) + (1 - shows)  # not 0: a code point that is not here is like nothing
        likeness.addcdiv_(small @ small.T, squares[:, None] + squares, value=2)
    shared = shown.T @ shown
    return codes, torch.where(shared > 0, 1 - likeness / shared, torch.inf)
