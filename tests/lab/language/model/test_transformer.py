"""The Transformer equals a slow literal version, sees no later word, and reads a long text in windows that overlap."""

import cmath
import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hebbian_softmax import HebbianSoftmax
from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.language.evaluation import word_losses
from hebbian_softmax.lab.language.model.base import NetworkOptions
from hebbian_softmax.lab.language.model.transformer import Transformer, TransformerLayer, rotated, rotation
from hebbian_softmax.lab.language.names import HEBBIAN, PLAIN
from hebbian_softmax.lab.language.settings import Settings
from hebbian_softmax.lab.language.task import WordTask
from tests.closeness import assert_as_close, assert_exact
from tests.lab.language.toy import corpus, device, exactly, model, settings

WORDS, WIDTH = 13, 12
SMALL: dict[str, Any] = {"hidden": 20, "layers": 2, "heads": 3}
DROPOUTS = ("input_dropout", "residual_dropout", "attention_dropout")
TOY: dict[str, Any] = {"model": "transformer", "heads": 3, "layers": 2}
"""Changes to the toy settings, whose words have 6 dimensions."""


def make(**options: Any) -> Transformer:
    head = HebbianSoftmax(options.pop("width", WIDTH), WORDS, gamma=0.1, limit=5)
    given = {name: options.pop(name) for name in ("memorizes", "precision") if name in options}
    return Transformer(head, NetworkOptions(**{**SMALL, **options}), **{"memorizes": False, **given})


def make_wide(**options: Any) -> Transformer:
    made = make(**options, precision=torch.float64).double()
    for each in made.modules():
        if isinstance(each, torch.nn.LayerNorm):  # its first values would hide a gain or a shift left out
            torch.nn.init.uniform_(each.weight, 0.5, 1.5)
            torch.nn.init.uniform_(each.bias, -0.5, 0.5)
    return made


def words(time: int, batch: int = 2) -> Tensor:
    return torch.randint(WORDS, (time, batch))


def turned(x: Tensor, position: int) -> list[Tensor]:
    """Return the pairs of one head's dimensions as complex numbers, each turned by its angle."""
    half = len(x) // 2
    return [torch.complex(x[i], x[i + half]) * cmath.exp(1j * position * 10_000 ** (-i / half)) for i in range(half)]


def literal_attention(layer: TransformerLayer, x: Tensor) -> Tensor:
    """Return the attention of normalised words (time, width), word by word and head by head."""
    queries, keys, values = (x @ part.T for part in layer.queries_keys_values.weight.chunk(3))
    size = x.shape[1] // layer.heads
    rows = []
    for now in range(len(x)):
        parts = []
        for head in range(layer.heads):
            own = slice(head * size, (head + 1) * size)
            query = turned(queries[now, own], now)
            scores = []
            for before in range(now + 1):
                key = turned(keys[before, own], before)
                products = [(q * k.conj()).real for q, k in zip(query, key, strict=True)]
                scores.append(torch.stack(products).sum() / math.sqrt(size))
            weights = torch.stack(scores).exp() / torch.stack(scores).exp().sum()
            parts.append(sum(weight * values[i, own] for i, weight in enumerate(weights)))
        rows.append(torch.cat(parts) @ layer.attention_out.weight.T)
    return torch.stack(rows)


def literal_window(model: Transformer, window: Tensor) -> Tensor:
    """Return the features of the words of one window (time,)."""

    def normal(x: Tensor, norm: torch.nn.LayerNorm) -> Tensor:
        centered = x - x.mean(1, keepdim=True)
        return norm.weight * centered / (centered.square().mean(1, keepdim=True) + norm.eps).sqrt() + norm.bias

    table = model.head.weight if model.embedding is None else model.embedding.weight
    x = table[window] * math.sqrt(table.shape[1])
    for layer in model.layers:
        x = x + literal_attention(layer, normal(x, layer.attention_norm))
        inner = normal(x, layer.mlp_norm) @ layer.mlp_in.weight.T
        x = x + (inner * (1 + (inner / math.sqrt(2)).erf()) / 2) @ layer.mlp_out.weight.T
    return normal(x, model.norm)


