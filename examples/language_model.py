"""A small language model of words whose output layer memorises, and a cache that it uses while it reads.

An LSTM learns to predict the next word, with `HebbianSoftmax` as its output layer. Then it reads a text that it has not
seen, alone and with a `NeuralCache` of the words it has just read. Nothing is trained for the cache: its settings are
chosen on the validation text.

    python examples/language_model.py               # some minutes; WikiText-2 if HEBBIAN_DATA has it, else see below
    python examples/language_model.py book.txt      # any text in UTF-8
    python examples/language_model.py --plain       # the same with a plain softmax
    python examples/language_model.py --quick       # only to see that it runs

HEBBIAN_DATA is a folder with wikitext-2/wikitext-2-v1.zip. Without it the text is the reference of the Python language,
which every Python has for `help()`. The script prints perplexities, for all words and for those rare in training.
"""

# %%
from __future__ import annotations

import argparse
import math
import os
import re
import sys
import time
import zipfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hebbian_softmax import HebbianSoftmax, NeuralCache, linear_log_prob
from hebbian_softmax.memory import mix

# %% [markdown]
# ## The text
# Words that the training text has only once become `<unk>`. The model learns from the beginning of the training text,
# so that this takes minutes; `words` says how much.


# %%
class Corpus(NamedTuple):
    """The words of three texts as numbers, the vocabulary, and how often each of its words occurs in training."""

    train: Tensor
    validation: Tensor
    test: Tensor
    vocabulary: list[str]
    counts: Tensor


