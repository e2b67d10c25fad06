"""Single writes of the study of the write, by hand."""

import pytest
import torch
from benchmarks.rule_study.write import Rule, Variant


def rule_of(**options: object) -> Rule:
    torch.manual_seed(0)
    return Rule(Variant(write="literal", **options), torch.zeros(3, 4), 0.1, 0)  # type: ignore[arg-type]


def write(rule: Rule, value: float) -> torch.Tensor:
    rule.after_step(torch.full((1, 4), value), torch.tensor([1]), torch.zeros(1))
    return rule.weight[1, 0]


def test_the_limit_grows_with_the_steps() -> None:
    rule = rule_of(rate="constant", gamma=1.0, limit=2, limit_per_step=0.75)
    # Before the batches 1, 2, … the class was seen 0, 1, 2, … times; T is max(2, 0.75 × the number of the batch).
    assert [write(rule, float(step)).item() for step in range(1, 7)] == [1, 2, 3, 3, 3, 3]
    rule = rule_of(rate="constant", gamma=1.0, limit=2, limit_per_step=1.0)
    assert [write(rule, float(step)).item() for step in range(1, 7)] == [1, 2, 3, 4, 5, 6]


def test_the_average_of_a_class_is_written() -> None:
    rule = rule_of(rate="constant", gamma=1.0, average=0.4)
    assert [write(rule, value).item() for value in (1.0, 3.0, 7.0)] == pytest.approx([1, 2, 2 + 0.4 * 5])
