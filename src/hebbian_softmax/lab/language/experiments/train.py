"""`hebbian train CORPUS` and `hebbian compare CORPUS`: the paper's language models (sections 4.2 to 4.4).

`train` trains one model; `compare` trains the same model with a plain and with a Hebbian softmax, from the same
weights, on the same batches with the same dropout, for the same number of steps.
"""

import argparse
import contextlib
import gc
import importlib.util
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hebbian_softmax.lab.base.console import quoted
from hebbian_softmax.lab.base.devices import choose_device
from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.base.json_files import read_json, write_json
from hebbian_softmax.lab.base.ranks import Ranks, current_ranks, joined
from hebbian_softmax.lab.base.rule import (
    DEFAULT_FADE,
    DEFAULT_START,
    LITERAL_RULE,
    SHORT,
    say_if_short,
    say_when_it_began,
    writing_began,
)
from hebbian_softmax.lab.base.runs import Run, open_run
from hebbian_softmax.lab.base.settings import as_options, from_values, given_options
from hebbian_softmax.lab.base.training import Interrupted, train
from hebbian_softmax.lab.data.corpus import Corpus
from hebbian_softmax.lab.language.evaluation import Score, Scores, as_plain, measure_all, tabulate, word_losses
from hebbian_softmax.lab.language.learner import WARM_UP, deterministic
from hebbian_softmax.lab.language.names import HEBBIAN, ONLY, PLAIN, TEXTS, ModelName
from hebbian_softmax.lab.language.report.curves import CAPTION, draw_curves
from hebbian_softmax.lab.language.settings import FINAL, Settings, TrainSettings
from hebbian_softmax.lab.language.source import CORPORA, FOLDER, WHICH, heads_of, load, settings_type
from hebbian_softmax.lab.language.task import WordsProgress, WordTask, steps_of
from hebbian_softmax.lab.report.recipe import Recipe
from hebbian_softmax.lab.report.result import Figure, Result, load_result

STEPS_FILE = "plan.json"
BOARD_FOLDER = "tensorboard"
WARM_STEPS = WARM_UP + 1  # on a GPU the last of them captures a CUDA graph
SAMPLE = 2000  # words from which the time of the final measurement is estimated
RESERVE = 0.97  # share of --max-seconds that is planned; the rest is for checkpoints
RISEN = 1.02  # a perplexity that is higher than its lowest by this factor is said to have risen


def train_and_measure(name: str, run: Run, settings: Settings, quiet: bool) -> tuple[Result, dict[str, bytes]]:
    """Train the models of a run on the corpus called `name`, measure them, and return the result and its figures."""
    began = time.monotonic()
    device = choose_device(settings.device)
    corpus = load(name, settings, quiet)
    heads = heads_of(settings)

    def make_task(steps: int) -> WordTask:
        return WordTask(corpus, settings, heads, steps=steps, device=device)

    with deterministic(settings.deterministic), board(run, settings.tensorboard) as logged:
        steps = settle_steps(run, corpus, settings, make_task, began)
        task = make_task(steps)
        keep_steps(run, steps)  # only now, when everything is known to fit together
        if any(heads.values()):
            say_if_short(settings.start, steps, quiet or not current_ranks().first)
        seconds = train_task(task, run, label=corpus.name, quiet=quiet, logged=logged)
        models = {model: learner.model for model, learner in task.learners.items()}
        scores = measure_all(models, corpus, FINAL[settings.final], run, quiet=quiet or not current_ranks().first)
    records = run.records()
    last = records[-1] if records else {}
    result = Result(
        title=f"{'A language model' if len(heads) == 1 else 'Plain and Hebbian softmax'} on {corpus.name}",
        summary=summarize(scores, task, seconds, records),
        metrics={
            "corpus": {"name": corpus.name, "fingerprint": corpus.fingerprint, "vocabulary": len(corpus.words)},
            "steps": steps,
            "words": steps * task.step_words,
            "processes": current_ranks().count,
            "seconds": seconds,
            "write_began": beginnings(task),
            "scores": as_plain(scores),
            "last_record": last or None,
        },
        tables=tabulate(scores, corpus),
        figures=[Figure("perplexity.png", CAPTION)],
        next_steps=suggest(name, settings, longer=max(3.0, 3 * SHORT / steps) if wrote_nothing(task) else 0),
        settled={**asdict(settings.sizes), **settled_lengths(settings, task)},
    )
    labels = {"this run" if head == ONLY else head.title: head for head in heads}
    return result, {"perplexity.png": draw_curves({label: [records] for label in labels}, labels)}


