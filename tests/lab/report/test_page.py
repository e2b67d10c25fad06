"""The HTML page: one file, nothing fetched, nothing injected."""

import base64
import struct
import zlib
from html.parser import HTMLParser
from pathlib import Path

import pytest

from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.base.runs import Run, create_run, open_run
from hebbian_softmax.lab.cli import main
from hebbian_softmax.lab.report.page import render_page, write_page
from hebbian_softmax.lab.report.result import Figure, Result, load_result, save_result
from hebbian_softmax.lab.report.tables import Table


def part(kind: bytes, content: bytes = b"") -> bytes:
    """Return a part of a PNG file."""
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


PNG = b"\x89PNG\r\n\x1a\n" + part(b"IHDR", b"not really") + part(b"IEND")
EVIL = "<script>alert('&\"')</script>"


class Checker(HTMLParser):
    """Collects tags, texts and addresses, and insists that tags close in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.sources: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.sources += [value or "" for name, value in attributes if name in ("src", "href")]
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def check(page: str) -> Checker:
    checker = Checker()
    checker.feed(page)
    checker.close()
    assert checker.open == []
    assert all(source.startswith("data:") for source in checker.sources)
    return checker


def finished(folder: Path, text: str = "plain text", seed: int = 0) -> Run:
    run = create_run(folder, "demo", "compare demo", {"seed": seed, "name": text})
    table = Table(f"table {text}", ["a", f"b {text}"], [["row", 1.5], [text, None]])
    figure = Figure("curve.png", f"caption {text}")
    result = Result(f"title {text}", f"summary {text}", {"accuracy": 0.5}, [table], [figure], ["hebbian again"])
    save_result(run, result, {"curve.png": PNG})
    return run


def test_the_summary_comes_first_and_settings_are_those_that_were_used(tmp_path: Path) -> None:
    run = create_run(tmp_path, "demo", "compare demo", {"seed": 0, "hidden": 0})
    save_result(run, Result("title", "what was seen", {}, [Table("t", ["a"], [["b"]])], [], [], {"hidden": 98765}), {})
    text = check(render_page([run])).text
    places = [text.index(each) for each in ("title", "what was seen", "A Hebbian softmax is", "Settings", "98765")]
    assert places == sorted(places)
    assert text.count("what was seen") == 1


def test_a_result_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    run = finished(tmp_path)
    result = load_result(run)
    assert result is not None
    assert result.metrics == {"accuracy": 0.5}
    assert result.tables == [Table("table plain text", ["a", "b plain text"], [["row", 1.5], ["plain text", None]])]
    assert result.figures == [Figure("curve.png", "caption plain text")]
    assert (run.path / "curve.png").read_bytes() == PNG


@pytest.mark.parametrize(
    "change",
    [
        {"title": 7},
        {"unknown": 7},
        {"summary": None},
        {"next_steps": "text"},
        {"next_steps": [7]},
        {"metrics": []},
        {"tables": [7]},
        {"tables": [{"title": "t", "columns": [1], "rows": []}]},
        {"tables": [{"title": "t", "columns": ["a"], "rows": [[{}]]}]},
        {"figures": [{"file": "../secret.png", "caption": "c"}]},
        {"figures": [{"file": 1, "caption": "c"}]},
    ],
)
def test_a_result_that_no_page_could_show_is_named(tmp_path: Path, change: dict[str, object]) -> None:
    run = finished(tmp_path)
    content = run.result()
    assert content is not None
    run.save_result({**content, **change})
    with pytest.raises(LabError, match=r"result\.json is not a result .*: delete it and resume the run"):
        load_result(run)


def test_one_run_shows_everything(tmp_path: Path) -> None:
    run = finished(tmp_path)
    write_page([run], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert page.count('<div class="wide"><table>') == page.count("<table>") > 0  # wide tables scroll by themselves
    assert ".wide { overflow-x: auto; }" in page
    checker = check(page)
    assert checker.sources == ["data:image/png;base64," + base64.b64encode(PNG).decode()]
    for expected in ("summary plain text", "table plain text", "1.5", "caption plain text", "hebbian compare demo"):
        assert expected in checker.text
    for section in ("settings", "versions", "hardware"):
        for name in run.config[section]:
            assert name in checker.text
    assert run.config["started"] in checker.text


def test_all_text_is_escaped(tmp_path: Path) -> None:
    checker = check(render_page([finished(tmp_path, EVIL), finished(tmp_path, EVIL + "2")]))
    assert "script" not in checker.tags
    assert checker.text.count(EVIL) >= 10


def test_characters_that_no_page_may_hold_are_shown(tmp_path: Path) -> None:
    text = "\udcff\x1b[31m\x00"
    run = finished(tmp_path, text)
    run.path.rename(tmp_path / text.replace("\x00", ""))
    write_page([open_run(tmp_path / text.replace("\x00", ""))], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert all(character.isprintable() or character == "\n" for character in page)
    assert r"summary \xff\x1b[31m\x00" in check(page).text


def test_settings_that_are_on_or_off_are_yes_or_no(tmp_path: Path) -> None:
    runs = [create_run(tmp_path, "demo", "compare demo", {"tied": tied, "seed": 1000}) for tied in (True, False)]
    text = check(render_page(runs)).text
    assert "True" not in text
    assert "yes" in text
    assert "tiedno" in text
    assert "1000" in text


def test_sizes_of_a_preset_do_not_differ_in_a_run_that_is_not_finished(tmp_path: Path) -> None:
    runs = [create_run(tmp_path, "demo", "compare demo", {"seed": seed, "hidden": 0, "layers": 0}) for seed in range(3)]
    for run, hidden in zip(runs[1:], (128, 4567), strict=True):
        settled = {"hidden": hidden, "layers": 98}
        save_result(run, Result("title", "seen", {}, [Table("t", ["a"], [["b"]])], [], [], settled), {})
    page = render_page(runs)
    table = page[page.index("Settings in which the runs differ") : page.index("</table>")]
    assert "4567" in table
    assert "seed" in table
    assert "layers" not in table
    assert render_page(runs[:2]).count("Settings in which the runs differ") == 1
    assert "hidden" not in render_page(runs[:2]).split("</table>")[0]
    given = create_run(tmp_path, "demo", "compare demo", {"seed": 0, "hidden": 77123, "layers": 98})
    assert "77123" in render_page([given, *runs[1:2]]).split("</table>")[0]


def test_several_runs_start_with_what_differs(tmp_path: Path) -> None:
    checker = check(render_page([finished(tmp_path, seed=10**20 + 3), finished(tmp_path, seed=10**20 + 4)]))
    overview = checker.text[checker.text.index("Settings in which") : checker.text.index("table plain text")]
    assert "seed" in overview
    assert overview.index(str(10**20 + 3)) < overview.index(str(10**20 + 4))
    assert "name" not in overview.partition("what was seen")[0]


def test_an_unfinished_run_tells_how_far_it_is(tmp_path: Path) -> None:
    run = create_run(tmp_path, "demo", "compare demo", {})
    assert "the log ends at the start" in check(render_page([run])).text
    run.log({"step": 1200, "loss": 0.25})
    text = check(render_page([run])).text
    assert "the log ends at step 1,200" in text
    assert "0.25" in text


def test_a_damaged_figure_is_said_to_be_damaged(tmp_path: Path) -> None:
    run = finished(tmp_path)
    for position in range(len(PNG)):
        changed = bytearray(PNG)
        changed[position] ^= 1
        (run.path / "curve.png").write_bytes(changed)
        assert "curve.png is damaged" in check(render_page([run])).text


def test_a_report_says_that_a_figure_is_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = finished(tmp_path)
    (run.path / "curve.png").write_bytes(PNG[:-1])
    assert main(["report", str(run.path)]) == 0
    assert f"note: {run.path / 'curve.png'} is damaged and not on the page: put" in capsys.readouterr().err


def test_a_missing_figure_does_not_break_the_page(tmp_path: Path) -> None:
    run = finished(tmp_path)
    (run.path / "curve.png").unlink()
    assert "curve.png is missing" in check(render_page([run])).text
