"""MbPA: an output layer that is adapted to each query by the stored entries nearest to it, and then forgotten."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hebbian_softmax.checks import check_integer, check_number
from hebbian_softmax.loss import linear_log_prob
from hebbian_softmax.loss.dtypes import wide
from hebbian_softmax.memory import checks
from hebbian_softmax.memory.adaptation import Layer, Neighbours, TargetLogProb, one_step, one_step_grid
from hebbian_softmax.memory.further import Steps, further_steps
from hebbian_softmax.memory.history import Memory, Timeline
from hebbian_softmax.memory.products import product_dtype

CLOSE = 2**-7
"""Squared distances below this part of the squared norms are computed again from the differences."""


class MbPA(Memory):
    r"""Memory-based parameter adaptation (Sprechmann et al. 2018) of an output layer θ = (weight, bias).

    For a query h, the K nearest of the last n stored pairs (h_k, y_k) are weighted by :math:`w_k \propto 1 / (\epsilon
    + \|h_k - h\|^2)` with :math:`\sum_k w_k = 1`. Starting from θ, ``steps`` steps

    .. math::
        \tilde\theta \leftarrow \tilde\theta + \alpha \nabla \Bigl[ \sum_k w_k \log p(y_k \mid h_k, \tilde\theta)
        - \tfrac\beta2 \|\tilde\theta - \theta\|^2 \Bigr]

    give θ̃. The answer is p(· | h, θ̃), and θ̃ is forgotten. θ is never copied: one step changes the logits by a matrix
    of rank K, :math:`\tilde z_v = z_v + \alpha \sum_k w_k (h^\top h_k + 1)(\mathbb{I}\{y_k = v\} - p_k(v))`, which one
    matrix product computes for many queries (:mod:`hebbian_softmax.memory.adaptation`). The L2 term is zero at the
    first step. Each further step needs new softmaxes of the K neighbours for each query: two steps take about 2K²V
    operations for each query, and 4K²V where a few K × V matrices do not fit in the workspace
    (:mod:`hebbian_softmax.memory.further`). While nothing is stored, θ̃ = θ.

    Shapes and streams are those of :class:`~hebbian_softmax.NeuralCache`. ``weight`` (V, d) and ``bias`` (V,) have the
    dtype of the activations; a layer below float32 is converted to float32 once in each call. Products of float32 are
    as precise as ``torch.set_float32_matmul_precision`` says. On a GPU, further steps multiply in bfloat16 and sum in
    float32 if that is ``medium`` or the activations are in half precision.

    Args:
        memory_size: n, the number of entries that each stream keeps.
        neighbours: K; while fewer entries are stored, all are used.
        steps: the number of gradient steps.
        learning_rate: α.
        l2: β.
        epsilon: ε of the weights w_k.
        search: ``exact`` on the device, or ``faiss`` on the CPU for large memories (not for sequences).

    >>> mbpa = MbPA(memory_size=1000, neighbours=16, steps=1, learning_rate=0.3, l2=0.5)
    >>> head = torch.nn.Linear(8, 50)
    >>> h, targets = torch.randn(40, 8), torch.randint(50, (40,))
    >>> mbpa.sequence_log_prob(h, targets, head.weight, head.bias).shape
    torch.Size([40])
    >>> mbpa.probabilities(h[:2], head.weight, head.bias).shape
    torch.Size([2, 50])
    """

    def __init__(
        self,
        memory_size: int,
        neighbours: int,
        steps: int = 1,
        learning_rate: float = 0.3,
        l2: float = 0.5,
        *,
        epsilon: float = 1e-3,
        search: str = "exact",
    ) -> None:
        self.memory_size = check_integer("memory_size", memory_size, 1)
        self.neighbours = check_integer("neighbours", neighbours, 1)
        if self.memory_size < self.neighbours:
            raise ValueError(f"memory_size must be at least neighbours, {neighbours}, got {memory_size}")
        self.steps = check_integer("steps", steps, 1)
        self.learning_rate = checks.check_positive("learning_rate", learning_rate)
        self.l2 = check_number("l2", l2, 0, torch.finfo(torch.float32).max)
        self.epsilon = checks.check_positive("epsilon", epsilon)
        if search not in ("exact", "faiss"):
            raise ValueError(f'search must be "exact" or "faiss", got {search!r}')
        self.search = search
        super().__init__(self.memory_size)

    def __repr__(self) -> str:
        return (
            f"MbPA(memory_size={self.memory_size}, neighbours={self.neighbours}, steps={self.steps}, "
            f"learning_rate={self.learning_rate:g}, l2={self.l2:g})"
        )

    @checks.evaluating
    def log_prob(
        self, h: Tensor, targets: Tensor, weight: Tensor, bias: Tensor | None = None, *, workspace: int | None = None
    ) -> Tensor:
        """Return log p(target | h, θ̃) given the entries stored now, which every position of ``h`` sees alike."""
        streams, labels = self._checked(h, targets)
        layer = self._layer(streams, labels, weight, bias)
        room = self._room(workspace, h)
        result = torch.empty(labels.shape, dtype=layer.weight.dtype, device=h.device)
        for stream, low, near in self._adapted_to_window(streams, layer, room):
            high = low + near.queries.shape[0]
            result[stream, low:high] = self._target_log_prob(layer, near, labels[stream, low:high], room)
        return self._finite(result).reshape(targets.shape)

    @checks.evaluating
    def probabilities(
        self, h: Tensor, weight: Tensor, bias: Tensor | None = None, *, workspace: int | None = None
    ) -> Tensor:
        """Return p(· | h, θ̃) given the entries stored now, (..., V)."""
        streams = checks.check_activations(h)
        self._history.check(streams)
        layer = self._layer(streams, None, weight, bias)
        room = self._room(workspace, h)
        result = layer.weight.new_empty(*streams.shape[:2], layer.classes)
        for stream, low, near in self._adapted_to_window(streams, layer, room):
            rows = result[stream, low : low + near.queries.shape[0]]
            for part, tile, logits in self._logits(layer, near, room):
                rows[part, tile.start : tile.stop] = logits
        return self._finite(result.softmax(-1)).reshape(*h.shape[:-1], layer.classes)

    @checks.evaluating
    def sequence_log_prob(
        self,
        h: Tensor,
        targets: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        neighbours: Sequence[int] | None = None,
        learning_rates: Sequence[float] | None = None,
        block: int | None = None,
        workspace: int | None = None,
    ) -> Tensor:
        """Return log p(target | h, θ̃) of each position given the n positions before it, and store the sequence.

        The result is that of ``log_prob`` followed by ``observe``, position by position: the entries stored before
        the sequence count, too.

        Args:
            neighbours: several K at once, from the same search and the same softmaxes of the stored entries; the result
                is then (len(neighbours), ...). This and the next argument need ``steps=1``.
            learning_rates: several α at once, from the same products; the result is then (..., len(learning_rates),
                *targets.shape).
            block: the number of positions computed together. Speed and memory depend on it; the result does not, except
                for rounding and the choice among equally distant entries.
            workspace: the bytes that may be held besides inputs, results, the activations of a block and its window,
                and a layer converted to float32. The default is 256 MiB on a CPU and 4 GiB on a GPU.
        """
        if self.search != "exact":
            raise ValueError(f'search must be "exact" for a sequence, whose memory slides, got {self.search!r}')
        counts, rates = self._grid(neighbours, learning_rates)
        streams, labels = self._checked(h, targets)
        layer = self._layer(streams, labels, weight, bias)
        block = None if block is None else check_integer("block", block, 1)
        room = self._room(workspace, h)
        rows = block or self._rows(layer, self.memory_size, room)
        result = layer.weight.new_empty(len(counts), len(rates), *labels.shape)
        past, past_labels = self._history.window(streams)
        for stream in range(streams.shape[0]):
            sequence = streams[stream, None], labels[stream, None]
            timeline = Timeline((past[stream, None], past_labels[stream, None]), sequence)
            normalisers = torch.cat([self._normalisers(h[stream], layer, room) for h in (past, streams)])
            for first in range(timeline.start, timeline.end, rows):
                last = min(first + rows, timeline.end)
                low = max(0, first - self.memory_size)
                keys = timeline.keys(low, last)[0].to(layer.weight.dtype)
                queries, keys = keys[first - low :], keys[: last - 1 - low]
                known = queries, keys, timeline.labels(low, last - 1)[0], normalisers[low : last - 1]
                distance, indices = nearest(queries, keys, max(counts), (first - low, self.memory_size))
                nears = [self._weighted(*known, distance[:, :k], indices[:, :k]) for k in counts]
                wanted = timeline.labels(first, last)[0]
                if neighbours is None and learning_rates is None:
                    found = self._target_log_prob(layer, nears[0], wanted, room)
                else:
                    found = self._grid_log_prob(layer, nears, rates, wanted, room)
                result[:, :, stream, first - timeline.start : last - timeline.start] = found
        self._finite(result, rates if learning_rates is not None else ())
        self._history.append(streams, labels)
        result = result.reshape(*result.shape[:2], *targets.shape)
        if learning_rates is None:
            result = result.squeeze(1)
        return result.squeeze(0) if neighbours is None else result

    def _grid(self, neighbours: Any, learning_rates: Any) -> tuple[list[int], list[float]]:
        """Check all K and all α of a call, and return them."""
        if self.steps > 1 and (neighbours is not None or learning_rates is not None):
            raise ValueError(
                f"several neighbours or learning_rates need steps=1, whose products they share, got {self.steps}"
            )
        counts = [self.neighbours] if neighbours is None else checks.check_list("neighbours", neighbours)
        rates = [self.learning_rate] if learning_rates is None else checks.check_list("learning_rates", learning_rates)
        counts = [check_integer("neighbours", k, 1) for k in counts]
        if max(counts) > self.memory_size:
            raise ValueError(f"neighbours must be at most the memory's size, {self.memory_size}, got {max(counts)}")
        return counts, [checks.check_positive("learning_rates", rate) for rate in rates]

    def _layer(self, streams: Tensor, labels: Tensor | None, weight: Tensor, bias: Tensor | None) -> Layer:
        """Check the output layer and all classes, and return the layer in at least float32."""
        checks.check_layer(streams, weight, bias)
        if labels is not None:
            checks.check_classes("targets", labels, weight.shape[0])
        checks.check_classes("the stored targets, with weight", self._history.window(streams)[1], weight.shape[0])
        dtype = wide(streams.dtype)
        bias = None if bias is None else bias.detach().to(dtype)
        return Layer(weight.detach().to(dtype), bias, product_dtype(streams.dtype, streams.device))

    def _finite(self, result: Tensor, rates: Sequence[float] = ()) -> Tensor:
        """Return the result if it is no NaN, which a mixture would take for an empty memory.

        ``rates`` are the α of a sweep, whose results are (..., len(rates), streams, T).
        """
        wrong = result.isnan()
        if bool(wrong.any()):
            cause = f"learning_rate={self.learning_rate:g}, l2={self.l2:g}, steps={self.steps} make them overflow"
            if rates:
                named = [rate for rate, each in zip(rates, wrong.unbind(-3), strict=True) if bool(each.any())]
                cause = f"the learning_rates {named} make them overflow: leave these out"
            raise ValueError(
                f"the logits of the adapted layer must be finite in {result.dtype}, but weight and bias hold NaN or "
                f"inf, or {cause}"
            )
        return result

    def _room(self, workspace: int | None, h: Tensor) -> int:
        """Return the workspace in bytes."""
        return checks.check_workspace(workspace, h.device, cpu=2**28, other=2**32)

    def _rows(self, layer: Layer, keys: int, room: int) -> int:
        """Return the number Q of queries to take at a time; distances and the change of the logits are Q × (n + Q).

        Q = sqrt(n d) minimises (n + Q)(d + Q) / Q, the operations for each query and class.
        """
        elements = room // (16 * layer.weight.element_size())
        keys = max(keys, 1)
        return max(1, min(elements // keys, int(elements**0.5), int((keys * layer.weight.shape[1]) ** 0.5)))

    def _normalisers(self, h: Tensor, layer: Layer, room: int) -> Tensor:
        """Return log Σ_v exp(z_v) of each row of h under θ."""
        parts = []
        for part in h.split(2**14):
            part = part.to(layer.weight.dtype)
            zeros = torch.zeros(part.shape[0], dtype=torch.int64, device=h.device)
            parts.append(linear_log_prob(part, layer.weight, zeros, linear_bias=layer.bias, workspace=room)[1])
        return torch.cat(parts)

    def _adapted_to_window(self, streams: Tensor, layer: Layer, room: int) -> Iterator[tuple[int, int, Neighbours]]:
        """Yield stream, first position and neighbours of each block of queries, given the entries stored now."""
        keys, labels = self._history.window(streams)
        rows = self._rows(layer, len(self), room)
        few = streams.shape[1] * self.neighbours < len(self)  # Then only neighbours go through the layer, not all keys.
        for stream in range(streams.shape[0]):
            stored = keys[stream].to(layer.weight.dtype)
            known = None if few else (stored, labels[stream], self._normalisers(stored, layer, room))
            for low in range(0, streams.shape[1], rows):
                queries = streams[stream, low : low + rows].to(layer.weight.dtype)
                search = faiss_nearest if self.search == "faiss" and len(self) else nearest
                distance, indices = search(queries, stored, self.neighbours)
                if known is None:
                    used, indices = indices.unique(return_inverse=True)
                    found = stored[used]
                    near = found, labels[stream, used], self._normalisers(found, layer, room)
                else:
                    near = known
                yield stream, low, self._weighted(queries, *near, distance, indices)

    def _weighted(
        self, queries: Tensor, keys: Tensor, labels: Tensor, normalisers: Tensor, distance: Tensor, indices: Tensor
    ) -> Neighbours:
        """Return the neighbours with their weights w_k; the distance of a key that a query does not see is inf.

        They are computed relative to that of the nearest key, so that no ε and no distance overflows.
        """
        least = distance.amin(1, keepdim=True) if distance.shape[1] else distance
        kernel = (1 + (distance - least) / (self.epsilon + least)).reciprocal_().masked_fill_(distance == torch.inf, 0)
        total = kernel.sum(1, keepdim=True)
        return Neighbours(queries, keys, labels, normalisers, indices, kernel / torch.where(total == 0, 1, total))

    def _logits(self, layer: Layer, near: Neighbours, room: int) -> Iterator[tuple[slice, range, Tensor]]:
        """Yield some queries, some classes, and their logits under θ̃."""
        (n, k), size = near.indices.shape, layer.weight.element_size()
        if self.steps == 1 or k == 0:
            if n * k < near.keys.shape[0]:
                near = near.compact()
            width = max(1, room // (4 * size * (near.keys.shape[0] + n)))
            for tile, logits in one_step(layer, near, self.learning_rate, width):
                yield slice(0, n), tile, logits
            return
        steps = Steps(self.steps, self.learning_rate, self.l2)
        yield from further_steps(layer, near, steps, room)

    def _target_log_prob(self, layer: Layer, near: Neighbours, targets: Tensor, room: int) -> Tensor:
        """Return log p of the targets (Q,) under θ̃."""
        found = TargetLogProb(targets, near.queries)
        for part, tile, logits in self._logits(layer, near, room):
            found.add(part, tile, logits)
        return found.value

    def _grid_log_prob(
        self, layer: Layer, nears: Sequence[Neighbours], rates: Sequence[float], targets: Tensor, room: int
    ) -> Tensor:
        """Return log p of the targets after one step, (len(nears), len(rates), Q)."""
        found = [TargetLogProb(targets, layer.weight) for _ in nears for _ in rates]
        everyone = slice(0, len(targets))
        width = max(1, room // (4 * layer.weight.element_size() * (nears[0].keys.shape[0] + len(targets))))
        for tile, pairs in one_step_grid(layer, nears, rates, width):
            for each, logits in zip(found, pairs, strict=True):
                each.add(everyone, tile, logits)
        return torch.stack([each.value for each in found]).reshape(len(nears), len(rates), -1)


def nearest(queries: Tensor, keys: Tensor, k: int, lags: tuple[int, int] | None = None) -> tuple[Tensor, Tensor]:
    """Return squared distances and indices (Q, min(k, M)) of the keys (M, d) closest to each query (Q, d), sorted.

    With ``lags = (offset, size)``, query q stands at position offset + q of the keys and sees the ``size`` keys before
    it; where it sees fewer than k, the distances of the rest are inf. The order of equally distant keys is open, and
    keys count as equally distant where the rounding of products cannot tell them apart.
    """
    center = keys.mean(0) if keys.shape[0] else 0  # A common part would cost digits in the differences below.
    queries, keys = queries - center, keys - center
    distance = torch.addmm(keys.square().sum(1), queries, keys.T, alpha=-2)
    distance.add_(queries.square().sum(1, keepdim=True)).clamp_(min=0)
    if lags is not None:
        offset, size = lags
        t = torch.arange(offset, offset + queries.shape[0], device=keys.device).unsqueeze(1)
        lag = t - torch.arange(keys.shape[0], device=keys.device)
        distance.masked_fill_((lag < 1) | (lag > size), torch.inf)
    found = distance.topk(min(k, keys.shape[0]), dim=1, largest=False)
    return _exact_where_close(queries, keys, found.values, found.indices), found.indices


def _exact_where_close(queries: Tensor, keys: Tensor, distance: Tensor, indices: Tensor) -> Tensor:
    """Return the distances, with those of close pairs computed again from the differences.

    Distances by products, q² − 2qk + k², lose their digits where q and k are nearly the same, and there the weight
    1 / (ε + distance) is largest. Few pairs are so close, so their differences cost little. They are taken for as many
    pairs at a time as need no more room than all distances or all keys do.
    """
    norms = queries.square().sum(1, keepdim=True) + keys.square().sum(1)[indices]
    row, column = (distance < CLOSE * norms).nonzero(as_tuple=True)
    step = max(1, keys.shape[0]) * max(1, queries.shape[0] // keys.shape[1])
    for i, j in zip(row.split(step), column.split(step), strict=True):
        distance[i, j] = (queries[i] - keys[indices[i, j]]).square_().sum(1)
    return distance


def faiss_nearest(queries: Tensor, keys: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the same as :func:`nearest`, found by faiss on the CPU in float32: for memories too large for a device."""
    try:
        import faiss
    except ImportError as error:
        message = 'search="faiss" needs faiss: pip install "hebbian-softmax[faiss]", or use search="exact"'
        raise ImportError(message) from error
    index = faiss.IndexFlatL2(keys.shape[1])
    index.add(keys.float().cpu().numpy())
    found = index.search(queries.float().cpu().numpy(), min(k, keys.shape[0]))
    distance, where = torch.from_numpy(found[0]).to(queries), torch.from_numpy(found[1]).to(queries.device)
    return _exact_where_close(queries, keys, distance, where), where
