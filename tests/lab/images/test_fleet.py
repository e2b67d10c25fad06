"""Many trials: they give the same together as alone, are stored when done, and never run twice."""

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hebbian_softmax.lab.base.errors import LabError, OutOfTimeError
from hebbian_softmax.lab.images.curriculum import History
from hebbian_softmax.lab.images.fleet import Graphed, Runner, Store, Trial, next_trials, run_trials, start
from hebbian_softmax.lab.images.learner import Learner, Method
from tests.lab.base.test_files import names
from tests.lab.editing import edited
from tests.lab.images.toys import toy_set

DATA = toy_set(40)
PLAIN, HEBBIAN = Method(hebbian=False, learning_rate=3e-3), Method(hebbian=True, learning_rate=3e-3)


def carry_out(trials: list[Trial], folder: Path, **options: Any) -> dict[Trial, History]:
    options = {"device": "cpu", "together": 2, "filters": 2, **options}
    return run_trials(trials, Store(folder), DATA, quiet=True, **options)


def test_together_as_alone_and_never_twice(tmp_path: Path) -> None:
    trials = [Trial("a", PLAIN, 0, 25), Trial("b", HEBBIAN, 0, 50), Trial("b", HEBBIAN, 1, 25)]
    together = carry_out(trials, tmp_path / "together")
    alone = {trial: carry_out([trial], tmp_path / "alone", together=1)[trial] for trial in trials}
    assert together == alone
    assert [len(together[trial].classes) for trial in trials] == [1, 2, 1]
    assert {path.name for path in (tmp_path / "alone").iterdir()} == {"a-seed0.json", "b-seed0.json", "b-seed1.json"}
    record = json.loads((tmp_path / "alone" / "b-seed0.json").read_bytes())
    assert record["method"]["hebbian"]
    assert record["classes"] == [30, 30]
    assert record["device"] == "cpu"

    again = carry_out(trials, tmp_path / "together", device="no such device")  # nothing asks for it
    assert [each.classes for each in again.values()] == [together[trial].classes for trial in again]


def test_a_trial_stops_at_its_classes(tmp_path: Path) -> None:
    trial = Trial("stops", Method(hebbian=True, learning_rate=0.01), 0, 500, stop_at=35)
    data = toy_set(40, noise=0.0)
    history = run_trials([trial], Store(tmp_path), data, device="cpu", together=1, filters=16, quiet=True)[trial]
    assert history.classes[-1] == 35
    assert set(history.classes[:-1]) <= {30}
    assert len(history.classes) < 500 // 25


def test_out_of_time(tmp_path: Path) -> None:
    with pytest.raises(OutOfTimeError):
        carry_out([Trial("a", PLAIN, 0, 25)], tmp_path, deadline=time.monotonic() - 1)


def test_what_a_killed_process_left_is_no_trial(tmp_path: Path) -> None:
    trial = Trial("a", PLAIN, 0, 25)
    Store(tmp_path).save(trial, History(30, [0.5], [30]), 1.0, "cpu")
    shutil.copy(tmp_path / "a-seed0.json", tmp_path / ".writing-123-b-seed0.json")
    (tmp_path / ".writing-123-a-seed0.json").write_bytes(b'{"name": "a", "see')
    store = Store(tmp_path)
    assert [record["name"] for record in store.records()] == ["a"]
    assert names(tmp_path) == {"a-seed0.json"}


@pytest.mark.parametrize(("center", "write"), [(True, "centred"), (False, "literal")])
def test_trials_of_older_versions_are_kept(tmp_path: Path, center: bool, write: str) -> None:
    store, history = Store(tmp_path), History(30, [0.5], [30])
    trial = Trial("a", replace(HEBBIAN, write=write, start=0, fade=False), 0, 25)
    store.save(trial, history, 1.0, "cpu")
    as_version_0_1(tmp_path / "a-seed0.json", center=center)
    assert store.load(trial) == history
    changes: list[dict[str, Any]] = [{"fade": True}, {"write": "across"}, {"start": "auto"}, {"gamma": 0.1}]
    for change in changes:
        with pytest.raises(LabError, match="other settings"):
            store.load(replace(trial, method=replace(trial.method, **change)))


