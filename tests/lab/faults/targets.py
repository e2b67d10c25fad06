"""The files that are damaged, each with a command that reads it, and the pairs of commands that run together."""

from collections.abc import Sequence
from dataclasses import dataclass

from tests.lab.faults.scenes import CHARACTERS, COMPARE, REUTERS, SWEEP, TABLE, TEXTS, TRAIN
from tests.lab.faults.small import split

RESUME = split("train corpus --resume runs/one --quiet")
EVALUATE = split("evaluate runs/one --json --quiet")
BESIDE = split("report runs/one runs/two --markdown --output page.html")
RECORDS = split("report runs/one --json")
PAGE = split("report runs/one")
GO_ON_TABLE = split("reproduce frequency-table --resume runs/one --quiet")
GO_ON_IMAGES = split("reproduce characters --resume runs/one --quiet")
GO_ON_TAIL = split("reproduce longtail --resume runs/one --quiet")
GO_ON_COMPARING = split("compare characters --resume runs/one --quiet")
VERIFY = split("data show news --verify")
REUTERS_ALONE = [*REUTERS, "--processes", "1"]
NEWS = [
    *split("data prepare dated --quiet --minimum 1 --processes 1 --file packed/news.jsonl.xz"),
    *split("--train 1987-02-01..1987-06-17 --valid 1987-06-18..1987-06-29 --test 1987-10-19..1987-10-20"),
]


@dataclass(frozen=True)
class Damaged:
    """A kind of file, and a command that reads it in the world of a template.

    A `source` is a text of the user's own. Nobody can know that a letter of it is wrong, so another corpus is allowed
    if it is recorded as another one. A `packed` source has checksums inside, so the words must be the same.
    """

    name: str
    files: str
    template: str
    words: Sequence[str]
    source: bool = False
    packed: bool = False


def _texts(train: str) -> list[str]:
    return [*TEXTS, "--train", train, "--valid", "texts/valid.txt", "--test", "texts/test.txt"]


def _prepare(corpus: str) -> list[str]:
    return ["data", "prepare", corpus, "--quiet", "--processes", "1"]


