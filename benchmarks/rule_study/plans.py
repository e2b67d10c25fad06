"""The trials of the study on words, and the last ones on images, by name.

    python -m benchmarks.rule_study.plans wikitext-plain wikitext-controls > trials.json

Seeds from 100 on are for choosing; the final tables are made with seeds from 0 on.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from itertools import product
from typing import Any

Given = dict[str, Any]

TIMINGS: dict[str, Given] = {
    "first step": {},
    "start": {"start": 0.1},
    "fade": {"fade": True, "first": True},
    "start, fade": {"start": 0.1, "fade": True, "first": True},
}
BOTH = TIMINGS["start, fade"]
DEFAULT: Given = {
    "write": "across", "gamma": 0.2, "limit": 100, "base": "rare", "fade": True, "first": True, "caught_up": 0.8
}  # fmt: skip
"""The form that paired seeds chose first."""
CHOSEN: Given = DEFAULT | {
    "base": "line", "shorten": 1.0, "rate": "polynomial", "gamma": 3.0, "floor": 0.2, "within": 150.0
}  # fmt: skip
"""What came of that: the default of commit 2247b36, which results/study calls the frozen one."""
FALLING: Given = CHOSEN | {"falling": 10.0}
"""The default that came after it, which raises λ only where the learning rate falls."""
AGED: Given = FALLING | {"base": "aged"}
"""The library's default, whose first writes ask how often new classes come."""
# Writes that leave a part of the row as it was; a first write that raises the row's own part along the mean.
LESSENED: Given = CHOSEN | {"shorten": 0.0, "lessen": 1.0, "whole": True}
PRIOR: Given = CHOSEN | {"shorten": 0.0, "prior": 3.0, "whole": True}
RISING: Given = {"base": "rise"}
FORMS: tuple[Given, ...] = (
    {},
    CHOSEN,
    CHOSEN | {"shorten": 0.0, "lessen": 1.0},
    LESSENED,
    LESSENED | RISING,
    PRIOR,
    PRIOR | RISING,
    CHOSEN | {"whole": True} | RISING,
)
"""Plain softmax, the frozen default, and writes that change a row less where a memory is of few activations."""
FIRSTS: tuple[Given, ...] = (
    *(FALLING | {"base": base} for base in ("line", "rare", "return")),
    *(CHOSEN | change for change in ({}, {"base": "rare"}, {"limit": 300}, {"write": "centred", "base": False})),
    *({"write": "centred", "gamma": 0.1, "limit": 100} | timing for timing in ({"caught_up": 0.8}, {})),
)
"""Writes whose first one of a class sets the part along the mean, and centred writes, which set it to 0 each time."""
STARTS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4)

WIKITEXT: Given = {"corpus": "wikitext-2", "epochs": 8.0, "input_dropout": 0.3, "evaluations": 1}
REUTERS: Given = {"corpus": "reuters", "epochs": 6.0, "input_dropout": 0.3, "output_dropout": 0.3, "evaluations": 1}
NOVELS: Given = {
    "corpus": "g132", "epochs": 2.0, "batch": 256, "input_dropout": 0.3, "output_dropout": 0.1, "evaluations": 1
}  # fmt: skip
"""Every fourth of the 529 novels, in the order of their numbers, evaluated on the paper's books."""


