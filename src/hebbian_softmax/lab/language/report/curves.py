"""Learning curves: perplexity against training words, as in the paper's figure 4 and in its appendices."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from hebbian_softmax.lab.base.statistics import mean_and_spread
from hebbian_softmax.lab.data.buckets import BUCKETS
from hebbian_softmax.lab.language.names import ONLY, ModelName
from hebbian_softmax.lab.report.figures import Line, Panel, line_figure

Log = Sequence[Mapping[str, Any]]
"""The records of a training: `words`, and perplexities by name."""
CUT = 10.0  # the axis has at most this many times the lowest end, because first points of 1e20 would hide all others
CAPTION = (
    "Validation perplexity against training words, of all words and of those seen fewer than 100 times in training. "
    "The axis is logarithmic; what is above ten times the lowest end is cut off."
)
BANDS = " Lines are means over seeds, bands two standard deviations."


def mean_curve(logs: Sequence[Log], name: str) -> list[tuple[float, float, float]]:
    """Return words, the mean over seeds and the standard deviation, for the words at which all seeds have a value."""
    values: dict[float, list[float]] = {}
    for record in chain.from_iterable(logs):
        if isinstance(record.get("words"), int | float) and isinstance(record.get(name), int | float):
            values.setdefault(record["words"], []).append(record[name])
    return [(words, *mean_and_spread(found)) for words, found in sorted(values.items()) if len(found) == len(logs)]


def curve_panels(groups: Mapping[str, Sequence[Log]], names: Mapping[str, ModelName] | None = None) -> list[Panel]:
    """Return a panel with all words and a panel with the rarest; each group of logs is one line.

    `names` says which model of its logs a group is of; by default the only one.
    """

    def panel(title: str, key: str) -> Panel:
        curves = {
            label: mean_curve(logs, f"{(names or {}).get(label, ONLY).log_prefix}valid_perplexity{key}")
            for label, logs in groups.items()
        }
        ends = [curve[-1][1] for curve in curves.values() if curve]
        means = [mean for curve in curves.values() for _, mean, _ in curve]
        lines = []
        for label, curve in curves.items():
            spread = curve if any(sigma for _, _, sigma in curve) else []  # Otherwise there is no band.
            low = [max(1.0, mean - 2 * sigma) for _, mean, sigma in spread]
            high = [mean + 2 * sigma for _, mean, sigma in spread]
            lines.append(Line(label, [words / 1e6 for words, _, _ in curve], [mean for _, mean, _ in curve], low, high))
        seen = (0.9 * min(means), min(CUT * min(ends), 1.1 * max(means))) if ends else None
        return Panel(title, lines, y_label="validation perplexity", log_y=seen)

    return [panel("all words", ""), panel(f"words seen {BUCKETS[-1]} times", f"_{BUCKETS[-1]}")]


def draw_curves(groups: Mapping[str, Sequence[Log]], names: Mapping[str, ModelName] | None = None) -> bytes:
    """Draw the panels of `curve_panels` as a PNG."""
    return line_figure(curve_panels(groups, names), x_label="millions of training words", y_label="")


def below_from(plain: Sequence[Log], other: Sequence[Log]) -> float | None:
    """Return the training words from which the mean curve of `other` stays below that of `plain`, to the end."""
    lower = {words: mean for words, mean, _ in mean_curve(other, "valid_perplexity")}
    since: float | None = None
    for words, mean, _ in mean_curve(plain, "valid_perplexity"):
        if words in lower:
            below = lower[words] < mean
            since = (words if since is None else since) if below else None
    return since
