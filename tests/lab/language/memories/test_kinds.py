"""Every kind of memory is registered completely: its options, its grids, its place in files and in the mixture."""

import argparse
import dataclasses
import importlib
import inspect
import pkgutil
from typing import ClassVar

import pytest
import torch

from hebbian_softmax.lab.language import memories as package
from hebbian_softmax.lab.language.memories.memory import Memories, Memory, ranked_points
from hebbian_softmax.lab.language.memories.outcome import GRID, describe
from hebbian_softmax.lab.language.memories.settings import KINDS, Grids, add_memory_options, ends, kinds_of, memories_of
from hebbian_softmax.memory import mix


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_memory_options(parser)
    return parser.parse_args(words)


def test_every_kind_that_is_written_is_registered() -> None:
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
    written = {kind for kind in Memory.__subclasses__() if kind.__module__.startswith(package.__name__)}
    assert written == set(KINDS)
    assert len({kind.key for kind in KINDS}) == len(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_is_complete(kind: type[Memory]) -> None:
    assert not inspect.isabstract(kind)
    texts = [name for name, annotation in Memory.__annotations__.items() if annotation == ClassVar[str]]
    assert "symbols" in texts
    assert all(isinstance(getattr(kind, name), str) for name in texts)
    for settings in (kind, kind.grid):
        assert all({"help", "parse"} <= set(field.metadata) for field in dataclasses.fields(settings))
    assert {"size", "share"} <= {field.name for field in dataclasses.fields(kind)}
    assert issubclass(Grids, kind.grid)
    assert {kind.key, f"{kind.key}_weight"} <= set(inspect.signature(mix).parameters)
    with pytest.raises(TypeError, match="abstract"):
        type("Incomplete", (Memory,), {})()


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_reaches_the_command_line(kind: type[Memory]) -> None:
    given = parse(f"--{kind.key}", f"--{kind.key}-share", "0.25", f"--sweep-{kind.key}-shares", "0.25")
    (made,) = memories_of(given).used
    assert made == kind().with_share(0.25)
    assert kinds_of(given)[-1] is kind
    assert kinds_of(parse()) == KINDS
    assert len(made.describe().split(", ")) == len(kind.symbols.split(", "))
    cells = dict(zip(GRID, describe(Memories((made,))), strict=False))
    assert cells[f"{kind.symbols} of {kind.named}"] == made.describe()


@pytest.mark.parametrize(
    ("options", "neighbours"),
    [
        ("--mbpa", 1024),
        ("--mbpa --mbpa-size 500", 500),
        ("--cache --cache-size 300 --mbpa", 300),
        ("--cache --cache-size 300 --mbpa --mbpa-size 2000", 1024),
        ("--cache --cache-size 300 --mbpa --mbpa-neighbours 20", 20),
    ],
)
def test_no_more_neighbours_than_words(options: str, neighbours: int) -> None:
    assert memories_of(parse(*options.split())).used[-1].as_plain()["neighbours"] == neighbours


def test_a_sweep_goes_over_the_candidates_of_every_kind() -> None:
    grids, before = Grids(), Memories()
    log_prob = torch.full((3,), 0.25).log()
    parts = {"model": log_prob}
    for kind in KINDS:
        candidates = kind.candidates(grids, before)
        assert {type(each) for each in candidates} == {kind}
        assert {each.share for each in candidates} == {0.0}
        assert kind.grid_identity(grids, before)
        points = ranked_points(parts, dict.fromkeys(candidates[:2], log_prob), before, grids)
        assert {round(point.perplexity, 6) for point in points} == {4.0}
        assert ends(points[0], grids)  # the first of every grid
        parts[kind.key], before = log_prob, points[0].memories
