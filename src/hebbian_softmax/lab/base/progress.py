"""Live progress: bars that rich redraws on a terminal, and a plain line now and then anywhere else."""

import os
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, ClassVar, TextIO, cast

from hebbian_softmax.lab.base.console import filled, printable
from hebbian_softmax.lab.base.extras import require

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

REDRAW_SECONDS = 0.1  # between two drawings on a terminal
LINE_SECONDS = 10.0  # between two lines in a log file
WINDOW_SECONDS = 10.0  # the time over which the rate is measured
BAR_WIDTH = 16  # columns
LEAST_WORDS = 24  # columns that the words have beside a bar at least; where they do not fit, the bar goes first


@dataclass(frozen=True)
class Bar:
    """One line on a terminal: a title, a bar for `done` of `total`, and some words."""

    title: str
    done: float
    total: float | None
    words: Sequence[str]


class Progress:
    """Shows how far `label` is: the amount done, the rate, the time left, and metrics.

    >>> with Progress("longtail", total=2, stream=sys.stdout) as progress:
    ...     for step in (1, 2):
    ...         progress.update(step, {"loss": 0.5 / step})
    longtail: 2/2 steps, loss 0.25

    `start` is the work that earlier processes did: it counts as done, not as speed. `total=None` means unknown.
    A stream that is closed or whose reader has gone ends the progress, not the work. A subclass changes what is said
    by overriding `words`, `line` or `bars`.
    """

    redraw_seconds = REDRAW_SECONDS

    def __init__(
        self,
        label: str,
        *,
        total: int | None,
        start: int = 0,
        unit: str = "steps",
        quiet: bool = False,
        stream: TextIO | None = None,
    ) -> None:
        self.label, self.total, self.unit, self.quiet = label, total, unit, quiet
        stream = sys.stderr if stream is None else stream
        self.stream = Forgiving(stream)
        # Bars need a terminal that moves its cursor and has no bars yet.
        dumb = os.environ.get("TERM", "").lower() in ("dumb", "unknown")
        self.live = self.stream.isatty() and not dumb and not hasattr(stream, "rich_proxied_file")
        self.done = start
        self.metrics: Mapping[str, float] = {}
        self._samples = deque([(time.monotonic(), start)])
        self._drawn = float("-inf") if self.live else time.monotonic()
        self._display = _open_display(self.stream) if self.live and not quiet else None

    def due(self) -> bool:
        """Say whether the next `update` shows something, so that the caller can skip costly metrics when not.

        Only the clock decides, even if the progress is quiet: ranks that train together agree on the answer.
        """
        return time.monotonic() - self._drawn >= (self.redraw_seconds if self.live else LINE_SECONDS)

    def update(self, done: int, metrics: Mapping[str, float] | None = None) -> None:
        """Note the state, and show it if it is time to."""
        self.done = done
        self.metrics = self.metrics if metrics is None else metrics
        if self.due():
            now = self._drawn = time.monotonic()
            self._samples.append((now, done))
            while len(self._samples) > 2 and now - self._samples[1][0] > WINDOW_SECONDS:
                self._samples.popleft()
            (first, before), (last, after) = self._samples[0], self._samples[-1]
            self._show((after - before) / (last - first) if last > first and after > before else None)

    def note(self, text: str) -> None:
        """Show a line of text now."""
        if self._display is not None:
            console = self._display.console
            console.print(filled(printable(f"{self.label}: {text}"), console.width), soft_wrap=True)  # above the bars
        elif not self.quiet:
            print(printable(f"{self.label}: {text}"), file=self.stream, flush=True)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the last state on the terminal or in the log."""
        self._show(None)
        if self._display is not None:
            self._display.stop()

    def pace(self, rate: float | None) -> list[str]:
        """Return the amount done, and the rate and the time left if they are known, in words."""
        in_bytes = self.unit == "bytes"
        known = [value for value in (self.done, self.total) if value is not None]
        amount = "/".join(format_bytes(value) if in_bytes else f"{value:,}" for value in known)
        said = [amount if in_bytes else f"{amount} {self.unit}"]
        if rate is not None:
            said.append(f"{format_bytes(rate) if in_bytes else format_rate(rate)}/s")
            if self.total is not None:
                said.append(f"{format_seconds((self.total - self.done) / rate)} left")
        return said

    def words(self, rate: float | None) -> list[str]:
        """Return the words of the line: the pace and the metrics."""
        said = self.pace(rate)
        for name, value in self.metrics.items():
            said.append(f"{name.replace('_', ' ')} {f'{value:,}' if isinstance(value, int) else f'{value:.4g}'}")
        return said

    def line(self, rate: float | None) -> str:
        """Return the line for a log file."""
        return f"{self.label}: {', '.join(self.words(rate))}"

    def bars(self, rate: float | None) -> list[Bar]:
        """Return the bars for a terminal."""
        return [Bar(self.label, self.done, self.total, self.words(rate))]

    def _show(self, rate: float | None) -> None:
        if self._display is not None:
            self._display.start()
            self._display.update(_draw(self.bars(rate), self._display.console.width), refresh=True)
        elif not self.quiet:
            print(printable(self.line(rate)), file=self.stream, flush=True)


class ContendersProgress(Progress):
    """Progress with a bar more for each of two models that are trained side by side. A subclass says what it shows."""

    titles: ClassVar[dict[str, str]] = {"plain": "plain softmax", "hebbian": "Hebbian softmax"}
    """The models, by the first word of their metrics."""

    def contender(self, name: str) -> tuple[float, list[str]]:
        """Return the amount that a model has reached and what is said of it; no words before anything is known."""
        raise NotImplementedError

    def scale(self, most: float) -> float:
        """Return the amount that a full bar stands for, if no model has reached more than `most`."""
        return 1.0

    def words(self, rate: float | None) -> list[str]:
        """Return what is said about the steps; the metrics are said of each model."""
        return self.pace(rate)

    def line(self, rate: float | None) -> str:
        found = {title: self.contender(name)[1] for name, title in self.titles.items()}
        both = [f"{title} {', '.join(words)}" for title, words in found.items() if words]
        return "; ".join([super().line(rate), *both])

    def bars(self, rate: float | None) -> list[Bar]:
        found = {title: self.contender(name) for name, title in self.titles.items()}
        scale = self.scale(max(amount for amount, _ in found.values()))
        return [*super().bars(rate), *(Bar(f"  {title}", done, scale, words) for title, (done, words) in found.items())]


class Forgiving:
    """A stream for optional text: the first error stops the writing, and the work goes on.

    An error means that the reader has gone, the disk is full, or the stream is closed or missing.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream, self._broken = stream, stream is None
        self.encoding = getattr(stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        self._try("write", text)
        return len(text)

    def flush(self) -> None:
        self._try("flush")

    def isatty(self) -> bool:
        return bool(self._try("isatty"))

    def _try(self, method: str, *arguments: str) -> Any:
        if not self._broken:
            try:
                return getattr(self._stream, method)(*arguments)
            except (AttributeError, OSError, ValueError):
                self._broken = True
        return None


def _open_display(stream: Forgiving) -> "Live":
    """Return a display on a terminal. Text written to standard error while it is open appears above it."""
    require("rich")
    from rich.console import Console
    from rich.live import Live

    console = Console(file=cast(IO[str], stream), highlight=False, markup=False, emoji=False)
    return Live(console=console, auto_refresh=False, redirect_stdout=False)


def _draw(bars: Sequence[Bar], width: int) -> "Table":
    """Return the bars as rows that fit into `width` columns."""
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    titles = [printable(bar.title) for bar in bars]
    space = width - max(map(len, titles)) - 2
    longest = max(len(printable(", ".join(bar.words))) for bar in bars)
    with_bars = space - BAR_WIDTH >= max(LEAST_WORDS, longest)
    grid = Table.grid(padding=(0, 1))
    for bar, title in zip(bars, titles, strict=True):
        drawn = [ProgressBar(total=bar.total, completed=bar.done, width=BAR_WIDTH)] if with_bars else []
        words = shortened(printable(", ".join(bar.words)), space - BAR_WIDTH * with_bars)
        grid.add_row(Text(title), *drawn, Text(words, no_wrap=True, overflow="crop"))
    return grid


def shortened(line: str, width: int) -> str:
    """Return the parts of a line that fit. Half a number would be another number.

    >>> shortened("1,234 words, loss 3.21", 20)
    '1,234 words'
    """
    if len(line) <= width:
        return line
    end = line.rfind(", ", 0, max(0, width) + 2)
    return line[: end if end > 0 else max(0, width)]


def format_seconds(seconds: float) -> str:
    """Return a time for people: 0:42, 3:07, 1:02:05."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def format_rate(rate: float) -> str:
    """Return a speed for people, to three digits or to the whole: 0.0512, 35.3, 2,757."""
    return f"{rate:.3g}" if rate < 999.5 else f"{rate:,.0f}"


def format_bytes(count: float) -> str:
    """Return a number of bytes for people, in powers of 1000: 512 B, 1.5 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
