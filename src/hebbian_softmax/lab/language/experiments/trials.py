"""Many trainings of language models, one after another.

Each trial has a run folder of `hebbian train` inside the folder of the experiment. A finished trial is stored with
everything that tables and figures need, and is never trained again. A trial that was stopped goes on from its
checkpoint. The corpus is opened once, and not at all if every trial is stored.
"""

import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hebbian_softmax.lab.base.arrays import read_arrays
from hebbian_softmax.lab.base.devices import choose_device
from hebbian_softmax.lab.base.errors import DivergedError, LabError, reason
from hebbian_softmax.lab.base.files import cannot_write
from hebbian_softmax.lab.base.json_files import from_json, to_json, write_json
from hebbian_softmax.lab.base.runs import Run, config_now, open_run
from hebbian_softmax.lab.base.settings import from_values
from hebbian_softmax.lab.data.corpus import Corpus
from hebbian_softmax.lab.language.evaluation import (
    Scores,
    as_plain,
    measure_all,
    perplexity,
    tabulate,
    words_file,
)
from hebbian_softmax.lab.language.experiments.train import train_task
from hebbian_softmax.lab.language.learner import deterministic
from hebbian_softmax.lab.language.model import LanguageModel
from hebbian_softmax.lab.language.names import ONLY
from hebbian_softmax.lab.language.settings import TrainSettings
from hebbian_softmax.lab.language.source import heads_of, load
from hebbian_softmax.lab.language.task import WordTask, steps_of
from hebbian_softmax.lab.report.result import Result, load_result, save_result

FOLDER = "trials"
OF_THE_RULE = ("limit", "gamma", "rate", "objective", "rule_scale", "write", "start", "fade")
"""The settings of a training that a plain softmax does without."""
SPLITS = {"tuning": (), "final": ("valid", "test")}
"""The texts on which a trained model is measured. Tuning goes by the validation perplexity in the log alone."""

WordSets = Mapping[str, Tensor]
"""Sets of words by name: for each word of the vocabulary, whether it belongs to the set (bool)."""
Measure = Callable[[LanguageModel, Corpus, Path, bool], Mapping[str, Mapping[str, Any]]]
"""Measures a trained model with additions such as memories. Returns, by the name of each addition, the perplexity of
each split and what else is worth keeping. The arguments after the corpus are the trial's folder, where it may keep
files, and whether to be quiet."""


@dataclass(frozen=True)
class Trial:
    """One training. `part` is tuning or final; trials with the same part and title share a row of a table."""

    part: str
    short: str
    title: str
    settings: TrainSettings

    @property
    def name(self) -> str:
        """The name of the trial's folder."""
        return f"{self.part}-{self.short}-seed{self.settings.seed}"


@dataclass(frozen=True)
class Outcome:
    """Everything that is kept about a finished trial, as result.json stores it."""

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

    def __post_init__(self) -> None:
        """Refuse values of other types, since outcomes are also read from files."""
        mappings = (self.settings, self.corpus, self.scores, self.sets, self.more, *self.curve)
        inside = [each for values in (self.scores, self.sets, self.more) for each in dict(values).values()]
        if not all(isinstance(value, Mapping) for value in (*mappings, *inside)):
            raise TypeError("its settings, scores or records are of another type")
        if not all(isinstance(value, int | float) for value in (self.steps, self.words, self.seconds)):
            raise TypeError("its steps, words or seconds are not numbers")

    @property
    def valid(self) -> float:
        """The validation perplexity at the last evaluation, by which settings are chosen."""
        last = self.curve[-1].get("valid_perplexity") if self.curve and not self.diverged else None
        return math.inf if last is None else float(last)