def as_version_0_1(path: Path, **method: object) -> None:
    """Change the settings of a stored trial to those that version 0.1 stored."""
    with edited(path) as record:
        for name in ("write", "start", "fade", "seen_only", "checks_seen_only"):
            del record["method"][name]
        record["method"].update(method)


def test_settings_of_the_rule_do_not_tell_trials_of_plain_softmax_apart(tmp_path: Path) -> None:
    store, history = Store(tmp_path), History(30, [0.5], [30])
    plain, more = Trial("a", PLAIN, 0, 25), Trial("b", replace(PLAIN, extra_steps=3), 0, 25)
    for trial in (plain, more):
        store.save(trial, history, 1.0, "cpu")
        as_version_0_1(tmp_path / f"{trial.key}.json", center=True, gamma=0.1, limit=50)
    assert store.load(plain) == history
    assert store.load(replace(more, method=replace(more.method, limit=50))) == history
    with pytest.raises(LabError, match="other settings"):  # T says which classes get extra steps
        store.load(more)
    with pytest.raises(LabError, match="other settings"):
        store.load(replace(plain, method=replace(PLAIN, learning_rate=1.0)))


def test_a_stored_trial_that_does_not_fit_is_named(tmp_path: Path) -> None:
    store, history = Store(tmp_path / "trials"), History(30, [0.5], [30])
    store.save(Trial("a", PLAIN, 0, 25), history, 1.0, "cpu")
    assert store.load(Trial("a", PLAIN, 0, 25)) == history
    assert store.load(Trial("a", PLAIN, 1, 25)) is None
    with pytest.raises(LabError, match=r"other settings.*delete it"):
        store.load(Trial("a", PLAIN, 0, 50))
    with pytest.raises(LabError, match="cannot write"):
        Store(tmp_path / "trials" / "a-seed0.json")
    (tmp_path / "trials" / "a-seed0.json").write_bytes(b"{")
    with pytest.raises(LabError, match=r"cannot be read .*delete it"):
        store.load(Trial("a", PLAIN, 0, 25))


@pytest.mark.parametrize("change", [{"classes": 7}, {"classes": ["x"]}, {"classes": []}, {"start": None}])
def test_a_stored_trial_of_the_wrong_kind_is_named(tmp_path: Path, change: dict[str, object]) -> None:
    store, trial = Store(tmp_path / "trials"), Trial("a", PLAIN, 0, 25)
    store.save(trial, History(30, [0.5], [30]), 1.0, "cpu")
    with edited(tmp_path / "trials" / "a-seed0.json") as record:
        record.update(change)
    with pytest.raises(LabError, match=r"cannot be used .*delete it"):
        store.load(trial)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "method",
    [
        PLAIN,
        HEBBIAN,
        replace(HEBBIAN, start=4),
        replace(HEBBIAN, write="centred", start=0, fade=False),
        Method(hebbian=True, active_only=True, train_rows=False, start=0),
        Method(hebbian=True, learning_rate=3e-3, seen_only=True, start=0),
        Method(hebbian=False, learning_rate=3e-3, seen_only=True, checks_seen_only=True),
    ],
)
def test_a_graph_trains_as_the_plain_loop_does(method: Method) -> None:
    torch.backends.cudnn.deterministic = True
    # With this threshold every check adds a level, whatever the rounding.
    learners = [Learner(DATA, method, 0, device="cuda", filters=16, threshold=-1) for _ in range(2)]
    runners = [Runner(learners[0]), Graphed(learners[1])]
    outcomes = []
    for runner in runners:
        for _ in range(3):
            runner.steps(5)
            runner.check()
        outcomes.append([runner.read() for _ in range(3)])
        runner.finish()
    torch.backends.cudnn.deterministic = False
    assert [classes for _, classes in outcomes[0]] == [classes for _, classes in outcomes[1]] == [35, 40, 40]
    assert outcomes[0] == [(pytest.approx(accuracy, abs=0.05), classes) for accuracy, classes in outcomes[1]]
    assert torch.equal(learners[0].head.counts, learners[1].head.counts)
    assert torch.equal(learners[0].head.since_start, learners[1].head.since_start)
    assert torch.equal(learners[0].generator.get_state(), learners[1].generator.get_state())
    assert (learners[0].head.weight - learners[1].head.weight).abs().mean() < 1e-3


