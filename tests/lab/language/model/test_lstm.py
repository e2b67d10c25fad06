"""The LSTM equals slow literal versions: the equations of nn.LSTM, word by word, with every matrix applied in turn."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hebbian_softmax import HebbianSoftmax
from hebbian_softmax.lab.language.model.base import NetworkOptions, dropout
from hebbian_softmax.lab.language.model.lstm import LayerNormLSTM, LSTMLayer, WordLSTM
from tests.closeness import assert_as_close
from tests.lab.language.toy import exactly

WORDS, FEATURES, HIDDEN = 13, 4, 6


def make(**options: Any) -> WordLSTM:
    head = HebbianSoftmax(options.pop("features", FEATURES), WORDS, gamma=0.1, limit=5)
    given = {name: options.pop(name) for name in ("memorizes", "precision") if name in options}
    return WordLSTM(head, NetworkOptions(HIDDEN, **options), **{"memorizes": False, **given})


def words(time: int = 5, batch: int = 3) -> Tensor:
    return torch.randint(WORDS, (time + 1, batch))


def literal_features(model: WordLSTM, inputs: Tensor) -> Tensor:
    """Read one word after the other, with Pᵀ, the LSTM and P in turn."""
    table = model.head.weight if model.embedding is None else model.embedding.weight
    outputs = []
    states = [[torch.zeros(inputs.shape[1], HIDDEN, dtype=table.dtype) for _ in range(2)] for _ in model.layers]
    for now in inputs:
        x = table[now]
        if model.entry is not None:
            x = x @ model.entry
        for layer, state in zip(model.layers, states, strict=True):
            gates = x @ layer.weight_ih.T + layer.bias_ih + state[0] @ layer.weight_hh.T + layer.bias_hh
            i, f, g, o = gates.chunk(4, dim=1)
            state[1] = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
            state[0] = o.sigmoid() * state[1].tanh()
            x = state[0]
        if model.projection is not None:
            x = x @ model.projection.T
        if model.norm is not None:
            x = F.layer_norm(x, (x.shape[1],), model.norm.weight, model.norm.bias)
        outputs.append(x)
    return torch.stack(outputs)


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("features", [FEATURES, HIDDEN])
@pytest.mark.parametrize("layer_norm", ["none", "output"])
def test_loss_and_gradients_are_those_of_the_literal_model(
    layers: int, tied: bool, features: int, layer_norm: str
) -> None:
    model = make(layers=layers, tied=tied, features=features, layer_norm=layer_norm, precision=torch.float64).double()
    batch = words()
    model(batch[:-1], batch[1:]).backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    logits = literal_features(model, batch[:-1]) @ model.head.weight.T
    literal = F.cross_entropy(logits.flatten(0, 1), batch[1:].flatten())
    literal.backward()
    torch.testing.assert_close(model(batch[:-1], batch[1:]), literal)
    assert None not in found.values()
    torch.testing.assert_close(found, {name: parameter.grad for name, parameter in model.named_parameters()})


def test_tying_shares_one_embedding_and_one_projection() -> None:
    def count(**options: Any) -> int:
        return sum(parameter.numel() for parameter in make(**options).parameters())

    matrices = WORDS * FEATURES + FEATURES * HIDDEN
    assert count(tied=False) == count() + matrices
    assert make(features=HIDDEN).projection is None
    paper = 4 * 2048 * (2 * 2048 + 2) + 512 * 2048 + 267_735 * 512
    assert paper == pytest.approx(172e6, rel=0.01)  # the number on the design page
    assert count() == 4 * HIDDEN * (2 * HIDDEN + 2) + matrices


@pytest.mark.parametrize("options", [{}, {"layers": 2}, {"layer_norm": "cell"}, {"precision": torch.bfloat16}])
def test_a_sequence_in_parts_with_its_state_is_the_whole_sequence(options: dict[str, Any]) -> None:
    model = make(**options).eval()
    inputs = words(7)
    whole, last = model.features(inputs)
    first, state = model.features(inputs[:3])
    second, end = model.features(inputs[3:], state)
    exact, exact_last = exactly(model).features(inputs)
    assert_as_close(torch.cat([first, second]), whole, exact)
    for found, expected, wide in zip(end, last, exact_last, strict=True):
        for each in zip(found, expected, wide, strict=True):
            assert_as_close(*each)


def test_the_cell_with_layer_norm_is_the_papers_equations() -> None:
    layer = LayerNormLSTM(3, HIDDEN).double()
    for norm in (layer.input_norm, layer.hidden_norm, layer.cell_norm):
        nn.init.uniform_(norm.weight, 0.5, 1.5)
        nn.init.uniform_(norm.bias, -0.5, 0.5)
    x, entry = torch.randn(4, 2, 5, dtype=torch.float64), torch.randn(3, 5, dtype=torch.float64)

    def normalised(values: Tensor, norm: nn.LayerNorm) -> Tensor:
        centered = values - values.mean()
        return norm.weight * centered / (centered.square().mean() + norm.eps).sqrt() + norm.bias

    outputs, _ = layer(x, None, entry)
    for column in range(2):
        h = c = torch.zeros(HIDDEN, dtype=torch.float64)
        for time in range(4):
            gates = normalised(layer.weight_ih @ (entry @ x[time, column]), layer.input_norm)
            gates = gates + normalised(layer.weight_hh @ h, layer.hidden_norm)
            i, f, g, o = gates.chunk(4)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * normalised(c, layer.cell_norm).tanh()
            torch.testing.assert_close(outputs[time, column], h)


def test_dropout_is_on_the_embedding_and_in_training_only() -> None:
    model = make(input_dropout=0.5)
    inputs = words()
    assert not torch.equal(model.features(inputs)[0], model.features(inputs)[0])
    model.eval()
    assert torch.equal(model.features(inputs)[0], model.features(inputs)[0])
    certain = make(input_dropout=1.0)
    torch.testing.assert_close(certain.features(inputs)[0][:, 0], certain.features(inputs.flip(1))[0][:, 0])


def test_bfloat16_is_near_float32_and_has_float32_gradients() -> None:
    exact = make()
    rounded, batch = copy.deepcopy(exact), words(20, 8)
    rounded.precision = torch.bfloat16
    one, other = exact(batch[:-1], batch[1:]), rounded(batch[:-1], batch[1:])
    assert rounded.features(batch)[0].dtype == torch.bfloat16
    torch.testing.assert_close(other.float(), one, rtol=torch.finfo(torch.bfloat16).eps, atol=0)
    other.backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in rounded.parameters())


@pytest.mark.parametrize("memorizes", [True, False])
def test_only_a_memorizing_model_gives_the_head_something_to_remember(memorizes: bool) -> None:
    model, batch = make(memorizes=memorizes), words()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.head.attach(optimizer)
    model(batch[:-1], batch[1:]).backward()
    optimizer.step()
    assert int(model.head.counts.sum()) == (batch[1:].numel() if memorizes else 0)


LAYERS = [LSTMLayer, LayerNormLSTM]


def drop_weights(layer: Any, share: float, seed: int) -> Any:
    """Return a copy of a layer without dropout whose recurrent matrix has the mask that this seed draws."""
    plain = copy.deepcopy(layer)
    plain.recurrent_dropout = 0.0
    torch.manual_seed(seed)
    with torch.no_grad():
        plain.weight_hh *= F.dropout(torch.ones_like(layer.weight_hh), share)
    return plain


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("precision", [torch.float64, torch.float32, torch.bfloat16])
def test_weight_drop_is_the_layer_with_one_masked_matrix_for_all_words(kind: Any, precision: torch.dtype) -> None:
    """The gradient goes through the mask to the raw matrix, and nothing else changes."""
    layer = kind(3, HIDDEN, 0.5).to(torch.float64 if precision == torch.float64 else torch.float32)
    plain, x = drop_weights(layer, 0.5, seed=4), torch.randn(6, 2, 3, dtype=precision)
    mask = plain.weight_hh.detach() / layer.weight_hh.detach()
    assert set(mask.unique().tolist()) == {0.0, 2.0}
    torch.manual_seed(4)
    found, expected = layer(x, None, None), plain(x, None, None)
    assert torch.equal(found[0], expected[0])
    assert all(torch.equal(*each) for each in zip(found[1], expected[1], strict=True))
    for output in (found[0], expected[0]):
        output.sum().backward()
    for name, parameter in layer.named_parameters():
        other = dict(plain.named_parameters())[name].grad
        assert torch.equal(parameter.grad, other * mask if name == "weight_hh" else other), name


@pytest.mark.parametrize("kind", LAYERS)
def test_weight_drop_is_in_training_only_and_0_is_the_plain_layer(kind: Any) -> None:
    layer, x = kind(3, HIDDEN, 0.5), torch.randn(6, 2, 3)
    plain = copy.deepcopy(layer)
    plain.recurrent_dropout = 0.0
    before = torch.get_rng_state()
    expected = plain(x, None, None)[0]
    assert torch.equal(torch.get_rng_state(), before)  # so that dropout elsewhere is as it was without this option
    assert not torch.equal(layer(x, None, None)[0], expected)
    assert torch.equal(layer.eval()(x, None, None)[0], expected)


def test_weight_drop_draws_shares_of_each_matrix_anew() -> None:
    """A dropped weight has no gradient: as many as asked for, others in each layer and at each call."""
    share, hidden = 0.3, 40
    head = HebbianSoftmax(FEATURES, WORDS, gamma=0.1, limit=5)
    model = WordLSTM(head, NetworkOptions(hidden, layers=2, recurrent_dropout=share), memorizes=False)
    masks = []
    for _ in range(2):
        model.zero_grad()
        model.features(words())[0].sum().backward()
        masks += [layer.weight_hh.grad == 0 for layer in model.layers]
    number = masks[0].numel()
    spread = (share * (1 - share) / number) ** 0.5
    for one, mask in enumerate(masks):
        assert float(mask.double().mean()) == pytest.approx(share, abs=5 * spread)
        for other in masks[:one]:
            alike = float((mask == other).double().mean())
            assert alike == pytest.approx(share**2 + (1 - share) ** 2, abs=5 * 0.5 / number**0.5)


@pytest.mark.parametrize("locked", [True, False])
def test_locked_dropout_drops_the_same_elements_of_all_words(locked: bool) -> None:
    x = torch.ones(7, 50, 20)
    found = dropout(x, 0.25, True, locked=locked)
    assert set(found.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    assert float((found == 0).double().mean()) == pytest.approx(0.25, abs=0.07)
    assert torch.equal(found, found[:1].expand_as(found)) == locked
    assert not torch.equal(found[:, 0], found[:, 1])
    assert torch.equal(dropout(x, 0.25, False, locked=locked), x)
    other = dropout(x.transpose(0, 1), 0.25, True, locked=locked, time=1)
    assert torch.equal(other, other[:, :1].expand_as(other)) == locked


def test_locked_output_dropout_is_for_the_loss_and_what_comes_before_it_is_memorised() -> None:
    batch, written = words(), []
    for share in (0.0, 0.5):
        torch.manual_seed(0)
        head = HebbianSoftmax(FEATURES, WORDS, gamma=0.1, limit=5, write="literal")
        options = NetworkOptions(HIDDEN, locked_dropout=True, output_dropout=share)
        model = WordLSTM(head, options, memorizes=True, precision=torch.float64).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        head.attach(optimizer)
        torch.manual_seed(1)
        loss = model(batch[:-1], batch[1:])
        torch.manual_seed(1)
        mask = F.dropout(torch.ones(1, batch.shape[1], FEATURES, dtype=torch.float64), share)
        logits = (model.features(batch[:-1])[0] * mask) @ head.weight.T
        torch.testing.assert_close(loss, F.cross_entropy(logits.flatten(0, 1), batch[1:].flatten()))
        loss.backward()
        optimizer.step()
        written.append(head.weight.detach().clone())
        assert int(head.counts.sum()) == batch[1:].numel()
        assert torch.equal(model(batch[:-1], batch[1:]), model(batch[:-1], batch[1:])) == (share == 0)
    torch.testing.assert_close(*written)
