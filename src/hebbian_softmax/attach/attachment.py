"""The bond between a head and its optimizer: every real step ends with the rule's write."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from hebbian_softmax.attach.activations import Activations, Call, own_copy
from hebbian_softmax.attach.pending import Pending
from hebbian_softmax.attach.sharded import ShardedPending
from hebbian_softmax.attach.watch import FrozenInputs, watch_loss
from hebbian_softmax.distributed import check_group, is_sharded, local_rows, resolve_group, weight_to_write
from hebbian_softmax.rule import ClassSums
from hebbian_softmax.write.gpu.inspect import copied
from hebbian_softmax.write.in_torch import class_sums, write

if TYPE_CHECKING:
    from hebbian_softmax.layer import HebbianSoftmax


class Attachment:
    """What ``head.attach(optimizer)`` returns. ``remove()`` undoes it and forgets what is pending."""

    def __init__(
        self,
        head: HebbianSoftmax,
        optimizer: torch.optim.Optimizer,
        process_group: dist.ProcessGroup | None,
    ) -> None:
        weight = weight_to_write(head)
        _check_optimizer(optimizer, weight)
        check_group(weight, process_group)
        self.weight, self.process_group = weight, process_group
        # The head owns this object, and the optimizer its hook: weak references keep both free of cycles, so that
        # a large matrix goes when its owners do.
        self._head, self.optimizer = weakref.ref(head), weakref.ref(optimizer)
        self.pending = (
            ShardedPending(weight, partial(_fold, self._head))
            if is_sharded(weight)
            else Pending(weight, partial(_fold, self._head), partial(_copied, self._head))
        )
        self.frozen_inputs = FrozenInputs(self.pending)
        # Disabled here and not by decorators: that would import torch's compiler with the library.
        self.watch = torch.compiler.disable(partial(watch_loss, pending=self.pending))
        self._hooks = [optimizer.register_step_post_hook(torch.compiler.disable(self._after_step))]
        self._watches_weight = False
        self._checked_for_copy = False
        self.watch_weight()

    def watch_weight(self) -> None:
        """Hook the weight's gradient, as soon as it takes one: a weight may be frozen at first."""
        if self._watches_weight or not self.weight.requires_grad:
            return
        self._watches_weight = True
        if is_sharded(self.weight):
            # Autograd sees the gathered rows and not the shard; FSDP calls this hook of the shard itself.
            hook = self.weight.register_post_accumulate_grad_hook(_weakly(self._shard_gradient))
        else:
            hook = self.weight.register_hook(_weakly(self._weight_gradient))
        self._hooks.append(hook)

    @property
    def active(self) -> bool:
        """Whether the optimizer still exists and ``remove()`` was not called."""
        return bool(self._hooks) and self.optimizer() is not None

    def group(self) -> dist.ProcessGroup | None:
        return resolve_group(self.weight, self.process_group)

    def remove(self) -> None:
        """Stop writing. Safe to call twice."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.pending.close()
        self.frozen_inputs.clear()
        head = self._head()
        if head is not None:
            head.forget(self)

    def __reduce__(self) -> tuple[type[RemovedAttachment], tuple[()]]:
        """Copies and pickles of a model that keeps its handle have a removed one."""
        return RemovedAttachment, ()

    def _weight_gradient(self, grad: Tensor) -> None:
        """A gradient is about to be added to ``weight.grad``."""
        self.pending.weight_gradient()
        self.frozen_inputs.weight_gradient()

    def _shard_gradient(self, weight: Tensor) -> None:
        """FSDP has added a gradient to ``weight.grad``."""
        assert isinstance(self.pending, ShardedPending)
        self.pending.gradient_added()
        self.frozen_inputs.weight_gradient()

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        head = self._head()
        if head is None or not _ends_a_real_step(optimizer):
            return
        taken = self.take(optimizer)
        group = self.group()
        if taken or (group is not None and not _found_inf_on_cpu(optimizer)):
            write(head, taken, self.weight, group)

    def take(self, optimizer: torch.optim.Optimizer) -> list[Activations | ClassSums]:
        """What the step of ``optimizer`` that is running completes; nothing is pending afterwards.

        An optimizer that makes the write itself calls this within its step.
        """
        head = self._head()
        if head is None or not _ends_a_real_step(optimizer):
            return []
        if self._weight_replaced(head):
            raise RuntimeError(
                "head.weight was replaced after head.attach(optimizer), so this optimizer no longer trains it; "
                "tie, load and fully_shard first, make the optimizer, then attach"
            )
        if _found_inf_on_cpu(optimizer):
            return []
        found_inf = getattr(optimizer, "found_inf", None)
        if isinstance(found_inf, Tensor) and found_inf.device.type != "cpu":
            self.pending.skip_if(found_inf)
        if not self._checked_for_copy and optimizer.state.get(self.weight) and not _is_capturing():
            _check_for_copy(optimizer, self.weight)
            self._checked_for_copy = True
        return self.pending.take()

    def _weight_replaced(self, head: HebbianSoftmax) -> bool:
        now = head._parameters.get("weight")
        if now is self.weight:
            return False
        if not is_sharded(self.weight) or now is None:
            return True
        return is_sharded(now) and now.placements == self.weight.placements  # else FSDP's gathered copy


class RemovedAttachment:
    """The handle of a copy: there is nothing to remove."""

    active = False

    def remove(self) -> None:
        """Do nothing, as a second ``remove()`` does."""


def _fold(head: weakref.ref[HebbianSoftmax], contents: list[Activations | ClassSums]) -> ClassSums | None:
    owner = head()
    return None if owner is None else class_sums(owner, contents).folded()  # a loss may outlive it


def _copied(head: weakref.ref[HebbianSoftmax], h: Tensor, targets: Tensor, call: Call) -> Activations:
    owner = head()
    return own_copy(h, targets, call) if owner is None else copied(owner, h, targets, call)


def _weakly(method: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    """``method`` as a hook that does not keep its object alive."""
    reference = weakref.WeakMethod(method)

    def hook(tensor: Tensor) -> None:
        bound = reference()
        if bound is not None:
            bound(tensor)

    return hook


def _check_optimizer(optimizer: torch.optim.Optimizer, weight: Tensor) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}; give the inner optimizer "
            "of a wrapper, if it steps the model's own parameters"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError("optimizer LBFGS evaluates its closure several times a step, so a batch has no single write")
    if not any(parameter is weight for group in optimizer.param_groups for parameter in group["params"]):
        raise ValueError(
            "optimizer does not hold head.weight; make the optimizer from the parameters that are trained now "
            "(after tying, loading, moving and fully_shard), then attach"
        )


def _check_for_copy(optimizer: torch.optim.Optimizer, weight: Tensor) -> None:
    """Refuse an optimizer whose state holds the weight itself: its next step would overwrite what the rule writes.

    torch's own optimizers and ours update the parameter in place; the copy that ASGD averages is never written back.
    """
    if type(optimizer).__module__.startswith(("torch.optim.", "hebbian_softmax.")):
        return
    rows = local_rows(weight)
    for name, value in optimizer.state[weight].items():
        if not isinstance(value, Tensor) or value.shape != weight.shape:
            continue
        copy = local_rows(value).to(rows.dtype)
        if torch.equal(copy, rows) and bool(rows.any()):
            raise RuntimeError(
                f"{type(optimizer).__name__} keeps its own copy of the weight (state {name!r}) and would overwrite "
                "what the rule writes; attach to an optimizer that updates the parameter in place"
            )


def _found_inf_on_cpu(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a fused optimizer skipped its step; on a GPU, where that is not read back, what is pending is masked."""
    found_inf = getattr(optimizer, "found_inf", None)
    return isinstance(found_inf, Tensor) and found_inf.device.type == "cpu" and bool(found_inf)


def _is_capturing() -> bool:
    """Whether a CUDA graph is being recorded, which nothing may be read back in."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _ends_a_real_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the step that just ended is neither a dummy nor a part of a larger one; seen from who called it.

    torch.distributed.checkpoint makes a step of zero gradients to create the optimizer's state, perhaps on one rank
    only. And a ``step`` that calls ``super().step()`` may run the hooks within, with more to do after them.
    """
    steps = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name, module = frame.f_code.co_name, frame.f_globals.get("__name__")
        if name == "_init_optim_state" and module == "torch.distributed.checkpoint.state_dict":
            return False
        if name == "wrapper" and module == "torch.optim.optimizer":
            steps += frame.f_locals.get("args", (None,))[0] is optimizer
        frame = frame.f_back
    return steps <= 1