DAMAGED = [
    Damaged("checkpoint.pt, train --resume", "runs/one/checkpoint*", "begun", RESUME),
    Damaged("checkpoint.pt, evaluate", "runs/one/checkpoint*", "trained", EVALUATE),
    Damaged("checkpoint.pt, compare --resume (images)", "runs/one/checkpoint*", "half compared", GO_ON_COMPARING),
    Damaged("config.json, train --resume", "runs/one/config.json", "begun", RESUME),
    Damaged("plan.json, train --resume", "runs/one/plan.json", "begun", RESUME),
    Damaged("log.jsonl, train --resume", "runs/one/log.jsonl", "begun", RESUME),
    Damaged("log.jsonl, report --json", "runs/one/log.jsonl", "trained", RECORDS),
    Damaged("log.jsonl, reproduce --resume (long tail)", "runs/one/log.jsonl", "half tail", GO_ON_TAIL),
    Damaged("result.json, report", "runs/*/result.json", "trained", BESIDE),
    Damaged("evaluation.json, report", "runs/*/evaluation.json", "evaluated", BESIDE),
    Damaged("*-words.npz, report", "runs/*/*-words.npz", "evaluated", BESIDE),
    Damaged("*.png, report", "runs/one/*.png", "trained", PAGE),
    Damaged("memories/*.npz, evaluate --sweep", "runs/one/memories/*.npz", "swept", SWEEP),
    Damaged("files of language trials, reproduce --resume", "runs/one/trials/*/*", "half table", GO_ON_TABLE),
    Damaged("trials/*.json of images, reproduce --resume", "runs/one/trials/*.json", "half images", GO_ON_IMAGES),
    Damaged("manifest.json, train", "cache/corpora/toy/manifest.json", "corpus", ["train", "toy", *TRAIN]),
    Damaged("ids.bin, train", "cache/corpora/toy/ids.bin", "corpus", ["train", "toy", *TRAIN]),
    Damaged("vocabulary.tsv, train", "cache/corpora/toy/vocabulary.tsv", "corpus", ["train", "toy", *TRAIN]),
    Damaged("further arrays, data show --verify", "cache/corpora/news/*_*.bin", "news", VERIFY),
    Damaged(
        "manifest.json, data show --verify",
        "cache/corpora/news/manifest.json",
        "news",
        VERIFY,
    ),
    Damaged("images/*.npz, compare (images)", "cache/images/*.npz", "characters", COMPARE),
    Damaged("Omniglot's archives, compare (images)", "data/omniglot/*.zip", "inputs", COMPARE),
    Damaged("text, prepare", "texts/train.txt", "inputs", _texts("texts/train.txt"), source=True),
    Damaged("text.gz, prepare", "packed/train.txt.gz", "inputs", _texts("packed/train.txt.gz"), packed=True),
    Damaged("text.xz, prepare", "packed/train.txt.xz", "inputs", _texts("packed/train.txt.xz"), packed=True),
    Damaged("texts.zip, prepare", "packed/train.zip", "inputs", _texts("packed/train.zip"), packed=True),
    Damaged("texts.tar.xz, prepare", "packed/train.tar.xz", "inputs", _texts("packed/train.tar.xz"), packed=True),
    Damaged("texts.tar.gz, prepare", "packed/train.tar.gz", "inputs", _texts("packed/train.tar.gz"), packed=True),
    Damaged("texts.tar, prepare", "packed/train.tar", "inputs", _texts("packed/train.tar"), source=True),
    Damaged("dated news, prepare", "data/news/*.jsonl", "inputs", REUTERS_ALONE, source=True),
    Damaged("dated news.xz, prepare", "packed/news.jsonl.xz", "inputs", NEWS, packed=True),
    Damaged("WikiText's archive, prepare", "data/wikitext-2-v1.zip", "inputs", _prepare("wiki"), packed=True),
    Damaged("Gutenberg's books, prepare", "data/gutenberg/*/*.txt", "inputs", _prepare("novels"), source=True),
    Damaged("GigaWord's files, prepare", "data/gigaword/*.gz", "inputs", _prepare("gigaword"), packed=True),
    Damaged("NLTK's model, prepare", "data/nltk_data/tokenizers/*.zip", "inputs", REUTERS_ALONE),
]


@dataclass(frozen=True)
class Pair:
    """Two commands that run at the same time in the world of a template.

    Once both have ended, the commands of `after` run. Then the world must hold the same as after all these commands
    one after the other. A command that was refused may be among those that run again.
    """

    name: str
    template: str
    first: Sequence[str]
    second: Sequence[str]
    again: bool = True
    """Whether both commands run again afterwards. A command that starts a new run does not."""
    perhaps: str = ""
    """A file that is there or not, depending on which command comes first."""

    @property
    def after(self) -> list[Sequence[str]]:
        return [self.first, self.second] if self.again else []


PAIRS = [
    Pair("train, train: new runs", "corpus", ["train", "toy", *TRAIN], ["train", "toy", *TRAIN], again=False),
    Pair("train --resume twice", "begun", RESUME, RESUME),
    Pair("train --resume, evaluate", "begun", RESUME, EVALUATE),
    Pair("train --resume, report", "begun", RESUME, PAGE, perhaps="runs/one/curves.png"),
    Pair("evaluate --sweep twice", "trained", SWEEP, SWEEP),
    Pair("evaluate --sweep, report", "trained", SWEEP, BESIDE),
    Pair("reproduce --resume twice (language)", "half table", GO_ON_TABLE, GO_ON_TABLE),
    Pair("reproduce --resume twice (images)", "half images", GO_ON_IMAGES, GO_ON_IMAGES),
    Pair("compare, compare: new runs, one cache (images)", "inputs", COMPARE, COMPARE, again=False),
    Pair("compare, reproduce: new runs, one cache (images)", "inputs", COMPARE, CHARACTERS, again=False),
    Pair("prepare twice", "inputs", REUTERS, REUTERS),
    Pair("prepare twice, sources changed", "old news", REUTERS, REUTERS),
    Pair("train, reproduce: new runs", "corpus", ["train", "toy", *TRAIN], TABLE, again=False),
]
