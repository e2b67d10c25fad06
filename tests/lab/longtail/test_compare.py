"""`hebbian compare longtail`: a fair comparison, and what is said about it."""

import copy
from dataclasses import replace

import torch

from hebbian_softmax import HebbianSoftmax
from hebbian_softmax.lab.base.rule import LITERAL_RULE
from hebbian_softmax.lab.longtail.compare import (
    EVALUATIONS,
    NAMES,
    Comparison,
    Settings,
    compare,
    draw,
    suggest,
    summarize,
    tabulate,
)

SMALL = Settings(classes=40, steps=20)


def weights(comparison: Comparison, name: str) -> list[torch.Tensor]:
    contender = comparison.contenders[name]
    return [*contender.network.parameters(), *contender.head.parameters()]


def in_float64(settings: Settings) -> Comparison:
    comparison = Comparison(settings)
    for contender in comparison.contenders.values():
        contender.network.double()
        contender.head.double()
    data = comparison.data
    comparison.data = replace(data, train_inputs=data.train_inputs.double(), test_inputs=data.test_inputs.double())
    return comparison


def test_both_start_from_the_same_weights_and_keep_them_without_the_rule() -> None:
    """With a limit of 0 the Hebbian head never writes. In float64 rounding stays far below the tolerance."""
    comparison = in_float64(Settings(classes=40, limit=0))
    for one, other in zip(weights(comparison, "plain"), weights(comparison, "hebbian"), strict=True):
        assert torch.equal(one, other)
    for _ in range(10):
        losses = comparison.train_step()
        torch.testing.assert_close(losses["plain_loss"], losses["hebbian_loss"], rtol=1e-9, atol=0)
    for one, other in zip(weights(comparison, "plain"), weights(comparison, "hebbian"), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-8)


def test_with_the_rule_they_differ() -> None:
    comparison = Comparison(replace(SMALL, start=0))
    comparison.train_step()
    assert not torch.equal(weights(comparison, "plain")[-1], weights(comparison, "hebbian")[-1])


def test_the_rule_is_the_one_that_was_asked_for() -> None:
    heads: dict[str, HebbianSoftmax] = {}
    for name, settings in (("usual", SMALL), ("other", replace(SMALL, gamma=0.3, limit=7, write="literal", start=2))):
        head = Comparison(settings).contenders["hebbian"].head
        assert isinstance(head, HebbianSoftmax)
        heads[name] = head
    found = [(head.gamma, head.limit, head.write, head.scale, head.start, head.fade) for head in heads.values()]
    assert found == [(0.2, 100, "across", "match", "auto", True), (0.3, 7, "literal", 1.0, 2, True)]


def test_the_log_says_once_when_writing_began() -> None:
    comparison = Comparison(Settings(classes=40, steps=50 * EVALUATIONS))
    head = comparison.contenders["hebbian"].head
    assert isinstance(head, HebbianSoftmax)
    assert head.settling is not None
    found = {}
    for step in (50, 100, 150, 200):
        comparison.batches.drawn = step
        if step == 150:
            head.settling.began.fill_(101)
        found[step] = comparison.evaluate().get("hebbian_write_began")
    assert found == {50: None, 100: None, 150: 101, 200: None}
    assert "began to write after 101 steps" in summarize(outcomes_with(0.0), SMALL, 101)
    assert "has not written anything" in summarize(outcomes_with(0.0), SMALL)
    assert "written" not in summarize(outcomes_with(0.0), replace(SMALL, start=0))


def test_continues_from_its_state() -> None:
    whole = Comparison(SMALL)
    for _ in range(3):
        whole.train_step()
    resumed = Comparison(SMALL)
    resumed.load_state_dict(copy.deepcopy(whole.state_dict()))  # as through a file
    for _ in range(3):
        assert whole.train_step() == resumed.train_step()
    assert whole.evaluate() == resumed.evaluate()


def test_other_seeds_are_other_tasks_weights_and_orders() -> None:
    one, other = Comparison(SMALL), Comparison(replace(SMALL, seed=1))
    assert not torch.equal(one.data.train_inputs, other.data.train_inputs)
    assert not torch.equal(weights(one, "plain")[0], weights(other, "plain")[0])
    assert not torch.equal(one.batches.next(), other.batches.next())


