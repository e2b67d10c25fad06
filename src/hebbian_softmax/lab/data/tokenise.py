"""NLTK's sentences and words as the paper's script takes them (appendix, "Data pre-processing"), several times faster.

The script calls `nltk.sent_tokenize` on a text and `nltk.word_tokenize` on each sentence, which looks for sentences in
that sentence again. Two observations give the same tokens with less work:

- Whether a full stop ends a sentence depends only on the words around it, and the same words occur again and again.
- A string between two spaces is split the same way everywhere except at the two ends of a sentence: each pattern of the
  word tokenizer that looks beyond a space asks only whether there is a space, or whether the sentence begins or ends
  there. The end of a sentence may be followed by closing quotes and brackets, with spaces between them.

So NLTK is asked each question of either kind once, and its answers are remembered. The tests compare the tokens with
NLTK's own on whole texts.
"""

import re
import string
import zipfile
import zlib
from collections.abc import Iterable
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from hebbian_softmax.lab.base.errors import LabError, reason
from hebbian_softmax.lab.base.extras import require
from hebbian_softmax.lab.data.corpus import EOS
from hebbian_softmax.lab.data.download import check_download, download

PUNKT = "tokenizers/punkt_tab"  # NLTK's sentence model, in NLTK's data folder
PUNKT_ADDRESS = "https://raw.githubusercontent.com/nltk/nltk_data/gh-pages/packages/tokenizers/punkt_tab.zip"
CLOSERS = "])}>\"'»”’ "  # characters that may stand between the full stop and the end of a sentence
REMEMBERED = 1_000_000  # answers of each kind that a process keeps; then it forgets all, so that memory is bounded
TOGETHER = 2_000  # pieces tokenised in one call of NLTK
MARK = "\uf8ff"  # stands between these pieces: a private-use character, which few texts have

# What NLTK raises if its model is missing or damaged, in an archive or not.
_DAMAGES = (LookupError, OSError, ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error)

# A piece is a string without spaces. One of these prefixes tells that the piece is at an end of a sentence and not
# between two spaces. Texts cannot contain the prefixes: their line breaks are replaced by spaces first.
FIRST, LAST, ONLY, END = "\nF", "\nL", "\nO", "\nE"

# At the beginning of a sentence, NLTK reads some quotes differently from after a space, unless a letter follows.
_UNLIKE_INNER = re.compile(r"(?:'|\"(?![A-Za-z]))")
# Letters, the end of a sentence and at most one closing sign: each of the three is a token.
_PLAIN_LAST = re.compile(r"([A-Za-z]+)([.?!][\"'”’)]?)")


def find_punkt(data_root: Path, quiet: bool = False) -> str:
    """Make NLTK find its English sentence model: in NLTK_DATA, in `nltk_data` under the data root, or downloaded.

    Return the version of NLTK for the manifest: another version may give other tokens.
    """
    require("nltk")
    import nltk

    folder = data_root / "nltk_data"
    if str(folder) not in nltk.data.path:
        nltk.data.path.append(str(folder))
    archive = folder / f"{PUNKT}.zip"  # NLTK reads the archive without unpacking
    if archive.exists():
        check_download(archive)
    if not _has_model():
        download(PUNKT_ADDRESS, archive, quiet=quiet)
        if not _has_model():
            raise LabError(
                f"{archive} does not hold NLTK's English sentence model: delete it and it will be downloaded again, or "
                "name a folder that has the model with NLTK_DATA"
            )
    return str(nltk.__version__)


def _has_model() -> bool:
    import nltk

    try:
        nltk.data.find(f"{PUNKT}/english/")
    except _DAMAGES:
        return False
    return True