SHORT: Given = {"epochs": 0.5, "batch": 32, "input_dropout": 0.1, "output_dropout": 0.05}
"""What makes a training one in which most words are seen a few times only."""
TINY: Given = {
    "hidden": 128, "embedding": 64, "batch": 16, "sequence": 32, "learning_rate": 0.01, "input_dropout": 0.3,
    "output_dropout": 0.1, "evaluations": 1, "evaluated_words": 40_000,
}  # fmt: skip
"""A model that a CPU trains for a tenth of an epoch in a minute or two."""
CUT: Given = TINY | {
    "corpus": "wikitext-2", "trained_words": 250_000, "epochs": 5.0, "output_dropout": 0.2, "by_seen": True
}  # fmt: skip
"""Several epochs of a part of WikiText-2, with that model."""
STRONG: Given = {
    "corpus": "wikitext-2", "epochs": 40.0, "batch": 64, "sequence": 64, "hidden": 1024, "embedding": 512,
    "learning_rate": 0.0025, "input_dropout": 0.5, "output_dropout": 0.4, "recurrent_dropout": 0.4,
    "locked_dropout": True, "carry": True, "weight_decay": 1e-6, "evaluations": 1,
}  # fmt: skip
"""A regularised LSTM: weight drop, one mask of dropout for a sequence, and a state that is carried along."""
TRANSFORMER: Given = {
    "corpus": "wikitext-2", "model": "transformer", "layers": 6, "heads": 8, "hidden": 512, "embedding": 512,
    "batch": 16, "sequence": 256, "epochs": 10.0, "learning_rate": 5e-4, "momentum": 0.9, "input_dropout": 0.3,
    "output_dropout": 0.3, "residual_dropout": 0.3, "attention_dropout": 0.1, "evaluations": 1,
}  # fmt: skip


def named(common: Given, *parts: Given, **options: Any) -> Given:
    """Return a trial, whose name says how it differs from what is common."""
    own: Given = {}
    for part in (*parts, options):
        own |= part
    name = ", ".join(f"{key} {value}" for key, value in own.items()) or "plain"
    return common | {"name": name} | own


def plain(common: Given, seed: int, **grid: tuple[float, ...]) -> list[Given]:
    """Return plain softmax over a grid of settings."""
    return [named(common, dict(zip(grid, values, strict=True)), seed=seed) for values in product(*grid.values())]


def controls(
    common: Given, seed: int, writes: tuple[str, ...], timings: tuple[str, ...], rates: tuple[tuple[float, int], ...]
) -> list[Given]:
    """Return each write at each time, with each γ and T."""
    return [
        named(common, {"write": write}, TIMINGS[timing], gamma=gamma, limit=limit, seed=seed)
        for write, timing, (gamma, limit) in product(writes, timings, rates)
    ]


def forms(common: Given, seed: int) -> list[Given]:
    """Return forms of the rate and of the write beside the usual one."""
    usual: Given = {"write": "across", "gamma": 0.05, "limit": 100}
    others: list[Given] = [
        {},
        {"gamma": 0.0},
        {"gamma": 0.1},
        {"gamma": 0.2},
        {"rate": "constant", "gamma": 0.1},
        {"rate": "constant", "gamma": 0.3},
        {"rate": "kalman", "gamma": 0.02},
        {"rate": "kalman", "gamma": 0.1},
        {"limit": 300},
        {"limit_per_step": 0.05},
        {"limit_per_step": 0.1},
        {"counted": "start"},
        {"counted": "start", "limit": 50},
        {"counted": "start", "gamma": 0.0},
        {"surprise": 1.0},
        {"surprise": 4.0},
        {"average": 0.02},
        {"average": 0.1, "rate": "constant", "gamma": 0.3},
        {"average": 0.02, "rate": "constant", "gamma": 0.3},
        {"base": True},
        {"seen": True},
        {"first": False},
        {"write": "centred", "gamma": 0.2},
    ]
    return [named(common, usual, BOTH, other, seed=seed) for other in others]


def starts(common: Given, seed: int, **options: Any) -> list[Given]:
    """Return writes that begin at different times."""
    usual: Given = {"write": "across", "gamma": 0.05, "limit": 100, "fade": True, "first": True}
    return [named(common, usual, options, start=start, seed=seed) for start in STARTS]


def paired(common: Given, seeds: range) -> list[Given]:
    """Return what the first runs left open, beside plain softmax, on several seeds."""
    timing: Given = {"fade": True, "first": True, "caught_up": 0.8}
    across: Given = {"write": "across", "gamma": 0.2, "limit": 100, "base": "rare", **timing}
    others: list[Given] = [
        {"write": "centred", "gamma": 0.1, "limit": 100, **timing},
        {"write": "centred", "rate": "polynomial", "gamma": 3.0, "floor": 0.05, "limit": 100, **timing},
        across,
        across | {"gamma": 0.3},
        across | {"soft": 4.0},
        across | {"surprise": 1.0},
    ]
    return [named(common, each, seed=seed) for seed in seeds for each in ({}, *others)]


