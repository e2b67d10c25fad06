"""The networks that a language model can be made of, by the name that `--model` takes.

A new network is one file with a subclass of `LanguageModel`, and one line here.
"""

from hebbian_softmax.lab.language.model.base import LAYER_NORMS, LanguageModel, NetworkOptions
from hebbian_softmax.lab.language.model.lstm import WordLSTM

__all__ = ["LAYER_NORMS", "MODELS", "LanguageModel", "NetworkOptions"]

MODELS: dict[str, type[LanguageModel]] = {"lstm": WordLSTM}
