"""New tokens for causal language models of transformers, whose output rows are good from the start.

``add_tokens`` reads texts once and writes the output rows of new tokens from what enters the output layer where they
come next. The model stays a plain model of transformers. ``MemorizeWhileTraining`` goes on writing while it is
fine-tuned. Needs the extra ``hf``.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hebbian_softmax.attach.targets import Targets
from hebbian_softmax.calibration import NewClasses, check_new_classes
from hebbian_softmax.checks import check_integer
from hebbian_softmax.layer import HebbianSoftmax
from hebbian_softmax.loss import linear_cross_entropy

try:
    from transformers import AddedToken, PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback
except ImportError as error:
    raise ImportError("hebbian_softmax.hf needs transformers: pip install 'hebbian-softmax[hf]'") from error

_BUCKETS = ((0, 0), (1, 1), (2, 3), (4, 15), (16, 63), (64, None))


@dataclass(frozen=True)
class Report:
    """What ``add_tokens`` has done, measured on text that the rows were not written from."""

    bits_before: float
    """Bits per character of the held-out text with the model and the tokenizer as they were."""
    bits_after: float
    old_before: float
    """Nats per token of the held-out text before."""
    old_after: float
    """Nats per token whose target is not a new token, after."""
    new_after: dict[str, tuple[int, int, float]]
    """For each range of counts in the texts: new tokens, their occurrences in the held-out text, and nats for each."""
    counts: dict[str, int]
    """How often each new token occurs in the texts that rows were written from."""
    untied: bool
    """Whether input embedding and output layer were one matrix before, and are two now."""
    limit: int
    new_classes: NewClasses
    memory: dict[str, Tensor] = field(repr=False)
    """The head's buffers, with which ``MemorizeWhileTraining`` goes on."""

    @property
    def unseen(self) -> list[str]:
        """The tokens that do not occur in the texts; their rows are as unlikely as those of the least likely token."""
        return [token for token, count in self.counts.items() if count == 0]

    def __str__(self) -> str:
        lines = [
            f"held-out text: {self.bits_before:.4f} bits per character before, {self.bits_after:.4f} after",
            f"old tokens: {self.old_before:.3f} nats before, {self.old_after:.3f} after",
        ]
        for name, (tokens, occurrences, nats) in self.new_after.items():
            shown = f"{nats:.3f} nats" if occurrences else "none in the held-out text"
            lines.append(f"new tokens seen {name}: {tokens} of them, {shown}")
        if self.untied:
            lines.append("input embedding and output layer were tied, and are two matrices now")
        return "\n".join(lines)


