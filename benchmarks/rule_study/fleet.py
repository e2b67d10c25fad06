"""Training several language models of one shape at once, each with its own weights, seed and variant.

What is done is what :func:`benchmarks.rule_study.train.train` does, model by model. Only the LSTM is computed for all
models together (:mod:`benchmarks.rule_study.lstm`), because alone it leaves a GPU mostly idle. The models share one
generator for dropout, so what a seed draws depends on which models are trained beside it: the same trial in another
fleet is another sample.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.rule_study.lstm import BatchedLSTM
from benchmarks.rule_study.train import (
    Trial,
    as_graph,
    asked_for,
    began,
    learning_rate,
    make_head,
    perplexities,
    texts_of,
)
from benchmarks.rule_study.write import Rule
from hebbian_softmax import linear_cross_entropy
from hebbian_softmax.lab.data.corpus import Corpus, corpora_root, open_corpus
from hebbian_softmax.lab.language.model import dropout
from hebbian_softmax.lab.language.model.lstm import WordLSTM

SHARED = ("corpus", "trained_words", "evaluated_words", "hidden", "embedding", "batch", "sequence", "epochs", "carry")
"""What all models of a fleet have in common."""


def shape_of(trial: Trial) -> tuple[Any, ...] | None:
    """Return what trials must share to be trained together; None for a model that must be trained alone."""
    if trial.model != "lstm" or trial.layers != 1:
        return None
    return tuple(getattr(trial, name) for name in SHARED)


class Member:
    """One model of a fleet, its rule, and where it reads."""

    def __init__(self, trial: Trial, classes: int, device: str, precision: torch.dtype, numbers: Tensor) -> None:
        torch.manual_seed(trial.seed)
        head = make_head(trial, classes)
        self.trial = trial
        self.model = WordLSTM(head, trial.network, memorizes=False, precision=precision).to(device).train()
        self.parameters = list(self.model.parameters())
        self.rule = Rule(trial.variant, head.weight.detach(), trial.learning_rate, trial.seed)
        self.lr, self.rule.lr, self.rule.progress = numbers[0], numbers[0], numbers[1]
        self.inputs, self.targets = torch.zeros(2, trial.sequence, trial.batch, dtype=torch.int64, device=device)
        self.order = np.random.RandomState(1000 + trial.seed)
        self.offset = 0
        self.loss = torch.zeros((), device=device)
        self.kept: tuple[Tensor, ...] = ()
        """What the rule needs of a batch after the step."""
        self.curve: list[list[float]] = []
        self.signals: list[list[float]] = []

    def embedded(self) -> Tensor:
        """Return the words of the batch (time, batch, embedding), after dropout."""
        words = F.embedding(self.inputs, self.model.head.weight).to(self.model.precision)
        return dropout(words, self.trial.input_dropout, True, locked=self.trial.locked_dropout)

    def loss_of(self, features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the mean loss of features (time, batch, embedding), the features in rows, and -log p of each.

        Only a variant that needs the latter gets it; for others it is 0.
        """
        h, y = features.reshape(-1, self.trial.embedding), self.targets.reshape(-1)
        half = self.model.precision == torch.bfloat16
        each = self.rule.variant.surprise > 0 or self.rule.variant.gate > 0
        with torch.autocast(h.device.type, torch.bfloat16, enabled=half):
            if self.trial.variant.library is not None:
                self.model.head.remember(features, self.targets)
            dropped = dropout(features, self.trial.output_dropout, True, locked=self.trial.locked_dropout)
            prior = self.rule.before_loss(y)
            found = linear_cross_entropy(
                dropped.reshape(h.shape), self.model.head.weight, y, reduction="none" if each else "mean", prior=prior
            )
        if each:
            return found.mean(), h, found.detach().float()
        return found, h, torch.zeros(len(y), device=h.device)

    def result(self, steps: int, seconds: float, texts: dict[str, Tensor], corpus: Corpus) -> dict[str, Any]:
        rule, trial = self.rule, self.trial
        return {
            "trial": {key: value for key, value in asdict(trial).items() if key != "variant"} | asdict(trial.variant),
            "valid": perplexities(self.model, texts["valid"], corpus),
            "test": perplexities(self.model, texts["test"], corpus),
            "curve": self.curve,
            "signals": self.signals,
            "steps": steps,
            "seconds": seconds,
            "loss": float(self.loss),
            "row_norm": float(rule.row_norm),
            "activation_norm": float(rule.mean_norm),
            "mean": float(rule.mean.norm()),
            "began": began(self.model.head),
            **asked_for(trial, self.model, rule, texts["valid"], corpus),
        }


