"""Training one image model of the laboratory with one variant of the rule, and what it reached.

The data, networks, optimizers and batches are the laboratory's own. Its learners are made with a plain head, and hooks
add the variant: an additive term to the logits in training, a gate on the gradient, and the write after each step. The
library's own head, where the variant names it, takes the plain one's place, with the same first weights.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.rule_study.train import began
from benchmarks.rule_study.write import Rule, Variant
from hebbian_softmax import HebbianSoftmax
from hebbian_softmax.lab.base import environment
from hebbian_softmax.lab.images import glyphs, omniglot
from hebbian_softmax.lab.images import learner as curriculum
from hebbian_softmax.lab.images.curriculum import CHECK_EVERY, History
from hebbian_softmax.lab.longtail import learner as longtail
from hebbian_softmax.lab.longtail.compare import Settings as LongTailSettings
from hebbian_softmax.lab.longtail.reproduce import Settings as TailSettings

CURRICULA = {"glyphs": glyphs.SOURCE, "omniglot": omniglot.SOURCE}
LEVELS = (50, 100, 150, 300)
RARE_DIGITS = 3
DIGIT_RATE = 0.004
FORMER: dict[str, Any] = {"write": "centred", "start": 0, "fade": False}
"""What ``"library": true`` stands for in older files, beside the γ and T that are given with it."""


@dataclass(frozen=True)
class Trial:
    """A model to train; the defaults are those of the laboratory's commands."""

    task: str
    """glyphs, omniglot, longtail or digits."""
    name: str = ""
    variant: Variant = field(default_factory=Variant)
    seed: int = 0
    learning_rate: float = 0.0
    """0 stands for the task's own."""
    epochs: float = 30.0
    """Of digits, whose learning rate follows a cosine to 0; the other tasks have known steps and a constant rate."""
    steps: int = 0
    """Of the other tasks; 0 stands for the task's own."""
    cosine: bool = False
    """Whether the learning rate of the other tasks follows a cosine to 0, too."""
    validation: bool = False
    """Whether digits are evaluated on the validation images, to choose with."""

    @classmethod
    def of(cls, options: dict[str, Any]) -> Trial:
        """Return the trial that a JSON object describes; the names of both classes may be mixed in it."""
        own = {key: value for key, value in options.items() if key in cls.__dataclass_fields__}
        rule = {key: value for key, value in options.items() if key not in own}
        if rule.get("library") is True:
            usual = Variant()
            given = {"gamma": rule.get("gamma", usual.gamma), "limit": int(rule.get("limit", usual.limit))}
            rule["library"] = FORMER | given
        elif rule.get("library") is False:
            rule["library"] = None
        return cls(**own, variant=Variant(**rule))


class Writing:
    """Makes a plain learner one that follows a variant."""

    def __init__(
        self, trial: Trial, network: nn.Module, head: nn.Linear, optimizer: torch.optim.Optimizer, peak: float
    ) -> None:
        self.head, self.optimizer = head, optimizer
        self.rule = Rule(trial.variant, head.weight.detach(), peak, trial.seed)
        self.targets = self.features = self.dropped = self.logits = torch.empty(0)
        """What the step at hand has seen; whoever makes a step sets the targets."""
        network.register_forward_hook(self._see_features)
        head.register_forward_hook(self._see_logits)
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)

    def _see_features(self, module: nn.Module, inputs: Any, features: Tensor) -> None:
        self.features = features.detach()

    def _see_logits(self, module: nn.Module, inputs: Any, logits: Tensor) -> Tensor | None:
        if not module.training:
            return None
        prior = self.rule.before_loss(self.targets)
        logits = logits if prior is None else logits + prior
        self.dropped, self.logits = inputs[0].detach(), logits.detach()
        return logits

    def _before_step(self, *_: Any) -> None:
        self.nll = F.cross_entropy(self.logits, self.targets, reduction="none")
        if self.head.weight.grad is not None:
            self.rule.before_step(self.head.weight.grad, self.dropped, self.targets, self.nll)

    def _after_step(self, *_: Any) -> None:
        self.rule.moment = self.optimizer.state[self.head.weight].get("exp_avg")
        self.rule.after_step(self.features, self.targets, self.nll)


class Pupil(curriculum.Learner):
    """A learner of the curriculum that tells its targets to the writing."""

    writing: Writing | None = None

    def draw(self) -> tuple[Tensor, Tensor]:
        inputs, labels = super().draw()
        if self.writing is not None:
            self.writing.targets = labels
        return inputs, labels


def librarys_head(plain: nn.Linear, optimizer: torch.optim.Optimizer, options: dict[str, Any]) -> HebbianSoftmax:
    """Return the library's head, attached to the optimizer, with the parameter of a plain one, whose place it takes."""
    with torch.random.fork_rng(devices=[]):  # the head's own first weights are not used
        head = HebbianSoftmax(plain.in_features, plain.out_features, **options)
    head.weight = plain.weight
    head.attach(optimizer)
    return head


