"""The run folder's format, and what happens to it when things go wrong."""

import json
import signal
from pathlib import Path

import pytest
import torch

from hebbian_softmax.lab.base import environment
from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.base.json_files import to_json
from hebbian_softmax.lab.base.runs import Run, create_run, last_unfinished, open_run
from tests.lab.base.test_files import file_size_limit, names
from tests.lab.base.toy import die_in_write
from tests.lab.processes import start


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return create_run(tmp_path / "runs", "longtail", "compare longtail", {"gamma": 0.1, "steps": 10})


def assert_saved(run: Run, step: int) -> None:
    """Check that the checkpoint of the run is that of a step."""
    checkpoint = run.load_checkpoint()
    assert checkpoint is not None
    assert checkpoint["step"] == step


def test_the_config_says_how_to_repeat_the_run(run: Run) -> None:
    config = json.loads((run.path / "config.json").read_text())
    assert config["command"] == "compare longtail"
    assert config["settings"] == {"gamma": 0.1, "steps": 10}
    assert config["versions"]["torch"] == torch.__version__
    assert {"numpy", "matplotlib"} <= set(config["versions"])
    assert config["versions"].get("commit", "unknown") == environment.commit()
    assert config["hardware"]["cores"] >= 1
    assert config["started"]
    assert open_run(run.path) == run


def test_runs_of_the_same_second_get_their_own_folders(tmp_path: Path) -> None:
    assert len({create_run(tmp_path, "a", "c", {}).path for _ in range(5)}) == 5


def test_a_runs_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(LabError, match="--runs"):
        create_run(tmp_path / "runs", "a", "c", {})
    with pytest.raises(LabError, match="cannot write"):
        create_run(tmp_path / "runs" / "deeper", "a", "c", {})


def test_a_full_disk_leaves_no_empty_run(tmp_path: Path) -> None:
    with file_size_limit(10), pytest.raises(LabError):
        create_run(tmp_path, "a", "c", {})
    assert names(tmp_path) == set()


def create_and_die(folder: Path, write: int) -> int:
    """Create a run, and kill this process when the `write`-th file or folder gets its name."""
    die_in_write(write)
    create_run(folder, "a", "c", {})
    return 0


@pytest.mark.slow
@pytest.mark.parametrize("write", [1, 2])
def test_a_process_killed_in_its_first_write_leaves_nothing_for_long(
    tmp_path: Path, write: int, capsys: pytest.CaptureFixture[str]
) -> None:
    process = start(create_and_die, tmp_path, write)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    (left,) = names(tmp_path)
    assert left.startswith(".")
    with pytest.raises(LabError, match="no unfinished run"):
        last_unfinished(tmp_path, "c", {})
    run = create_run(tmp_path, "a", "c", {})
    assert names(tmp_path) == {run.path.name}
    assert capsys.readouterr().err == ""


def test_a_folder_without_a_config_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="not a run folder"):
        open_run(tmp_path)


def test_a_run_of_another_format_is_refused(run: Run) -> None:
    (run.path / "config.json").write_text(to_json({**run.config, "format": 99}))
    with pytest.raises(LabError, match="run format 99"):
        open_run(run.path)


@pytest.mark.parametrize("content", ["{", "[]", "null", '"text"', "[" * 100_000])
def test_a_config_or_result_that_is_no_object_is_named(run: Run, content: str) -> None:
    (run.path / "result.json").write_text(content)
    with pytest.raises(LabError, match=r"result\.json cannot be read .*: delete it and resume the run"):
        run.result()
    (run.path / "config.json").write_text(content)
    with pytest.raises(LabError, match=r"config\.json cannot be read .*: put it back as it was, or start a new run"):
        open_run(run.path)


@pytest.mark.parametrize("name", ["command", "settings", "versions", "hardware", "started"])
@pytest.mark.parametrize("value", [None, 7, [], "nonsense"])
def test_a_config_without_what_a_run_needs_is_named(run: Run, name: str, value: object) -> None:
    if (name, value) == ("command", "nonsense"):
        return
    (run.path / "config.json").write_text(to_json({**run.config, name: value}))
    with pytest.raises(LabError, match=r"config\.json is not the config of a run"):
        open_run(run.path)


def test_a_name_too_long_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(LabError, match=r"cannot be read .*too long"):
        open_run(tmp_path / ("x" * 300))


LINES = ['{"st', "[]", "7", '{"loss": 1}', '{"step": "2"}', '{"step": null}', '{"step": 2, "loss": []}', "[" * 100_000]


