"""Tasks with long tails: their frequencies, and what their seeds decide."""

import sys

import pytest
import torch

from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.longtail.tasks import (
    DIGITS,
    FEATURES,
    INPUTS,
    RAREST,
    TEST_EXAMPLES,
    TEST_IMAGES,
    VALIDATION_IMAGES,
    digits,
    longtail,
    mlp,
)


def test_frequencies_follow_zipf_and_the_test_set_is_balanced() -> None:
    task = longtail(classes=200, seed=0)
    assert task.counts[0] == 200 * RAREST
    assert task.counts[-1] == RAREST
    torch.testing.assert_close(task.counts * torch.arange(1, 201), torch.full((200,), 800), rtol=0.15, atol=0)
    assert torch.equal(task.train_targets.bincount(), task.counts)
    assert torch.equal(task.test_targets.bincount(), torch.full((200,), TEST_EXAMPLES))
    assert task.train_inputs.shape == (len(task.train_targets), INPUTS)
    assert task.test_inputs.shape == (len(task.test_targets), INPUTS)


def test_the_seed_decides_everything_and_the_global_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    first, same, other = longtail(50, 1), longtail(50, 1), longtail(50, 2)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first.train_inputs, same.train_inputs)
    assert torch.equal(first.test_inputs, same.test_inputs)
    assert not torch.equal(first.train_inputs, other.train_inputs)


def test_training_and_test_examples_are_different_draws_of_the_same_classes() -> None:
    task = longtail(50, 1)
    distances = torch.cdist(task.test_inputs, task.train_inputs)
    assert distances.min() > 1e-3
    nearest = task.train_targets[distances.argmin(dim=1)]
    accuracy = (nearest == task.test_targets).double().mean()
    assert 0.1 < accuracy < 0.9  # far above chance (0.02), far from solved without learning features


def test_maps_inputs_to_features_that_gradients_reach() -> None:
    network = mlp(inputs=5, hidden=7, features=3)
    features = network(torch.randn(11, 5))
    assert features.shape == (11, 3)
    assert (features >= 0).all()
    features.sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in network.parameters())


def images(inputs: torch.Tensor) -> set[tuple[float, ...]]:
    return {tuple(image.flatten().tolist()) for image in inputs}


def test_ten_digits_from_a_hundred_images_to_one() -> None:
    pytest.importorskip("sklearn")
    first, same, other = digits(0), digits(0), digits(1)
    chosen = digits(0, validation=True)
    assert tuple(first.counts.tolist()) == tuple(first.train_targets.bincount().tolist()) == DIGITS
    assert first.test_targets.bincount().tolist() == [TEST_IMAGES] * 10
    assert chosen.test_targets.bincount().tolist() == [VALIDATION_IMAGES] * 10
    assert first.network()(first.train_inputs).shape == (sum(DIGITS), FEATURES)
    assert torch.equal(first.train_inputs, same.train_inputs)
    assert torch.equal(first.train_inputs, chosen.train_inputs)
    assert not torch.equal(first.train_inputs, other.train_inputs)


def test_no_seed_trains_or_is_tuned_on_the_test_digits() -> None:
    pytest.importorskip("sklearn")
    tested = images(digits(0).test_inputs)
    for seed in (0, 1, 1000):
        for task in (digits(seed), digits(seed, validation=True)):
            assert not tested & images(task.train_inputs)
        assert images(digits(seed).test_inputs) == tested
        chosen = images(digits(seed, validation=True).test_inputs)
        assert not chosen & (tested | images(digits(seed).train_inputs))


def test_without_scikit_learn_there_is_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(LabError, match=r"needs scikit-learn: pip install 'hebbian-softmax\[lab,digits\]'"):
        digits(0)
