"""`hebbian train`, `compare` and `evaluate` on a corpus, as a user meets them; stopped, killed, and on a time limit."""

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.base.json_files import read_json
from hebbian_softmax.lab.base.runs import Run, create_run, open_run
from hebbian_softmax.lab.language.experiments.train import (
    BOARD_FOLDER,
    STEPS_FILE,
    Speed,
    affordable_steps,
    board,
    keep_steps,
    measure_speed,
    overfitted,
    settle_steps,
    suggest,
)
from hebbian_softmax.lab.language.model import MODELS, LanguageModel
from hebbian_softmax.lab.language.model.lstm import WordLSTM
from hebbian_softmax.lab.language.names import HEBBIAN, ONLY, PLAIN
from hebbian_softmax.lab.language.settings import Settings, TrainSettings
from hebbian_softmax.lab.language.source import prepared_corpus
from hebbian_softmax.lab.language.task import WordTask
from tests import ROOT
from tests.lab.editing import edited
from tests.lab.language.commands import FEW, MANY, SIZES, call, only
from tests.lab.language.experiments.conftest import Refusal, checkpoint_of, result_of, stop_at
from tests.lab.language.model.networks import out_of_memory, watch_lstm
from tests.lab.language.toy import corpus, device, folder, prepared, settings

__all__ = ["folder"]


