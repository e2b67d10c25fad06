"""One language model while it learns: the network with its head, the optimizer, and one step of all of them."""

import contextlib
import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hebbian_softmax import HebbianSoftmax, OnePassAdam, OnePassRMSprop
from hebbian_softmax.attach.pending import FOLD_ROWS_ON_CUDA
from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.base.ranks import current_ranks
from hebbian_softmax.lab.base.rule import make_rate, number_of
from hebbian_softmax.lab.base.seeds import derive_seed
from hebbian_softmax.lab.language.model import MODELS, Carried, LanguageModel
from hebbian_softmax.lab.language.settings import Settings
from hebbian_softmax.write import kernels_suit

SECOND_MOMENT = 0.999  # Adam's β₂; RMSprop keeps torch's own 0.99
WARM_UP = 3
"""Steps before a CUDA graph is captured: in them kernels are loaded, optimizers make their state and cuDNN chooses."""


def make_model(settings: Settings, vocabulary: int, *, hebbian: bool, device: torch.device) -> LanguageModel:
    """Return a new model. Equal seeds give equal first weights, whichever head it has."""
    torch.manual_seed(derive_seed(settings.seed, "weights"))
    head = HebbianSoftmax(  # a plain softmax is a head of the same class that is given nothing to remember
        settings.sizes.embedding,
        vocabulary,
        gamma=settings.gamma,
        limit=number_of(settings.limit),
        rate=make_rate(settings.rate, settings.gamma, settings.limit),
        dropout=0.0 if settings.locked_dropout else settings.output_dropout,  # the model has a locked one
        objective=settings.objective,
        scale="match" if settings.rule_scale == "match" else float(settings.rule_scale),
        write=settings.write,
        start=settings.start if hebbian else 0,
        fade=settings.fade,
    )
    precision = choose_precision(settings.precision, device)
    return MODELS[settings.model](head, settings.network, memorizes=hebbian, precision=precision).to(device)


