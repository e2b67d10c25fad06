"""Figures that stay readable in print, in grey and for colour-blind readers."""

import io
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hebbian_softmax.lab.base.console import printable
from hebbian_softmax.lab.base.extras import require

# Okabe and Ito's palette. Line style and marker tell lines apart without colour.
STYLES = (
    ("#0072B2", "-", "o"),
    ("#D55E00", "--", "s"),
    ("#009E73", "-.", "^"),
    ("#CC79A7", ":", "D"),
    ("#E69F00", "-", "v"),
    ("#56B4E9", "--", "P"),
    ("#000000", "-.", "X"),
)
LONGEST = 48  # characters of a label
BROAD = 24  # characters of a label from which on a legend of three lines and more would cover curves


@dataclass(frozen=True)
class Line:
    """A curve, with a band from `low` to `high` if these are given. The n-th line of every panel looks the same."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()


@dataclass(frozen=True)
class Panel:
    """A pair of axes and its curves. Its own labels, if any, replace those of the figure."""

    title: str
    lines: Sequence[Line]
    x_label: str = ""
    y_label: str = ""
    log_x: bool = False
    log_y: tuple[float, float] | None = None
    """The limits of a logarithmic y axis; curves are cut off outside them."""


def require_extras() -> None:
    """Raise an error if figures could not be drawn: before hours of work, not after."""
    require("numpy", "matplotlib")


def line_figure(panels: Sequence[Panel], *, x_label: str = "", y_label: str = "") -> bytes:
    """Draw panels side by side as a PNG, on one y axis unless they have their own labels. The labels name the units."""
    require_extras()
    from matplotlib.figure import Figure  # pyplot would need a display and global state
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, StrMethodFormatter

    figure = Figure(figsize=(1.5 + 4.2 * len(panels), 4.0), layout="constrained")
    together = not any(panel.y_label for panel in panels)
    for axes, panel in zip(figure.subplots(1, len(panels), sharey=together, squeeze=False)[0], panels, strict=True):
        handles: list[Any] = []
        for number, line in enumerate(panel.lines):
            colour, dashes, marker = STYLES[number % len(STYLES)]
            points = [(x, y) for x, y in zip(line.x, line.y, strict=True) if math.isfinite(y)]
            x, y = [x for x, _ in points], [y for _, y in points]
            look = {"color": colour, "linestyle": dashes, "linewidth": 2, "marker": marker, "markersize": 5}
            handles += axes.plot(x, y, markevery=max(1, len(points) // 10), **look)
            if line.low:
                axes.fill_between(line.x, line.low, line.high, color=colour, alpha=0.2, linewidth=0)
        axes.set_title(printable(panel.title), fontsize=12, parse_math=False)
        axes.set_xlabel(printable(panel.x_label or x_label), fontsize=11, parse_math=False)
        if panel.y_label:
            axes.set_ylabel(printable(panel.y_label), fontsize=11, parse_math=False)
        if panel.log_x:
            axes.set_xscale("log")
        else:
            axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        if panel.log_y:
            axes.set_yscale("log")
            axes.set_ylim(panel.log_y)
            low, high = panel.log_y
            marks = (1.0, 2.0, 5.0) if high > 10 * low else (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0)
            axes.yaxis.set_major_locator(LogLocator(subs=marks))
            axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
            axes.yaxis.set_minor_formatter(NullFormatter())
        axes.grid(alpha=0.3)
        add_legend(axes, handles, [line.label for line in panel.lines])
    if together:
        figure.axes[0].set_ylabel(printable(y_label), fontsize=11, parse_math=False)
    return as_png(figure)


def add_legend(axes: Any, handles: Sequence[Any], labels: Sequence[str]) -> None:
    """Add a legend whose labels are shown as they are: names of run folders may have dollar signs or begin with _."""
    # Labels that begin with _ are left out, so the texts are set once the legend is there.
    below = len(labels) > 2 and max(map(len, labels)) > BROAD
    place = {"loc": "upper left", "bbox_to_anchor": (0, -0.18), "borderaxespad": 0} if below else {}
    legend = axes.legend(handles, [str(number) for number in range(len(labels))], fontsize=10, **place)
    for text, label in zip(legend.get_texts(), labels, strict=True):
        text.set_parse_math(False)
        text.set_text(shorten(printable(label), LONGEST))


def shorten(text: str, length: int) -> str:
    """Return a text with its middle left out if it is longer than `length`: ends of names tell runs apart.

    >>> shorten("wikitext-103-20260101-120000", 15)
    'wikitex…-120000'
    """
    half = length // 2
    return text if len(text) <= length else f"{text[:half]}…{text[-half:]}"


def as_png(figure: Any) -> bytes:
    """Return a figure as a PNG file."""
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # a box is drawn in its place
        figure.savefig(buffer, format="png", dpi=150)
    return buffer.getvalue()
