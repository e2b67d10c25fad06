"""The paper's language model (section 4.2): an LSTM between an embedding and a softmax that share one matrix.

Words have fewer dimensions than the LSTM has units. One matrix P (embedding × hidden) joins the two: Pᵀ takes a word's
embedding to the LSTM's input, P takes the LSTM's output h to the features that the softmax sees and memorises.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hebbian_softmax import HebbianSoftmax
from hebbian_softmax.lab.language.model.base import LanguageModel, NetworkOptions, dropout

State = Sequence[tuple[Tensor, Tensor]]
"""The output h and the cell c of each layer, both (1, batch, hidden)."""


class WordLSTM(LanguageModel):
    """The paper's LSTM. Words come as (time, batch), the layout that cuDNN reads.

    With `tied` options there is one matrix for embedding and softmax, and one P; otherwise there are two of each.
    """

    takes = ("layer_norm", "recurrent_dropout")

    def __init__(
        self, head: HebbianSoftmax, options: NetworkOptions, *, memorizes: bool, precision: torch.dtype = torch.float32
    ) -> None:
        super().__init__(head, options, memorizes=memorizes, precision=precision)
        words, features, hidden = head.num_classes, head.in_features, options.hidden
        self.embedding = None if options.tied else nn.Embedding(words, features)
        layer = LayerNormLSTM if options.layer_norm == "cell" else LSTMLayer
        self.layers = nn.ModuleList(layer(hidden, hidden, options.recurrent_dropout) for _ in range(options.layers))
        self.projection = None if features == hidden else _projection(features, hidden)
        self.entry = self.projection if options.tied or self.projection is None else _projection(features, hidden)
        self.norm = nn.LayerNorm(features) if options.layer_norm == "output" else None
        if self.embedding is not None:
            nn.init.uniform_(self.embedding.weight, -(features**-0.5), features**-0.5)  # like the head's rows

    def features(self, inputs: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        table = self.head.weight if self.embedding is None else self.embedding.weight
        x, options = F.embedding(inputs, table).to(self.precision), self.options
        x = dropout(x, options.input_dropout, self.training, locked=options.locked_dropout)
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

    def first_state(self, batch: int) -> State:
        hidden, like = self.options.hidden, self.head.weight
        zeros = torch.zeros(1, batch, hidden, dtype=self.precision, device=like.device)
        return [(zeros.clone(), zeros.clone()) for _ in self.layers]


def _projection(features: int, hidden: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(features, hidden) * features**-0.5)


class LSTMLayer(nn.Module):
    """One layer over a whole sequence in one call of cuDNN, in the dtype of its input.

    W (Pᵀ x) is computed as (W Pᵀ) x: the same function, but the products over all words have 512 dimensions instead of
    2048. The weights are laid out in one piece of memory, because cuDNN would otherwise copy them once more. Autocast
    is switched off because it runs cuDNN's LSTM in float16.

    In training `recurrent_dropout` drops weights from state to state (Wan et al., 2013; Merity et al., 2018): one mask
    holds for all words of a call, so that cuDNN still reads the whole sequence with one matrix.
    """

    def __init__(self, inputs: int, hidden: int, recurrent_dropout: float = 0.0) -> None:
        super().__init__()
        bound = hidden**-0.5
        self.weight_ih = nn.Parameter(torch.empty(4 * hidden, inputs).uniform_(-bound, bound))
        self.weight_hh = nn.Parameter(torch.empty(4 * hidden, hidden).uniform_(-bound, bound))
        self.bias_ih = nn.Parameter(torch.zeros(4 * hidden))
        self.bias_hh = nn.Parameter(torch.zeros(4 * hidden))
        with torch.no_grad():
            self.bias_ih[hidden : 2 * hidden] = 1  # the forget gate, so that the cell remembers at first
        self.hidden, self.recurrent_dropout = hidden, recurrent_dropout

    def forward(
        self, x: Tensor, state: tuple[Tensor, Tensor] | None, entry: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Map (time, batch, inputs) to (time, batch, hidden) and the last state; `entry` comes before the layer."""
        weights = [weight.to(x.dtype) for weight in (self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh)]
        if entry is not None:
            weights[0] = weights[0] @ entry.to(x.dtype)
        weights[1] = F.dropout(weights[1], self.recurrent_dropout, self.training)
        flat = torch.cat([weight.reshape(-1) for weight in weights])
        parts = flat.split([weight.numel() for weight in weights])
        weights = [part.view(weight.shape) for part, weight in zip(parts, weights, strict=True)]
        if state is None:
            zeros = x.new_zeros(1, x.shape[1], self.hidden)
            state = (zeros, zeros)
        with torch.autocast(x.device.type, enabled=False):
            output, h, c = torch.lstm(x, state, weights, True, 1, 0.0, self.training, False, False)
        return output, (h, c)


class LayerNormLSTM(nn.Module):
    """An LSTM layer with layer normalisation inside the cell (Ba et al., 2016).

    The gates come from LN(W x) + LN(R h) + b and the output from LN(c); each LN has its own gain and shift. This is a
    loop over time and so much slower than cuDNN's layer. `recurrent_dropout` is as in `LSTMLayer`.
    """

    def __init__(self, inputs: int, hidden: int, recurrent_dropout: float = 0.0) -> None:
        super().__init__()
        bound = hidden**-0.5
        self.weight_ih = nn.Parameter(torch.empty(4 * hidden, inputs).uniform_(-bound, bound))
        self.weight_hh = nn.Parameter(torch.empty(4 * hidden, hidden).uniform_(-bound, bound))
        self.input_norm, self.hidden_norm, self.cell_norm = map(nn.LayerNorm, (4 * hidden, 4 * hidden, hidden))
        self.hidden, self.recurrent_dropout = hidden, recurrent_dropout

    def forward(
        self, x: Tensor, state: tuple[Tensor, Tensor] | None, entry: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Do what `LSTMLayer.forward` does; the products are in the dtype of `x`."""
        weight = self.weight_ih.to(x.dtype)
        if entry is not None:
            weight = weight @ entry.to(x.dtype)
        wide = self.weight_ih.dtype
        from_input = self.input_norm(F.linear(x, weight).to(wide))
        recurrent = F.dropout(self.weight_hh.to(x.dtype), self.recurrent_dropout, self.training)
        h, c = (x.new_zeros(1, x.shape[1], self.hidden) for _ in range(2)) if state is None else state
        h, c, outputs = h[0], c[0].to(wide), []
        for gates in from_input:
            i, f, g, o = (gates + self.hidden_norm(F.linear(h, recurrent).to(wide))).chunk(4, dim=1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = (o.sigmoid() * self.cell_norm(c).tanh()).to(x.dtype)
            outputs.append(h)
        return torch.stack(outputs), (h.unsqueeze(0), c.unsqueeze(0))