def read(path: Path | None, words: int) -> tuple[list[str], list[str], list[str]]:
    """Return the words for training, for validation and for the test, at most so many for training."""
    archive = Path(os.environ.get("HEBBIAN_DATA", "data")) / "wikitext-2" / "wikitext-2-v1.zip"
    if path is None and archive.is_file():
        print(f"reading {archive}")
        names = [f"wikitext-2/wiki.{split}.tokens" for split in ("train", "valid", "test")]
        try:
            with zipfile.ZipFile(archive) as found:
                texts = [found.read(name).decode("utf-8").replace("\n", " <eos> ").split() for name in names]
        except (zipfile.BadZipFile, KeyError) as error:
            raise SystemExit(f"{archive} is not the archive of WikiText-2 ({error}); get it anew") from None
        return texts[0][:words], texts[1][: words // 10], texts[2][: words // 10]
    if path is None:
        from pydoc_data.topics import topics

        print("reading the reference of the Python language")
        text = "\n\n".join(topics[name] for name in sorted(topics))
    else:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise SystemExit(f"{path} cannot be read as a text in UTF-8 ({error}); give another file") from None
    every = re.findall(r"\w+|[^\w\s]", text)[: words * 5 // 4]
    if len(every) < 1000:
        raise SystemExit(f"the text has only {len(every)} words, and at least 1,000 are needed; give a longer one")
    first, second = len(every) * 8 // 10, len(every) * 9 // 10
    return every[:first], every[first:second], every[second:]


def numbered(texts: tuple[list[str], list[str], list[str]]) -> Corpus:
    """Number the words."""
    seen = Counter(texts[0])
    vocabulary = ["<unk>", *(word for word, count in seen.most_common() if count > 1 and word != "<unk>")]
    numbers = {word: number for number, word in enumerate(vocabulary)}
    train, validation, test = (torch.tensor([numbers.get(word, 0) for word in text]) for text in texts)
    return Corpus(train, validation, test, vocabulary, train.bincount(minlength=len(vocabulary)))


# %% [markdown]
# ## The model
# The head is given the dropout of the features, so that it memorises them as they are. `start="auto"` lets it wait with
# its writes until the features have settled, and `fade=True` lets the writes fade with the learning rate.


# %%
class LanguageModel(nn.Module):
    """An LSTM over words; `memorizing=False` makes its head a plain softmax."""

    def __init__(self, words: int, features: int, memorizing: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, features)
        self.dropout = nn.Dropout(0.3)
        self.lstm = nn.LSTM(features, features)
        self.head = HebbianSoftmax(features, words, dropout=0.3)
        self.head.memorizing = memorizing

    def forward(self, inputs: Tensor, state: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return features (time, streams, features) for words (time, streams), and the state after them."""
        h, state = self.lstm(self.dropout(self.embedding(inputs)), state)
        return h, state


def train(model: LanguageModel, text: Tensor, epochs: int, *, streams: int = 20, length: int = 35) -> None:
    """Train with truncated backpropagation through time; the learning rate falls to 0."""
    columns = text[: len(text) // streams * streams].view(streams, -1).T
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    model.head.attach(optimizer)
    pieces = math.ceil((len(columns) - 1) / length)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=epochs * pieces)
    model.train()
    begin = time.perf_counter()
    for epoch in range(1, epochs + 1):
        state, total = None, 0.0
        for number, start in enumerate(range(0, len(columns) - 1, length), 1):
            piece = columns[start : start + length + 1]
            h, state = model(piece[:-1], state)
            state = tuple(each.detach() for each in state)
            loss = model.head.loss(h, piece[1:])
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            total += loss.item()
            if number % 50 == 0 or number == pieces:
                done = (
                    f"epoch {epoch} of {epochs}, step {number} of {pieces}: perplexity {math.exp(total / number):.0f}"
                )
                print(f"\r{done}, {time.perf_counter() - begin:.0f} s", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
    model.eval()


# %% [markdown]
# ## Reading, with a cache and without
# The cache needs what enters the output layer, and the words that followed. Its θ multiplies inner products of
# features, so the best value depends on how long they are: the candidates are divided by the mean of ‖h‖².


# %%
@torch.no_grad()
def features_of(model: LanguageModel, text: Tensor, length: int = 1000) -> tuple[Tensor, Tensor]:
    """Return what enters the output layer at each position of a text, and the word that follows."""
    found, state = [], None
    for piece in text[:-1].unsqueeze(1).split(length):
        h, state = model(piece, state)
        found.append(h.squeeze(1))
    return torch.cat(found), text[1:]


@torch.no_grad()
def alone(model: LanguageModel, h: Tensor, words: Tensor) -> Tensor:
    """Return the log-probability of each word under the model alone."""
    found, _ = linear_log_prob(h, model.head.weight, words)
    return found


def chosen(own: Tensor, h: Tensor, words: Tensor) -> tuple[float, int, float]:
    """Return the θ, the size and the share of a cache that predicts a text best."""
    scale = h.square().sum(1).mean().item()
    thetas, sizes = [theta / scale for theta in (0.3, 1.0, 3.0, 10.0)], [100, 500, 2000]
    grid = NeuralCache(size=max(sizes), theta=1.0).sequence_log_prob(h, words, thetas=thetas, sizes=sizes)
    results = []
    for share in (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5):
        means = mix(own, cache=grid, cache_weight=share).mean(-1)
        for place, mean in enumerate(means.flatten().tolist()):
            results.append((mean, thetas[place // len(sizes)], sizes[place % len(sizes)], share))
    return max(results)[1:]


# %%
def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, nargs="?", help="a text in UTF-8, of which four fifths are for training")
    parser.add_argument(
        "--words", type=positive, default=200_000, help="words for training, at most (default: %(default)s)"
    )
    parser.add_argument(
        "--features", type=positive, default=128, help="of the LSTM and of the output layer (default: %(default)s)"
    )
    parser.add_argument(
        "--epochs", type=positive, default=4, help="passes over the training text (default: %(default)s)"
    )
    parser.add_argument("--plain", action="store_true", help="a plain softmax, without the rule")
    parser.add_argument("--quick", action="store_true", help="little text and one pass, to see that it runs")
    options = parser.parse_args(arguments)
    if options.words < 1000:
        parser.error(f"--words must be at least 1,000, got {options.words}")
    if options.quick:
        options.words, options.features, options.epochs = min(options.words, 5000), 16, 1
    return options


# %% [markdown]
# ## Train and read


# %%
def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    corpus = numbered(read(options.text, options.words))
    print(f"{len(corpus.train):,} words for training, {len(corpus.vocabulary):,} in the vocabulary")
    torch.manual_seed(0)
    model = LanguageModel(len(corpus.vocabulary), options.features, memorizing=not options.plain)
    train(model, corpus.train, options.epochs)

    # %%
    h, words = features_of(model, corpus.validation)
    theta, size, share = chosen(alone(model, h, words), h, words)
    print(f"chosen on the validation text: a cache of {size:,} words, θ = {theta:.3g}, with a share of {share:.0%}")

    # %%
    h, words = features_of(model, corpus.test)
    own = alone(model, h, words)
    cache = NeuralCache(size=size, theta=theta)
    mixed = mix(own, cache=cache.sequence_log_prob(h, words), cache_weight=share)
    groups = {"all words": words >= 0, "seen < 10 times": corpus.counts[words] < 10}
    print(f"\n{'perplexity on the test text':30}" + "".join(f"{name:>18}" for name in groups))
    for name, found in {"model alone": own, "model with the cache": mixed}.items():
        cells = [f"{(-found[which].mean()).exp():18.1f}" if which.any() else f"{'–':>18}" for which in groups.values()]
        print(f"{name:30}" + "".join(cells))
    print(f"{'words of the test text':30}" + "".join(f"{int(which.sum()):18,}" for which in groups.values()))
    if options.quick:
        print("This was a quick run to see that it works: after a few steps on little text the numbers mean nothing.")


if __name__ == "__main__":
    main()