def add_tokens(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tokens: Sequence[str | AddedToken],
    texts: Sequence[str],
    *,
    held_out: Sequence[str] | float = 0.1,
    length: int = 512,
    batch_size: int = 8,
    pad_to_multiple_of: int | None = None,
    new_classes: NewClasses | None = None,
    limit: int = 1000,
    calibrate_on: int = 20_000,
) -> Report:
    """Add tokens to a causal language model and its tokenizer; write their rows from texts that they occur in.

    The output row of a new token is written from the activations where it comes next; see
    :mod:`hebbian_softmax.calibration`. Its input row is the mean of the rows of the tokens that it was split into. A
    token that does not occur in the texts gets an output row that makes it very unlikely. A good output row is no good
    input row, so the output layer of a tied model becomes a matrix of its own, and the configuration says so.

    ::

        model, tokenizer = AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
        report = add_tokens(model, tokenizer, [" zebra", " flamingo"], texts)
        print(report)

    Args:
        model: a causal language model of transformers with a plain output layer, on one device.
        tokenizer: its tokenizer, which gets the tokens.
        tokens: the new tokens, of which the tokenizer knows none. ``" word"`` is a word with the space before it; the
            tokenizer finds it in ``" words"``, too.
        texts: running texts, which are read once.
        held_out: texts for the report, or the share of the characters at the end of ``texts`` that are kept for it.
        length: the number of tokens that the model sees at once.
        batch_size: the number of such pieces in a call of the model.
        pad_to_multiple_of: as in ``resize_token_embeddings``; rows without a token are made very unlikely.
        new_classes: settings of the write.
        limit: T; ``MemorizeWhileTraining`` leaves tokens seen more often than this to gradient descent.
        calibrate_on: how many activations the head looks at to know their logits.
    """
    contents = _check_tokens(tokenizer, tokens)
    output = _check_model(model, tokenizer)
    settings = check_new_classes(new_classes)
    check_integer("length", length, 2)
    for name, value in (("batch_size", batch_size), ("calibrate_on", calibrate_on), ("limit", limit)):
        check_integer(name, value, 1)
    if pad_to_multiple_of is not None:
        check_integer("pad_to_multiple_of", pad_to_multiple_of, 1)
    texts, tests = _divided(_check_texts("texts", texts), held_out)
    _check_logits(model, tokenizer, texts[0])
    tied = _input_rows(model) is output.weight
    parts = [tokenizer(content, add_special_tokens=False).input_ids for content in contents]
    before = _Reader(model, tokenizer, length, batch_size)
    old_nats = before.nats(tests)
    old = len(tokenizer)

    tokenizer.add_tokens(list(tokens))
    _resize(model, len(tokenizer), pad_to_multiple_of)
    _start_input_rows(model, parts, old)
    if tied:
        _untie(model)
    head = _head_of_old_rows(_output_of(model), old, limit, settings)
    head.add_classes(_output_of(model).weight.shape[0] - old)
    reader = _Reader(model, tokenizer, length, batch_size)
    _memorize(head, reader, texts, calibrate_on)
    _put_rows(_output_of(model), head, old)

    nats, targets = reader.nats(tests)
    is_new = targets >= old
    counts = head.counts[old : old + len(contents)].tolist()
    characters = sum(map(len, tests)) * math.log(2)
    return Report(
        bits_before=float(old_nats[0].sum()) / characters,
        bits_after=float(nats.sum()) / characters,
        old_before=float(old_nats[0].mean()),
        old_after=float(nats[~is_new].mean()),
        new_after=_by_count(counts, nats[is_new], targets[is_new] - old),
        counts=dict(zip(contents, counts, strict=True)),
        untied=tied,
        limit=limit,
        new_classes=settings,
        memory={name: value for name, value in head.state_dict().items() if name not in ("weight", "bias")},
    )