def settled_lengths(settings: Settings, task: WordTask) -> dict[str, str | int | float]:
    """Return in numbers or words what 0 stands for in the settings, and the epochs that the steps are."""
    words = {"max_seconds": "no limit", "clip": "no limit", "valid_words": "all"}
    zeros: dict[str, str | int | float] = {name: word for name, word in words.items() if not getattr(settings, name)}
    return zeros | {"steps": task.steps, "epochs": float(f"{task.steps / task.windows.epoch_steps:.3g}")}


def train_task(task: WordTask, run: Run, **options: Any) -> float:
    """Train as the settings of the task say, with further options of `train`; return the seconds."""
    return train(
        task,
        run,
        steps=task.steps,
        evaluate_every=task.evaluate_every,
        checkpoint_seconds=task.settings.checkpoint_seconds,
        show=partial(WordsProgress, step_words=task.step_words),
        **options,
    )


def settle_steps(
    run: Run, corpus: Corpus, settings: Settings, make_task: Callable[[int], WordTask], began: float
) -> int:
    """Return the number of steps: the one that the run folder keeps, or else the one that the settings ask for.

    Learning rates depend on this number, so it must not change when a run is resumed. With --max-seconds it follows
    from a measurement with models that are thrown away; `began` is when the time started.
    """
    ranks = current_ranks()
    if ranks.any((run.path / STEPS_FILE).exists())[0]:
        return kept_steps(run)
    if not settings.max_seconds:
        return steps_of(corpus, settings)
    speed = measure_speed(make_task(1), settings, began)
    gc.collect()  # frees these models before the real ones are made
    steps = affordable_steps(settings, speed) if ranks.first else 0
    return int(ranks.shared(str(steps)))  # each process has measured another speed


def keep_steps(run: Run, steps: int) -> None:
    """Fix the number of steps of a run."""
    if current_ranks().first:
        write_json(run.path / STEPS_FILE, {"steps": steps})


def kept_steps(run: Run) -> int:
    """Return the number of steps that was fixed for a run."""
    path = run.path / STEPS_FILE
    steps = read_json(path, "start a new run").get("steps")
    if type(steps) is not int or steps < 1:
        raise LabError(f"{path} is damaged (its number of steps is not a positive whole number): start a new run")
    return steps


@dataclass(frozen=True)
class Speed:
    """The seconds that the parts of a run take, once the device is warm."""

    step: float
    evaluation: float
    final: float
    spent: float
    """The time since the start of the run, including this measurement."""


def measure_speed(task: WordTask, settings: Settings, began: float, sample: int = SAMPLE) -> Speed:
    """Measure the speed with a task that is of no use afterwards. Reading is timed on the first `sample` words."""

    def finish() -> None:
        if task.windows.device.type == "cuda":
            torch.cuda.synchronize(task.windows.device)

    def seconds_a_word(split: str, streams: int) -> float:
        ids = task.corpus.splits[split][: sample + 1]
        since = time.monotonic()
        for learner in task.learners.values():
            word_losses(learner.model, ids, streams=min(streams, len(ids) - 1))
        return (time.monotonic() - since) / (len(ids) - 1)

    for _ in range(WARM_STEPS):
        task.train_step()
    finish()
    least = min(5.0, settings.max_seconds / 20)
    since, steps = time.monotonic(), 0
    while steps < WARM_STEPS or current_ranks().any(time.monotonic() - since < least)[0]:
        task.train_step()
        steps += 1
        if steps % 10 == 0:
            finish()  # otherwise the host could run seconds ahead of the device
    finish()
    step = (time.monotonic() - since) / steps
    # A GPU compiles kernels for each of the two ways to read a text. That time must not count for every evaluation.
    for streams in (settings.valid_streams, 1):
        seconds_a_word("valid", streams)
    since = time.monotonic()
    task.evaluate()
    evaluation = time.monotonic() - since
    final = sum(seconds_a_word(split, 1) * (len(task.corpus.splits[split]) - 1) for split in FINAL[settings.final])
    return Speed(step, evaluation, final, time.monotonic() - began)


def affordable_steps(settings: Settings, speed: Speed) -> int:
    """Return the number of steps that fit into --max-seconds beside everything else."""
    evaluations = settings.evaluations * speed.evaluation
    rest = RESERVE * settings.max_seconds - speed.spent - speed.final - evaluations
    if rest < speed.step:
        raise LabError(
            f"--max-seconds {settings.max_seconds:g} is too short: the preparation took {speed.spent:.1f} s, "
            f"a step takes {speed.step:.2g} s, {settings.evaluations} evaluations {evaluations:.1f} s, "
            f"the final measurement {speed.final:.1f} s: give more time, fewer --evaluations or --final none"
        )
    return int(rest / speed.step)