def literal_features(model: Transformer, text: Tensor) -> Tensor:
    """Read the window of each word (time, batch) anew: the first one, or the one whose second half has the word."""
    context = model.options.context
    stride = max(1, context // 2)
    columns = []
    for column in text.T:
        rows = []
        for place in range(len(column)):
            first = 0 if place < context else ((place - context) // stride + 1) * stride
            rows.append(literal_window(model, column[first : place + 1])[-1])
        columns.append(torch.stack(rows))
    return torch.stack(columns, dim=1)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("heads", [1, 3])
def test_loss_and_gradients_are_those_of_the_literal_model(tied: bool, heads: int) -> None:
    model, batch = make_wide(tied=tied, heads=heads), words(6)
    model(batch[:-1], batch[1:]).backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    logits = literal_features(model, batch[:-1]) @ model.head.weight.T
    literal = F.cross_entropy(logits.flatten(0, 1), batch[1:].flatten())
    literal.backward()
    torch.testing.assert_close(model(batch[:-1], batch[1:]), literal)
    assert None not in found.values()
    torch.testing.assert_close(found, {name: parameter.grad for name, parameter in model.named_parameters()})


@pytest.mark.parametrize("context", [1, 2, 5, 6])
@torch.no_grad()
def test_a_long_text_is_read_in_overlapping_windows_whatever_its_pieces_are(context: int) -> None:
    model, text = make_wide(context=context, layers=1), words(17)
    literal = literal_features(model, text)
    assert_exact(model.features(text)[0], literal, "at once", ulps=64)
    for piece in (1, 4, context, 16):
        state, found = None, []
        for part in text.split(piece):
            features, state = model.features(part, state)
            assert len(state) < context
            found.append(features)
        assert_exact(torch.cat(found), literal, f"in pieces of {piece}", ulps=64)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_pieces_and_columns_differ_by_rounding_alone(precision: torch.dtype) -> None:
    model, text = make(context=8, precision=precision).eval(), words(30, 3)
    whole, exact = model.features(text)[0], exactly(model).features(text)[0]
    assert whole.dtype == precision
    first, state = model.features(text[:11])
    assert_as_close(torch.cat([first, model.features(text[11:], state)[0]]), whole, exact, "in pieces")
    for column in range(3):
        alone = model.features(text[:, column : column + 1])[0]
        assert_as_close(alone, whole[:, column : column + 1], exact[:, column : column + 1], "a column alone")


@torch.no_grad()
def test_no_feature_depends_on_a_later_word() -> None:
    model, text = make_wide(context=6), words(14)
    before, _ = model.features(text)
    for place in range(14):
        changed = text.clone()
        changed[place] = (changed[place] + 1) % WORDS
        after, _ = model.features(changed)
        torch.testing.assert_close(after[:place], before[:place], rtol=0, atol=1e-12)
        assert (after[place] - before[place]).abs().amax() > 1e-3


def test_attention_depends_on_distances() -> None:
    """The inner product of a query and a key turned is that of both turned by as much again."""
    x = torch.randn(2, 8, dtype=torch.float64)
    cos, sin = rotation(40, 8, x)

    def at(place: int, row: Tensor) -> Tensor:
        return rotated(row, (cos[place], sin[place]))

    products = [(at(place, x[0]) * at(place + 3, x[1])).sum() for place in (0, 7, 36)]
    torch.testing.assert_close(torch.stack(products), products[0].expand(3))
    assert (products[0] - (x[0] * x[1]).sum()).abs() > 1e-3
    assert torch.equal(at(0, x[0]), x[0])


@pytest.mark.parametrize("name", DROPOUTS)
@pytest.mark.parametrize("locked", [True, False])
def test_each_dropout_acts_in_training_only(name: str, locked: bool) -> None:
    model, text = make(**{name: 0.5}, locked_dropout=locked), words(5)
    assert not torch.equal(model.features(text)[0], model.features(text)[0])
    model.eval()
    expected = make().eval()
    expected.load_state_dict(model.state_dict())
    assert torch.equal(model.features(text)[0], expected.features(text)[0])


def test_bfloat16_has_float32_gradients() -> None:
    model, batch = make(precision=torch.bfloat16), words(9)
    model(batch[:-1], batch[1:]).backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())


def test_the_sizes_are_those_of_a_small_transformer() -> None:
    sizes = Settings(model="transformer").sizes
    assert (sizes.layers, sizes.embedding, Settings().heads, sizes.sequence) == (6, 512, 8, 256)
    options = Settings(model="transformer", sequence=50, hidden=9).network
    assert (options.context, options.hidden, options.layers) == (50, 9, 6)
    assert Settings(model="lstm").sizes == Settings().sizes
    count = sum(parameter.numel() for parameter in make().parameters())
    assert count == WORDS * WIDTH + 2 * (4 * WIDTH**2 + 2 * 20 * WIDTH + 4 * WIDTH) + 2 * WIDTH


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 5}, "--embedding 12 cannot be shared by --heads 5, .* give --embedding a multiple of 10"),
        ({"layer_norm": "output"}, "no use for --layer-norm output: omit it, or change --model"),
        ({"recurrent_dropout": 0.5}, "no use for --recurrent-dropout 0.5"),
    ],
)
def test_settings_that_it_has_no_use_for_are_one_clear_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LabError, match=message):
        make(**changes)