class MemorizeWhileTraining(TrainerCallback):
    """A callback of the Trainer that goes on writing the rows of new tokens while a model is fine-tuned.

    Make it before the Trainer, which has to load checkpoints into the head::

        report = add_tokens(model, tokenizer, tokens, texts)
        trainer = Trainer(model, ..., callbacks=[MemorizeWhileTraining(model, report)])

    While training, the model's output layer is a ``HebbianSoftmax`` with the same parameters, and labels are taken from
    the model's inputs. At the end of training the output layer is a plain one again.

    Args:
        model: the model that tokens were added to.
        report: what ``add_tokens`` has returned.
        options: other options of ``HebbianSoftmax``, as ``new_classes=NewClasses(gradients_from=2)``.
    """

    def __init__(self, model: PreTrainedModel, report: Report, **options: Any) -> None:
        linear, state = model.get_output_embeddings(), report.memory
        if linear.weight.shape[0] != state["counts"].shape[0]:
            raise ValueError(
                f"the output layer has {linear.weight.shape[0]} rows and the report is of {state['counts'].shape[0]}; "
                "give the model that the tokens were added to"
            )
        usual: dict[str, Any] = {"limit": report.limit, "fade": False, "new_classes": report.new_classes}
        self.head = HebbianSoftmax.from_linear(linear, **usual | options)
        own = {"weight": linear.weight} | ({} if linear.bias is None else {"bias": linear.bias})
        self.head.load_state_dict({name: value.detach().clone() for name, value in (own | state).items()})
        self._model = model
        self._context: Targets | None = None
        model.set_output_embeddings(self.head)
        self._hooks: list[Any] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Attach the head to the optimizer, and follow the labels that the model is given."""
        if args.label_smoothing_factor:
            raise ValueError(
                "with label_smoothing_factor the Trainer keeps the labels from the model, so nothing could be "
                "memorised; set it to 0, or train without MemorizeWhileTraining"
            )
        if self._model.get_output_embeddings() is not self.head:
            raise RuntimeError(
                "the output layer of the model is no longer the head of this callback, because a training has ended; "
                "make a new MemorizeWhileTraining and a new Trainer"
            )
        self.head.attach(kwargs["optimizer"], replace=True)
        self._hooks = [
            self._model.register_forward_pre_hook(self._open, with_kwargs=True),
            self._model.register_forward_hook(self._close, always_call=True),
        ]

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Let go of the optimizer, and give the model a plain output layer."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.head.detach()
        self._model.set_output_embeddings(self.head.to_linear())

    def _open(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        labels = kwargs.get("labels")
        if model.training and labels is not None:
            self._context = self.head.targets(labels, shift=True)
            self._context.__enter__()

    def _close(self, model: nn.Module, args: Any, output: Any) -> None:
        context, self._context = self._context, None
        if context is not None:
            context.__exit__(None, None, None)


class _CapturedError(Exception):
    """Ends a call of the model once the input of its output layer is known."""


class _Reader:
    """What reads texts with a model: the input of its output layer, and the token after each position."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, length: int, batch_size: int
    ) -> None:
        self.model, self.tokenizer, self.length, self.batch_size = model, tokenizer, length, batch_size

    @torch.no_grad()
    def read(self, texts: Sequence[str]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield activations (N, features) and targets (N,); every token but the first of a text is a target once."""
        output, device = _output_of(self.model), _input_rows(self.model).device
        captured: list[Tensor] = []

        def capture(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            captured.append(inputs[0])
            raise _CapturedError

        training, handle = self.model.training, output.register_forward_pre_hook(capture)
        self.model.eval()
        try:
            pieces = sorted(self._pieces(texts), key=len)  # so that pieces of a batch are about equally long
            starts = torch.arange(0, len(pieces), self.batch_size)
            mixed = torch.randperm(len(starts), generator=torch.Generator().manual_seed(0))  # the head sees all kinds
            for start in starts[mixed].tolist():
                batch = pieces[start : start + self.batch_size]
                longest = max(map(len, batch))
                ids = torch.zeros(len(batch), longest, dtype=torch.int64)
                mask = torch.zeros_like(ids)
                for i, piece in enumerate(batch):
                    ids[i, : len(piece)], mask[i, : len(piece)] = torch.tensor(piece), 1
                with contextlib.suppress(_CapturedError):
                    self.model(input_ids=ids.to(device), attention_mask=mask.to(device), use_cache=False)
                h = captured.pop()[:, :-1]
                real = mask[:, 1:].bool().to(h.device)
                yield h[real], ids[:, 1:].to(h.device)[real]
        finally:
            handle.remove()
            self.model.train(training)

    def nats(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return the loss of each target of the texts, and the targets."""
        output, found = _output_of(self.model), []
        for h, targets in self.read(texts):
            with torch.no_grad():
                loss = linear_cross_entropy(h, output.weight, targets, linear_bias=output.bias, reduction="none")
            found.append((loss.double().cpu(), targets.cpu()))
        if not found:
            raise ValueError("the held-out text has no two tokens in a row; give more text")
        return torch.cat([loss for loss, _ in found]), torch.cat([targets for _, targets in found])

    def _pieces(self, texts: Sequence[str]) -> Iterator[list[int]]:
        for text in texts:
            ids = self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids
            for start in range(0, len(ids) - 1, self.length - 1):  # the last token of a piece is the first of the next
                yield ids[start : start + self.length]


def _check_tokens(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str | AddedToken]) -> list[str]:
    """Return the contents of new tokens; refuse those that cannot be added."""
    if isinstance(tokens, str) or not all(isinstance(each, str | AddedToken) for each in tokens):
        raise TypeError("tokens must be a list of strings or of transformers.AddedToken")
    contents = [str(token) for token in tokens]
    if not contents or not all(content.strip() for content in contents):
        raise ValueError(f"tokens must be at least one, and none of them empty, got {contents!r:.200}")
    if len(set(contents)) < len(contents):
        twice = sorted({content for content in contents if contents.count(content) > 1})
        raise ValueError(f"tokens has some twice: {', '.join(map(repr, twice[:5]))}")
    special = [str(token) for token in tokens if isinstance(token, AddedToken) and token.special]
    if special:
        raise ValueError(
            f"tokens has special tokens, {', '.join(map(repr, special[:5]))}, which do not come from text; add them "
            "with tokenizer.add_special_tokens and train their rows"
        )
    known = set(tokenizer.get_vocab())
    parts = [tokenizer(each, add_special_tokens=False).input_ids for each in contents]
    empty = [content for content, ids in zip(contents, parts, strict=True) if not ids]
    if empty:
        raise ValueError(f"the tokenizer makes nothing of the tokens {', '.join(map(repr, empty[:5]))}; leave them out")
    there = [
        content
        for content, ids in zip(contents, parts, strict=True)
        if content in known or (len(ids) == 1 and ids[0] != tokenizer.unk_token_id)
    ]
    if there:
        raise ValueError(f"tokens are in the tokenizer already: {', '.join(map(repr, there[:5]))}; leave them out")
    return contents


