"""The benchmark of one drawing each: its methods on a small network, and its lessons beside those of the page."""

import pytest
import torch
from benchmarks.one_drawing import (
    METHODS,
    Manner,
    Subject,
    embed,
    halves,
    imprint,
    lessons,
    measure,
    outcome,
    teach_hebbian,
    teach_plain,
)

from hebbian_softmax.lab.play.lesson import LEARNING_RATE_WITH_REPLAY, Example, Lesson, hebbian_head
from hebbian_softmax.lab.play.network import Knowledge, divide, prepare
from tests.lab.images.toys import toy_set

KNOWN, UNSEEN = divide(toy_set(classes=60, noise=0.03))


@pytest.fixture(scope="module")
def knowledge(tmp_path_factory: pytest.TempPathFactory) -> Knowledge:
    return prepare(KNOWN, 20, 0, lambda done, total: None, cache_dir=tmp_path_factory.mktemp("networks"))


def test_alphabets_are_divided() -> None:
    names = ["b/character1", "a/character1", "d/character1", "a/character2", "c/character1"]
    assert halves(names) == ([0, 1, 3], [2, 4])


def test_the_benchmark_teaches_as_the_page_does(knowledge: Knowledge) -> None:
    drawings = UNSEEN.images[:4, 0]
    h = torch.cat([knowledge.embed(drawing.unsqueeze(0)) for drawing in drawings])
    lesson = Lesson(knowledge)
    for number, drawing in enumerate(drawings):
        lesson.teach([Example(str(number), drawing, 2, True)])
    layer = teach_plain(knowledge, h, Manner(LEARNING_RATE_WITH_REPLAY, 2, True))
    assert torch.equal(layer.weight, lesson.stage.plain.weight)  # type: ignore[attr-defined]
    head = teach_hebbian(hebbian_head(knowledge), h)
    assert torch.equal(head.weight, lesson.stage.hebbian.weight)  # type: ignore[attr-defined]


def test_accuracies_are_counted_right() -> None:
    own = torch.eye(4)[:3].unsqueeze(1)  # three known classes, one drawing each
    later = torch.eye(4)[[3, 2]].unsqueeze(1)  # of two taught classes

    def scores(shown: torch.Tensor) -> torch.Tensor:
        return torch.cat([shown[:, :3], shown[:, 3:], torch.full((len(shown), 1), 0.5)], dim=1)

    assert outcome(scores, later, own) == (1.0, 0.5, 1.0)


def test_every_method_is_measured(knowledge: Knowledge) -> None:
    subject = Subject(knowledge, embed(knowledge, UNSEEN.images), embed(knowledge, KNOWN.test))
    chosen = {name: {"learning_rate": 0.1, "steps": 2} for name in ("plain", "replay")}
    found = measure(subject, list(range(50)), 0, 2, chosen)
    assert set(found) == {"own_before", *METHODS}
    for name in METHODS:
        assert all(0 <= share <= 1 for share in found[name])
        assert found[name][0] >= found[name][1]
    assert found["means"][0] > 0.5
    (h, later), _ = lessons(subject, list(range(50)), 0, 2)
    assert h.shape[0] == 20
    assert later.shape[:2] == (20, 5)
    assert imprint(knowledge, h)(later[:, 0]).shape == (20, len(KNOWN.images) + 20)
