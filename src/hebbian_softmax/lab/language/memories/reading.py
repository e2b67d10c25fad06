"""A trained model together with the memories of evaluation time: the neural cache and MbPA (section 4.2, appendix A.1).

All of them read the text once, in one stream. The log-probabilities of each word under the model, the cache and MbPA
are kept apart; the mixture (1 − λ_c − λ_m) p + λ_c p_c + λ_m p_m comes after. Both memories store the activations that
the output layer sees, as they are: θ and α mean what they mean for inner products of those.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hebbian_softmax import MbPA, NeuralCache, linear_log_prob
from hebbian_softmax.lab.base.errors import LabError, enough_memory, reason
from hebbian_softmax.lab.language.evaluation import stream
from hebbian_softmax.lab.language.model import LanguageModel
from hebbian_softmax.memory import mix

PIECES = {"cpu": 2**12}
PIECE = 2**15  # words that memories read at a time elsewhere; on a CPU progress would show too seldom
SLOW_PIECE = 2**8  # with MbPA of two steps, for the same reason
Parts = Mapping[str, Tensor]
"""log p of every word but the first under `model`, `cache` and `mbpa`, on the CPU.

A word that is not in the cache has -inf there, and NaN while the cache is empty.
"""


@dataclass(frozen=True)
class CacheSettings:
    """The neural cache (equation 1); the values are those that the paper chose."""

    size: int = 10_000  # n
    theta: float = 0.3
    share: float = 0.1  # λ_c

    def make(self) -> NeuralCache:
        return NeuralCache(self.size, self.theta)


@dataclass(frozen=True)
class MbpaSettings:
    """MbPA (Sprechmann et al. 2018); the values are those that the paper chose."""

    size: int = 10_000  # n
    neighbours: int = 1024  # K
    steps: int = 1
    rate: float = 0.3  # α
    l2: float = 0.5  # β
    share: float = 0.04  # λ_m

    def make(self) -> MbPA:
        return MbPA(self.size, self.neighbours, self.steps, self.rate, self.l2)


@dataclass(frozen=True)
class Memories:
    """Which memories a model is given, and what they may hold of the device's memory."""

    cache: CacheSettings | None = field(default_factory=CacheSettings)
    mbpa: MbpaSettings | None = field(default_factory=MbpaSettings)
    workspace: int | None = field(default=None, compare=False)  # bytes; None: the library's. Results are the same

    @property
    def name(self) -> str:
        """Of a table's row."""
        return " ".join(name for name, used in (("+ cache", self.cache), ("+ MbPA", self.mbpa)) if used) or "alone"

    def __post_init__(self) -> None:
        """Refuse what cannot be mixed before anything is read."""
        check_shares(self.cache.share if self.cache else 0.0, self.mbpa.share if self.mbpa else 0.0)
        if self.mbpa is not None and self.mbpa.neighbours > self.mbpa.size:
            raise LabError(
                f"MbPA cannot find {self.mbpa.neighbours:,} neighbours in a memory of {self.mbpa.size:,} words: "
                "give --mbpa-neighbours less or --mbpa-size more"
            )


def check_shares(cache: float, mbpa: float) -> None:
    if cache + mbpa > 1:
        raise LabError(
            f"the shares of cache and MbPA, {cache:g} and {mbpa:g}, sum to {cache + mbpa:g}: "
            "nothing is left for the model; together they may be at most 1"
        )


def pieces(model: LanguageModel, ids: Tensor, *, slow: bool = False) -> Iterator[tuple[Tensor, Tensor]]:
    """Activations (time, features) and the words that follow (time,), in the order of the text."""
    device = next(model.parameters()).device
    for h, targets in stream(model, ids, chunk=SLOW_PIECE if slow else PIECES.get(device.type, PIECE)):
        yield h.squeeze(1), targets.squeeze(1)


def layer_of(model: LanguageModel) -> tuple[Tensor, Tensor | None]:
    """The output layer in the dtype of the activations."""
    bias = model.head.bias
    return model.head.weight.detach().to(model.precision), None if bias is None else bias.detach().to(model.precision)


@torch.no_grad()
def read_parts(
    model: LanguageModel, ids: Tensor, memories: Memories, *, seen: Callable[[int], object] | None = None
) -> dict[str, Tensor]:
    """Read a text once. `seen` is told the number of predictions so far."""
    cache = memories.cache.make() if memories.cache else None
    mbpa = memories.mbpa.make() if memories.mbpa else None
    weight, bias = layer_of(model)
    found: dict[str, list[Tensor]] = {"model": [], "cache": [], "mbpa": []}
    done = 0
    with usable():
        for h, targets in pieces(model, ids, slow=mbpa is not None and mbpa.steps > 1):
            found["model"].append(linear_log_prob(h, weight, targets, linear_bias=bias)[0])
            if cache is not None:
                found["cache"].append(cache.sequence_log_prob(h, targets, workspace=memories.workspace))
            if mbpa is not None:
                adapted = mbpa.sequence_log_prob(h, targets, weight, bias, workspace=memories.workspace)
                found["mbpa"].append(adapted)
            done += len(targets)
            if seen is not None:
                seen(done)
        return {name: torch.cat(parts).cpu() for name, parts in found.items() if parts}


def mixture(parts: Parts, memories: Memories) -> Tensor:
    """-log of the mixture for every word, in float64."""
    given: dict[str, Any] = {}
    if memories.cache is not None:
        given |= {"cache": parts["cache"].double(), "cache_weight": memories.cache.share}
    if memories.mbpa is not None:
        given |= {"mbpa": parts["mbpa"].double(), "mbpa_weight": memories.mbpa.share}
    return -mix(parts["model"].double(), **given)


@contextlib.contextmanager
def usable() -> Iterator[None]:
    """Errors of a device that is too small, and of activations that no memory can use, in words for the user."""
    advice = "give --workspace less, take a smaller --cache-size or --mbpa-size, or use --device cpu"
    try:
        with enough_memory("the model with its memories", advice):
            yield
    except ValueError as error:
        raise LabError(f"the memories cannot use the activations of this model ({reason(error)})") from error
