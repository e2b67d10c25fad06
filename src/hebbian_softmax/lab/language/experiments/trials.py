"""Many trainings of language models, one after another; each is a run folder of `hebbian train` inside the recipe's.

A finished trial is kept with all that tables and figures need, and is never made again. A trial that was stopped goes
on from its checkpoint. The corpus is opened once, and not at all where every trial is stored.
"""

import gc
import json
import math
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hebbian_softmax.lab.base.devices import choose_device
from hebbian_softmax.lab.base.errors import LabError, OutOfTimeError, reason
from hebbian_softmax.lab.base.files import cannot_write, write_atomic
from hebbian_softmax.lab.base.runs import Run, config_now, open_run, to_json
from hebbian_softmax.lab.base.settings import from_values
from hebbian_softmax.lab.base.training import Interrupted, first_nonfinite, train
from hebbian_softmax.lab.data.corpus import Corpus
from hebbian_softmax.lab.language.evaluation import as_plain, measure_all, perplexity, tabulate, words_file
from hebbian_softmax.lab.language.learner import deterministic
from hebbian_softmax.lab.language.model import LanguageModel
from hebbian_softmax.lab.language.names import ONLY
from hebbian_softmax.lab.language.settings import TrainSettings
from hebbian_softmax.lab.language.source import heads_of, load
from hebbian_softmax.lab.language.task import WordsProgress, WordTask, make_windows
from hebbian_softmax.lab.report.result import Result, load_result, save_result

FOLDER = "trials"
SPLITS = {"tuning": (), "final": ("valid", "test")}
"""What the end of a trial is measured on. Tuning goes by the validation perplexity of the log, and not by the test."""

WordSets = Mapping[str, Tensor]
"""By name, for each word of the vocabulary whether it belongs to the set (bool)."""
Measure = Callable[[LanguageModel, Corpus, Path, bool], Mapping[str, Mapping[str, Any]]]
"""Measures a trained model together with something else: by name the perplexity of each split, and what else is to be
known of it. It is given the trial's folder, to keep things in, and whether to be quiet."""


@dataclass(frozen=True)
class Trial:
    """One training. `part` is tuning or final; trials with the same part and title are one row of a table."""

    part: str
    short: str
    title: str
    settings: TrainSettings

    @property
    def name(self) -> str:
        """Its folder's."""
        return f"{self.part}-{self.short}-seed{self.settings.seed}"


@dataclass(frozen=True)
class Outcome:
    """What is known of a finished trial, as result.json has it."""

    name: str
    part: str
    title: str
    settings: Mapping[str, Any]
    corpus: Mapping[str, Any]
    steps: int
    words: int
    seconds: float
    device: str
    diverged: bool
    curve: Sequence[Mapping[str, Any]]
    scores: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    sets: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)
    more: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def valid(self) -> float:
        """The validation perplexity of the last evaluation: what is tuned by."""
        last = self.curve[-1].get("valid_perplexity") if self.curve and not self.diverged else None
        return math.inf if last is None else float(last)


