"""The interface that training, evaluation and memories expect of a language model, whatever its network is."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hebbian_softmax import HebbianSoftmax

LAYER_NORMS = ("none", "output", "cell")


@dataclass(frozen=True)
class NetworkOptions:
    """The settings that concern the network between the words and the output layer."""

    hidden: int
    """Units of each layer."""
    layers: int = 1
    input_dropout: float = 0.0
    """Dropout of the embedded words, in training."""
    tied: bool = True
    """Whether the rows of the output layer are the embedding, too."""
    layer_norm: str = "none"
    """One of `LAYER_NORMS`: `output` normalises what the output layer sees, `cell` normalises inside a layer."""


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

    def __init__(
        self, head: HebbianSoftmax, options: NetworkOptions, *, memorizes: bool, precision: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.head, self.options, self.memorizes, self.precision = head, options, memorizes, precision

    def features(self, inputs: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """Return what the head is given for each word, and the state after the last word.

        `inputs` are words (time, batch); the features are (time, batch, `head.in_features`) in `precision`. `state` is
        None at the beginning of a text, and otherwise what the call for the words before has returned.
        """
        raise NotImplementedError

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy of `targets`, each predicted from the words before it in its column."""
        features, _ = self.features(inputs)
        with torch.autocast(features.device.type, torch.bfloat16, enabled=self.precision == torch.bfloat16):
            return self.head.loss(features, targets, remember=self.memorizes)
