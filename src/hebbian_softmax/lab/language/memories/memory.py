"""A memory of evaluation time, several of them beside a model, and how they read a text together.

All memories read the text once, in one stream. The log-probabilities of each word under the model and under each memory
are kept apart; the mixture (1 − Σ λ) p + Σ λ p_memory is computed afterwards. Memories store the activations that the
output layer sees, without normalising them, so their parameters refer to inner products of those.
"""

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from typing import Any, ClassVar, Self, TypeVar, cast

import torch
from torch import Tensor

from hebbian_softmax import linear_log_prob
from hebbian_softmax.lab.base.errors import LabError, Terminated, enough_memory, reason
from hebbian_softmax.lab.base.progress import Progress
from hebbian_softmax.lab.language.evaluation import Seen, perplexity, stream
from hebbian_softmax.lab.language.memories.store import Store
from hebbian_softmax.lab.language.model import LanguageModel
from hebbian_softmax.memory import mix

CPU_PIECE, PIECE = 2**12, 2**15
"""Words that memories read at a time on a CPU and on other devices, so that progress shows often enough."""
SLOW_CPU_PIECE, SLOW_PIECE = 2**8, 2**12
"""The same if one of the memories is slow."""

Parts = Mapping[str, Tensor]
"""log p of every word but the first under the `model` and under each memory, by its key, on the CPU.

A word that the cache does not hold has -inf there, and NaN while the cache is empty.
"""
Layer = tuple[Tensor, Tensor | None]
"""The weight and the bias of the output layer, in the dtype of the activations."""
Reader = Callable[[Tensor, Tensor], Tensor]
"""Takes activations (T, features) and the words (T,) that follow, returns log p (..., T), and stores both."""