def dropouts(common: Given, seed: int) -> list[Given]:
    """Return the rule over plain softmax's grid of dropout."""
    grid = product((0.3, 0.5), (0.3, 0.4, 0.5, 0.6))
    return [named(common, DEFAULT, input_dropout=before, output_dropout=after, seed=seed) for before, after in grid]


_MORE: Given = {"input_dropout": 0.6, "output_dropout": 0.5, "recurrent_dropout": 0.5}


def strong(seed: int) -> list[Given]:
    """Return regularised LSTMs, and two of them with the rule, whose T stands still or grows with the steps."""
    faster: Given = {"learning_rate": 0.004}
    trials: list[Given] = [{}, _MORE, _MORE | faster, {"output_dropout": 0.5, "recurrent_dropout": 0.3} | faster]
    rules = [DEFAULT, DEFAULT | {"limit_per_step": 0.05}]
    return [named(STRONG, each, seed=seed) for each in (*trials, *rules, *(_MORE | rule for rule in rules))]


def library(common: Given, seeds: range) -> list[Given]:
    """Return the library's own head, with its defaults and with what images would rather have."""
    options: list[Given] = [{}, {"gamma": 0.1}, {"gamma": 0.1, "limit": 50}]
    return [named(common, library=each, seed=seed) for seed in seeds for each in options]


def rates(common: Given, seeds: range) -> list[Given]:
    """Return the library's own head, and beside the study's own write changes of it that short trainings want."""
    line: Given = DEFAULT | {"base": "line"}
    shorter: Given = line | {"shorten": 1.0}
    later = [shorter | {"rate": "polynomial", "gamma": 3.0, "floor": least} for least in (0.05, 0.1)]
    shares = [CHOSEN | {"within": within} for within in (100.0, 200.0)]
    heads: list[Given] = [{}, {"library": {}}, shorter, *later, *shares]
    return [named(common, head, seed=seed) for seed in seeds for head in heads]


def further(common: Given, seeds: range) -> list[Given]:
    """Return the library's own head beside other γ, and forms that short trainings and images say might replace it."""
    heads: list[Given] = [
        {},
        *({"library": rule} for rule in ({}, {"gamma": 0.1}, {"gamma": 0.05})),
        FALLING,
        AGED,
        *(LESSENED | change for change in ({}, {"floor": 0.1}, RISING)),
        PRIOR | RISING,
        *(CHOSEN | change for change in ({"within": 100.0}, {"fading": 0.5}, {"fading": 2.0})),
    ]
    return [named(common, head, seed=seed) for seed in seeds for head in heads]


def starts_of_library(common: Given, seeds: range) -> list[Given]:
    """Return the library's head that begins by itself, beside begins that are given."""
    heads: list[Given] = [{}, *({"start": start} for start in (0, 50, 100, 200, 400, 800))]
    return [named(common, library=head, seed=seed) for seed in seeds for head in heads]


def gammas(common: Given, seeds: range) -> list[Given]:
    """Return the library's head with other γ than its own, after two epochs and after those of the task."""
    heads: list[Given] = [{}, *({"gamma": gamma} for gamma in (0.05, 0.1, 0.3))]
    lengths = sorted({2.0, common["epochs"]})
    return [
        named(common, library=head, epochs=epochs, seed=seed) for epochs in lengths for seed in seeds for head in heads
    ]


def lengths(common: Given, seeds: range, epochs: tuple[float, ...]) -> list[Given]:
    """Return both heads after different numbers of epochs."""
    heads: list[Given] = [{}, {"library": {}}]
    return [named(common, head, epochs=many, seed=seed) for many in epochs for seed in seeds for head in heads]