def choose_precision(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype that `--precision` stands for on this device."""
    half = name == "bf16" or (name == "auto" and device.type == "cuda")
    return torch.bfloat16 if half else torch.float32


def make_optimizer(settings: Settings, model: LanguageModel, *, alone: bool) -> torch.optim.Optimizer:
    """Return the optimizer of all parameters, with the head attached if the model memorises.

    A one-pass optimizer keeps a bfloat16 copy of the weight, also for a plain head. If several processes train
    together (not `alone`), an attached head exchanges class counts at every step; a plain head is not attached then.
    """
    name, rate = settings.optimizer, settings.sizes.learning_rate
    momentum, weight_decay = settings.momentum, settings.weight_decay
    if momentum and name == "one-pass-rmsprop":
        raise LabError("one-pass-rmsprop has no momentum: omit --momentum, or use --optimizer rmsprop")
    parameters, betas = list(model.parameters()), (momentum, SECOND_MOMENT)
    head = model.head if model.memorizes or alone else None
    fused = model.head.weight.is_cuda
    optimizer: torch.optim.Optimizer
    match name:
        case "one-pass-adam":
            optimizer = OnePassAdam(parameters, rate, betas, weight_decay=weight_decay, head=head)
        case "one-pass-rmsprop":
            optimizer = OnePassRMSprop(parameters, rate, weight_decay=weight_decay, head=head)
        case "adam":
            optimizer = torch.optim.Adam(parameters, rate, betas, weight_decay=weight_decay, fused=fused)
        case "rmsprop":
            optimizer = torch.optim.RMSprop(parameters, rate, momentum=momentum, weight_decay=weight_decay)
        case _:
            optimizer = torch.optim.SGD(parameters, rate, momentum=momentum, weight_decay=weight_decay, fused=fused)
    if model.memorizes:
        model.head.attach(optimizer)
    return optimizer


@contextlib.contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Make torch use algorithms whose results do not depend on timing; an operation that has none raises an error.

    The rule's own kernels and the fused loss are always deterministic.
    """
    if not wanted:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS and cuDNN's LSTM read it when they start
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


class Learner:
    """A model and its optimizer.

    The processes of a group share each batch: the loss and the step are those of one process on the whole batch.
    """

    def __init__(self, settings: Settings, vocabulary: int, *, hebbian: bool, device: torch.device) -> None:
        self.ranks, self.clip, self.accumulate = current_ranks(), settings.clip, settings.accumulate
        parts = self.ranks.count * self.accumulate
        if settings.sizes.batch % parts:
            raise LabError(
                f"a batch of {settings.sizes.batch} sequences cannot be shared by {self.ranks.count} processes in "
                f"{self.accumulate} parts each: give --batch a multiple of {parts}"
            )
        self.model = make_model(settings, vocabulary, hebbian=hebbian, device=device)
        self.carried = self._first_states(settings) if settings.carry else None
        """The states that the next step begins with, one for each part of the batch."""
        self.optimizer = make_optimizer(settings, self.model, alone=self.ranks.count == 1)
        self.captured = CapturedSteps() if self._capturable(settings) else None
        self._parallel: Any = self.model
        if self.ranks.count > 1:
            self._parallel = DistributedDataParallel(self.model, gradient_as_bucket_view=True, **_own_buffers())

    def _first_states(self, settings: Settings) -> list[Carried]:
        if self.ranks.count > 1:
            raise LabError("--carry trains in one process, because a checkpoint has the state of one: omit torchrun")
        states = [self.model.first_state(settings.sizes.batch // self.accumulate) for _ in range(self.accumulate)]
        if None in states:
            raise LabError(f"the state of --model {settings.model} cannot be carried: omit --carry, or change --model")
        return cast(list[Carried], states)

    def begin_text(self) -> None:
        """Let the next step begin without words before it."""
        for tensor in _tensors(self.carried):
            tensor.zero_()

    def step(self, words: Tensor, learning_rate: float) -> Tensor:
        """Take one optimizer step on words (length + 1, columns); return the mean loss over all processes.

        Nothing here waits for the device. On a single GPU a step is captured as a CUDA graph after the first few.
        """
        if self.captured is None:
            return self.take(words, learning_rate)
        self.optimizer.zero_grad()  # a capture has its own memory and could not use that of old gradients
        loss = self.captured(self.take, words, learning_rate, self.model.head.memorizing)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate  # a number again, for checkpoints
        return loss

    def take(self, words: Tensor, learning_rate: float | Tensor) -> Tensor:
        """Take a step, launching its kernels one by one."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.zero_grad()
        losses = []
        parts = words.chunk(self.accumulate, dim=1)
        for number, part in enumerate(parts, start=1):
            # The processes exchange gradients once a step, with its last part.
            later = number < len(parts) and isinstance(self._parallel, DistributedDataParallel)
            with self._parallel.no_sync() if later else contextlib.nullcontext():
                state = () if self.carried is None else (self.carried[number - 1],)
                loss = self._parallel(part[:-1], part[1:], *state)
                (loss if len(parts) == 1 else loss / len(parts)).backward()
            losses.append(loss.detach())
            if self.carried is not None:  # only now, because the backward pass needs what the state was
                for kept, reached in zip(_tensors(state), _tensors([self.model.reached]), strict=True):
                    kept.copy_(reached.detach())
                self.model.reached = None
        if self.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        return self.ranks.mean(torch.stack(losses).mean() if len(losses) > 1 else losses[0])

    def _capturable(self, settings: Settings) -> bool:
        """Return whether a CUDA graph can hold a step: no part of it waits for the device, its numbers are tensors."""
        head = self.model.head
        return (
            kernels_suit(head, head.weight)  # otherwise the write waits
            and settings.sizes.batch * settings.sizes.sequence <= FOLD_ROWS_ON_CUDA  # otherwise folding waits
            and self.ranks.count == 1
            and not torch.are_deterministic_algorithms_enabled()  # a resumed run would begin with other kernels
            and isinstance(self.optimizer, OnePassAdam | OnePassRMSprop)  # their learning rate may be a tensor
        )

    def state_dict(self) -> dict[str, Any]:
        carried = {} if self.carried is None else {"carried": _tensors(self.carried)}
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), **carried}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        for kept, loaded in zip(_tensors(self.carried), state.get("carried", []), strict=True):
            kept.copy_(loaded)
        if self.captured is not None:
            self.captured.forget()  # the optimizer has other tensors now


def _tensors(states: Sequence[Carried] | None) -> list[Tensor]:
    return [tensor for state in states or () for layer in state for tensor in layer]


def _own_buffers() -> dict[str, Any]:
    """Keep DistributedDataParallel from copying buffers: all of them are the head's, which keeps them equal itself.

    torch 2.13 has a new name for the argument.
    """
    new = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    return {"forward_sync_buffers" if new else "broadcast_buffers": False}


Take = Callable[[Tensor, Tensor], Tensor]
"""Takes a step on words (length + 1, columns) with a learning rate, and returns the loss."""


class CapturedSteps:
    """Steps as replays of one CUDA graph, because a small model's launches take the host longer than the device's work.

    The first steps are taken as usual; the next one is captured and replayed from then on. The tensors that a step
    reads or writes besides its arguments must stay where they are, or `forget` must be called. Dropout is drawn anew:
    a replay takes the generator's seed at that time.
    """

    _words: Tensor
    _rate: Tensor
    _loss: Tensor

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Start over with usual steps, because some tensor has moved."""
        self._graph: torch.cuda.CUDAGraph | None = None
        self._like: tuple[torch.Size, bool] | None = None
        self._before = 0

    def __call__(self, take: Take, words: Tensor, learning_rate: float, memorizing: bool) -> Tensor:
        """Take a step and return its loss. A capture holds for one shape of `words` and one value of `memorizing`.

        `take` is an argument and not kept, because it belongs to the learner that owns this object.
        """
        like = words.shape, memorizing
        if self._like != like:  # the step has other kernels now, and they must be loaded before they are captured
            self.forget()
            self._like = like
            self._words, self._rate = torch.empty_like(words), torch.empty((), device=words.device)
        self._words.copy_(words)
        self._rate.fill_(learning_rate)
        side = _side_stream(words.device)
        if self._before < WARM_UP:
            self._before += 1
            here = torch.cuda.current_stream(words.device)
            side.wait_stream(here)
            with torch.cuda.stream(side):
                loss = take(self._words, self._rate)
            here.wait_stream(side)
            return loss
        if self._graph is None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
                self._loss = take(self._words, self._rate)
            self._graph = graph
        self._graph.replay()
        return self._loss.clone()


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the one stream of first steps and captures, because libraries keep memory for every stream."""
    return torch.cuda.Stream(device)
