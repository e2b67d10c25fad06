"""Training one language model with one variant of the rule, and its perplexities."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.rule_study.write import Rule, Variant
from hebbian_softmax import HebbianSoftmax, linear_cross_entropy
from hebbian_softmax.lab.data.corpus import Corpus, corpora_root, open_corpus
from hebbian_softmax.lab.language.evaluation import perplexity, score, stream, word_losses
from hebbian_softmax.lab.language.experiments.reuters import DAYS, Reuters
from hebbian_softmax.lab.language.memories.settings import Grids
from hebbian_softmax.lab.language.memories.sweep import memory_rows
from hebbian_softmax.lab.language.model import MODELS, LanguageModel, NetworkOptions, dropout

WARMUP = 50
SEEN = (0, 1, 2, 5, 20, 100, 1000)
"""The least counts of the groups of classes that ``by_seen`` tells apart."""
STREAMS = 64
"""Parts of a text that an evaluation reads side by side."""


@dataclass(frozen=True)
class Trial:
    """A model to train; the defaults are those of the published comparison on WikiText-2."""

    corpus: str
    name: str = ""
    variant: Variant = field(default_factory=Variant)
    seed: int = 0
    model: str = "lstm"
    """lstm or transformer; the sizes are not adapted to it."""
    layers: int = 1
    hidden: int = 1024
    embedding: int = 512
    batch: int = 128
    sequence: int = 64
    epochs: float = 8.0
    learning_rate: float = 0.004
    constant: bool = False
    """Whether the learning rate stays as it is after the warm-up, in place of a cosine to 0."""
    input_dropout: float = 0.5
    output_dropout: float = 0.5
    locked_dropout: bool = False
    """Let input and output dropout draw one mask for all words of a sequence."""
    recurrent_dropout: float = 0.0
    """Of the LSTM: dropout of the weights from state to state, one mask for each step."""
    carry: bool = False
    """Of the LSTM: begin each sequence with the state that the sequence before it in the text has left."""
    heads: int = 8
    residual_dropout: float = 0.0
    attention_dropout: float = 0.0
    """Of the Transformer, as are the two before."""
    momentum: float = 0.0
    """β₁ of Adam."""
    weight_decay: float = 0.0
    """L2 penalty."""
    clip: float = 1.0
    evaluations: int = 4
    """Evaluations on the validation text, the last one included."""
    trained_words: int = 0
    """How many words of the training text are read; 0 for all of them."""
    evaluated_words: int = 0
    """How many words of the validation text, and of the test text, are read; 0 for all of them."""
    by_seen: bool = False
    """Whether words of the validation text are also told apart by how often training has seen them."""
    memories: bool = False
    """Whether the trained model is also measured with a cache, and with a cache and one step of MbPA. The settings of
    both are chosen on the validation text."""

    @classmethod
    def of(cls, options: dict[str, Any]) -> Trial:
        """Return the trial that a JSON object describes; the names of both classes may be mixed in it."""
        own = {key: value for key, value in options.items() if key in cls.__dataclass_fields__}
        rule = {key: value for key, value in options.items() if key not in own}
        return cls(**own, variant=Variant(**rule))

    @property
    def network(self) -> NetworkOptions:
        """The settings that the network is built from."""
        names = NetworkOptions.__dataclass_fields__.keys() & Trial.__dataclass_fields__.keys()
        given = {name: getattr(self, name) for name in names}
        return NetworkOptions(**given, context=self.sequence)


def train(trial: Trial, device: str, data: Path | None, deadline: float) -> dict[str, Any]:
    """Train a model and return everything that is known of it; raise TimeoutError where the time does not suffice."""
    torch.manual_seed(trial.seed)
    corpus = open_corpus((corpora_root() if data is None else data) / trial.corpus)
    texts = texts_of(trial, corpus, device)
    classes = len(corpus.words)
    precision = torch.bfloat16 if device == "cuda" else torch.float32
    head = make_head(trial, classes)
    model = MODELS[trial.model](head, trial.network, memorizes=False, precision=precision).to(device).train()
    state = model.first_state(trial.batch) if trial.carry else None
    if trial.carry and state is None:
        raise ValueError(f"the state of a {trial.model} cannot be carried from step to step")
    parameters = list(model.parameters())
    lr = torch.zeros((), device=device)
    graphs = device == "cuda"
    betas, decay = (trial.momentum, 0.999), trial.weight_decay
    optimizer = torch.optim.Adam(parameters, lr, betas, weight_decay=decay, fused=graphs, capturable=graphs)
    rule = Rule(trial.variant, head.weight.detach(), trial.learning_rate, trial.seed)
    if trial.variant.library is not None:
        head.attach(optimizer)
    inputs, targets = (torch.zeros(trial.sequence, trial.batch, dtype=torch.int64, device=device) for _ in range(2))
    last_loss = torch.zeros((), device=device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        features, after = model.features(inputs, state)
        h, y = features.reshape(-1, trial.embedding), targets.reshape(-1)
        with torch.autocast(device, torch.bfloat16, enabled=precision == torch.bfloat16):
            if trial.variant.library is not None:
                head.remember(features, targets)
            dropped = dropout(features, trial.output_dropout, True, locked=trial.locked_dropout).reshape(h.shape)
            losses = linear_cross_entropy(dropped, head.weight, y, reduction="none", prior=rule.before_loss(y))
        loss = losses.mean()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, trial.clip, foreach=True)
        optimizer.step()
        if trial.variant.library is None:
            rule.after_step(h.detach(), y, losses.detach().float())
        last_loss.copy_(loss.detach())
        for before, now in zip(state or (), after if trial.carry else (), strict=True):
            for kept, reached in zip(before, now, strict=True):  # not earlier: the backward pass needs what was kept
                kept.copy_(reached.detach())

    run = as_graph(step) if graphs else step
    per_stream = (len(texts["train"]) - 1) // trial.batch
    columns = [texts["train"][i : i + per_stream * trial.batch].view(trial.batch, -1).T.contiguous() for i in (0, 1)]
    per_epoch = (per_stream - trial.sequence) // trial.sequence
    total = max(1, int(per_epoch * trial.epochs))
    order = np.random.RandomState(1000 + trial.seed)
    curve, signals, done, begun = [], [], 0, time.perf_counter()
    while done < total:
        offset = order.randint(trial.sequence)
        for kept in (each for layer in state or () for each in layer):
            kept.zero_()  # an epoch begins elsewhere in the text
        for i in range(offset, offset + per_epoch * trial.sequence, trial.sequence):
            if done == total:
                break
            rate = learning_rate(trial, done, total)
            for number, value in ((lr, rate), (rule.lr, rate), (rule.progress, done / total)):
                number.fill_(value)
            inputs.copy_(columns[0][i : i + trial.sequence])
            targets.copy_(columns[1][i : i + trial.sequence])
            run()
            done += 1
            if done % 25 == 0:
                rule.refresh()
            if done % max(1, total // 40) == 0:
                signals.append([done, *rule.fits.tolist()])
                if time.time() > deadline:
                    raise TimeoutError(f"{done} of {total} steps were done when the time was over")
            if done % max(1, total // trial.evaluations) == 0 and done < total:
                curve.append([done, perplexities(model, texts["valid"], corpus)["all"]])
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - begun
    return {
        "trial": {key: value for key, value in asdict(trial).items() if key != "variant"} | asdict(trial.variant),
        "valid": perplexities(model, texts["valid"], corpus),
        "test": perplexities(model, texts["test"], corpus),
        "curve": curve,
        "signals": signals,
        "steps": total,
        "seconds": seconds,
        "loss": float(last_loss),
        "row_norm": float(rule.row_norm),
        "activation_norm": float(rule.mean_norm),
        "mean": float(rule.mean.norm()),
        "began": began(head),
        **asked_for(trial, model, rule, texts["valid"], corpus),
    }


def learning_rate(trial: Trial, done: int, total: int) -> float:
    """Return the learning rate of the step after ``done`` of ``total`` ones."""
    cosine = 1.0 if trial.constant else 0.5 * (1 + math.cos(math.pi * done / total))
    return trial.learning_rate * min(1, (done + 1) / WARMUP) * cosine


def asked_for(trial: Trial, model: LanguageModel, rule: Rule, valid: Tensor, corpus: Corpus) -> dict[str, Any]:
    """Return the measurements that only some trials ask for."""
    found: dict[str, Any] = {}
    if trial.memories:
        found["memories"] = with_memories(model, corpus)
    if trial.by_seen:
        counts = rule.counts if trial.variant.library is None else model.head.counts
        found["by_seen"] = by_seen(model, valid, counts)
    return found


def with_memories(model: LanguageModel, corpus: Corpus) -> list[dict[str, Any]]:
    """Return the perplexities of a model alone, with a cache, and with a cache and MbPA, and the settings chosen."""
    rows = memory_rows(model, corpus, grids=Grids(two_step_words=0), quiet=True).rows
    return [row.as_plain() for row in rows]


@torch.no_grad()
def by_seen(model: LanguageModel, text: Tensor, counts: Tensor) -> list[dict[str, float]]:
    """Return, for groups of classes by how often training has seen them, what the words of a text are given.

    A group begins with the count ``least`` and has so many ``classes``. Its ``share`` is that of the text's words,
    ``mass`` is its mean probability over the text, ``mass_there`` that where one of its own words comes, and ``nats``
    is the mean of -log p of these words.
    """
    group = torch.bucketize(counts.long(), torch.tensor(SEEN[1:], device=counts.device), right=True)
    sums = torch.zeros(len(SEEN), 4, dtype=torch.float64)
    for features, words in stream(model, text, streams=STREAMS):
        known = words.flatten() >= 0
        h, y = features.flatten(0, 1)[known], words.flatten()[known].long()
        log_p = torch.log_softmax(h.float() @ model.head.weight.float().T, 1)
        mass = log_p.new_zeros(len(y), len(SEEN)).index_add_(1, group, log_p.exp())
        own, one = group[y], nn.functional.one_hot(group[y], len(SEEN)).double()
        there, nats = mass.gather(1, own[:, None]), -log_p.gather(1, y[:, None])
        found = one.sum(0), mass.double().sum(0), one.T @ there.double()[:, 0], one.T @ nats.double()[:, 0]
        sums += torch.stack(found, 1).cpu()
    words, mass, there, nats = sums.T.tolist()
    classes = torch.bincount(group, minlength=len(SEEN)).tolist()
    return [
        {
            "least": SEEN[k],
            "classes": classes[k],
            "share": words[k] / sum(words),
            "mass": mass[k] / sum(words),
            "mass_there": there[k] / max(1, words[k]),
            "nats": nats[k] / max(1, words[k]),
        }
        for k in range(len(SEEN))
    ]


def texts_of(trial: Trial, corpus: Corpus, device: str) -> dict[str, Tensor]:
    """Return the texts that a trial reads, as ids on the device."""
    many = trial.evaluated_words or None
    read = {"train": trial.trained_words or None, "valid": many, "test": many}
    return {split: corpus.splits[split][:most].to(device, torch.int64) for split, most in read.items()}


def make_head(trial: Trial, classes: int) -> HebbianSoftmax:
    """Return the output layer of a trial: one that never writes by itself, or the library's as its users have it."""
    if trial.variant.library is None:
        return HebbianSoftmax(trial.embedding, classes, gamma=0.0, limit=0)
    return HebbianSoftmax(trial.embedding, classes, **trial.variant.library)


