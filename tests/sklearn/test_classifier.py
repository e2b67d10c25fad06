"""HebbianClassifier: an estimator of scikit-learn that learns labels as they come."""

from __future__ import annotations

import copy
import importlib
import pickle
import sys
import warnings
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator, estimator_checks_generator

from hebbian_softmax.sklearn import HebbianClassifier
from tests.closeness import assert_exact

NAMES = np.array(["ant", "bee", "cat", "dog", "eel", "fox", "gnu", "hen"])
QUICK = (
    "check_classifiers_one_label",
    "check_estimators_nan_inf",
    "check_estimators_unfitted",
    "check_methods_subset_invariance",
    "check_n_features_in_after_fitting",
    "check_readonly_memmap_input",
    "check_classifiers_classes",
)
"""Those of scikit-learn's checks that run by default."""


def clusters(n: int = 20, seed: int = 0, offset: float = 5.0, dtype: Any = np.float32) -> tuple[Any, Any]:
    """Return ``n`` examples of each of eight classes whose means lie apart, in random order."""
    random = np.random.default_rng(seed)
    means = 3 * np.random.default_rng(1).normal(size=(len(NAMES), 16)) + offset
    which = random.permutation(np.repeat(np.arange(len(NAMES)), n))
    return (means[which] + random.normal(size=(len(which), 16))).astype(dtype), NAMES[which]


def quick(**options: Any) -> HebbianClassifier:
    return HebbianClassifier(random_state=0, **options)


def known_and_new() -> tuple[Any, Any, Any, Any]:
    """Return examples and labels of six classes, and one example and label of each of two others."""
    x, y = clusters()
    new = [int(np.flatnonzero(y == name)[0]) for name in NAMES[6:]]
    known = np.isin(y, NAMES[:6])
    return x[known], y[known], x[new], y[new]


def name_of(check: Any) -> str:
    return (check.func if isinstance(check, partial) else check).__name__


@pytest.mark.parametrize("name", QUICK)
def test_it_passes_checks_of_scikit_learn(name: str) -> None:
    checks = [pair for pair in estimator_checks_generator(HebbianClassifier()) if name_of(pair[1]) == name]
    assert checks
    for estimator, check in checks:
        check(estimator)


@pytest.mark.slow
def test_it_passes_all_checks_of_scikit_learn() -> None:
    found = check_estimator(HebbianClassifier(), on_fail=None, on_skip=None)
    assert len(found) > 40
    for each in found:
        assert each["status"] in ("passed", "skipped"), (each["check_name"], each["exception"])
        if each["status"] == "skipped":  # for want of pandas, or of a setting of SciPy
            assert "pandas" in str(each["exception"]) or "SCIPY_ARRAY_API" in str(each["exception"]), each


def test_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("hebbian_softmax.sklearn")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ImportError, match=r"pip install 'hebbian-softmax\[sklearn\]'"):
        importlib.import_module("hebbian_softmax.sklearn")


@pytest.mark.parametrize("how", ["partial_fit", "memorize"])
def test_new_labels_are_recognised_from_one_example(how: str) -> None:
    x, y, new_x, new_y = known_and_new()
    model = quick().fit(x, y)
    getattr(model, how)(new_x, new_y)
    assert model.classes_.tolist() == [*NAMES[:6], *new_y.tolist()]
    test_x, test_y = clusters(seed=5)
    right = model.predict(test_x) == test_y
    assert right.mean() > 0.95
    assert right[np.isin(test_y, NAMES[6:])].mean() > 0.85


def test_it_learns_from_nothing_one_example_at_a_time() -> None:
    x, y = clusters()
    model = quick()
    right = []
    for i in range(len(x)):
        if i:
            right.append(model.predict(x[i : i + 1])[0] == y[i])
        model.partial_fit(x[i : i + 1], y[i : i + 1])
    assert sorted(model.classes_) == sorted(NAMES)
    assert model.classes_.tolist() == list(dict.fromkeys(y.tolist()))  # as they came
    assert np.mean(right[40:]) > 0.95


