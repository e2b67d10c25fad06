"""A lesson: what each act does to the two heads."""

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from hebbian_softmax.lab.play.lesson import LEARNING_RATE, MOST_TAUGHT, Example, Lesson, LessonError, hebbian_head
from hebbian_softmax.lab.play.network import Knowledge, divide, prepare
from tests.closeness import assert_as_close
from tests.lab.images.toys import toy_set

KNOWN, UNSEEN = divide(toy_set(classes=60, noise=0.03))


@pytest.fixture(scope="module")
def knowledge(tmp_path_factory: pytest.TempPathFactory) -> Knowledge:
    return prepare(KNOWN, 40, 0, lambda done, total: None, cache_dir=tmp_path_factory.mktemp("networks"))


@pytest.fixture
def lesson(knowledge: Knowledge) -> Lesson:
    return Lesson(knowledge)


def example(number: int, drawing: int = 0, name: str = "", steps: int = 3, replay: bool = False) -> Example:
    return Example(name or f"character {number}", UNSEEN.images[number, drawing], steps, replay)


def rows(lesson: Lesson) -> list[torch.Tensor]:
    return [lesson.stage.plain.weight.clone(), lesson.stage.hebbian.weight.detach().clone()]


def same(lesson: Lesson, before: list[torch.Tensor]) -> bool:
    return all(torch.equal(new, old) for new, old in zip(rows(lesson), before, strict=True))


def test_both_heads_recognise_what_was_taught(lesson: Lesson) -> None:
    for number in range(5):
        lesson.teach([example(number, steps=30, replay=True)])
    for number in range(5):
        for head, answers in lesson.recognise(UNSEEN.images[number, 7], taught_only=True).items():
            assert answers[0][0] == lesson.known + number, head
            assert 0.99 < sum(chance for _, chance in answers) <= 1.0001
    found = lesson.recognise(UNSEEN.images[0, 7], taught_only=False)
    assert all(len(answers) == 5 for answers in found.values())
    assert found["hebbian"][0][0] == lesson.known


def test_the_hebbian_head_learns_by_one_write_and_leaves_other_rows(lesson: Lesson) -> None:
    before = copy.deepcopy(lesson.stage.hebbian)
    lesson.teach([example(0)])
    head = lesson.stage.hebbian
    assert torch.equal(head.weight[:-1], before.weight)
    assert head.counts[-1] == 1
    h = lesson.knowledge.embed(UNSEEN.images[:1, 0])
    before.add_classes(1)
    before.memorize(h, torch.tensor([lesson.known]))
    assert torch.equal(head.weight, before.weight)


def test_a_first_write_is_the_centred_activation_alone(lesson: Lesson) -> None:
    """The results of the page are those of this write, and not of the one by logits that trained heads have."""
    mean = lesson.stage.hebbian.running.mean.clone()
    lesson.teach([example(0)])
    h = lesson.knowledge.embed(UNSEEN.images[:1, 0])[0]
    cosine = F.cosine_similarity(lesson.stage.hebbian.weight[-1], h - mean, dim=0)
    assert float(cosine) > 0.9999


def test_a_review_counts_what_is_still_known(lesson: Lesson) -> None:
    h = lesson.knowledge.embed(KNOWN.test[:, 0])
    right = int((lesson.knowledge.head(h).argmax(dim=1) == torch.arange(lesson.known)).sum())
    assert 0 < right <= lesson.known
    assert lesson.review(h) == {"before": right, "plain": right, "hebbian": right}
    lesson.teach([example(0)])
    lesson.stage.plain.weight[-1] = 1000  # wins wherever all activations are positive
    assert lesson.review(h.abs())["plain"] == 0


def test_the_plain_head_takes_gradient_steps(lesson: Lesson) -> None:
    lesson.teach([example(0, steps=0)])
    start = lesson.stage.plain.weight.clone()
    lesson.undo()
    lesson.teach([example(0, steps=2)])
    h = lesson.knowledge.embed(UNSEEN.images[:1, 0])

    def descended(dtype: torch.dtype) -> torch.Tensor:
        weight = start.to(dtype)
        for _ in range(2):
            weight.requires_grad_(True)
            loss = F.cross_entropy(h.to(dtype) @ weight.T, torch.tensor([lesson.known]))
            weight = (weight - LEARNING_RATE * torch.autograd.grad(loss, weight)[0]).detach()
        return weight

    assert_as_close(lesson.stage.plain.weight, descended(torch.float32), descended(torch.float64), "the rows")


def test_a_second_drawing_is_a_second_example(lesson: Lesson) -> None:
    lesson.teach([example(0)])
    lesson.teach([example(0, drawing=1)])
    assert lesson.stage.names == ("character 0",)
    assert lesson.stage.hebbian.counts[-1] == 2
    (taught,) = lesson.describe()["taught"]
    assert len(taught["drawings"]) == 2


