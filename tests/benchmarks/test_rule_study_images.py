"""The image tasks of the study train the laboratory's learners, and each variant does what it says."""

import math
import time
from typing import Any

import pytest
import torch
from benchmarks.rule_study import paired
from benchmarks.rule_study.images import Trial, librarys_head, train
from benchmarks.rule_study.plans import CHOSEN
from benchmarks.rule_study.write import Rule, Variant

from hebbian_softmax import HebbianSoftmax
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "task",
    [{"task": "longtail", "steps": 30}, {"task": "glyphs", "steps": 25}, {"task": "digits", "epochs": 5.0}],
    ids=["longtail", "glyphs", "digits"],
)
def test_the_librarys_head_is_plain_softmax_until_it_writes(task: dict[str, Any]) -> None:
    heads: tuple[dict[str, Any], ...] = ({}, {"library": {}}, {"library": {"start": 5, "limit": 100}})
    plain, waits, writes = (train(Trial.of(task | head), time.time() + 120) for head in heads)
    assert waits["trial"]["library"] == {}
    assert (plain["began"], waits["began"], writes["began"]) == (None, -1, None)  # it waits for at least 100 batches
    for part in ("test", "curve"):
        assert waits[part] == plain[part]
    assert writes["curve"] != plain["curve"]


@pytest.mark.slow
def test_the_librarys_head_writes_as_the_study_does() -> None:
    """The default's rate, line and shorter memories, in both programs; without an end at T, digits lose by them."""
    own = CHOSEN | {"limit": 10**9, "start_step": 20, "fade": False, "caught_up": 0.0}
    heads: tuple[dict[str, Any], ...] = ({}, own, {"library": {"limit": 10**9, "start": 20, "fade": False}})
    task: dict[str, Any] = {"task": "digits", "epochs": 10.0, "learning_rate": 0.016}
    plain, study, library = (train(Trial.of(task | head), time.time() + 60)["curve"] for head in heads)
    for ours, theirs in zip(study, library, strict=True):
        assert theirs == pytest.approx(ours, abs=1.0)
    assert library[-1][1] < plain[-1][1] - 5


def test_the_librarys_head_has_its_defaults_and_the_plain_heads_parameter() -> None:
    plain = torch.nn.Linear(4, 3, bias=False)
    optimizer = torch.optim.Adam(plain.parameters())
    state = torch.get_rng_state()
    head = librarys_head(plain, optimizer, {})
    assert torch.equal(torch.get_rng_state(), state)
    assert head.weight is plain.weight
    assert repr(head) == repr(HebbianSoftmax(4, 3))
    assert head.limit_grows()


def test_older_files_name_the_librarys_head_by_a_flag() -> None:
    older = Trial.of({"task": "digits", "library": True, "gamma": 0.1, "limit": 50.0})
    rule = {"write": "centred", "start": 0, "fade": False, "gamma": 0.1, "limit": 50}
    assert older.variant.library == rule
    assert Trial.of({"task": "digits", "library": False}) == Trial.of({"task": "digits"})


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


def test_a_first_write_takes_its_part_along_the_mean_from_a_line() -> None:
    """Rows seen 2 and 8 times have 1 and 2 along the mean, so one that was seen once has 0.5."""
    weight = torch.randn(3, 4)
    rule = Rule(Variant(write="across", base="line", gamma=0.0), weight, 1.0, 0)
    h = torch.randn(12, 4) + 3
    rule.after_step(h, torch.tensor([0] * 2 + [1] * 8 + [0, 1]), torch.zeros(12))
    rule.counts.copy_(torch.tensor([2.0, 8.0, 0.0]))
    direction = rule.mean / rule.mean.norm()
    weight.sub_((weight @ direction)[:, None] * direction)
    weight[:2] += torch.tensor([[1.0], [2.0]]) * direction
    rule.line.zero_(), rule.base_batches.zero_()
    rule.after_step(torch.randn(3, 4) + 3, torch.tensor([0, 1, 2]), torch.zeros(3))
    torch.testing.assert_close(float(weight[2] @ direction), 0.5, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("base", "count"), [("return", 9 / 8), ("aged", 15 / 13)])
def test_the_line_is_read_where_classes_would_be_that_come_as_often_as_those_seen_once(base: str, count: float) -> None:
    """Rows seen 1, 2 and 8 times have 0.5, 1 and 2 along the mean, which is 0.5 + log2(c) / 2.

    In four batches 0, 1, 1 and 1 of 0, 3, 3 and 2 classes came that had been seen once: 3/8 a batch, 9/8 in three.
    Those that came had waited 0, 1, 2 and 2 batches, and all of them 0, 1 + 1 + 1, 2 + 2 + 1 and 3 + 2: 5/13 a batch.
    """
    weight = torch.randn(5, 4)
    rule = Rule(Variant(write="across", base=base, gamma=0.0), weight, 1.0, 0)
    for batch in ([0, 1, 2], [1, 3], [2]):
        rule.after_step(torch.randn(len(batch), 4) + 3, torch.tensor(batch), torch.zeros(len(batch)))
    assert rule.counts.tolist() == [1, 2, 2, 1, 0]
    rule.counts.copy_(torch.tensor([1.0, 2.0, 8.0, 1.0, 0.0]))
    direction = rule.mean / rule.mean.norm()
    weight.sub_((weight @ direction)[:, None] * direction)
    weight[1:4] += torch.tensor([[1.0], [2.0], [0.5]]) * direction
    rule.line.zero_(), rule.base_batches.zero_()
    rule.after_step(torch.randn(4, 4) + 3, torch.tensor([1, 2, 3, 4]), torch.zeros(4))
    expected = 0.5 + math.log2(count) / 2
    torch.testing.assert_close(float(weight[4] @ direction), expected, rtol=1e-3, atol=1e-3)


