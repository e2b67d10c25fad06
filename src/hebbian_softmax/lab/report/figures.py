"""Figures that stay readable in print, in grey and to colour-blind eyes."""

import importlib.util
import io
from collections.abc import Sequence
from dataclasses import dataclass

from hebbian_softmax.lab.errors import LabError

# Okabe and Ito's palette; line style and marker repeat what the colour says.
STYLES = (
    ("#0072B2", "-", "o"),
    ("#D55E00", "--", "s"),
    ("#009E73", "-.", "^"),
    ("#CC79A7", ":", "D"),
    ("#E69F00", "-", "v"),
    ("#56B4E9", "--", "P"),
    ("#000000", "-.", "X"),
)


@dataclass(frozen=True)
class Line:
    """One curve. The n-th line of every panel looks the same."""

    label: str
    x: Sequence[float]
    y: Sequence[float]


@dataclass(frozen=True)
class Panel:
    """One pair of axes and its curves."""

    title: str
    lines: Sequence[Line]


def require_matplotlib() -> None:
    """Say what is missing before hours of work, not after."""
    if importlib.util.find_spec("matplotlib") is None:
        raise LabError("figures need matplotlib: pip install 'hebbian-softmax[lab]'")


def line_figure(panels: Sequence[Panel], *, x_label: str, y_label: str) -> bytes:
    """Panels side by side on one y axis, as a PNG. The labels name the units."""
    require_matplotlib()
    from matplotlib.figure import Figure  # drawn without pyplot, so no display and no global state
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(1.5 + 4.2 * len(panels), 4.0), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels), sharey=True, squeeze=False)[0], panels, strict=True):
        for number, line in enumerate(panel.lines):
            colour, dashes, marker = STYLES[number % len(STYLES)]
            axes.plot(
                line.x,
                line.y,
                label=line.label,
                color=colour,
                linestyle=dashes,
                marker=marker,
                markersize=5,
                markevery=max(1, len(line.x) // 10),
                linewidth=2,
            )
        axes.set_title(panel.title, fontsize=12)
        axes.set_xlabel(x_label, fontsize=11)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        axes.grid(alpha=0.3)
        axes.legend(fontsize=10)
    figure.axes[0].set_ylabel(y_label, fontsize=11)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    return buffer.getvalue()
