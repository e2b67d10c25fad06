"""Omniglot: 1,623 handwritten characters of 50 alphabets, 20 drawings each (Lake et al., 2015).

The official archives hold `images_background/Alphabet/characterNN/CCCC_DD.png`: class CCCC from 1 to 1,623, drawing DD
from 1 to 20, each of 105×105 pixels of one bit, where ink is 0.
"""

import hashlib
import io
import re
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hebbian_softmax.lab.base.errors import LabError, reason
from hebbian_softmax.lab.base.extras import require
from hebbian_softmax.lab.base.progress import Progress
from hebbian_softmax.lab.base.settings import integer, multiple, setting
from hebbian_softmax.lab.data import root
from hebbian_softmax.lab.data.download import download
from hebbian_softmax.lab.images.curriculum import CHECK_EVERY, CurriculumSettings
from hebbian_softmax.lab.images.data import DRAWINGS, SIZE, ImageSet, ImageSource, cached

ADDRESS = "https://github.com/brendenlake/omniglot/raw/master/python/"
SOURCE_SIZE = 105
ROW_BYTES = -(-SOURCE_SIZE // 8)  # each row of one-bit pixels begins on a byte
PREPARATION = "1"  # raise this when the same archives give other pixels, so that older caches are not used
LONGEST = 1 << 16  # bytes of a drawing; more are not read
CHUNK = 1000  # images resized at a time, so that memory stays small


@dataclass(frozen=True)
class Archive:
    """One of the two official files: the classes in it, the checksum that a download must have, and its web folder."""

    folder: str
    classes: range
    sha256: str
    address: str = ADDRESS

    @property
    def name(self) -> str:
        return f"{self.folder}.zip"

    @property
    def url(self) -> str:
        return self.address + self.name


ARCHIVES = (
    Archive("images_background", range(1, 965), "ad41ab679c8b5d90b271ef46be6987cc81211774a695c29dcc5367b2b26ee640"),
    Archive("images_evaluation", range(965, 1624), "1f61a8f3366785b057fc117d9228e78a16e3d976c8953b2a10fcc74cf0609cee"),
)


def data_root_setting() -> Any:
    """Declare the setting that says where the archives are."""
    return setting("", "folder with omniglot/*.zip in it (default: HEBBIAN_DATA, else downloaded)", str)


@dataclass(frozen=True)
class OmniglotSettings(CurriculumSettings):
    """The paper's 64 filters, and enough steps for both heads to reach more than 200 classes."""

    steps: int = setting(3000, f"training steps, a multiple of {CHECK_EVERY}", multiple(CHECK_EVERY))
    filters: int = setting(64, "filters of each convolution, and features that the heads see", integer(1, 4096))
    data_root: str = data_root_setting()


def load_omniglot(
    data_root: str | None = None,
    *,
    cache_dir: Path | None = None,
    quiet: bool = False,
    archives: tuple[Archive, ...] = ARCHIVES,
) -> ImageSet:
    """Return all 1,623 classes in the official order, the background set first, resized to 28×28.

    The archives are looked for in the data root (`data_root`, else HEBBIAN_DATA, else the user's cache folder) and in
    `omniglot` under it; an archive that is missing is downloaded into the latter. A download must have the official
    checksum; a file of the user's own must have the right classes and drawings. The array made from them is kept in
    `cache_dir` (default: `images` under HEBBIAN_CACHE, else under the user's cache folder) and used as long as the
    archives stay the same.
    """
    require("numpy", "PIL")
    paths = [_find(archive, root.data_root(data_root), quiet) for archive in archives]
    key = hashlib.sha256("\n".join([PREPARATION, *map(_checksum, paths)]).encode()).hexdigest()[:16]
    return cached("omniglot", key, lambda: _read_all(archives, paths, quiet), cache_dir)


SOURCE = ImageSource(
    name="omniglot",
    help="new classes of handwritten characters keep coming: the paper's task",
    settings=OmniglotSettings,
    load=lambda settings, quiet: load_omniglot(settings.data_root or None, quiet=quiet),
)


def _find(archive: Archive, folder: Path, quiet: bool) -> Path:
    places = [folder / archive.name, folder / "omniglot" / archive.name]
    for path in places:
        if path.exists():
            return path
    download(archive.url, places[-1], sha256=archive.sha256, quiet=quiet)
    return places[-1]


def _checksum(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise LabError(f"cannot read {path} ({error.strerror or error}): make it a file that you can read") from error


def _read_all(archives: tuple[Archive, ...], paths: list[Path], quiet: bool) -> ImageSet:
    total = DRAWINGS * sum(len(archive.classes) for archive in archives)
    with Progress("omniglot", total=total, unit="drawings", quiet=quiet) as progress:
        parts = [read_archive(archive, path, progress) for archive, path in zip(archives, paths, strict=True)]
    class_names = [name for names, _ in parts for name in names]
    return ImageSet("omniglot", torch.cat([images for _, images in parts]), class_names)


def read_archive(archive: Archive, path: Path, progress: Progress) -> tuple[list[str], Tensor]:
    """Return the class names and the resized images (classes, 20, 28, 28) of one archive, after checking all of it."""
    try:
        with zipfile.ZipFile(path) as file:
            members = _members(archive, path, file)
            before, packed = progress.done, bytearray()
            for number, member in enumerate(members, 1):
                with file.open(member) as drawing:
                    packed += _decode(archive, path, member, drawing.read(LONGEST))
                progress.update(before + number)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, OSError) as error:
        raise _wrong(archive, path, f"cannot be read ({reason(error)})") from error
    rows = torch.frombuffer(packed, dtype=torch.uint8).view(-1, SOURCE_SIZE, ROW_BYTES)
    images = torch.cat([resize(chunk) for chunk in rows.split(CHUNK)])
    class_names = ["/".join(member.split("/")[1:3]) for member in members[::DRAWINGS]]
    return class_names, images.view(-1, DRAWINGS, SIZE, SIZE)


def _members(archive: Archive, path: Path, file: zipfile.ZipFile) -> list[str]:
    """Return the drawings in order, class by class; other members (folders, .DS_Store) are ignored."""
    pattern = re.compile(rf"{archive.folder}/[^/]+/character\d+/(\d+)_(\d+)\.png")
    drawings: dict[int, dict[int, str]] = {}
    for name in file.namelist():
        if match := pattern.fullmatch(name):
            drawings.setdefault(int(match[1]), {})[int(match[2])] = name
    expected = f"{len(archive.classes):,} class folders {archive.folder}/ALPHABET/characterNN"
    if not drawings:
        raise _wrong(archive, path, f"has none of the {expected}")
    if missing := sorted(set(archive.classes) - set(drawings)):
        raise _wrong(archive, path, f"lacks class {missing[0]:04d} ({len(missing):,} of the {expected} are missing)")
    if other := sorted(set(drawings) - set(archive.classes)):
        raise _wrong(archive, path, f"has class {other[0]:04d}, which is none of the {expected}")
    for number in archive.classes:
        found = sorted(drawings[number].items())
        if [drawing for drawing, _ in found] != list(range(1, DRAWINGS + 1)):
            folder = found[0][1].rpartition("/")[0]
            raise _wrong(archive, path, f"has {len(found)} drawings in {folder}, not 01 to {DRAWINGS}")
    return [drawings[number][drawing] for number in archive.classes for drawing in range(1, DRAWINGS + 1)]


def _decode(archive: Archive, path: Path, member: str, content: bytes) -> bytes:
    """Return the pixels of a PNG, eight to a byte."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(content), formats=("PNG",)) as image:
            if image.size != (SOURCE_SIZE, SOURCE_SIZE):
                raise ValueError(f"{image.size[0]}×{image.size[1]} pixels, not {SOURCE_SIZE}×{SOURCE_SIZE}")
            return (image if image.mode == "1" else image.convert("1", dither=Image.Dither.NONE)).tobytes()
    except (OSError, ValueError, SyntaxError, EOFError, zlib.error, Image.DecompressionBombError) as error:
        raise _wrong(archive, path, f"holds {member}, which cannot be decoded ({reason(error)})") from error


def resize(rows: Tensor) -> Tensor:
    """Turn packed rows (n, 105, 14) into images (n, 28, 28) with ink 255: each pixel is the mean over its area.

    An output pixel covers 105/28 = 15/4 input pixels along each axis, so overlaps are quarters. In quarters all
    sums are small whole numbers, exact in float32 in any order, so every machine gets the same bits.
    """
    edges = torch.arange(SIZE + 1) * SOURCE_SIZE  # the lines of both grids, in units of 1/28 of an input pixel
    lines = torch.arange(SOURCE_SIZE + 1) * SIZE
    upper = torch.minimum(edges[1:, None], lines[None, 1:])
    lower = torch.maximum(edges[:-1, None], lines[None, :-1])
    quarters = ((upper - lower).clamp(min=0) // (SIZE // 4)).float()
    padded = F.pad(quarters, (0, 8 * ROW_BYTES - SOURCE_SIZE))  # the last bits of a row are not pixels
    bits = (rows.unsqueeze(-1) >> torch.arange(7, -1, -1, dtype=torch.uint8)) & 1
    paper = quarters @ (bits.flatten(-2).float() @ padded.T)
    all_paper = (4 * SOURCE_SIZE // SIZE) ** 2
    return ((all_paper - paper) * 255 / all_paper).round().to(torch.uint8)


def _wrong(archive: Archive, path: Path, what: str) -> LabError:
    """Return the error to raise for an archive with wrong content."""
    return LabError(f"{path} {what}: replace it with {archive.url}, or delete it and it will be downloaded")