def features_of_all(members: list[Member], state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return what the heads are given, (models, time, batch, embedding), and the state after it.

    A state is h, in the dtype of the features, and the cell in float32, both (models, batch, hidden).
    """
    precision = members[0].model.precision
    layers = [member.model.layers[0] for member in members]

    def stacked(name: str) -> Tensor:
        return torch.stack([getattr(layer, name) for layer in layers]).to(precision)

    x = torch.stack([member.embedded() for member in members])
    u, b = stacked("weight_ih"), stacked("bias_ih") + stacked("bias_hh")
    dropped = [F.dropout(member.model.layers[0].weight_hh, member.trial.recurrent_dropout) for member in members]
    r = torch.stack(dropped).to(precision)
    projections = [member.model.projection for member in members]
    joined = None if projections[0] is None else torch.stack(projections).to(precision)  # type: ignore[arg-type]
    if joined is not None:
        u = u @ joined.mT
    with torch.autocast(x.device.type, enabled=False):
        h, cell = BatchedLSTM.apply(x, u, r, b, *state)
        features = h if joined is None else (h.flatten(1, 2) @ joined.mT).view(*h.shape[:3], -1)
    return features, (h[:, -1].detach(), cell.detach())


def train_fleet(trials: list[Trial], device: str, data: Path | None, deadline: float) -> list[dict[str, Any]]:
    """Train models of one shape; return what :func:`train` returns, for each. Raise TimeoutError out of time."""
    first = trials[0]
    if None in {shape_of(trial) for trial in trials} or len({shape_of(trial) for trial in trials}) > 1:
        raise ValueError("the models of a fleet must be LSTMs of one layer and of one shape")
    corpus = open_corpus((corpora_root() if data is None else data) / first.corpus)
    texts = texts_of(first, corpus, device)
    precision = torch.bfloat16 if device == "cuda" else torch.float32
    per_stream = (len(texts["train"]) - 1) // first.batch
    columns = [texts["train"][i : i + per_stream * first.batch].view(first.batch, -1).T.contiguous() for i in (0, 1)]
    per_epoch = (per_stream - first.sequence) // first.sequence
    total = max(1, int(per_epoch * first.epochs))
    schedule = _schedule(trials, total).to(device)
    now = schedule[0].clone()
    members = [Member(each, len(corpus.words), device, precision, now[k]) for k, each in enumerate(trials)]
    graphs = device == "cuda"
    groups = [
        {
            "params": member.parameters,
            "lr": member.lr,
            "betas": (member.trial.momentum, 0.999),
            "weight_decay": member.trial.weight_decay,
        }
        for member in members
    ]
    optimizer = torch.optim.Adam(groups, fused=graphs, capturable=graphs)
    for member in members:
        if member.trial.variant.library is not None:
            member.model.head.attach(optimizer)
    h0 = torch.zeros(len(members), first.batch, first.hidden, dtype=precision, device=device)
    state = h0, torch.zeros_like(h0, dtype=torch.float32)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        features, after = features_of_all(members, state)
        found = [member.loss_of(h) for member, h in zip(members, features, strict=True)]
        torch.stack([loss for loss, _, _ in found]).sum().backward()
        for member, (loss, h, nll) in zip(members, found, strict=True):
            nn.utils.clip_grad_norm_(member.parameters, member.trial.clip, foreach=True)
            member.loss.copy_(loss.detach())
            member.kept = h.detach(), member.targets.reshape(-1), nll
        optimizer.step()
        for member in members:
            if member.trial.variant.library is None:
                member.rule.after_step(*member.kept)
        for kept, reached in zip(state, after, strict=True):  # not earlier: the backward pass needs what was kept
            if first.carry:
                kept.copy_(reached)

    run = as_graph(step) if graphs else step
    begun = time.perf_counter()
    for done in range(total):
        place = done % per_epoch
        now.copy_(schedule[done])
        if place == 0:  # an epoch begins elsewhere in the text
            for kept in state:
                kept.zero_()
        for member in members:
            if place == 0:
                member.offset = member.order.randint(first.sequence)
            i = member.offset + place * first.sequence
            member.inputs.copy_(columns[0][i : i + first.sequence])
            member.targets.copy_(columns[1][i : i + first.sequence])
        run()
        if (done + 1) % 25 == 0:
            for member in members:
                member.rule.refresh()
        if (done + 1) % max(1, total // 40) == 0:
            for member in members:
                member.signals.append([done + 1, *member.rule.fits.tolist()])
            if time.time() > deadline:
                raise TimeoutError(f"{done + 1} of {total} steps were done when the time was over")
        for member in members:
            if (done + 1) % max(1, total // member.trial.evaluations) == 0 and done + 1 < total:
                member.curve.append([done + 1, perplexities(member.model, texts["valid"], corpus)["all"]])
    if graphs:
        torch.cuda.synchronize()
    seconds = (time.perf_counter() - begun) / len(members)
    return [member.result(total, seconds, texts, corpus) for member in members]


def _schedule(trials: list[Trial], total: int) -> Tensor:
    """Return the learning rate and the progress of each step and model, (steps, models, 2)."""
    rows = [[[learning_rate(trial, done, total), done / total] for trial in trials] for done in range(total)]
    return torch.tensor(rows, dtype=torch.float32)
