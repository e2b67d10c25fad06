"""Small inputs: texts, news, books and drawings, and the experiments and corpora that read so little."""

import gzip
import hashlib
import io
import json
import lzma
import random
import tarfile
import zipfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

from hebbian_softmax.lab import experiments
from hebbian_softmax.lab.data import gutenberg, registry, tokenise, wikitext
from hebbian_softmax.lab.data.corpus import SPLITS
from hebbian_softmax.lab.data.prepare import CorpusKind, NoOptions
from hebbian_softmax.lab.images.compare import comparing
from hebbian_softmax.lab.images.data import ImageSource
from hebbian_softmax.lab.images.omniglot import ARCHIVES, OmniglotSettings, load_omniglot
from hebbian_softmax.lab.images.reproduce import reproducing
from tests.lab.data.english import MODEL, write, zipped


def split(text: str) -> list[str]:
    """Return the words of a text; lists of options are easier to read in one piece."""
    return text.split()


WORDS = split("the a cat dog bird tree house sun moon star sea hill saw ran sat fell rose had was old new red blue")
BOOKS = {"train": [5, 4], "valid": [30], "test": [40]}
DAYS = {"train": ["1987-02-01", "1987-04-02", "1987-06-17"], "valid": ["1987-06-18"], "test": ["1987-10-19"]}
MONTHS = {"200001": "20000101", "200911": "20091130", "200912": "20091201", "201001": "20100101"}
WIKI = wikitext.Official("wikitext-2", (501, 126, 126), len(WORDS) + 2)  # with the full stop and <eos>
SMALL_ARCHIVES = tuple(
    replace(archive, classes=range(first, first + 18), address="http://127.0.0.1:9/")  # nobody is there
    for archive, first in zip(ARCHIVES, (1, 19), strict=True)
)


def offer() -> None:
    """Offer `compare characters`, `reproduce characters`, and the corpora `wiki` and `novels`, in this process.

    Figures are tiny pictures instead of Matplotlib's, which take longer than all the rest of a command.
    """
    import nltk
    from matplotlib.figure import Figure

    Figure.savefig = quick_picture  # type: ignore[assignment, method-assign]
    nltk.data.path.clear()  # only the model in the data root is found
    tokenise.tokeniser.cache_clear()
    load = partial(load_omniglot, archives=SMALL_ARCHIVES)
    source = ImageSource("characters", "few characters", OmniglotSettings, lambda settings, quiet: load(quiet=quiet))
    experiments.add(comparing(source, checkpoint_seconds=0.05))
    experiments.add(reproducing(source))
    corpora = cast(dict[str, CorpusKind[Any]], registry.CORPORA)
    corpora["wiki"] = CorpusKind("wiki", "a few lines", NoOptions, lambda options: wikitext.plan(WIKI))
    corpora["novels"] = CorpusKind(
        "novels", "four books", gutenberg.Options, lambda options: gutenberg.plan(options, BOOKS)
    )


def quick_picture(figure: Any, file: IO[bytes], **options: object) -> None:
    """Write a small PNG whose pixels are a checksum of the lines, bars and texts of a figure."""
    from PIL import Image

    total = hashlib.shake_256()
    for axes in figure.axes:
        total.update(repr([line.get_xydata().tolist() for line in axes.lines]).encode())
        total.update(repr([patch.get_extents().bounds for patch in axes.patches]).encode())
        total.update(repr([text.get_text() for text in axes.texts]).encode())
    Image.frombytes("RGB", (8, 8), total.digest(192)).save(file, "png")


def write_inputs(world: Path) -> None:
    """Write everything that the small experiments read."""
    draw = random.Random(0)
    texts = {split: lines(draw, 100 if split == "train" else 25) for split in SPLITS}
    data = world / "data"
    write(data / "nltk_data" / "tokenizers", {"punkt_tab.zip": zipped(MODEL)})
    for split, text in texts.items():
        write(world / "texts", {f"{split}.txt": text})
    write(world / "packed", {"train.txt.gz": gzip.compress(texts["train"].encode(), mtime=0)})
    write(world / "packed", {"train.txt.xz": lzma.compress(texts["train"].encode())})
    two = {"a.txt": texts["train"], "b.txt": lines(draw, 20)}
    write(world / "packed" / "train.zip", two)
    write(world / "packed" / "train.tar.xz", two)
    tar = tarred({name: text.encode() for name, text in two.items()})
    write(world / "packed", {"train.tar": tar, "train.tar.gz": gzip.compress(tar, mtime=0)})
    news = [(day, lines(draw, 20)) for days in DAYS.values() for day in days]
    write(data, {"news/reuters-21578.jsonl": articles(news)})
    write(world / "packed", {"news.jsonl.xz": lzma.compress(articles(news).encode())})
    wiki = {split: " \n" + lines(draw, 100 if split == "train" else 25) for split in SPLITS}
    write(data / "wikitext-2-v1.zip", {f"wikitext-2/wiki.{split}.tokens": text for split, text in wiki.items()})
    for split, numbers in BOOKS.items():
        for number in numbers:
            text = f"START OF THIS PROJECT GUTENBERG EBOOK\n{lines(draw, 40)}END OF THIS PROJECT GUTENBERG EBOOK\n"
            write(data / "gutenberg", {f"{split}/{number}.txt": text})
    for month, day in MONTHS.items():
        write(data / "gigaword", {f"afp_eng_{month}.gz": gzip.compress(sgml(day, lines(draw, 20)), mtime=0)})
    for archive in SMALL_ARCHIVES:
        (data / "omniglot").mkdir(exist_ok=True)
        with zipfile.ZipFile(data / "omniglot" / archive.name, "w", zipfile.ZIP_DEFLATED) as file:
            for number in archive.classes:
                for which in range(1, 21):
                    name = f"{archive.folder}/Alphabet/character{number:02d}/{number:04d}_{which:02d}.png"
                    file.writestr(zipfile.ZipInfo(name), drawing(number, which))


def lines(draw: random.Random, count: int) -> str:
    """Return short lines of words; frequent words come first in the list."""
    weights = [1 / rank for rank in range(1, len(WORDS) + 1)]
    return "".join(" ".join([*draw.choices(WORDS, weights, k=3), ".\n"]) for _ in range(count))


def articles(news: list[tuple[str, str]]) -> str:
    """Return news as lines of JSON."""
    return "".join(json.dumps({"date": day, "title": "News", "text": text}) + "\n" for day, text in news)


def sgml(day: str, text: str) -> bytes:
    """Return an article in the form of GigaWord."""
    return f'<DOC id="AFP_ENG_{day}.0001" type="story" >\n<TEXT>\n<P>\n{text}</P>\n</TEXT>\n</DOC>\n'.encode()


def tarred(files: dict[str, bytes]) -> bytes:
    """Return a tar archive that is not packed, so that nothing in it checks the texts."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def drawing(number: int, which: int) -> bytes:
    """Return a drawing of a character: its own pattern with a little noise, in a PNG of 105×105 pixels."""
    import numpy as np
    from PIL import Image

    coarse = np.random.default_rng(number).random((15, 15)) < 0.4
    noise = np.random.default_rng([number, which]).random((105, 105)) < 0.02
    buffer = io.BytesIO()
    Image.fromarray(~(np.kron(coarse, np.ones((7, 7), bool)) ^ noise)).save(buffer, "png")
    return buffer.getvalue()
