"""The store of examples and the spread of classes, beside slow and literal ones."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from hebbian_softmax.sklearn.examples import Examples
from hebbian_softmax.sklearn.spread import ClassSpread


def some(n: int, classes: int, features: int = 3, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return random.normal(size=(n, features)) + 7, random.integers(classes, size=n)


@pytest.mark.parametrize("size", [1, 5, 12, 100])
def test_the_store_is_bounded_and_balanced(size: int) -> None:
    x, classes = some(60, 4)
    classes[:40] = 0  # one class is far more frequent
    store = Examples(3, x.dtype, size)
    store.add_classes(5)
    random = np.random.RandomState(0)
    for i in range(0, 60, 3):
        store.store(x[i : i + 3], classes[i : i + 3], random)
    came = np.bincount(classes, minlength=5)
    assert store.stored == min(size, 60)
    assert store.seen.tolist() == came.tolist()
    assert store.held.tolist() == [len(each) for each in store.places]
    assert sorted(itertools.chain(*store.places)) == list(range(store.stored))
    for label, places in enumerate(store.places):  # what is stored came, and with this label
        for row in store.x[places]:
            assert (x[classes == label] == row).all(1).any()
    short = store.held < came  # classes that gave something up are not smaller than others by more than one
    if short.any():
        assert store.held.max() - store.held[short].min() <= 1


def test_old_and_recent_examples_of_a_full_class_are_equally_likely() -> None:
    kept = np.zeros(20)
    for seed in range(400):
        store = Examples(1, np.dtype(float), 5)
        store.add_classes(1)
        random = np.random.RandomState(seed)
        for i in range(20):
            store.store(np.array([[float(i)]]), np.array([0]), random)
        kept[store.x[:, 0].astype(int)] += 1
    assert kept.sum() == 2000
    # Each is kept with the probability 1/4, so 100 times, with a standard deviation below 9.
    assert np.abs(kept - 100).max() < 5 * 9


def test_draws_are_even_over_classes() -> None:
    store = Examples(1, np.dtype(float), 100)
    store.add_classes(3)
    store.store(np.arange(12.0)[:, None], np.array([0] * 10 + [2] * 2), np.random.RandomState(0))
    x, classes = store.draw(4000, np.random.RandomState(0))
    assert set(classes.tolist()) == {0, 2}
    assert abs((classes == 0).mean() - 0.5) < 5 * 0.5 / 4000**0.5
    assert ((x[:, 0] < 10) == (classes == 0)).all()
    assert len(np.unique(x)) == 12


@pytest.mark.parametrize(("n", "classes"), [(40, 5), (9, 8), (30, 1), (3, 20)])
@pytest.mark.parametrize("piece", [1, 7, 100])
def test_spread_is_that_of_its_definition(n: int, classes: int, piece: int) -> None:
    x, y = some(n, classes)
    spread = ClassSpread(3)
    spread.add_classes(classes // 2)
    spread.add_classes(classes - classes // 2)
    for i in range(0, n, piece):
        spread.see(x[i : i + piece], y[i : i + piece])
    seen = np.unique(y)
    means = np.array([x[y == each].mean(0) for each in seen])
    counts = np.array([(y == each).sum() for each in seen])
    np.testing.assert_allclose(spread.means(seen), means)
    np.testing.assert_allclose(spread.center(), means.mean(0) if len(seen) > 1 else 0)
    scatter = sum(((x[y == each] - mean) ** 2).sum() for each, mean in zip(seen, means, strict=True))
    between = ((means - means.mean(0)) ** 2).sum() / max(len(seen) - 1, 1)
    if n == len(seen):
        expected = between / 2, between / 2
    else:
        within = scatter / (n - len(seen))
        expected = within, within if len(seen) == 1 else max(between - within * (1 / counts).mean(), 0)
    np.testing.assert_allclose(spread.traces(), expected, rtol=1e-9, atol=1e-12)
