"""The trials. Each begins with a fresh copy of a world, draws a fault, and returns a verdict."""

import os
import random
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from hebbian_softmax.lab.base.files import TEMPORARY
from tests.lab.faults.digest import INPUTS, contents, leavings, plain
from tests.lab.faults.judge import ERROR, NOTED, OTHER, SAME, Verdict, differences, fault_of, said
from tests.lab.faults.scenes import SCENES, Scene, Templates
from tests.lab.faults.targets import DAMAGED, PAIRS, Damaged, Pair
from tests.lab.faults.world import Disturbance, Ended, go, started


@dataclass(frozen=True)
class Reference:
    """An undisturbed run: what it printed and wrote, its duration, and how many times it changed files."""

    output: str
    files: dict[str, str]
    seconds: float
    operations: int


@dataclass
class Stage:
    """The place of the trials. `number` tells apart the worlds of trials that run at the same time."""

    templates: Templates
    folder: Path
    references: dict[tuple[str, tuple[str, ...]], Reference] = field(default_factory=dict)
    sequences: dict[str, dict[str, str]] = field(default_factory=dict)

    def world(self, template: str, number: int) -> Path:
        return self.templates.copy(template, self.folder / f"world-{number}")

    def keep(self, number: int, name: str) -> None:
        """Keep the world of a trial that failed, to look at."""
        folder = self.folder / "failed" / re.sub("[^a-z0-9]+", "-", name)
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.folder / f"world-{number}", folder)

    def reference(self, template: str, words: Sequence[str], number: int = 0) -> Reference:
        """Return the undisturbed run of a command in a world; it is run twice to see that it repeats itself."""
        key = (template, tuple(words))
        if key not in self.references:
            first, second = (self._undisturbed(template, words, number) for _ in range(2))
            if differing := differences(first.files, second.files) or first.output != second.output:
                raise RuntimeError(f"hebbian {' '.join(words)} does not repeat itself: {differing}")
            self.references[key] = second
        return self.references[key]

    def in_turn(self, pair: Pair) -> dict[str, str]:
        """Return what a world holds after both commands of a pair, one after the other, and those that follow them."""
        if pair.name not in self.sequences:
            self.reference(pair.template, pair.first)  # for its duration
            world = self.world(pair.template, 0)
            for words in (pair.first, pair.second, *pair.after):
                if (ended := go(words, world)).code:
                    raise RuntimeError(f"hebbian {' '.join(words)} ended with {ended.code}: {ended.errors}")
            self.sequences[pair.name] = contents(world)
        return self.sequences[pair.name]

    def _undisturbed(self, template: str, words: Sequence[str], number: int) -> Reference:
        world = self.world(template, number)
        ended = go(words, world)
        if ended.code or ended.left:
            raise RuntimeError(f"hebbian {' '.join(words)} ended with {ended.code}: {ended.errors}")
        if left := leavings(world):
            raise RuntimeError(f"hebbian {' '.join(words)} left {left}")
        return Reference(plain(ended.output, world), contents(world), ended.seconds, ended.operations)


@dataclass(frozen=True)
class Row:
    """A row of the table: a fault, its target, and the function that makes one trial."""

    fault: str
    target: str
    share: float
    """The share of the campaign's trials that this row makes."""
    prepare: Callable[[Stage], object]
    """Makes the templates and the undisturbed runs, before trials run at the same time."""
    trial: Callable[[Stage, int, random.Random], tuple[str, Verdict]]
    """Returns what was done, in a few words, and how it ended."""


def compared(ended: Ended, world: Path, reference: Reference, mentions: Path | None = None) -> Verdict:
    """Compare a command that ended with the undisturbed run."""
    if (found := fault_of(ended, mentions)) is not None:
        return found
    if ended.code:
        return Verdict(ERROR, ended.errors.strip().splitlines()[-1])
    if differing := differences(contents(world), reference.files):
        return Verdict("another result", ", ".join(differing))
    if (output := plain(ended.output, world)) != reference.output:
        return Verdict("another output", output[-600:])
    if left := leavings(world):
        return Verdict("leaves files", ", ".join(left))
    return Verdict(SAME)


def resumed(stage: Stage, scene: Scene, world: Path) -> Verdict:
    """Go on after a fault, and compare with the undisturbed run."""
    words = scene.again(world)
    verdict = compared(go(words, world), world, stage.reference(scene.template, scene.words))
    return Verdict(verdict.outcome, f"hebbian {' '.join(words)}: {verdict.detail}") if verdict.detail else verdict


def killed_at_a_moment(scene: Scene, stage: Stage, number: int, draw: random.Random) -> tuple[str, Verdict]:
    """Kill a command after a random time, sometimes also the one that goes on, then go on."""
    world, seconds = stage.world(scene.template, number), stage.reference(scene.template, scene.words).seconds
    moments = [draw.uniform(0, 1.1 * seconds) for _ in range(draw.choice((1, 1, 2)))]
    place = "after " + " and ".join(f"{moment:.3f}" for moment in moments) + " s"
    words = list(scene.words)
    for moment in moments:
        ended = go(words, world, kill_after=moment)
        if ended.left:
            return place, Verdict("leaves a process", ended.errors)
        words = scene.again(world)
    return place, resumed(stage, scene, world)


def killed_at_an_operation(scene: Scene, stage: Stage, number: int, draw: random.Random) -> tuple[str, Verdict]:
    """Kill a command before a random change of a file, then go on."""
    world, operations = stage.world(scene.template, number), stage.reference(scene.template, scene.words).operations
    operation = draw.randint(1, operations)
    ended = go(scene.words, world, Disturbance("kill", operation))
    place = f"before change {operation} of {operations}"
    if ended.left:
        return place, Verdict("leaves a process", ended.errors)
    return place, resumed(stage, scene, world)