class Memory(ABC):
    """The settings of one memory. A subclass is a kind of memory: a frozen dataclass whose fields are `setting()`s.

    Everything that the laboratory knows about a kind is in its class. To add one, write its file, add it to `KINDS` and
    `Grids` in memories/settings.py, and let `hebbian_softmax.memory.mix` take its log-probabilities under its key.
    """

    key: ClassVar[str]
    """The kind in options (`--key`, `--key-size`), in files, and as an argument of `mix`."""
    title: ClassVar[str]
    """The kind in the name of a table's row."""
    named: ClassVar[str]
    """The kind in a sentence, with its article."""
    summary: ClassVar[str]
    """The kind in the help text of `hebbian evaluate`."""
    symbols: ClassVar[str]
    """The values that `describe` shows, by their symbols."""
    grid: ClassVar[type]
    """The dataclass of the grids that a sweep goes over; its field `<key>_shares` has the shares λ."""
    grid_title: ClassVar[str]
    """The title of the table of the best points of the sweep, before the name of the text."""
    refined: ClassVar[str] = ""
    """The entry of what `refine` found in memory-sweep.json, if the kind has that method."""

    size: int
    """How many words the memory holds."""
    share: float
    """λ, the share of the memory in the mixture."""

    @abstractmethod
    def reader(self, layer: Layer, workspace: int | None, stored: tuple[Tensor, Tensor] | None = None) -> Reader:
        """Return a function that reads the next words of a text with this memory.

        At first the memory is empty, or has `stored` activations (T, features) and the words (T,) that follow them.
        """

    @abstractmethod
    def describe(self) -> str:
        """Return the values that `symbols` names."""

    @abstractmethod
    def ends(self, grids: Any) -> list[tuple[str, float, Sequence[float]]]:
        """Return the values that a sweep has chosen: a name for each, the value, and the grid that it is from."""

    @classmethod
    @abstractmethod
    def candidates(cls, grids: Any, before: "Memories") -> list[Self]:
        """Return the settings that one pass over a text can read at once, all with share 0.

        `before` are the memories of the other kinds that were chosen before.
        """

    @classmethod
    @abstractmethod
    def grid_reader(cls, grids: Any, before: "Memories", layer: Layer, workspace: int | None) -> Reader:
        """Return a function that reads the next words with all candidates: log p (..., T), in their order."""

    @classmethod
    @abstractmethod
    def grid_identity(cls, grids: Any, before: "Memories") -> dict[str, Any]:
        """Return all values that the log-probabilities of the candidates depend on, as JSON can hold them."""

    @classmethod
    def refine(cls, stage: "Stage") -> "Refinement | None":
        """Look for better settings, which one pass cannot read, once the best candidate is known."""
        return None

    @classmethod
    def completed(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Return settings that were given, with others that follow from them."""
        return given

    @property
    def slow(self) -> bool:
        """Whether reading takes so long that progress must be shown more often."""
        return False

    def check(self) -> None:  # noqa: B027, because most kinds have nothing to check
        """Refuse settings that do not go together."""

    def as_plain(self) -> dict[str, Any]:
        """Return the settings by name."""
        return asdict(cast(Any, self))

    def identity(self) -> dict[str, Any]:
        """Return the settings that log-probabilities depend on: all but the share."""
        return {name: value for name, value in self.as_plain().items() if name != "share"}

    def with_share(self, share: float) -> Self:
        """Return these settings with another share."""
        found: Self = replace(cast(Any, self), share=share)
        return found


Kind = TypeVar("Kind", bound=Memory)


@dataclass(frozen=True)
class Memories:
    """The memories that a model is given, at most one of each kind."""

    used: tuple[Memory, ...] = ()
    workspace: int | None = field(default=None, compare=False)
    """The bytes that each memory may work in; None: the library's default. Results do not depend on it."""

    def __post_init__(self) -> None:
        check_shares({each.title: each.share for each in self.used})
        for each in self.used:
            each.check()

    def of(self, kind: type[Kind]) -> Kind | None:
        """Return the memory of this kind, if there is one."""
        return next((each for each in self.used if isinstance(each, kind)), None)

    @property
    def name(self) -> str:
        """The name of a table's row."""
        return " ".join(f"+ {each.title}" for each in self.used) or "alone"


def check_shares(shares: Mapping[str, float]) -> None:
    """Refuse shares that leave nothing for the model. The keys are the titles of the memories."""
    if (total := sum(shares.values())) > 1:
        names, values = " and ".join(shares), " and ".join(f"{share:g}" for share in shares.values())
        raise LabError(
            f"the shares of {names}, {values}, sum to {total:g}: nothing is left for the model; "
            "together they may be at most 1"
        )


ALONE = Memories()


def pieces(
    model: LanguageModel, ids: Tensor, *, slow: bool = False, piece: int | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield activations (time, features) and the words that follow (time,), in the order of the text.

    `piece` is how many words are read at a time; by default that depends on the device.
    """
    for h, targets in stream(model, ids, chunk=_usual(model, slow) if piece is None else piece):
        yield h.squeeze(1), targets.squeeze(1)


def usual_piece(model: LanguageModel, memories: Memories) -> int:
    """Return how many words are read at a time with these memories."""
    return _usual(model, any(each.slow for each in memories.used))


def _usual(model: LanguageModel, slow: bool) -> int:
    on_cpu = next(model.parameters()).device.type == "cpu"
    return (SLOW_CPU_PIECE if on_cpu else SLOW_PIECE) if slow else CPU_PIECE if on_cpu else PIECE


def layer_of(model: LanguageModel) -> Layer:
    """Return the output layer of a model."""
    bias = model.head.bias
    return model.head.weight.detach().to(model.precision), None if bias is None else bias.detach().to(model.precision)


class Stopped(BaseException):
    """Reading was stopped by Ctrl-C or SIGTERM; `parts` are of the words read before."""

    def __init__(self, parts: Parts, signal: BaseException) -> None:
        super().__init__()
        self.parts, self.signal = parts, signal


@torch.no_grad()
def read_parts(
    model: LanguageModel,
    ids: Tensor,
    memories: Memories,
    *,
    seen: Seen = None,
    piece: int | None = None,
    keep: bool = False,
) -> dict[str, Tensor]:
    """Read a text once, with the model and all memories; with `keep`, raise `Stopped` if that is interrupted."""
    weight, bias = layer_of(model)
    readers = {each.key: each.reader((weight, bias), memories.workspace) for each in memories.used}
    found: dict[str, list[Tensor]] = {"model": [], **{key: [] for key in readers}}
    done = 0

    def joined() -> dict[str, Tensor]:
        whole = min(map(len, found.values()))  # of the last piece, some may be missing
        return {name: torch.cat([weight.new_zeros(0), *parts[:whole]]).cpu() for name, parts in found.items()}

    try:
        with usable():
            for h, targets in pieces(model, ids, slow=any(each.slow for each in memories.used), piece=piece):
                found["model"].append(linear_log_prob(h, weight, targets, linear_bias=bias)[0])
                for key, read in readers.items():
                    found[key].append(read(h, targets))
                done += len(targets)
                if seen is not None:
                    seen(done)
            return joined()
    except (KeyboardInterrupt, Terminated) as signal:
        if keep:
            raise Stopped(joined(), signal) from None
        raise


def read_shown(
    model: LanguageModel, ids: Tensor, memories: Memories, label: str, quiet: bool, keep: bool = False
) -> dict[str, Tensor]:
    """Call `read_parts` and show its progress."""
    with Progress(label, total=len(ids) - 1, unit="words", quiet=quiet) as progress:
        return read_parts(model, ids, memories, seen=progress.update, keep=keep)


def mixture(parts: Parts, memories: Memories) -> Tensor:
    """Return -log of the mixture for every word, in float64."""
    given: dict[str, Any] = {each.key: parts[each.key].double() for each in memories.used}
    given |= {f"{each.key}_weight": each.share for each in memories.used}
    return -mix(parts["model"].double(), **given)


@contextlib.contextmanager
def usable() -> Iterator[None]:
    """Explain errors of a device that is too small, and of activations that no memory can use."""
    advice = "give a smaller --workspace, --cache-size or --mbpa-size, or use --device cpu"
    try:
        with enough_memory("the model with its memories", advice):
            yield
    except ValueError as error:
        raise LabError(f"the memories cannot use the activations of this model ({reason(error)})") from error


@dataclass(frozen=True)
class Point:
    """Memories from a grid, and the perplexity of the validation text, or of a stretch of it, with them."""

    perplexity: float
    memories: Memories

    def as_plain(self) -> dict[str, Any]:
        plain = {f"{each.key}_{name}": value for each in self.memories.used for name, value in each.as_plain().items()}
        return {**plain, "perplexity": self.perplexity}


def ranked_points(parts: Parts, candidates: Mapping[Kind, Tensor], before: Memories, grids: Any) -> list[Point]:
    """Return a point for each candidate and all shares of it and of the memories before it, the best first.

    Log-probabilities are (T,): `parts` has those of the model and of the memories before. Of equally good points the
    one that comes earlier in the grid comes first.
    """
    wide = {name: log_prob.double() for name, log_prob in parts.items()}
    found = []
    for candidate, log_prob in candidates.items():
        own = {**wide, candidate.key: log_prob.double()}
        used: tuple[Memory, ...] = (*before.used, candidate)
        for shares in product(*(getattr(grids, f"{each.key}_shares") for each in used)):
            memories = Memories(tuple(each.with_share(share) for each, share in zip(used, shares, strict=True)))
            found.append(Point(perplexity(float(mixture(own, memories).mean())), memories))
    return sorted(found, key=lambda point: point.perplexity)


@dataclass(frozen=True)
class Refinement:
    """The result of `Memory.refine`: points, the best first, and the point to choose instead of the best candidate."""

    title: ClassVar[str]
    """The title of the table of its points, before the name of the text."""

    points: Sequence[Point]
    notes: Sequence[str]
    chosen: Point | None
    log_prob: Tensor | None
    """log p of every word of the validation text under the memory that was chosen."""

    def as_plain(self) -> dict[str, Any]:
        return {"points": [point.as_plain() for point in self.points]}


@dataclass
class Stage:
    """A sweep over the validation text `ids`, which chooses the settings of one kind of memory after the other."""

    model: LanguageModel
    ids: Tensor
    grids: Any
    later: int
    """The number of words that the chosen settings will measure later: slow ones are chosen only if there is time."""
    store: Store
    workspace: int | None
    label: str
    quiet: bool
    parts: dict[str, Tensor] = field(default_factory=dict)
    """Log-probabilities of the model and of the memories before."""
    before: Memories = ALONE
    """The memories of the kinds that were chosen before."""
    candidates: Mapping[Any, Tensor] = field(default_factory=dict)
    """Log-probabilities of all candidates of the kind, once they have read the text."""
    best: Point = Point(math.inf, ALONE)
    """The best candidate with its best shares."""

    def progress(self, label: str, words: int) -> Progress:
        """Show how many of so many words have been read."""
        return Progress(label, total=words, unit="words", quiet=self.quiet)