@dataclass
class Course:
    """A training that is ready to begin."""

    total: int
    step: Callable[[], None]
    check: Callable[[int], None]
    outcome: Callable[[], dict[str, Any]]
    optimizer: torch.optim.Optimizer
    writing: Writing | None
    """What the study's own variant needs; None where the library's head writes."""
    head: nn.Linear
    learning_rate: Callable[[int], float]


def train(trial: Trial, deadline: float) -> dict[str, Any]:
    """Train a model and return everything that is known of it; raise TimeoutError where the time does not suffice."""
    torch.set_num_threads(1)
    course = (_curriculum if trial.task in CURRICULA else _tail)(trial)
    signals, begun, wrote = [], time.perf_counter(), 0
    rule = None if course.writing is None else course.writing.rule
    for done in range(course.total):
        rate = course.learning_rate(done)
        for group in course.optimizer.param_groups:
            group["lr"] = rate
        if rule is not None:
            rule.lr.fill_(rate)
            rule.progress.fill_(done / course.total)
        course.step()
        if rule is not None:
            wrote = wrote or (done + 1 if rule.since.any() else 0)
            if (done + 1) % max(1, min(CHECK_EVERY, course.total // 40)) == 0:
                signals.append([done + 1, *(round(value, 4) for value in rule.fits.tolist())])
                rule.refresh()
        course.check(done + 1)
        if done % CHECK_EVERY == 0 and time.time() > deadline:
            raise TimeoutError(f"{done} of {course.total} steps were done when the time was over")
    return {
        "trial": {key: value for key, value in asdict(trial).items() if key != "variant"} | asdict(trial.variant),
        **course.outcome(),
        "first_written_step": wrote,
        "began": began(course.head) if isinstance(course.head, HebbianSoftmax) else None,
        "signals": signals,
        "steps": course.total,
        "seconds": time.perf_counter() - begun,
        "versions": environment.versions(),
        "hardware": environment.hardware(),
    }


def _curriculum(trial: Trial) -> Course:
    source = CURRICULA[trial.task]
    own = source.settings()
    rate, steps = trial.learning_rate or own.learning_rate, trial.steps or own.steps
    pupil = Pupil(source.load(own, True), curriculum.Method(False, rate), trial.seed, filters=own.filters)
    if trial.variant.library is None:
        pupil.writing = Writing(trial, pupil.network, pupil.head, pupil.optimizer, rate)
    else:
        pupil.head = librarys_head(pupil.head, pupil.optimizer, trial.variant.library)
        pupil.counting = True
    history = History(pupil.start)

    def check(done: int) -> None:
        if done % CHECK_EVERY == 0:
            pupil.check(int(pupil.active))
            accuracy, classes = pupil.outcome.tolist()
            history.add(accuracy, int(classes))

    def outcome() -> dict[str, Any]:
        reached = {f"to {level}": history.steps_to(level) for level in LEVELS}
        return {"test": {"classes": history.reached, **reached}, "curve": history.state_dict()}

    learning_rate = _schedule(rate, steps, trial.cosine)
    return Course(steps, pupil.step, check, outcome, pupil.optimizer, pupil.writing, pupil.head, learning_rate)


def _tail(trial: Trial) -> Course:
    name = {"longtail": "zipf", "digits": "digits"}[trial.task]
    tail = TailSettings(task=name).tails()[0]
    task = tail.draw(trial.seed, trial.validation)
    batches = longtail.ShuffledBatches(len(task.train_targets), tail.batch, trial.seed)
    if trial.task == "digits":
        rate, total = trial.learning_rate or DIGIT_RATE, round(trial.epochs * (batches.examples // batches.batch))
    else:
        own = LongTailSettings()
        rate, total = trial.learning_rate or own.learning_rate, trial.steps or own.steps
    learner = longtail.Learner(task, longtail.Method(rate), trial.seed)
    writing = None
    if trial.variant.library is None:
        writing = Writing(trial, learner.network, learner.head, learner.optimizer, rate)
    else:
        learner.head = librarys_head(learner.head, learner.optimizer, trial.variant.library)
    curve: list[list[float]] = []

    def step() -> None:
        batch = batches.next()
        targets = task.train_targets[batch]
        if writing is not None:
            writing.targets = targets
        learner.step(task.train_inputs[batch], targets)

    def check(done: int) -> None:
        if done % max(1, total // 10) == 0 and done < total:
            curve.append([done, 100 * learner.class_accuracies(task).mean().item()])

    def outcome() -> dict[str, Any]:
        accuracy = learner.class_accuracies(task)
        found = tail.measure(task.counts, accuracy)
        if trial.task == "digits":
            found["rarest"] = accuracy[-RARE_DIGITS:].mean().item()
        return {"test": {key: 100 * value for key, value in found.items()}, "curve": curve}

    learning_rate = _schedule(rate, total, trial.cosine or trial.task == "digits")
    return Course(total, step, check, outcome, learner.optimizer, writing, learner.head, learning_rate)


def _schedule(peak: float, total: int, cosine: bool) -> Callable[[int], float]:
    """Return the learning rate after so many steps: constant, or a cosine from ``peak`` to 0."""
    return lambda done: peak * 0.5 * (1 + math.cos(math.pi * done / total)) if cosine else peak