def full_disk(scene: Scene, stage: Stage, number: int, draw: random.Random) -> tuple[str, Verdict]:
    """Fill the disk at a random change of a file; the command must say so, and go on when there is space again."""
    world, reference = stage.world(scene.template, number), stage.reference(scene.template, scene.words)
    operation = draw.randint(1, reference.operations)
    if draw.random() < 0.5:
        disturbance, place = Disturbance("create", operation), f"nothing created from change {operation} on"
    else:
        size = int(2 ** draw.uniform(0, 15))
        disturbance = Disturbance("write", operation, size)
        place = f"no file above {size} bytes from change {operation} on"
    ended = go(scene.words, world, disturbance)
    if (found := fault_of(ended, None)) is not None:
        return place, found
    if ended.code == 0 and not differences(contents(world), reference.files):
        return place, Verdict(SAME)
    after = resumed(stage, scene, world)
    if after.outcome != SAME:
        return place, Verdict(f"with space again: {after.outcome}", f"{ended.errors.strip()} / {after.detail}")
    return place, Verdict(ERROR if ended.code else SAME, ended.errors.strip())


def damaged(target: Damaged, stage: Stage, number: int, draw: random.Random) -> tuple[str, Verdict]:
    """Change a random byte of a file, and run a command that reads it."""
    world, reference = stage.world(target.template, number), stage.reference(target.template, target.words)
    path = draw.choice(sorted(path for path in world.glob(target.files) if path.is_file()))
    content = bytearray(path.read_bytes())
    at, change = draw.randrange(len(content)), draw.choice([1 << draw.randrange(8), draw.randrange(1, 256)])
    modified = path.stat().st_mtime_ns
    content[at] ^= change
    path.write_bytes(content)
    os.utime(path, ns=(modified, modified))  # bits rot without a trace
    name = path.relative_to(world)
    place = f"{name}, byte {at} of {len(content)} ^ {change}"
    before = [each for each in world.rglob("*") if each.is_file() and not each.name.startswith(TEMPORARY)]
    ended = go(target.words, world)
    verdict = compared(ended, world, damaged_reference(reference, world, path, bytes(content)), name)
    if verdict.outcome.startswith("another") and said(ended, name):
        return place, Verdict(NOTED, ended.errors.strip())
    if verdict.outcome == ERROR and (lost := [each for each in before if not each.exists()]):
        return place, Verdict("loses files", ", ".join(plain(str(each), world) for each in lost))
    if (target.source or target.packed) and verdict.outcome.startswith("another"):
        return place, recorded(target, world, reference, verdict)
    return place, verdict


def damaged_reference(reference: Reference, world: Path, path: Path, content: bytes) -> Reference:
    """Return the undisturbed run with the damaged file as it is, unless the command wrote that file."""
    name = path.relative_to(world)
    if name.parts[0] in INPUTS or not path.exists() or path.read_bytes() != content:
        return reference
    files = {**reference.files, **{found: value for found, value in contents(world).items() if found == str(name)}}
    return Reference(reference.output, files, reference.seconds, reference.operations)


def recorded(target: Damaged, world: Path, reference: Reference, verdict: Verdict) -> Verdict:
    """Allow another corpus from another text, if its manifest does not claim to be made from the same text."""
    differing = differences(contents(world), reference.files)
    manifests = [name for name in differing if name.endswith("manifest.json")]
    return Verdict(OTHER) if manifests and (target.source or manifests == differing) else verdict


def together(pair: Pair, stage: Stage, number: int, draw: random.Random) -> tuple[str, Verdict]:
    """Run two commands at the same time in one world; afterwards everything must be in order."""
    world, expected = stage.world(pair.template, number), stage.in_turn(pair)
    pause = draw.uniform(0, stage.reference(pair.template, pair.first).seconds)
    place = f"{pause:.3f} s apart"
    with started(pair.first, world) as first:
        first.read(pause)
        with started(pair.second, world) as second:
            ended = [second.finish(), first.finish()]
    for each in ended:
        if (found := fault_of(each)) is not None:
            return place, found
    refused = [each.errors.strip().splitlines()[-1] for each in ended if each.code]
    if len(refused) == 2:
        return place, Verdict("both refused", " / ".join(refused))
    for words in pair.after:
        last = go(words, world)
        if (found := fault_of(last)) is not None or last.code:
            return place, found or Verdict("refused afterwards", last.errors)
    if differing := [name for name in differences(contents(world), expected) if name != pair.perhaps]:
        return place, Verdict("another result", ", ".join(differing))
    if left := leavings(world):
        return place, Verdict("leaves files", ", ".join(left))
    return place, Verdict(ERROR if refused else SAME, " / ".join(refused))


def rows() -> list[Row]:
    """Return all rows of the table."""

    def of_scenes(fault: str, share: float, trial: Callable[..., tuple[str, Verdict]]) -> list[Row]:
        return [
            Row(fault, each.name, share * each.share, partial(undisturbed, each), partial(trial, each))
            for each in SCENES
        ]

    def undisturbed(target: Scene | Damaged, stage: Stage) -> None:
        stage.reference(target.template, target.words)

    def in_turn(pair: Pair, stage: Stage) -> None:
        stage.in_turn(pair)

    return [
        *of_scenes("killed at a random moment", 1, killed_at_a_moment),
        *of_scenes("killed before a random change of a file", 1, killed_at_an_operation),
        *of_scenes("disk full", 0.5, full_disk),
        *(Row("damaged byte", each.name, 1, partial(undisturbed, each), partial(damaged, each)) for each in DAMAGED),
        *(Row("two processes", each.name, 0.2, partial(in_turn, each), partial(together, each)) for each in PAIRS),
    ]
