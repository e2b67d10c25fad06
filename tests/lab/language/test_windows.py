"""An epoch shows every window once, and the number of a step determines its batch."""

import pytest
import torch

from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.language.task import Windows

IDS = torch.arange(1000, dtype=torch.int32)


def test_an_epoch_shows_neighbouring_windows_once_each() -> None:
    windows = Windows(IDS, batch=4, length=10, seed=3)
    seen = torch.cat([windows.at(step) for step in range(windows.epoch_steps)], dim=1)
    assert seen.dtype == torch.int64
    assert seen.shape == (11, 4 * windows.epoch_steps)
    assert torch.equal(seen - seen[0], torch.arange(11).unsqueeze(1).expand_as(seen))  # consecutive words of the text
    firsts = seen[0].sort().values
    assert len(set(firsts.tolist())) == len(firsts) == 96  # of 99 windows, the last three do not fill a batch
    assert len({int(first) % 10 for first in firsts}) == 1
    assert seen.max() < 1000


def test_epochs_differ_in_order_and_offset() -> None:
    windows = Windows(IDS, batch=4, length=10, seed=3)
    orders = [windows.starts(epoch) for epoch in range(8)]
    assert len({int(order[0]) % 10 for order in orders}) > 2
    assert not torch.equal(orders[0] // 10, orders[1] // 10)


def test_a_step_follows_from_its_number_and_the_seed() -> None:
    one, other = (Windows(IDS, batch=4, length=10, seed=3) for _ in range(2))
    for step in (0, 1, 30, 5):  # forwards and backwards
        one.at(step)
    assert torch.equal(one.at(7), other.at(7))
    assert not torch.equal(one.at(7), Windows(IDS, batch=4, length=10, seed=4).at(7))


def test_ranks_share_the_batch_by_columns() -> None:
    whole = Windows(IDS, batch=4, length=10, seed=3).at(5)
    parts = [Windows(IDS, batch=4, length=10, seed=3, rank=rank, ranks=2).at(5) for rank in range(2)]
    assert torch.equal(torch.cat(parts, dim=1), whole)


@pytest.mark.parametrize("length", [0, 9, 11, 49])
def test_a_text_too_short_for_a_batch_is_one_clear_line(length: int) -> None:
    with pytest.raises(LabError, match=rf"text X has {length} words, too few .* needs 50: give --batch"):
        Windows(IDS[:length], batch=4, length=10, seed=0, name="text X")
    assert Windows(IDS[:50], batch=4, length=10, seed=0).at(3).max() < 50