@pytest.mark.parametrize("changes", [{"heads": 4}, {"residual_dropout": 0.1}, {"attention_dropout": 0.1}], ids=str)
def test_the_lstm_refuses_what_is_for_the_transformer(changes: dict[str, Any]) -> None:
    with pytest.raises(LabError, match=f"no use for --{next(iter(changes)).replace('_', '-')}"):
        model(**changes)


def test_training_lowers_the_loss_and_goes_on_from_its_state() -> None:
    """Both heads learn, with every dropout; a resumed run takes the same steps."""
    dropouts = {"input_dropout": 0.1, "residual_dropout": 0.1, "attention_dropout": 0.1, "locked_dropout": True}
    made = settings(Settings, **TOY, **dropouts, learning_rate=0.02, output_dropout=0.1, sequence=8)

    def task() -> WordTask:
        return WordTask(corpus(), made, {PLAIN: False, HEBBIAN: True}, steps=80, device=device())

    whole, resumed = task(), task()
    losses = [whole.train_step() for _ in range(60)]
    for name in (PLAIN, HEBBIAN):
        values = torch.stack([each[f"{name.log_prefix}loss"] for each in losses])
        assert values[-10:].mean() < values[:10].mean() - 0.2
    assert int(whole.learners[HEBBIAN].model.head.counts.sum()) == 60 * 4 * 8
    assert int(whole.learners[PLAIN].model.head.counts.sum()) == 0
    resumed.load_state_dict(copy.deepcopy(whole.state_dict()))
    torch.rand(7)  # other random numbers must not matter
    for _ in range(3):
        assert whole.train_step() == resumed.train_step()
    one, other = whole.evaluate(), resumed.evaluate()
    assert one == {**other, "words_per_second": one["words_per_second"]}


def test_perplexity_does_not_depend_on_how_a_text_is_cut() -> None:
    made, ids = model(**TOY, sequence=10), corpus().splits["valid"]
    exact = word_losses(exactly(made), ids)
    expected = word_losses(made, ids)
    for chunk in (1, 7, 64):
        assert_as_close(word_losses(made, ids, chunk=chunk), expected, exact, f"in pieces of {chunk}")
