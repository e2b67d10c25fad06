"""The options of `hebbian train` and `hebbian compare` on a corpus, and the choices that they offer."""

import argparse
from dataclasses import dataclass

from hebbian_softmax.lab.base.rule import (
    RATES,
    fade_setting,
    gamma_setting,
    limit_setting,
    rate_setting,
    start_setting,
    write_setting,
)
from hebbian_softmax.lab.base.settings import choice, integer, number, positive, setting
from hebbian_softmax.lab.language.model import LAYER_NORMS, MODELS, PRESETS, NetworkOptions, Sizes

OBJECTIVES = ("l2", "ip", "svm", "smax")
OPTIMIZERS = ("one-pass-adam", "one-pass-rmsprop", "adam", "rmsprop", "sgd")
SCHEDULES = ("constant", "cosine", "linear")
FINAL = {"both": ("valid", "test"), "valid": ("valid",), "none": ()}


def model_name(text: str) -> str:
    """Parse the name of a network that is registered by the time of the call."""
    return choice(*MODELS)(text)


def rule_scale(text: str) -> str:
    """Parse `match` or a number. The value stays a text, as the command line has it."""
    return text if text == "match" else f"{number(0)(text):g}"


def share(text: str) -> float:
    """Parse a number from 0 to below 1."""
    value = number(0, 1)(text)
    if value == 1:
        raise argparse.ArgumentTypeError("must be below 1")
    return value


