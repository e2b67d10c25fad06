"""A step equals literal training, both heads are treated alike, a state is gone on with, an epoch shows all windows."""

import copy
import io
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.language.learner import Learner, deterministic
from hebbian_softmax.lab.language.model import MODELS, LanguageModel
from hebbian_softmax.lab.language.names import HEBBIAN, ONLY, PLAIN
from hebbian_softmax.lab.language.settings import OPTIMIZERS, SCHEDULES, Settings
from hebbian_softmax.lab.language.task import Windows, WordsProgress, WordTask, learning_rate
from tests.lab.language.model.networks import out_of_memory, watch_lstm
from tests.lab.language.toy import WORDS, corpus, device, model, settings, widen

BOTH = {PLAIN: False, HEBBIAN: True}
IDS = torch.arange(1000, dtype=torch.int32)
SIZES = {"batch": 4, "length": 10, "seed": 3}


def task(heads: dict[str, bool] = BOTH, steps: int = 10, words: Any = None, **changes: Any) -> WordTask:
    return WordTask(words or corpus(), settings(Settings, **changes), heads, steps=steps, device=device())


def in_float64(task: WordTask) -> WordTask:
    for learner in task.learners.values():
        widen(learner.model)
    return task


def assert_equal(task: WordTask, equal: bool) -> None:
    pairs = zip(*(learner.model.parameters() for learner in task.learners.values()), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs) == equal


