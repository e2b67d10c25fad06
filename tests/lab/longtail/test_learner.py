"""The order of examples, and a learner."""

import pytest
import torch
import torch.nn.functional as F

from hebbian_softmax.lab.longtail.learner import Learner, Method, ShuffledBatches
from hebbian_softmax.lab.longtail.tasks import longtail
from tests.closeness import assert_as_close


def take(batches: ShuffledBatches, number: int) -> torch.Tensor:
    return torch.stack([batches.next() for _ in range(number)])


def test_an_epoch_shows_every_example_once_and_the_next_another_order() -> None:
    batches = ShuffledBatches(examples=60, batch=6, seed=1)
    first, second = take(batches, 10).flatten(), take(batches, 10).flatten()
    assert sorted(first.tolist()) == list(range(60)) == sorted(second.tolist())
    assert not torch.equal(first, second)


def test_the_seed_decides_the_order_of_examples() -> None:
    orders = [take(ShuffledBatches(60, 7, seed), 30) for seed in (1, 1, 2)]
    assert torch.equal(orders[0], orders[1])
    assert not torch.equal(orders[0], orders[2])


@pytest.mark.parametrize("stop", [0, 3, 8, 9])
def test_batches_continue_from_their_state(stop: int) -> None:
    whole, half, fresh = (ShuffledBatches(50, 6, 3) for _ in range(3))
    for _ in range(stop):
        half.next()
    fresh.load_state_dict(half.state_dict())
    assert torch.equal(take(fresh, 20 - stop), take(whole, 20)[stop:])


@pytest.mark.parametrize("batch", [0, 11])
def test_a_batch_that_does_not_fit_is_refused(batch: int) -> None:
    with pytest.raises(ValueError, match=f"not {batch}"):
        ShuffledBatches(10, batch, 0)


@pytest.mark.parametrize("hebbian", [False, True])
@pytest.mark.parametrize("balanced", [False, True])
def test_frequencies_are_added_in_training_alone(hebbian: bool, balanced: bool) -> None:
    task = longtail(40, 0)
    learner = Learner(task, Method(0.001, hebbian, balanced), 0)
    inputs, targets = task.train_inputs[::9], task.train_targets[::9]
    with torch.no_grad():
        logits = learner.head(learner.network(inputs))
    assert torch.equal(learner.predict(inputs), logits.argmax(dim=1))
    share = balanced * (task.counts / task.counts.sum()).log()
    expected = [F.cross_entropy(logits.to(dtype) + share, targets) for dtype in (torch.float32, torch.float64)]
    assert_as_close(learner.step(inputs, targets), *expected)


def test_all_methods_start_from_the_same_weights() -> None:
    task = longtail(40, 0)
    learners = [Learner(task, Method(0.1, hebbian, balanced), 3) for hebbian in (0, 1) for balanced in (0, 1)]
    for values in zip(*([*each.network.parameters(), each.head.weight] for each in learners), strict=True):
        assert all(torch.equal(values[0], value) for value in values)
