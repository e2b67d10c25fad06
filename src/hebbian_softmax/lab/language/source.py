"""Where words come from: the corpora by name, a folder, or made up; and which settings and models belong to them."""

from pathlib import Path

from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.data.corpus import MANIFEST, Corpus, corpora_root, load_corpus, open_corpus
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

FOLDER = "corpus"  # the name that stands for any folder
CORPORA = {
    "wikitext-2": "2 million words of Wikipedia",
    "wikitext-103": "100 million words of Wikipedia: the paper's",
    "gutenberg": "novels of Project Gutenberg: the paper's validation and test books",
    "gigaword": "news of ten years: the paper's, licensed",
    "reuters": "news of 1987 in the order of time",
    "stdlib": "the Python standard library's source; no download",
    "zipf": "made-up words, as many as wanted; no download",
    FOLDER: "any prepared corpus: give its folder, or its name in hebbian data list, instead",
}


def prepared_corpus(text: str) -> str | None:
    """The whole path of a folder, or the name of a corpus that is prepared already; None for any other text.

    A folder that is no corpus, as one of texts, does not stand before a prepared corpus of the same name.
    """
    known = bool(text) and (corpora_root() / text / MANIFEST).exists()
    if (Path(text) / MANIFEST).exists() or (Path(text).is_dir() and not known):
        return str(Path(text).absolute())
    return text if known else None


def settings_type(verb: str, name: str) -> type[Settings]:
    """The settings of `hebbian VERB NAME`."""
    of_train, of_compare = {"zipf": (ZipfTrain, ZipfCompare), FOLDER: (FolderTrain, FolderCompare)}.get(
        name, (TrainSettings, Settings)
    )
    return of_train if verb == "train" else of_compare


def load(name: str, settings: Settings, quiet: bool) -> Corpus:
    """The corpus that a name and its settings stand for, every byte as it was prepared.

    A damaged id would be a wrong word or an index error in the middle of a training.
    """
    if isinstance(settings, ZipfSource):
        return zipf_corpus(settings.vocabulary, settings.tokens)
    if isinstance(settings, FolderSource):
        if not settings.corpus:
            raise LabError("which corpus? Give the folder of a prepared one, as in: hebbian train FOLDER")
        name = settings.corpus
    return open_corpus(load_corpus(name, data_root=settings.data_root, quiet=quiet).path, verify=True)


def heads_of(settings: Settings) -> dict[ModelName, bool]:
    """Return the models of a run, and whether each of them memorises."""
    if isinstance(settings, TrainSettings):
        return {ONLY: settings.head == "hebbian"}
    return {PLAIN: False, HEBBIAN: True}