def test_named_labels_have_no_probability_before_their_first_example() -> None:
    x, y, new_x, new_y = known_and_new()
    model = quick().partial_fit(x, y, classes=NAMES)
    assert model.classes_.tolist() == NAMES.tolist()
    probabilities = model.predict_proba(x)
    assert (probabilities[:, 6:] == 0).all()
    np.testing.assert_allclose(probabilities.sum(1), 1, rtol=1e-5)
    assert np.isneginf(model.decision_function(x)[:, 6:]).all()
    model.partial_fit(new_x, new_y)
    assert (model.predict_proba(x) > 0).all()
    assert (model.predict(new_x) == new_y).all()


def test_more_labels_can_be_named_later() -> None:
    x, y, _, _ = known_and_new()
    model = quick().partial_fit(x, y).partial_fit(x[:1], y[:1], classes=["emu", y[0]])
    assert model.classes_.tolist() == [*NAMES[:6], "emu"]


def test_many_labels_that_all_differ_make_no_warning() -> None:
    x = np.random.default_rng(0).normal(size=(30, 8))
    labels = [f"intent {i}" for i in range(30)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = quick().fit(x, labels).partial_fit(x + 9, [f"later {i}" for i in range(30)])
        model.memorize(x - 9, [f"last {i}" for i in range(30)])
        assert len(quick().partial_fit(x, labels).classes_) == 30
    assert len(model.classes_) == 90


def test_numbers_that_are_no_classes_are_refused() -> None:
    with pytest.raises(ValueError, match="continuous"):
        quick().fit(np.eye(3), [0.5, 1.5, 2.5])


def test_labels_of_another_kind_are_refused_and_nothing_changes() -> None:
    x, y, new_x, _ = known_and_new()
    model = quick().fit(x, y)
    before = model.decision_function(x)
    with pytest.raises(ValueError, match="all numbers or all strings"):
        model.partial_fit(new_x, [1, 2])
    with pytest.raises(ValueError, match="features"):
        model.partial_fit(new_x[:, :3], ["a", "b"])
    assert (model.decision_function(x) == before).all()
    assert len(model.classes_) == 6


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("alpha", -1.0),
        ("epochs", -1),
        ("replay", 0.5),
        ("batch_size", 0),
        ("learning_rate", -1.0),
        ("limit", -1),
        ("shrinkage", -1.0),
        ("buffer_size", 0),
    ],
)
def test_bad_settings_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=name):
        HebbianClassifier(**{name: value}).fit(np.eye(2), ["a", "b"])


def test_results_repeat_and_copies_go_on_alike() -> None:
    x, y, new_x, new_y = known_and_new()
    model = quick().fit(x, y)
    others = [quick().fit(x, y), clone(model).fit(x, y), pickle.loads(pickle.dumps(model)), copy.deepcopy(model)]
    model.partial_fit(new_x, new_y).partial_fit(x[:5], y[:5])
    for other in others:
        other.partial_fit(new_x, new_y).partial_fit(x[:5], y[:5])
        assert (other.decision_function(x) == model.decision_function(x)).all()


def test_tensors_are_as_good_as_arrays() -> None:
    x, y, new_x, new_y = known_and_new()
    model = quick().fit(x, y).partial_fit(new_x, new_y)
    other = quick().fit(torch.from_numpy(x), y).partial_fit(torch.from_numpy(new_x), new_y)
    found = other.decision_function(torch.from_numpy(x).requires_grad_())
    assert (found == model.decision_function(x)).all()
    numbers = torch.arange(len(x)) % 3
    assert quick().fit(torch.from_numpy(x).bfloat16(), numbers).classes_.tolist() == [0, 1, 2]


