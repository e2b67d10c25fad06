"""New tokens for a trained language model: `add_tokens` writes their output rows from one reading of a text.

Words that the tokenizer splits become tokens of their own. The usual way is to give them the mean of all rows and to
train; `add_tokens` writes rows that are good at once, from what enters the output layer where the words come next.

    pip install 'hebbian-softmax[hf]'
    python examples/new_tokens.py                              # a tiny model that is trained here, a minute or two
    python examples/new_tokens.py --model FOLDER --text FILE   # a checkpoint of transformers and a text of yours
    python examples/new_tokens.py --model FILE.gguf            # one of llama.cpp; needs the package gguf
    python examples/new_tokens.py --quick                      # only to see that it runs

It prints what `add_tokens` reports, and compares the rows with those that transformers gives to new tokens. Merging
words is no gain by itself: results/new-tokens has measurements. It pays where tokens must be added anyway.
"""

# %%
from __future__ import annotations

import argparse
import copy
import itertools
import logging
import math
import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

try:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
except ImportError:
    raise SystemExit("this example needs transformers: pip install 'hebbian-softmax[hf]'") from None

from hebbian_softmax.hf import add_tokens

# %% [markdown]
# ## The text
# Without a text of yours, it is the reference of the Python language, which every Python has for `help()`. The last
# tenth is kept for measuring.


# %%
def read(path: Path | None, characters: int) -> str:
    """Return the text of a file, or that of Python's own help, at most so many characters."""
    if path is None:
        from pydoc_data.topics import topics

        return "\n\n".join(topics[name] for name in sorted(topics))[:characters]
    try:
        return path.read_text(encoding="utf-8")[:characters]
    except (OSError, UnicodeDecodeError) as error:
        raise SystemExit(f"{path} cannot be read as a text in UTF-8 ({error}); give another --text") from None


# %% [markdown]
# ## The model
# A checkpoint of yours, or a tiny one: byte-pair encoding, and two layers that learn the text for a minute.


# %%
def load(path: Path) -> tuple[Any, Any]:
    """Return a model and its tokenizer from a folder of transformers, or from a file of llama.cpp."""
    if not path.exists():
        raise SystemExit(f"{path} does not exist; --model takes a folder of transformers or a .gguf file")
    where: dict[str, Any] = {"pretrained_model_name_or_path": path}
    if path.suffix == ".gguf":
        where = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    try:
        tokenizer = AutoTokenizer.from_pretrained(**where)
        model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    except ImportError as error:
        raise SystemExit(f"transformers needs another package for {path}: {error}") from None
    except (OSError, ValueError) as error:
        raise SystemExit(f"transformers cannot load {path}: {error}") from None
    return model.eval(), tokenizer


def trained_tokenizer(text: str, size: int) -> Any:
    """Return a tokenizer of byte pairs that knows the most frequent parts of the text."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    inner.train_from_iterator([text], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=inner)


def trained_model(tokenizer: Any, text: str, steps: int, length: int, batch: int = 16) -> Any:
    """Return a small model that has learned the text."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=512, **sizes))
    ids = torch.tensor(tokenizer(text).input_ids)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    start = time.perf_counter()
    for step in range(1, steps + 1):
        places = torch.randint(len(ids) - length, (batch, 1)) + torch.arange(length)
        loss = model(input_ids=ids[places], labels=ids[places]).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 0 or step == steps:
            seconds = time.perf_counter() - start
            print(f"step {step} of {steps}: {loss.item():.2f} nats per token, {seconds:.0f} s", file=sys.stderr)
    return model.eval()


# %% [markdown]
# ## Which words, and how well they are predicted
# A new token is a word with the space before it. The tokenizer finds it at the beginning of longer words, too, so words
# that others begin with are left out.


# %%
def split_words(tokenizer: Any, text: str, number: int) -> list[str]:
    """Return the most frequent words that the tokenizer splits and that no other word begins with."""
    counts = Counter(re.findall(r" [A-Za-z]{4,}(?![A-Za-z_])", text))
    everything = sorted(set(re.findall(r" [A-Za-z_]+", text)))
    following = dict(itertools.pairwise(everything))
    alone = [word for word, _ in counts.most_common() if not following.get(word, "").startswith(word)]
    return [word for word in alone if len(tokenizer(word, add_special_tokens=False).input_ids) > 1][:number]