def _check_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> nn.Linear:
    """Return the output layer of a model whose rows can be written."""
    output = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    if output is None:
        raise TypeError(f"model must be a language model of transformers with an output layer, got {type(model)}")
    places = {str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()}
    if len(places) > 1 or places & {"disk", "meta"}:
        raise ValueError(
            f"model is spread over {sorted(places)} by device_map; load it on one device, add the tokens, save it, and "
            "load that"
        )
    if type(output) is not nn.Linear or not output.weight.is_floating_point():
        raise ValueError(
            f"the output layer is {type(output).__name__} in {output.weight.dtype}; a quantised layer cannot be "
            "written: add the tokens to the model before it is quantised"
        )
    if not _input_rows(model).is_floating_point():
        raise ValueError("the input embedding is quantised; add the tokens to the model before it is quantised")
    config: Any = model.config
    if config.is_encoder_decoder:
        raise ValueError("model has an encoder and a decoder; tokens can be added to causal language models only")
    if output.weight.shape[0] < len(tokenizer):
        raise ValueError(
            f"the output layer has {output.weight.shape[0]} rows and the tokenizer {len(tokenizer)} tokens; is it that "
            "of the model?"
        )
    return output


@torch.no_grad()
def _check_logits(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    """Refuse a model that makes its logits of something else than the output layer alone: scaled, capped or masked."""
    found: list[Tensor] = []
    training, handle = model.training, _output_of(model).register_forward_hook(lambda *call: found.append(call[2]))
    ids = torch.tensor([tokenizer(text, add_special_tokens=False).input_ids[:8]], device=_input_rows(model).device)
    model.eval()
    try:
        logits = model(input_ids=ids, use_cache=False).logits
    finally:
        handle.remove()
        model.train(training)
    if len(found) != 1 or found[0].shape != logits.shape or not torch.equal(found[0].float(), logits.float()):
        raise ValueError(
            "model changes the logits of its output layer, or has several, so that rows cannot be written for them; "
            "train the rows of new tokens instead"
        )


def _check_texts(name: str, texts: Sequence[str]) -> list[str]:
    if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
        raise TypeError(f"{name} must be a list of strings")
    found = [text for text in texts if text.strip()]
    if not found:
        raise ValueError(f"{name} must have some text, got {len(texts)} empty ones")
    return found


def _divided(texts: list[str], held_out: Sequence[str] | float) -> tuple[list[str], list[str]]:
    """Return the texts to read, and those for the report."""
    if not isinstance(held_out, int | float):
        return texts, _check_texts("held_out", held_out)
    if not 0 < held_out < 1:
        raise ValueError(f"held_out must be texts, or a share in (0, 1), got {held_out}")
    missing, kept, tests = math.ceil(held_out * sum(map(len, texts))), list(texts), []
    while missing > 0 and kept:
        text = kept.pop()
        cut = max(0, text.rfind(" ", 0, max(0, len(text) - missing)))
        if cut > 0:
            kept.append(text[:cut])
        tests.append(text[cut:])
        missing -= len(text) - cut
    if not kept:
        raise ValueError("texts are too short to hold some of them out; give held_out= texts of its own")
    return kept, tests


def _output_of(model: PreTrainedModel) -> nn.Linear:
    output = model.get_output_embeddings()
    assert isinstance(output, nn.Linear)
    return output


def _input_rows(model: PreTrainedModel) -> Tensor:
    rows = model.get_input_embeddings().weight
    assert isinstance(rows, Tensor)
    return rows


def _resize(model: PreTrainedModel, tokens: int, pad_to_multiple_of: int | None) -> None:
    """Give a model rows for all tokens; one that has rows to spare keeps them."""
    rows = max(tokens, _output_of(model).weight.shape[0])
    if rows > _output_of(model).weight.shape[0] or pad_to_multiple_of is not None:
        model.resize_token_embeddings(rows, pad_to_multiple_of=pad_to_multiple_of, mean_resizing=False)


@torch.no_grad()
def _start_input_rows(model: PreTrainedModel, parts: list[list[int]], old: int) -> None:
    rows = _input_rows(model)
    for i, ids in enumerate(parts):
        rows[old + i] = rows[ids].float().mean(0).to(rows.dtype)


def _untie(model: PreTrainedModel) -> None:
    """Give the output layer of a tied model a matrix of its own, and say so in the configuration."""
    output = _output_of(model)
    output.weight = nn.Parameter(output.weight.detach().clone(), requires_grad=output.weight.requires_grad)
    config: Any = model.config
    config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
    model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=True)


