"""The trained models of a run, finished or not, from its last checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hebbian_softmax.lab.base.errors import LabError, reason
from hebbian_softmax.lab.base.runs import Run
from hebbian_softmax.lab.base.settings import from_values
from hebbian_softmax.lab.data.corpus import Corpus
from hebbian_softmax.lab.language.learner import make_model
from hebbian_softmax.lab.language.model import LanguageModel
from hebbian_softmax.lab.language.names import ModelName
from hebbian_softmax.lab.language.settings import Settings
from hebbian_softmax.lab.language.source import CORPORA, check_corpus, heads_of, load, settings_type

TRIALS = "trials/final-*"
"""The run folders of the models that a recipe of many trainings keeps, inside its own run folder."""


@dataclass(frozen=True)
class Trained:
    """The models of a run, with the settings and the corpus that they were trained with."""

    run: Run
    settings: Settings
    corpus: Corpus
    models: Mapping[ModelName, LanguageModel]
    step: int


def load_trained(run: Run, *, device: torch.device, quiet: bool = False) -> Trained:
    """Read the checkpoint of a run of `hebbian train` or `hebbian compare` on a corpus."""
    verb, _, name = run.command.partition(" ")
    if finals := sorted(run.path.glob(TRIALS)):
        raise LabError(f"{run.path} holds a run for each of its models: name one of them, such as {finals[0]}")
    if verb not in ("train", "compare") or name not in CORPORA:
        raise LabError(f"{run.path} is a run of 'hebbian {run.command}', which has no language model")
    try:
        settings: Settings = from_values(settings_type(verb, name), run.settings)
    except ValueError as error:
        raise LabError(
            f"{run.path} was started by another version of hebbian-softmax ({error}): use that version"
        ) from error
    checkpoint = run.load_checkpoint()
    if checkpoint is None and (run.path / "result.json").exists():
        raise LabError(
            f"{run.path} is finished and has no weights (a tuning deletes those of its trials): name another run"
        )
    if checkpoint is None:
        raise LabError(f"{run.path} has no checkpoint yet: resume it until it has one")
    corpus = load(name, settings, quiet)
    models = {}
    try:
        check_corpus(checkpoint["task"], corpus)
        for model_name, hebbian in heads_of(settings).items():
            model = make_model(settings, len(corpus.words), hebbian=hebbian, device=device)
            model.load_state_dict(checkpoint["task"]["learners"][model_name.log_prefix]["model"])
            models[model_name] = model.eval()
        return Trained(run, settings, corpus, models, int(checkpoint["step"]))
    except LabError as error:
        raise LabError(f"{run.path} cannot be measured: {error}") from error
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise LabError(
            f"the checkpoint of {run.path} is not of the settings in its config.json ({reason(error)}): "
            "restore the config.json that it was trained with, or train a new model"
        ) from error
