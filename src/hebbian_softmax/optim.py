"""RMSprop and Adam that make the gradient step, the rule's write and a bfloat16 copy in one pass over the big matrix.

Torch's optimizers, the write, and the cast to bfloat16 in the next forward pass each read and write a V × d matrix.
Here, on a GPU, each row of gradient, weight and state is read once and written once. The results and the state dicts
are those of ``torch.optim.RMSprop`` and ``torch.optim.Adam``, up to rounding.

Without a GPU or Triton, and for small parameters, the steps are torch's own, and the write follows them.
"""

from __future__ import annotations

import inspect
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.rmsprop import rmsprop

from hebbian_softmax import _torch, _triton
from hebbian_softmax._torch import local_rows
from hebbian_softmax.checks import check_number
from hebbian_softmax.layer import HebbianSoftmax
from hebbian_softmax.low_precision import LowPrecisionCopy
from hebbian_softmax.write import kernels_can_write, kernels_suit, write
from hebbian_softmax.write.timing import AT_ONCE

if TYPE_CHECKING:
    from hebbian_softmax.attach.attachment import Attachment
    from hebbian_softmax.write.gpu.update import Update

__all__ = ["OnePassAdam", "OnePassRMSprop"]

_NOT_OFFERED = ("momentum", "centered", "amsgrad", "maximize", "differentiable", "decoupled_weight_decay")
"""Options of torch's optimizers that change the result, which this one lacks and a loaded state may ask for."""