@contextlib.contextmanager
def board(run: Run, wanted: str) -> Iterator[Callable[[Mapping[str, Any]], object] | None]:
    """Yield a function that writes a record of the log for TensorBoard, or None if nothing is to be written."""
    installed = importlib.util.find_spec("tensorboard") is not None
    if wanted == "yes" and not installed:
        raise LabError("--tensorboard yes needs TensorBoard: pip install tensorboard")
    if wanted == "no" or not installed:
        yield None
        return
    writer: Any = None

    def write(record: Mapping[str, Any]) -> None:
        nonlocal writer
        if writer is None:
            from torch.utils.tensorboard import SummaryWriter

            # A resumed run writes the records after its checkpoint again, so the older ones are dropped.
            writer = SummaryWriter(str(run.path / BOARD_FOLDER), purge_step=record["step"])
        for name, value in record.items():
            if name != "step":
                writer.add_scalar(name, value, record["step"])
        writer.flush()

    try:
        yield write
    finally:
        if writer is not None:
            writer.close()


def summarize(scores: Scores, task: WordTask, seconds: float, records: Sequence[Mapping[str, Any]]) -> str:
    """Say what was seen in plain sentences, whichever side it favours."""
    words = f"{task.steps:,} steps of {task.step_words:,} words"
    epochs = task.steps / task.windows.epoch_steps
    many = f"{epochs:,.0f}" if epochs >= 10 else f"{epochs:.2g}"
    words += f", {many} {'epoch' if many == '1' else 'epochs'} of the text"
    if ONLY in scores:
        kind = "Hebbian" if task.learners[ONLY].model.memorizes else "plain"
        sentences = [f"A {kind} softmax, trained for {words}, in {seconds:.0f} s."]
        sentences += [
            f"Perplexity {each.perplexity:.2f} on the {TEXTS[split]} text." for split, each in scores[ONLY].items()
        ]
    else:
        sentences = [f"Both were trained for {words}."]
        for split, plain in scores[PLAIN].items():
            hebbian = scores[HEBBIAN][split]
            sentences.append(
                f"Perplexity on the {TEXTS[split]} text: plain softmax {plain.perplexity:.2f}, "
                f"Hebbian softmax {hebbian.perplexity:.2f}; {_rarest(plain, hebbian)}."
            )
    began = beginnings(task)
    sentences += [
        say_when_it_began(learner.model.head.start, began.get(name.key)).strip()
        for name, learner in task.learners.items()
        if learner.model.memorizes and learner.model.head.start == "auto"
    ]
    sentences += [sentence for name in scores if (sentence := overfitted(name, records))]
    if not any(scores.values()):
        last = records[-1] if records else {}
        values = {name: _shown(last.get(f"{name.log_prefix}valid_perplexity")) for name in scores}
        seen = [value if name == ONLY else f"{name.title} {value}" for name, value in values.items()]
        sentences.append(f"Validation perplexity in the last record of the log: {', '.join(seen)}.")
    return " ".join([*sentences, "This is one seed."])


def overfitted(name: ModelName, records: Sequence[Mapping[str, Any]]) -> str:
    """Say so if the validation perplexity was lower before the end; nothing if it rose by less than `RISEN`."""
    key = f"{name.log_prefix}valid_perplexity"
    known = [(each[key], each["step"]) for each in records if isinstance(each.get(key), int | float)]
    if not known or known[-1][0] < RISEN * min(known)[0]:
        return ""
    lowest, step = min(known)
    of = "" if name == ONLY else f" of {name.title}"
    return (
        f"The validation perplexity{of} was lowest after {step:,} steps, {lowest:.2f}, and has risen since: "
        "fewer epochs or more dropout would be better."
    )


def beginnings(task: WordTask) -> dict[str, int]:
    """Return after how many steps the models that waited for it began to write, by the key of their name."""
    found = {name.key: writing_began(learner.model.head) for name, learner in task.learners.items()}
    return {key: step for key, step in found.items() if step is not None}


def wrote_nothing(task: WordTask) -> bool:
    """Return whether a head has waited for features to settle until its training ended."""
    waits = [learner.model.head.start == "auto" for learner in task.learners.values() if learner.model.memorizes]
    return any(waits) and not beginnings(task)


