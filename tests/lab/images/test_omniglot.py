"""Omniglot: the real archives if they are at hand, and small ones with something wrong."""

import dataclasses
import functools
import hashlib
import io
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.images.data import ImageSet
from hebbian_softmax.lab.images.omniglot import ARCHIVES, load_omniglot, resize
from tests import SHARED
from tests.lab.base.test_files import names
from tests.lab.data.serving import serve

REAL = SHARED / "data"
CLASSES = (range(1, 4), range(4, 6))
SMALL = tuple(
    dataclasses.replace(archive, classes=classes, address="http://127.0.0.1:9/")  # nobody is there
    for archive, classes in zip(ARCHIVES, CLASSES, strict=True)
)
"""Archives of five classes in place of 1,623."""

Members = dict[str, bytes]


def png(pixels: np.ndarray) -> bytes:
    """Return a PNG with ink, which is 0 in the file, where `pixels` are true."""
    buffer = io.BytesIO()
    Image.fromarray(~pixels).save(buffer, "png")
    return buffer.getvalue()


@functools.cache
def drawing(number: int, which: int) -> bytes:
    return png(np.random.default_rng([number, which]).random((105, 105)) < 0.1)


def members(folder: str, classes: range) -> Members:
    """Return the files of an archive in an unusual order and with others among them, which must not matter."""
    found: Members = {f"{folder}/": b"", f"{folder}/.DS_Store": b"x", "__MACOSX/._x.png": b"y"}
    for number in reversed(classes):
        for which in range(20, 0, -1):
            # Alphabets come in another order than the numbers, as in the official archives.
            name = f"{folder}/Alphabet_{9 - number}/character01/{number:04d}_{which:02d}.png"
            found[name] = drawing(number, which)
    return found


def write_zip(path: Path, content: Members) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in content.items():
            file.writestr(name, data)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for archive in SMALL:
        write_zip(tmp_path / "data" / "omniglot" / archive.name, members(archive.folder, archive.classes))
    return tmp_path / "data"


def load(root: Path) -> ImageSet:
    return load_omniglot(str(root), cache_dir=root.parent / "cache", quiet=True, archives=SMALL)


def test_classes_and_drawings_come_in_the_order_of_their_numbers(root: Path) -> None:
    found = load(root)
    assert found.name == "omniglot"
    assert found.class_names == [f"Alphabet_{9 - number}/character01" for number in range(1, 6)]
    assert found.images.shape == (5, 20, 28, 28)
    assert found.images.dtype == torch.uint8
    for number, which in [(1, 1), (3, 20), (4, 5), (5, 6)]:
        with Image.open(io.BytesIO(drawing(number, which))) as image:
            fine = np.kron(~np.asarray(image), np.ones((4, 4)))  # 420 = 15·28 pixels a side
        expected = (255 * fine.reshape(28, 15, 28, 15).mean((1, 3))).round()
        assert np.array_equal(found.images[number - 1, which - 1].numpy(), expected)


def test_resizing_keeps_the_amount_of_ink_and_its_extremes() -> None:
    rows = torch.randint(256, (3, 105, 14), dtype=torch.uint8)
    bits = np.unpackbits(rows.numpy(), axis=-1)[..., :105]
    assert np.allclose(resize(rows).float().mean((1, 2)) / 255, 1 - bits.mean((1, 2)), atol=1e-3)
    assert (resize(torch.zeros(1, 105, 14, dtype=torch.uint8)) == 255).all()
    assert (resize(torch.full((1, 105, 14), 255, dtype=torch.uint8)) == 0).all()


