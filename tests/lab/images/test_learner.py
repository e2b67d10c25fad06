"""The curriculum's bookkeeping, and the learner against a slow literal version of the paper's section 4.1."""

import copy
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from hebbian_softmax import RecentRate
from hebbian_softmax.lab.base.rule import LITERAL_RULE, RULE_BEFORE
from hebbian_softmax.lab.base.seeds import derive_seed
from hebbian_softmax.lab.images.convnet import augment, convnet
from hebbian_softmax.lab.images.curriculum import History
from hebbian_softmax.lab.images.data import TEST_DRAWINGS
from hebbian_softmax.lab.images.fleet import Runner
from hebbian_softmax.lab.images.learner import Learner, Method
from hebbian_softmax.lab.images.reproduce import beyond
from tests.lab.images.toys import toy_set

DATA = toy_set(40)
TUNED = Method(hebbian=True, learning_rate=3e-3, limit=20, start=3)
LITERAL = Method(hebbian=True, learning_rate=3e-3, limit=3, scale=1.0, **LITERAL_RULE)
PLAIN = Method(hebbian=False, learning_rate=3e-3)


def small(method: Method, seed: int = 0, threshold: float = 60) -> Learner:
    return Learner(DATA, method, seed, filters=4, threshold=threshold)


@pytest.fixture
def _float64() -> Iterator[None]:
    """Compute in float64, so that rounding decides no answer and stays far below a tolerance."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def test_a_history_knows_its_levels() -> None:
    history = History(30, [0.5, 0.7, 0.7, 0.1], [30, 35, 40, 40])
    assert history.steps == [25, 50, 75, 100]
    assert history.levels() == [(30, 50), (35, 75)]
    assert history.steps_per_level() == [(30, 50), (35, 25)]
    assert [history.steps_to(classes) for classes in (30, 31, 35, 36, 41)] == [0, 50, 50, 75, None]
    assert [history.classes_at(step) for step in (0, 25, 50, 74, 75, 1000)] == [30, 30, 35, 35, 40, 40]
    again = History(0)
    again.load_state_dict(history.state_dict())
    assert again == history
    assert History(30).reached == 30


def literal(method: Method, seed: int, rounds: int, steps: int, threshold: float) -> tuple[list, torch.Tensor]:
    """Follow sections 3.1 and 4.1 in loops over single classes, images and rows."""
    order = torch.randperm(40, generator=torch.Generator().manual_seed(derive_seed(seed, "order"))).tolist()
    draws = torch.Generator().manual_seed(derive_seed(seed, "weights"))
    network = convnet(4, draws)
    theta = torch.nn.Parameter(torch.nn.init.xavier_uniform_(torch.empty(40, 4), generator=draws))
    optimizer = torch.optim.RMSprop([*network.parameters(), theta], lr=method.learning_rate)
    chance = torch.Generator().manual_seed(derive_seed(seed, "draws"))
    active, counts, seen = 30, [0] * 40, []
    for _ in range(rounds):
        for _ in range(steps):
            labels = [int(number * active) for number in torch.rand(32, generator=chance).tolist()]
            which = [int(number * 15) for number in torch.rand(32, generator=chance).tolist()]
            drawings = [DATA.train[order[label], number] for label, number in zip(labels, which, strict=True)]
            h = network(augment(torch.stack(drawings).unsqueeze(1), chance))
            kept = torch.rand(32, 4, generator=chance) >= 0.2
            optimizer.zero_grad()
            F.cross_entropy(h * kept / 0.8 @ theta.T, torch.tensor(labels)).backward()
            optimizer.step()
            for label in sorted(set(labels)) if method.hebbian else ():
                rate = max(1 / max(counts[label], 1), method.gamma) if counts[label] < method.limit else 0.0
                mean = h.detach()[[each == label for each in labels]].mean(dim=0)
                theta.data[label] = rate * mean + (1 - rate) * theta.data[label]
                counts[label] += labels.count(label)
        network.eval()
        right = 0
        for label in range(active):
            for image in DATA.test[order[label]]:
                with torch.no_grad():
                    right += int((theta @ network(image[None, None] / 255)[0]).argmax()) == label
        network.train()
        accuracy = right / (5 * active)
        active = min(active + 5, 40) if accuracy > threshold else active
        seen.append((pytest.approx(accuracy), active))
    return seen, theta.detach()


@pytest.mark.usefixtures("_float64")
@pytest.mark.parametrize("method", [PLAIN, LITERAL])
def test_a_learner_is_the_slow_literal_version(method: Method) -> None:
    expected, theta = literal(method, 7, rounds=4, steps=6, threshold=0.02)
    runner = Runner(small(method, 7, threshold=2))
    found = []
    for _ in range(4):
        runner.steps(6)
        runner.check()
        found.append(runner.read())
    assert found == expected
    assert any(classes > 30 for _, classes in found)  # some levels, or nothing was tested
    torch.testing.assert_close(runner.learner.head.weight.detach(), theta, rtol=0, atol=1e-7)


def test_exactly_the_threshold_is_not_enough_and_one_check_is_one_level(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = small(PLAIN)
    for right, classes in ((90, 30), (91, 35), (105, 35), (175, 40), (200, 40)):  # of 150, 150, 175, 175, 200
        monkeypatch.setattr(learner, "right_answers", lambda _, right=right: torch.tensor(right))
        learner.check(40)
        assert learner.outcome[1] == classes
        assert learner.active == classes


def test_a_check_counts_what_it_recognised_of_each_class() -> None:
    learner = small(PLAIN)
    weights_after(learner, steps=20)
    right = learner.right_answers(40)
    assert 0 < right == learner.recognised.sum()
    assert not learner.recognised[30:].any()  # these classes are not active
    learner.network.eval()
    for label in range(30):
        images = DATA.test[int(learner.order[label])]
        with torch.no_grad():
            guesses = learner.head(learner.network(images.unsqueeze(1) / 255)).argmax(dim=1)
        assert learner.recognised[label] == (guesses == label).sum()


def test_labels_stay_among_the_active_classes() -> None:
    learner = small(PLAIN)
    drawn = torch.cat([learner.uniform(1000, learner.active) for _ in range(20)])
    assert drawn.unique().tolist() == list(range(30))


def test_both_heads_start_alike_and_seeds_differ() -> None:
    one, other = small(PLAIN), small(LITERAL)
    for first, second in zip(one.network.parameters(), other.network.parameters(), strict=True):
        assert torch.equal(first, second)
    assert torch.equal(one.head.weight, other.head.weight)
    assert torch.equal(one.order, other.order)
    elsewhere = small(PLAIN, seed=1)
    assert not torch.equal(one.order, elsewhere.order)
    assert not torch.equal(one.head.weight, elsewhere.head.weight)
    assert not torch.equal(one.uniform(9, 1000), elsewhere.uniform(9, 1000))


def weights_after(learner: Learner, steps: int = 3) -> torch.Tensor:
    for _ in range(steps):
        learner.step()
    learner.check(30)
    parameters = [*learner.network.parameters(), learner.head.weight]
    return torch.cat([parameter.detach().flatten() for parameter in parameters])


def test_the_same_seed_gives_the_same_bits_also_from_its_state() -> None:
    whole, resumed = small(LITERAL), small(LITERAL)
    assert torch.equal(weights_after(whole), weights_after(small(LITERAL)))
    resumed.load_state_dict(copy.deepcopy(whole.state_dict()))
    assert torch.equal(weights_after(whole), weights_after(resumed))
    assert torch.equal(whole.outcome, resumed.outcome)


METHODS = {name: method for name, (_, method) in beyond(PLAIN, TUNED).items()} | {"plain": PLAIN, "tuned": TUNED}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Learner]:
    learners = {name: small(method) for name, method in METHODS.items()}
    for learner in learners.values():
        weights_after(learner, steps=12)
    return learners


@pytest.mark.parametrize("name", METHODS)
def test_each_variant_learns_in_a_way_of_its_own(outcomes: dict[str, Learner], name: str) -> None:
    learner = outcomes[name]
    assert learner.head.weight.isfinite().all()
    assert int(learner.head.counts.sum()) == (12 * 32 if learner.method.hebbian else 0)
    for other, another in outcomes.items():
        same = torch.equal(learner.head.weight, another.head.weight)
        assert same == (name == other or {name, other} == {"plain", "class-means"}), other


def test_the_default_is_that_of_the_library() -> None:
    head = small(Method(hebbian=True)).head
    assert (head.gamma, head.limit, head.write, head.scale) == (0.2, 100, "across", "match")
    assert (head.start, head.fade, head.rate) == ("auto", True, RecentRate(0.2))
    assert small(Method(hebbian=False)).head.settling is None  # plain softmax measures nothing


def test_the_variants_of_the_write_and_its_timing() -> None:
    variants = {name: method for name, (_, method) in beyond(PLAIN, Method(hebbian=True)).items()}
    rules = {name: (each.write, each.scale, each.start, each.fade) for name, each in variants.items()}
    assert rules["literal"] == ("literal", 1.0, 0, False)
    assert rules["scale"] == ("literal", "match", "auto", True)
    assert rules["center"] == ("centred", 1.0, "auto", True)
    assert rules["centred"] == ("centred", "match", "auto", True)
    assert rules["centred-at-once"] == ("centred", "match", 0, False)
    assert rules["at-once"] == ("across", "match", 0, False)
    before = Method(hebbian=True, gamma=0.1, limit=50, **RULE_BEFORE)
    assert not {"centred", "centred-at-once", "at-once"} & beyond(PLAIN, before).keys()  # they are the rule itself


def test_what_was_written_is_counted_but_not_classes_that_were_familiar_before() -> None:
    assert small(PLAIN).writes() == (None, None)
    learner = small(Method(hebbian=True, start=3, limit=2))
    for _ in range(3):
        learner.step()
    familiar = learner.head.counts >= 2
    assert learner.writes() == (None, 0)
    for _ in range(3):
        learner.step()
    seen_later = learner.head.since_start > 0
    assert learner.writes() == (None, int((seen_later & ~familiar).sum()))
    assert (seen_later & familiar).any()


def test_rows_without_a_gradient_are_the_rules_alone() -> None:
    learner = small(METHODS["rule-only"])
    before = learner.head.weight.detach().clone()
    learner.step()
    written = learner.head.counts > 0
    assert torch.equal(learner.head.weight[~written], before[~written])
    assert not torch.equal(learner.head.weight[written], before[written])


def test_imprinting_writes_a_row_once() -> None:
    learner = small(METHODS["imprinting"])
    rate = learner.head.mixing_rate(torch.tensor([0, 1, 5]), torch.ones(3, dtype=torch.long))
    assert rate.tolist() == [1.0, 0.0, 0.0]


def test_an_active_only_head_never_answers_or_trains_another_class() -> None:
    learner = small(Method(hebbian=False, active_only=True))
    before = learner.head.weight.detach().clone()
    learner.step()
    assert torch.equal(learner.head.weight[30:], before[30:])
    features = torch.randn(50, 4)
    assert learner.logits(features).argmax(dim=1).max() < 30
    assert not torch.equal(learner.head.weight[:30], before[:30])


@pytest.mark.parametrize("hebbian", [False, True])
def test_classes_never_seen_are_not_trained_and_answer_checks_only_if_they_may(hebbian: bool) -> None:
    learner = small(Method(hebbian=hebbian, seen_only=True))
    before = learner.head.weight.detach().clone()
    for _ in range(3):
        learner.step()
    seen = learner.head.counts > 0
    assert 0 < int(seen.sum()) <= 30
    assert torch.equal(learner.head.weight[~seen], before[~seen])
    assert not torch.equal(learner.head.weight[seen], before[seen])
    features = torch.randn(50, 4)
    learner.head.eval()
    assert learner.logits(features).isfinite().all()  # checks are over all classes
    learner = small(Method(hebbian=hebbian, seen_only=True, checks_seen_only=True))
    learner.step()
    learner.head.eval()
    assert (learner.head.counts[learner.logits(features).argmax(1)] > 0).all()


def test_a_plain_head_that_counts_learns_the_same() -> None:
    """Only the mask may tell the baseline with a mask from plain softmax."""
    plain, counting = small(PLAIN), small(replace(PLAIN, checks_seen_only=True))
    for _ in range(3):
        plain.step()
        counting.step()
    assert torch.equal(plain.head.weight, counting.head.weight)
    assert int(counting.head.counts.sum()) == 3 * 32


@pytest.mark.usefixtures("_float64")
def test_nearest_class_means() -> None:
    learner = small(METHODS["class-means"])
    learner.network.eval()
    with torch.no_grad():
        means = learner.class_means(32)
        expected = learner.network(DATA.train[learner.order[3]].unsqueeze(1) / 255).mean(dim=0)
    torch.testing.assert_close(means[3], expected, rtol=0, atol=1e-12)
    assert (means[30:] == 1e6).all()


def test_further_steps_are_for_classes_seen_seldom() -> None:
    method = Method(hebbian=False, learning_rate=0.0, extra_steps=2, limit=1)
    learner = small(method)
    taken: list[list[float]] = []
    descend = learner.descend

    def watch(inputs: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
        if weights is not None:
            taken.append(weights.tolist())
        return descend(inputs, labels, weights)

    learner.descend = watch  # type: ignore[method-assign]
    learner.step()
    assert taken == 2 * [[1.0] * 32]
    for _ in range(10):
        learner.step()
    assert taken[-1] == [0.0] * 32 or sum(taken[-1]) < 8
    assert int(learner.seen.sum()) == 11 * 32


def test_images_of_another_shape_are_learned() -> None:
    learner = Learner(toy_set(40, drawings=12, size=32), TUNED, 0, filters=4)
    weights_after(learner)
    assert learner.head.in_features == 4 * 2 * 2
    assert int(learner.head.counts.sum()) == 3 * 32


@pytest.mark.parametrize("active_only", [False, True])
def test_answers_are_those_that_a_check_counts(active_only: bool) -> None:
    learner = small(Method(hebbian=False, active_only=active_only))
    for _ in range(3):
        learner.step()
    labels = learner.labels[: int(learner.active)]
    before = {name: value.clone() for name, value in learner.network.state_dict().items()}
    answers = learner.answers(labels)
    learner.network.eval()
    images = learner.images[learner.order[labels], 0].unsqueeze(1) / 255
    probabilities = learner.logits(learner.network(images)).softmax(1)
    assert [answer.right for answer in answers] == (probabilities.argmax(1) == labels).tolist()
    for answer, row in zip(answers, probabilities, strict=True):
        assert answer.probability == pytest.approx(float(row.detach().max()))
        guess = int(row.argmax())
        assert torch.equal(answer.example, learner.images[learner.order[guess], TEST_DRAWINGS])
    for name, value in learner.network.state_dict().items():
        assert torch.equal(value, before[name])
