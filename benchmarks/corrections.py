"""Which of the rule's corrections (scale, center) should be on by default? Two tasks, every combination.

The Omniglot curriculum (section 4.1) counts the classes reached after a fixed number of steps. WikiText-2 gives the
validation perplexity of a small tied LSTM, in total and on rare words. γ and T of the rule are fixed and not tuned:
this compares the corrections with each other. The data are ``omniglot/*.zip`` and ``wikitext-2/wikitext-2-v1.zip`` in
the folder HEBBIAN_DATA.

    HEBBIAN_DATA=... python -m benchmarks.corrections --device cuda --json corrections.json
"""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import time
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from hebbian_softmax import HebbianSoftmax, PaperRate

VARIANTS: dict[str, dict[str, Any] | None] = {
    "plain softmax": None,
    "literal": {"write": "literal"},
    "center": {"write": "centred", "scale": 1.0, "start": 0, "fade": False},
    "match": {"write": "literal", "scale": "match"},
    "match+center": {"write": "centred", "start": 0, "fade": False},
}


def make_head(
    features: int, classes: int, variant: str, device: str, *, gamma: float, limit: int, **rule: Any
) -> HebbianSoftmax:
    """Return a head with the corrections of a variant, and the paper's rate in each."""
    rate = PaperRate(gamma, limit)
    return HebbianSoftmax(features, classes, rate=rate, device=device, **rule, **(VARIANTS[variant] or {}))


def attach(head: HebbianSoftmax, optimizer: torch.optim.Optimizer, variant: str) -> None:
    """Attach the head; the plain softmax is the same head without writes."""
    head.memorizing = VARIANTS[variant] is not None
    head.attach(optimizer)


def omniglot(root: Path) -> Tensor:
    """Return the drawings (1623, 20, 28, 28) in [0, 1], where ink is 1."""
    characters: dict[str, list[Tensor]] = {}
    for name in ("images_background", "images_evaluation"):
        with zipfile.ZipFile(root / "omniglot" / f"{name}.zip") as archive:
            for path in sorted(entry for entry in archive.namelist() if entry.endswith(".png")):
                image = Image.open(io.BytesIO(archive.read(path))).convert("L").resize((28, 28), Image.Resampling.BOX)
                drawing = 1 - torch.from_numpy(np.array(image, dtype=np.float32)) / 255
                characters.setdefault(path.rsplit("/", 1)[0], []).append(drawing)
    return torch.stack([torch.stack(drawings) for drawings in characters.values()])


def convnet() -> nn.Sequential:
    """Return the network of the paper's image curriculum."""
    layers: list[nn.Module] = []
    for channels in (1, 64, 64, 64):
        layers += [nn.Conv2d(channels, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten())


def augment(images: Tensor) -> Tensor:
    """Rotate images by up to 30 degrees and move them by up to a tenth of their size."""
    angle = (torch.rand(len(images), device=images.device) * 2 - 1) * torch.pi / 6
    move = torch.rand(len(images), 2, device=images.device) * 0.4 - 0.2
    theta = torch.stack(
        [
            torch.stack([angle.cos(), -angle.sin(), move[:, 0]], 1),
            torch.stack([angle.sin(), angle.cos(), move[:, 1]], 1),
        ],
        1,
    )
    return F.grid_sample(images, F.affine_grid(theta, list(images.shape), align_corners=False), align_corners=False)


def curriculum(images: Tensor, variant: str, seed: int, steps: int, device: str) -> int:
    """Return the classes reached: 30, and 5 more whenever the test accuracy exceeds 60 % (checked every 25 steps)."""
    torch.manual_seed(seed)
    images = images[torch.randperm(len(images))].to(device)
    test, train = images[:, :5], images[:, 5:]
    net = convnet().to(device)
    head = make_head(64, len(images), variant, device, gamma=0.1, limit=50, dropout=0.2)
    nn.init.xavier_uniform_(head.weight)
    optimizer = torch.optim.RMSprop([*net.parameters(), *head.parameters()], lr=1e-3)
    attach(head, optimizer, variant)
    classes = 30
    for step in range(1, steps + 1):
        y = torch.randint(classes, (32,), device=device)
        x = train[y, torch.randint(train.shape[1], (32,), device=device)].unsqueeze(1)
        optimizer.zero_grad()
        head.loss(net(augment(x)), y).backward()
        optimizer.step()
        if step % 25 == 0:
            net.eval()
            with torch.no_grad():
                guess = head(net(test[:classes].reshape(-1, 1, 28, 28))).argmax(1)
            net.train()
            right = guess == torch.arange(classes, device=device).repeat_interleave(5)
            classes = min(classes + 5, len(images)) if right.float().mean() > 0.6 else classes
    return classes


def wikitext(root: Path) -> tuple[Tensor, Tensor, Tensor]:
    """Return training and validation ids, and how often each word occurs in training."""
    with zipfile.ZipFile(root / "wikitext-2" / "wikitext-2-v1.zip") as archive:
        texts = [
            archive.read(f"wikitext-2/wiki.{part}.tokens").decode().replace("\n", " <eos> ").split()
            for part in ("train", "valid")
        ]
    counts = Counter(texts[0])
    ids = {word: i for i, (word, _) in enumerate(counts.most_common())}
    train, valid = (torch.tensor([ids[word] for word in text if word in ids]) for text in texts)
    return train, valid, torch.tensor([count for _, count in counts.most_common()])


class LanguageModel(nn.Module):
    """A small LSTM whose output layer is tied to its embedding."""

    def __init__(self, words: int, size: int, variant: str, device: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, size, device=device)
        nn.init.normal_(self.embedding.weight, std=size**-0.5)
        self.lstm = nn.LSTM(size, size, batch_first=True, device=device)
        self.head = make_head(size, words, variant, device, gamma=0.05, limit=20, dropout=0.3)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        h, state = self.lstm(F.dropout(self.embedding(ids), 0.3, self.training), state)
        return h, state


def language_model(data: tuple[Tensor, Tensor, Tensor], variant: str, seed: int, epochs: int, device: str) -> dict:
    """Train a language model and return its validation perplexities."""
    torch.manual_seed(seed)
    train, valid, counts = data
    model = LanguageModel(len(counts), 512, variant, device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.0, 0.999))
    attach(model.head, optimizer, variant)
    batch, length = 64, 70
    per_epoch = len(train) // (batch * length) - 1
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * per_epoch)
    for _ in range(epochs):
        start = int(torch.randint(length, ()))
        rows = train[start : start + per_epoch * batch * length + 1]
        x = rows[:-1].view(-1, length)[torch.randperm(per_epoch * batch)].to(device)
        # The target of a word is the next one in its sequence; the last word has none.
        for part in x.view(per_epoch, batch, length):
            optimizer.zero_grad()
            with torch.autocast(device, torch.bfloat16):
                h, _ = model(part[:, :-1])
                loss = model.head.loss(h, part[:, 1:])
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    return perplexities(model.eval(), valid.to(device), counts.to(device))