@pytest.mark.gpu
def test_the_head_can_be_on_a_gpu() -> None:
    x, y, new_x, new_y = known_and_new()
    model = quick(device="cuda").fit(torch.from_numpy(x).cuda(), y).partial_fit(new_x, new_y)
    on_cpu = quick().fit(x, y).partial_fit(new_x, new_y)
    test_x, test_y = clusters(seed=5)
    assert model.score(test_x, test_y) > 0.95
    assert model.predict(test_x).tolist() == on_cpu.predict(test_x).tolist()
    np.testing.assert_allclose(model.predict_proba(test_x), on_cpu.predict_proba(test_x), atol=0.02)
    stream, stream_on_cpu = quick(device="cuda"), quick()  # from nothing
    for i in range(40):
        stream.partial_fit(x[i : i + 1], y[i : i + 1])
        stream_on_cpu.partial_fit(x[i : i + 1], y[i : i + 1])
    assert stream.classes_.tolist() == stream_on_cpu.classes_.tolist()
    assert stream.predict(x).tolist() == stream_on_cpu.predict(x).tolist()
    assert pickle.loads(pickle.dumps(model)).predict(test_x).tolist() == model.predict(test_x).tolist()


def test_it_works_in_pipelines_and_searches() -> None:
    x, y = clusters(6)
    pipeline = make_pipeline(StandardScaler(), quick(epochs=1))
    search = GridSearchCV(pipeline, {"hebbianclassifier__alpha": [1e-5, 1e-3]}, cv=2).fit(x, y)
    assert search.score(*clusters(seed=5)) > 0.9


def test_offset_and_scale_of_the_features_do_not_matter() -> None:
    x, y, new_x, new_y = known_and_new()
    x, new_x = x.astype(np.float64), new_x.astype(np.float64)
    model = quick().fit(x, y).partial_fit(new_x, new_y)
    moved = quick().fit(64 * x + 2048, y).partial_fit(64 * new_x + 2048, new_y)
    np.testing.assert_allclose(moved.decision_function(64 * x + 2048), model.decision_function(x), rtol=1e-6, atol=1e-6)


def test_taking_the_scale_anew_leaves_the_decisions() -> None:
    """Examples of a new class double their number; what the logits of old classes have in common may change."""
    x, y = clusters(2, dtype=np.float64)
    model = quick(replay=0).partial_fit(x, y)
    before = model.decision_function(x)
    far = 5 + np.zeros((len(x), 16))
    model.memorize(far, ["new"] * len(x))
    after = model.decision_function(x)[:, :-1]
    before, after = (torch.from_numpy(each - each.mean(1, keepdims=True)) for each in (before, after))
    assert_exact(after, before, ulps=256)


def test_it_learns_from_nothing_without_a_gradient_step() -> None:
    """Rows that were written around the mean of few examples must not spoil those that are written later."""
    random = np.random.default_rng(1)
    means = 3 * random.normal(size=(40, 16))
    y = random.permutation(np.repeat(np.arange(40), 3))
    x = means[y] + random.normal(size=(len(y), 16))
    model = quick()
    for i in range(len(x)):
        model.memorize(x[i : i + 1], y[i : i + 1])
    assert model.score(means, np.arange(40)) > 0.9


def test_a_row_that_is_only_written_is_the_mean_at_full_length() -> None:
    x, y = clusters(4, dtype=np.float64)
    model = quick(replay=0, shrinkage=0.0).memorize(x, y)
    center = np.mean([x[y == name].mean(0) for name in NAMES], 0)
    rows = []
    for name in NAMES:
        away = x[y == name] - center
        mean = away.mean(0)
        rows.append(mean / np.linalg.norm(mean) * np.linalg.norm(away, axis=1).mean())
    expected = (x - center) @ np.array(rows).T
    found = model.decision_function(x)
    # The head has no row to match yet, so the written rows have the length of the activations.
    np.testing.assert_allclose(found / found.std(), expected / expected.std(), rtol=1e-6, atol=1e-9)


def test_predictions_do_not_change_the_model() -> None:
    x, y, _, _ = known_and_new()
    model = quick().fit(x, y)
    before = pickle.dumps(model)
    model.predict(x), model.predict_proba(x), model.decision_function(x)
    assert pickle.dumps(model) == before


def test_fit_with_more_examples_than_the_buffer_holds() -> None:
    x, y = clusters()
    model = quick(buffer_size=24).fit(x, y)
    assert model.score(*clusters(seed=5)) > 0.95
    model.partial_fit(x[:3], ["new"] * 3)
    assert model.score(*clusters(seed=5)) > 0.9