def test_a_memory_of_one_occurrence_is_scaled_by_least_squares() -> None:
    """Rows of familiar classes have a product of 2 with activations, which scatter by 1 between classes, 3 within."""
    weight = torch.randn(2, 4)
    rule = Rule(Variant(write="centred", match="least squares"), weight, 1.0, 0)
    rule.after_step(torch.randn(6, 4), torch.zeros(6, dtype=torch.int64), torch.zeros(6))
    for value, number in ((rule.logit, 2.0), (rule.between, 1.0), (rule.within, 3.0), (rule.known_batches, 1.0)):
        value.fill_(number)
    mean, h = rule.mean.clone(), torch.randn(1, 4)
    rule.after_step(h, torch.tensor([1]), torch.zeros(1))
    torch.testing.assert_close(weight[1], 2 / (1 + 3 / 1) * (h[0] - mean))


@pytest.mark.parametrize("match", ["feature", "map", "map norm"])
def test_activations_are_mapped_as_those_of_familiar_classes_are_to_their_rows(match: str) -> None:
    """The rows of ten familiar classes are a fixed map of their activations; a new class is written as it says."""
    torch.manual_seed(0)
    factors = torch.tensor([0.5, 1.0, 2.0, 4.0])
    centres = torch.randn(11, 4) - 0.2
    weight = centres * factors
    weight[10] = 0
    variant = Variant(write="centred", match=match, limit=5, start_step=99)
    rule = Rule(variant, weight, 1.0, 0)
    rule.counts[:10] = 5
    for step in range(100):
        if step in (0, 50):
            rule.refresh()
        rule.mean.zero_()  # so that centring changes nothing
        rule.after_step(centres[:10], torch.arange(10), torch.zeros(10))
    rule.refresh()
    rule.mean.zero_()
    rule.after_step(centres[10:], torch.tensor([10]), torch.zeros(1))
    found, wanted = weight[10], centres[10] * factors
    assert torch.cosine_similarity(found, wanted, dim=0) > 0.999
    size = 1 if match == "map" else rule.row_norm / rule.mapped_norm
    torch.testing.assert_close(found, size * wanted, rtol=0.1, atol=0.1)


def test_time_can_run_out() -> None:
    with pytest.raises(TimeoutError, match="when the time was over"):
        train(Trial.of({"task": "longtail", "steps": STEPS}), time.time() - 1)


def test_a_table_has_the_seeds_that_both_heads_have() -> None:
    def run(seed: int, reached: list[int], **options: Any) -> dict[str, Any]:
        given = {"task": "glyphs", "seed": seed} | options
        found = {"test": {"classes": reached[-1]}, "curve": {"classes": reached}, "steps": 25 * len(reached)}
        return {"given": given, "began": 7, **found}

    results = [
        run(0, [30, 35, 40]),
        run(0, [30, 30, 50], library={}),
        run(1, [30, 35, 40]),
        run(1, [30, 35, 45], library={}),
        run(2, [30, 35, 40]),
        run(3, [30, 40, 60], write="centred"),
        run(0, [99, 99, 99]),  # of a later file
    ]
    heads = paired.heads_by_seed(results)["glyphs, 75 steps"]
    lines = list(paired.table("glyphs", heads["plain"], heads["{}"]))
    assert lines[2] == "| classes | 40.0 | 47.5 | +7.50 ± 31.77 | +10, +5 |"
    assert "Least mean difference at a check: -2.50 at [50]; of a single seed -5." in lines
    assert "The mean is behind at [50]." in lines
    assert "Seeds [0, 1]; writing began with batch [7, 7]." in lines


def test_a_first_write_raises_its_part_along_the_mean_by_how_often_classes_come() -> None:
    """Over three batches, 4 of 13 classes never seen came, and 3 of 5 classes seen once."""
    weight = torch.randn(6, 4)
    variant = Variant(write="across", base="rise", whole=True, rate="polynomial", gamma=3.0, prior=3.0)
    rule = Rule(variant, weight, 1.0, 0)
    rule.lr.fill_(1)
    for targets in ([0, 1], [2]):
        rule.after_step(torch.randn(len(targets), 4) + 3, torch.tensor(targets), torch.zeros(len(targets)))
    mean, before = rule.mean.clone(), weight.clone()
    direction = mean / mean.norm()
    h = torch.randn(4, 4) + 3
    rule.after_step(h, torch.tensor([0, 1, 2, 3]), torch.zeros(4))
    rise = math.log((3 / 5) / (4 / 13)) / mean.norm()
    torch.testing.assert_close(weight[3] @ direction, before[3] @ direction + rise)
    torch.testing.assert_close(weight[:3] @ direction, before[:3] @ direction)
    # One activation beside a row that counts as one: half of the change across the mean.
    change = 0.5 * (rule.row_norm / rule.mean_norm * (h[3] - mean) - before[3])
    across = change - (change @ direction) * direction
    found = weight[3] - before[3]
    torch.testing.assert_close(found - (found @ direction) * direction, across)


def test_a_memory_of_one_activation_changes_half_of_a_row() -> None:
    """A shorter memory takes all of the row away."""
    h, targets = torch.randn(1, 4) + 3, torch.tensor([0])
    for variant, kept in ((Variant(write="centred", shorten=1.0), 0.0), (Variant(write="centred", lessen=1.0), 0.5)):
        weight = torch.ones(2, 4)
        rule = Rule(variant, weight, 1.0, 0)
        rule.lr.fill_(1)
        rule.after_step(h, targets, torch.zeros(1))
        torch.testing.assert_close(weight[0], h[0] / 2 + kept)