def _head_of_old_rows(output: nn.Linear, old: int, limit: int, settings: NewClasses) -> HebbianSoftmax:
    """Return a head, in float32, with the rows that the model had."""
    linear = nn.Linear(output.in_features, old, bias=output.bias is not None, device=output.weight.device)
    with torch.no_grad():
        linear.weight.copy_(output.weight[:old])
        if output.bias is not None:
            linear.bias.copy_(output.bias[:old])
    return HebbianSoftmax.from_linear(linear, limit=limit, new_classes=settings)


def _memorize(head: HebbianSoftmax, reader: _Reader, texts: list[str], calibrate_on: int) -> None:
    """Let the head see enough activations first, and then memorise all."""
    waiting: list[tuple[Tensor, Tensor]] = []
    seen = 0
    for h, targets in reader.read(texts):
        if seen < calibrate_on:
            waiting.append((h.float(), targets))
            seen += len(h)
            if seen < calibrate_on:
                continue
            _memorize_first(head, waiting)
            continue
        head.memorize(h.float(), targets)
    if seen < calibrate_on:
        if not waiting:
            raise ValueError("texts have no two tokens in a row; give more text")
        _memorize_first(head, waiting)


def _memorize_first(head: HebbianSoftmax, waiting: list[tuple[Tensor, Tensor]]) -> None:
    h, targets = (torch.cat(each) for each in zip(*waiting, strict=True))
    head.calibrate(h)
    head.memorize(h, targets)
    waiting.clear()


@torch.no_grad()
def _put_rows(output: nn.Linear, head: HebbianSoftmax, old: int) -> None:
    """Copy the new rows; those that were not seen are as unlikely as any, those without a token included."""
    assert head.calibration is not None
    row, constant = head.calibration.unseen(head.weight[:old], head.bias, head.new_classes)
    unseen = head.counts[old:] == 0
    rows = torch.where(unseen.unsqueeze(1), row.to(head.weight.dtype), head.weight[old:])
    output.weight[old:] = rows.to(output.weight.dtype)
    if output.bias is not None and head.bias is not None:
        biases = torch.where(unseen, constant.to(head.bias.dtype), head.bias[old:])
        output.bias[old:] = biases.to(output.bias.dtype)


def _by_count(counts: list[int], nats: Tensor, which: Tensor) -> dict[str, tuple[int, int, float]]:
    """Return for each range of counts the number of tokens, their occurrences, and the mean of their ``nats``."""
    seen, found = torch.tensor(counts), {}
    for low, high in _BUCKETS:
        inside = (seen >= low) & (seen <= (math.inf if high is None else high))
        mine = nats[inside[which]]
        name = f"{low} or more times" if high is None else f"{low} times" if low == high else f"{low}–{high} times"
        if bool(inside.any()):
            found[name] = (int(inside.sum()), len(mine), float(mine.mean()) if len(mine) else math.nan)
    return found
