"""Live progress of a comparison: a bar for the steps, and one for the classes that each contender has reached."""

import shutil
from collections.abc import Mapping
from typing import TextIO

from hebbian_softmax.lab.base.progress import Progress

WIDTH = 16  # so that all fits in 80 columns
SCALES = (50, 100, 200, 500, 1000, 2000)  # classes that a full bar stands for


class Bars(Progress):
    """Progress in several lines on a terminal, in one line anywhere else.

    `contenders` names them for people. Their metrics are `NAME_classes`, `NAME_accuracy` and `NAME_level_steps`, the
    steps that the last level took.
    """

    def __init__(
        self,
        label: str,
        *,
        contenders: Mapping[str, str],
        total: int | None,
        start: int = 0,
        quiet: bool = False,
        stream: TextIO | None = None,
    ) -> None:
        super().__init__(label, total=total, start=start, quiet=quiet, stream=stream)
        self.contenders = contenders
        self._height = 0

    def _line(self, rate: float | None) -> str:
        metrics, self.metrics = self.metrics, {}
        first = super()._line(rate)
        self.metrics = metrics
        lines = [self._contender(name, metrics) for name in self.contenders]
        if not self.live:
            return "; ".join([first, *(line for line in lines if line)])
        label = max(map(len, self.contenders.values()))
        most = max(metrics.get(f"{name}_classes", 0) for name in self.contenders)
        scale = next((scale for scale in SCALES if most <= scale), SCALES[-1])
        bars = [
            f"  {title:<{label}} {bar(metrics.get(f'{name}_classes', 0), scale)} {line}"
            for (name, title), line in zip(self.contenders.items(), lines, strict=True)
        ]
        amount = first.removeprefix(f"{self.label}: ")
        return "\n".join([f"{self.label:<{label + 2}} {bar(self.done, self.total or 1)} {amount}", *bars])

    def _contender(self, name: str, metrics: Mapping[str, float]) -> str:
        if f"{name}_classes" not in metrics:
            return ""
        parts = [f"{metrics[f'{name}_classes']:.0f} classes", f"{100 * metrics[f'{name}_accuracy']:.0f} % right"]
        if f"{name}_level_steps" in metrics:
            parts.append(f"{metrics[f'{name}_level_steps']:.0f} steps a level")
        words = ", ".join(parts)
        return words if self.live else f"{self.contenders[name]} {words}"

    def _write(self, line: str) -> None:
        lines = line.split("\n")
        if not self.live or (len(lines) == 1 and not self._height):
            super()._write(line)
            return
        columns = shutil.get_terminal_size().columns - 1
        up = f"\x1b[{self._height - 1}A" if self._height > 1 else ""
        # \x1b[K clears what an older, longer line left.
        self._print("\r" + up + "\n".join(f"{each[:columns]}\x1b[K" for each in lines), end="")
        self._height = len(lines)

    def _end_line(self) -> None:
        super()._end_line()
        self._height = 0


def bar(done: float, total: float) -> str:
    """How much of the total.

    >>> bar(1, 2)
    '[########--------]'
    """
    filled = max(0, min(WIDTH, int(WIDTH * done / total)))
    return "[" + "#" * filled + "-" * (WIDTH - filled) + "]"