def test_plain_training_is_a_plain_loop() -> None:
    """The loop has only the network's features in common with the task; loss and optimizer are torch's own."""
    found = in_float64(task({ONLY: False}, optimizer="adam", clip=0.5, input_dropout=0.0, learning_rate=0.01))
    literal = widen(model(hebbian=False, input_dropout=0.0))
    optimizer = torch.optim.Adam(literal.parameters(), betas=(0.0, 0.999))
    for step in range(6):
        words = found.windows.at(step)
        features, _ = literal.features(words[:-1])
        loss = F.cross_entropy((features @ literal.head.weight.T).flatten(0, 1), words[1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(literal.parameters(), 0.5)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, peak=0.01, schedule="cosine", warmup=2, steps=10)
        optimizer.step()
        torch.testing.assert_close(found.train_step()["loss"], loss.detach())
    for one, other in zip(found.learners[ONLY].model.parameters(), literal.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_both_start_from_the_same_weights_and_differ_by_the_rule_alone() -> None:
    with_rule, without = task(), task(limit=0)
    assert_equal(with_rule, True)
    for _ in range(4):
        with_rule.train_step()
        losses = without.train_step()
        assert losses["plain_loss"] == losses["hebbian_loss"]  # dropout is the same, too
    assert_equal(with_rule, False)
    assert_equal(without, True)
    assert int(without.learners[HEBBIAN].model.head.counts.sum()) == 4 * 20


def test_the_rule_starts_where_it_is_told_to_and_counts_before() -> None:
    late = task(start=3)
    for step in range(4):
        assert_equal(late, True)
        assert int(late.learners[HEBBIAN].model.head.counts.sum()) == 20 * step
        late.train_step()
    assert_equal(late, False)


def test_the_rule_starts_by_itself_and_fades() -> None:
    found = task({HEBBIAN: True}, start="auto", fade=True, steps=20)
    head = found.learners[HEBBIAN].model.head
    assert found.evaluate_every == 7
    head.settling.began.fill_(3)
    told = {}
    for found.step in (7, 14, 20):
        told[found.step] = found.evaluate().get("hebbian_write_began")
    assert told == {7: 3, 14: None, 20: None}  # once
    found.step = 0
    head.settling.reset(begun=False)
    for _ in range(4):
        found.train_step()
    assert int(head.settling.batches) > 0
    assert "hebbian_write_began" not in found.evaluate()
    group = found.learners[HEBBIAN].optimizer.param_groups[0]
    assert float(group["highest_lr"]) == pytest.approx(max(float(group["lr"]), float(group["highest_lr"])))
    assert not head.since_start.any()
    assert int(head.counts.sum()) == 4 * 20


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_learns_and_memorises(name: str) -> None:
    found = task(optimizer=name, learning_rate=0.02, input_dropout=0.0, steps=60, schedule="constant")
    losses = [found.train_step() for _ in range(60)]
    for name in BOTH:
        values = torch.stack([each[f"{name.log_prefix}loss"] for each in losses])
        assert values[-10:].mean() < values[:10].mean()
    assert int(found.learners[HEBBIAN].model.head.counts.sum()) == 60 * 20
    assert int(found.learners[PLAIN].model.head.counts.sum()) == 0


def test_one_pass_adam_is_adam() -> None:
    one, other = in_float64(task(optimizer="adam")), in_float64(task(optimizer="one-pass-adam"))
    for _ in range(4):
        expected, found = one.train_step(), other.train_step()
        for name in expected:
            torch.testing.assert_close(found[name], expected[name])


@pytest.mark.parametrize("hebbian", [True, False])
def test_a_batch_in_parts_is_the_batch(hebbian: bool) -> None:
    tasks = [in_float64(task({ONLY: hebbian}, accumulate=parts, input_dropout=0.0)) for parts in (1, 4)]
    for _ in range(3):
        torch.testing.assert_close(*(each.train_step() for each in tasks))
    torch.testing.assert_close(*(dict(each.learners[ONLY].model.state_dict()) for each in tasks))


def test_clipping_bounds_the_gradient() -> None:
    learner = Learner(settings(clip=1e-3, optimizer="sgd"), WORDS, hebbian=False, device=device())
    widen(learner.model)
    before = {name: value.clone() for name, value in learner.model.named_parameters()}
    learner.step(task().windows.at(0), 1.0)
    moved = torch.stack([(value - before[name]).norm() for name, value in learner.model.named_parameters()]).norm()
    assert moved.item() == pytest.approx(1e-3, rel=1e-2)  # torch adds 1e-6 to the norm


def test_a_carried_state_is_that_of_the_sequence_before_and_each_epoch_begins_without_one() -> None:
    given = {"batch": 20, "carry": True, "optimizer": "sgd", "input_dropout": 0.0, "clip": 0.0, "warmup": 0}
    found, parts = (in_float64(task({ONLY: True}, **given, accumulate=number)) for number in (1, 4))
    for learner in (found.learners[ONLY], parts.learners[ONLY]):  # their states in float64, too
        learner.carried = [learner.model.first_state(20 // learner.accumulate) for _ in range(learner.accumulate)]
    literal = widen(model(hebbian=True, input_dropout=0.0))
    optimizer = torch.optim.SGD(literal.parameters())
    literal.head.attach(optimizer)
    assert found.windows.epoch_steps == 7
    schedule = {"peak": found.settings.sizes.learning_rate, "schedule": "cosine", "warmup": 0, "steps": 10}
    state = None
    for step in range(9):
        words = found.windows.at(step)
        features, state = literal.features(words[:-1], None if step == 7 else state)
        state = [tuple(each.detach() for each in layer) for layer in state]
        loss = literal.head.loss(features, words[1:])
        optimizer.zero_grad()
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, **schedule)
        optimizer.step()
        losses = [each.train_step()["loss"] for each in (found, parts)]
        torch.testing.assert_close(losses, 2 * [loss.detach()])
    torch.testing.assert_close(dict(found.learners[ONLY].model.state_dict()), dict(literal.state_dict()))


def test_in_order_the_columns_read_parts_of_the_text() -> None:
    windows = Windows(IDS, **SIZES, in_order=True)
    words = torch.cat([windows.at(step)[:-1] for step in range(windows.epoch_steps)])
    assert torch.equal(words - words[0], torch.arange(240).unsqueeze(1).expand(240, 4))
    assert (words[0, 1:] - words[-1, :-1]).tolist() == [1, 1, 1]
    assert len({int(windows.starts(epoch)[0]) for epoch in range(8)}) > 2


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": "one-pass-adam"},
        {"optimizer": "rmsprop"},
        {"carry": True, "accumulate": 2, "recurrent_dropout": 0.5, "locked_dropout": True, "output_dropout": 0.5},
    ],
    ids=["adam", "rmsprop", "strong"],
)
def test_continues_from_its_state(changes: dict[str, Any]) -> None:
    whole = task(**changes)
    for _ in range(3):
        whole.train_step()
    resumed = task(**changes)
    resumed.load_state_dict(copy.deepcopy(whole.state_dict()))
    torch.rand(7)  # other random numbers must not matter
    for _ in range(3):
        assert whole.train_step() == resumed.train_step()
    one, other = whole.evaluate(), resumed.evaluate()
    assert one == {**other, "words_per_second": one["words_per_second"]}
    assert one["words"] == 6 * 20


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"words": corpus(tokens=900)}, LabError, r"of a model of other words .*zipf .*start a new run"),
        ({"heads": {ONLY: True}}, ValueError, "it has the models"),
        ({"hidden": 9}, RuntimeError, "size mismatch"),
    ],
)
def test_a_checkpoint_of_other_words_or_models_is_refused(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        task(**changes).load_state_dict(task().state_dict())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"accumulate": 3}, "give --batch a multiple of 3"),
        ({"optimizer": "one-pass-rmsprop", "momentum": 0.5}, "has no momentum"),
        (
            {"model": "transformer", "embedding": 16, "carry": True},
            "state of --model transformer cannot be carried",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_one_clear_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LabError, match=message):
        task(**changes)


def test_presets_and_what_overrides_them() -> None:
    paper = Settings(preset="paper").sizes
    assert (paper.layers, paper.hidden, paper.embedding, paper.batch, paper.sequence) == (1, 2048, 512, 512, 100)
    assert Settings(preset="paper", hidden=1024).sizes.hidden == 1024
    assert Settings(preset="tiny", layers=2).sizes.layers == 2
    assert (paper.learning_rate, Settings(preset="paper", learning_rate=0.1).sizes.learning_rate) == (0.002, 0.1)