@pytest.mark.parametrize("line", [*LINES, '{"step": 2, "loss": 0.5, "checksum": "0123456789abcdef"}'])
def test_a_line_of_the_log_that_is_no_record_is_named(run: Run, line: str) -> None:
    (run.path / "log.jsonl").write_text(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n')
    with pytest.raises(LabError, match="line 2"):
        run.records()


def test_the_log_gives_back_its_records(run: Run) -> None:
    assert run.records() == []
    run.log({"step": 1, "loss": 0.5})
    run.log({"step": 2, "loss": float("nan"), "name": "γ"})
    assert run.records() == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": None, "name": "γ"}]
    for line in (run.path / "log.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)  # NaN is not JSON


@pytest.mark.parametrize("torn", [b'{"step": 3, "lo', b'{"step": 3}', b"\n\x00\x00"])
def test_a_torn_last_line_is_left_out_and_cut(run: Run, torn: bytes) -> None:
    run.log({"step": 1})
    run.log({"step": 2})
    with open(run.path / "log.jsonl", "ab") as file:
        file.write(torn.lstrip(b"\n"))
    assert [record["step"] for record in run.records()] == [1, 2]
    run.cut_log(2)
    run.log({"step": 3})
    assert [record["step"] for record in run.records()] == [1, 2, 3]


def test_a_finished_run_has_no_torn_line(run: Run) -> None:
    """A line that was whole when the run was finished is damaged if it is not whole any more."""
    for step in (1, 2):
        run.log({"step": step, "loss": 0.125})
    whole = (run.path / "log.jsonl").read_bytes()
    run.save_result({})
    refused = 0
    for position in range(len(whole) // 2, len(whole)):
        changed = bytearray(whole)
        changed[position] ^= 4
        (run.path / "log.jsonl").write_bytes(changed)
        try:
            last = run.records()[1]
        except LabError:
            refused += 1
        else:  # the name of the checksum has changed, so it is a value like any other
            assert (last["step"], last["loss"]) == (2, 0.125)
    assert refused >= len(whole) // 2 - len("checksum")


def test_cutting_drops_the_records_after_the_step(run: Run) -> None:
    for step in range(1, 6):
        run.log({"step": step})
    run.cut_log(3)
    assert [record["step"] for record in run.records()] == [1, 2, 3]
    run.cut_log(0)
    assert (run.path / "log.jsonl").read_bytes() == b""


def test_a_full_disk_leaves_a_whole_log(run: Run) -> None:
    run.log({"step": 1})
    whole = (run.path / "log.jsonl").read_bytes()
    with file_size_limit(len(whole) + 5), pytest.raises(LabError, match=r"log\.jsonl"):
        run.log({"step": 2})
    assert (run.path / "log.jsonl").read_bytes() == whole


def test_a_full_disk_keeps_the_previous_checkpoint(run: Run) -> None:
    assert run.load_checkpoint() is None
    run.save_checkpoint({"step": 1, "weight": torch.ones(3)})
    with file_size_limit(5000), pytest.raises(LabError, match=r"checkpoint\.pt"):
        run.save_checkpoint({"step": 2, "weight": torch.ones(100_000)})
    assert_saved(run, 1)
    assert names(run.path) == {"config.json", "checkpoint.pt"}


@pytest.mark.parametrize("damage", [b"", b"nonsense", b"PK\x03\x04 nonsense", 20_000])
def test_a_damaged_or_truncated_checkpoint_is_named(run: Run, damage: bytes | int) -> None:
    run.save_checkpoint({"weight": torch.ones(10_000)})
    path = run.path / "checkpoint.pt"
    path.write_bytes(path.read_bytes()[:damage] if isinstance(damage, int) else damage)
    with pytest.raises(LabError, match=r"checkpoint\.pt cannot be read") as caught:
        run.load_checkpoint()
    assert "\n" not in str(caught.value)


def test_a_checkpoint_that_would_run_code_is_refused(run: Run, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.touch, (tmp_path / "touched",)

    run.save_checkpoint({"evil": Evil()})
    with pytest.raises(LabError, match="cannot be read"):
        run.load_checkpoint()
    assert not (tmp_path / "touched").exists()


def test_the_result_marks_the_run_as_finished(run: Run) -> None:
    runs = run.path.parent
    assert run.result() is None
    assert last_unfinished(runs, "compare longtail", {}) == run
    run.save_result({"accuracy": 0.5})
    assert run.result() == {"accuracy": 0.5}
    with pytest.raises(LabError, match="no unfinished run"):
        last_unfinished(runs, "compare longtail", {})


def test_a_last_line_is_dropped_only_if_it_is_a_beginning(tmp_path: Path) -> None:
    run = create_run(tmp_path, "a", "compare a", {})
    for step in (1, 2):
        run.log({"step": step, "loss": 0.5})
    path = run.path / "log.jsonl"
    content = path.read_bytes()
    for end in range(content.index(b"\n") + 1, len(content)):
        path.write_bytes(content[:end])
        assert [record["step"] for record in run.records()] == [1]
    path.write_bytes(content[:-1] + b"y")  # the end of the line, with some bits flipped
    with pytest.raises(LabError, match=r"log\.jsonl, line 2 is damaged"):
        run.records()


@pytest.mark.parametrize(
    "dates",
    [
        ["2026-03-01T10:00:00+02:00", "2026-03-01T09:00:00+00:00", "2026-02-01T00:00:00+00:00"],
        ["2026-03-01T10:00:00+02:00"] * 3,  # of one second: then the last name is the newest
    ],
)
def test_the_newest_unfinished_run_of_the_command_is_found(tmp_path: Path, dates: list[str]) -> None:
    made = [create_run(tmp_path, name, "compare a", {}) for name in "bca"]
    for run, date in zip(made, dates, strict=True):
        (run.path / "config.json").write_text(to_json({**run.config, "started": date}))
    create_run(tmp_path, "other", "compare b", {})
    assert last_unfinished(tmp_path, "compare a", {}).path == made[1].path
    with pytest.raises(LabError, match="no unfinished run"):
        last_unfinished(tmp_path / "missing", "compare a", {})


def test_what_cannot_be_resumed_does_not_hide_what_can(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, held = (create_run(tmp_path, name, "compare a", {}) for name in ("good", "held"))
    for number, content in enumerate(("[]", "{", "{}", to_json({**good.config, "started": "x"}))):
        (tmp_path / f"zz{number}").mkdir()
        (tmp_path / f"zz{number}" / "config.json").write_text(content)
    with held.held():
        assert last_unfinished(tmp_path, "compare a", {}).path == good.path
    notes = capsys.readouterr().err.splitlines()
    assert len(notes) == 5
    assert all(note.startswith("note: skipped: ") for note in notes)


def test_two_processes_cannot_hold_one_run(run: Run) -> None:
    with run.held(), pytest.raises(LabError, match="in use"), run.held():
        pass
    with run.held():
        pass
