"""The study of recommenders on files of one's own: formats, errors, and results that stay apart."""

import gzip
import lzma
import os
import re
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.recommend import __main__ as command
from benchmarks.recommend import table
from benchmarks.recommend.__main__ import Outcome, compare, finish, line_of, prepared, too_large
from benchmarks.recommend.baselines import Neighbours, memory_of_neighbours
from benchmarks.recommend.data import BY_TIME, LAST_ITEM, Event, Lesson, by_time
from benchmarks.recommend.plan import METHODS, bases, best_of, due
from benchmarks.recommend.reading import read
from benchmarks.recommend.records import Record, append, read_records
from benchmarks.recommend.trials import LAST, TIME, Course, Trial, course_of, run

from tests import ROOT
from tests.benchmarks.test_recommend import results_of

SEQUENCES = "".join(f"{user} {user} {user + 1} {user + 2} {(user + 3) % 7}\n" for user in range(7))
HEADER = "user_id:token\titem_id:token\trating:float\ttimestamp:float\n"
EVENTS = HEADER + "".join(f"{step % 5}\t{(step * 3) % 11}\t4\t{1000 + step}\n" for step in range(60))


def written(folder: Path, content: str | bytes, name: str = "mine.txt") -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def items_of(path: Path, timed: bool = False) -> list[list[int]]:
    return [list(map(int, items)) for items in read(path, timed).sequences]


@pytest.mark.parametrize(("name", "pack"), [("a.txt", bytes), ("a.txt.xz", lzma.compress), ("a.txt.gz", gzip.compress)])
def test_readers_number_items_as_they_are_first_seen(tmp_path: Path, name: str, pack: Callable[[bytes], bytes]) -> None:
    def packed(text: str) -> Path:
        return written(tmp_path, pack(text.encode()), name)

    assert items_of(packed("7 30 20\n8 20 10 30\n")) == [[0, 1], [1, 2, 0]]
    path = packed(
        "user_id:token\titem_id:token\trating:float\ttimestamp:float\n5\t9\t3\t20\n6\t8\t1\t10\n5\t8\t1\t20\n"
    )
    assert read(path, timed=True).events == [Event(0, 0, 10), Event(1, 1, 20), Event(1, 0, 20)]
    assert items_of(path) == items_of(path, timed=True) == [[0], [1, 0]]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("1\t5\t7\t9\n2\t7\t5\t6\n", [[0, 1, 2], [1, 0, 3]]),
        ("ann\tx\ty\tz\nbob\ty\tx\tw\n", [[0, 1, 2], [1, 0, 3]]),
        ("1\t5 7 9\n2\t7 5 6\n", [[0, 1, 2], [1, 0, 3]]),
        ("\n1 5 7 9\r\n\r\n2 7 5 6\n\n \n", [[0, 1, 2], [1, 0, 3]]),
        ("\ufeff1 5 7 9\n2 7 5 6", [[0, 1, 2], [1, 0, 3]]),
        ("user\titem\ttime\n1\t5\t30\n1\t7\t20\n2\t7\t10\n\n", [[0], [0, 1]]),
        ("who\twhat\twhen\n1\t5\t30\n2\t7\t20\n", [[0], [1]]),
    ],
    ids=["tabs, as many", "tabs, words", "tab and spaces", "empty lines", "byte order mark", "events", "users once"],
)
def test_the_format_is_known_by_the_content(tmp_path: Path, text: str, found: list[list[int]]) -> None:
    assert items_of(written(tmp_path, text)) == found


def test_times_keep_their_fractions(tmp_path: Path) -> None:
    text = "user\titem\ttime\n" + "".join(f"{n % 3}\t{n}\t{5 + n / 100}\n" for n in range(30))
    events = read(written(tmp_path, text), timed=True).events
    assert events is not None
    assert [event.time for event in events] == [5 + n / 100 for n in range(30)]
    assert {period.split for period in by_time(events).periods} == {"valid", "test"}


