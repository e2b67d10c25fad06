"""The settings that a sweep tries: lists on the command line, the paper's grids where none is given.

The paper sweeps the LSTM first (section 4.2), then T and γ of the rule with the LSTM that was best (4.2, WikiText-103).
Its own choice stands first in every list, so that it is among the settings tried however few they are.
"""

import dataclasses
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import product
from typing import Any

from hebbian_softmax.lab.base.settings import setting
from hebbian_softmax.lab.language.settings import PRESETS, TrainSettings

Candidate = dict[str, Any]
"""Values of some settings, by name."""

LSTM = ("hidden", "layers", "input_dropout", "output_dropout", "layer_norm", "tied", "learning_rate")
RULE = ("limit", "gamma")
USUAL = "usual"
# What belongs to a single training: a sweep decides it for each of its trials.
OF_A_TRIAL = ("preset", "head", "final", "max_seconds", "seed", "tensorboard")


def several(parse: Callable[[str], Any]) -> Callable[[str], str]:
    """Parses values with commas between them, or the word that stands for the recipe's own.

    >>> several(float)("0.1,0.10,2"), several(float)("usual")
    ('0.1,2.0', 'usual')
    """

    def parse_all(text: str) -> str:
        return text if text == USUAL else ",".join(dict.fromkeys(str(parse(part.strip())) for part in text.split(",")))

    return parse_all


def grid_settings(
    name: str, own: type, trained: type[TrainSettings], left_out: Collection[str] = (), **defaults: Any
) -> type:
    """The fields of `own`, then those of `trained` that are left; those of the grids take several values.

    `defaults` are other defaults of fields of `own`.
    """
    fields: list[tuple[str, Any, Any]] = [
        (field.name, field.type, setting(defaults[field.name], **field.metadata))
        for field in dataclasses.fields(own)
        if field.name in defaults
    ]
    taken = {field.name for field in dataclasses.fields(own)} | {*OF_A_TRIAL, *left_out}
    for field in dataclasses.fields(trained):
        if field.name in taken:
            continue
        if field.name in LSTM + RULE:
            help = f"{field.metadata['help']}: one, or several with commas between them"
            fields.append((field.name, str, setting(USUAL, help, several(field.metadata["parse"]))))
        else:
            fields.append((field.name, field.type, setting(field.default, **field.metadata)))
    return dataclasses.make_dataclass(name, fields, bases=(own,), frozen=True)


def base_settings(settings: Any, trained: type[TrainSettings], preset: str, **more: Any) -> TrainSettings:
    """The settings of a trial before a candidate's are put into them."""
    names = [field.name for field in dataclasses.fields(trained) if field.name not in LSTM + RULE]
    given = {name: getattr(settings, name) for name in names if hasattr(settings, name)}
    return trained(**{**given, "preset": preset, "tensorboard": "no", "final": "none", **more})


def paper_sweep(preset: str) -> dict[str, tuple[Any, ...]]:
    """The paper's 96 LSTMs; a smaller preset has a half, once and twice its own units.

    Layer norm is that of the output; the one inside the cell (`--layer-norm none,cell`) is far slower.
    """
    sizes = PRESETS[preset]
    return {
        "hidden": (sizes.hidden, sizes.hidden // 2, 2 * sizes.hidden),
        "layers": (1, 2),
        "input_dropout": (0.3, 0.2, 0.1, 0.0),
        "output_dropout": (0.0,),
        "layer_norm": ("none", "output"),
        "tied": (True, False),
        "learning_rate": (sizes.learning_rate,),
    }


def around_choice(preset: str) -> dict[str, tuple[Any, ...]]:
    """The LSTM that the paper chose, with learning rates around the preset's, which the paper does not name."""
    sizes = PRESETS[preset]
    return {
        "hidden": (sizes.hidden,),
        "layers": (1,),
        "input_dropout": (0.3, 0.2, 0.1),
        "output_dropout": (0.0,),
        "layer_norm": ("none",),
        "tied": (True,),
        "learning_rate": (sizes.learning_rate, sizes.learning_rate / 2, 2 * sizes.learning_rate),
    }


def paper_rule(preset: str) -> dict[str, tuple[Any, ...]]:
    """T × γ of section 4.2; a smaller preset sees fewer words, so its T are smaller."""
    if preset == "paper":
        return {"limit": (500, 100, 1000), "gamma": (0.25, 0.1, 0.05)}
    return {"limit": (20, 5, 100), "gamma": (0.05, 0.1, 0.25)}


def candidates(
    settings: Any, names: Sequence[str], usual: Mapping[str, Sequence[Any]], trained: type[TrainSettings]
) -> list[Candidate]:
    """All combinations of the values given on the command line, or the usual ones, of the settings named."""
    parsers = {field.name: field.metadata["parse"] for field in dataclasses.fields(trained)}
    values = [
        usual[name]
        if (given := getattr(settings, name)) == USUAL
        else [parsers[name](part) for part in given.split(",")]
        for name in names
    ]
    return [dict(zip(names, combination, strict=True)) for combination in product(*values)]


def subset(grid: Sequence[Candidate], count: int) -> list[Candidate]:
    """The first and `count` - 1 others, drawn once and for all, in the order of the grid."""
    if count >= len(grid):
        return list(grid)
    others = random.Random(0).sample(range(1, len(grid)), count - 1)
    return [grid[number] for number in (0, *sorted(others))]


def rule_candidates(best: Sequence[Candidate], grid: Sequence[Candidate], count: int) -> list[Candidate]:
    """`count` settings of the rule, as many as the LSTM had: on the best LSTM, then on the next best.

    `best` are the LSTMs tried with a plain softmax, the best first.
    """
    if count <= len(grid):
        return [{**best[0], **each} for each in subset(grid, count)]
    return [{**lstm, **each} for lstm in best for each in grid][:count]
