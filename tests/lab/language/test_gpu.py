"""On a GPU no step waits for the device, cuDNN runs the LSTM, and the numbers are those of the CPU."""

import copy
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.testing import assert_close

from hebbian_softmax.lab.language.evaluation import word_losses
from hebbian_softmax.lab.language.learner import Learner, deterministic, make_model
from hebbian_softmax.lab.language.memories.cache import CacheSettings
from hebbian_softmax.lab.language.memories.mbpa import MbpaSettings
from hebbian_softmax.lab.language.memories.memory import Memories, mixture, read_parts
from hebbian_softmax.lab.language.memories.settings import Grids
from hebbian_softmax.lab.language.memories.sweep import memory_rows
from hebbian_softmax.lab.language.model import LanguageModel
from hebbian_softmax.lab.language.names import ONLY
from hebbian_softmax.lab.language.task import WordTask, make_windows
from tests.lab.language.toy import WORDS, corpus, device, settings
from tests.on_gpu import no_waiting

pytestmark = pytest.mark.gpu
SIZES = {"hidden": 64, "embedding": 32, "batch": 16, "sequence": 10}
LARGER = {**SIZES, "hidden": 128}  # one parameter is large enough for the one-pass step
DROPS = {"recurrent_dropout": 0.5, "locked_dropout": True, "input_dropout": 0.5, "output_dropout": 0.5, "carry": True}
ATTENTION = {"model": "transformer", "heads": 4, "layers": 2}
ATTENTION_DROPS = {**ATTENTION, "hidden": 2048, "residual_dropout": 0.2, "attention_dropout": 0.2}
"""With parameters that are large enough for the one-pass step."""
CUDA = torch.device("cuda")
BOTH = Memories((CacheSettings(200, 0.3), MbpaSettings(200, 32)))


@pytest.mark.parametrize("hebbian", [True, False])
@pytest.mark.parametrize(
    "changes", [{}, {"start": "auto"}, DROPS, ATTENTION_DROPS], ids=["lstm", "auto", "drops", "transformer"]
)
@pytest.mark.parametrize("optimizer", ["one-pass-adam", "adam", "sgd"])
def test_a_step_never_waits_for_the_device(hebbian: bool, changes: dict[str, Any], optimizer: str) -> None:
    given = settings(**{**SIZES, **changes}, optimizer=optimizer)
    windows = make_windows(corpus(tokens=4000), given, CUDA)
    learner = Learner(given, WORDS, hebbian=hebbian, device=CUDA)
    for step in range(5):  # one of them is captured
        learner.step(windows.at(step), 1e-3)
    with no_waiting():
        loss = learner.step(windows.at(5), 1e-3)
    assert loss.isfinite()


def test_a_text_too_long_for_the_device_gives_the_same_words() -> None:
    given = settings(**SIZES)
    resident = make_windows(corpus(tokens=4000), given, CUDA)
    copied = make_windows(corpus(tokens=4000), given, CUDA, resident_share=0.0)
    for step in range(3):
        assert copied.at(step).is_cuda
        assert torch.equal(copied.at(step), resident.at(step))


@pytest.mark.parametrize("recurrent_dropout", [0.0, 0.5])
@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # torch 2.11 warns at every profile
def test_cudnn_runs_the_lstm_in_bfloat16(recurrent_dropout: float) -> None:
    """There is no loop over time. Weights that cuDNN had to copy would be a warning, which is an error here."""
    given = settings(**SIZES, precision="bf16", recurrent_dropout=recurrent_dropout)
    model = make_model(given, WORDS, hebbian=False, device=CUDA)
    inputs = torch.randint(WORDS, (100, 16), device=CUDA)
    model.features(inputs)[0].float().sum().backward()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        model.features(inputs)[0].float().sum().backward()
    names = {event.key for event in seen.key_averages()}
    assert "aten::_cudnn_rnn" in names
    assert "aten::_thnn_fused_lstm_cell" not in names


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
def test_attention_in_bfloat16_is_one_kernel() -> None:
    """No matrix of all pairs of words is made."""
    model = make_model(settings(**{**SIZES, **ATTENTION_DROPS}, precision="bf16"), WORDS, hebbian=False, device=CUDA)
    inputs = torch.randint(WORDS, (10, 16), device=CUDA)
    model.features(inputs)[0].float().sum().backward()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        model.features(inputs)[0].float().sum().backward()
    names = {event.key for event in seen.key_averages()}
    assert "aten::_scaled_dot_product_attention_math" not in names
    assert any(f"aten::_scaled_dot_product_{kind}_attention" in names for kind in ("flash", "cudnn", "efficient"))


