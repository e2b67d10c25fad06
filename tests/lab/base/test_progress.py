"""What people see while they wait."""

import io
import sys

import pytest

from hebbian_softmax.lab.base import progress as module
from hebbian_softmax.lab.base.progress import Progress, format_bytes, format_rate, format_seconds, shortened


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setenv("COLUMNS", "80")
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


def test_a_terminal_gets_one_line_redrawn_within_its_width(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    written = run(Terminal(), clock, steps=20, seconds=0.05)
    assert written.count("\n") == 1
    assert written.endswith("\n")
    drawn = written.rstrip("\n").split("\r")[1:]
    assert 8 <= len(drawn) <= 12  # every 0.1 s of one second
    assert all(len(line) < 30 for line in drawn)
    assert {line.count(",") for line in drawn} == {1}  # steps and their rate; the time left would be cut


def test_a_line_is_cut_between_its_parts() -> None:
    line = "demo: 1,234 words, 5/s, loss 3.21"
    assert [shortened(line, width) for width in (33, 32, 22, 21)] == [line, line[:22], line[:22], line[:17]]
    assert shortened(line, 9) == "demo: 1,2"  # nothing fits whole
    assert shortened(line, -1) == ""


def test_a_shorter_line_covers_the_longer_one_before(clock: Clock) -> None:
    stream = Terminal()
    with Progress("demo", total=10, stream=stream) as progress:
        clock.now += 1
        progress.update(1, {"a long name of a metric": 1.0})
        long = stream.getvalue().split("\r")[-1]
        clock.now += 1
        progress.update(2, {})
        assert len(stream.getvalue().split("\r")[-1]) == len(long)


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
    assert stream.getvalue().splitlines() == [
        "a.zip: 25.0 MB, 2.5 MB/s",
        "a.zip: trying again",
        "a.zip: 25.0 MB",
    ]


def test_an_error_still_ends_the_line(clock: Clock) -> None:
    stream = Terminal()

    def fail() -> None:
        with Progress("demo", total=2, stream=stream) as progress:
            progress.update(1)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert stream.getvalue().endswith("\n")


@pytest.mark.parametrize("error", [BrokenPipeError(32, "gone"), OSError(28, "full"), ValueError("closed")])
@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
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
    ("rate", "text"), [(0.0512, "0.0512"), (35.34, "35.3"), (999.4, "999"), (999.6, "1,000"), (2756.6, "2,757")]
)
def test_rates(rate: float, text: str) -> None:
    assert format_rate(rate) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0:00"), (42, "0:42"), (187.2, "3:07"), (3599.9, "1:00:00"), (3725, "1:02:05")]
)
def test_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (2e9, "2.0 GB"), (3e15, "3000.0 TB")]
)
def test_bytes(count: float, text: str) -> None:
    assert format_bytes(count) == text
