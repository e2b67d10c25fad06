"""Glyphs: which shapes are classes, and how they are drawn."""

import unicodedata
from pathlib import Path

import pytest
import torch

from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.base.progress import Progress
from hebbian_softmax.lab.images import glyphs
from hebbian_softmax.lab.images.glyphs import Bitmaps, distances, distort, draw, make_glyphs, render_faces, shapes
from tests.lab.base.test_files import names


@pytest.fixture(scope="module")
def faces() -> list[Bitmaps]:
    return render_faces(Progress("faces", total=None, quiet=True))


@pytest.fixture(scope="module")
def classes(faces: list[Bitmaps]) -> dict[int, list[int]]:
    return shapes(faces)


def class_of(classes: dict[int, list[int]], character: str) -> int | None:
    return next((first for first, alike in classes.items() if ord(character) in alike), None)


def test_more_than_a_thousand_classes(classes: dict[int, list[int]]) -> None:
    assert len(classes) >= 1000
    members = [code for alike in classes.values() for code in alike]
    assert len(members) == len(set(members))
    for code in members:
        assert unicodedata.category(chr(code))[0] in "LNPS"


@pytest.mark.parametrize("alike", ["AΑА", "BΒВ", "OΟО", "oοо", "PΡР", "XΧХ", "cсⅽ", "jј"])
def test_what_looks_alike_is_one_class(classes: dict[int, list[int]], alike: str) -> None:
    assert {class_of(classes, character) for character in alike} == {ord(alike[0])}


@pytest.mark.parametrize("pair", ["EF", "OQ", "ij", "PR", "CG", "un", "bd", "0O", "1I", "<>", "ЖШ", "ce", "MW", "69"])
def test_what_does_not_look_alike_is_two(classes: dict[int, list[int]], pair: str) -> None:
    assert [class_of(classes, character) for character in pair] == [ord(character) for character in pair]


def test_blanks_marks_and_characters_of_few_faces_are_left_out(classes: dict[int, list[int]]) -> None:
    for character in " \u00a0\u0301\u00ad\u200b\u2800\u2501\ue000\uf6c5":
        assert class_of(classes, character) is None


def test_classes_keep_their_distance(faces: list[Bitmaps], classes: dict[int, list[int]]) -> None:
    codes, distance = distances(faces)
    where = [codes.index(code) for code in classes]
    among = distance[where][:, where].fill_diagonal_(torch.inf)
    assert among.min() >= glyphs.APART
    assert torch.equal(distance, distance.T)
    assert distance.diagonal().abs().max() < 1e-6


def test_characters_fill_the_same_frame_in_the_middle(faces: list[Bitmaps]) -> None:
    """Characters that are tiny in the font fill it as well, and none is cut or blank."""
    for face in faces:
        ink = face.cells > 64
        across, down = ink.any(1), ink.any(2)
        longer = torch.maximum(across.sum(1), down.sum(1))
        assert (longer > 0).all()
        span = [glyphs.CELL - side.flip(1).int().argmax(1) - side.int().argmax(1) for side in (across, down)]
        offset = [glyphs.CELL - side.flip(1).int().argmax(1) + side.int().argmax(1) for side in (across, down)]
        assert (torch.maximum(*span) - glyphs.LONG_SIDE).abs().float().quantile(0.99) <= 3
        for middle in offset:
            assert (middle - glyphs.CELL).abs().float().quantile(0.99) <= 3
        assert not ink[:, [0, -1]].any()
        assert not ink[:, :, [0, -1]].any()


def test_drawings_are_of_eight_faces_or_more_used_evenly(faces: list[Bitmaps], classes: dict[int, list[int]]) -> None:
    face_of = torch.cat([torch.full((len(face.codes),), number) for number, face in enumerate(faces)])
    code_of = torch.tensor([code for face in faces for code in face.codes])
    codes = list(classes)
    chosen = glyphs.choose(faces, codes, torch.Generator().manual_seed(0))
    assert torch.equal(code_of[chosen], torch.tensor(codes)[:, None].expand(-1, 20))
    tested = torch.zeros(len(faces))
    for drawings in face_of[chosen]:
        _, counts = drawings.unique(return_counts=True)
        assert len(counts) >= 8
        assert counts.max() - counts.min() <= 1
        tested += torch.bincount(drawings[:5], minlength=len(faces))
    trained = torch.bincount(face_of[chosen].flatten(), minlength=len(faces)) - tested
    # No face is kept for testing: each has about a quarter of its drawings there.
    assert ((tested / (tested + trained) - 0.25).abs() < 0.1).all()


