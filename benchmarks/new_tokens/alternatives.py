"""Other rows for new tokens, to compare with: what users have today, and other ways to do without a bias."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.new_tokens.protocol import Split
from hebbian_softmax import NewClasses


def mean_row(split: Split) -> tuple[Tensor, Tensor]:
    """Return the mean of the kept rows for each new token, as ``resize_token_embeddings`` has it on average."""
    row = split.kept.weight.detach().mean(0)
    return row.expand(len(split.new), -1), row.new_zeros(len(split.new))


def line_and_prior(split: Split, bias: bool) -> tuple[Tensor, Tensor]:
    """Return rows that give each new token its frequency and know nothing else."""
    prepared = split.known().prepared(NewClasses())
    constants = prepared.constant + (split.counts.double() / split.stream.stop).log()
    rows = prepared.slope.expand(len(split.new), -1)
    if bias:
        return rows.float(), constants.float()
    return (rows + constants.outer(prepared.one)).float(), torch.zeros(len(split.new))


def folded_into_mean(split: Split, rows: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows without a bias that have it along the mean activation instead."""
    mean = split.features.h[split.stream].mean(0)
    return rows + torch.outer(bias, mean / (mean @ mean)), torch.zeros_like(bias)


def learned_map(split: Split, ridge: float) -> tuple[Tensor, Tensor]:
    """Return rows that a linear map makes of class means and log counts, which was learned on kept tokens.

    The noise of a mean of c activations is Σ_within/c, which is taken out of what the map is learned from and added
    where the map is applied: two covariances, and one solve for each count.
    """
    h, labels = split.features.h[split.stream].double(), split.labels[split.stream]
    total = len(split.features.rows)
    counts = torch.bincount(labels, minlength=total).double()
    mean = h.mean(0)
    sums = torch.zeros(total, h.shape[1], dtype=h.dtype).index_add_(0, labels, h)
    means = sums / counts.clamp_min(1).unsqueeze(1) - mean
    first = split.kept.out_features
    known = ((counts >= 2) & (torch.arange(total) < first)).nonzero().squeeze(1)
    mine = torch.isin(labels, known)
    rest = h[mine] - mean - means[labels[mine]]
    within = rest.T @ rest / (len(rest) - len(known))
    between = means[known].T @ means[known] / len(known) - within * (1 / counts[known]).mean()
    values, vectors = torch.linalg.eigh(between)
    between = (vectors * values.clamp_min(1e-4 * values.max())) @ vectors.T
    base = torch.stack([torch.ones_like(counts), counts.clamp_min(1).log()], 1)
    rows = split.kept.weight.detach().double()[known]
    trend = torch.linalg.lstsq(base[known], rows).solution
    together = (rows - base[known] @ trend).T @ means[known] / len(known)
    softening = ridge * between.diagonal().mean() * torch.eye(h.shape[1], dtype=h.dtype)
    found = base[first:] @ trend
    for count in counts[first:].unique():
        which = counts[first:] == count
        found[which] += means[first:][which] @ torch.linalg.solve(between + within / count + softening, together.T)
    return found.float(), torch.zeros(len(found))
