"""`hebbian data`: prepare corpora, list them, look at one."""

import argparse
import re
from collections.abc import Callable, Collection
from pathlib import Path

from hebbian_softmax.lab.base.console import say, show
from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.base.progress import format_bytes
from hebbian_softmax.lab.base.settings import add_options, given_options, integer
from hebbian_softmax.lab.data.buckets import BUCKETS, bucket_of
from hebbian_softmax.lab.data.corpus import SPLITS, UNK, Corpus, corpora_root, open_corpus, prepared
from hebbian_softmax.lab.data.gutenberg import MISSING, name_missing
from hebbian_softmax.lab.data.prepare import prepare
from hebbian_softmax.lab.data.registry import CORPORA, KNOWN, load_corpus

HELP = "prepare text corpora, list them, or look at one"
CHUNK = 1 << 24  # ids counted at a time: the billions of GigaWord are memory-mapped and do not fit into memory


def add_data(commands: "argparse._SubParsersAction[argparse.ArgumentParser]", reserved: Collection[str] = ()) -> None:
    """Add the command `data` with its own commands. No prepared corpus may be called by one of the `reserved` names."""
    data = commands.add_parser(
        "data",
        help=HELP,
        description=HELP[0].upper() + HELP[1:] + ".",
        allow_abbrev=False,
        epilog="Sources are read from the folder HEBBIAN_DATA, and what is made of them goes to HEBBIAN_CACHE; without "
        "these variables both are in the user's cache. See docs/corpora.md.",
    )
    verbs = data.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_prepare(verbs, reserved)

    listing = verbs.add_parser("list", help="list all corpora, and those that are prepared", allow_abbrev=False)
    listing.set_defaults(execute=show_all)

    show = verbs.add_parser("show", help="show sizes and word frequencies of a prepared corpus", allow_abbrev=False)
    show.add_argument("corpus", metavar="CORPUS", help="its name in hebbian data list, or its folder")
    show.add_argument("--verify", action="store_true", help="read every byte and compare with the manifest's checksums")
    show.set_defaults(execute=show_one)


def _add_prepare(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]", reserved: Collection[str]) -> None:
    help = "tokenise a corpus into one memory-mapped file of ids"
    command = verbs.add_parser("prepare", help=help, description=help[0].upper() + help[1:] + ".", allow_abbrev=False)
    names = command.add_subparsers(title="corpora", metavar="CORPUS", required=True)
    for corpus, kind in CORPORA.items():
        parser = names.add_parser(
            corpus,
            help=kind.help,
            description=kind.help[0].upper() + kind.help[1:] + ". A corpus that is prepared already is kept unless "
            "its sources in the data root have changed.",
            allow_abbrev=False,
        )
        add_options(parser, kind.options)
        parser.add_argument(
            "--name",
            metavar="NAME",
            type=_free_name({*CORPORA, *reserved}),
            help="name of the result (default: the corpus's name, with a code if options are not at their defaults)",
        )
        parser.add_argument(
            "--data-root", metavar="DIR", default="", help="folder of the sources (default: HEBBIAN_DATA, or a cache)"
        )
        parser.add_argument(
            "--processes", metavar="N", type=integer(1), help="processes to use (default: one for each core)"
        )
        parser.add_argument("--quiet", action="store_true", help="show no progress")
        parser.set_defaults(execute=prepare_one, corpus=corpus)


def _free_name(taken: Collection[str]) -> Callable[[str], str]:
    """Return a parser of names that mean nothing else where a corpus may be named, as in `hebbian train NAME`."""

    def parse(text: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", text) or text in taken:
            raise argparse.ArgumentTypeError(
                f"must be letters, digits, dots and dashes, and name no other corpus or experiment, not {text!r}"
            )
        return text

    return parse


def prepare_one(arguments: argparse.Namespace) -> int:
    """Carry out `hebbian data prepare CORPUS`."""
    kind = CORPORA[arguments.corpus]
    corpus, made = prepare(
        kind.plan(kind.options(**given_options(arguments, kind.options))),
        name=arguments.name or "",
        data_root=arguments.data_root,
        processes=arguments.processes,
        quiet=arguments.quiet,
    )
    if not made:
        say(f"{corpus.name} was prepared before; delete {corpus.path} to make it again")
    show(summary(corpus))
    return 0


def show_all(arguments: argparse.Namespace) -> int:
    """Carry out `hebbian data list`."""
    show("Corpora for hebbian data prepare:")
    for name, kind in CORPORA.items():
        show(f"  {name:<14}{kind.help}", " " * 16)
    show(f"\nPrepared, in {corpora_root()}:")
    for folder in prepared():
        try:
            corpus = open_corpus(folder)
        except LabError as error:
            show(f"  {folder.name}: {error}")
            continue
        tokens = " / ".join(f"{len(corpus.splits[split]):,}" for split in SPLITS)
        size = format_bytes(_size(folder))
        show(f"  {folder.name:<24}{tokens} tokens, {len(corpus.words):,} words, {size}", " " * 26)
    if not prepared():
        show("  none yet")
    return 0


def show_one(arguments: argparse.Namespace) -> int:
    """Carry out `hebbian data show CORPUS`."""
    name = arguments.corpus
    if name in KNOWN and not (folder := corpora_root() / KNOWN[name].usual().name).exists():
        raise LabError(f"{name} is not prepared yet (no {folder}): hebbian data prepare {name}")
    corpus = load_corpus(name, quiet=True)
    if arguments.verify:
        open_corpus(corpus.path, verify=True)
    show(summary(corpus))
    if arguments.verify:
        show("All files have their checksums.")
    return 0


def summary(corpus: Corpus, chunk: int = CHUNK) -> str:
    """Describe a corpus in a few lines: tokens and `<unk>` of each split, words and tokens of each frequency bucket."""
    lines = [f"{corpus.name}: {corpus.path} ({format_bytes(_size(corpus.path))}), fingerprint {corpus.fingerprint}"]
    unk = corpus.words.index(UNK) if UNK in corpus.words else -1
    for split in SPLITS:
        ids = corpus.splits[split]
        share = sum((part == unk).sum().item() for part in ids.split(chunk)) / len(ids)
        lines.append(f"  {split:<6}{len(ids):>14,} tokens, {share:.2%} {UNK}")
    buckets, total = bucket_of(corpus.counts), int(corpus.counts.sum())
    lines.append(f"  vocabulary {len(corpus.words):,} words, by occurrences in training:")
    for index, bucket in enumerate(BUCKETS):
        inside = corpus.counts[buckets == index]
        lines.append(f"    {bucket:<8}{len(inside):>10,} words, {inside.sum().item() / total:7.2%} of training tokens")
    lines.append("  most frequent: " + " ".join(corpus.words[:12]))
    missing = corpus.manifest["notes"].get(MISSING)
    if isinstance(missing, dict) and all(isinstance(numbers, list) for numbers in missing.values()):
        lines.append(f"  {name_missing(missing)}")
    return "\n".join(lines)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())
