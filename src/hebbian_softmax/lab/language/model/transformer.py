"""A Transformer: attention to earlier words and MLPs, between an embedding and a softmax that share one matrix.

Each layer adds to x first attention, then an MLP, both of x normalised (pre-norm). Positions enter as rotations of
queries and keys, so that attention depends on distances alone (Su et al., 2021).

A text of any length is read in windows of `context` words, the length of those in training. A window begins half a
window after the one before it, and gives the features of its second half; only the first one gives all. So every word
after the first window is predicted from at least half a window of words before it, and as far as the place in the
text alone says: it does not matter in which pieces the text is read.
"""

import math
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hebbian_softmax import HebbianSoftmax
from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.language.model.base import LanguageModel, NetworkOptions, Sizes, dropout

SLOWEST = 10_000.0
"""The pairs of dimensions turn by angles from 1 down to nearly 1 / SLOWEST from word to word."""
Turn = tuple[Tensor, Tensor]
"""Cosine and sine of the angle of each position and pair of dimensions, both (time, dimensions / 2)."""


class Transformer(LanguageModel):
    """Layers of attention and MLPs; `hidden` are the units of an MLP. The state is the words of the unfinished window.

    Embeddings are multiplied by the root of their number of dimensions, because the rows of a softmax are short. What
    is added in the layers is kept in the dtype of the parameters; products are in `precision`.
    """

    presets: ClassVar = {
        "paper": Sizes(layers=12, hidden=2048, embedding=512, batch=200, sequence=256, learning_rate=0.0005),
        "small": Sizes(layers=6, hidden=2048, embedding=512, batch=16, sequence=256, learning_rate=0.0005),
        "tiny": Sizes(layers=2, hidden=256, embedding=64, batch=8, sequence=64, learning_rate=0.002),
    }
    takes = ("heads", "residual_dropout", "attention_dropout")

    def __init__(
        self, head: HebbianSoftmax, options: NetworkOptions, *, memorizes: bool, precision: torch.dtype = torch.float32
    ) -> None:
        super().__init__(head, options, memorizes=memorizes, precision=precision)
        width = head.in_features
        if width % (2 * options.heads):
            raise LabError(
                f"--embedding {width} cannot be shared by --heads {options.heads}, each with pairs of dimensions: "
                f"give --embedding a multiple of {2 * options.heads}, or other --heads"
            )
        self.embedding = None if options.tied else nn.Embedding(head.num_classes, width)
        if self.embedding is not None:
            nn.init.uniform_(self.embedding.weight, -(width**-0.5), width**-0.5)  # like the head's rows
        self.layers = nn.ModuleList(TransformerLayer(width, options) for _ in range(options.layers))
        self.norm = nn.LayerNorm(width)

    def features(self, inputs: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        words = inputs if state is None else torch.cat([state, inputs])
        known, batch = len(words) - len(inputs), words.shape[1]
        context = self.options.context
        stride = max(1, context // 2)
        whole = max(0, (len(words) - context) // stride + 1)  # windows that end in these words
        found = []
        if whole:
            windows = words.unfold(0, context, stride)  # (windows, batch, context)
            read = self._read(windows.flatten(0, 1)).unflatten(0, (whole, batch)).transpose(1, 2)
            found.append(read[0, known:])
            if whole > 1:
                found.append(read[1:, context - stride :].flatten(0, 1))
        begun = words[whole * stride :]
        new = len(words) - (context + (whole - 1) * stride) if whole else len(inputs)
        if new:
            found.append(self._read(begun.T).transpose(0, 1)[-new:])
        return (found[0] if len(found) == 1 else torch.cat(found)), begun

    def _read(self, words: Tensor) -> Tensor:
        """Return the features (windows, time, width) of words (windows, time) from the words before in each window."""
        options, table = self.options, self.head.weight if self.embedding is None else self.embedding.weight
        x = F.embedding(words, table) * table.shape[1] ** 0.5
        x = dropout(x, options.input_dropout, self.training, locked=options.locked_dropout, time=1)
        turn = rotation(words.shape[1], table.shape[1] // options.heads, x)
        for layer in self.layers:
            x = layer(x, turn, self.precision)
        normal: Tensor = self.norm(x)
        return normal.to(self.precision)


class TransformerLayer(nn.Module):
    """One layer: x + attention(norm x), then x + MLP(norm x)."""

    def __init__(self, width: int, options: NetworkOptions) -> None:
        super().__init__()
        self.heads = options.heads
        self.attention_dropout, self.residual_dropout = options.attention_dropout, options.residual_dropout
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_in = nn.Linear(width, options.hidden, bias=False)
        self.mlp_out = nn.Linear(options.hidden, width, bias=False)
        with torch.no_grad():  # so that the sum of what all layers add does not grow with their number
            for last in (self.attention_out, self.mlp_out):
                last.weight /= (2 * options.layers) ** 0.5

    def forward(self, x: Tensor, turn: Turn, precision: torch.dtype) -> Tensor:
        """Map (windows, time, width) to the same; `turn` is that of the heads' dimensions."""
        both = _product(self.attention_norm(x).to(precision), self.queries_keys_values)
        split = both.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # (3, windows, heads, time, dimensions)
        queries, keys, values = rotated(split[0], turn), rotated(split[1], turn), split[2]
        share = self.attention_dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(queries, keys, values, dropout_p=share, is_causal=True)
        added = _product(mixed.transpose(1, 2).flatten(2), self.attention_out)
        x = x + F.dropout(added, self.residual_dropout, self.training)
        added = _product(F.gelu(_product(self.mlp_norm(x).to(precision), self.mlp_in)), self.mlp_out)
        return x + F.dropout(added, self.residual_dropout, self.training)


def _product(x: Tensor, layer: nn.Linear) -> Tensor:
    return F.linear(x, layer.weight.to(x.dtype))


def rotation(time: int, dimensions: int, like: Tensor) -> Turn:
    """Return the cosines and sines of `time` positions, on the device and in the dtype of `like`."""
    wide: Any = {"device": like.device, "dtype": torch.float64}
    speeds = (torch.arange(0, dimensions, 2, **wide) * (-math.log(SLOWEST) / dimensions)).exp()
    angles = torch.outer(torch.arange(time, **wide), speeds)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotated(x: Tensor, turn: Turn) -> Tensor:
    """Turn the pairs of dimensions of x (..., time, dimensions); the halves of `dimensions` make the pairs."""
    (cos, sin), (one, other) = turn, x.chunk(2, dim=-1)
    return torch.cat([one * cos - other * sin, other * cos + one * sin], dim=-1).to(x.dtype)
