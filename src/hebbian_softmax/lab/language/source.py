"""The corpora of `hebbian train` and `hebbian compare`: known by name, a folder, or made up; and their settings."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.data.corpus import MANIFEST, Corpus, corpora_root, open_corpus
from hebbian_softmax.lab.data.registry import KNOWN, load_corpus
from hebbian_softmax.lab.language.names import HEBBIAN, ONLY, PLAIN, ModelName
from hebbian_softmax.lab.language.settings import (
    FolderCompare,
    FolderSource,
    FolderTrain,
    Settings,
    TrainSettings,
    ZipfCompare,
    ZipfSource,
    ZipfTrain,
)
from hebbian_softmax.lab.language.zipf import zipf_corpus

FOLDER = "corpus"  # stands for any folder on the command line and in config.json
WHICH = "which corpus? Give the folder of a prepared corpus, such as hebbian train FOLDER"
CORPORA = {
    **{name: kind.help for name, kind in KNOWN.items()},
    "zipf": "made-up words, as many as wanted; no download",
    FOLDER: "any prepared corpus: give its folder, or its name in hebbian data list, instead",
}


def prepared_corpus(text: str) -> str | None:
    """Return the absolute path of a folder, or the name of a corpus that is already prepared; None for other texts.

    A prepared corpus takes precedence over a folder of the same name that holds no corpus, such as a folder of texts.
    """
    known = bool(text) and (corpora_root() / text / MANIFEST).exists()
    if (Path(text) / MANIFEST).exists() or (Path(text).is_dir() and not known):
        return str(Path(text).absolute())
    return text if known else None


def settings_type(verb: str, name: str) -> type[Settings]:
    """Return the type of the settings of `hebbian VERB NAME`."""
    of_train, of_compare = {"zipf": (ZipfTrain, ZipfCompare), FOLDER: (FolderTrain, FolderCompare)}.get(
        name, (TrainSettings, Settings)
    )
    return of_train if verb == "train" else of_compare


def load(name: str, settings: Settings, quiet: bool) -> Corpus:
    """Return the corpus that a name and its settings stand for, after verifying its files.

    A damaged id would otherwise be a wrong word, or an index error in the middle of training.
    """
    if isinstance(settings, ZipfSource):
        return zipf_corpus(settings.vocabulary, settings.tokens)
    if isinstance(settings, FolderSource):
        if not settings.corpus:
            raise LabError(WHICH)
        name = settings.corpus
    return open_corpus(load_corpus(name, data_root=settings.data_root, quiet=quiet).path, verify=True)


def check_corpus(state: Mapping[str, Any], corpus: Corpus) -> None:
    """Refuse a checkpoint that was trained on another corpus: its rows would belong to other words."""
    if state["corpus"] != corpus.fingerprint:
        raise LabError(
            f"the checkpoint is of a model of other words (corpus {state['corpus']}) than those of {corpus.path} "
            f"(corpus {corpus.fingerprint}): restore that corpus, or start a new run"
        )


def heads_of(settings: Settings) -> dict[ModelName, bool]:
    """Return the models of a run, and whether each of them memorises."""
    if isinstance(settings, TrainSettings):
        return {ONLY: settings.head == "hebbian"}
    return {PLAIN: False, HEBBIAN: True}
