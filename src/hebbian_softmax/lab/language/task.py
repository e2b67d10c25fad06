"""Language models as a task of the training loop: one model, or several that take the same steps side by side.

A batch, its dropout and its learning rate follow from the seed and the number of the step, so a resumed run goes on
with them.
"""

import math
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hebbian_softmax.lab.base.errors import LabError, enough_memory
from hebbian_softmax.lab.base.progress import Progress, format_rate, format_seconds
from hebbian_softmax.lab.base.ranks import current_ranks
from hebbian_softmax.lab.base.rule import newly_begun
from hebbian_softmax.lab.base.seeds import derive_seed
from hebbian_softmax.lab.data.corpus import Corpus
from hebbian_softmax.lab.language.evaluation import measure, text_of
from hebbian_softmax.lab.language.learner import Learner
from hebbian_softmax.lab.language.names import ModelName
from hebbian_softmax.lab.language.settings import Settings
from hebbian_softmax.lab.language.source import check_corpus

ADVICE = "--accumulate 2 (or more) takes the same step in parts; or take a smaller --batch"
RESIDENT_SHARE = 0.25  # the share of a GPU's free memory that the training text may take
REDRAW_SECONDS = 1.0  # on a terminal, because reading the loss waits for the GPU
SHOWN = {"valid_perplexity": "perplexity", "loss": "loss"}
"""The ends of names of values in the log, and what progress calls them; only the first kind that there is is shown."""


def learning_rate(step: int, *, peak: float, schedule: str, warmup: int, steps: int) -> float:
    """Return the rate of the step with index `step` of `steps`: a linear rise over `warmup` steps, then the schedule.

    `cosine` and `linear` fall to zero at the end of the run. The paper names no schedule for its language models.

    >>> [learning_rate(step, peak=1.0, schedule="linear", warmup=2, steps=6) for step in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    if schedule == "cosine":
        return peak * (1 + math.cos(math.pi * done)) / 2
    return peak * (1 - done) if schedule == "linear" else peak


class Windows:
    """The training text as batches of `batch` sequences of `length` words, each with the word after it.

    An epoch cuts the text into neighbouring windows from a random offset on and takes them in a random order; windows
    that do not fill a batch are left out. Offset and order follow from the seed and the epoch. With `in_order` each
    column of the batches reads a part of the text from its beginning to its end. Each process takes its share of the
    columns. A text on a GPU is gathered there, unless it takes more than `resident_share` of the free
    memory.
    """

    def __init__(
        self,
        ids: Tensor,
        *,
        batch: int,
        length: int,
        seed: int,
        in_order: bool = False,
        device: torch.device | str = "cpu",
        rank: int = 0,
        ranks: int = 1,
        name: str = "the training split",
        resident_share: float = RESIDENT_SHARE,
    ) -> None:
        windows = max(0, len(ids) - length) // length
        if windows < batch:
            raise LabError(
                f"{name} has {len(ids):,} words, too few for a batch of {batch} sequences of {length}, "
                f"which needs {(batch + 1) * length:,}: give --batch or --sequence a smaller number"
            )
        self.batch, self.length, self.seed, self.device = batch, length, seed, torch.device(device)
        self.epoch_steps = windows // batch
        """The steps of an epoch."""
        self._windows, self._in_order, self._rank, self._ranks = windows, in_order, rank, ranks
        self._resident = (
            self.device.type != "cuda" or ids.nbytes <= resident_share * torch.cuda.mem_get_info(self.device)[0]
        )
        self._ids = ids.to(self.device) if self._resident else ids
        self._steps = torch.arange(length + 1, device=self._ids.device).unsqueeze(1)
        self._epoch, self._starts = -1, torch.empty(0, dtype=torch.long)

    def at(self, step: int) -> Tensor:
        """Return the words of a step as int64 (length + 1, columns of this process), on the device."""
        epoch, position = divmod(step, self.epoch_steps)
        if epoch != self._epoch:
            self._epoch, self._starts = epoch, self.starts(epoch).to(self._ids.device)
        share = self.batch // self._ranks
        first = position * self.batch + self._rank * share
        words = self._ids[self._starts[first : first + share] + self._steps]
        if not self._resident:  # pinned memory is copied while the GPU computes
            words = words.pin_memory().to(self.device, non_blocking=True)
        return words.long()

    def starts(self, epoch: int) -> Tensor:
        """Return where the windows of an epoch begin, in the order in which they come."""
        draws = torch.Generator().manual_seed(derive_seed(self.seed, "order", epoch))
        offset = torch.randint(self.length, (), generator=draws)
        if self._in_order:
            steps, columns = torch.arange(self.epoch_steps), torch.arange(self.batch)
            return offset + self.length * (steps.unsqueeze(1) + self.epoch_steps * columns).flatten()
        return offset + self.length * torch.randperm(self._windows, generator=draws)


def make_windows(
    corpus: Corpus, settings: Settings, device: torch.device | str, resident_share: float = RESIDENT_SHARE
) -> Windows:
    """Return this process's share of the training text of a corpus."""
    ranks, sizes = current_ranks(), settings.sizes
    return Windows(
        corpus.splits["train"],
        batch=sizes.batch,
        length=sizes.sequence,
        seed=settings.seed,
        in_order=settings.carry,
        device=device,
        rank=ranks.rank,
        ranks=ranks.count,
        name=f"the training text of {corpus.path}",
        resident_share=resident_share,
    )