@torch.no_grad()
def measured(model: Any, tokenizer: Any, text: str, first_new: int, length: int) -> tuple[float, float]:
    """Return the bits per character of a text that is read in pieces, and the mean nats of the new tokens in it."""
    ids = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
    total, new = 0.0, []
    for start in range(0, len(ids) - 1, length - 1):
        piece = ids[start : start + length]
        logits = model(input_ids=piece[None, :-1]).logits[0].float()
        nats = torch.nn.functional.cross_entropy(logits, piece[1:], reduction="none")
        total += nats.sum().item()
        new.append(nats[piece[1:] >= first_new])
    return total / math.log(2) / len(text), torch.cat(new).mean().item()


# %%
def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", type=Path, help="a folder of transformers or a .gguf file; else a tiny one is trained"
    )
    parser.add_argument("--text", type=Path, help="a text in UTF-8; else the reference of the Python language")
    parser.add_argument(
        "--characters", type=positive, help="how much of the text is read; 100,000 with --model, else all"
    )
    parser.add_argument("--tokens", type=positive, default=50, help="the number of new tokens (default: %(default)s)")
    parser.add_argument(
        "--steps", type=positive, default=600, help="training steps of the tiny model (default: %(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="a few steps on little text, to see that it runs")
    options = parser.parse_args(arguments)
    if options.characters is None:
        options.characters = 100_000 if options.model else sys.maxsize
    if options.quick:
        options.characters, options.tokens, options.steps = min(options.characters, 30_000), 10, 10
    return options


# %% [markdown]
# ## Add the tokens


# %%
def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    text = read(options.text, options.characters)
    if len(text) < 2000:
        raise SystemExit(f"the text has only {len(text)} characters, and at least 2,000 are needed; give a longer one")
    cut = text.rfind(" ", 0, len(text) * 9 // 10)
    texts, held_out = text[:cut], text[cut:]
    if options.model:
        length = 512
        model, tokenizer = load(options.model)
    else:
        length = 64
        tokenizer = trained_tokenizer(texts, size=1000)
        model = trained_model(tokenizer, texts, options.steps, length)

    # %%
    words = split_words(tokenizer, texts, options.tokens)
    if not words:
        raise SystemExit("the tokenizer splits no word of the text that could be a token; give a longer --text")
    shown = ", ".join(repr(word) for word in words[:6])
    print(f"{len(words)} new tokens, among them {shown}")
    old, plain, usual = len(tokenizer), copy.deepcopy(model), copy.deepcopy(tokenizer)

    # %%
    print(f"reading {len(texts):,} characters once, and {len(held_out):,} held-out ones twice", file=sys.stderr)
    start = time.perf_counter()
    try:
        report = add_tokens(model, tokenizer, words, [texts], held_out=[held_out], length=length)
    except (TypeError, ValueError) as error:  # of models that tokens cannot be added to
        raise SystemExit(f"the tokens cannot be added: {error}") from None
    print(report)
    print(f"this took {time.perf_counter() - start:.0f} seconds")

    # %% [markdown]
    # The same tokens as transformers adds them: all of them get the mean of the rows that are there.

    # %%
    before, _ = measured(plain, usual, held_out, old, length)
    usual.add_tokens(words)
    plain.resize_token_embeddings(len(usual))
    rows = {"mean rows, of transformers": measured(plain, usual, held_out, old, length)}
    rows["rows that add_tokens wrote"] = measured(model, tokenizer, held_out, old, length)
    print(f"\n{'held-out text':30}{'bits per character':>20}{'nats per new token':>20}")
    print(f"{'before, words split':30}{before:20.3f}{'–':>20}")
    for name, (bits, nats) in rows.items():
        print(f"{name:30}{bits:20.3f}" + (f"{'none there':>20}" if math.isnan(nats) else f"{nats:20.2f}"))
    if options.quick:
        print("This was a quick run to see that it works: after a few steps on little text the numbers mean nothing.")


if __name__ == "__main__":
    main()