def test_weight_drop_is_the_lstm_with_one_masked_matrix() -> None:
    """Every word sees the same mask, and the gradient reaches the raw matrix through it."""
    given = settings(**SIZES, precision="fp32", input_dropout=0.0, recurrent_dropout=0.5)
    dropped = make_model(given, WORDS, hebbian=False, device=CUDA)
    plain = copy.deepcopy(dropped)
    plain.layers[0].recurrent_dropout = 0.0
    torch.manual_seed(4)
    mask = F.dropout(torch.ones_like(plain.layers[0].weight_hh), 0.5)
    with torch.no_grad():
        plain.layers[0].weight_hh *= mask
    inputs = torch.randint(WORDS, (20, 16), device=CUDA)
    torch.manual_seed(4)
    found, expected = dropped.features(inputs)[0], plain.features(inputs)[0]
    assert_close(found, expected)
    for features in (found, expected):
        features.sum().backward()
    assert_close(dropped.layers[0].weight_hh.grad, plain.layers[0].weight_hh.grad * mask, rtol=1e-4, atol=1e-4)
    assert_close(dropped.layers[0].weight_ih.grad, plain.layers[0].weight_ih.grad, rtol=1e-4, atol=1e-4)
    assert_close(dropped.eval().features(inputs)[0], dropped.features(inputs)[0])


@pytest.mark.parametrize("hebbian", [True, False])
@pytest.mark.parametrize("changes", [{}, ATTENTION], ids=["lstm", "transformer"])
def test_training_and_evaluation_are_those_of_the_cpu(hebbian: bool, changes: dict[str, Any]) -> None:
    given = settings(**{**SIZES, **changes}, precision="fp32", input_dropout=0.0)
    words = corpus(tokens=4000)
    learners = {where: Learner(given, WORDS, hebbian=hebbian, device=where) for where in (device(), CUDA)}
    for step in range(4):
        losses = [
            learner.step(make_windows(words, given, where).at(step), 1e-3).cpu() for where, learner in learners.items()
        ]
        assert_close(losses[0], losses[1], rtol=1e-3, atol=1e-4)
    found = [word_losses(learner.model, words.splits["valid"]) for learner in learners.values()]
    assert_close(found[0].mean(), found[1].mean(), rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    ("words", "sizes"),
    [
        (WORDS, SIZES),
        (8000, {**SIZES, "batch": 512, "sequence": 20}),  # large enough for the fused loss
        (WORDS, {**SIZES, **DROPS}),
        (WORDS, {**SIZES, **ATTENTION_DROPS}),
    ],
    ids=["lstm", "large", "drops", "transformer"],
)
def test_deterministic_runs_go_on_to_the_same_bits(words: int, sizes: dict[str, Any]) -> None:
    text = corpus(words, 40_000)

    def task() -> WordTask:
        return WordTask(text, settings(**sizes, precision="bf16"), {ONLY: True}, steps=6, device=CUDA)

    def step(task: WordTask, count: int) -> None:
        for _ in range(count):
            task.train_step()

    with deterministic(True):
        whole, stopped, resumed = task(), task(), task()
        step(whole, 6)
        step(stopped, 3)
        saved = io.BytesIO()
        torch.save(stopped.state_dict(), saved)
        saved.seek(0)
        resumed.load_state_dict(torch.load(saved, map_location="cpu", weights_only=True))
        step(resumed, 3)
    expected, found = (each.learners[ONLY].model.state_dict() for each in (whole, resumed))
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def assert_gone_the_same_way(found: Learner, expected: Learner, first: dict[str, Tensor]) -> None:
    """Compare by the norm of each parameter, because Adam turns rounding of a gradient near zero into a whole step."""
    states = found.model.state_dict(), expected.model.state_dict()
    for name, start in first.items():
        one, other, before = (each.double() for each in (states[0][name], states[1][name], start))
        assert (one - other).norm() <= 0.1 * (other - before).norm(), name


@pytest.mark.parametrize("hebbian", [True, False])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"start": "auto"},
        {"write": "centred", "fade": False},
        {"accumulate": 2},
        {"optimizer": "one-pass-rmsprop"},
        {"clip": 0.0},
        DROPS,
        ATTENTION_DROPS,
    ],
    ids=["usual", "auto", "centred", "in parts", "rmsprop", "unclipped", "drops", "transformer"],
)
def test_captured_steps_are_those_of_the_plain_loop(hebbian: bool, changes: dict[str, Any]) -> None:
    """Words, dropout and the learning rate change from step to step, and the rule begins in the middle."""
    given = settings(**{**LARGER, "input_dropout": 0.5, "output_dropout": 0.5, **changes}, precision="bf16")
    windows = make_windows(corpus(tokens=8000), given, CUDA)
    plain, captured = (Learner(given, WORDS, hebbian=hebbian, device=CUDA) for _ in range(2))
    plain.captured = None
    first = copy.deepcopy(plain.model.state_dict())
    graphs = []
    for step in range(14):
        losses = []
        for learner in (captured, plain):
            torch.manual_seed(step)
            learner.model.head.memorizing = step >= 7
            losses.append(learner.step(windows.at(step), 2e-4 * (step + 1)))
        assert_close(*losses, rtol=5e-3, atol=0)
        graphs.append(captured.captured._graph is not None)
    assert graphs == 2 * [False, False, False, True, True, True, True]
    assert_gone_the_same_way(captured, plain, first)