class OnePass(torch.optim.Optimizer, ABC):
    """The common part of both optimizers: the step, and the head whose write is a part of the step."""

    large = 65_536
    """Parameters of fewer elements are stepped together, by torch; a kernel for each would cost more than it saves."""
    has_written = False
    """Whether the last step made the rule's write itself."""
    _head: weakref.ref[HebbianSoftmax] | None = None  # an unpickled copy has no head
    _row_step: Any = None
    _moments: tuple[str, ...]

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any], head: HebbianSoftmax | None) -> None:
        lr = defaults["lr"]
        if not isinstance(lr, Tensor):
            check_number("lr", lr, 0)
        elif lr.numel() != 1:
            raise ValueError(f"lr must be a number or a tensor of one, got shape {tuple(lr.shape)}")
        else:
            check_number("lr", float(lr), 0)
        for name in ("eps", "weight_decay"):
            check_number(name, defaults[name], 0)
        if head is not None and not isinstance(head, HebbianSoftmax):
            raise TypeError(f"head must be a HebbianSoftmax, got {type(head).__name__}")
        super().__init__(params, defaults)
        # A subclass may do more after this step and before the write, which then cannot be a part of this step.
        self._whole_step = inspect.unwrap(type(self).step) is inspect.unwrap(OnePass.step)
        if head is None:
            return
        if _torch.is_sharded(head.weight) and head.weight.device_mesh != head.row_mesh:
            raise ValueError(
                "head has a weight sharded by FSDP2, and no single pass has all of its rows; leave head out and call "
                "head.attach(optimizer)"
            )
        head.attach(self)
        head.low_precision = LowPrecisionCopy() if head.weight.dtype == torch.float32 else None
        self._head = weakref.ref(head)

    @property
    def head(self) -> HebbianSoftmax | None:
        """The head whose weight this optimizer steps and writes at once; None once it is attached elsewhere."""
        return None if (bond := self._bond()) is None else bond[0]

    def _bond(self) -> tuple[HebbianSoftmax, Attachment] | None:
        head = self._head() if self._head is not None else None
        attachment = head.attachment if head is not None else None
        if head is None or attachment is None or attachment.optimizer() is not self:
            return None
        return head, attachment

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if parameter.is_complex():
                self.param_groups.pop()
                raise TypeError(
                    f"params must be real, got {parameter.dtype}; {type(self).__name__} has no complex step"
                )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of such an optimizer or of torch's; refuse one with an option that this optimizer lacks."""
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"state_dict must be a dictionary, got {type(state_dict).__name__}")
        if not {"state", "param_groups"} <= state_dict.keys():
            raise ValueError(f"state_dict must have the keys 'state' and 'param_groups', got {sorted(state_dict)}")
        for group in state_dict["param_groups"]:
            for name in _NOT_OFFERED:
                if group.get(name):
                    raise ValueError(
                        f"state_dict has {name}={group[name]!r}, which {type(self).__name__} does not offer"
                    )
        super().load_state_dict(state_dict)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step every parameter that has a gradient, and write what is pending at the head."""
        if closure is not None and not callable(closure):
            raise TypeError(f"closure must be a function without arguments, got {type(closure).__name__}")
        self.has_written = False
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        weight = self._weight_written_here()
        for group in self.param_groups:
            for p in group["params"]:
                self._prepare(p)
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            large = [p for p in params if local_rows(p).numel() >= self.large and _triton.works_on(local_rows(p))]
            alone = {id(p) for p in (*large, weight)}
            self._step_together(group, [p for p in params if id(p) not in alone])
            for p in large:
                if p is not weight:
                    _triton.load("write.gpu.update").step_elements(local_rows(p), self._update(group, p))
            if any(p is weight for p in group["params"]):
                self._step_and_write(group)
        return loss

    def _weight_written_here(self) -> Tensor | None:
        """Return the head's weight if its step and the rule's write can be one; else the write follows the step."""
        bond = self._bond()
        if bond is None or bond[1].group() is not None or not self._whole_step:
            return None
        head, attachment = bond
        return attachment.weight if kernels_suit(head, attachment.weight) else None

    def _step_and_write(self, group: dict[str, Any]) -> None:
        bond = self._bond()
        assert bond is not None
        head, attachment = bond
        weight = attachment.weight
        taken = attachment.take(self)
        timing = AT_ONCE if taken is None else attachment.timing(head, self)
        contents = taken or []
        self.has_written = True
        update = None if weight.grad is None else self._update(group, weight)
        if update is not None and kernels_can_write(head, contents, weight):
            self._row_step = self._row_step or _triton.load("write.gpu.step").RowStep()
            self._row_step.step(head, weight, update, contents, timing)
            return
        if update is not None:
            _triton.load("write.gpu.update").step_elements(weight, update)
        if contents:
            write(head, contents, weight, None, timing)

    def _prepare(self, p: Tensor) -> None:
        """Make the state of a parameter, or bring a loaded state to the device where it is needed."""
        if p.grad is None:
            return
        if p.grad.layout != torch.strided:
            raise RuntimeError(
                f"{type(self).__name__} does not support sparse gradients; make the embedding with sparse=False"
            )
        where = p.device if p.is_cuda else torch.device("cpu")  # on the device a CUDA graph counts, too
        state = self.state[p]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=where)
            state.update({name: torch.zeros_like(p, memory_format=torch.preserve_format) for name in self._moments})
        if not isinstance(state["step"], Tensor) or state["step"].device != where:
            state["step"] = torch.as_tensor(state["step"], dtype=torch.float32, device=where)

    def _update(self, group: dict[str, Any], p: Tensor) -> Update:
        """Count the step of one parameter, and return it as the kernels take it."""
        state = self.state[p]
        state["step"] += 1
        assert p.grad is not None
        for name in self._moments:  # a loaded state may have the layout of another parameter
            state[name] = state[name].contiguous()
        mean, square = (None, *(local_rows(state[name]) for name in self._moments))[-2:]
        update: Update = _triton.load("write.gpu.update").Update(
            grad=local_rows(p.grad).contiguous(),
            mean=mean,
            square=square,
            number=state["step"],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            betas=self._betas(group),
            eps=group["eps"],
        )
        return update

    @abstractmethod
    def _betas(self, group: dict[str, Any]) -> tuple[float, float]:
        """Return β₁ and β₂; RMSprop has only the second."""

    def _step_together(self, group: dict[str, Any], params: list[Tensor]) -> None:
        """Step several parameters by torch: those on GPUs, whose steps are counted there, and the others."""
        for on_gpu in (True, False):
            some = [p for p in params if p.is_cuda == on_gpu]
            if not some:
                continue
            lr = group["lr"]
            if on_gpu and isinstance(lr, Tensor) and not lr.is_cuda:
                lr = float(lr)  # torch wants a number or a tensor on the device
            lists = {name: [local_rows(self.state[p][name]) for p in some] for name in ("step", *self._moments)}
            lists |= {"param": [local_rows(p) for p in some]}
            lists |= {"grad": [local_rows(p.grad) for p in some if p.grad is not None]}
            options = {"lr": lr, "eps": group["eps"], "weight_decay": group["weight_decay"]}
            self._call_torch(lists, self._betas(group), foreach=on_gpu, capturable=on_gpu, **options)

    @abstractmethod
    def _call_torch(self, lists: dict[str, list[Tensor]], betas: tuple[float, float], **options: Any) -> None:
        """Let torch step parameters that are given, with their gradients and states, in ``lists``."""


class OnePassRMSprop(OnePass):
    r"""``torch.optim.RMSprop`` (without momentum and centring) in one pass over each large parameter.

    Args:
        params: parameters or groups of them, as for every optimizer.
        lr: learning rate, a number or a tensor.
        alpha: decay of the mean of the squared gradient.
        eps: added to the root of that mean.
        weight_decay: weight of the L2 penalty.
        head: a :class:`HebbianSoftmax` whose weight is among ``params``. It is attached to this optimizer, and the step
            of its weight makes the rule's write, and the bfloat16 copy that ``head.loss`` uses for bfloat16
            activations.

    >>> from hebbian_softmax import HebbianSoftmax
    >>> head = HebbianSoftmax(8, 100)
    >>> optimizer = OnePassRMSprop(head.parameters(), lr=1e-3, head=head)
    >>> head.loss(torch.randn(4, 8), torch.tensor([3, 14, 15, 3])).backward()
    >>> optimizer.step()
    >>> head.counts[[3, 14, 15]].tolist()
    [2, 1, 1]
    """

    _moments = ("square_avg",)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0,
        *,
        head: HebbianSoftmax | None = None,
    ) -> None:
        check_number("alpha", alpha, 0, 1)
        super().__init__(params, {"lr": lr, "alpha": alpha, "eps": eps, "weight_decay": weight_decay}, head)

    def _betas(self, group: dict[str, Any]) -> tuple[float, float]:
        return 0.0, group["alpha"]

    def _call_torch(self, lists: dict[str, list[Tensor]], betas: tuple[float, float], **options: Any) -> None:
        params, grads, square, steps = (lists[name] for name in ("param", "grad", "square_avg", "step"))
        rmsprop(params, grads, square, [], [], steps, alpha=betas[1], momentum=0, centered=False, **options)


class OnePassAdam(OnePass):
    r"""``torch.optim.Adam`` (without AMSGrad) in one pass over each large parameter.

    ``head`` is as in :class:`OnePassRMSprop`; the other arguments are those of Adam.

    >>> from hebbian_softmax import HebbianSoftmax
    >>> head = HebbianSoftmax(8, 100)
    >>> optimizer = OnePassAdam(head.parameters(), lr=1e-3, head=head)
    >>> head.loss(torch.randn(4, 8), torch.tensor([3, 14, 15, 3])).backward()
    >>> optimizer.step()
    >>> head.counts[[3, 14, 15]].tolist()
    [2, 1, 1]
    """

    _moments = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        *,
        head: HebbianSoftmax | None = None,
    ) -> None:
        if not isinstance(betas, tuple | list) or len(betas) != 2:
            raise ValueError(f"betas must be two numbers, got {betas!r}")
        for index, beta in enumerate(betas):
            if check_number(f"betas[{index}]", beta, 0, 1) == 1:
                raise ValueError(f"betas[{index}] must be below 1, got {beta!r}")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}, head)

    def _betas(self, group: dict[str, Any]) -> tuple[float, float]:
        beta1, beta2 = group["betas"]
        return beta1, beta2

    def _call_torch(self, lists: dict[str, list[Tensor]], betas: tuple[float, float], **options: Any) -> None:
        params, grads, mean, square, steps = (lists[name] for name in ("param", "grad", *self._moments, "step"))
        options |= {"beta1": betas[0], "beta2": betas[1]}
        adam(params, grads, mean, square, [], steps, amsgrad=False, maximize=False, **options)
