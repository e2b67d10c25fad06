"""Tables and figures of the image curriculum (section 4.1 and the appendix on Omniglot)."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from hebbian_softmax.lab.base.statistics import mean_and_spread
from hebbian_softmax.lab.images.curriculum import CHECK_EVERY, History
from hebbian_softmax.lab.images.learner import Answer
from hebbian_softmax.lab.report.figures import STYLES, Line, Panel, as_png, line_figure, require_extras
from hebbian_softmax.lab.report.tables import Cell, Table

MILESTONES = (50, 75, 100, 150, 200, 300, 400, 500, 750, 1000, 1500)  # classes
Group = Sequence[History]
"""The histories of one method from several seeds."""


def tabulate_two(histories: Mapping[str, History], names: Mapping[str, str]) -> Table:
    """Tabulate two runs side by side: how far each got, and how soon."""
    both = [histories[name] for name in names]
    rows: list[list[Cell]] = [
        ["classes reached", *(history.reached for history in both)],
        ["levels completed", *(len(history.levels()) for history in both)],
        ["accuracy at the last check, %", *(f"{100 * history.accuracy[-1]:.1f}" for history in both)],
    ]
    rows += [
        [f"steps to {classes} classes", *(history.steps_to(classes) for history in both)]
        for classes in MILESTONES
        if any(history.steps_to(classes) for history in both)
    ]
    return Table("The curriculum: 5 classes more at 60 % accuracy", ["", *names.values()], rows)


def draw_two(histories: Mapping[str, History], names: Mapping[str, str]) -> bytes:
    """Draw two runs: classes against steps, and the steps of each level."""
    classes, levels = [], []
    for name, title in names.items():
        history = histories[name]
        classes.append(Line(title, [0, *history.steps], [history.start, *history.classes]))
        spent = history.steps_per_level()
        levels.append(Line(title, [level for level, _ in spent], [float(steps) for _, steps in spent]))
    return line_figure(
        [
            Panel("classes reached", classes, x_label="training steps", y_label="classes"),
            Panel("steps on each level", levels, x_label="classes of the level", y_label="training steps"),
        ]
    )


def draw_answers(drawings: Sequence[Tensor], answers: Mapping[str, Sequence[Answer]]) -> bytes:
    """Draw test drawings in a row, and below each what every head takes it for, with its probability.

    A right answer has a frame of one colour and line, a wrong one of another.
    """
    require_extras()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.1 * len(drawings) + 1.4, 1.35 * (1 + len(answers))), layout="constrained")
    grid = figure.subplots(1 + len(answers), len(drawings), squeeze=False)
    for column, drawing in enumerate(drawings):
        _draw_one(grid[0][column], drawing)
        for row, found in enumerate(answers.values(), start=1):
            answer, axes = found[column], grid[row][column]
            _draw_one(axes, answer.example)
            axes.set_xlabel(f"{'right' if answer.right else 'wrong'}, {100 * answer.probability:.0f} %", fontsize=8)
            for spine in axes.spines.values():
                spine.set(visible=True, color=STYLES[0 if answer.right else 1][0], linewidth=2)
                spine.set_linestyle("-" if answer.right else ":")
    for axes, title in zip(grid[:, 0], ["drawn", *answers], strict=True):
        axes.set_ylabel(title.replace(" ", "\n"), fontsize=9)
    return as_png(figure)


def _draw_one(axes: Any, drawing: Tensor) -> None:
    axes.imshow(drawing.cpu().numpy(), cmap="gray")
    axes.set(xticks=[], yticks=[])
    for spine in axes.spines.values():
        spine.set_visible(False)


def draw_levels(groups: Mapping[str, Group]) -> bytes:
    """Draw the paper's figure 3: training steps of each level that all seeds completed, averaged over seeds."""
    lines = []
    for title, group in groups.items():
        spent: dict[int, list[int]] = {}
        for history in group:
            for level, steps in history.steps_per_level():
                spent.setdefault(level, []).append(steps)
        levels = [level for level, steps in sorted(spent.items()) if len(steps) == len(group)]
        means = [mean_and_spread(spent[level])[0] for level in levels]
        lines.append(Line(title, levels, means))
    panel = Panel("steps on each level, mean over seeds", lines)
    return line_figure([panel], x_label="classes of the level", y_label="training steps")