@pytest.fixture(scope="module")
def trained(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    runs = tmp_path_factory.mktemp("runs")
    assert call("train", folder, *FEW, "--quiet", "--runs", runs) == 0
    return only(runs)


@pytest.fixture
def copied(trained: Run, tmp_path: Path) -> Run:
    """A copy of the run, for a test that damages it."""
    return open_run(Path(shutil.copytree(trained.path, tmp_path / "copied")))


def test_training_leaves_everything_in_its_run_folder(trained: Run) -> None:
    assert re.fullmatch(r"toy-\d{8}-\d{6}", trained.path.name)  # The corpus is in the folder `toy`.
    kept = {"valid-words.npz", "test-words.npz", "perplexity.png", "plan.json", "page.html"}
    assert {path.name for path in trained.path.iterdir()} == kept | {
        "config.json", "log.jsonl", "checkpoint.pt", "result.json",
    }  # fmt: skip
    records = trained.records()
    assert [record["step"] for record in records] == [4, 8, 12]
    assert [record["words"] for record in records] == [80, 160, 240]
    assert all(record["words_per_second"] > 0 and record["valid_perplexity"] > 1 for record in records)
    result = result_of(trained)
    scores = result["metrics"]["scores"]["model"]
    for split in ("valid", "test"):
        with np.load(trained.path / f"{split}-words.npz") as words:
            assert scores[split]["words"] == len(words["nll"]) == len(words["ids"])
            assert scores[split]["perplexity"] == pytest.approx(np.exp(words["nll"].astype("f8").mean()))
            assert str(words["corpus"]) == result["metrics"]["corpus"]["fingerprint"]


def test_evaluating_gives_the_numbers_of_the_training(trained: Run, capsys: pytest.CaptureFixture[str]) -> None:
    result = result_of(trained)
    assert call("evaluate", trained.path, "--json", "--quiet") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["scores"] == result["metrics"]["scores"]
    assert found["step"] == 12
    assert json.loads((trained.path / "evaluation.json").read_bytes())["scores"] == found["scores"]
    assert call("evaluate", trained.path, "--split", "test", "--streams", "5", "--quiet") == 0
    output = capsys.readouterr().out
    assert "Perplexity on the test text of toy" in output
    assert "validation" not in output
    near = json.loads((trained.path / "evaluation.json").read_bytes())["scores"]["model"]["test"]["perplexity"]
    exact = result["metrics"]["scores"]["model"]["test"]["perplexity"]
    assert near != exact
    assert near == pytest.approx(exact, rel=0.1)


def test_the_page_shows_how_to_get_at_activations(trained: Run) -> None:
    page = ROOT / "docs" / "language-models.md"
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    namespace: dict[str, Any] = {}
    exec(compile(code, str(page), "exec"), namespace)
    found = list(namespace["activations_of"](trained.path))
    with np.load(trained.path / "valid-words.npz") as words:
        assert torch.cat([targets for _, targets in found]).tolist() == words["ids"].tolist()
    assert {h.shape[1] for h, _ in found} == {6}


def test_a_comparison_has_both_beside_each_other(
    folder: Path, trained: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("compare", folder, *FEW, "--runs", tmp_path) == 0
    captured = capsys.readouterr()
    assert "plain softmax" in captured.out
    assert "Hebbian softmax" in captured.out
    assert "100 %, perplexity " in captured.err
    run = only(tmp_path)
    scores, alone = (result_of(each)["metrics"]["scores"] for each in (run, trained))
    # The Hebbian half of a comparison is the same training as a run of its own.
    assert scores["hebbian"] == alone["model"]
    assert scores["plain"] != scores["hebbian"]
    assert (run.path / "plain-valid-words.npz").exists()
    assert call("evaluate", run.path, "--split", "valid", "--json", "--quiet") == 0
    again = json.loads(capsys.readouterr().out)["scores"]
    assert again["plain"]["valid"] == scores["plain"]["valid"]


def test_suggestions_change_what_is_trained() -> None:
    usual = suggest("stdlib", Settings())
    assert "--rule-scale 1 --write literal --start 0 --no-fade" in usual[1]
    assert "--start 0 --no-fade" in usual[-1]
    assert "once features have settled" in suggest("stdlib", Settings(start=0, fade=False))[-1]
    literal = Settings(rate="paper", rule_scale="1", write="literal", start=0, fade=False)
    assert not any(each.endswith("the paper's literal rule") for each in suggest("stdlib", literal))
    assert not any("--rate" in each or "--start" in each for each in suggest("stdlib", TrainSettings(head="plain")))


def test_a_training_too_short_for_the_rule_says_so_before_and_after(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    waits = [word for word in FEW if word != "--start"]
    waits.remove("0")
    assert call("compare", folder, *waits, "--final", "valid", "--runs", tmp_path) == 0
    said, shown = capsys.readouterr().err, only(tmp_path).result()
    assert "note: 12 steps are planned, and the rule waits until features have settled" in said
    assert "has not written anything" in shown["summary"]
    assert "--steps 900" in shown["next_steps"][0]
    assert "# longer, so that the rule may write" in shown["next_steps"][0]
    assert not any("--start 0" in each for each in shown["next_steps"])
    longer, *_ = suggest("stdlib", Settings(steps=600), longer=3.0)
    assert "--steps 1800" in longer  # never a shorter one


def test_a_stopped_run_of_an_own_corpus_is_gone_on_with_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], refusal: Refusal
) -> None:
    monkeypatch.setenv("HEBBIAN_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "other"):
        prepared(tmp_path / "corpora" / name)
        assert call("train", name, *FEW, "--final", "none", "--quiet") == 0
        (only_run,) = (tmp_path / "runs").glob(f"{name}-*")
        (only_run / "result.json").unlink()
        capsys.readouterr()
        assert call("report", only_run) == 0
        assert f"hebbian train {name} --resume" in capsys.readouterr().out
    mine, other = sorted((tmp_path / "runs").glob("[!.]*"))
    error = refusal("train", "mine", "--resume", other)
    assert f"{other} is a run of 'hebbian train other', not of 'hebbian train mine'" in error
    assert call("train", "mine", "--quiet", "--resume") == 0  # not the newer one
    assert (mine / "result.json").exists()
    assert not (other / "result.json").exists()
    assert "no unfinished run of 'hebbian train mine'" in refusal("train", "mine", "--resume")


def test_a_prepared_corpus_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: Refusal) -> None:
    monkeypatch.setenv("HEBBIAN_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").symlink_to(tmp_path)  # this folder holds no corpus and must not matter
    prepared(tmp_path / "corpora" / "mine")
    options = ["--steps", "11", "--final", "none", "--quiet", "--runs", tmp_path / "runs"]
    assert call("train", "mine", *FEW, *options) == 0
    run = only(tmp_path / "runs")
    assert [record["step"] for record in run.records()] == [4, 8, 11]  # as many evaluations as --evaluations asks for
    assert (run.command, run.settings["corpus"]) == ("train corpus", "mine")
    commands = run.result()["next_steps"]
    assert commands
    assert all(command.startswith("hebbian train mine --") for command in commands)
    assert run.path.name.startswith("mine-")
    refused = refusal("train", "yours", *FEW)
    assert "invalid choice: 'yours'" in refused
    assert "wikitext-2" in refused
    assert "your own corpora: mine;" in refused
    error = refusal("reproduce", "objectives", "--corpus", "yours", "--runs", tmp_path / "runs")
    assert re.search("'yours' is no corpus: name one of wikitext-2, .*stdlib, mine, or the folder", error)


def test_a_folder_of_texts_does_not_hide_the_corpus_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEBBIAN_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    assert prepared_corpus("mine") == str(tmp_path / "mine")  # opening it will say what is missing
    prepared(tmp_path / "corpora" / "mine")
    assert prepared_corpus("mine") == "mine"
    prepared(tmp_path / "new" / "mine")
    monkeypatch.chdir(tmp_path / "new")
    assert prepared_corpus("mine") == str(tmp_path / "new" / "mine")


@pytest.mark.slow
def test_made_up_words_with_a_time_limit(tmp_path: Path) -> None:
    options = f"{SIZES} --vocabulary 30 --tokens 500 --max-seconds 5 --evaluations 2 --final none --head plain"
    began = time.monotonic()
    assert call("train", "zipf", *options.split(), "--quiet", "--runs", tmp_path) == 0
    assert time.monotonic() - began < 60  # a limit that is not kept would let it train for ever
    run = only(tmp_path)
    plan = json.loads((run.path / STEPS_FILE).read_bytes())
    assert run.records()[-1]["step"] == plan["steps"] > 10
    assert not list(run.path.glob("*.npz"))
    result, last = result_of(run), run.records()[-1]
    assert result["metrics"]["last_record"] == last
    assert f"in the last record of the log: {last['valid_perplexity']:.2f}." in result["summary"]
    assert [step.rpartition("  # ")[2] for step in result["next_steps"]] == [
        "other first weights, another order",
        "the same with a Hebbian softmax",
    ]
    assert len(run.records()) == 2


def test_a_changed_corpus_is_refused_and_the_checkpoint_stays(tmp_path: Path, refusal: Refusal) -> None:
    other = tmp_path / "toy"
    prepared(other)
    assert call("train", other, *FEW, "--final", "none", "--quiet", "--runs", tmp_path / "runs") == 0
    run = only(tmp_path / "runs")
    (run.path / "result.json").unlink()
    before = (run.path / "checkpoint.pt").read_bytes()
    prepared(other, test=torch.zeros(50, dtype=torch.int32))
    for command in (["train", "corpus", "--resume", run.path], ["evaluate", run.path]):
        error = refusal(*command, "--quiet")
        assert re.search(f"{run.path} cannot .*: the checkpoint is of a model of other words", error)
    assert (run.path / "checkpoint.pt").read_bytes() == before


def test_a_corpus_whose_name_is_not_utf8(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    prepared(folder)
    assert call("train", folder, *FEW, "--final", "valid", "--quiet", "--runs", tmp_path / "runs") == 0
    run = only(tmp_path / "runs")
    assert run.settings["corpus"] == str(folder)
    (run.path / "result.json").unlink()
    assert call("train", "corpus", "--resume", run.path) == 0
    assert r"caf\xe9-" in capsys.readouterr().err
    assert call("evaluate", run.path, "--quiet", "--json") == 0
    assert call("report", run.path, "--json") == 0


def test_a_checkpoint_of_other_settings_is_refused(copied: Run, refusal: Refusal) -> None:
    with edited(copied.path / "config.json") as config:
        config["settings"]["hidden"] = 9
    (copied.path / "result.json").unlink()
    assert "does not fit" in refusal("train", "corpus", "--resume", copied.path, "--quiet")
    error = refusal("evaluate", copied.path, "--quiet")
    assert re.search("is not of the settings in its config.json .*: restore the config.json", error)


def test_a_loss_that_is_not_a_number_keeps_the_checkpoint(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: Refusal
) -> None:
    class Breaking(WordLSTM):
        def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            steps_taken.append(1)
            return super().forward(inputs, targets) * (float("nan") if len(steps_taken) == 6 else 1.0)

    steps_taken: list[int] = []
    monkeypatch.setitem(MODELS, "lstm", Breaking)
    error = refusal("train", folder, *FEW, "--checkpoint-seconds", "0", "--quiet", "--runs", tmp_path)
    assert "loss became nan at or before step 6: start a new run with a lower learning rate" in error
    assert "the checkpoint of step 5 is kept" in error
    checkpoint = checkpoint_of(only(tmp_path))
    assert checkpoint["step"] == checkpoint["task"]["step"] == 5


@pytest.mark.parametrize("memories", [[], ["--cache"]])
def test_a_perplexity_that_is_not_finite_is_an_error(copied: Run, refusal: Refusal, memories: list[str]) -> None:
    checkpoint = checkpoint_of(copied)
    for weight in checkpoint["task"]["learners"][""]["model"].values():
        if weight.is_floating_point():
            weight.mul_(1e4)
    copied.save_checkpoint(checkpoint)
    before = {path.name: path.read_bytes() for path in copied.path.iterdir()}
    error = refusal("evaluate", copied.path, "--quiet", *memories)
    assert re.search(r"perplexity of .* on the validation text is not finite .*lower learning rate", error)
    assert {path.name: path.read_bytes() for path in copied.path.iterdir()} == before


def test_evaluate_on_a_device_too_small(trained: Run, monkeypatch: pytest.MonkeyPatch, refusal: Refusal) -> None:
    watch_lstm(monkeypatch, out_of_memory)
    message = "too small for reading a text: hebbian evaluate takes less with fewer --streams or --device cpu"
    assert message in refusal("evaluate", trained.path, "--quiet")


def test_evaluate_wants_a_language_model_with_a_checkpoint(copied: Run, refusal: Refusal) -> None:
    (copied.path / "checkpoint.pt").unlink()
    # Resuming this run would not give it any.
    assert "is finished and has no weights" in refusal("evaluate", copied.path)
    (copied.path / "result.json").unlink()
    assert "has no checkpoint yet: resume it" in refusal("evaluate", copied.path)
    with edited(copied.path / "config.json") as config:
        config["command"] = "compare longtail"
    assert "which has no language model" in refusal("evaluate", copied.path)


def state(run: Run) -> dict[str, Any]:
    checkpoint = checkpoint_of(run)
    assert checkpoint.pop("seconds") > 0
    # Every process begins with other states of Python's and NumPy's generators, which training does not use.
    return {**checkpoint, "random": checkpoint["random"]["torch"]}


def assert_same(one: Any, other: Any) -> None:
    if isinstance(one, dict):
        assert list(one) == list(other)
        one, other = list(one.values()), list(other.values())
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, list | tuple):
        for first, second in zip(one, other, strict=True):
            assert_same(first, second)
    else:
        assert one == other


@pytest.fixture(scope="module")
def whole(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    runs = tmp_path_factory.mktemp("whole")
    assert call("compare", folder, *MANY, "--quiet", "--runs", runs) == 0
    return only(runs)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_stopped_run_ends_in_the_same_bits(folder: Path, whole: Run, tmp_path: Path, how: signal.Signals) -> None:
    run, code, errors = stop_at("checkpoint.pt", how, tmp_path, "compare", folder, *MANY)
    assert code == (-9 if how == signal.SIGKILL else 128 + how)
    assert how == signal.SIGKILL or "all saved; go on with" in errors
    assert 0 < checkpoint_of(run)["step"] < 30
    assert call("compare", "corpus", "--resume", run.path, "--quiet") == 0
    assert_same(state(run), state(whole))
    assert result_of(run)["metrics"]["scores"] == result_of(whole)["metrics"]["scores"]
    timed = ("seconds", "words_per_second")
    logs = [[{k: v for k, v in r.items() if k not in timed} for r in each.records()] for each in (run, whole)]
    assert logs[0] == logs[1]


@pytest.mark.slow  # tests/distributed has the same without the start of three processes
def test_torchrun_trains_with_two_processes(folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    own = [each for i, each in enumerate(FEW) if "--start" not in FEW[max(i - 1, 0) : i + 1]]  # torchrun would read it
    command += ["-m", "hebbian_softmax.lab.cli", "train", str(folder), *own, "--quiet", "--runs", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    assert result_of(only(tmp_path))["metrics"]["processes"] == 2
    assert [record["step"] for record in only(tmp_path).records()] == [4, 8, 12]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return create_run(tmp_path, "toy", "toy", {})


def settle(run: Run, **changes: Any) -> tuple[int, int]:
    """Return the number of steps, and the number of tasks that were made to measure the speed."""
    given = settings(Settings, **changes)
    made: list[WordTask] = []

    def make(steps: int) -> WordTask:
        made.append(WordTask(corpus(), given, {ONLY: True}, steps=steps, device=device()))
        return made[-1]

    steps = settle_steps(run, corpus(), given, make, time.monotonic())
    keep_steps(run, steps)
    return steps, len(made)


def test_steps_or_epochs(tmp_path: Path) -> None:
    for changes, expected in (({"steps": 7}, 7), ({"epochs": 2.0}, 78), ({"epochs": 0.0}, 1)):
        run = create_run(tmp_path, "toy", "toy", {})
        assert settle(run, **changes) == (expected, 0)
        assert read_json(run.path / STEPS_FILE, "") == {"steps": expected}


def test_a_measured_number_is_kept(run: Run) -> None:
    steps, measured = settle(run, max_seconds=15.0, evaluations=1)
    assert (steps > 1, measured) == (True, 1)
    assert read_json(run.path / STEPS_FILE, "") == {"steps": steps}
    assert settle(run, max_seconds=15.0, evaluations=1) == (steps, 0)


def test_what_a_device_takes_to_get_warm_is_not_counted_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way to read a text takes 50 s at first, then 2 s; the first four steps 10 s each, then 1 s."""
    now, warm, steps = 0.0, set(), 0

    def take_time(model: LanguageModel, words: torch.Tensor) -> None:
        nonlocal now, steps
        if model.training:
            now, steps = now + (1.0 if steps >= 4 else 10.0), steps + 1
        else:
            now += 2.0 if words.shape[1] in warm else 50.0
            warm.add(words.shape[1])

    watch_lstm(monkeypatch, take_time)
    monkeypatch.setattr("time.monotonic", lambda: now)
    given = settings(Settings, max_seconds=1000.0)
    task = WordTask(corpus(), given, {ONLY: True}, steps=1, device=device())
    predictions = sum(len(task.corpus.splits[split]) - 1 for split in ("valid", "test"))
    speed = measure_speed(task, given, 0.0, sample=10)
    assert speed == Speed(step=1.0, evaluation=2.0, final=pytest.approx(2.0 / 10 * predictions), spent=now)
    assert now == 40 + 5 + 100 + 2 + 2 * 2


def test_the_time_is_shared_out() -> None:
    speed = Speed(step=0.1, evaluation=2.0, final=7.0, spent=10.0)
    given = settings(Settings, max_seconds=100.0, evaluations=5)
    assert affordable_steps(given, speed) == 700  # 97 s less 10, 7 and 10


def test_too_little_time_is_one_clear_line(run: Run) -> None:
    with pytest.raises(LabError, match=r"--max-seconds 0.01 is too short: .* fewer --evaluations"):
        settle(run, max_seconds=0.01)
    assert not (run.path / STEPS_FILE).exists()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"steps": 0, "measured": null}', '{"steps": "7"}'])
def test_a_damaged_plan_is_one_clear_line(run: Run, text: str) -> None:
    (run.path / STEPS_FILE).write_text(text)
    with pytest.raises(LabError, match=r"plan\.json (is damaged|cannot be read) .*start a new run"):
        settle(run)


def test_a_plan_of_an_older_version_is_kept(run: Run) -> None:
    speed = {"step": 0.1, "evaluation": 2.0, "final": 7.0, "spent": 10.0}
    (run.path / STEPS_FILE).write_text(json.dumps({"steps": 7, "measured": speed}))
    assert settle(run, max_seconds=15.0) == (7, 0)


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="TensorBoard is not installed")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of its protocol buffers
def test_tensorboard_has_the_log(run: Run) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for session in ({5: 2.0, 10: 1.0}, {10: 1.25, 15: 0.5}):  # the second resumes from step 5
        with board(run, "auto") as logged:
            assert logged is not None
            for step, loss in session.items():
                logged({"step": step, "loss": loss})
    events = EventAccumulator(str(run.path / BOARD_FOLDER))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(5, 2.0), (10, 1.25), (15, 0.5)]


def test_without_tensorboard(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with board(run, "no") as logged:
        assert logged is None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with board(run, "auto") as logged:
        assert logged is None
    with pytest.raises(LabError, match="needs TensorBoard: pip install"), board(run, "yes"):
        pass
    assert not (run.path / BOARD_FOLDER).exists()


def test_a_perplexity_that_rises_again_is_said_and_one_that_hardly_does_is_not() -> None:
    records = [{"step": 10 * k, "plain_valid_perplexity": value} for k, value in enumerate((30.0, 20.0, 20.3))]
    assert overfitted(PLAIN, records) == overfitted(HEBBIAN, records) == overfitted(PLAIN, []) == ""
    records.append({"step": 30, "plain_valid_perplexity": 20.5})
    assert overfitted(PLAIN, records).startswith(
        "The validation perplexity of plain softmax was lowest after 10 steps, 20.00, and has risen since"
    )
