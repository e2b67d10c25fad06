"""The paper's language model (section 4.2): an LSTM between an embedding and a softmax that share one matrix.

Words have fewer dimensions than the LSTM has units. One matrix P (embedding × hidden) joins the two: Pᵀ takes a word's
embedding to the LSTM's input, P takes the LSTM's output h to the features that the softmax sees and memorises.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hebbian_softmax import HebbianSoftmax
from hebbian_softmax.lab.language.model.layer_norm_lstm import LayerNormLSTM

State = Sequence[tuple[Tensor, Tensor]]
"""For each layer the output h and the cell c, both (1, batch, hidden)."""

LAYER_NORMS = ("none", "output", "cell")


class WordLSTM(nn.Module):
    """`forward(inputs, targets)` is the mean loss; words come as (time, batch), which is how cuDNN reads them.

    Args:
        head: the output layer; its rows are the embedding, too, if `tied`.
        memorizes: whether `forward` gives its activations to the head to remember. Where it does not, the head is
            exactly a plain softmax.
        hidden: units of each LSTM layer.
        input_dropout: of the embedded words, in training.
        tied: one matrix for embedding and softmax, and one P; otherwise two of each.
        layer_norm: `output` normalises the features; `cell` normalises inside the LSTM (Ba et al., 2016), much slower.
        precision: of the products; the parameters stay in float32.
    """

    def __init__(
        self,
        head: HebbianSoftmax,
        *,
        memorizes: bool,
        hidden: int,
        layers: int = 1,
        input_dropout: float = 0.0,
        tied: bool = True,
        layer_norm: str = "none",
        precision: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.head, self.memorizes, self.input_dropout, self.precision = head, memorizes, input_dropout, precision
        words, features = head.num_classes, head.in_features
        self.embedding = None if tied else nn.Embedding(words, features)
        make = LayerNormLSTM if layer_norm == "cell" else LSTMLayer
        self.layers = nn.ModuleList(make(hidden, hidden) for _ in range(layers))
        self.projection = None if features == hidden else _projection(features, hidden)
        self.entry = self.projection if tied or self.projection is None else _projection(features, hidden)
        self.norm = nn.LayerNorm(features) if layer_norm == "output" else None
        if self.embedding is not None:
            nn.init.uniform_(self.embedding.weight, -(features**-0.5), features**-0.5)  # as the head's rows

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy of `targets`, each after the words of its column before it; no state comes in."""
        features, _ = self.features(inputs)
        with torch.autocast(features.device.type, torch.bfloat16, enabled=self.precision == torch.bfloat16):
            return self.head.loss(features, targets, remember=self.memorizes)

    def features(self, inputs: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """What the head is given for each word, (time, batch, features), and the state after the last."""
        table = self.head.weight if self.embedding is None else self.embedding.weight
        x = F.dropout(F.embedding(inputs, table).to(self.precision), self.input_dropout, self.training)
        entry = None if self.entry is None else self.entry.T
        after = []
        for number, layer in enumerate(self.layers):
            x, reached = layer(x, None if state is None else state[number], entry if number == 0 else None)
            after.append(reached)
        if self.projection is not None:
            x = F.linear(x, self.projection.to(self.precision))
        if self.norm is not None:
            x = self.norm(x.to(self.norm.weight.dtype)).to(self.precision)
        return x, after


def _projection(features: int, hidden: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(features, hidden) * features**-0.5)


class LSTMLayer(nn.Module):
    """One layer over a whole sequence in one call of cuDNN, in the dtype of its input.

    W (Pᵀ x) is computed as (W Pᵀ) x: the same function, with 512 dimensions in place of 2048 for the products over all
    words. The weights are laid out in one piece of memory, as cuDNN wants them; else it would copy them once more.
    Autocast is left out because it runs cuDNN's LSTM in float16.
    """

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        bound = hidden**-0.5
        self.weight_ih = nn.Parameter(torch.empty(4 * hidden, inputs).uniform_(-bound, bound))
        self.weight_hh = nn.Parameter(torch.empty(4 * hidden, hidden).uniform_(-bound, bound))
        self.bias_ih = nn.Parameter(torch.zeros(4 * hidden))
        self.bias_hh = nn.Parameter(torch.zeros(4 * hidden))
        with torch.no_grad():
            self.bias_ih[hidden : 2 * hidden] = 1  # the forget gate: remember at first
        self.hidden = hidden

    def forward(
        self, x: Tensor, state: tuple[Tensor, Tensor] | None, entry: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """(time, batch, inputs) to (time, batch, hidden) and the last state, with `entry` before the layer."""
        weights = [weight.to(x.dtype) for weight in (self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh)]
        if entry is not None:
            weights[0] = weights[0] @ entry.to(x.dtype)
        flat = torch.cat([weight.reshape(-1) for weight in weights])
        parts = flat.split([weight.numel() for weight in weights])
        weights = [part.view(weight.shape) for part, weight in zip(parts, weights, strict=True)]
        if state is None:
            zeros = x.new_zeros(1, x.shape[1], self.hidden)
            state = (zeros, zeros)
        with torch.autocast(x.device.type, enabled=False):
            output, h, c = torch.lstm(x, state, weights, True, 1, 0.0, self.training, False, False)
        return output, (h, c)
