"""Live progress: one line that is redrawn on a terminal, a plain line now and then anywhere else."""

import shutil
import sys
import time
from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import TextIO

REDRAW_SECONDS = 0.1  # on a terminal
LINE_SECONDS = 10.0  # in a log file
WINDOW_SECONDS = 10.0  # over which the rate is measured


class Progress:
    """Shows how far `label` is: done of total, rate, time left, metrics.

    >>> with Progress("longtail", total=2, stream=sys.stdout) as progress:
    ...     for step in (1, 2):
    ...         progress.update(step, {"loss": 0.5 / step})
    longtail: 2/2 steps, loss 0.25

    `start` is the work that earlier processes did: it counts as done, not as speed. `total=None` means unknown.
    A stream that is closed or whose reader has gone ends the progress, not the work.
    """

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
        self.stream = sys.stderr if stream is None else stream
        self.live = self._is_terminal()
        self.done = start
        self.metrics: Mapping[str, float] = {}
        now = time.monotonic()
        self._samples = deque([(now, start)])
        self._drawn = now if not self.live else float("-inf")
        self._width = 0

    def due(self) -> bool:
        """Whether the next `update` shows something; lets the caller skip costly metrics when not.

        It goes by the clock alone, also when quiet.
        """
        return time.monotonic() - self._drawn >= (REDRAW_SECONDS if self.live else LINE_SECONDS)

    def update(self, done: int, metrics: Mapping[str, float] | None = None) -> None:
        """Report the state; draws only when it is time to."""
        self.done = done
        self.metrics = self.metrics if metrics is None else metrics
        if self.due():
            now = self._drawn = time.monotonic()
            self._samples.append((now, done))
            while len(self._samples) > 2 and now - self._samples[1][0] > WINDOW_SECONDS:
                self._samples.popleft()
            self._write(self._line(self._rate()))

    def note(self, text: str) -> None:
        """Show a line of its own, now."""
        self._write(f"{self.label}: {text}")
        self._end_line()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the last state as a plain line."""
        self._write(self._line(None))
        self._end_line()

    def _rate(self) -> float | None:
        (first, before), (last, after) = self._samples[0], self._samples[-1]
        return (after - before) / (last - first) if last > first and after > before else None

    def _line(self, rate: float | None) -> str:
        def amount(value: float) -> str:
            return format_bytes(value) if self.unit == "bytes" else f"{value:,.0f}"

        suffix = "" if self.unit == "bytes" else f" {self.unit}"
        parts = [amount(self.done) + ("" if self.total is None else f"/{amount(self.total)}") + suffix]
        if rate is not None:
            parts.append(f"{format_bytes(rate) if self.unit == 'bytes' else format_rate(rate)}/s")
            if self.total is not None:
                parts.append(f"{format_seconds((self.total - self.done) / rate)} left")
        parts += [f"{name.replace('_', ' ')} {value:.4g}" for name, value in self.metrics.items()]
        return f"{self.label}: {', '.join(parts)}"

    def _write(self, line: str) -> None:
        if self.live:
            line = shortened(line, shutil.get_terminal_size().columns - 1)  # one that wraps could not be redrawn
            self._print(f"\r{line:<{self._width}}", end="")
            self._width = len(line)
        else:
            self._print(line)

    def _end_line(self) -> None:
        if self.live:
            self._print("")

    def _print(self, text: str, end: str = "\n") -> None:
        if self.quiet:
            return
        try:
            print(text, end=end, file=self.stream, flush=True)
        except (OSError, ValueError):  # the reader has gone, the disk is full, the stream is closed
            self.quiet = True

    def _is_terminal(self) -> bool:
        try:
            return self.stream.isatty()
        except (AttributeError, OSError, ValueError):  # there is no stream, or it is closed
            self.quiet = True
            return False


def shortened(line: str, width: int) -> str:
    """The parts of a line that fit; half a number would be another number.

    >>> shortened("demo: 1,234 words, loss 3.21", 24)
    'demo: 1,234 words'
    """
    if len(line) <= width:
        return line
    end = line.rfind(", ", 0, max(0, width) + 2)
    return line[: end if end > 0 else max(0, width)]


def format_seconds(seconds: float) -> str:
    """Time for people: 0:42, 3:07, 1:02:05."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def format_rate(rate: float) -> str:
    """A speed for people, to three digits or to the whole: 0.0512, 35.3, 2,757."""
    return f"{rate:.3g}" if rate < 999.5 else f"{rate:,.0f}"


def format_bytes(count: float) -> str:
    """Bytes for people, in powers of 1000: 512 B, 1.5 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
