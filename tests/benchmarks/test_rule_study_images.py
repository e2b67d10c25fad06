"""The image tasks of the study train the laboratory's learners, and each variant does what it says."""

import time
from typing import Any

import pytest
import torch
from benchmarks.rule_study.images import Trial, train
from benchmarks.rule_study.write import Rule, Variant

from hebbian_softmax.lab.longtail.learner import BATCH, Learner, Method, ShuffledBatches
from hebbian_softmax.lab.longtail.tasks import longtail

STEPS = 3


def accuracy(**options: Any) -> float:
    found = train(Trial.of({"task": "longtail", "steps": STEPS} | options), time.time() + 60)
    return float(found["test"]["all"])


@pytest.mark.slow
def test_without_a_write_it_is_the_laboratorys_plain_learner() -> None:
    task = longtail(1000, 0)
    learner, batches = Learner(task, Method(0.002), 0), ShuffledBatches(len(task.train_targets), BATCH, 0)
    for _ in range(STEPS):
        batch = batches.next()
        learner.step(task.train_inputs[batch], task.train_targets[batch])
    assert accuracy() == 100 * learner.class_accuracies(task).mean().item()


def test_writing_begins_after_the_first_steps() -> None:
    late = train(Trial.of({"task": "longtail", "steps": STEPS, "write": "centred", "start_step": 2}), time.time() + 60)
    assert late["first_written_step"] == 3
    never = train(Trial.of({"task": "longtail", "steps": STEPS, "write": "centred", "settled": 2.0}), time.time() + 60)
    assert never["first_written_step"] == 0
    assert never["test"]["all"] == accuracy()


def test_the_gate_scales_only_what_pushes_rows_away() -> None:
    h, weight = torch.randn(6, 4), torch.randn(5, 4, requires_grad=True)
    targets = torch.tensor([0, 0, 1, 1, 1, 2])
    logits = h @ weight.T
    losses = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    losses.mean().backward()
    rule = Rule(Variant(gate=2.0), weight.detach(), 1.0, 0)
    rule.counts.copy_(torch.tensor([8.0, 1, 1, 0, 0]))
    gates = torch.tensor([1.0, 0.25, 0.25, 0, 0])
    chances, own = logits.detach().softmax(1), torch.nn.functional.one_hot(targets, 5)
    pushes = (chances * (1 - own)).T @ h / 6
    pulls = ((1 - chances) * own).T @ h / 6
    assert weight.grad is not None
    rule.before_step(weight.grad, h, targets, losses.detach())
    torch.testing.assert_close(weight.grad, gates[:, None] * pushes - pulls)


def test_a_first_write_takes_its_part_along_the_mean_from_the_rows_seen() -> None:
    weight = torch.randn(3, 4)
    rule = Rule(Variant(write="across", base=True), weight, 1.0, 0)
    rule.after_step(torch.randn(8, 4) + 3, torch.tensor([0, 1] * 4), torch.zeros(8))
    direction = rule.mean / rule.mean.norm()
    usual = (weight[:2] @ direction).mean()
    rule.after_step(torch.randn(1, 4) + 3, torch.tensor([2]), torch.zeros(1))
    torch.testing.assert_close(weight[2] @ direction, usual)


def test_time_can_run_out() -> None:
    with pytest.raises(TimeoutError, match="when the time was over"):
        train(Trial.of({"task": "longtail", "steps": STEPS}), time.time() - 1)