@pytest.mark.parametrize(
    "changes",
    [{"input_dropout": 0.5, "output_dropout": 0.5}, {"recurrent_dropout": 0.5}, DROPS, ATTENTION_DROPS],
    ids=["usual", "recurrent", "drops", "transformer"],
)
def test_captured_dropout_follows_the_seed(changes: dict[str, Any]) -> None:
    given = settings(**{**LARGER, "input_dropout": 0.0, **changes, "carry": False}, precision="bf16")
    words = make_windows(corpus(tokens=8000), given, CUDA).at(0)
    learner = Learner(given, WORDS, hebbian=False, device=CUDA)  # a carried state would differ from step to step
    losses = []
    for seed in (0, 1, 2, 0, 1, 2, 3, 4):  # the weights do not change; from the fourth step on they are captured
        torch.manual_seed(seed)
        losses.append(float(learner.step(words, 0.0)))
    assert losses[3:6] == pytest.approx(losses[:3], abs=2e-4)
    assert max(losses[3:]) - min(losses[3:]) > 1e-3


def test_a_state_that_is_loaded_is_gone_on_with() -> None:
    given = settings(**LARGER, precision="bf16")
    windows = make_windows(corpus(tokens=8000), given, CUDA)
    one, other = (Learner(given, WORDS, hebbian=True, device=CUDA) for _ in range(2))
    for step in range(6):
        one.step(windows.at(step), 1e-3)
    state = copy.deepcopy(one.state_dict())  # torch's optimizers do not copy the tensors they load
    assert {group["lr"] for group in state["optimizer"]["param_groups"]} == {1e-3}
    for step in range(5):  # other steps, of which some are captured
        other.step(windows.at(step + 20), 1e-3)
    other.load_state_dict(state)
    for step in range(6, 12):
        losses = []
        for learner in (one, other):
            torch.manual_seed(step)
            losses.append(learner.step(windows.at(step), 1e-3))
        assert_close(*losses, rtol=5e-3, atol=0)
    for learner in (one, other):
        assert {float(each["step"]) for each in learner.optimizer.state.values()} == {12}
    assert_gone_the_same_way(other, one, state["model"])


def test_what_waits_for_the_device_is_not_captured() -> None:
    for changes in ({"objective": "svm"}, {"optimizer": "adam"}, {"batch": 30_000}):
        assert Learner(settings(**{**SIZES, **changes}), WORDS, hebbian=True, device=CUDA).captured is None


def test_a_captured_learner_gives_its_memory_back() -> None:
    given = settings(**LARGER)
    words = make_windows(corpus(tokens=4000), given, CUDA).at(0)

    def reserved_after(count: int) -> int:
        for _ in range(count):
            learner = Learner(given, WORDS, hebbian=True, device=CUDA)
            for _ in range(5):
                learner.step(words, 1e-3)
            del learner  # no reference cycle keeps it alive
            torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    few, many = reserved_after(2), reserved_after(6)
    assert many <= few + 2**22


def model_on(where: str, precision: str, **changes: Any) -> LanguageModel:
    given = settings(**{**SIZES, **changes}, precision=precision)
    return make_model(given, WORDS, hebbian=True, device=torch.device(where)).eval()


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("bf16", 1e-2)])
@pytest.mark.parametrize("changes", [{}, ATTENTION], ids=["lstm", "transformer"])
def test_memories_are_those_of_the_cpu(changes: dict[str, Any], precision: str, tolerance: float) -> None:
    ids = corpus(tokens=8000).splits["valid"]
    found = read_parts(model_on("cuda", precision, **changes), ids, BOTH)
    expected = read_parts(model_on("cpu", "fp32", **changes), ids, BOTH)
    assert {each.device.type for each in found.values()} == {"cpu"}
    for memory in BOTH.used:
        memories = Memories((memory,))
        assert_close(mixture(found, memories).mean(), mixture(expected, memories).mean(), rtol=tolerance, atol=0)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_sweep_of_memories_ends_in_what_it_chose(precision: str) -> None:
    words = corpus(tokens=8000)
    grids = Grids(sizes=(50, 200), neighbours=(16, 32), two_step_words=40)
    found = memory_rows(model_on("cuda", precision), words, grids=grids, quiet=True)
    alone, cached, _ = (row.scores["valid"].perplexity for row in found.rows)
    assert cached == pytest.approx(found.sweep.points["cache"][0].perplexity, rel=1e-3)
    assert cached <= 1.05 * alone
    single = read_parts(model_on("cuda", precision), words.splits["test"], found.rows[-1].memories)
    assert_close(mixture(single, found.rows[-1].memories), found.losses("test")[-1], rtol=1e-3, atol=1e-3)
