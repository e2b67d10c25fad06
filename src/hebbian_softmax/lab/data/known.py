"""The corpora that can be prepared by name, and their options on the command line."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from hebbian_softmax.lab.base.settings import choice, integer
from hebbian_softmax.lab.data import dated, gigaword, gutenberg, gutenberg_books, own_texts, stdlib, wikitext
from hebbian_softmax.lab.data.prepare import Plan


@dataclass(frozen=True)
class Known:
    """A corpus: what it is, its options, and the plan for their values."""

    help: str
    add_options: Callable[[argparse.ArgumentParser], None]
    plan: Callable[[dict[str, Any]], Plan]  # by the options that were given

    def usual(self) -> Plan:
        """The plan without options."""
        return self.plan({})


def _no_options(parser: argparse.ArgumentParser) -> None:
    pass


def _gutenberg_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--books",
        metavar="PLACE",
        help="train on the .txt files of this folder or archive (.tar.xz, .zip, …) instead of the paper's 2,017 books",
    )
    parser.add_argument(
        "--paper-exact",
        action="store_true",
        default=None,
        help="treat files as the paper's script does: only the marker START OF THIS counts, without it the first 36 "
        "bytes and the last are lost, and bytes that are not UTF-8 are dropped",
    )
    parser.add_argument(
        "--mirror",
        metavar="ADDRESS",
        type=_mirror,
        help="where books that are not in the data root come from, {id} for a book's number (default: "
        f"{gutenberg_books.MIRROR})",
    )


def _mirror(text: str) -> str:
    if "{id}" not in text or not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"must be an http or https address with {{id}} in it, not {text!r}")
    return text


def _dated_options(parser: argparse.ArgumentParser, file: bool) -> None:
    if file:
        parser.add_argument(
            "--file", metavar="FILE", required=True, help="the articles: .jsonl, .jsonl.xz or .jsonl.gz"
        )
    usual = dated.Options()
    for split in ("train", "valid", "test"):
        default = "..".join(map(str, getattr(usual, split)))
        parser.add_argument(
            f"--{split}",
            metavar="FIRST..LAST",
            type=_days,
            required=file,
            help=f"days of the {split} split, as {default}" + ("" if file else " (the default)"),
        )
    _add_minimum(parser, usual.minimum)


def _add_minimum(parser: argparse.ArgumentParser, usual: int) -> None:
    help = f"keep words seen so often in training (default: {usual})"
    parser.add_argument("--minimum", metavar="N", type=integer(1), help=help)


def _texts_options(parser: argparse.ArgumentParser) -> None:
    for split in ("train", "valid", "test"):
        parser.add_argument(
            f"--{split}",
            metavar="PLACE",
            required=True,
            help=f"the {split} split: a text in UTF-8 (or .xz, .gz), or the .txt files of a folder or archive",
        )
    parser.add_argument(
        "--tokens",
        metavar="TEXT",
        type=choice(*own_texts.TOKENS),
        help="nltk: English sentences and words in lower case (the default); spaces: what stands between spaces, a "
        "line a sentence, for texts that are tokenised already or not English",
    )
    _add_minimum(parser, own_texts.MINIMUM)


def _days(text: str) -> dated.Days:
    try:
        return dated.parse_days(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _gigaword_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", metavar="DIR", help="the LDC's files (default: gigaword in the data root)")
    parser.add_argument(
        "--eval-articles",
        metavar="N",
        type=integer(1),
        help="validate and test on N random articles each (default: all; the paper evaluates on such samples)",
    )
    parser.add_argument("--seed", metavar="N", type=integer(0), help="of that choice (default: 0)")


KNOWN = {
    "wikitext-2": Known(
        "Wikipedia, 2.1 M tokens, 33,278 words", _no_options, lambda options: wikitext.plan("wikitext-2")
    ),
    "wikitext-103": Known(
        "Wikipedia, 103 M tokens, 267,735 words", _no_options, lambda options: wikitext.plan("wikitext-103")
    ),
    "gutenberg": Known(
        "books: the paper's, or your own for training",
        _gutenberg_options,
        lambda options: gutenberg.plan(gutenberg.Options(**options)),
    ),
    "gigaword": Known(
        "news of 2000–2010 from the LDC's files (licensed)",
        _gigaword_options,
        lambda options: gigaword.plan(gigaword.Options(**options)),
    ),
    "reuters": Known(
        "newswire of 1987 in time order, tested on the October crash",
        partial(_dated_options, file=False),
        lambda options: dated.plan(dated.Options(**options)),
    ),
    "stdlib": Known(
        "the source of this Python's standard library, nothing to download", _no_options, lambda options: stdlib.plan()
    ),
}
OWN = {
    "texts": Known(
        "any text: files, folders or archives of your own for each split",
        _texts_options,
        lambda options: own_texts.plan(own_texts.Options(**options)),
    ),
    "dated": Known(
        "any news in time order, one JSON object a line with date, text and perhaps title",
        partial(_dated_options, file=True),
        lambda options: dated.plan(dated.Options(**options)),
    ),
}
"""Those that are made from files one has to name: there is no such corpus without options."""
