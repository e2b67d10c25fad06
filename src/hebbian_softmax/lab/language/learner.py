"""One language model while it learns: the network, its optimizer, and one step of both."""

import contextlib
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hebbian_softmax import OnePassAdam, OnePassRMSprop
from hebbian_softmax.attach.pending import FOLD_ROWS_ON_CUDA
from hebbian_softmax.lab.base.errors import LabError
from hebbian_softmax.lab.base.ranks import current_ranks
from hebbian_softmax.lab.base.seeds import derive_seed
from hebbian_softmax.lab.language.captured import CapturedSteps
from hebbian_softmax.lab.language.head import make_head
from hebbian_softmax.lab.language.model.lstm import WordLSTM
from hebbian_softmax.lab.language.optimizers import make_optimizer
from hebbian_softmax.lab.language.settings import Settings
from hebbian_softmax.write import kernels_suit


def make_model(settings: Settings, vocabulary: int, *, hebbian: bool, device: torch.device) -> WordLSTM:
    """Equal seeds give equal first weights, whatever the head."""
    torch.manual_seed(derive_seed(settings.seed, "weights"))
    sizes = settings.sizes
    model = WordLSTM(
        make_head(settings, vocabulary),
        memorizes=hebbian,
        hidden=sizes.hidden,
        layers=sizes.layers,
        input_dropout=settings.input_dropout,
        tied=settings.tied == "yes",
        layer_norm=settings.layer_norm,
        precision=choose_precision(settings.precision, device),
    )
    return model.to(device)


def choose_precision(name: str, device: torch.device) -> torch.dtype:
    half = name == "bf16" or (name == "auto" and device.type == "cuda")
    return torch.bfloat16 if half else torch.float32


def _own_buffers() -> dict[str, Any]:
    """All buffers are the head's, which makes them equal on all ranks itself; torch 2.13 has a new name for it."""
    new = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    return {"forward_sync_buffers" if new else "broadcast_buffers": False}


class Learner:
    """The ranks of a process group share each batch: the loss and the step are those of one process on all of it."""

    def __init__(self, settings: Settings, vocabulary: int, *, hebbian: bool, device: torch.device) -> None:
        self.ranks, self.clip, self.accumulate = current_ranks(), settings.clip, settings.accumulate
        parts = self.ranks.count * self.accumulate
        if settings.sizes.batch % parts:
            raise LabError(
                f"a batch of {settings.sizes.batch} sequences cannot be shared by {self.ranks.count} processes in "
                f"{self.accumulate} parts each: give --batch a multiple of {parts}"
            )
        self.model = make_model(settings, vocabulary, hebbian=hebbian, device=device)
        self.optimizer = make_optimizer(
            settings.optimizer,
            self.model,
            learning_rate=settings.sizes.learning_rate,
            momentum=settings.momentum,
            weight_decay=settings.weight_decay,
            alone=self.ranks.count == 1,
        )
        self.captured = CapturedSteps() if self._capturable(settings) else None
        self._parallel: nn.Module = self.model
        if self.ranks.count > 1:
            self._parallel = DistributedDataParallel(self.model, gradient_as_bucket_view=True, **_own_buffers())

    def step(self, words: Tensor, learning_rate: float, memorizing: bool) -> Tensor:
        """One optimizer step on (length + 1, columns) words; the value is the mean loss, over all ranks.

        Nothing here waits for the device. On one GPU a step is captured as a CUDA graph after the first few.
        """
        self.model.head.memorizing = memorizing
        if self.captured is None:
            return self.take(words, learning_rate)
        self.optimizer.zero_grad()  # a capture has memory of its own, and could not use that of old gradients
        loss = self.captured(self.take, words, learning_rate, memorizing)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate  # a number again, for checkpoints
        return loss

    def take(self, words: Tensor, learning_rate: float | Tensor) -> Tensor:
        """A step, launched kernel by kernel."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.zero_grad()
        losses = []
        parts = words.chunk(self.accumulate, dim=1)
        for number, part in enumerate(parts, start=1):
            with self._own_gradients() if number < len(parts) else contextlib.nullcontext():
                loss = self._parallel(part[:-1], part[1:])
                (loss if len(parts) == 1 else loss / len(parts)).backward()
            losses.append(loss.detach())
        if self.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        return self.ranks.mean(torch.stack(losses).mean() if len(losses) > 1 else losses[0])

    def _capturable(self, settings: Settings) -> bool:
        """Whether a CUDA graph can hold a step: nothing in it waits for the device, and its numbers are tensors."""
        head = self.model.head
        return (
            kernels_suit(head, head.weight)  # else the write waits
            and settings.sizes.batch * settings.sizes.sequence <= FOLD_ROWS_ON_CUDA  # folding waits
            and self.ranks.count == 1
            and not torch.are_deterministic_algorithms_enabled()  # a resumed run would begin with other kernels
            and isinstance(self.optimizer, OnePassAdam | OnePassRMSprop)  # whose learning rate may be a tensor
        )

    def _own_gradients(self) -> contextlib.AbstractContextManager[None]:
        """Ranks exchange gradients once a step, with its last part."""
        if isinstance(self._parallel, DistributedDataParallel):
            return self._parallel.no_sync()  # type: ignore[no-any-return, unused-ignore]
        return contextlib.nullcontext()

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.captured is not None:
            self.captured.forget()  # the optimizer has other tensors now
