"""The networks that a language model can be made of, by the name that `--model` takes.

A new network is one file with a subclass of `LanguageModel`, and one line here.
"""

from hebbian_softmax.lab.language.model.base import (
    LAYER_NORMS,
    PRESETS,
    Carried,
    LanguageModel,
    NetworkOptions,
    Sizes,
    dropout,
)
from hebbian_softmax.lab.language.model.lstm import WordLSTM
from hebbian_softmax.lab.language.model.transformer import Transformer

__all__ = ["LAYER_NORMS", "MODELS", "PRESETS", "Carried", "LanguageModel", "NetworkOptions", "Sizes", "dropout"]

MODELS: dict[str, type[LanguageModel]] = {"lstm": WordLSTM, "transformer": Transformer}
