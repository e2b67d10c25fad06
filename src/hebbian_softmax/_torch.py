"""Every use of torch's private API in this library, one named function each.

A new version of torch can break only what is listed here; ``tests/test_torch_private.py`` tries each function against
the installed torch. All of them were seen to work with torch 2.11 and 2.13.

Two private methods of ``nn.Module`` cannot be wrapped in a function, because modules override them:
``_load_from_state_dict`` (:class:`HebbianSoftmax`, :class:`RunningStatistics`) and ``_apply``
(:class:`RunningStatistics`). They were seen on the same versions, and the same test file tries them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

NO_BACKWARD = -1
"""The number that :func:`current_backward` returns outside of backward passes."""


def current_backward() -> int:
    """Return the number of the backward pass that runs on this thread, or ``NO_BACKWARD``.

    It tells apart the passes that bring a gradient to the head. Uses ``torch._C._current_graph_task_id`` (torch 2.11
    and 2.13).
    """
    number: int = torch._C._current_graph_task_id()
    return number


def call_after_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the backward pass that runs now has ended; a pass that raises does not call it.

    Activations become pending in such a callback. Uses ``Variable._execution_engine.queue_callback`` (torch 2.11 and
    2.13).
    """
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(callback)


def backward_keeps_graph() -> bool:
    """Return whether the backward pass that runs now keeps its graph, so that saved tensors are needed again.

    The loss scales its saved gradients in place where they are not. Uses
    ``torch._C._autograd._get_current_graph_task_keep_graph`` (torch 2.11 and 2.13); without it the answer is True,
    which is always safe.
    """
    ask = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if ask is None else bool(ask())


def version(tensor: Tensor) -> int:
    """Return how often ``tensor`` was changed in place, as autograd counts it; inference tensors have no count.

    It tells whether a gradient, a weight or an activation is still what it was. Uses ``Tensor._version`` (torch 2.11
    and 2.13).
    """
    return tensor._version


def is_transforming() -> bool:
    """Return whether a transform of torch.func runs, whose tensors are wrappers without memory.

    Uses ``torch._C._are_functorch_transforms_active`` (torch 2.11 and 2.13).
    """
    return bool(torch._C._are_functorch_transforms_active())


def is_vmapped(tensor: Tensor) -> bool:
    """Return whether ``tensor`` stands for one example of a batch in ``torch.func.vmap``, so its values cannot be read.

    A transform inside of another one wraps the tensors of the outer one. Uses ``is_functorch_wrapped_tensor``,
    ``is_batchedtensor`` and ``get_unwrapped`` of ``torch._C._functorch`` (torch 2.11 and 2.13).
    """
    if not is_transforming():
        return False
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_batchedtensor(tensor):
            return True
        tensor = functorch.get_unwrapped(tensor)
    return False


def is_exporting() -> bool:
    """Return whether torch.export traces; ``torch.compiler.is_exporting`` of torch 2.11 says so in torch.compile, too.

    Uses ``torch.compiler._is_exporting_flag`` (torch 2.11 and 2.13).
    """
    return bool(torch.compiler._is_exporting_flag)


def is_in_forward_mode() -> bool:
    """Return whether a ``forward_ad.dual_level`` is open, in which tensors can have tangents.

    Uses ``torch.autograd.forward_ad._current_level`` (torch 2.11 and 2.13).
    """
    return forward_ad._current_level >= 0