class Tokeniser:
    """Turns English text into lower-case tokens with `<eos>` after each sentence. Call `find_punkt` first.

    "Mr. Holmes can't come. He's ill." becomes `mr. holmes ca n't come . <eos> he 's ill . <eos>`.
    """

    def __init__(self, remembered: int = REMEMBERED, together: int = TOGETHER) -> None:
        """Keep at most about `remembered` answers of NLTK, and ask for `together` of them in one call."""
        from nltk.tokenize import NLTKWordTokenizer

        self._remembered, self._together = remembered, together
        self._punkt = _punkt()
        self._may_end = _untimed(self._punkt._lang_vars.period_context_re()).search
        self._split = NLTKWordTokenizer().tokenize
        self._known: dict[str, tuple[str, ...]] = {}

    def tokens(self, text: str) -> list[str]:
        """Return the tokens of all sentences of a text."""
        return self.tokens_of_each([[text]])[0]

    def tokens_of_each(self, documents: Iterable[Iterable[str]]) -> list[list[str]]:
        """Return the tokens of each document, which is a list of texts. Many documents in one call are faster."""
        cut = [[piece for text in texts for piece in self._pieces(text)] for texts in documents]
        self._learn(set(chain.from_iterable(cut)))
        return [list(chain.from_iterable(map(self._known.__getitem__, pieces))) for pieces in cut]

    def _pieces(self, text: str) -> list[str]:
        pieces: list[str] = []
        for sentence in self._punkt.sentences_from_text(text.replace("\r", " ").replace("\n", " ")):
            # `word_tokenize` looks for sentences in the sentence again.
            again = self._punkt.sentences_from_text(sentence) if self._may_end(sentence) else [sentence.rstrip()]
            for part in again:
                _add_pieces(part, pieces)
            pieces.append(END)
        return pieces

    def _learn(self, pieces: set[str]) -> None:
        """Put the tokens of these pieces into `_known`."""
        if len(self._known) > self._remembered:
            self._known = {}
        if len(self._punkt.decisions) > self._remembered:
            self._punkt.decisions.clear()
        missing = {piece for piece in pieces if piece not in self._known}
        inner = [piece for piece in missing if not piece.startswith("\n") and MARK not in piece]
        for start in range(0, len(inner), self._together):
            # One call splits many pieces. Each of them is between two spaces here, as it is in its sentence.
            group = inner[start : start + self._together]
            tokens = iter(self._split(f"{MARK} " + "".join(f"{piece} {MARK} " for piece in group)))
            next(tokens)
            self._known.update((piece, _lower(iter(tokens.__next__, MARK))) for piece in group)
        for piece in missing.difference(inner):
            self._known[piece] = self._alone(piece)

    def _alone(self, piece: str) -> tuple[str, ...]:
        kind, text = (piece[:2], piece[2:]) if piece.startswith("\n") else ("", piece)
        if kind == END:
            return tuple("''" if sign == '"' else sign for sign in text) if text else (EOS,)
        before, after = kind not in (FIRST, ONLY), kind not in (LAST, ONLY)
        tokens = self._split("x " * before + text + " x" * after)
        return _lower(tokens[int(before) : len(tokens) - int(after)])


@cache
def tokeniser() -> Tokeniser:
    """Return the tokeniser of this process: answers remembered from one text are useful for the next."""
    return Tokeniser()


def _add_pieces(sentence: str, pieces: list[str]) -> None:
    """Cut a sentence at its spaces and append the pieces, whose tokens do not depend on each other."""
    end = sentence.rstrip(CLOSERS).rfind(" ")  # the last piece begins here and includes all closing characters
    if end < 0:
        pieces.append(ONLY + sentence)
        return
    start = len(pieces)
    pieces += sentence[:end].split(" ")
    if _UNLIKE_INNER.match(pieces[start]):
        pieces[start] = FIRST + pieces[start]
    last = sentence[end + 1 :]
    if match := _PLAIN_LAST.fullmatch(last):
        pieces += (match[1], END + match[2])
    else:
        pieces.append(LAST + last)


def _lower(tokens: Iterable[str]) -> tuple[str, ...]:
    return tuple(token.lower() for token in tokens)


def _punkt() -> Any:
    from nltk.tokenize.punkt import PunktTokenizer

    class RememberingPunkt(PunktTokenizer):
        """NLTK's sentence tokenizer, which decides about each context of a full stop only once."""

        def __init__(self) -> None:
            super().__init__("english")
            self.decisions: dict[str, bool] = {}
            # NLTK limits a search to five seconds, including the caller's work between matches; a book takes longer.
            self._lang_vars._re_period_context = _untimed(self._lang_vars.period_context_re())

        def text_contains_sentbreak(self, text: str) -> bool:
            if (found := self.decisions.get(text)) is None:
                self.decisions[text] = found = super().text_contains_sentbreak(text)
            return found

        def _get_last_whitespace_index(self, text: str) -> int:
            return max(0, *(text.rfind(character) for character in string.whitespace))

    try:
        return RememberingPunkt()
    except _DAMAGES as error:
        raise LabError(
            f"NLTK cannot load its English sentence model{_place()} ({reason(error)}): replace it by "
            "python -m nltk.downloader punkt_tab, or name the folder that has it with NLTK_DATA"
        ) from error


def _place() -> str:
    """Return where NLTK finds its model, as part of a sentence."""
    import nltk

    try:
        found = nltk.data.find(f"{PUNKT}/english/")
    except _DAMAGES:
        return ""
    return f" in {found.zipfile.filename if hasattr(found, 'zipfile') else found}"


def _untimed(pattern: Any) -> Any:
    """Return the pattern inside NLTK's wrapper, which limits the time of a search."""
    return getattr(pattern, "_rx", pattern)
