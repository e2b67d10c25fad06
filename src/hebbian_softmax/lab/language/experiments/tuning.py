"""Tuning of language models: which settings are tried, and which of them are chosen.

As in the paper (section 4.2), the network is tuned first, with a plain softmax, then each rule on top of it, all with
equally many trials. The paper's own choice comes first in every grid, so it is always tried. The lowest validation
perplexity at the last evaluation wins. The tuning has a seed of its own and never sees the test text.
"""

import dataclasses
import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, TypeVar, cast

from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.base.rule import (
    DEFAULT_FADE,
    DEFAULT_GAMMA,
    DEFAULT_LIMIT,
    DEFAULT_RATE,
    DEFAULT_START,
    DEFAULT_WRITE,
    LITERAL_RULE,
    RULE_BEFORE,
)
from hebbian_softmax.lab.base.settings import setting
from hebbian_softmax.lab.language.experiments.trials import Bench, Outcome, Trial
from hebbian_softmax.lab.language.model import Sizes
from hebbian_softmax.lab.language.names import PLAIN
from hebbian_softmax.lab.language.settings import TrainSettings

S = TypeVar("S")
Grid = Mapping[str, Sequence[Any]]
"""The values to try of some settings, by name."""
Candidate = dict[str, Any]
"""One value of each of these settings, by name."""

SEED = 1000
NETWORK = ("hidden", "layers", "input_dropout", "output_dropout", "layer_norm", "tied", "learning_rate")
RULE = ("limit", "gamma")
GAMMAS = (DEFAULT_GAMMA, 0.1, 0.3)
"""The values of γ that are tried with writes of the library's default."""
USUAL = "usual"
"""The word on the command line that stands for the experiment's own grid."""
OF_A_TRIAL = ("preset", "head", "final", "max_seconds", "seed", "tensorboard")
"""Options of `hebbian train` that an experiment decides for each of its trials."""


@dataclass(frozen=True)
class Rule:
    """A variant of the Hebbian rule with a row of its own in the tables, and the settings that define it."""

    short: str
    title: str
    settings: Mapping[str, Any]


LITERAL = Rule("literal", "literal rule", {"rule_scale": "1", **LITERAL_RULE})
"""The paper's Algorithm 1 as printed."""
DEFAULT = Rule(
    "default",
    "default rule",
    {"rate": DEFAULT_RATE, "rule_scale": "match", "write": DEFAULT_WRITE, "start": DEFAULT_START, "fade": DEFAULT_FADE},
)
"""The library's default."""
CORRECTED = Rule("corrected", "corrected rule", {"rule_scale": "match", **RULE_BEFORE, "rate": "inclusive"})
"""The rule that version 0.1 had in place of the default: centred from the first step on, with a count that includes
the batch."""


@dataclass(frozen=True)
class Row:
    """One row of final models: its name in folders, its title in tables, and its settings apart from the seed."""

    short: str
    title: str
    settings: TrainSettings


def vary_rules(rows: Sequence[Row], name: str, variants: Mapping[Any, tuple[str, str]]) -> list[Row]:
    """Replace each row of a rule by one row for each value of the setting `name`; keep rows with a plain softmax.

    `variants` says by value what is added to a row's name in folders and to its title in tables.
    """
    found: list[Row] = []
    for row in rows:
        varied = [
            Row(f"{row.short}-{short}", f"{row.title}, {title}", replace(row.settings, **{name: value}))
            for value, (short, title) in variants.items()
        ]
        found += [row] if row.settings.head == "plain" else varied
    return found