BOTH = "a file must have either a header and then lines of user, item, .* or, without a header, one line a user"
REFUSED = {
    "missing": ("last", None, r"mine.txt cannot be read \(No such file or directory\): name another file"),
    "empty": ("last", "", f"mine.txt is empty; {BOTH}"),
    "blank": ("time", "\n \n", f"mine.txt is empty; {BOTH}"),
    "binary": ("last", b"1 2 3\n2 \xff\xfe\n", r"mine.txt, line 2, is no text in UTF-8"),
    "headerless": ("last", "1\t5\t3\t9\n2\t6\t3\t9\n1\t7\t3\t10\n", f"line 3, has the user '1', as line 1 has.*{BOTH}"),
    "users twice": ("last", "1 5 6 7\n2 5 6\n\n1 7 8 9\n", f"line 4, has the user '1', as line 1 has.*{BOTH}"),
    "spaces": ("last", "user item time\n1 5 900\n1 6 901\n", f"line 1, has 'user' as its user.*{BOTH}"),
    "users once": ("last", "1\t5\t881250949\n2\t6\t881250950\n", f"line 2, has what looks like a time at its.*{BOTH}"),
    "typed": ("last", "user_id:token\titem_id_list:token_seq\n1\t5 6 7\n", "line 1, has 'user_id:token' as its user"),
    "commas": ("last", "user,item,time\n1,2,3\n", "line 1, has commas or semicolons between"),
    "commas and spaces": ("last", "1, 2, 3\n2, 4, 5\n", "line 1, has commas or semicolons between"),
    "users": ("last", "1 5 6 7\n2\n", "line 2, has the user '2' and no item"),
    "dates": ("last", "user\titem\ttime\n1\t5\tMay\n1\t6\tJune\n", "line 2, has 'May' as its time, which is no finite"),
    "infinite": ("time", "user\titem\ttime\n1\t5\t7\n1\t6\tinf\n", "line 3, has 'inf' as its time"),
    "nan": ("time", "user\titem\ttime\n1\t5\t7\n1\t6\tnan\n", "line 3, has 'nan' as its time"),
    "fields": ("time", "user\titem\ttime\n1\t5\t7\n1\t6\n", "line 3, has 2 fields where the header has 3"),
    "no item": ("time", "user\titem\ttime\n1\t\t7\n", "line 2, has no user or no item"),
    "no header": ("time", "1\t5\t7\n1\t6\t8\n", "line 1, has no header but a number as its last field"),
    "header alone": ("time", "user\titem\ttime\n", "line 1, has a header, and no interaction follows"),
    "no tabs": ("time", "user,item,time\n1,2,3\n", "line 1, has 1 of at least three fields"),
    "order": ("time", "1 2 3 4\n2 3 4 5\n", "line 1, has 1 of at least three fields.*without times give --split last"),
    "one time": ("time", HEADER + "1\t2\t3\t5\n" * 40, "different times is 1.* give --split last"),
    "two events": ("time", HEADER + "1\t2\t3\t5\n" * 2, "2 interactions are too few .* give more$"),
    "short": ("last", "1 5 6\n2 6 7\n", "4 interactions; read as one line a user.: no user has three items"),
    "nothing to learn": ("last", "1 5 6 7\n2 6 7 8\n", "no user has two items in the training"),
    "users take one": (
        "time",
        HEADER + "".join(f"{n // 2 if n < 8 else n}\t{n}\t3\t{n}\n" for n in range(20)),
        "nobody takes an item in the validation after another one",
    ),
    "only new users at the end": (
        "time",
        HEADER + "".join(f"{n % 3 if n < 15 else n}\t{n}\t3\t{n}\n" for n in range(25)),
        "nobody takes an item in the test after another one",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_files_that_cannot_be_a_task_are_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    split, content, message = REFUSED[case]
    path = tmp_path / "mine.txt" if content is None else written(tmp_path, content)
    shown = refusal(tmp_path, path, split, capsys)
    assert re.search(message, shown)
    assert ("give --split last" in shown) == ("give --split last" in message)


def refusal(tmp_path: Path, path: Path, split: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the line with which the command refuses a file."""
    results = tmp_path / "results.jsonl"
    with pytest.raises(SystemExit) as raised:
        command.main([str(results), "--interactions", str(path), "--split", split])
    assert raised.value.code == 2
    assert not results.exists()
    *_, line = capsys.readouterr().err.splitlines()
    assert "error: " in line
    assert str(path) in line
    return line


def read_as_command(path: Path, split: str) -> Course:
    return course_of(f"{LAST if split == 'last' else TIME}{path}", path.parent)


@pytest.mark.parametrize(("name", "pack"), [("a.xz", lzma.compress), ("a.gz", gzip.compress)])
def test_damaged_packed_files_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, pack: Callable[[bytes], bytes]
) -> None:
    whole = pack(SEQUENCES.encode() * 100)
    broken = whole[:40] + bytes([whole[40] ^ 255]) + whole[41:]
    for content in (whole[: len(whole) // 2], b"", b"1 2 3 4\n", broken):
        line = refusal(tmp_path, written(tmp_path, content, name), "last", capsys)
        assert "damaged or cut off" in line or "is empty" in line


@pytest.mark.parametrize("method", METHODS)
def test_periods_of_new_users_alone_ask_nothing(tmp_path: Path, method: str) -> None:
    """In the first period of the test there are only users without an item before."""
    rows = [f"{n if 3600 <= n < 4800 else n % 9}\t{n % 50}\t{n}" for n in range(6000)]
    path = written(tmp_path, "\n".join(["user\titem\ttime", *rows]))
    course = read_as_command(path, "time")
    assert [len(period.targets) for period in course.split.periods] == [1200, 0, 1200]
    trial = Trial(f"{TIME}{path}", method, final=True, epochs=1, start=1)
    assert run(trial, tmp_path, "cpu", time.time() + 600)["test"]["all"]["questions"] > 0


@pytest.mark.parametrize("method", METHODS)
def test_the_smallest_files_are_learned(tmp_path: Path, method: str) -> None:
    for split, text in (("last", "1 5 5 5 5\n"), ("time", "u\ti\tt\n1\t5\t1\n1\t5\t2\n1\t6\t3\n1\t7\t4\n1\t5\t5\n")):
        path = written(tmp_path, text, f"{split}.txt")
        trial = Trial(f"{LAST if split == 'last' else TIME}{path}", method, final=True, epochs=1, start=1)
        assert run(trial, tmp_path, "cpu", time.time() + 600)["test"]["all"]["questions"] > 0


def test_what_was_read_is_said_once_and_other_contents_have_no_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, results = written(tmp_path, SEQUENCES), tmp_path / "results.jsonl"
    course = read_as_command(path, "last")
    starts = bases(f"{LAST}{path}", METHODS, course.data, course.protocol)
    records: list[Record] = []
    while some := due(starts, records):
        records += results_of(some)
    for record in records:
        append(results, record)
    arguments = [str(results), "--interactions", str(path), "--split", "last", "--workers", "1", "--budget", "0"]
    command.main(arguments)
    shown = capsys.readouterr().out
    assert shown.count("7 users, 9 items, 28 interactions; read as one line a user") == 1
    assert "everything has a result" in shown
    course_of.cache_clear()  # as in a new process
    written(tmp_path, SEQUENCES.replace("2 2 3", "2 3 2"))
    command.main(arguments)
    assert "out of time" in capsys.readouterr().out
    for other in ({"data": "other"}, {"protocol": "other"}):
        changed = [{**record, "given": record["given"] | other} for record in records]
        assert due(starts, changed) == due(starts, [])


def test_the_protocol_names_what_decides_the_split(tmp_path: Path) -> None:
    assert BY_TIME == "by time, training 0.4, validation 0.2, periods of 1000"
    assert read_as_command(written(tmp_path, EVENTS), "time").protocol == BY_TIME
    assert read_as_command(written(tmp_path, EVENTS), "last").protocol == LAST_ITEM


def test_failed_trials_are_told_and_tried_again(tmp_path: Path) -> None:
    path = written(tmp_path, SEQUENCES)
    (good,) = bases(f"{LAST}{path}", ["popularity"], read_as_command(path, "last").data)
    bad = replace(good, data="other")
    results = tmp_path / "results.jsonl"
    for trial in (good, bad):
        append(results, {"given": asdict(replace(trial, final=True)), "error": "Traceback\nMemoryError: full"})
    outcome = compare(results, tmp_path, [good, bad], 1, time.time() + 200)
    records = read_records(results)[2:]
    assert {record["given"]["data"]: "test" in record for record in records} == {good.data: True, "other": False}
    assert len(records) == 2
    assert outcome.whole
    assert [record["given"]["data"] for record in outcome.failed] == ["other"]
    assert "has changed since the program was started" in line_of(outcome.failed[0])
    assert not [line for line in table.failures(read_records(results)) if good.data in line]
    assert len(table.failures(read_records(results))) == 1


def test_a_run_with_failed_trials_ends_with_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    (result,) = results_of([Trial("beauty", "plain")])
    finish(Outcome(True, []))
    assert capsys.readouterr().out == "everything has a result\n"
    failed = {"given": result["given"], "error": "Traceback\nMemoryError: full"}
    for whole in (True, False):
        with pytest.raises(SystemExit) as raised:
            finish(Outcome(whole, [failed, failed]))
        assert raised.value.code == 1
        shown = capsys.readouterr().out
        assert "2 trials failed" in shown
        assert "MemoryError: full" in shown
        assert "everything" not in shown
        assert ("out of time" in shown) == (not whole)


def test_lines_and_choices_without_a_score() -> None:
    trials = [Trial("beauty", "plain", epochs=epochs) for epochs in (1, 2, 3)]
    none, good, failed = results_of(trials)
    none["valid"]["all"]["ndcg"] = None
    failed = {"given": failed["given"], "error": "Traceback\nMemoryError"}
    assert "valid -" in line_of(none)
    assert best_of(trials, [none, good, failed]) == trials[1]
    assert best_of(trials[::2], [none, failed]) is None
    plain = bases("beauty", ["plain"])
    assert due(plain, [{"given": asdict(each), "error": "E"} for each in due(plain, [])]) == []


def test_results_of_different_settings_data_or_splits_are_not_averaged() -> None:
    def final(seed: int, **other: Any) -> Record:
        (record,) = results_of([Trial("beauty", "plain", seed=seed, final=True, **other)])
        return record

    alike = [final(1), final(2)]
    assert "plain, 2 seeds" in "\n".join(table.tables([*alike, *alike]))  # the same seed counts once
    shown = "\n".join(table.tables([*alike, final(1, epochs=50), final(2, epochs=50), final(3, epochs=50)]))
    assert "plain (1), 2 seeds" in shown
    assert "plain (2), 3 seeds" in shown
    assert "plain (2), chosen on validation from 0 trials: epochs 50" in shown
    older = final(3)
    older["given"] = {name: value for name, value in older["given"].items() if name not in ("data", "protocol")}
    another = final(3)
    another["valid"] = another["valid"] | {"all": another["valid"]["all"] | {"questions": 9}}
    for other in (final(3, data="abc"), final(3, data="abc", protocol="by time"), another):
        shown = "\n".join(table.tables([*alike, other]))
        assert shown.count("NDCG@10") == 2
        assert "3 seeds" not in shown
    assert "3 seeds" not in "\n".join(table.tables([*alike, older]))
    shown = "\n".join(table.tables([final(1, data="abc", protocol="by time"), *alike]))
    assert "beauty (data abc, by time, 1 questions in validation): NDCG@10" in shown
    assert "beauty (data and split not noted, 1 questions in validation): NDCG@10" in shown


def test_the_committed_results_have_their_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["table", str(ROOT / "results" / "recommend" / "recommend.jsonl")])
    table.main()
    shown = capsys.readouterr().out
    assert shown.count("plain, 5 seeds") == shown.count("rule, 5 seeds") == 6
    assert "rule, 5 seeds                8.86 ± 0.05     0.26 ± 0.06     0.21 ± 0.06" in shown
    assert "(1)" not in shown
    assert "data" not in shown


def test_item_neighbours_of_a_large_catalogue_need_little_memory() -> None:
    """A matrix of items by items would take 40 GB."""
    items = 100_000
    sequences = [np.array([(user * 7919 + step) % items for step in range(5)]) for user in range(300)]
    baseline = Neighbours(neighbours=3, recent=2)
    baseline.learn([Lesson(user, each, 5) for user, each in enumerate(sequences)], items)
    assert baseline.cosines._nnz() == 300 * 5 * 4
    assert baseline.recommend([np.array([7919])], 5).tolist()[0][:4] == [7920, 7921, 7922, 7923]
    assert memory_of_neighbours(sequences, items, 10_000) < 1 << 29


def test_item_neighbours_are_left_out_where_memory_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    course = read_as_command(written(tmp_path, SEQUENCES), "last")
    needed = memory_of_neighbours(course.sequences, 9, 10_000)
    assert too_large(course, 3, 6 * needed) == ""
    assert "in each of 4 processes" in too_large(course, 4, 6 * needed)
    monkeypatch.setattr(os, "sysconf", lambda name: 1000)
    task = f"{LAST}{tmp_path / 'mine.txt'}"
    assert {trial.method for trial in prepared(task, tmp_path, 2, METHODS)} == set(METHODS) - {"neighbours"}
    assert "item-kNN is left out" in capsys.readouterr().out
    assert [trial.method for trial in prepared(task, tmp_path, 2, ["popularity"])] == ["popularity"]
    assert "item-kNN" not in capsys.readouterr().out
