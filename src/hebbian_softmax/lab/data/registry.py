"""The corpora that can be prepared.

A new corpus is a module that declares a `CorpusKind` and one line here. The commands `hebbian data prepare`,
`hebbian train` and the others take its name, help and options from that declaration.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.data import dated, gigaword, gutenberg, stdlib, texts, wikitext
from hebbian_softmax.lab.data.corpus import MANIFEST, Corpus, corpora_root, open_corpus, prepared
from hebbian_softmax.lab.data.prepare import CorpusKind, prepare

_ALL: tuple[CorpusKind[Any], ...] = (
    wikitext.WIKITEXT_2,
    wikitext.WIKITEXT_103,
    gutenberg.GUTENBERG,
    gigaword.GIGAWORD,
    dated.REUTERS,
    stdlib.STDLIB,
    texts.TEXTS,
    dated.DATED,
)
CORPORA: Mapping[str, CorpusKind[Any]] = {kind.name: kind for kind in _ALL}
"""Every corpus by its name, in the order in which help texts list them."""
KNOWN: Mapping[str, CorpusKind[Any]] = {name: kind for name, kind in CORPORA.items() if not kind.needs_options}
"""The corpora for which the name alone is enough: `hebbian train NAME` prepares them when they are missing."""


def load_corpus(name_or_folder: str, *, data_root: str = "", quiet: bool = False) -> Corpus:
    """Open a corpus by its name or its folder; one of `KNOWN` that is not prepared yet is prepared first."""
    if name_or_folder in KNOWN:
        # A prepared corpus is used as it is, even if its sources have changed: a run that is resumed must find the
        # corpus that it began with.
        return prepare(KNOWN[name_or_folder].usual(), data_root=data_root, quiet=quiet, renew=False)[0]
    for folder in (corpora_root() / name_or_folder, Path(name_or_folder)):
        if (folder / MANIFEST).exists():
            return open_corpus(folder)
    if Path(name_or_folder).is_dir():
        return open_corpus(Path(name_or_folder))
    raise no_corpus(name_or_folder)


def no_corpus(text: str) -> LabError:
    """Return the error for a text that neither names a corpus nor is the folder of one."""
    names = ", ".join(dict.fromkeys([*KNOWN, *(path.name for path in prepared())]))
    return LabError(f"{text!r} is no corpus: name one of {names}, or the folder of a prepared one")