def test_accuracies_by_frequency_are_right() -> None:
    counts = torch.tensor([200, 50, 15, 5, 4])
    accuracies = {
        "plain": torch.tensor([1.0, 0.8, 0.6, 0.2, 0.0], dtype=torch.double),
        "hebbian": torch.tensor([0.9, 0.8, 0.6, 0.4, 0.6], dtype=torch.double),
    }
    outcomes = compare(counts, accuracies)
    assert {name: outcome["classes"] for name, outcome in outcomes.items()} == {
        "all classes": 5,
        "seen fewer than 10 times": 2,
        "seen 10 to 19 times": 1,
        "seen 20 to 99 times": 1,
        "seen 100 times and more": 1,
        "weighted by training frequency": 5,
    }
    error = 0.2 / 2**0.5  # deviations ±0.2, two classes
    rare = {"classes": 2, "plain": 0.1, "hebbian": 0.5, "difference": 0.4, "standard_error": error}
    torch.testing.assert_close(outcomes["seen fewer than 10 times"], rare)
    torch.testing.assert_close(outcomes["all classes"]["plain"], 0.52)
    weighted = (200 * 1.0 + 50 * 0.8 + 15 * 0.6 + 5 * 0.2) / 274
    torch.testing.assert_close(outcomes["weighted by training frequency"]["plain"], weighted)


def outcomes_with(difference: float) -> dict[str, dict[str, float]]:
    generator = torch.Generator().manual_seed(0)
    plain = 0.5 + 0.01 * torch.randn(400, generator=generator, dtype=torch.double)
    noise = 0.01 * torch.randn(400, generator=generator, dtype=torch.double)
    counts = (4 * 400 / torch.arange(1, 401)).round().long()
    return compare(counts, {"plain": plain, "hebbian": plain + noise - noise.mean() + difference})


def test_the_summary_is_honest() -> None:
    for difference, verdict in ((0.1, "Hebbian softmax is better"), (-0.1, "plain softmax is better")):
        summary = summarize(outcomes_with(difference), SMALL)
        assert summary.count(verdict) == 3  # all classes, rare ones, frequent ones
        assert "no clear difference" not in summary
        assert "one seed" in summary
    summary = summarize(outcomes_with(0.0), SMALL)
    assert "every class counting alike: Hebbian 50.0 %, plain 50.0 %: no clear difference" in summary


def test_the_table_has_both_and_their_difference() -> None:
    table = tabulate(outcomes_with(0.1))
    assert list(table.columns[2:4]) == list(NAMES.values())
    assert table.rows[0][0] == "all classes"
    assert str(table.rows[0][4]).startswith("+10.0 ± 0.")


def test_few_classes_have_no_frequent_bucket_and_still_a_summary() -> None:
    counts = (4 * 10 / torch.arange(1, 11)).round().long()
    accuracies = {name: torch.zeros(10, dtype=torch.double) for name in NAMES}
    outcomes = compare(counts, accuracies)
    assert "seen 100 times and more" not in outcomes
    assert "Classes seen 20 to 99 times: Hebbian 0.0 %" in summarize(outcomes, SMALL)


def test_predictions_are_made_in_parts_and_leave_the_mode_alone() -> None:
    comparison = in_float64(SMALL)
    contender, inputs = comparison.contenders["hebbian"], comparison.data.test_inputs
    whole = contender.head(contender.network(inputs)).argmax(dim=1)
    sizes, modes = [], []

    def watch(head: torch.nn.Module, _: object, logits: torch.Tensor) -> None:
        sizes.append(len(logits))
        modes.append(head.training)

    contender.head.register_forward_hook(watch)
    contender.network.eval()
    assert torch.equal(contender.predict(inputs, logits=40 * 150), whole)
    assert sizes == [150, 150, 100]
    assert not any(modes)
    assert contender.head.training
    assert not contender.network.training


def test_suggestions_keep_what_they_do_not_vary() -> None:
    commands = [step.partition("  # ")[0] for step in suggest(Settings(classes=40, seed=2**32 - 1, gamma=0.3))]
    assert commands == [
        "hebbian compare longtail --classes 40 --gamma 0.3",
        "hebbian compare longtail --steps 4500 --classes 40 --gamma 0.3 --seed 4294967295",
        "hebbian compare longtail --classes 40 --gamma 0.3 --write literal --rate paper --start 0 --no-fade "
        "--seed 4294967295",
    ]
    assert len(suggest(Settings(**LITERAL_RULE))) == 2  # what was just run is not suggested


def test_draws_what_the_log_has() -> None:
    full = {"plain_accuracy": 0.1, "hebbian_accuracy": 0.2, "plain_rare": 0.0, "hebbian_rare": 0.1}
    records = [{"step": 1, "plain_accuracy": None}, {"step": 2, "plain_accuracy": 0.5}, {"step": 3, **full}]
    for number in range(len(records) + 1):
        assert draw(records[:number]).startswith(b"\x89PNG")
