"""The bond between a head and its optimizer: every real step ends with the rule's write."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from hebbian_softmax import _torch
from hebbian_softmax._triton import is_capturing
from hebbian_softmax.attach.frozen import FrozenInputs
from hebbian_softmax.attach.pending import Pending
from hebbian_softmax.attach.sharded import FsdpPending, ShardedPending
from hebbian_softmax.attach.targets import CallsInGraphs, register
from hebbian_softmax.checks import check_flag
from hebbian_softmax.distributed import check_group, resolve_group, weight_to_write
from hebbian_softmax.rule import ClassSums
from hebbian_softmax.state import ensure_filled, follow_weight
from hebbian_softmax.write import plain_copy, write
from hebbian_softmax.write.activations import Activations, Call
from hebbian_softmax.write.timing import Timing, begin_group, timing_of_step
from hebbian_softmax.write.trained import Held, hold, release

if TYPE_CHECKING:
    from hebbian_softmax.layer import HebbianSoftmax


class Attachment:
    """The handle that ``head.attach(optimizer)`` returns. ``remove()`` undoes it and forgets what is pending.

    >>> from hebbian_softmax import HebbianSoftmax
    >>> head = HebbianSoftmax(8, 100)
    >>> optimizer = torch.optim.Adam(head.parameters())
    >>> handle = head.attach(optimizer)
    >>> handle.active
    True
    >>> handle.remove()
    >>> handle.active, head.attachment
    (False, None)
    """

    def __init__(
        self, head: HebbianSoftmax, optimizer: torch.optim.Optimizer, process_group: dist.ProcessGroup | None
    ) -> None:
        weight = weight_to_write(head)
        optimizer = _check_optimizer(_unwrapped(optimizer), weight)
        _check_rows_of_state(optimizer, optimizer.state.get(weight, {}), weight)
        check_group(head, weight, process_group)
        self.weight, self.process_group = weight, process_group
        # The head owns this object, and the optimizer owns its hook. Weak references to both avoid cycles, so that a
        # large matrix is freed together with its owners.
        self._head, self.optimizer = weakref.ref(head), weakref.ref(optimizer)
        self.pending = Pending(head, weight, optimizer)
        if _torch.is_sharded(weight):
            kind = ShardedPending if weight.device_mesh == head.row_mesh else FsdpPending
            self.pending = kind(head, weight, optimizer)
        if head.fade:
            begin_group(_group_of(optimizer, weight))
        self.frozen_inputs = FrozenInputs(self.pending)
        self.calls_in_graphs = CallsInGraphs()
        register(head)
        self._warned_of_nothing = False
        # Disabled here and not by decorators, which would import torch's compiler together with the library.
        self.watch = torch.compiler.disable(self.pending.watch)
        self._hooks = [optimizer.register_step_post_hook(torch.compiler.disable(self._after_step))]
        self._hooks.append(optimizer.register_load_state_dict_pre_hook(self._before_load))
        self._held: Held | None = None
        if head.new_classes.gradients_from:
            self._hooks.append(optimizer.register_step_pre_hook(torch.compiler.disable(self._before_step)))
        self._watches_weight = False
        self._checked_for_copy = False
        self.watch_weight()

    def watch_weight(self) -> None:
        """Hook the weight's gradient as soon as the weight takes one: it may be frozen at first."""
        if self._watches_weight or not self.weight.requires_grad:
            return
        self._watches_weight = True
        if isinstance(self.pending, FsdpPending):
            # Autograd sees the gathered rows and not the shard; FSDP itself calls this hook of the shard.
            hook = self.weight.register_post_accumulate_grad_hook(_weakly(self._shard_gradient))
        else:
            hook = self.weight.register_hook(_weakly(self._weight_gradient))
        self._hooks.append(hook)

    @property
    def active(self) -> bool:
        """Whether the optimizer still exists and ``remove()`` was not called."""
        return bool(self._hooks) and self.optimizer() is not None

    def group(self) -> dist.ProcessGroup | None:
        """Return the group whose ranks form one batch; None in a single process."""
        if self.process_group is None and not (dist.is_available() and dist.is_initialized()):
            return None
        head = self._head()
        return None if head is None else resolve_group(head, self.weight, self.process_group)

    def remember(self, h: Tensor, flat: Tensor, targets: Tensor) -> None:
        """Let the gradient of ``h``, which ``flat`` is a view of, make the activations pending."""
        self.watch_weight()
        activations = plain_copy(flat, targets, Call())
        if h.grad_fn is not None:
            pending = self.pending
            h.register_hook(lambda _: pending.reach(activations))
        else:
            self.frozen_inputs.remember(h, activations)

    def remove(self) -> None:
        """Stop writing. Safe to call twice."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.pending.close()
        self.frozen_inputs.clear()
        self.calls_in_graphs = CallsInGraphs()
        head = self._head()
        if head is not None:
            head.forget(self)

    def __reduce__(self) -> tuple[type[RemovedAttachment], tuple[()]]:
        """Give copies and pickles of a model that keeps its handle a removed one."""
        return RemovedAttachment, ()

    def take(self, optimizer: torch.optim.Optimizer) -> list[Activations | ClassSums] | None:
        """Return what the running step of ``optimizer`` completes, and forget it; None where no real step is made.

        An optimizer that makes the write itself calls this within its step.
        """
        head = self._head()
        if head is None or not _torch.is_real_step(optimizer):
            return None
        if self._weight_replaced(head):
            raise RuntimeError(
                "head.weight was replaced after head.attach(optimizer), so this optimizer no longer trains it; "
                "tie, load and fully_shard first, make the optimizer, then attach"
            )
        if head.filled is not head.checked_filled and not is_capturing():  # the head was moved, or emptied
            ensure_filled(head)
        found_inf = getattr(optimizer, "found_inf", None)  # a fused optimizer skips its step where this is not 0
        if isinstance(found_inf, Tensor) and found_inf.device.type != "cpu":
            self.pending.skip_if(found_inf)
        elif isinstance(found_inf, Tensor) and bool(found_inf):
            return None
        if not self._checked_for_copy and optimizer.state.get(self.weight) and not is_capturing():
            _check_for_copy(optimizer, self.weight)
            self._checked_for_copy = True
        taken = self.pending.take()
        self._warn_of_nothing(head, taken)
        if self.frozen_inputs.waiting:
            self.frozen_inputs.forget_waiting()
        if self.calls_in_graphs.calls:
            self.calls_in_graphs.after_step()
        return taken

    def timing(self, head: HebbianSoftmax, optimizer: torch.optim.Optimizer) -> Timing:
        """Return the timing of the running step's write; a real step asks once, even if it has nothing to write."""
        return timing_of_step(_group_of(optimizer, self.weight) if head.fade else None)

    def _warn_of_nothing(self, head: HebbianSoftmax, taken: list[Activations | ClassSums]) -> None:
        """Warn once of a step with a gradient and nothing remembered: in eval mode, or if nobody said what to do."""
        if self.weight.grad is None:
            return
        pending = self.pending
        silent, in_eval = pending.gradient_came and not pending.answered and not taken, pending.in_eval
        pending.gradient_came = pending.answered = pending.in_eval = False
        if not silent or self._warned_of_nothing or not head.memorizing:
            return
        self._warned_of_nothing = True
        warnings.warn(
            "head.weight was stepped with a gradient, but nothing was remembered, so nothing is memorised; "
            + (
                "the head was in eval mode: call model.train() before training"
                if in_eval
                else "write `with head.targets(y):` around the call of the model, or compute the loss with "
                "head.loss(h, y)"
            )
            + "; head.memorizing = False says that nothing is to be memorised",
            UserWarning,
            stacklevel=_torch.user_stack_level(),
        )

    def _before_load(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        # What else is wrong with a state, torch says itself.
        with contextlib.suppress(KeyError, IndexError, TypeError, AttributeError, StopIteration):
            of_groups = zip(optimizer.param_groups, state_dict["param_groups"], strict=False)
            numbers = [each for ours, its in of_groups for each in zip(ours["params"], its["params"], strict=False)]
            number = next(number for parameter, number in numbers if parameter is self.weight)
            _check_rows_of_state(optimizer, state_dict["state"].get(number, {}), self.weight)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        head = self._head()
        self._held = None if head is None else hold(head)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        held, head = self._held, self._head()
        if held is not None and head is not None:
            release(head, held)
        if getattr(optimizer, "has_written", False):  # within this step: see hebbian_softmax.optim
            return
        taken = self.take(optimizer)
        if head is None or taken is None:
            return
        timing, group = self.timing(head, optimizer), self.group()
        if taken or group is not None or head.row_mesh is not None:
            write(head, taken, self.weight, group, timing)

    def _weight_gradient(self, grad: Tensor) -> None:
        """Note that a gradient is about to be added to ``weight.grad``."""
        self.pending.weight_gradient()
        if self.frozen_inputs.waits:
            self.frozen_inputs.weight_gradient()

    def _shard_gradient(self, weight: Tensor) -> None:
        """Note that FSDP has added a gradient to ``weight.grad``."""
        assert isinstance(self.pending, FsdpPending)
        self.pending.gradient_added()
        if self.frozen_inputs.waits:
            self.frozen_inputs.weight_gradient()

    def _weight_replaced(self, head: HebbianSoftmax) -> bool:
        now = _torch.own_parameter(head, "weight")
        if now is self.weight:
            return False
        if not _torch.is_sharded(self.weight) or now is None:
            return True
        return _torch.is_sharded(now) and now.placements == self.weight.placements  # else FSDP's gathered copy


def attach_to(
    head: HebbianSoftmax,
    optimizer: torch.optim.Optimizer,
    process_group: dist.ProcessGroup | None,
    replace: bool,
) -> Attachment:
    """Return the attachment of ``head`` to ``optimizer``, which is a new one unless the optimizer was made with it."""
    old = head.attachment
    if old is not None:
        made_with_it = getattr(optimizer, "head", None) is head and old.optimizer() is optimizer
        if old.active and made_with_it and process_group is None:
            return old
        if old.active and not check_flag("replace", replace):
            raise RuntimeError(
                "head is attached to an optimizer already; head.attach(optimizer, replace=True) lets go of the old "
                "one, and so does head.detach()"
            )
    ensure_filled(head)
    follow_weight(head, attaching=True)
    attachment = Attachment(head, optimizer, process_group)  # first: if it raises, the old one stays
    head.detach()
    return attachment


class RemovedAttachment:
    """The handle of a copy: there is nothing to remove."""

    active = False

    def remove(self) -> None:
        """Do nothing, as a second ``remove()`` does."""


def warn_unattached(attachment: Attachment | None) -> None:
    """Warn that a head which is asked to remember is not attached, or that its optimizer is gone."""
    state = "head is not attached to an optimizer" if attachment is None else "the attached optimizer no longer exists"
    warnings.warn(
        f"{state}, so nothing is memorised; keep the optimizer and call head.attach(optimizer), or pass "
        "remember=False to head.loss if this is meant",
        UserWarning,
        stacklevel=_torch.user_stack_level(),
    )


def _weakly(method: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    """Return ``method`` as a hook that does not keep its object alive."""
    reference = weakref.WeakMethod(method)

    def hook(tensor: Tensor) -> None:
        bound = reference()
        if bound is not None:
            bound(tensor)

    return hook


def _unwrapped(optimizer: Any) -> Any:
    """Return the optimizer itself, or the one inside a wrapper that has no hooks of its own.

    Those are accelerate's ``AcceleratedOptimizer``, Lightning's ``LightningOptimizer`` and the like. A wrapper with
    hooks is taken as it is, because it may change the weight after its inner optimizer's step.
    """
    while not _torch.has_step_hooks(optimizer):
        inner = getattr(optimizer, "optimizer", None)
        if inner is None or inner is optimizer:
            break
        optimizer = inner
    return optimizer


def _check_optimizer(optimizer: Any, weight: Tensor) -> torch.optim.Optimizer:
    """Return ``optimizer`` if it trains ``weight`` by steps that the write can follow."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}; give the inner optimizer "
            "of a wrapper, if it steps the model's own parameters"
        )
    if not _torch.has_step_hooks(optimizer):
        raise TypeError(
            f"optimizer {type(optimizer).__name__} has no step hooks, because its __init__ does not call that of "
            "torch.optim.Optimizer; give the optimizer that steps the parameters"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError(
            "optimizer LBFGS evaluates its closure several times a step, so a batch has no single write; any optimizer "
            "of torch.optim that computes the loss once a step can be attached"
        )
    if not any(parameter is weight for group in optimizer.param_groups for parameter in group["params"]):
        raise ValueError(
            "optimizer does not hold head.weight; make the optimizer from the parameters that are trained now "
            "(after tying, loading, moving and fully_shard), then attach. If another layer has taken the head's place "
            "(resize_token_embeddings of transformers puts a plain nn.Linear there), put the head back, grown with "
            "head.add_classes(n)"
        )
    return optimizer


def _group_of(optimizer: torch.optim.Optimizer, weight: Tensor) -> dict[str, Any]:
    """Return the parameter group that holds ``weight``."""
    return next(group for group in optimizer.param_groups if any(each is weight for each in group["params"]))


def _check_rows_of_state(optimizer: torch.optim.Optimizer, state: dict[str, Any], weight: Tensor) -> None:
    """Refuse a state of another number of classes, with which the next step would fail.

    Only of torch's own optimizers and this library's it is known what the shapes in a state mean.
    """
    if not _is_known(optimizer):
        return
    for name, value in state.items():
        # Adafactor has one number for each row, and one for each column: a single row for all classes.
        per_row = isinstance(value, Tensor) and value.dim() == 2 and value.shape[1] in (1, weight.shape[1])
        if per_row and name != "col_var" and value.shape[0] != weight.shape[0]:
            raise ValueError(
                f"the optimizer's state {name!r} has {value.shape[0]} classes and the head has {weight.shape[0]}; "
                + (
                    "load such a state before add_classes, and let add_classes(n, optimizer) grow it"
                    if value.shape[0] < weight.shape[0]
                    else "call add_classes before such a state is loaded"
                )
            )


def _is_known(optimizer: torch.optim.Optimizer) -> bool:
    return f"{type(optimizer).__module__}.".startswith(("torch.optim.", "hebbian_softmax."))


def _check_for_copy(optimizer: torch.optim.Optimizer, weight: Tensor) -> None:
    """Refuse an optimizer whose state holds the weight itself: its next step would overwrite what the rule writes.

    torch's own optimizers and this library's update the parameter in place; the copy that ASGD averages is never
    written back.
    """
    if _is_known(optimizer):
        return
    rows = _torch.local_rows(weight)
    for name, value in optimizer.state[weight].items():
        if not isinstance(value, Tensor) or value.shape != weight.shape:
            continue
        copy = _torch.local_rows(value).to(rows.dtype)
        if torch.equal(copy, rows) and bool(rows.any()):
            raise RuntimeError(
                f"{type(optimizer).__name__} keeps its own copy of the weight (state {name!r}) and would overwrite "
                "what the rule writes; attach to an optimizer that updates the parameter in place"
            )
