"""The options of `hebbian train` and `hebbian compare` on a corpus."""

import argparse
from dataclasses import dataclass

from hebbian_softmax.lab.base.settings import choice, integer, number, setting
from hebbian_softmax.lab.language.head import OBJECTIVES, RATES
from hebbian_softmax.lab.language.model.lstm import LAYER_NORMS
from hebbian_softmax.lab.language.optimizers import OPTIMIZERS
from hebbian_softmax.lab.language.schedule import SCHEDULES


@dataclass(frozen=True)
class Sizes:
    """Of a model and its batches, with a learning rate that suits them."""

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
FINAL = {"both": ("valid", "test"), "valid": ("valid",), "none": ()}
YES_NO = choice("yes", "no")


def rule_scale(text: str) -> str:
    """`match` or a number: kept as text, as the command line has it."""
    return text if text == "match" else f"{number(0)(text):g}"


def share(text: str) -> float:
    """A number from 0 to below 1."""
    value = number(0, 1)(text)
    if value == 1:
        raise argparse.ArgumentTypeError("must be below 1")
    return value


def passes(text: str) -> float:
    """A number above 0."""
    value = number(0)(text)
    if value == 0:
        raise argparse.ArgumentTypeError("must be above 0")
    return value


@dataclass(frozen=True)
class Settings:
    """What both commands share. What is 0 there comes from the preset."""

    preset: str = setting("small", f"sizes: {', '.join(PRESETS)}; each can be given apart", choice(*PRESETS))
    layers: int = setting(0, "LSTM layers, 1 or 2; 0: the preset's", integer(0, 2))
    hidden: int = setting(0, "units of each LSTM layer; 0: the preset's", integer(0, 65_536))
    embedding: int = setting(0, "dimensions of words and of what the softmax sees; 0: the preset's", integer(0, 65_536))
    batch: int = setting(0, "sequences in a training step, over all processes; 0: the preset's", integer(0, 1_000_000))
    sequence: int = setting(0, "words in a sequence; 0: the preset's", integer(0, 100_000))
    input_dropout: float = setting(0.3, "of the embedded words", share)
    output_dropout: float = setting(0.0, "of what the softmax sees; memorised is what was before it", share)
    layer_norm: str = setting(
        "none", f"{', '.join(LAYER_NORMS)}; inside the cell it is much slower", choice(*LAYER_NORMS)
    )
    tied: str = setting("yes", "yes: embedding and softmax are one matrix, and so are both projections", YES_NO)

    limit: int = setting(20, "T, occurrences of a word that the rule writes", integer(0))
    gamma: float = setting(0.05, "γ, smallest mixing rate of the rule", number(0, 1))
    rate: str = setting(
        "inclusive",
        "λ: paper, inclusive (the paper's with a count that includes the batch), constant (γ), inverse (1/c)",
        choice(*RATES),
    )
    objective: str = setting("l2", f"inner objective of the rule: {', '.join(OBJECTIVES)}", choice(*OBJECTIVES))
    rule_scale: str = setting("match", "factor on what is written: a number (the paper: 1), or match", rule_scale)
    center: str = setting("yes", "subtract the mean activation from what is written (the paper: no)", YES_NO)
    start: int = setting(0, "step from which the rule writes; it counts words from the first", integer(0))

    optimizer: str = setting("one-pass-adam", ", ".join(OPTIMIZERS), choice(*OPTIMIZERS))
    learning_rate: float = setting(0.0, "the highest of the schedule; 0: the preset's", number(0))
    momentum: float = setting(0.0, "β₁ of Adam, momentum of SGD and RMSprop; one-pass-rmsprop has none", share)
    weight_decay: float = setting(0.0, "L2 penalty", number(0))
    schedule: str = setting("cosine", f"of the learning rate after warm-up: {', '.join(SCHEDULES)}", choice(*SCHEDULES))
    warmup: int = setting(50, "steps in which the learning rate rises", integer(0))
    clip: float = setting(1.0, "largest norm of the gradient, 0 for any", number(0))
    accumulate: int = setting(1, "parts in which each process computes its batch, to save memory", integer(1))
    precision: str = setting("auto", "fp32, bf16, or auto: bf16 on a GPU", choice("auto", "fp32", "bf16"))

    epochs: float = setting(1.0, "passes over the training text, unless --steps or --max-seconds is given", passes)
    steps: int = setting(0, "training steps; 0: from --epochs", integer(0))
    max_seconds: float = setting(0.0, "time for all of it; the speed is measured, then the steps are fixed", number(0))
    evaluations: int = setting(20, "on the validation text while training", integer(1))
    valid_streams: int = setting(32, "parts of the validation text read side by side then", integer(1))
    valid_words: int = setting(0, "words of the validation text that are predicted then, 0 for all", integer(0))
    final: str = setting("both", "texts that the end is measured on: both, valid or none", choice(*FINAL))

    checkpoint_seconds: float = setting(300.0, "between checkpoints", number(0))
    deterministic: str = setting("no", "yes: a resumed run ends in the same bits, also on a GPU; slower", YES_NO)
    tensorboard: str = setting(
        "auto", "write TensorBoard files: yes, no, or auto: where it is installed", choice("auto", "yes", "no")
    )
    seed: int = setting(0, "for the first weights, the order of the text and dropout", integer(0, 2**32 - 1))
    device: str = setting("auto", "auto, cpu or cuda", choice("auto", "cpu", "cuda"))
    data_root: str = setting("", "folder of the corpora's sources (default: HEBBIAN_DATA, else downloaded)", str)

    @property
    def sizes(self) -> Sizes:
        preset = PRESETS[self.preset]
        return Sizes(**{name: getattr(self, name) or getattr(preset, name) for name in Sizes.__dataclass_fields__})


@dataclass(frozen=True)
class TrainSettings(Settings):
    """`hebbian train` has one head, `hebbian compare` both."""

    head: str = setting("hebbian", "hebbian or plain", choice("hebbian", "plain"))


@dataclass(frozen=True)
class FolderSource:
    """Of a corpus that has no name here."""

    corpus: str = setting("", "folder of a prepared corpus", str)


@dataclass(frozen=True)
class ZipfSource:
    """Of words that are made up."""

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
