"""The interface that training, evaluation and memories expect of a language model, whatever its network is."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hebbian_softmax import HebbianSoftmax
from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.base.settings import option_name

LAYER_NORMS = ("none", "output", "cell")
Carried = Sequence[tuple[Tensor, ...]]
"""A state that training carries from step to step: tensors for each layer."""
SPECIAL = ("layer_norm", "recurrent_dropout", "heads", "residual_dropout", "attention_dropout")
"""The fields of `NetworkOptions` that mean something to some networks only."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model and of its batches, with a learning rate that suits them."""

    layers: int
    hidden: int
    embedding: int
    batch: int
    sequence: int
    learning_rate: float


PRESETS = {
    "paper": Sizes(layers=1, hidden=2048, embedding=512, batch=512, sequence=100, learning_rate=0.002),
    "small": Sizes(layers=1, hidden=512, embedding=256, batch=64, sequence=64, learning_rate=0.005),
    "tiny": Sizes(layers=1, hidden=128, embedding=64, batch=16, sequence=32, learning_rate=0.01),
}
"""The sizes of the LSTM, and of each network that does not say otherwise."""


@dataclass(frozen=True)
class NetworkOptions:
    """The settings that concern the network between the words and the output layer."""

    hidden: int
    """Units of each layer; those of the MLP in a Transformer."""
    layers: int = 1
    input_dropout: float = 0.0
    """Dropout of the embedded words, in training."""
    tied: bool = True
    """Whether the rows of the output layer are the embedding, too."""
    layer_norm: str = "none"
    """One of `LAYER_NORMS`: `output` normalises what the output layer sees, `cell` normalises inside a layer."""
    recurrent_dropout: float = 0.0
    """Dropout of the weights from state to state, in training: one mask for each window of text."""
    locked_dropout: bool = False
    """Whether input and output dropout draw one mask for all words of a window, instead of one for each word."""
    output_dropout: float = 0.0
    """Dropout of the features, if it is locked; otherwise the head applies it."""
    heads: int = 8
    """Heads of attention."""
    residual_dropout: float = 0.0
    """Dropout of what attention and MLP add, in training."""
    attention_dropout: float = 0.0
    """Dropout of the weights of attention, in training."""
    context: int = 64
    """The largest number of words that a network with attention sees at once: those of a window in training."""


class LanguageModel(nn.Module):
    """A network that reads words and an output layer that predicts the next one.

    A subclass builds its network from `options` and defines `features`. Everything else that the laboratory needs is
    here or in `nn.Module`. All buffers must be the head's, because processes that train together exchange those only.

    Args:
        head: the output layer. It has `head.num_classes` words and takes `head.in_features` features.
        options: the settings of the network.
        memorizes: whether `forward` gives its activations to the head to remember. A head that remembers nothing is
            exactly a plain softmax.
        precision: the dtype of the features and of the network's products; the parameters stay in float32.
    """

    presets: ClassVar[Mapping[str, Sizes]] = PRESETS
    """The sizes that `--preset` stands for."""
    takes: ClassVar[tuple[str, ...]] = ()
    """Those of the `SPECIAL` options that the network uses; values of the others are refused."""

    def __init__(
        self, head: HebbianSoftmax, options: NetworkOptions, *, memorizes: bool, precision: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        for name in SPECIAL:
            if name not in self.takes and (value := getattr(options, name)) != getattr(NetworkOptions, name):
                raise LabError(f"this --model has no use for {option_name(name)} {value}: omit it, or change --model")
        self.head, self.options, self.memorizes, self.precision = head, options, memorizes, precision
        self.reached: Any = None
        """The state after the last call of `forward` that was given a state; who takes it sets it to None."""

    def features(self, inputs: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """Return what the head is given for each word, and the state after the last word.

        `inputs` are words (time, batch); the features are (time, batch, `head.in_features`) in `precision`. `state` is
        None at the beginning of a text, and otherwise what the call for the words before has returned. A text that is
        read in pieces has the features of the text read at once, up to rounding.
        """
        raise NotImplementedError

    def first_state(self, batch: int) -> Carried | None:
        """Return the state before the first word of a text, in tensors that training may overwrite after each step.

        A network whose state does not always have the same shape returns None: it begins each sequence anew.
        """
        return None

    def forward(self, inputs: Tensor, targets: Tensor, state: Any = None) -> Tensor:
        """Return the mean cross-entropy of `targets`, each predicted from the words before it in its column."""
        features, after = self.features(inputs, state)
        if state is not None:
            self.reached = after
        with torch.autocast(features.device.type, torch.bfloat16, enabled=self.precision == torch.bfloat16):
            if not self.options.locked_dropout:
                return self.head.loss(features, targets, remember=self.memorizes)
            # The head drops single elements and remembers what came before. A mask for a whole window is made here,
            # so the head is told apart what to remember.
            if self.memorizes:
                self.head.remember(features, targets)
            dropped = dropout(features, self.options.output_dropout, self.training, locked=True)
            return self.head.loss(dropped, targets, remember=False)


def dropout(x: Tensor, share: float, training: bool, *, locked: bool, time: int = 0) -> Tensor:
    """Drop elements of `x`; with `locked` the same ones in all places along the dimension `time`."""
    if not locked:
        return F.dropout(x, share, training)
    kept = torch.ones_like(x.select(time, 0)).unsqueeze(time)
    return x * F.dropout(kept, share, training)