@torch.no_grad()
def perplexities(model: LanguageModel, valid: Tensor, counts: Tensor) -> dict[str, float]:
    """Return perplexities in total and by training frequency; ten parallel streams carry the LSTM's state."""
    streams = valid[: len(valid) // 10 * 10].view(10, -1)
    state, losses = None, []
    for start in range(0, streams.shape[1] - 1, 100):
        part = streams[:, start : start + 101]
        h, state = model(part[:, :-1], state)
        losses.append(model.head.loss(h, part[:, 1:], reduction="none"))
    loss, seen = torch.cat(losses, 1), counts[streams[:, 1:]]
    buckets = {"all": seen > 0, "100+": seen >= 100, "10-99": (seen >= 10) & (seen < 100), "<10": seen < 10}
    return {name: float(loss[mask].mean().exp()) for name, mask in buckets.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3000, help="steps of the curriculum")
    parser.add_argument("--epochs", type=int, default=5, help="epochs of the language model")
    parser.add_argument("--tokens", type=int, help="use only this many words of each split")
    parser.add_argument("--max-seconds", type=float, default=480.0, help="start no further run after this long")
    parser.add_argument("--json", type=Path, required=True, help="file for the numbers, rewritten after each run")
    options = parser.parse_args()
    root = Path(os.environ["HEBBIAN_DATA"])
    images, text = omniglot(root), wikitext(root)
    text = (text[0][: options.tokens], text[1][: options.tokens], text[2])
    device = options.device
    record: dict[str, Any] = {
        "benchmark": "corrections",
        "arguments": {name: str(value) for name, value in vars(options).items() if name != "json"},
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        "torch": torch.__version__,
        "runs": [],
    }
    start = time.monotonic()
    for seed in range(options.seeds):
        for variant in VARIANTS:
            if time.monotonic() - start > options.max_seconds:
                print("time is up")
                return
            began = time.monotonic()
            reached = curriculum(images, variant, seed, options.steps, device)
            between = time.monotonic()
            words = language_model(text, variant, seed, options.epochs, device)
            seconds = {"omniglot": between - began, "wikitext-2": time.monotonic() - between}
            row = {"seed": seed, "variant": variant, "classes": reached, "perplexity": words, "seconds": seconds}
            record["runs"].append(row)
            options.json.write_text(json.dumps(record, indent=1) + "\n")
            spelled = "  ".join(f"{name} {value:,.1f}" for name, value in words.items())
            print(f"seed {seed}  {variant:14} {reached:5} classes   {spelled}   {seconds}", flush=True)


if __name__ == "__main__":
    main()
