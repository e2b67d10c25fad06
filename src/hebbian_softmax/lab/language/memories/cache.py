"""The neural cache (equation 1) as a memory of evaluation time."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Self

from torch import Tensor

from hebbian_softmax import NeuralCache
from hebbian_softmax.lab.base.settings import integer, number, positive, setting, several
from hebbian_softmax.lab.language.memories.memory import Layer, Memories, Memory, Reader


@dataclass(frozen=True)
class CacheGrid:
    """The grids of the cache: the paper's (appendix A.1)."""

    thetas: Sequence[float] = setting((0.1, 0.2, 0.3), "θ of the cache", several(positive))
    sizes: Sequence[int] = setting(
        (1000, 5000, 8000, 9000, 10_000), "n of the cache, and so of MbPA", several(integer(1))
    )
    cache_shares: Sequence[float] = setting(
        (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35), "λ of the cache", several(number(0, 1))
    )


@dataclass(frozen=True)
class CacheSettings(Memory):
    """The neural cache; the defaults are the values that the paper chose."""

    key: ClassVar[str] = "cache"
    title: ClassVar[str] = "cache"
    named: ClassVar[str] = "the cache"
    summary: ClassVar[str] = "the neural cache"
    symbols: ClassVar[str] = "θ, n, λ"
    grid: ClassVar[type] = CacheGrid
    grid_title: ClassVar[str] = "the best caches on"

    size: int = setting(
        10_000,
        "n, the words that the cache holds; if it is not given, hebbian evaluate chooses it on the validation text",
        integer(1),
    )
    theta: float = setting(0.3, "θ, the factor on inner products of what the output layer sees", positive)
    share: float = setting(0.1, "λ, the cache's share in the mixture", number(0, 1))

    def reader(self, layer: Layer, workspace: int | None, stored: tuple[Tensor, Tensor] | None = None) -> Reader:
        cache = NeuralCache(self.size, self.theta)
        if stored is not None:
            cache.observe(*stored)
        return partial(cache.sequence_log_prob, workspace=workspace)

    def describe(self) -> str:
        return f"{self.theta:g}, {self.size:,}, {self.share:g}"

    def ends(self, grids: CacheGrid) -> list[tuple[str, float, Sequence[float]]]:
        return [
            ("θ", self.theta, grids.thetas),
            ("the cache's n", self.size, grids.sizes),
            ("the cache's λ", self.share, grids.cache_shares),
        ]

    @classmethod
    def candidates(cls, grids: CacheGrid, before: Memories) -> list[Self]:
        """Return all θ with all n."""
        return [cls(size, theta, 0.0) for theta in grids.thetas for size in grids.sizes]

    @classmethod
    def grid_reader(cls, grids: CacheGrid, before: Memories, layer: Layer, workspace: int | None) -> Reader:
        cache = NeuralCache(max(grids.sizes), grids.thetas[0])
        return partial(cache.sequence_log_prob, thetas=list(grids.thetas), sizes=list(grids.sizes), workspace=workspace)

    @classmethod
    def grid_identity(cls, grids: CacheGrid, before: Memories) -> dict[str, Any]:
        return {"thetas": list(grids.thetas), "sizes": list(grids.sizes)}