def limits(common: Given, seeds: range, shares: tuple[float, ...]) -> list[Given]:
    """Return rules whose T is at least a share of the mean count of all classes."""
    return [named(common, DEFAULT, limit_of_mean=share, seed=seed) for seed in seeds for share in shares]


IMAGE_TASKS: dict[str, tuple[Given, range]] = {
    "digits": ({"task": "digits", "epochs": 30.0, "learning_rate": 0.008}, range(10)),
    "digits at 0.016": ({"task": "digits", "epochs": 30.0, "learning_rate": 0.016}, range(10)),
    "longtail": ({"task": "longtail"}, range(6)),
    "glyphs": ({"task": "glyphs"}, range(6)),
    "long digits": ({"task": "digits", "epochs": 150.0, "learning_rate": 0.002}, range(10)),
}
"""Each with its final seeds; the learning rates were chosen for plain softmax on other seeds."""


def images(seeds: dict[str, range], *heads: Given, **common: Any) -> list[Given]:
    """Return each of these heads on image tasks, seed by seed."""
    return [
        named(IMAGE_TASKS[task][0] | common, head) | {"seed": seed}
        for task in seeds
        for seed in seeds[task]
        for head in heads
    ]


AFTERWARDS: tuple[Given, ...] = (
    {},
    {"gamma": 0.1},
    {"limit": 30},
    {"gamma": 0.1, "limit": 50},
    {"start": 0},
    {"write": "centred", "gamma": 0.1, "limit": 50},
)
"""Options of the library's head that may say why a bar was missed."""
ALL_WRITES, TWO_WRITES = ("literal", "centred", "across"), ("centred", "across")
RATES = ((0.05, 100), (0.2, 100), (0.05, 20), (0.05, 300))
PLANS: dict[str, Callable[[], list[Given]]] = {
    "wikitext-plain": lambda: plain(WIKITEXT, 100, input_dropout=(0.3, 0.5), output_dropout=(0.4, 0.5, 0.6, 0.7)),
    "wikitext-controls": lambda: controls(WIKITEXT, 100, ALL_WRITES, tuple(TIMINGS), RATES),
    "wikitext-forms": lambda: forms(WIKITEXT, 100),
    "wikitext-starts": lambda: starts(WIKITEXT, 100),
    "reuters-plain": lambda: plain(REUTERS, 100, output_dropout=(0.2, 0.3, 0.4, 0.5)),
    "reuters-controls": lambda: controls(REUTERS, 100, ALL_WRITES, ("first step", "start, fade"), RATES),
    "reuters-starts": lambda: starts(REUTERS, 100),
    "novels-plain": lambda: plain(NOVELS, 100, output_dropout=(0.05, 0.1, 0.2, 0.3)),
    "novels-controls": lambda: controls(NOVELS, 100, TWO_WRITES, ("first step", "start, fade"), (*RATES, (0.02, 100))),
    "novels-starts": lambda: starts(NOVELS, 100),
    "strong-first": lambda: strong(100),
    "strong-limits": lambda: [
        named(STRONG, _MORE, {"learning_rate": 0.0015}, seed=100),
        *limits(STRONG | _MORE, range(100, 101), (0.25, 0.5, 1.0)),
        named(STRONG, _MORE, DEFAULT, {"gamma": 0.1, "limit_of_mean": 0.5}, seed=100),
    ],
    "wikitext-library": lambda: library(WIKITEXT | {"input_dropout": 0.5, "output_dropout": 0.5}, range(101, 104)),
    "reuters-library": lambda: library(REUTERS | {"output_dropout": 0.4}, range(101, 104)),
    "novels-library": lambda: library(NOVELS | {"output_dropout": 0.05}, range(101, 103)),
    "wikitext-rates": lambda: rates(WIKITEXT | {"input_dropout": 0.5, "output_dropout": 0.4}, range(105, 109)),
    "reuters-rates": lambda: rates(REUTERS, range(105, 108)),
    "novels-rates": lambda: rates(NOVELS | {"output_dropout": 0.05}, range(103, 106)),
    "wikitext-short": lambda: rates(WIKITEXT | SHORT, range(105, 107)),
    "reuters-short": lambda: rates(REUTERS | SHORT, range(105, 107)),
    "tiny-short": lambda: [
        named(TINY | {"corpus": corpus, "epochs": epochs}, head, seed=seed)
        for corpus, epochs in (("stdlib", 0.12), ("reuters", 0.11))
        for seed in range(100, 105)
        for head in ({}, {"library": {}})
    ],
    "tiny-forms": lambda: [
        named(TINY | {"corpus": corpus, "epochs": epochs, "by_seen": True}, form, seed=seed)
        for seed in (100, 101)
        for form in FORMS
        for corpus, epochs in (("stdlib", 0.12), ("reuters", 0.11))
    ],
    "cut-forms": lambda: [
        named(CUT, form, seed=seed)
        for seed in (100, 101, 102)
        for form in ({}, CHOSEN, LESSENED, LESSENED | RISING, PRIOR | RISING)
    ],
    "images-forms": lambda: [
        *images({"longtail": range(100, 103)}, *FORMS),
        *(named({"task": "omniglot", "steps": 2000}, form, seed=100) for form in FORMS),
        *images({"glyphs": range(101, 103)}, *FORMS),
    ],
    "novels-short": lambda: rates(NOVELS | SHORT | {"epochs": 0.25}, range(103, 105)),
    "wikitext-further": lambda: further(WIKITEXT | {"input_dropout": 0.5, "output_dropout": 0.4}, range(109, 113)),
    "reuters-further": lambda: further(REUTERS, range(109, 112)),
    "novels-further": lambda: further(NOVELS | {"output_dropout": 0.05}, range(106, 108)),
    "strong-further": lambda: [
        named(STRONG, _MORE, head, seed=101)
        for head in (
            {},
            {"library": {}},
            LESSENED | RISING | {"limit_of_mean": 0.25},
            LESSENED | {"limit_of_mean": 0.25},
        )
    ],
    "wikitext-begins": lambda: starts_of_library(
        WIKITEXT | {"input_dropout": 0.5, "output_dropout": 0.4}, range(105, 107)
    ),
    "reuters-begins": lambda: starts_of_library(REUTERS, range(105, 107)),
    "novels-begins": lambda: starts_of_library(NOVELS | {"output_dropout": 0.05}, range(103, 105)),
    "images-begins": lambda: images(
        {"longtail": range(100, 103), "glyphs": range(101, 103)},
        *({"library": head} for head in ({}, *({"start": start} for start in (0, 50, 100, 200, 400)))),
    ),
    "wikitext-gammas": lambda: gammas(WIKITEXT | {"input_dropout": 0.5, "output_dropout": 0.4}, range(112, 114)),
    "reuters-gammas": lambda: gammas(REUTERS, range(112, 114)),
    "novels-gammas": lambda: gammas(NOVELS | {"output_dropout": 0.05}, range(108, 110)),
    "images-gammas": lambda: images(
        {"longtail": range(100, 103), "glyphs": range(101, 103)},
        *({"library": {"gamma": gamma}} for gamma in (0.02, 0.05, 0.1, 0.3)),
    ),
    "images-falling": lambda: [
        trial
        for cosine in (False, True)
        for trial in images(
            {"longtail": range(100, 103), "glyphs": range(101, 103)},
            *({}, CHOSEN, FALLING, CHOSEN | {"falling": 1.0}, CHOSEN | {"floor": 0.05}),
            cosine=cosine,
        )
    ],
    "images-firsts": lambda: [
        *(named({"task": "omniglot", "steps": 5000, "learning_rate": 0.005}, form, seed=100) for form in FIRSTS),
        *images(
            {"longtail": range(100, 103), "glyphs": range(101, 103)},
            *(FALLING | {"base": base} for base in ("rare", "return")),
        ),
    ],
    "tiny-firsts": lambda: [
        named(TINY | {"corpus": corpus, "epochs": epochs, "by_seen": True}, form, seed=seed)
        for seed in (100, 101)
        for corpus, epochs in (("stdlib", 0.12), ("reuters", 0.11))
        for form in (FALLING | {"base": "return"}, FALLING, {})
    ],
    "parts-firsts": lambda: [
        named(TINY | {"corpus": corpus, "epochs": 5.0, "output_dropout": 0.2, "by_seen": True}, form, seed=seed)
        for seed in (100, 101, 102)
        for corpus in ("wikitext-2-part", "stdlib-part", "reuters-part")
        for form in ({}, FALLING, FALLING | {"base": "return"}, AGED)
    ],
    "images-aged": lambda: [
        named({"task": "omniglot", "steps": 5000, "learning_rate": 0.005}, AGED, seed=100),
        *images({"longtail": range(100, 103), "glyphs": range(101, 103)}, AGED),
    ],
    "cut-falling": lambda: [
        named(CUT | {"constant": constant, "learning_rate": 0.005}, head, seed=seed)
        for constant in (True, False)
        for seed in (100, 101)
        for head in ({}, CHOSEN, FALLING)
    ],
    "novels-epochs": lambda: lengths(NOVELS | {"output_dropout": 0.1}, range(103, 105), (1.0, 2.0, 3.0, 5.0, 8.0)),
    "wikitext-limits": lambda: limits(
        WIKITEXT | {"input_dropout": 0.5, "output_dropout": 0.5}, range(101, 103), (0.25, 0.5)
    ),
    "reuters-limits": lambda: limits(REUTERS | {"output_dropout": 0.4}, range(101, 103), (0.25, 0.5)),
    "transformer-plain": lambda: plain(TRANSFORMER, 100, residual_dropout=(0.2, 0.4), learning_rate=(5e-4, 1e-3)),
    "wikitext-paired": lambda: paired(WIKITEXT | {"input_dropout": 0.5, "output_dropout": 0.5}, range(101, 104)),
    "reuters-paired": lambda: paired(REUTERS | {"output_dropout": 0.4}, range(101, 104)),
    "novels-paired": lambda: paired(NOVELS | {"output_dropout": 0.05}, range(101, 103)),
    "wikitext-dropouts": lambda: dropouts(WIKITEXT, 101),
    "images-fresh": lambda: images({"longtail": range(10, 20), "glyphs": range(10, 20)}, {}, {"library": {}}),
    "images-fresh-again": lambda: images({"longtail": range(20, 30), "glyphs": range(20, 30)}, {}, {"library": {}}),
    "images-default": lambda: images({task: own for task, (_, own) in IMAGE_TASKS.items()}, {}, {"library": {}}),
    "images-further": lambda: [
        *images({"longtail": range(100, 103)}, {}, *(CHOSEN | {"limit": limit} for limit in (50, 100, 200, 400, 1e9))),
        *images({"glyphs": range(101, 103)}, *(CHOSEN | {"limit": limit} for limit in (50, 100, 400))),
        *images(
            {"longtail": range(100, 103), "glyphs": range(101, 103)},
            *(CHOSEN | {"match": match} for match in ("feature", "map", "map norm")),
        ),
    ],
    "images-after": lambda: [
        *images(
            {"long digits": range(1000, 1010)},
            *({}, DEFAULT, {"library": {}}, {"library": {"limit": 100}}, {"library": {"gamma": 0.1}}),
            *({"library": {"gamma": 0.1, "limit": 50}}, {"library": {"write": "centred", "gamma": 0.1, "limit": 50}}),
            {"library": {"limit": 50}},
            validation=True,
        ),
        *images({"longtail": range(100, 106)}, {}, *({"library": each} for each in AFTERWARDS)),
    ],
    "novels-five": lambda: [
        *plain(NOVELS | {"epochs": 5.0}, 100, output_dropout=(0.05, 0.15)),
        *limits(NOVELS | {"epochs": 5.0, "output_dropout": 0.05}, range(100, 101), (0.0, 0.25, 0.5)),
    ],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plans", nargs="+", choices=list(PLANS))
    found: list[Given] = []
    for name in parser.parse_args().plans:
        found += [trial for trial in PLANS[name]() if trial not in found]
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