def usual_or(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a parser that also accepts the word `usual`.

    >>> usual_or(int)("3"), usual_or(int)("usual")
    (3, 'usual')
    """
    return lambda text: text if text == USUAL else parse(text)


def several(parse: Callable[[str], Any]) -> Callable[[str], str]:
    """Return a parser of values separated by commas, which also accepts the word `usual`.

    >>> several(float)("0.1,0.10,2"), several(float)("usual")
    ('0.1,2.0', 'usual')
    """

    def parse_all(text: str) -> str:
        if text == USUAL:
            return text
        return ",".join(dict.fromkeys(as_text(parse(part.strip())) for part in text.split(",")))

    return parse_all


def as_text(value: Any) -> str:
    """Return a setting's value as the command line and the tables show it.

    >>> as_text(True), as_text(0.5)
    ('yes', '0.5')
    """
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


def grid_settings(
    own: type[S], trained: type[TrainSettings], left_out: Collection[str] = (), **defaults: Any
) -> type[S]:
    """Extend an experiment's own settings by those of one training; those that are tuned take several values.

    The experiment decides the fields `left_out` of `trained` itself; `defaults` are other defaults for fields of `own`.
    """
    fields: list[tuple[str, Any, Any]] = []
    taken = {*OF_A_TRIAL, *left_out}
    for field in dataclasses.fields(cast(Any, own)):
        taken.add(field.name)
        if field.name in defaults:
            fields.append((field.name, field.type, setting(defaults[field.name], **field.metadata)))
    for field in dataclasses.fields(trained):
        if field.name in taken:
            continue
        if field.name in NETWORK + RULE:
            values = " (yes, no)" if isinstance(field.default, bool) else ""
            help = f"{field.metadata['help']}{values}; give one value or several separated by commas"
            fields.append((field.name, str, setting(USUAL, help, several(field.metadata["parse"]))))
        else:
            fields.append((field.name, field.type, setting(field.default, **field.metadata)))
    return cast(type[S], dataclasses.make_dataclass(own.__name__, fields, bases=(own,), frozen=True))


def base_settings(settings: object, trained: type[TrainSettings], preset: str, **more: Any) -> TrainSettings:
    """Return the settings that all trials share, from an experiment's settings; `more` overrides them."""
    names = [field.name for field in dataclasses.fields(trained) if field.name not in NETWORK + RULE]
    given = {name: getattr(settings, name) for name in names if hasattr(settings, name)}
    return trained(**{**given, "preset": preset, "tensorboard": "no", "final": "none", **more})


def paper_sweep(sizes: Sizes) -> Grid:
    """Return the paper's 96 LSTMs; a smaller preset tries half, once and twice its own number of units.

    Layer norm is applied to the LSTM's output; inside the cell (`--layer-norm none,cell`) it is much slower.
    """
    return {
        "hidden": (sizes.hidden, sizes.hidden // 2, 2 * sizes.hidden),
        "layers": (1, 2),
        "input_dropout": (0.3, 0.2, 0.1, 0.0),
        "output_dropout": (0.0,),
        "layer_norm": ("none", "output"),
        "tied": (True, False),
        "learning_rate": (sizes.learning_rate,),
    }


def around_choice(sizes: Sizes) -> Grid:
    """Return one network, with learning rates around the preset's, as the paper names none.

    With a preset of the LSTM it is the LSTM that the paper chose.
    """
    chosen = {name: values[:1] for name, values in paper_sweep(sizes).items()}
    rate = sizes.learning_rate
    return {
        **chosen,
        "layers": (sizes.layers,),
        "input_dropout": (0.3, 0.2, 0.1),
        "learning_rate": (rate, rate / 2, 2 * rate),
    }


def paper_rule(preset: str) -> Grid:
    """Return T × γ of section 4.2; a smaller preset sees fewer words, so it tries smaller T."""
    if preset == "paper":
        return {"limit": (500, 100, 1000), "gamma": (0.25, 0.1, 0.05)}
    return {"limit": (20, 5, 100), "gamma": (0.05, 0.1, 0.25)}


def usual_rule(write: str, preset: str) -> Grid:
    """Return T × γ for a kind of write: around the library's default where that is written, else the paper's."""
    return {"limit": (DEFAULT_LIMIT, 50, 300), "gamma": GAMMAS} if write == DEFAULT_WRITE else paper_rule(preset)


def candidates(settings: object, grid: Grid) -> list[Candidate]:
    """Return all combinations of a grid, with the values from the command line where `settings` has some."""
    parsers = {field.name: field.metadata["parse"] for field in dataclasses.fields(TrainSettings)}
    values = [
        usual if (given := getattr(settings, name)) == USUAL else [parsers[name](part) for part in given.split(",")]
        for name, usual in grid.items()
    ]
    return [dict(zip(grid, combination, strict=True)) for combination in product(*values)]


def subset(grid: Sequence[Candidate], count: int) -> list[Candidate]:
    """Return the first and `count` - 1 others, always the same ones, in the order of the grid."""
    if count >= len(grid):
        return list(grid)
    others = random.Random(0).sample(range(1, len(grid)), count - 1)
    return [grid[number] for number in (0, *sorted(others))]


def rule_candidates(best: Sequence[Candidate], grid: Sequence[Candidate], count: int) -> list[Candidate]:
    """Return `count` settings of a rule: on the best network first, then on the next best.

    `best` are the networks that were tried with a plain softmax, the best one first.
    """
    if count <= len(grid):
        return [{**best[0], **each} for each in subset(grid, count)]
    return [{**network, **each} for network in best for each in grid][:count]


def tune(
    bench: Bench,
    base: TrainSettings,
    networks: Sequence[Candidate],
    rules: Sequence[tuple[Rule, Sequence[Candidate]]],
    *,
    trials: int,
    share: float = 1.0,
) -> list[Row]:
    """Return the rows chosen for the plain softmax and for each rule, which comes with the settings to try.

    Each of them gets equally many trials: `trials`, or one for each network where there are fewer networks. With
    `trials` 0 nothing is tried, and the first candidate of each grid is taken. A trial takes `share` of the training
    steps.
    """

    def row(rule: Rule | None, candidate: Candidate) -> Row:
        if rule is None:
            return Row(PLAIN.key, PLAIN.title, replace(base, head="plain", **candidate))
        return Row(rule.short, rule.title, replace(base, head="hebbian", **rule.settings, **candidate))

    if not trials:
        return [row(None, networks[0]), *(row(rule, {**networks[0], **grid[0]}) for rule, grid in rules)]
    steps = max(1, round(base.steps * share)) if base.steps else 0

    def try_all(rows: Sequence[Row]) -> list[Outcome]:
        asked = []
        for number, each in enumerate(rows):
            settings = replace(each.settings, epochs=base.epochs * share, steps=steps, seed=SEED)
            asked.append(Trial("tuning", f"{each.short}-{number:02}", each.title, settings))
        return bench.do(asked)

    tried = subset(networks, trials)
    rows = [row(None, each) for each in tried]
    plain = try_all(rows)
    chosen = [rows[best_of(plain)]]
    order = sorted(range(len(tried)), key=lambda number: plain[number].valid)
    best = [tried[number] for number in order]
    for rule, grid in rules:
        rows = [row(rule, each) for each in rule_candidates(best, grid, len(tried))]
        chosen.append(rows[best_of(try_all(rows))])
    return chosen


def best_of(outcomes: Sequence[Outcome]) -> int:
    """Return the index of the lowest validation perplexity, the first one among equals."""
    best = min(range(len(outcomes)), key=lambda number: outcomes[number].valid)
    if math.isinf(outcomes[best].valid):
        raise LabError(
            f"the numbers of every trial of {outcomes[best].title} ({len(outcomes)} in all) became infinite or nan: "
            "start a new run with lower values of --learning-rate"
        )
    return best


def final_trials(rows: Sequence[Row], seeds: int) -> list[Trial]:
    """Return each row's trials from seeds 0, 1, …, seed by seed, so that a budget leaves whole comparisons."""
    return [
        Trial("final", row.short, row.title, replace(row.settings, seed=seed)) for seed in range(seeds) for row in rows
    ]
