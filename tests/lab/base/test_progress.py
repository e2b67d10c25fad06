"""Live progress: bars on a terminal, plain lines in a log, and work that goes on when nobody reads."""

import io
import re
import sys
import time
from collections.abc import Callable

import pytest

from hebbian_softmax.lab.base.console import say
from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.base.progress import Progress, format_bytes, format_rate, format_seconds, shortened


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def plain_text(terminal: Terminal) -> list[str]:
    """Return all lines ever drawn, without control sequences."""
    drawn = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())
    return [line.rstrip() for line in re.split("[\r\n]+", drawn) if line.strip()]


class Clock:
    now = 100.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    return clock


def run(stream: io.StringIO, clock: Clock, *, steps: int, seconds: float, **options: object) -> str:
    with Progress("demo", total=steps, stream=stream, **options) as progress:  # type: ignore[arg-type]
        for step in range(1, steps + 1):
            clock.now += seconds
            progress.update(step, {"loss": 1 / step})
    return stream.getvalue()


def test_a_log_gets_few_plain_lines(clock: Clock) -> None:
    lines = run(io.StringIO(), clock, steps=240, seconds=0.125).splitlines()
    assert len(lines) == 3 + 1  # every ten seconds, and the end
    assert lines[0] == "demo: 80/240 steps, 8/s, 0:20 left, loss 0.0125"
    assert lines[-1] == "demo: 240/240 steps, loss 0.004167"
    assert not any("\r" in line for line in lines)


def test_a_terminal_is_redrawn_within_its_width(
    terminal: Terminal, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(terminal, clock, steps=20, seconds=0.05)
    lines = plain_text(terminal)
    assert 8 <= len(lines) <= 14  # every 0.1 s of one second, and the end
    assert lines[-1].split() == ["demo", "━" * 16, "20/20", "steps,", "loss", "0.05"]
    assert "10/s, 0:00 left" in lines[-3] or "20/s, 0:00 left" in lines[-3]
    monkeypatch.setenv("COLUMNS", "30")
    narrow = Terminal()
    run(narrow, clock, steps=20, seconds=0.05)
    assert all(line.startswith("demo ") and "━" not in line and len(line) < 30 for line in plain_text(narrow))
    assert {line.count(",") for line in plain_text(narrow)[:-1]} == {1}  # the time left would be cut


def test_a_line_is_cut_between_its_parts() -> None:
    line = "1,234 words, 5/s, loss 3.21"
    assert [shortened(line, width) for width in (27, 26, 16, 15)] == [line, line[:16], line[:16], line[:11]]
    assert shortened(line, 3) == "1,2"  # nothing fits whole
    assert shortened(line, -1) == ""


def test_notes_and_other_messages_stand_above_the_bars(
    terminal: Terminal, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", terminal)
    with Progress("demo", total=2) as progress:
        progress.update(1)
        progress.note("the log lacks a record")
        say("note: no CUDA graph")
        with Progress("inner", total=1):  # no second display in the first: a plain line
            pass
        assert sys.stderr is not terminal
    assert sys.stderr is terminal
    lines = plain_text(terminal)
    for text in ("demo: the log lacks a record", "note: no CUDA graph", "inner: 0/1 steps"):
        assert lines.count(text) == 1
    assert lines[-1].startswith("demo ━")


def test_a_terminal_without_cursor_control_gets_lines(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    with Progress("demo", total=2, stream=terminal):
        pass
    assert terminal.getvalue() == "demo: 0/2 steps\n"


def test_without_rich_only_a_terminal_says_what_to_install(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    with pytest.raises(LabError, match=r"needs rich: pip install 'hebbian-softmax\[lab\]'"):
        Progress("demo", total=2, stream=terminal)
    Progress("demo", total=2, stream=terminal, quiet=True)
    Progress("demo", total=2, stream=io.StringIO())


@pytest.mark.usefixtures("terminal")
def test_quiet_is_silent(clock: Clock) -> None:
    assert run(io.StringIO(), clock, steps=300, seconds=1, quiet=True) == ""
    assert run(Terminal(), clock, steps=300, seconds=1, quiet=True) == ""


def test_resumed_work_is_not_speed(clock: Clock) -> None:
    stream = io.StringIO()
    with Progress("demo", total=1100, start=1000, stream=stream) as progress:
        clock.now += 10
        progress.update(1010)
    assert stream.getvalue().splitlines()[0] == "demo: 1,010/1,100 steps, 1/s, 1:30 left"


def test_the_rate_follows_recent_speed(clock: Clock) -> None:
    stream = io.StringIO()
    with Progress("demo", total=10_000, stream=stream) as progress:
        for step in (10, 20, 1020, 2020):
            clock.now += 10
            progress.update(step)
    assert ", 100/s, " in stream.getvalue().splitlines()[3]


def test_bytes_of_unknown_total(clock: Clock) -> None:
    stream = io.StringIO()
    with Progress("a.zip", total=None, unit="bytes", stream=stream) as progress:
        clock.now += 10
        progress.update(25_000_000)
        progress.note("trying again")
    assert stream.getvalue().splitlines() == ["a.zip: 25.0 MB, 2.5 MB/s", "a.zip: trying again", "a.zip: 25.0 MB"]


def test_an_error_still_ends_the_line(terminal: Terminal) -> None:
    def fail() -> None:
        with Progress("demo", total=2, stream=terminal) as progress:
            progress.update(1)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert terminal.getvalue().endswith("\n\x1b[?25h")  # the cursor is back


@pytest.mark.parametrize("error", [BrokenPipeError(32, "gone"), OSError(28, "full"), ValueError("closed")])
@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
@pytest.mark.usefixtures("terminal")
def test_a_stream_that_fails_ends_the_progress_and_not_the_work(
    clock: Clock, error: Exception, kind: type[io.StringIO]
) -> None:
    class Failing(kind):  # type: ignore[misc, valid-type]
        writes = 0

        def write(self, text: str) -> int:
            Failing.writes += 1
            raise error

    run(Failing(), clock, steps=300, seconds=1)
    assert Failing.writes == 1


def test_no_stream_at_all_is_quiet(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    with Progress("demo", total=2) as progress:
        clock.now += 20
        progress.update(1)
        progress.note("text")
    closed = io.StringIO()
    closed.close()
    with Progress("demo", total=2, stream=closed) as progress:
        progress.note("text")


@pytest.mark.parametrize(
    ("form", "texts"),
    [
        (format_rate, {0.0512: "0.0512", 35.34: "35.3", 999.4: "999", 999.6: "1,000", 2756.6: "2,757"}),
        (format_seconds, {0.4: "0:00", 42: "0:42", 187.2: "3:07", 3599.9: "1:00:00", 3725: "1:02:05"}),
        (format_bytes, {0: "0 B", 999: "999 B", 1500: "1.5 kB", 2e9: "2.0 GB", 3e15: "3000.0 TB"}),
    ],
)
def test_numbers_for_people(form: Callable[[float], str], texts: dict[float, str]) -> None:
    assert {value: form(value) for value in texts} == texts