@dataclass
class Bench:
    """Performs trials in the folder of `run`, on the corpus that `hebbian train` calls `name`."""

    run: Run
    name: str
    device: str
    deadline: float | None = None
    quiet: bool = False
    sets: Callable[[Corpus], WordSets] = field(default=lambda corpus: {})
    measures: Sequence[Measure] = ()
    hint: str = ""
    """Advice that is added to the error when the corpus is missing."""
    outcomes: list[Outcome] = field(default_factory=list)
    """The outcomes of all trials so far, in the order in which they were asked for."""
    _opened: tuple[Corpus, WordSets] | None = None

    def do(self, trials: Sequence[Trial]) -> list[Outcome]:
        """Return the outcomes of all trials; train those that are not stored yet.

        Raises OutOfTimeError when the deadline passes during a training; that trial can go on later.
        """
        found = []
        for number, trial in enumerate(trials, start=1):
            outcome = self._stored(trial) or self._new(trial, f"{trial.name}, {number} of {len(trials)}")
            if self.outcomes and self.outcomes[0].corpus["fingerprint"] != outcome.corpus["fingerprint"]:
                raise LabError(
                    f"{self._folder(trial)} was trained on other words than {self._folder(self.outcomes[0])}: "
                    "restore the corpus and delete that folder, or start a new run"
                )
            found.append(outcome)
            self.outcomes.append(outcome)
        return found

    def _folder(self, trial: Trial | Outcome) -> Path:
        return self.run.path / FOLDER / trial.name

    def _stored(self, trial: Trial) -> Outcome | None:
        """Return the outcome of a finished trial, or None if the trial is not finished."""
        folder = self._folder(trial)
        if not (folder / "result.json").exists():
            return None
        run = open_run(folder)
        result = load_result(run)
        assert result is not None
        try:
            outcome = Outcome(**result.metrics["trial"])
            if not same_settings(outcome.settings, trial.settings) or outcome.title != trial.title:
                raise ValueError("it belongs to a trial with other settings")
        except (KeyError, TypeError, ValueError) as error:
            raise LabError(f"{folder} cannot be used ({reason(error)}): delete it to repeat that trial") from error
        self._drop_checkpoint(trial, run)  # The process may have ended just before it could.
        return outcome

    def _new(self, trial: Trial, label: str) -> Outcome:
        """Train, measure and store a trial."""
        settings, device = trial.settings, choose_device(self.device)
        corpus, sets = self._corpus(settings)
        steps = steps_of(corpus, settings)
        with deterministic(settings.deterministic):
            task = WordTask(corpus, settings, heads_of(settings), steps=steps, device=device)
            run = self._open(trial)
            with run.held():
                began, diverged = time.monotonic(), False
                try:
                    seconds = train_task(task, run, deadline=self.deadline, label=label, quiet=self.quiet)
                except DivergedError:  # The numbers of the training became infinite or nan.
                    seconds, diverged = time.monotonic() - began, True
                described = {"name": corpus.name, "fingerprint": corpus.fingerprint, "vocabulary": len(corpus.words)}
                outcome = Outcome(
                    name=trial.name,
                    part=trial.part,
                    title=trial.title,
                    settings=asdict(settings),
                    corpus={**described, "settings": dict(corpus.settings)},
                    steps=steps,
                    words=steps * task.step_words,
                    seconds=round(seconds, 3),
                    device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
                    diverged=diverged,
                    curve=run.records(),
                )
                outcome = self._measure_and_store(trial, outcome, task, run, sets)
        self._drop_checkpoint(trial, run)
        del task
        gc.collect()  # The memory of this model must be free before the next model needs its own.
        if device.type == "cuda":
            torch.cuda.empty_cache()
        return outcome

    def _measure_and_store(self, trial: Trial, outcome: Outcome, task: WordTask, run: Run, sets: WordSets) -> Outcome:
        """Measure the model on the texts that this part of the trials may see, and write the trial's result.json."""
        corpus, model = task.corpus, task.learners[ONLY].model
        splits = () if outcome.diverged else SPLITS[trial.part]
        scores: Scores = {ONLY: {}}
        more: dict[str, Mapping[str, Any]] = {}
        kept: dict[str, dict[str, dict[str, Any]]] = {}
        try:
            scores = measure_all({ONLY: model}, corpus, splits, run, quiet=self.quiet)
            for measure in self.measures if splits else ():
                more |= measure(model, corpus, run.path, self.quiet)
            kept = {split: score_sets(run.path / words_file(ONLY, split), sets) for split in splits if sets}
        except DivergedError:
            scores, more, outcome = {ONLY: {}}, {}, replace(outcome, diverged=True)
        outcome = replace(outcome, scores=as_plain(scores)[ONLY.key], sets=kept, more=more)
        summary = f"{trial.title}: {outcome.steps:,} steps of the trial {trial.name}."
        summary += " Its numbers became infinite or nan." if outcome.diverged else ""
        metrics = {"scores": as_plain(scores), "trial": asdict(outcome)}
        save_result(run, Result(trial.title, summary, metrics, tabulate(scores, corpus), [], []), {})
        return Outcome(**from_json(to_json(metrics["trial"])))  # A resumed run reads the same values from the file.

    def _corpus(self, settings: TrainSettings) -> tuple[Corpus, WordSets]:
        if self._opened is None:
            try:
                corpus = load(self.name, settings, self.quiet)
            except LabError as error:
                raise LabError(f"{error}{self.hint}") from error
            self._opened = corpus, self.sets(corpus)  # A corpus without the needed sets is refused before training.
        return self._opened

    def _open(self, trial: Trial) -> Run:
        """Return the run folder of a trial, a new one or one that was begun before."""
        folder = self._folder(trial)
        config = config_now(f"train {self.name}", asdict(trial.settings))
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise cannot_write(folder, error) from error
        if not (folder / "config.json").exists():
            write_json(folder / "config.json", config)
        run = open_run(folder)
        if not same_settings(run.settings, trial.settings):
            raise LabError(f"{folder} belongs to a trial with other settings: delete it to repeat that trial")
        return run

    def _drop_checkpoint(self, trial: Trial, run: Run) -> None:
        """Delete the weights of a tuning trial: there are many, and nobody needs them. Final models are kept."""
        if trial.part == "tuning":
            run.drop_checkpoints()


def score_sets(path: Path, sets: WordSets) -> dict[str, dict[str, Any]]:
    """Return how many words of each set were predicted, and their perplexity, from the stored losses of all words."""
    words = read_arrays(path)  # written a moment ago
    losses, ids = torch.from_numpy(words["nll"]).double(), torch.from_numpy(words["ids"]).long()
    found = {}
    for name, members in sets.items():
        chosen = losses[members[ids]]
        found[name] = {"words": len(chosen), "perplexity": perplexity(chosen.mean().item()) if len(chosen) else None}
    return found


def same_settings(stored: Mapping[str, Any], settings: TrainSettings) -> bool:
    """Return whether stored settings have the same meaning, also where an older version wrote them differently.

    The settings of the rule mean nothing to a plain softmax, and older versions had other defaults for them.
    """
    try:
        found: TrainSettings = from_values(type(settings), stored)
    except ValueError:
        return False
    if found.head == "plain":
        found = replace(found, **{name: getattr(settings, name) for name in OF_THE_RULE})
    return found == settings
