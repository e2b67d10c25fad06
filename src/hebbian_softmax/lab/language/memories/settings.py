"""The kinds of memories, the grids that a sweep goes over, and the options of `hebbian evaluate` for both."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.base.settings import add_options, given_options, integer, option_name
from hebbian_softmax.lab.language.memories.cache import CacheGrid, CacheSettings
from hebbian_softmax.lab.language.memories.mbpa import MbpaGrid, MbpaSettings
from hebbian_softmax.lab.language.memories.memory import Memories, Memory, Point, check_shares

KINDS: tuple[type[Memory], ...] = (CacheSettings, MbpaSettings)
"""The kinds of memories, in the order in which a sweep chooses their settings and a table adds them."""


@dataclass(frozen=True)
class Grids(MbpaGrid, CacheGrid):
    """The grids of all kinds together."""

    def __post_init__(self) -> None:
        check_shares({kind.title: max(getattr(self, f"{kind.key}_shares")) for kind in KINDS})


def ends(point: Point, grids: Grids) -> list[str]:
    """Return the chosen values that are the lowest or highest of their grids."""
    return [
        f"{name} = {value:g} ({'lowest' if value == min(grid) else 'highest'})"
        for memory in point.memories.used
        for name, value, grid in memory.ends(grids)
        if len(set(grid)) > 1 and value in (min(grid), max(grid))
    ]


def at_edges(point: Point, grids: Grids) -> list[str]:
    """Return a sentence on these values; none if there are none."""
    found = ends(point, grids)
    return [f"At the end of its grid, so that the best may lie beyond: {', '.join(found)}."] if found else []


def sweep_option(name: str) -> str:
    """Return the name of the option of a field of `Grids`; that of a grid begins with `sweep`."""
    grid = isinstance(Grids.__dataclass_fields__[name].default, tuple)
    return f"sweep_{name}" if grid else name


def kind_option(kind: type[Memory]) -> Callable[[str], str]:
    """Return a function that names the option of a field of `kind`."""
    return lambda name: f"{kind.key}_{name}"


def stretch(text: str) -> tuple[int, int]:
    """Parse FIRST:LAST."""
    first, colon, last = text.partition(":")
    try:
        found = int(first), int(last)
    except ValueError:
        found = (-1, -1)
    if not colon or not 0 <= found[0] < found[1]:
        raise argparse.ArgumentTypeError(f"must be two numbers FIRST:LAST, the first the smaller, not {text!r}")
    return found


def add_memory_options(command: argparse.ArgumentParser) -> None:
    """Add the options of all memories to `hebbian evaluate`."""
    group = command.add_argument_group("memories (docs/memory.md)")
    for kind in KINDS:
        group.add_argument(f"--{kind.key}", action="store_true", help=f"measure with {kind.named}, too")
    flags = " or ".join(f"--{kind.key}" for kind in KINDS)
    help = f"choose the settings of all memories, or of those up to the last one named by {flags}, "
    help += "on the validation text, then measure the test text once"
    group.add_argument("--sweep", action="store_true", help=help)
    help = "the predictions to show word by word, counted from 0 (default: the 60 where the memory helped most)"
    group.add_argument("--words", metavar="FIRST:LAST", type=stretch, help=help)
    help = "read only the first N words of each text (default: all)"
    group.add_argument("--max-words", metavar="N", type=integer(1), help=help)
    help = "MiB that each memory may work in (default: as in docs/memory.md)"
    group.add_argument("--workspace", metavar="MIB", type=integer(1, 2**20), help=help)
    for kind in KINDS:
        add_options(command.add_argument_group(f"with --{kind.key}: {kind.summary}"), kind, kind_option(kind))
    title = "with --sweep: the grids that settings are chosen from, on the validation text; values with commas"
    add_options(command.add_argument_group(title), Grids, sweep_option)


def check_options(arguments: argparse.Namespace) -> None:
    """Refuse options that would have no effect."""
    flags = {kind.key: kind_option(kind) for kind in KINDS} | {"sweep": sweep_option}
    for flag, settings in zip(flags, (*KINDS, Grids), strict=True):
        used = getattr(arguments, flag) and (flag == "sweep" or not arguments.sweep)
        for name in given_options(arguments, settings, flags[flag]) if not used else ():
            option = option_name(flags[flag](name))
            if arguments.sweep:
                raise LabError(f"{option} is chosen by the sweep: omit it")
            raise LabError(f"{option} goes with --{flag}: give --{flag}, too")
    if arguments.sweep or any(getattr(arguments, kind.key) for kind in KINDS):
        if arguments.streams > 1:
            raise LabError("--streams is for a model alone, because memories read the text in one stream: omit it")
        if arguments.sweep and arguments.split == "test":
            raise LabError("--sweep chooses on the validation text: give --split both, or valid to leave the test out")
    else:
        for name in ("words", "max_words", "workspace"):
            if getattr(arguments, name) is not None:
                raise LabError(f"{option_name(name)} goes with memories: give --cache, --mbpa or --sweep, too")
    if arguments.sweep and arguments.max_words is not None:
        raise LabError("--max-words is for memories that are given: omit it, since a sweep measures whole texts")


def memories_of(arguments: argparse.Namespace) -> Memories:
    """Return the memories to measure with. One whose size is not given is as large as the one before it, if given."""
    used: list[Memory] = []
    for kind in KINDS:
        if getattr(arguments, kind.key):
            size = {"size": used[-1].size} if used and not chooses_size(arguments) else {}
            given = {**size, **given_options(arguments, kind, kind_option(kind))}
            used.append(cast(Any, kind)(**kind.completed(given)))
    return Memories(tuple(used), workspace_of(arguments))


def chooses_size(arguments: argparse.Namespace) -> bool:
    """Return whether there is a cache whose size is to be chosen on the validation text."""
    return arguments.cache and not arguments.sweep and arguments.cache_size is None


def kinds_of(arguments: argparse.Namespace) -> tuple[type[Memory], ...]:
    """Return the kinds that --sweep chooses: all, or those up to the last one named."""
    named = [number for number, kind in enumerate(KINDS, start=1) if getattr(arguments, kind.key)]
    return KINDS[: max(named, default=len(KINDS))]


def grids_of(arguments: argparse.Namespace) -> Grids:
    """Return the grids to sweep over."""
    return Grids(**given_options(arguments, Grids, sweep_option))


def workspace_of(arguments: argparse.Namespace) -> int | None:
    """Return the bytes that each memory may work in; None: the library's default."""
    return None if arguments.workspace is None else arguments.workspace * 2**20