def spread_line(label: str, x: Sequence[float], seeds: Sequence[Sequence[float]]) -> Line:
    """Return the means over seeds of the values at each x, with a band of two standard deviations to either side."""
    found = [mean_and_spread(values) for values in seeds]
    low, high = [mean - 2 * spread for mean, spread in found], [mean + 2 * spread for mean, spread in found]
    return Line(label, x, [mean for mean, _ in found], low, high)


def band(title: str, group: Group) -> Line:
    """Return classes against steps: the mean over seeds, and a band of two standard deviations to either side."""
    checks = min(len(history.classes) for history in group)
    steps = [CHECK_EVERY * check for check in range(checks + 1)]
    return spread_line(title, steps, [[history.classes_at(step) for history in group] for step in steps])


def draw_bands(groups: Mapping[str, Group]) -> bytes:
    """Draw the paper's figure 6: classes against steps, with bands of two standard deviations over seeds."""
    panel = Panel("classes reached, mean and 2σ over seeds", [band(name, group) for name, group in groups.items()])
    return line_figure([panel], x_label="training steps", y_label="classes")


def draw_rates(groups: Mapping[float, Group]) -> bytes:
    """Draw the paper's figure 5: plain softmax for each learning rate; beside it, how far each rate gets."""
    rates = sorted(groups)
    bands = [band(f"{rate:g}", groups[rate]) for rate in rates]
    curves = [Line(line.label, line.x, line.y) for line in bands]
    ends = [[history.reached for history in groups[rate]] for rate in rates]
    reached = spread_line("plain softmax, mean and 2σ", rates, ends)
    return line_figure(
        [
            Panel("plain softmax by learning rate", curves, x_label="training steps", y_label="classes"),
            Panel("classes at the end", [reached], x_label="learning rate", y_label="classes", log_x=True),
        ]
    )


def spread_of(values: Sequence[float]) -> str:
    """Return the mean ± two standard deviations as a cell.

    >>> spread_of([95, 100, 105])
    '100 ± 10'
    """
    mean, spread = mean_and_spread(values)
    return f"{mean:,.0f} ± {2 * spread:,.0f}"


def steps_cell(group: Group, classes: int) -> str:
    """Return the steps to so many classes, mean ± 2σ, or how many seeds got there if not all did."""
    known = [step for history in group if (step := history.steps_to(classes)) is not None]
    return spread_of(known) if len(known) == len(group) else f"{len(known)} of {len(group)} got there"


def tabulate_milestones(groups: Mapping[str, Group]) -> Table:
    """Tabulate the steps to each milestone that some seed of some method reached."""
    rows: list[list[Cell]] = [
        [f"{classes} classes", *(steps_cell(group, classes) for group in groups.values())]
        for classes in MILESTONES
        if any(history.reached >= classes for group in groups.values() for history in group)
    ]
    return Table("Steps to so many classes, mean ± 2σ over seeds", ["", *groups], rows)


def tabulate_writes(groups: Mapping[str, Group]) -> list[Table]:
    """Tabulate when the rule began to write and how many of the classes reached it has written, if that is known."""
    rows: list[list[Cell]] = []
    for name, group in groups.items():
        began = [history.began for history in group if history.began is not None]
        shares = [100 * history.written / history.reached for history in group if history.written is not None]
        if began or shares:
            rows.append([name, spread_of(began) if began else "–", f"{spread_of(shares)} %" if shares else "–"])
    columns = ["method", "steps before the first write", "share of the classes that were written"]
    return [Table("What the rule has written, mean ± 2σ over seeds", columns, rows)] if rows else []


def tabulate_reached(title: str, groups: Mapping[str, Group], steps: int, target: int) -> Table:
    """Tabulate for each method the classes after `steps` steps and the steps to `target` classes, mean ± 2σ."""
    rows: list[list[Cell]] = []
    for name, group in groups.items():
        reached = [history.classes_at(steps) for history in group]
        rows.append(
            [name, len(group), spread_of(reached), f"{min(reached)} … {max(reached)}", steps_cell(group, target)]
        )
    columns = ["method", "seeds", f"classes after {steps:,} steps", "lowest … highest", f"steps to {target} classes"]
    return Table(title, columns, rows)
