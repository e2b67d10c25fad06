"""The options of `hebbian evaluate` that concern memories."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.base.settings import integer, number
from hebbian_softmax.lab.language.memories.grid import Grids
from hebbian_softmax.lab.language.memories.reading import CacheSettings, MbpaSettings, Memories


def positive(text: str) -> float:
    value = number(0)(text)
    if value == 0:
        raise argparse.ArgumentTypeError("must be above 0, not '0'")
    return value


def several(parse: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    """Parses different values with commas between them."""

    def parse_all(text: str) -> tuple[Any, ...]:
        values = tuple(parse(part.strip()) for part in text.split(","))
        if len(set(values)) != len(values):
            raise argparse.ArgumentTypeError(f"must be different values, not {text!r}")
        return values

    return parse_all


def stretch(text: str) -> tuple[int, int]:
    """Parses FIRST:LAST."""
    first, colon, last = text.partition(":")
    try:
        found = int(first), int(last)
    except ValueError:
        found = (-1, -1)
    if not colon or not 0 <= found[0] < found[1]:
        raise argparse.ArgumentTypeError(f"must be two numbers FIRST:LAST, the first the smaller, not {text!r}")
    return found


@dataclass(frozen=True)
class Option:
    """One option: the field of the settings it gives, how it is parsed and described."""

    name: str
    field: str
    parse: Callable[[str], Any]
    help: str


SHARE = number(0, 1)
CACHE = (
    Option("--cache-size", "size", integer(1), "n, words that the cache holds"),
    Option("--cache-theta", "theta", positive, "θ, on inner products of what the output layer sees"),
    Option("--cache-share", "share", SHARE, "λ of the cache"),
)
MBPA = (
    Option("--mbpa-size", "size", integer(1), "words that MbPA's memory holds; without it as many as the cache"),
    Option("--mbpa-neighbours", "neighbours", integer(1), "K, the stored words that adapt the output layer"),
    Option("--mbpa-steps", "steps", integer(1, 2), "gradient steps; two cost more than a hundred times as much as one"),
    Option("--mbpa-rate", "rate", positive, "α, the size of a step"),
    Option("--mbpa-l2", "l2", number(0), "β, the pull to the model's weights; none at the first step"),
    Option("--mbpa-share", "share", SHARE, "λ of MbPA"),
)
SWEEP = (
    Option("--sweep-thetas", "thetas", several(positive), "θ of the cache"),
    Option("--sweep-sizes", "sizes", several(integer(1)), "n of the cache, and so of MbPA"),
    Option("--sweep-cache-shares", "cache_shares", several(SHARE), "λ of the cache"),
    Option("--sweep-neighbours", "neighbours", several(integer(1)), "K of MbPA, at most n"),
    Option("--sweep-rates", "rates", several(positive), "α of MbPA"),
    Option("--sweep-l2", "l2", several(number(0)), "β of MbPA, at two steps"),
    Option("--sweep-mbpa-shares", "mbpa_shares", several(SHARE), "λ of MbPA"),
    Option(
        "--two-step-words", "two_step_words", integer(0), "validation words to sweep two steps on; 0: one step only"
    ),
    Option("--budget", "budget", number(0), "seconds that two steps may take in all"),
)
KINDS = (
    ("--cache", CACHE, CacheSettings, "the neural cache"),
    ("--mbpa", MBPA, MbpaSettings, "memory-based parameter adaptation"),
    ("--sweep", SWEEP, Grids, "the grid that settings are chosen from, on the validation text; values with commas"),
)


def add_memory_options(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("memories (docs/memory.md)")
    group.add_argument("--cache", action="store_true", help="measure with the neural cache, too")
    group.add_argument("--mbpa", action="store_true", help="measure with MbPA, too")
    group.add_argument(
        "--sweep",
        action="store_true",
        help="choose the settings on the validation text, then measure the test text once; of the cache and, unless "
        "only --cache is given, MbPA",
    )
    group.add_argument(
        "--words",
        metavar="FIRST:LAST",
        type=stretch,
        help="the predictions to show word by word, counted from 0 (default: 60 where the cache helped most)",
    )
    group.add_argument(
        "--workspace",
        metavar="MIB",
        type=integer(1, 2**20),
        help="MiB that each memory may work in (default: as in docs/memory.md)",
    )
    for flag, options, kind, title in KINDS:
        group = command.add_argument_group(f"with {flag}: {title}")
        defaults = {field.name: field.default for field in fields(kind)}
        for option in options:
            value = defaults[option.field]
            shown = ",".join(f"{each:g}" for each in value) if isinstance(value, tuple) else value
            metavar = "VALUES" if isinstance(value, tuple) else "N" if isinstance(value, int) else "NUMBER"
            group.add_argument(
                option.name, metavar=metavar, type=option.parse, help=f"{option.help} (default: {shown})"
            )


def memories_of(arguments: argparse.Namespace) -> Memories | None:
    """What to measure with; None: the model alone."""
    cache = CacheSettings(**_given(arguments, CACHE)) if arguments.cache else None
    mbpa = None
    if arguments.mbpa:
        size = {"size": cache.size} if cache is not None else {}
        mbpa = MbpaSettings(**{**size, **_given(arguments, MBPA)})
    return Memories(cache, mbpa, workspace_of(arguments)) if cache or mbpa else None


def grids_of(arguments: argparse.Namespace) -> Grids:
    return Grids(**_given(arguments, SWEEP))


def workspace_of(arguments: argparse.Namespace) -> int | None:
    return None if arguments.workspace is None else arguments.workspace * 2**20


def _given(arguments: argparse.Namespace, options: tuple[Option, ...]) -> dict[str, Any]:
    values = {option.field: getattr(arguments, option.name[2:].replace("-", "_")) for option in options}
    return {name: value for name, value in values.items() if value is not None}


def check_options(arguments: argparse.Namespace) -> None:
    """Refuse options that would do nothing."""
    modes = {"--cache": arguments.cache and not arguments.sweep, "--mbpa": arguments.mbpa and not arguments.sweep}
    modes["--sweep"] = arguments.sweep
    for flag, options, _, _ in KINDS:
        for option in options:
            if not modes[flag] and getattr(arguments, option.name[2:].replace("-", "_")) is not None:
                what = "is chosen by the sweep" if arguments.sweep else f"goes with {flag}"
                raise LabError(f"{option.name} {what}: {'leave it away' if arguments.sweep else f'give {flag}, too'}")
    if arguments.cache or arguments.mbpa or arguments.sweep:
        if arguments.streams > 1:
            raise LabError("--streams is for a model alone: memories read the text in one stream")
        if arguments.sweep and arguments.split == "test":
            raise LabError("--sweep chooses on the validation text: give --split both, or valid to leave the test out")
    else:
        for name in ("words", "workspace"):
            if getattr(arguments, name) is not None:
                raise LabError(f"--{name} goes with memories: give --cache, --mbpa or --sweep, too")