@pytest.mark.gpu
def test_a_graph_waits_until_features_have_settled() -> None:
    learner = Learner(DATA, HEBBIAN, 0, device="cuda", filters=16)
    runner = Graphed(learner)
    assert learner.head.settling is not None
    runner.steps(99)
    runner.finish()
    assert (int(learner.head.settling.began), int(learner.head.since_start.sum())) == (-1, 0)
    runner.steps(200)
    runner.finish()
    began = int(learner.head.settling.began)
    assert 100 <= began < 299
    assert int(learner.head.since_start.sum()) == 32 * (299 - began)


@pytest.mark.gpu
def test_graphs_of_many_learners_do_not_mix(tmp_path: Path) -> None:
    trials = [Trial("many", HEBBIAN, seed, 50) for seed in range(4)]
    together = carry_out(trials, tmp_path / "1", device="cuda", together=4, filters=16)
    alone = carry_out(trials, tmp_path / "2", device="cuda", together=1, filters=16)
    for trial in trials:
        assert together[trial].accuracy == pytest.approx(alone[trial].accuracy, abs=0.15)


@pytest.mark.gpu
def test_finished_trials_give_their_memory_back(tmp_path: Path) -> None:
    def reserved_after(count: int) -> int:
        trials = [Trial(f"many-{count}", HEBBIAN, seed, 25) for seed in range(count)]
        carry_out(trials, tmp_path / "1", device="cuda", filters=16)
        return torch.cuda.memory_reserved()

    assert reserved_after(12) <= 1.5 * reserved_after(2)


@pytest.mark.gpu
def test_what_cannot_be_recorded_runs_without_a_graph() -> None:
    svm = Learner(DATA, Method(hebbian=True, objective="svm"), 0, device="cuda", filters=4)
    assert not isinstance(start(svm), Graphed)
    assert isinstance(start(Learner(DATA, HEBBIAN, 0, device="cuda", filters=4)), Graphed)


def test_a_failed_recording_is_told_and_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    learner = Learner(DATA, HEBBIAN, 0, filters=2)

    learner.device = torch.device("cuda")  # for `start` to try a recording

    def fail(each: Learner) -> Runner:
        each.head.weight.data.zero_()
        each.generator.manual_seed(9)
        raise RuntimeError("operation not permitted when stream is capturing")

    before = learner.head.weight.detach().clone()
    draws = learner.generator.get_state()
    assert not isinstance(start(learner, record=fail), Graphed)
    assert "no CUDA graph, so training is slower (RuntimeError: operation not permitted" in capsys.readouterr().err
    assert torch.equal(learner.head.weight, before)
    assert torch.equal(learner.generator.get_state(), draws)


def test_without_a_graph_one_at_a_time_on_a_gpu() -> None:
    slow = Method(hebbian=True, objective="svm")
    waiting = [Trial("a", PLAIN, 0, 25), Trial("b", slow, 0, 25), Trial("c", slow, 0, 25)]
    assert next_trials(list(waiting), 0, 3, torch.device("cpu")) == waiting
    left = list(waiting)
    taken = [next_trials(left, 0, 3, torch.device("cuda")) for _ in range(3)]
    assert taken == [[trial] for trial in waiting]