def test_found_in_the_root_itself_by_the_environment_too(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    identity = load(root).identity
    for path in (root / "omniglot").iterdir():
        path.rename(root / path.name)
    monkeypatch.setenv("HEBBIAN_DATA", str(root))
    assert load_omniglot(cache_dir=root / "other", quiet=True, archives=SMALL).identity == identity


def test_read_once_until_an_archive_changes(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, again = (load_omniglot(str(root), cache_dir=root.parent / "cache", archives=SMALL) for _ in range(2))
    assert again.identity == first.identity
    assert capsys.readouterr().err == "omniglot: 100/100 drawings\n"  # once
    changed = members("images_evaluation", CLASSES[1]) | {
        "images_evaluation/Alphabet_5/character01/0004_01.png": drawing(1, 1)
    }
    write_zip(root / "omniglot" / "images_evaluation.zip", changed)
    second = load(root)
    assert torch.equal(second.images[3, 0], first.images[0, 0])
    assert second.identity != first.identity


def without(prefix: str) -> Callable[[Members], Members]:
    return lambda content: {name: data for name, data in content.items() if not name.startswith(prefix)}


def having(name: str, data: bytes) -> Callable[[Members], Members]:
    return lambda content: content | {f"images_background/{name}": data}


CUT = drawing(1, 7)[:-40]
WRONG = {
    "no classes": (lambda content: {"other/a.png": b""}, "has none of the 3 class folders images_background/"),
    "class missing": (without("images_background/Alphabet_7"), r"lacks class 0002 \(1 of the 3 class folders"),
    "class too many": (having("Z/character01/0009_01.png", CUT), "has class 0009, which is none of the 3"),
    "drawing missing": (
        without("images_background/Alphabet_8/character01/0001_07"),
        "has 19 drawings in images_background/Alphabet_8/character01, not 01 to 20",
    ),
    "drawing too many": (having("Alphabet_8/character01/0001_21.png", CUT), "has 21 drawings in"),
    "png cut": (having("Alphabet_8/character01/0001_07.png", CUT), r"0001_07\.png, which cannot be decoded"),
    "png empty": (having("Alphabet_8/character01/0001_07.png", b""), r"0001_07\.png, which cannot be decoded"),
    "png of another size": (
        having("Alphabet_8/character01/0001_07.png", png(np.zeros((28, 28), bool))),
        "cannot be decoded .*28×28 pixels, not 105×105",
    ),
}


def assert_refused(root: Path, pattern: str) -> None:
    with pytest.raises(LabError, match=pattern) as caught:
        load(root)
    message = str(caught.value)
    assert "images_background.zip" in message
    assert "replace it with http" in message
    assert "\n" not in message
    assert not (root.parent / "cache").exists() or names(root.parent / "cache") == set()


@pytest.mark.parametrize("case", WRONG)
def test_wrong_content_is_named(root: Path, case: str) -> None:
    change, pattern = WRONG[case]
    write_zip(root / "omniglot" / "images_background.zip", change(members("images_background", CLASSES[0])))
    assert_refused(root, pattern)


@pytest.mark.parametrize("damage", ["cut", "empty", "text", "byte", "other set"])
def test_a_damaged_archive_is_named(root: Path, damage: str) -> None:
    path = root / "omniglot" / "images_background.zip"
    content = path.read_bytes()
    middle = len(content) // 2
    changed = {
        "cut": content[:middle],
        "empty": b"",
        "text": b"<html>not found</html>",
        "byte": content[:middle] + bytes(200) + content[middle + 200 :],
        "other set": (root / "omniglot" / "images_evaluation.zip").read_bytes(),
    }
    path.write_bytes(changed[damage])
    assert_refused(root, "cannot be read|cannot be decoded|has none of")
    path.unlink()
    path.mkdir()
    with pytest.raises(LabError, match=r"cannot read .*images_background.zip"):
        load(root)


def test_what_is_not_there_is_downloaded_and_must_have_the_checksum(root: Path, tmp_path: Path) -> None:
    files = {f"/{archive.name}": (root / "omniglot" / archive.name).read_bytes() for archive in SMALL}
    empty = tmp_path / "empty"
    empty.mkdir()
    with serve(files) as server:
        there = tuple(dataclasses.replace(archive, address=f"{server.url}/") for archive in SMALL)
        with pytest.raises(LabError, match=f"expected {SMALL[0].sha256}"):
            load_omniglot(str(empty), cache_dir=tmp_path / "other", quiet=True, archives=there)
        assert names(empty / "omniglot") == set()
        sums = [hashlib.sha256(content).hexdigest() for content in files.values()]
        known = tuple(dataclasses.replace(each, sha256=sha256) for each, sha256 in zip(there, sums, strict=True))
        found = load_omniglot(str(empty), cache_dir=tmp_path / "other", quiet=True, archives=known)
    assert found.identity == load(root).identity
    assert names(empty / "omniglot") == {archive.name for archive in SMALL}


@pytest.mark.slow
@pytest.mark.skipif(not (REAL / "omniglot").is_dir(), reason="no ../shared/data/omniglot")
def test_the_real_one(tmp_path: Path) -> None:
    found = load_omniglot(str(REAL), cache_dir=tmp_path, quiet=True)
    assert found.images.shape == (1623, 20, 28, 28)
    assert len(set(found.class_names)) == 1623
    assert len({name.split("/")[0] for name in found.class_names}) == 50
    assert found.train.shape[1] == 15
    assert found.identity == "omniglot-1623x20x28x28-acf81728c6728e13"  # exact arithmetic: the same everywhere
    assert 0.05 < found.images.float().mean() / 255 < 0.1
    assert load_omniglot(str(REAL), cache_dir=tmp_path, quiet=True).identity == found.identity