def test_every_act_can_be_undone(lesson: Lesson) -> None:
    lesson.teach([example(0)])
    lesson.teach([example(1)])
    for act in (
        lambda: lesson.teach([example(2)]),
        lambda: lesson.teach([example(0, drawing=3)]),
        lambda: lesson.forget("character 0"),
        lambda: lesson.rename("character 0", "other"),
        lambda: lesson.load([example(4)]),
    ):
        before, names = rows(lesson), lesson.stage.names
        act()
        assert lesson.stage.names != names or not same(lesson, before)
        lesson.undo()
        assert lesson.stage.names == names
        assert same(lesson, before)
    lesson.rename("character 1", "other")
    lesson.teach([example(3)])
    lesson.undo()
    lesson.undo()
    assert lesson.stage.names == ("character 0", "character 1")
    lesson.undo()
    lesson.undo()
    with pytest.raises(LessonError, match="nothing to undo"):
        lesson.undo()


def test_forgetting_leaves_the_hebbian_head_as_if_never_taught(lesson: Lesson, knowledge: Knowledge) -> None:
    other = Lesson(knowledge)
    for number in range(4):
        lesson.teach([example(number)])
        if number != 1:
            other.teach([example(number)])
    taught = lesson.stage.plain.weight
    lesson.forget("character 1")
    assert lesson.stage.names == other.stage.names
    assert torch.equal(lesson.stage.hebbian.weight, other.stage.hebbian.weight)
    assert torch.equal(lesson.stage.hebbian.counts, other.stage.hebbian.counts)
    assert torch.equal(lesson.stage.plain.weight[-3:], taught[[-4, -2, -1]])
    for name in lesson.stage.names:
        lesson.forget(name)
    assert lesson.stage.plain.out_features == lesson.stage.hebbian.num_classes == lesson.known


def test_names(lesson: Lesson) -> None:
    lesson.teach([example(0)])
    lesson.teach([example(1)])
    lesson.rename("character 0", "hook")
    assert lesson.stage.names == ("hook", "character 1")
    assert [each.name for each in lesson.stage.examples] == ["hook", "character 1"]
    with pytest.raises(LessonError, match="another character is called hook"):
        lesson.rename("character 1", "hook")
    with pytest.raises(LessonError, match="no character is called character 0"):
        lesson.forget("character 0")


def test_a_loaded_lesson_is_the_saved_one(lesson: Lesson, knowledge: Knowledge) -> None:
    for number in (0, 1, 0, 2):
        lesson.teach([example(number, drawing=number, replay=number == 1)])
    other = Lesson(knowledge)
    other.load(lesson.stage.examples)
    assert same(other, rows(lesson))


def test_a_full_lesson_takes_no_more(lesson: Lesson) -> None:
    before = rows(lesson)
    with pytest.raises(LessonError, match="room for 200 drawings"):
        lesson.teach([example(0)] * (MOST_TAUGHT + 1))
    assert same(lesson, before)


def test_a_mishap_while_teaching_changes_nothing(lesson: Lesson) -> None:
    lesson.teach([example(0)])
    before = rows(lesson)
    wrong = Example("wrong", torch.zeros(3, 3, dtype=torch.uint8), 1, False)
    with pytest.raises(RuntimeError):
        lesson.teach([example(1), wrong])
    assert same(lesson, before)
    assert lesson.stage.names == ("character 0",)


def test_lessons_do_not_disturb_each_other(lesson: Lesson, knowledge: Knowledge, tmp_path: Path) -> None:
    other = Lesson(knowledge)
    before = rows(other)
    trained = knowledge.head.weight.clone()
    lesson.teach([example(0)])
    assert same(other, before)
    assert torch.equal(knowledge.head.weight, trained)


def test_lessons_that_begin_with_one_head_do_not_disturb_each_other(knowledge: Knowledge) -> None:
    untaught = hebbian_head(knowledge)
    first, second, alone = Lesson(knowledge, untaught), Lesson(knowledge, untaught), Lesson(knowledge)
    first.teach([example(0)])
    for each in (second, alone):
        each.teach([example(1)])
    first.forget("character 0")
    first.load([example(1)])
    assert same(second, rows(alone))
    assert same(first, rows(alone))
    assert torch.equal(untaught.weight, hebbian_head(knowledge).weight)


def test_the_page_keeps_the_rule_that_it_was_measured_with(knowledge: Knowledge) -> None:
    head = hebbian_head(knowledge)
    assert (head.gamma, head.limit, head.write, head.start, head.fade) == (0.1, 50, "centred", 0, False)
