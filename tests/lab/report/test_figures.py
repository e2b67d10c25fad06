"""Figures: the file is an image, and what it shows can be told apart without colour."""

import struct
from typing import Any

import matplotlib.figure
import pytest

from hebbian_softmax.lab.report.figures import STYLES, Line, Panel, line_figure


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that were saved."""
    figures: list[Any] = []
    save = matplotlib.figure.Figure.savefig

    def keep(figure: Any, *arguments: Any, **options: Any) -> None:
        figures.append(figure)
        save(figure, *arguments, **options)

    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", keep)
    return figures


def test_panels_with_labelled_axes_and_distinct_lines(drawn: list[Any]) -> None:
    lines = [Line(f"model {number}", [0, 1, 2], [number, 1, 2]) for number in range(3)]
    png = line_figure([Panel("all", lines), Panel("rare", lines)], x_label="steps", y_label="accuracy in %")
    assert png.startswith(b"\x89PNG\r\n")
    assert struct.unpack(">II", png[16:24]) == (1485, 600)

    left, right = drawn[0].axes
    assert (left.get_xlabel(), left.get_ylabel(), left.get_title()) == ("steps", "accuracy in %", "all")
    assert right.get_title() == "rare"
    looks = [(line.get_color(), line.get_linestyle(), line.get_marker()) for line in left.lines]
    assert all(len(set(look)) == 3 for look in zip(*looks, strict=True))  # each of the three tells them apart
    assert [line.get_color() for line in right.lines] == [colour for colour, _, _ in looks]
    assert [text.get_text() for text in left.get_legend().get_texts()] == [line.label for line in lines]


@pytest.mark.parametrize("label", ["$\\frac{$", "_hidden", "\udcff\x1b[31m 你好", "long" * 60])
def test_names_of_runs_are_shown_as_they_are(drawn: list[Any], label: str) -> None:
    """Dollar signs would begin a formula, and a label that begins with _ would be left out of the legend."""
    lines = [Line(label, [1, 2], [1, 2]), Line("other", [1, 2], [2, 1])]
    assert line_figure([Panel(f"of {label[:9]}", lines, x_label="$x", y_label="y$$")])
    first, second = drawn[0].axes[0].get_legend().get_texts()
    assert second.get_text() == "other"
    assert first.get_text() == label or len(label) > 48 or "\x1b" in label
    assert first.get_text().isprintable()
    assert len(first.get_text()) <= 49


def test_no_two_styles_are_equal_without_colour() -> None:
    assert len({(dashes, marker) for _, dashes, marker in STYLES}) == len(STYLES)


def test_a_single_point_and_many_lines_draw() -> None:
    assert line_figure([Panel("p", [Line("a", [1], [2])] * 9)], x_label="x", y_label="y")


def test_points_that_are_not_finite_are_left_out(drawn: list[Any]) -> None:
    line_figure([Panel("p", [Line("a", [1, 2, 3], [1, float("nan"), 3])])], x_label="x", y_label="y")
    assert list(drawn[0].axes[0].lines[0].get_xdata()) == [1, 3]