def test_the_seed_decides_the_bits(faces: list[Bitmaps]) -> None:
    codes = [ord(character) for character in "AEQijж≤"]
    first = draw(faces, codes, seed=1, quiet=True)
    assert first.shape == (7, 20, 28, 28)
    assert first.dtype == torch.uint8
    assert torch.equal(first, draw(faces, codes, seed=1, quiet=True, chunk=33))
    assert not torch.equal(first, draw(faces, codes, seed=2, quiet=True))
    assert len({drawing.numpy().tobytes() for drawing in first.flatten(0, 1)}) == 140


def test_without_distortion_a_drawing_is_the_bitmap_made_smaller(faces: list[Bitmaps]) -> None:
    cells = faces[0].cells[:50]
    still = torch.zeros(50, 2, glyphs.KNOTS + 2, glyphs.KNOTS + 2)
    still[:, 0, glyphs.ONE, glyphs.LINE] = 1
    still[:, 1, glyphs.LINE, glyphs.ONE] = 1
    smaller = cells.view(50, 28, 2, 28, 2).float().mean((2, 4))
    assert (distort(cells, still, torch.zeros(50)).float() - smaller).abs().max() <= 1
    broad, fine = distort(cells, still, torch.ones(50)).float(), distort(cells, still, torch.full((50,), -0.5)).float()
    assert (broad.mean((1, 2)) > 1.1 * smaller.mean((1, 2))).all()
    assert (fine.mean((1, 2)) < 0.95 * smaller.mean((1, 2))).all()


def test_distortions_keep_to_their_limits() -> None:
    """The affine part stays within the limits of angle, slant and stretch."""
    coefficients = glyphs.places(5000, torch.Generator().manual_seed(0))
    of_x, of_y = coefficients[:, :, glyphs.ONE, glyphs.LINE], coefficients[:, :, glyphs.LINE, glyphs.ONE]
    determinant = of_x[:, 0] * of_y[:, 1] - of_x[:, 1] * of_y[:, 0]
    assert (determinant.log().abs() <= 2 * glyphs.STRETCH + 1e-5).all()
    assert determinant.log().abs().max() > 1.5 * glyphs.STRETCH
    turned = torch.atan2(of_x[:, 1], of_y[:, 1]).abs()  # the second row is (sin, cos) / height
    assert 0.9 * glyphs.ANGLE < turned.max() <= glyphs.ANGLE + 1e-5


def test_every_drawing_has_ink_and_keeps_most_of_it_in_the_frame(
    faces: list[Bitmaps], classes: dict[int, list[int]]
) -> None:
    images = draw(faces, list(classes)[::10], seed=0, quiet=True).float() / 255
    assert (images.sum((2, 3)) > 8).all()
    border = images.sum((2, 3)) - images[:, :, 1:-1, 1:-1].sum((2, 3))
    assert border.mean() / images.sum((2, 3)).mean() < 0.01


def test_made_once_for_each_seed(faces: list[Bitmaps], tmp_path: Path) -> None:
    wanted = [ord(character) for character in "AEА"]
    few = []
    for face in faces:
        rows = [row for row, code in enumerate(face.codes) if code in wanted]
        few.append(Bitmaps([face.codes[row] for row in rows], face.cells[rows]))
    made = []

    def make(seed: int, folder: Path) -> str:
        found = make_glyphs(seed, cache_dir=folder, quiet=True, render=lambda progress: made.append(seed) or few)
        assert found.name == "glyphs"
        assert found.class_names == ["AА", "E"]
        return found.identity

    first = make(0, tmp_path)
    assert make(1, tmp_path) != first
    assert len(names(tmp_path)) == 2
    assert make(0, tmp_path) == first
    assert made == [0, 1]
    assert make(0, tmp_path / "other") == first


def test_a_matplotlib_without_its_fonts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("matplotlib.get_data_path", lambda: str(tmp_path / "nowhere"))
    with pytest.raises(LabError, match=r"DejaVuSans\.ttf is missing: install matplotlib again"):
        make_glyphs(cache_dir=tmp_path, quiet=True)
    assert names(tmp_path) == set()


@pytest.mark.slow
def test_the_whole_set_does_not_hang_on_the_number_of_threads() -> None:
    first = glyphs.make_anew(0, True, render_faces)
    assert len(first.images) == len(first.class_names) >= 1000
    torch.set_num_threads(2)
    try:
        assert glyphs.make_anew(0, True, render_faces).identity == first.identity
    finally:
        torch.set_num_threads(1)
