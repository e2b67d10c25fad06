"""Language models as a task of the training loop: one model, or several that take the same steps side by side."""

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hebbian_softmax.lab.base.errors import LabError, enough_memory
from hebbian_softmax.lab.base.ranks import current_ranks
from hebbian_softmax.lab.base.seeds import derive_seed
from hebbian_softmax.lab.data.corpus import Corpus
from hebbian_softmax.lab.language.evaluation import measure, text_of
from hebbian_softmax.lab.language.learner import Learner
from hebbian_softmax.lab.language.names import ModelName
from hebbian_softmax.lab.language.schedule import learning_rate
from hebbian_softmax.lab.language.settings import Settings
from hebbian_softmax.lab.language.windows import Windows

ADVICE = "--accumulate 2 (or more) takes the same step in parts; or take a smaller --batch"


class WordTask:
    """Trains a model for each entry of `heads`: the model's name, and whether it is Hebbian.

    All start from the same weights, and a step gives all of them the same batch, the same dropout and the same
    learning rate: each follows from the seed and the number of the step, so that number is all there is to save of
    them.
    """

    def __init__(
        self, corpus: Corpus, settings: Settings, heads: Mapping[ModelName, bool], *, steps: int, device: torch.device
    ) -> None:
        for split in ("valid", "test"):
            text_of(corpus, split)
        self.corpus, self.settings, self.steps = corpus, settings, steps
        self.ranks = current_ranks()
        self.windows = make_windows(corpus, settings, device)
        with enough_memory("the model", "take a smaller --hidden or --embedding"):
            self.learners = {
                name: Learner(settings, len(corpus.words), hebbian=hebbian, device=device)
                for name, hebbian in heads.items()
            }
        self.step = 0
        self._timed: tuple[float, int] | None = None

    @property
    def step_words(self) -> int:
        """Words of a step, on which each model is trained."""
        return self.windows.batch * self.windows.length

    def train_step(self) -> dict[str, Tensor]:
        if self._timed is None:
            self._timed = time.monotonic(), self.step
        words = self.windows.at(self.step)
        rate = learning_rate(
            self.step,
            peak=self.settings.sizes.learning_rate,
            schedule=self.settings.schedule,
            warmup=self.settings.warmup,
            steps=self.steps,
        )
        seed = derive_seed(self.settings.seed, "dropout", self.step, self.ranks.rank)
        losses = {}
        for name, learner in self.learners.items():
            torch.manual_seed(seed)
            with enough_memory("a step", ADVICE):
                losses[f"{name.log_prefix}loss"] = learner.step(
                    words, rate, memorizing=self.step >= self.settings.start
                )
        self.step += 1
        return losses

    def evaluate(self) -> dict[str, float]:
        """Perplexities on the validation text, and the speed since the last time; the device has no work left."""
        metrics: dict[str, float] = {"words": self.step * self.step_words}
        if self._timed is not None:
            since, first = self._timed
            metrics["words_per_second"] = (self.step - first) * self.step_words / (time.monotonic() - since)
        for name, learner in self.learners.items():
            with enough_memory("an evaluation beside training", ADVICE):
                score, _ = measure(
                    learner.model,
                    self.corpus,
                    "valid",
                    streams=self.settings.valid_streams,
                    first=self.settings.valid_words,
                )
            metrics |= score.as_metrics(f"{name.log_prefix}valid")
        self._timed = None
        return metrics

    def state_dict(self) -> dict[str, Any]:
        learners = {name.log_prefix: learner.state_dict() for name, learner in self.learners.items()}
        return {"step": self.step, "corpus": self.corpus.fingerprint, "learners": learners}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check_corpus(state, self.corpus)
        expected = {name.log_prefix for name in self.learners}
        if set(state["learners"]) != expected:
            raise ValueError(f"it has the models {sorted(state['learners'])}, not {sorted(expected)}")
        for name, learner in self.learners.items():
            learner.load_state_dict(state["learners"][name.log_prefix])
        self.step = state["step"]


def make_windows(corpus: Corpus, settings: Settings, device: torch.device | str) -> Windows:
    ranks, sizes = current_ranks(), settings.sizes
    return Windows(
        corpus.splits["train"],
        batch=sizes.batch,
        length=sizes.sequence,
        seed=settings.seed,
        device=device,
        rank=ranks.rank,
        ranks=ranks.count,
        name=f"the training text of {corpus.path}",
    )


def check_corpus(state: Mapping[str, Any], corpus: Corpus) -> None:
    """Refuse a checkpoint of other words than those at hand: its rows would belong to other words."""
    if state["corpus"] != corpus.fingerprint:
        raise LabError(
            f"the checkpoint is of a model of other words (corpus {state['corpus']}) than those of {corpus.path} "
            f"(corpus {corpus.fingerprint}): put that corpus back as it was, or start a new run"
        )