@dataclass(frozen=True)
class Settings:
    """The settings that `hebbian train` and `hebbian compare` share. A size of 0 stands for the preset's."""

    preset: str = setting("small", f"the sizes: {', '.join(PRESETS)}; each size has an option, too", choice(*PRESETS))
    model: str = setting("lstm", f"the network: {', '.join(MODELS)}", model_name, later=True)
    layers: int = setting(0, "layers of the network; 0: the preset's", integer(0, 100))
    hidden: int = setting(0, "units of each layer, or of a Transformer's MLPs; 0: the preset's", integer(0, 65_536))
    embedding: int = setting(
        0, "dimensions of words, and of what the softmax sees; 0: the preset's", integer(0, 65_536)
    )
    batch: int = setting(0, "sequences in a training step, over all processes; 0: the preset's", integer(0, 1_000_000))
    sequence: int = setting(
        0, "words in a sequence, the most that a Transformer sees at once; 0: the preset's", integer(0, 100_000)
    )
    input_dropout: float = setting(0.3, "dropout of the embedded words", share)
    output_dropout: float = setting(0.0, "dropout of what the softmax sees; what comes before it is memorised", share)
    layer_norm: str = setting(
        "none", f"lstm: layer normalisation: {', '.join(LAYER_NORMS)} (much slower)", choice(*LAYER_NORMS)
    )
    tied: bool = setting(True, "share one matrix between embedding and softmax, and one between both projections")
    recurrent_dropout: float = setting(
        0.0, "lstm: dropout of the weights from state to state, one mask for all words of a batch", share, later=True
    )
    locked_dropout: bool = setting(
        False, "let input and output dropout draw one mask for all words of a sequence", later=True
    )
    carry: bool = setting(
        False, "lstm: train on the text in order, each sequence with the state after the one before it", later=True
    )
    heads: int = setting(8, "transformer: heads of attention", integer(1, 1024), later=True)
    residual_dropout: float = setting(
        0.0, "transformer: dropout of what attention and MLP add in each layer", share, later=True
    )
    attention_dropout: float = setting(0.0, "transformer: dropout of the weights of attention", share, later=True)

    limit: int | str = limit_setting("T: words seen so often are no longer written")
    gamma: float = gamma_setting()
    rate: str = rate_setting(*RATES)
    objective: str = setting("l2", f"the rule's inner objective: {', '.join(OBJECTIVES)}", choice(*OBJECTIVES))
    rule_scale: str = setting("match", "factor on what is written: a number (the paper: 1), or match", rule_scale)
    write: str = write_setting("--write literal --rate paper --rule-scale 1 --start 0 --no-fade")
    start: int | str = start_setting()
    fade: bool = fade_setting()

    optimizer: str = setting("one-pass-adam", f"the optimizer: {', '.join(OPTIMIZERS)}", choice(*OPTIMIZERS))
    learning_rate: float = setting(0.0, "the highest learning rate of the schedule; 0: the preset's", number(0))
    momentum: float = setting(0.0, "β₁ of Adam, momentum of SGD and RMSprop; one-pass-rmsprop has none", share)
    weight_decay: float = setting(0.0, "L2 penalty", number(0))
    schedule: str = setting(
        "cosine", f"the learning rate after the warm-up: {', '.join(SCHEDULES)}", choice(*SCHEDULES)
    )
    warmup: int = setting(50, "steps in which the learning rate rises", integer(0))
    clip: float = setting(1.0, "largest norm of the gradient; 0: no limit", number(0))
    accumulate: int = setting(1, "parts in which each process computes its batch, to save memory", integer(1))
    precision: str = setting("auto", "fp32, bf16, or auto: bf16 on a GPU", choice("auto", "fp32", "bf16"))

    epochs: float = setting(1.0, "passes over the training text, unless --steps or --max-seconds is given", positive)
    steps: int = setting(0, "training steps; 0: from --epochs", integer(0))
    max_seconds: float = setting(
        0.0, "time for the whole run: the speed is measured first, then the steps are fixed; 0: no limit", number(0)
    )
    evaluations: int = setting(20, "evaluations on the validation text while training", integer(1))
    valid_streams: int = setting(32, "parts of the validation text that each evaluation reads side by side", integer(1))
    valid_words: int = setting(0, "words of the validation text that each evaluation predicts; 0: all", integer(0))
    final: str = setting("both", "texts that the trained model is measured on: both, valid or none", choice(*FINAL))

    checkpoint_seconds: float = setting(300.0, "seconds between checkpoints", number(0))
    deterministic: bool = setting(False, "make a resumed run end in the same bits on a GPU, too; slower")
    tensorboard: str = setting(
        "auto", "write TensorBoard files: yes, no, or auto: if TensorBoard is installed", choice("auto", "yes", "no")
    )
    seed: int = setting(0, "seed of the first weights, the order of the text and dropout", integer(0, 2**32 - 1))
    device: str = setting("auto", "auto, cpu or cuda", choice("auto", "cpu", "cuda"))
    data_root: str = setting("", "folder of the corpora's sources (default: HEBBIAN_DATA, else downloaded)", str)

    @property
    def sizes(self) -> Sizes:
        """The sizes given, and where none is given those of the preset for this model."""
        preset = MODELS[self.model].presets[self.preset]
        return Sizes(**{name: getattr(self, name) or getattr(preset, name) for name in Sizes.__dataclass_fields__})

    @property
    def network(self) -> NetworkOptions:
        """The settings that the network is built from."""
        sizes = self.sizes
        return NetworkOptions(
            hidden=sizes.hidden,
            layers=sizes.layers,
            input_dropout=self.input_dropout,
            tied=self.tied,
            layer_norm=self.layer_norm,
            recurrent_dropout=self.recurrent_dropout,
            locked_dropout=self.locked_dropout,
            output_dropout=self.output_dropout if self.locked_dropout else 0.0,
            heads=self.heads,
            residual_dropout=self.residual_dropout,
            attention_dropout=self.attention_dropout,
            context=sizes.sequence,
        )


@dataclass(frozen=True)
class TrainSettings(Settings):
    """The settings of `hebbian train`, which trains one head; `hebbian compare` trains both."""

    head: str = setting("hebbian", "the output layer: hebbian or plain", choice("hebbian", "plain"))


@dataclass(frozen=True)
class FolderSource:
    """The settings of a corpus that the command line has no name for."""

    corpus: str = setting("", "folder of a prepared corpus", str)


@dataclass(frozen=True)
class ZipfSource:
    """The settings of a corpus of made-up words."""

    vocabulary: int = setting(10_000, "different words", integer(2, 10_000_000))
    tokens: int = setting(1_000_000, "words of the training text", integer(100))


@dataclass(frozen=True)
class FolderTrain(TrainSettings, FolderSource):
    pass


@dataclass(frozen=True)
class FolderCompare(Settings, FolderSource):
    pass


@dataclass(frozen=True)
class ZipfTrain(TrainSettings, ZipfSource):
    pass


@dataclass(frozen=True)
class ZipfCompare(Settings, ZipfSource):
    pass
