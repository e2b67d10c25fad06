"""The commands that are disturbed, and the worlds in which they run."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.lab.faults import small
from tests.lab.faults.small import split
from tests.lab.faults.world import Disturbance, go

NETWORK = split("--hidden 8 --embedding 6 --batch 4 --sequence 5 --device cpu --quiet --checkpoint-seconds 0")
TRAIN = [*NETWORK, *split("--warmup 2 --tensorboard no --valid-streams 4 --steps 8 --evaluations 4")]
TEXTS = split("data prepare texts --tokens spaces --quiet --name toy --minimum 1 --processes 1")
PLACES = split("--train texts/train.txt --valid texts/valid.txt --test texts/test.txt")
REUTERS = split("data prepare reuters --quiet --minimum 1 --name news --processes 2")
GRIDS = split("--sweep-sizes 20,100 --sweep-thetas 0.3 --sweep-neighbours 4 --sweep-rates 0.1,1 --two-step-words 20")
SWEEP = [*split("evaluate runs/one --json --quiet --sweep"), *GRIDS]
TABLE = [
    *split("reproduce frequency-table --corpus toy --size tiny --trials 1 --seeds 1"),
    *split("--steps 3 --evaluations 2 --memories cache"),
    *NETWORK,
]
IMAGES = split("--filters 2 --device cpu --quiet")
CHARACTERS = [
    *split("reproduce characters --seeds 1 --steps 25 --target 35 --tuning-seeds 1 --tuning-trials 1"),
    *split("--parts tuning,main"),
    *IMAGES,
]
LONG_TAIL = split("reproduce longtail --task zipf --classes 25 --steps 3 --seeds 1 --trials 1 --quiet")
COMPARE = [*split("compare characters --steps 25"), *IMAGES]


@dataclass(frozen=True)
class Scene:
    """A command in the world of a template, and the command that goes on after a fault."""

    name: str
    template: str
    words: Sequence[str]
    share: float = 0.5
    """The share of the campaign's trials that each fault makes here; the scenes of a command share them."""

    def again(self, world: Path) -> list[str]:
        """Return the command that goes on: `--resume` if there is a run, the same command otherwise."""
        verb, what = self.words[0], self.words[1]
        runs = sorted(path.parent for path in world.glob("runs/[!.]*/config.json"))
        if verb in ("train", "compare", "reproduce") and "--resume" not in self.words and runs:
            name = "corpus" if verb == "train" else what
            return [verb, name, "--resume", str(runs[-1].relative_to(world)), "--quiet"]
        return list(self.words)


SCENES = [
    Scene("train", "corpus", ["train", "toy", *TRAIN], share=1),
    Scene("evaluate", "trained", ["evaluate", "runs/one", "--json", "--quiet"]),
    Scene("evaluate --sweep", "trained", SWEEP),
    Scene("compare (images)", "inputs", COMPARE, share=0.25),
    Scene("reproduce (language)", "corpus", TABLE),
    Scene("reproduce (images)", "inputs", CHARACTERS),
    Scene("reproduce (long tail)", "inputs", LONG_TAIL, share=0.25),
    Scene("prepare", "inputs", REUTERS),
    Scene("prepare, sources changed", "old news", REUTERS),
]


def checked(world: Path, *words: str) -> None:
    """Run a command that must succeed."""
    ended = go(words, world)
    if ended.code:
        raise RuntimeError(f"hebbian {' '.join(words)} ended with {ended.code}: {ended.errors}")


def half_done(world: Path, words: Sequence[str], share: float = 0.5) -> None:
    """Run a command until it has made a share of its changes to files, and kill it there."""
    copy = world.with_name(f"{world.name}-whole")
    shutil.copytree(world, copy)
    operations = go(words, copy).operations
    shutil.rmtree(copy)
    go(words, world, Disturbance("kill", max(1, round(share * operations))))


def named(world: Path, *names: str) -> None:
    """Give the run folders, whose names have a date, names without one, in the order of their making."""
    for run, name in zip(sorted((world / "runs").iterdir()), names, strict=True):
        run.rename(run.with_name(name))


def corpus(world: Path) -> None:
    checked(world, *TEXTS, *PLACES)


def begun(world: Path) -> None:
    half_done(world, ["train", "toy", *TRAIN])
    named(world, "one")


def trained(world: Path) -> None:
    for name, seed in (("one", "0"), ("two", "1")):
        checked(world, "train", "toy", *TRAIN, "--seed", seed, "--runs", "new")
        (world / "runs").mkdir(exist_ok=True)
        (run,) = (world / "new").iterdir()
        run.rename(world / "runs" / name)
        (world / "new").rmdir()


def evaluated(world: Path) -> None:
    for name in ("one", "two"):
        checked(world, "evaluate", f"runs/{name}", "--json", "--quiet", "--streams", "2")


def swept(world: Path) -> None:
    checked(world, *SWEEP)


def with_limit(world: Path) -> None:
    words = ["train", "toy", *TRAIN, "--max-seconds", "1"]
    steps = words.index("--steps")
    half_done(world, [*words[:steps], *words[steps + 2 :]])
    named(world, "one")


def half_table(world: Path) -> None:
    half_done(world, TABLE, 0.8)
    named(world, "one")


def half_images(world: Path) -> None:
    half_done(world, CHARACTERS, 0.8)
    named(world, "one")


def half_tail(world: Path) -> None:
    half_done(world, LONG_TAIL, 0.7)
    named(world, "one")


def half_compared(world: Path) -> None:
    half_done(world, COMPARE)
    named(world, "one")


def characters(world: Path) -> None:
    checked(world, *COMPARE)
    shutil.rmtree(world / "runs")


def old_news(world: Path) -> None:
    checked(world, *REUTERS)
    news = world / "data" / "news" / "reuters-21578.jsonl"
    news.write_text(news.read_text() + small.articles([("1987-03-03", "the old star fell .\n")]))


def news(world: Path) -> None:
    checked(world, *REUTERS)


TEMPLATES: dict[str, tuple[str | None, Callable[[Path], None]]] = {
    "inputs": (None, small.write_inputs),
    "corpus": ("inputs", corpus),
    "begun": ("corpus", begun),
    "with limit": ("corpus", with_limit),
    "trained": ("corpus", trained),
    "evaluated": ("trained", evaluated),
    "swept": ("trained", swept),
    "half table": ("corpus", half_table),
    "half images": ("inputs", half_images),
    "half tail": ("inputs", half_tail),
    "half compared": ("inputs", half_compared),
    "characters": ("inputs", characters),
    "news": ("inputs", news),
    "old news": ("inputs", old_news),
}
"""By name: the template that a template begins with, and the function that does the rest."""


class Templates:
    """The templates in a folder, each made once, when it is first needed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(self, name: str) -> Path:
        """Return the folder of a template."""
        path = self.folder / name.replace(" ", "-")
        if not path.exists():
            base, build = TEMPLATES[name]
            making = self.folder / "making"  # templates are copied while they are made, so the name must not matter
            shutil.rmtree(making, ignore_errors=True)
            if base is None:
                making.mkdir(parents=True)
            else:
                shutil.copytree(self.get(base), making)
            build(making)
            making.rename(path)
        return path

    def copy(self, name: str, world: Path) -> Path:
        """Make a world from a template, in place of what was there."""
        shutil.rmtree(world, ignore_errors=True)
        return Path(shutil.copytree(self.get(name), world))
