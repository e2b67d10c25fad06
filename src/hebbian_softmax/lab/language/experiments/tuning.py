"""Tuning of language models: the LSTM with a plain softmax, then the rule on top of it, each as often.

What is chosen has the lowest validation perplexity of the last evaluation. The seed of the tuning is none of those
reported, and no trial of it is measured on the test text.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.language.experiments.grids import LSTM, RULE, Candidate, rule_candidates, subset
from hebbian_softmax.lab.language.experiments.trials import Bench, Outcome, Trial
from hebbian_softmax.lab.language.settings import TrainSettings
from hebbian_softmax.lab.report.tables import Cell, Table

SEED = 1000
NAMES = {
    "hidden": "hidden",
    "layers": "layers",
    "input_dropout": "input dropout",
    "output_dropout": "output dropout",
    "layer_norm": "layer norm",
    "tied": "tied",
    "learning_rate": "learning rate",
    "limit": "T",
    "gamma": "γ",
}
PLAIN = "plain softmax"


@dataclass(frozen=True)
class Rule:
    """A way of memorising that gets a row of its own: the settings that make it."""

    short: str
    title: str
    settings: Mapping[str, Any]


LITERAL = Rule("literal", "literal rule", {"rate": "paper", "rule_scale": "1", "center": False})
"""The paper's Algorithm 1 as it stands."""
CORRECTED = Rule("corrected", "corrected rule", {"rate": "inclusive", "rule_scale": "match", "center": True})
"""With the project's scale and centre, and a count that includes the batch."""


def tune(
    bench: Bench,
    base: TrainSettings,
    lstms: Sequence[Candidate],
    rules: Sequence[Rule],
    rule_grid: Sequence[Candidate],
    *,
    trials: int,
    share: float = 1.0,
) -> dict[str, TrainSettings]:
    """The settings chosen for the plain softmax and for each rule, by short name.

    Each gets as many trials: `trials`, or all of the LSTMs where those are fewer. With 0 nothing is tried, and the
    first of each grid is taken. `share` shortens the trials.
    """
    if not trials:
        choice = {**lstms[0], **rule_grid[0]}
        chosen = {"plain": replace(base, head="plain", **lstms[0])}
        return chosen | {rule.short: replace(base, head="hebbian", **rule.settings, **choice) for rule in rules}
    tried = subset(lstms, trials)

    def trial(short: str, title: str, number: int, settings: Mapping[str, Any]) -> Trial:
        length = {"epochs": base.epochs * share, "steps": max(1, round(base.steps * share)) if base.steps else 0}
        return Trial("tuning", f"{short}-{number:02}", title, replace(base, **{**settings, **length, "seed": SEED}))

    plain = bench.do([trial("plain", PLAIN, n, {"head": "plain", **each}) for n, each in enumerate(tried)])
    order = sorted(range(len(tried)), key=lambda number: plain[number].valid)
    chosen = {"plain": replace(base, head="plain", **tried[best_of(plain)])}
    ruled = rule_candidates([tried[number] for number in order], rule_grid, len(tried))
    for rule in rules:
        outcomes = bench.do(
            [
                trial(rule.short, rule.title, n, {"head": "hebbian", **rule.settings, **each})
                for n, each in enumerate(ruled)
            ]
        )
        chosen[rule.short] = replace(base, head="hebbian", **rule.settings, **ruled[best_of(outcomes)])
    return chosen


def best_of(outcomes: Sequence[Outcome]) -> int:
    """The index of the lowest validation perplexity, the first of equal ones."""
    best = min(range(len(outcomes)), key=lambda number: outcomes[number].valid)
    if math.isinf(outcomes[best].valid):
        raise LabError(
            f"every trial of {outcomes[best].title} ({len(outcomes)} in all) ceased to have finite numbers: "
            "start a new run with lower values of --learning-rate"
        )
    return best


def by_title(outcomes: Sequence[Outcome], part: str) -> dict[str, list[Outcome]]:
    """The trials of a part, row by row of its table."""
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        if outcome.part == part:
            groups.setdefault(outcome.title, []).append(outcome)
    return groups


def tabulate_tuning(outcomes: Sequence[Outcome]) -> list[Table]:
    """All trials of the tuning and which were chosen; no table where nothing was tuned."""
    groups = by_title(outcomes, "tuning")
    if not groups:
        return []
    tried = [outcome for group in groups.values() for outcome in group]
    varied = [name for name in LSTM + RULE if len({outcome.settings[name] for outcome in tried}) > 1]
    rows: list[list[Cell]] = []
    for title, group in groups.items():
        best = best_of(group)
        for number, outcome in enumerate(group):
            cells: list[Cell] = [str(outcome.settings[name]) for name in varied]
            if outcome.settings["head"] == "plain":
                cells = [None if name in RULE else cell for name, cell in zip(varied, cells, strict=True)]
            valid = "not finite" if math.isinf(outcome.valid) else outcome.valid
            rows.append([title, *cells, valid, "chosen" if number == best else ""])
    counts = {len(group) for group in groups.values()}
    many = f"{min(counts)} setting{'' if counts == {1} else 's'} each" if len(counts) == 1 else f"{len(tried)} settings"
    title = f"Tuning: {many}, {tried[0].steps:,} steps, seed {SEED}, chosen by the validation text"
    return [Table(title, ["tried", *(NAMES[name] for name in varied), "validation perplexity", ""], rows)]


def tabulate_settings(outcomes: Sequence[Outcome]) -> Table:
    """What the rows reported were trained with."""
    rows: list[list[Cell]] = []
    for title, group in by_title(outcomes, "final").items():
        settings = group[0].settings
        values = [None if name in RULE and settings["head"] == "plain" else str(settings[name]) for name in NAMES]
        rows.append([title, *values, group[0].steps])
    return Table("Settings of the rows", ["", *NAMES.values(), "steps"], rows)
