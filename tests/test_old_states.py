"""States that version 0.1 saved: heads with their optimizers, and memories."""

from typing import Any

import pytest
import torch

from hebbian_softmax import HebbianSoftmax, MbPA, NeuralCache, OnePassRMSprop, PaperRate
from hebbian_softmax.write.running import RunningStatistics
from tests import ROOT
from tests.heads import early_head

OLD = ROOT / "tests" / "fixtures" / "version-0.1"


def load(name: str) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(OLD / name, weights_only=True)
    return state


_RUNNING = ("along", "along_batches", "returning", "first", "seen")
LATER = {"filled", "since_start", *(f"running.{name}" for name in _RUNNING)}
"""Buffers that later versions have."""


@pytest.mark.parametrize("name", ["adam", "one_pass_rmsprop"])
def test_training_goes_on_from_a_saved_head_and_optimizer(name: str) -> None:
    saved = load("heads.pt")[name]
    head = early_head(5, 9, rate=PaperRate(0.1, 12), bias=True)  # the rule of that version
    if name == "adam":
        optimizer: torch.optim.Optimizer = torch.optim.Adam(head.parameters(), lr=0.05)
        head.attach(optimizer)
    else:
        optimizer = OnePassRMSprop(head.parameters(), lr=0.05, head=head)
    assert set(head.state_dict()) - set(saved["head"]) == LATER
    head.load_state_dict(saved["head"])
    optimizer.load_state_dict(saved["optimizer"])
    for h, targets in saved["batches"]:
        head.loss(h, targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    for key, value in saved["later"].items():
        # Three steps of size 0.05 in float32: rounding is some ulps of values below 3, a lost state is off by 0.01.
        torch.testing.assert_close(head.state_dict()[key], value, rtol=1e-4, atol=1e-5)


def test_a_head_of_today_goes_on_from_a_saved_one() -> None:
    """Its features have settled, so it writes at once, with its own rule."""
    saved = load("heads.pt")["adam"]
    head = HebbianSoftmax(5, 9, bias=True)
    optimizer = torch.optim.Adam(head.parameters(), lr=0.05)
    head.attach(optimizer)
    head.load_state_dict(saved["head"])
    optimizer.load_state_dict(saved["optimizer"])
    torch.testing.assert_close(head.weight.detach(), saved["head"]["weight"])
    h, targets = saved["batches"][0]
    assert head.settling is not None
    assert int(head.settling.began) >= 0
    plain = torch.nn.Linear(5, 9)
    plain.load_state_dict({name: saved["head"][name] for name in ("weight", "bias")})
    torch.nn.functional.cross_entropy(plain(h), targets).backward()
    other = torch.optim.Adam(plain.parameters(), lr=0.05)
    other.load_state_dict(load("heads.pt")["adam"]["optimizer"])  # tensors of its own
    other.step()
    head.loss(h, targets).backward()
    optimizer.step()
    written = (head.weight - plain.weight).abs().amax(1) > 1e-4
    assert set(written.nonzero().flatten().tolist()) == set(targets.tolist())


def test_a_pickle_with_fewer_running_values_is_completed() -> None:
    head = HebbianSoftmax(4, 6)
    state = head.running.__dict__ | {"_buffers": {**head.running._buffers}}
    for name in ("seen", "returning", "first"):
        del state["_buffers"][name]
    del state["_stride"]
    older = RunningStatistics.__new__(RunningStatistics)
    older.__setstate__(state)
    assert older.state_dict().keys() == head.running.state_dict().keys()
    head.running = older
    head.memorize(torch.randn(3, 4), torch.tensor([0, 1, 1]))
    assert int(head.running.seen) == 3


def test_saved_memories_answer_as_before() -> None:
    saved = load("memories.pt")
    cache, mbpa = NeuralCache(8, 0.3), MbPA(16, 4)
    cache.load_state_dict(saved["cache"])
    mbpa.load_state_dict(saved["mbpa"])
    queries, targets = saved["queries"], saved["targets"]
    torch.testing.assert_close(cache.log_prob(queries, targets), saved["cache_log_prob"], rtol=1e-4, atol=1e-5)
    found = mbpa.log_prob(queries, targets, saved["weight"])
    torch.testing.assert_close(found, saved["mbpa_log_prob"], rtol=1e-4, atol=1e-5)