def test_a_device_too_small_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    watch_lstm(monkeypatch, out_of_memory)
    found = task()
    with pytest.raises(LabError, match="too small for a step: --accumulate 2"):
        found.train_step()
    with pytest.raises(LabError, match="too small for an evaluation beside training: --accumulate 2"):
        found.evaluate()
    monkeypatch.setitem(MODELS, "lstm", type("TooLarge", (LanguageModel,), {"__init__": out_of_memory}))
    with pytest.raises(LabError, match="too small for the model: take a smaller --hidden"):
        task()


@pytest.mark.parametrize(
    ("schedule", "warmup", "expected"),
    [
        ("constant", 2, [1, 2, 2, 2, 2, 2]),
        ("linear", 2, [1, 2, 2, 1.5, 1, 0.5]),
        ("cosine", 2, [1, 2, *(1 + math.cos(math.pi * done / 4) for done in range(4))]),
        *((schedule, 10, [0.2, 0.4, 0.6, 0.8, 1.0]) for schedule in SCHEDULES),  # the run ends in its warm-up
        *((schedule, 0, [2]) for schedule in SCHEDULES),
    ],
)
def test_warm_up_then_the_schedule(schedule: str, warmup: int, expected: list[float]) -> None:
    options = {"peak": 2.0, "schedule": schedule, "warmup": warmup, "steps": len(expected)}
    assert [learning_rate(step, **options) for step in range(len(expected))] == pytest.approx(expected)


def test_progress_is_in_words_and_leaves_the_buckets_out() -> None:
    stream = io.StringIO()
    with WordsProgress("toy", step_words=500, total=10, start=2, stream=stream) as progress:
        assert progress.done == 1000
        progress.update(4, {"loss": 1.5, "valid_perplexity": 30.0, "valid_perplexity_<100": 4000.0, "words": 7})
        progress.update(10)
    assert stream.getvalue() == "toy: 100 %, perplexity 30\n"


def test_progress_of_two_models_fits_80_columns() -> None:
    progress = WordsProgress("wikitext-2", step_words=51_200, total=20_000, quiet=True)
    progress.update(3, {"plain_valid_perplexity": 12_162.4, "hebbian_valid_perplexity": 8_909.6, "plain_loss": 9.0})
    assert progress.line(527_000.0) == "wikitext-2: 0 %, 527,000/s, 32:23 left, perplexity 12,162 plain, 8,910 hebbian"
    assert len(progress.line(527_000.0)) <= 80


def test_a_terminal_is_redrawn_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing more often would wait for the GPU more often."""
    stream = io.StringIO()
    stream.isatty = lambda: True  # type: ignore[method-assign]
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    with WordsProgress("toy", step_words=5, total=10, stream=stream) as progress:
        assert progress.due()
        progress.update(1, {})
        now += 0.9
        assert not progress.due()
        now += 0.2
        assert progress.due()


def test_deterministic_is_for_the_run_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    with deterministic(True):
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
    with deterministic(False):
        assert not torch.are_deterministic_algorithms_enabled()


def test_an_epoch_shows_neighbouring_windows_once_each() -> None:
    windows = Windows(IDS, **SIZES)
    seen = torch.cat([windows.at(step) for step in range(windows.epoch_steps)], dim=1)
    assert seen.dtype == torch.int64
    assert seen.shape == (11, 4 * windows.epoch_steps)
    assert torch.equal(seen - seen[0], torch.arange(11).unsqueeze(1).expand_as(seen))  # consecutive words of the text
    firsts = seen[0].sort().values
    assert len(set(firsts.tolist())) == len(firsts) == 96  # of 99 windows, the last three do not fill a batch
    assert len({int(first) % 10 for first in firsts}) == 1
    assert seen.max() < 1000


def test_epochs_differ_in_order_and_offset() -> None:
    windows = Windows(IDS, **SIZES)
    orders = [windows.starts(epoch) for epoch in range(8)]
    assert len({int(order[0]) % 10 for order in orders}) > 2
    assert not torch.equal(orders[0] // 10, orders[1] // 10)


def test_a_step_follows_from_its_number_and_the_seed() -> None:
    one, other = (Windows(IDS, **SIZES) for _ in range(2))
    for step in (0, 1, 30, 5):  # forwards and backwards
        one.at(step)
    assert torch.equal(one.at(7), other.at(7))
    assert not torch.equal(one.at(7), Windows(IDS, **{**SIZES, "seed": 4}).at(7))


def test_ranks_share_the_batch_by_columns() -> None:
    whole = Windows(IDS, **SIZES).at(5)
    parts = [Windows(IDS, **SIZES, rank=rank, ranks=2).at(5) for rank in range(2)]
    assert torch.equal(torch.cat(parts, dim=1), whole)


@pytest.mark.parametrize("length", [0, 9, 11, 49])
def test_a_text_too_short_for_a_batch_is_one_clear_line(length: int) -> None:
    with pytest.raises(LabError, match=rf"text X has {length} words, too few .* needs 50: give --batch"):
        Windows(IDS[:length], **SIZES, name="text X")
    assert Windows(IDS[:50], **SIZES).at(3).max() < 50
