"""The benchmark of new classes: its splits, its contenders and its streams, on scikit-learn's digits."""

import json
from pathlib import Path

import numpy as np
import pytest
from benchmarks.intents import __main__ as intents
from benchmarks.intents import data, few, stream
from benchmarks.intents.contenders import CONTENDERS
from sklearn.linear_model import SGDClassifier

pytestmark = pytest.mark.slow  # it fits many classifiers

QUICK = [name for name in CONTENDERS if "random features" not in name and "Classifier" not in name]


@pytest.mark.parametrize("final", [False, True])
def test_splits_keep_new_classes_and_test_sets_apart(final: bool) -> None:
    digits = data.digits()
    task = data.split(digits, 3, 2, known=7, new=3, final=final)
    known, new = set(task.known.y), set(task.new.y)
    assert (len(known), len(new), known & new) == (7, 3, set())
    assert np.unique(task.new.y, return_counts=True)[1].tolist() == [2, 2, 2]
    assert set(task.test.y) == known | new
    learned = {row.tobytes() for row in task.everything().x}
    other = {row.tobytes() for row in (digits.test if final else digits.validation).x}
    assert {row.tobytes() for row in task.test.x} <= other
    assert len(learned & other) < 5  # a few of the digits are there twice


def test_every_contender_learns() -> None:
    tasks = [data.split(data.digits(), seed, 5, known=7, new=3, final=False) for seed in (0, 1)]
    for name in QUICK:
        contender, settings = CONTENDERS[name]
        for setting in settings[:1]:
            found = [few.accuracy(task, contender(task, 0, **setting)) for task in tasks]
            assert np.mean(found, 0).max() > 70, name  # imprinting takes too much for new classes here


def test_settings_are_chosen_on_validation_data() -> None:
    names = ["nearest class mean", "HebbianClassifier"]
    found = few.measure(data.digits(), [0], [100], names, known=7, new=3)
    for shots in few.SHOTS:
        tried = found["nearest class mean"][shots]["tried"]
        best = max(tried, key=lambda each: each["validation"])
        assert found["nearest class mean"][shots]["setting"] == best["setting"]
        assert found["HebbianClassifier"][shots]["tried"] == []
    assert found["HebbianClassifier"][5]["all"][0] > 80


@pytest.mark.parametrize("known", [0, 5])
def test_streams_count_what_was_predicted(known: int) -> None:
    for make in (stream.NearestMean, lambda: stream.StreamingLDA(1.0), lambda: stream.SGD(1e-4), stream.Ours):
        found = stream.run(make(), data.digits(), 0, known=known, length=150, final=True)
        assert 40 < found["test"] <= 100
        assert 0 <= found["second"] <= 100
        assert found["stream"] > 30


@pytest.mark.parametrize("alpha", [1e-3, 1e-5])
def test_the_steps_of_sgd_are_those_of_scikit_learn(alpha: float) -> None:
    x, y = data.digits().train
    x, labels = x[:200].astype(np.float64) / 16, np.unique(y)
    ours, model = stream.SGD(alpha), SGDClassifier(loss="log_loss", alpha=alpha)
    ours.begin(labels, data.Labelled(x[:0], y[:0]), 0)
    for each, label in zip(x, y, strict=False):
        ours.learn(each, label)
        model.partial_fit(each[None], [label], classes=labels)
    np.testing.assert_allclose(ours.rows, model.coef_, rtol=1e-6, atol=1e-9 * np.abs(model.coef_).max())
    np.testing.assert_allclose(ours.intercepts, model.intercept_, rtol=1e-6)
    assert (ours.predict(x) == model.predict(x)).all()


def test_it_writes_what_it_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    intents.main(["time", "--classes", "20", "--rounds", "3", "--json", str(tmp_path / "time.json")])
    record = json.loads((tmp_path / "time.json").read_text())
    assert record["command"].startswith("python -m benchmarks.intents time --classes 20")
    assert record["versions"].keys() >= {"torch", "scikit-learn"}
    assert all(len(times) == 3 for times in record["found"]["all"].values())
    assert "memorize, a new label" in capsys.readouterr().out