def _shown(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, int | float) else "unknown"


def _rarest(plain: Score, hebbian: Score) -> str:
    for bucket in reversed(plain.bucket_perplexity):
        one, other = plain.bucket_perplexity[bucket], hebbian.bucket_perplexity[bucket]
        if one is not None and other is not None:
            return f"on words seen {bucket} times in training {one:,.0f} and {other:,.0f}"
    raise ValueError("no words")


def suggest(name: str, settings: Settings, longer: float = 0) -> list[str]:
    """Return commands that are worth trying next; each varies one thing of this run.

    `longer` is how many times as long a training should be where the rule has not written anything; else 0.
    """
    verb = "train" if isinstance(settings, TrainSettings) else "compare"
    variations: list[tuple[Settings, str]] = []
    if longer:
        length = next(name for name in ("max_seconds", "steps", "epochs") if getattr(settings, name))
        more = math.ceil(longer * getattr(settings, length))
        variations.append((replace(settings, **{length: more}), "longer, so that the rule may write"))
    variations += [(replace(settings, seed=(settings.seed + 1) % 2**32), "other first weights, another order")]
    if longer:
        pass  # writing while features still move does harm, and would say nothing of the rule
    elif isinstance(settings, TrainSettings) and settings.head == "plain":  # the rule's options have no effect
        variations.append((replace(settings, head="hebbian"), "the same with a Hebbian softmax"))
    else:
        literal = replace(settings, rule_scale="1", **LITERAL_RULE)
        variations.append((literal, "the paper's literal rule"))
        if settings.start == DEFAULT_START:
            variations.append(
                (replace(settings, start=0, fade=False), "memorise from the first step on, without fading")
            )
        else:
            timed = replace(settings, start=DEFAULT_START, fade=DEFAULT_FADE)
            variations.append((timed, "memorise once features have settled, then fade"))
    found = []
    for varied, remark in variations:
        options = as_options(varied)
        if "--corpus" in options:  # a text of one's own, which is named in place of an experiment
            at = options.index("--corpus")
            name = options[at + 1]
            del options[at : at + 2]
        if varied != settings:
            found.append(f"{' '.join(['hebbian', verb, *map(quoted, [name, *options])])}  # {remark}")
    return found


class WordsRecipe(Recipe):
    """A recipe that several processes can carry out together when torchrun starts them."""

    def execute(self, arguments: argparse.Namespace) -> int:
        with joined(arguments.device or "auto") as ranks:
            return super().execute(arguments) if ranks.first else self._follow(ranks)

    def perform(self, run: Run, settings: Settings, quiet: bool) -> tuple[Result, dict[str, bytes]]:
        return train_and_measure(self.name, run, settings, quiet)

    def folder_name(self, settings: Any) -> str:
        """Return the corpus's name; that of a folder is the folder's own name, even if it is a link to another one."""
        if self.name == FOLDER and not settings.corpus:
            raise LabError(WHICH)
        return Path(os.path.abspath(settings.corpus)).name or self.name if self.name == FOLDER else self.name

    def _open(self, arguments: argparse.Namespace) -> tuple[Run, Any]:
        """Open the run and tell the other processes where it is, or that there is none."""
        path = None
        try:
            given = given_options(arguments, self.settings)
            if arguments.resume is None and "steps" in given and "max_seconds" in given:
                raise LabError("--steps and --max-seconds both say how long to train: give one of them")
            run, settings = super()._open(arguments)
            path = str(run.path.absolute())
        finally:
            current_ranks().shared(json.dumps(path))
        return run, settings

    def _follow(self, ranks: Ranks) -> int:
        """Do the part of a process that writes nothing, because the first process writes the run folder."""
        path = json.loads(ranks.shared(None))
        if path is None:
            return 1
        run = open_run(Path(path))
        if load_result(run) is None:
            try:
                self.perform(run, from_values(self.settings, run.settings), True)
            except Interrupted as stop:
                return 128 + stop.signum
        return 0


WHAT = {
    "train": "Trains a language model with a Hebbian or a plain softmax on",
    "compare": "Trains the same language model twice, with a plain and with a Hebbian softmax, on",
}
RECIPES = [
    WordsRecipe(
        verb=verb,
        name=name,
        help=help,
        description=f"{what} {re.split('[;:]', help)[0]}. See docs/language-models.md.",
        settings=settings_type(verb, name),
    )
    for verb, what in WHAT.items()
    for name, help in CORPORA.items()
]