def steps_of(corpus: Corpus, settings: Settings) -> int:
    """Return the number of steps that --steps or --epochs asks for."""
    return settings.steps or max(1, round(settings.epochs * make_windows(corpus, settings, "cpu").epoch_steps))


class WordTask:
    """The training of a model for each entry of `heads`: its name, and whether it has a Hebbian softmax.

    All models start from the same weights, and a step gives all of them the same batch, the same dropout and the same
    learning rate.
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
        """The words of a step, over all processes."""
        return self.windows.batch * self.windows.length

    @property
    def evaluate_every(self) -> int:
        """The steps between evaluations."""
        return -(-self.steps // self.settings.evaluations)

    def train_step(self) -> dict[str, Tensor]:
        if self._timed is None:
            self._timed = time.monotonic(), self.step
        words = self.windows.at(self.step)
        given, losses = self.settings, {}
        peak = given.sizes.learning_rate
        rate = learning_rate(self.step, peak=peak, schedule=given.schedule, warmup=given.warmup, steps=self.steps)
        seed = derive_seed(given.seed, "dropout", self.step, self.ranks.rank)
        first = self.step % self.windows.epoch_steps == 0
        for name, learner in self.learners.items():
            torch.manual_seed(seed)
            if first:
                learner.begin_text()
            with enough_memory("a step", ADVICE):
                losses[f"{name.log_prefix}loss"] = learner.step(words, rate)
        self.step += 1
        return losses

    def evaluate(self) -> dict[str, float]:
        """Return the perplexities on the validation text, and the speed since the last evaluation.

        If a head has begun to write by itself since then, it says so, too. The loop has read the losses before, so the
        device has no work left that the speed would miss.
        """
        given = self.settings
        metrics: dict[str, float] = {"words": self.step * self.step_words}
        if self._timed is not None:
            since, first = self._timed
            metrics["words_per_second"] = (self.step - first) * self.step_words / (time.monotonic() - since)
        for name, learner in self.learners.items():
            with enough_memory("an evaluation beside training", ADVICE):
                score, _ = measure(
                    learner.model, self.corpus, "valid", streams=given.valid_streams, first=given.valid_words
                )
            metrics |= score.as_metrics(f"{name.log_prefix}valid")
            if (began := newly_begun(learner.model.head, self.step, self.evaluate_every)) is not None:
                metrics[f"{name.log_prefix}write_began"] = began
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


class WordsProgress(Progress):
    """Live progress in words, although the loop counts steps, with the validation perplexity or, before that, the loss.

    >>> progress = WordsProgress("words", step_words=10, total=4, quiet=True)
    >>> progress.update(1, {"plain_loss": 9.13, "hebbian_loss": 9.41, "words": 10})
    >>> progress.line(5.0)
    'words: 25 %, 5/s, 0:06 left, loss 9.13 plain, 9.41 hebbian'
    >>> progress.update(2, {"plain_loss": 9.0, "valid_perplexity": 12345.6})
    >>> progress.line(None)
    'words: 50 %, perplexity 12,346'
    """

    redraw_seconds = REDRAW_SECONDS

    def __init__(self, label: str, *, step_words: int, total: int, start: int = 0, **options: Any) -> None:
        super().__init__(label, total=total * step_words, start=start * step_words, unit="words", **options)
        self.step_words = step_words

    def update(self, done: int, metrics: Mapping[str, float] | None = None) -> None:
        super().update(done * self.step_words, metrics)

    def words(self, rate: float | None) -> list[str]:
        """Return few enough words for a terminal of 80 columns: the losses are left out once there is a perplexity."""
        assert self.total is not None
        said = [f"{100 * self.done / max(1, self.total):.0f} %"]
        if rate is not None:
            said += [f"{format_rate(rate)}/s", f"{format_seconds((self.total - self.done) / rate)} left"]
        for ending, name in SHOWN.items():
            found = {
                key.removesuffix(ending).rstrip("_"): value
                for key, value in self.metrics.items()
                if key.endswith(ending)
            }
            if found:
                values = [f"{value:,.0f}" if value >= 999.5 else f"{value:.4g}" for value in found.values()]
                said += [f"{value} {whose}".rstrip() for whose, value in zip(found, values, strict=True)]
                said[-len(found)] = f"{name} {said[-len(found)]}"
                break
        return said
