"""An LSTM with layer normalisation inside the cell (Ba et al., 2016): a loop over time, so much slower than cuDNN's."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LayerNormLSTM(nn.Module):
    """Gates from LN(W x) + LN(R h) + b, and the output from LN(c), each with a gain and a shift of its own."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        bound = hidden**-0.5
        self.weight_ih = nn.Parameter(torch.empty(4 * hidden, inputs).uniform_(-bound, bound))
        self.weight_hh = nn.Parameter(torch.empty(4 * hidden, hidden).uniform_(-bound, bound))
        self.input_norm, self.hidden_norm, self.cell_norm = map(nn.LayerNorm, (4 * hidden, 4 * hidden, hidden))
        self.hidden = hidden

    def forward(
        self, x: Tensor, state: tuple[Tensor, Tensor] | None, entry: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """(time, batch, inputs) to (time, batch, hidden), with `entry` before it; products in the dtype of `x`."""
        weight = self.weight_ih.to(x.dtype)
        if entry is not None:
            weight = weight @ entry.to(x.dtype)
        wide = self.weight_ih.dtype
        from_input = self.input_norm(F.linear(x, weight).to(wide))
        recurrent = self.weight_hh.to(x.dtype)
        h, c = (x.new_zeros(1, x.shape[1], self.hidden) for _ in range(2)) if state is None else state
        h, c, outputs = h[0], c[0].to(wide), []
        for gates in from_input:
            i, f, g, o = (gates + self.hidden_norm(F.linear(h, recurrent).to(wide))).chunk(4, dim=1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = (o.sigmoid() * self.cell_norm(c).tanh()).to(x.dtype)
            outputs.append(h)
        return torch.stack(outputs), (h.unsqueeze(0), c.unsqueeze(0))
