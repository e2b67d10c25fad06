"""A step equals literal training, both heads of a comparison are treated alike, and a saved state is gone on with."""

import copy
import io
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.language.learner import Learner, deterministic, make_model
from hebbian_softmax.lab.language.model import MODELS
from hebbian_softmax.lab.language.names import HEBBIAN, ONLY, PLAIN, ModelName
from hebbian_softmax.lab.language.settings import OPTIMIZERS, SCHEDULES, Settings
from hebbian_softmax.lab.language.task import WordsProgress, WordTask, learning_rate
from tests.lab.language.model.networks import out_of_memory, watch_lstm
from tests.lab.language.toy import WORDS, corpus, device, settings, widen

BOTH = {PLAIN: False, HEBBIAN: True}


def task(heads: dict[str, bool] = BOTH, steps: int = 10, words: Any = None, **changes: Any) -> WordTask:
    given = settings(Settings, **changes)
    return WordTask(words or corpus(), given, heads, steps=steps, device=device())


def in_float64(task: WordTask) -> WordTask:
    for learner in task.learners.values():
        widen(learner.model)
    return task


def weights(task: WordTask, name: ModelName) -> dict[str, torch.Tensor]:
    return dict(task.learners[name].model.named_parameters())


def assert_equal(task: WordTask, equal: bool) -> None:
    pairs = zip(weights(task, PLAIN).values(), weights(task, HEBBIAN).values(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs) == equal


def test_plain_training_is_a_plain_loop() -> None:
    """The loop has only the network's features in common with the task; loss and optimizer are torch's own."""
    found = in_float64(task({ONLY: False}, optimizer="adam", clip=0.5, input_dropout=0.0, learning_rate=0.01))
    literal = widen(make_model(found.settings, WORDS, hebbian=False, device=device()))
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
    learners = [
        Learner(settings(accumulate=parts, input_dropout=0.0), WORDS, hebbian=hebbian, device=device())
        for parts in (1, 4)
    ]
    for learner in learners:
        widen(learner.model)
    windows = task().windows
    for step in range(3):
        losses = [learner.step(windows.at(step), 0.01, memorizing=True) for learner in learners]
        torch.testing.assert_close(losses[0], losses[1])
    whole, parts = (dict(learner.model.state_dict()) for learner in learners)
    for name, value in whole.items():
        torch.testing.assert_close(parts[name], value)


def test_clipping_bounds_the_gradient() -> None:
    learner = Learner(settings(clip=1e-3, optimizer="sgd"), WORDS, hebbian=False, device=device())
    widen(learner.model)
    before = {name: value.clone() for name, value in learner.model.named_parameters()}
    learner.step(task().windows.at(0), 1.0, memorizing=True)
    moved = torch.stack([(value - before[name]).norm() for name, value in learner.model.named_parameters()]).norm()
    torch.testing.assert_close(
        moved, torch.tensor(1e-3, dtype=torch.float64), rtol=1e-2, atol=0
    )  # torch adds 1e-6 to the norm


@pytest.mark.parametrize("name", ["one-pass-adam", "rmsprop"])
def test_continues_from_its_state(name: str) -> None:
    whole = task(optimizer=name)
    for _ in range(3):
        whole.train_step()
    resumed = task(optimizer=name)
    resumed.load_state_dict(copy.deepcopy(whole.state_dict()))
    torch.rand(7)  # other random numbers must not matter
    for _ in range(3):
        assert whole.train_step() == resumed.train_step()
    one, other = whole.evaluate(), resumed.evaluate()
    one.pop("words_per_second")
    other.pop("words_per_second")
    assert one == other
    assert one["words"] == 6 * 20


def test_a_checkpoint_of_other_words_is_refused() -> None:
    state = task().state_dict()
    with pytest.raises(LabError, match=r"of a model of other words .*zipf .*start a new run"):
        task(words=corpus(tokens=900)).load_state_dict(state)


def test_a_checkpoint_of_other_models_is_refused() -> None:
    state = task().state_dict()
    with pytest.raises(ValueError, match="it has the models"):
        task({ONLY: True}).load_state_dict(state)
    with pytest.raises(RuntimeError, match="size mismatch"):
        task(hidden=9).load_state_dict(state)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": 1000}, "too few for a batch of 1000"),
        ({"sequence": 5000}, "too few for a batch of 4 sequences of 5000"),
        ({"accumulate": 3}, "give --batch a multiple of 3"),
        ({"optimizer": "one-pass-rmsprop", "momentum": 0.5}, "has no momentum"),
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
    monkeypatch.setitem(MODELS, "lstm", out_of_memory)
    with pytest.raises(LabError, match="too small for the model: take a smaller --hidden"):
        task()


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [1, 2, 2, 2, 2, 2]),
        ("linear", [1, 2, 2, 1.5, 1, 0.5]),
        ("cosine", [1, 2, *(1 + math.cos(math.pi * done / 4) for done in range(4))]),
    ],
)
def test_warm_up_then_the_schedule(schedule: str, expected: list[float]) -> None:
    rates = [learning_rate(step, peak=2.0, schedule=schedule, warmup=2, steps=6) for step in range(6)]
    assert rates == pytest.approx(expected)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_run_that_ends_in_its_warm_up_only_rises(schedule: str) -> None:
    rates = [learning_rate(step, peak=1.0, schedule=schedule, warmup=10, steps=5) for step in range(5)]
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
    assert learning_rate(0, peak=1.0, schedule=schedule, warmup=0, steps=1) == 1.0


def test_progress_is_in_words_and_leaves_the_buckets_out() -> None:
    stream = io.StringIO()
    with WordsProgress("toy", step_words=500, total=10, start=2, stream=stream) as progress:
        assert progress.done == 1000
        progress.update(4, {"loss": 1.5, "valid_perplexity": 30.0, "valid_perplexity_<100": 4000.0, "words": 7})
        progress.update(10)
    assert stream.getvalue() == "toy: 5,000/5,000 words, loss 1.5, valid perplexity 30\n"


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
