"""The order of examples, and a learner."""

import pytest
import torch

from hebbian_softmax.lab.longtail.learner import ShuffledBatches


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