@dataclass
class Bench:
    """Carries trials out in the folder of `run`, on the corpus that `name` and a trial's settings stand for."""

    run: Run
    name: str
    device: str
    deadline: float | None = None
    quiet: bool = False
    sets: Callable[[Corpus], WordSets] = field(default=lambda corpus: {})
    more: Sequence[Measure] = ()
    hint: str = ""
    """What to do where the corpus is missing."""
    outcomes: list[Outcome] = field(default_factory=list)
    """Of all trials so far, in the order they were asked for."""
    _opened: tuple[Corpus, WordSets] | None = None

    def do(self, trials: Sequence[Trial]) -> list[Outcome]:
        """The outcomes of all trials: those stored, and the others after carrying them out."""
        found = []
        for number, trial in enumerate(trials, start=1):
            outcome = self._stored(trial) or self._carry_out(trial, f"{trial.name}, {number} of {len(trials)}")
            if self.outcomes and self.outcomes[0].corpus["fingerprint"] != outcome.corpus["fingerprint"]:
                raise LabError(
                    f"{self._folder(trial)} is of other words than {self._folder(self.outcomes[0])}: "
                    "put the corpus back as it was and delete that folder, or start a new run"
                )
            found.append(outcome)
            self.outcomes.append(outcome)
        return found

    def _folder(self, trial: Trial | Outcome) -> Path:
        return self.run.path / FOLDER / trial.name

    def _stored(self, trial: Trial) -> Outcome | None:
        folder = self._folder(trial)
        if not (folder / "result.json").exists():
            return None
        result = load_result(open_run(folder))
        assert result is not None
        try:
            outcome = Outcome(**result.metrics["trial"])
            if outcome.settings != as_stored(trial.settings) or outcome.title != trial.title:
                raise ValueError("it is of a trial with other settings")
        except (KeyError, TypeError, ValueError) as error:
            raise LabError(f"{folder} cannot be used ({reason(error)}): delete it to make that trial again") from error
        self._drop_checkpoint(trial)  # in case the process ended just before it could
        return outcome

    def _carry_out(self, trial: Trial, label: str) -> Outcome:
        settings, device = trial.settings, choose_device(self.device)
        corpus, sets = self._corpus(settings)
        steps = settings.steps or max(1, round(settings.epochs * make_windows(corpus, settings, "cpu").epoch_steps))
        with deterministic(settings.deterministic):
            task = WatchedTask(corpus, settings, heads_of(settings), steps=steps, device=device, deadline=self.deadline)
            run = self._open(trial)
            with run.held():
                seconds, diverged = self._train(task, run, label)
                outcome = Outcome(
                    name=trial.name,
                    part=trial.part,
                    title=trial.title,
                    settings=as_stored(settings),
                    corpus={
                        "name": corpus.name,
                        "fingerprint": corpus.fingerprint,
                        "vocabulary": len(corpus.words),
                        "settings": dict(corpus.settings),
                    },
                    steps=steps,
                    words=steps * task.step_words,
                    seconds=round(seconds, 3),
                    device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
                    diverged=diverged,
                    curve=run.records(),
                )
                outcome = self._measure_and_keep(trial, outcome, task, run, sets)
        self._drop_checkpoint(trial)
        del task
        gc.collect()  # this model goes before the next one comes
        if device.type == "cuda":
            torch.cuda.empty_cache()
        return outcome

    def _train(self, task: "WatchedTask", run: Run, label: str) -> tuple[float, bool]:
        """The seconds it took, and whether it came to numbers that are not finite: an outcome as any other."""
        settings = task.settings
        began = time.monotonic()
        try:
            seconds = train(
                task,
                run,
                steps=task.steps,
                evaluate_every=-(-task.steps // settings.evaluations),
                checkpoint_seconds=settings.checkpoint_seconds,
                label=label,
                quiet=self.quiet,
                show=partial(WordsProgress, step_words=task.step_words),
            )
        except Interrupted as stop:
            if task.late:
                raise OutOfTimeError from stop
            raise
        except LabError:
            if task.finite():
                raise
            return time.monotonic() - began, True
        return seconds, False

    def _measure_and_keep(self, trial: Trial, outcome: Outcome, task: WordTask, run: Run, sets: WordSets) -> Outcome:
        """Measure on what this part of trials may see, and write the trial's result.json."""
        corpus, model = task.corpus, task.learners[ONLY].model
        splits = () if outcome.diverged else SPLITS[trial.part]
        scores = measure_all({ONLY: model}, corpus, splits, run, quiet=self.quiet)
        more: dict[str, Mapping[str, Any]] = {}
        for measure in self.more if splits else ():
            more |= measure(model, corpus, run.path, self.quiet)
        kept = {split: of_sets(run.path / words_file(ONLY, split), sets) for split in splits if sets}
        outcome = replace(outcome, scores=as_plain(scores)["model"], sets=kept, more=more)
        summary = f"{trial.title}: {outcome.steps:,} steps of a recipe's trial {trial.name}."
        summary += " Its numbers ceased to be finite." if outcome.diverged else ""
        record = asdict(outcome)
        metrics = {"scores": as_plain(scores), "trial": record}
        save_result(run, Result(trial.title, summary, metrics, tabulate(scores, corpus), [], []), {})
        return Outcome(**json.loads(to_json(record)))  # as it will be read, when a run is resumed

    def _corpus(self, settings: TrainSettings) -> tuple[Corpus, WordSets]:
        if self._opened is None:
            try:
                corpus = load(self.name, settings, self.quiet)
            except LabError as error:
                raise LabError(f"{error}{self.hint}") from error
            self._opened = corpus, self.sets(corpus)  # now: what a corpus lacks is told before hours of work
        return self._opened

    def _open(self, trial: Trial) -> Run:
        """The run folder of a trial, new or begun before."""
        folder = self._folder(trial)
        config = config_now(f"train {self.name}", asdict(trial.settings))
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise cannot_write(folder, error) from error
        if not (folder / "config.json").exists():
            write_atomic(folder / "config.json", (to_json(config, indent=2) + "\n").encode())
        run = open_run(folder)
        if from_values(type(trial.settings), run.settings) != trial.settings:
            raise LabError(f"{folder} is of a trial with other settings: delete it to make that trial again")
        return run

    def _drop_checkpoint(self, trial: Trial) -> None:
        """Nobody asks for the weights of the tuning, and there are many. Final models are kept."""
        if trial.part == "tuning":
            (self._folder(trial) / "checkpoint.pt").unlink(missing_ok=True)


class WatchedTask(WordTask):
    """Stops the loop in an orderly way when the time is up, and knows whether its numbers are still finite."""

    def __init__(self, *arguments: Any, deadline: float | None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.deadline, self.late = deadline, False
        self._losses: dict[str, Tensor] = {}

    def train_step(self) -> dict[str, Tensor]:
        self._losses = super().train_step()
        over = self.deadline is not None and time.monotonic() > self.deadline and self.step < self.steps
        if over and not self.late and threading.current_thread() is threading.main_thread():
            self.late = True
            signal.raise_signal(signal.SIGTERM)  # which the loop takes as a wish to save and stop
        return self._losses

    def finite(self) -> bool:
        return first_nonfinite([self._losses, self.learners[ONLY].model.state_dict()]) is None


def of_sets(path: Path, sets: WordSets) -> dict[str, dict[str, Any]]:
    """Predictions and perplexity of the words of each set, from the losses kept of every word."""
    import numpy as np

    with np.load(path) as words:
        losses, ids = torch.from_numpy(words["nll"]).double(), torch.from_numpy(words["ids"]).long()
    found = {}
    for name, members in sets.items():
        chosen = losses[members[ids]]
        found[name] = {
            "words": len(chosen),
            "perplexity": perplexity(chosen.mean().item()) if len(chosen) else None,
        }
    return found


def as_stored(settings: TrainSettings) -> dict[str, Any]:
    """As JSON gives them back."""
    stored: dict[str, Any] = json.loads(to_json(asdict(settings)))
    return stored