def began(head: HebbianSoftmax) -> int | None:
    """Return the batch with which the library's head began to write; None where it does not find that out itself."""
    return None if head.settling is None or head.limit == 0 else int(head.settling.began)


def as_graph(step: Callable[[], None]) -> Callable[[], None]:
    """Return a function that makes a step: the first three as they are, the others by replaying a CUDA graph."""
    stream, calls = torch.cuda.Stream(), 0
    graph: torch.cuda.CUDAGraph | None = None

    def run() -> None:
        nonlocal calls, graph
        calls += 1
        if calls <= 3:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                step()
            torch.cuda.current_stream().wait_stream(stream)
            return
        if graph is None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                step()
        graph.replay()

    return run


def perplexities(model: LanguageModel, text: Tensor, corpus: Corpus) -> dict[str, float | None]:
    """Return the perplexity of a text, and of its words by how often they occur in the training text.

    Where the training text has dates, there is also that of words which it first has in its last 90 days.
    """
    losses, words, counts = word_losses(model, text, streams=STREAMS), text[1:].cpu().long(), corpus.counts
    found = score(losses, words, counts)
    sets = {"<10": counts < 10}
    if "first_days" in corpus.arrays:
        sets["recent"] = Reuters().sets(corpus)[DAYS]
    some = {name: losses[which[words]].double() for name, which in sets.items()}
    return {
        "all": found.perplexity,
        **found.bucket_perplexity,
        **{name: perplexity(each.mean().item()) if len(each) else None for name, each in some.items()},
    }