def is_fake(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is a FakeTensor, which has a shape and no values.

    Uses ``torch._subclasses.fake_tensor`` (torch 2.11 and 2.13), which ``import torch`` has imported already.
    """
    return isinstance(tensor, FakeTensor)


def is_batched(tensor: Tensor) -> bool:
    """Return whether ``tensor`` stands for several, as gradients do under ``is_grads_batched=True`` and in ``vmap``.

    Uses ``torch._C._dispatch_keys`` and ``torch._C._dispatch_key_parse`` (torch 2.11 and 2.13).
    """
    keys = torch._C._dispatch_keys(tensor)
    return any(keys.has(torch._C._dispatch_key_parse(name)) for name in ("Batched", "FuncTorchBatched"))


def assert_on_device(condition: Tensor, message: str) -> None:
    """Fail on the device if ``condition`` is false, without waiting for the device.

    Uses ``torch._assert_async`` (torch 2.11 and 2.13).
    """
    torch._assert_async(condition, message)


def cpu_multiplies(dtype: torch.dtype) -> bool:
    """Return whether this CPU has instructions for matrix products in ``dtype``, which is bfloat16 or float16.

    Uses ``torch.cpu._is_avx512_bf16_supported`` and ``torch.ops.mkldnn._is_mkldnn_fp16_supported`` (torch 2.11 and
    2.13).
    """
    if dtype == torch.bfloat16:
        return bool(torch.cpu._is_avx512_bf16_supported())
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def own_parameter(module: nn.Module, name: str) -> Tensor | None:
    """Return the parameter that ``module`` itself holds as ``name``; None where a parametrization computes it.

    Also works on a module whose ``__init__`` has not run. Uses ``nn.Module._parameters`` (torch 2.11 and 2.13).
    """
    parameters: dict[str, Tensor | None] = module.__dict__.get("_parameters", {})
    return parameters.get(name)


def reentrant_checkpoint() -> Any:
    """Return the context of the reentrant checkpoint in which the caller runs, be it forward or repeated; None if none.

    It is the object that the backward pass of the checkpoint gets, too, so what is kept there lives as long as the
    graph. Found among the callers: ``forward`` and ``backward`` of ``CheckpointFunction`` in ``torch.utils.checkpoint``
    have it as ``ctx`` (torch 2.11 and 2.13).
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        where = frame.f_globals.get("__name__"), frame.f_code.co_qualname.partition(".")[0]
        if where == ("torch.utils.checkpoint", "CheckpointFunction"):
            return frame.f_locals["ctx"]
        frame = frame.f_back
    return None


def user_stack_level() -> int:
    """Return the ``stacklevel`` for a warning of the caller that names the user's own line."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in ("torch", "hebbian_softmax", "contextlib"):
            break
        level, frame = level + 1, frame.f_back
    return level


def has_step_hooks(optimizer: object) -> bool:
    """Return whether ``optimizer`` can call hooks after its steps; wrappers that skip Optimizer.__init__ cannot.

    Uses ``Optimizer._optimizer_step_post_hooks`` (torch 2.11 and 2.13).
    """
    return isinstance(optimizer, torch.optim.Optimizer) and "_optimizer_step_post_hooks" in optimizer.__dict__


def is_real_step(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the running step of ``optimizer`` is neither a dummy nor a part of a larger step.

    torch.distributed.checkpoint makes a step with zero gradients to create the optimizer's state, perhaps on one rank
    only. And the step of a subclass that calls ``super().step()`` may run the step hooks inside, with more to do after
    them. Both are recognised by the functions that called this one: ``_init_optim_state`` in
    ``torch.distributed.checkpoint.state_dict``, and ``wrapper`` in ``torch.optim.optimizer`` with the optimizer as its
    first argument, once for each nested step (torch 2.11 and 2.13).
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


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Return whether ``tensor`` is a DTensor, whose rows are spread over ranks.

    Does not import ``torch.distributed.tensor``: a DTensor exists only where that module is in ``sys.modules`` already
    (torch 2.11 and 2.13).
    """
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_rows(weight: Tensor) -> Tensor:
    """Return the rows that this process holds, of a DTensor or of a plain tensor; writing to them writes to ``weight``.

    Under ``no_grad`` they are the memory of the DTensor itself (torch 2.11 and 2.13).
    """
    return weight.to_local() if is_sharded(weight) else weight


def first_row(weight: DTensor) -> int:
    """Return the index of the first row that this rank holds.

    Uses ``compute_local_shape_and_global_offset`` of ``torch.distributed.tensor._utils`` (torch 2.11 and 2.13), which
    knows the parts of ``fully_shard`` on a weight that is sharded already.
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
    return offset[0]


def fsdp_class() -> type[FSDPModule] | None:
    """Return the class of the modules given to ``fully_shard``; None where ``fully_shard`` was never called.

    Does not import ``torch.distributed.fsdp``. ``fully_shard`` makes a subclass of ``FSDPModule`` for each class of
    module that it is given (torch 2.11 and 2.13).
    """
    module = sys.modules.get("torch.distributed.fsdp")
    if module is None or not module.FSDPModule.__subclasses__():
        return None
    found: type[FSDPModule] = module.FSDPModule
    return found
