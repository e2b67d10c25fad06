"""The example of a long tail: its tasks, and all four heads."""

import pytest
import torch
from examples.long_tail import METHODS, class_accuracies, digits, main, train, zipf
from torch import nn


def test_the_kth_class_has_a_kth_of_the_examples() -> None:
    task = zipf(60, 0, rarest=2, tests=3)
    assert task.counts[[0, 1, 2, 59]].tolist() == [120, 60, 40, 2]
    assert task.targets.bincount().equal(task.counts)
    assert task.test_targets.bincount().tolist() == [3] * 60
    assert len(task.inputs) == len(task.targets)
    assert zipf(60, 0, rarest=2, tests=3).inputs.equal(task.inputs)


def test_digits_of_the_test_are_not_in_training() -> None:
    pytest.importorskip("sklearn")
    task = digits(3)
    assert task.targets.bincount().equal(task.counts)
    assert len(task.test_inputs) == 500
    together = torch.cat([task.inputs, task.test_inputs]).flatten(1)
    assert len(together.unique(dim=0)) == len(together)


def test_accuracies_are_those_of_each_class() -> None:
    task = zipf(50, 0, tests=2)
    always = nn.Linear(64, 50)
    nn.init.zeros_(always.weight)
    with torch.no_grad():
        always.bias.copy_(torch.arange(50) == 7)
    assert class_accuracies(always, task).tolist() == [float(label == 7) for label in range(50)]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.title)
def test_a_head_memorises_only_if_it_is_told_to(method: object) -> None:
    task = zipf(50, 0)
    model = train(task, method, 1e-3, steps=3, batch=64, seed=0)  # type: ignore[arg-type]
    head = model[1]
    assert int(head.counts.sum()) == 3 * 64
    assert head.memorizing == method.memorizing  # type: ignore[attr-defined]


@pytest.mark.parametrize("task", ["zipf", "digits"])
def test_the_program_prints_a_row_for_each_head(task: str, capsys: pytest.CaptureFixture[str]) -> None:
    if task == "digits":
        pytest.importorskip("sklearn")
    main(["--task", task, "--quick"])
    *shown, note = capsys.readouterr().out.splitlines()
    assert note.startswith("This was a quick run")
    assert [line[:26].strip() for line in shown[3:]] == [method.title for method in METHODS]
    assert all(0 <= float(cell) <= 100 for line in shown[3:] for cell in line[26:].split()[:3])


def test_too_few_classes_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--classes", "3"])
    assert "at least 50" in capsys.readouterr().err
