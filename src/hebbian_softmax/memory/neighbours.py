"""The K nearest stored activations by Euclidean distance."""

from __future__ import annotations

import torch
from torch import Tensor

CLOSE = 2**-7
"""Squared distances below this part of the squared norms are taken again from the differences."""


def nearest(queries: Tensor, keys: Tensor, k: int, lags: tuple[int, int] | None = None) -> tuple[Tensor, Tensor]:
    """Squared distances and indices (Q, min(k, M)) of the keys (M, d) nearest to each query (Q, d), nearest first.

    With ``lags = (offset, size)`` query q stands at position offset + q of the keys and sees the ``size`` before it;
    where it sees fewer than k, the distances of the rest are inf. Which of equally distant keys come first is open, and
    keys count as equally distant where rounding of the products cannot tell them apart.
    """
    center = keys.mean(0) if keys.shape[0] else 0  # a common part only costs digits in the differences below
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
    """Distances by products, q² − 2qk + k², lose their digits where q and k are nearly or exactly the same, and the
    kernel 1 / (ε + distance) is largest there. Few pairs are so close: differences of those cost little.

    They are taken for so many pairs at a time that they need no more room than all distances or all keys do.
    """
    norms = queries.square().sum(1, keepdim=True) + keys.square().sum(1)[indices]
    row, column = (distance < CLOSE * norms).nonzero(as_tuple=True)
    step = max(1, keys.shape[0]) * max(1, queries.shape[0] // keys.shape[1])
    for i, j in zip(row.split(step), column.split(step), strict=True):
        distance[i, j] = (queries[i] - keys[indices[i, j]]).square_().sum(1)
    return distance


def faiss_nearest(queries: Tensor, keys: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The same by faiss, on the CPU and in float32: exact search over memories too large for a device."""
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
