"""Each function of ``hebbian_softmax._torch`` against the installed torch."""

from __future__ import annotations

import inspect
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from hebbian_softmax import _torch
from tests.heads import early_head


def in_backward(ask: Any, **how: Any) -> list[Any]:
    """Return what ``ask`` says within a backward pass."""
    found: list[Any] = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: found.append(ask()))
    y.sum().backward(**how)
    return found


def test_backward_passes_have_numbers() -> None:
    assert _torch.current_backward() == _torch.NO_BACKWARD
    first, second = in_backward(_torch.current_backward), in_backward(_torch.current_backward)
    assert first != second
    assert _torch.NO_BACKWARD not in first + second


def test_callbacks_come_after_the_backward_pass() -> None:
    order: list[str] = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    x.register_post_accumulate_grad_hook(lambda _: order.append("gradient"))
    y.register_hook(lambda _: _torch.call_after_backward(lambda: order.append("callback")))
    y.sum().backward()
    assert order == ["gradient", "callback"]


def test_a_backward_pass_that_raises_calls_no_callback() -> None:
    called: list[int] = []

    def fail(grad: Tensor) -> None:
        _torch.call_after_backward(lambda: called.append(1))
        raise ZeroDivisionError

    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        y.sum().backward()
    assert not called


@pytest.mark.parametrize("kept", [False, True])
def test_whether_the_graph_is_kept(kept: bool) -> None:
    assert in_backward(_torch.backward_keeps_graph, retain_graph=kept) == [kept]


def test_versions_count_changes_in_place() -> None:
    x = torch.zeros(2)
    before = _torch.version(x)
    x.add_(1)
    assert _torch.version(x) == before + 1


def test_transforms_of_torch_func() -> None:
    seen: list[bool] = []
    torch.func.vmap(lambda x: (seen.append(_torch.is_transforming()), x)[1])(torch.ones(2))
    assert seen == [True]
    assert not _torch.is_transforming()


def test_samples_of_vmap() -> None:
    seen: list[bool] = []

    def note(x: Tensor) -> Tensor:
        seen.append(_torch.is_vmapped(x))
        return x.sum()

    x = torch.ones(2, 3)
    note(x)
    torch.func.grad(note)(x)
    assert seen == [False, False]
    torch.func.vmap(note)(x)
    torch.func.vmap(torch.func.grad(note))(x)
    torch.func.grad(lambda x: torch.func.vmap(note)(x).sum())(x)
    assert seen[2:] == [True, True, True]


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_export_is_told_from_compile() -> None:
    class Asking(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1 if _torch.is_exporting() else x

    x = torch.zeros(2)
    assert torch.equal(torch.compile(Asking(), backend="eager")(x), x)
    assert torch.equal(torch.export.export(Asking(), (x,)).module()(x), x + 1)


def test_forward_mode() -> None:
    assert not _torch.is_in_forward_mode()
    with forward_ad.dual_level():
        assert _torch.is_in_forward_mode()


def test_fake_tensors() -> None:
    with FakeTensorMode():
        assert _torch.is_fake(torch.zeros(2))
    assert not _torch.is_fake(torch.zeros(2))


def test_batched_gradients() -> None:
    seen: list[bool] = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: seen.append(_torch.is_batched(grad)))
    torch.autograd.grad(y, x, torch.eye(2), is_grads_batched=True, retain_graph=True)
    torch.vmap(lambda v: torch.autograd.grad(y, x, v, retain_graph=True))(torch.eye(2))
    torch.autograd.grad(y, x, torch.ones(2))
    assert seen == [True, True, False]


def test_assertions_on_the_device() -> None:
    _torch.assert_on_device(torch.tensor(True), "holds")
    with pytest.raises(RuntimeError, match="does not hold"):
        _torch.assert_on_device(torch.tensor(False), "does not hold")


def test_what_the_cpu_multiplies() -> None:
    assert all(type(_torch.cpu_multiplies(dtype)) is bool for dtype in (torch.bfloat16, torch.float16))


def test_a_modules_own_parameters() -> None:
    linear = nn.Linear(2, 3)
    assert _torch.own_parameter(linear, "weight") is linear.weight
    assert _torch.own_parameter(nn.Module.__new__(nn.Module), "weight") is None
    assert _torch.own_parameter(parametrizations.weight_norm(linear), "weight") is None


class Asking(torch.optim.SGD):
    """Notes in its step whether that is a real one."""

    def step(self, closure: Any = None) -> None:
        super().step()
        self.answers = [*getattr(self, "answers", []), _torch.is_real_step(self)]


class Nested(Asking):
    def step(self, closure: Any = None) -> None:
        super().step()


def test_step_hooks() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)])
    bare = torch.optim.SGD.__new__(torch.optim.SGD)
    assert [_torch.has_step_hooks(each) for each in (optimizer, bare, None)] == [True, False, False]


def test_the_context_of_a_reentrant_checkpoint() -> None:
    found = []

    def function(x: torch.Tensor) -> torch.Tensor:
        found.append(_torch.reentrant_checkpoint())
        return x * x

    x = torch.ones(2, requires_grad=True)
    function(x)
    checkpoint(function, x, use_reentrant=True).sum().backward()
    checkpoint(function, x, use_reentrant=False).sum().backward()
    alone, first, again, *others = found
    assert alone is None
    assert first is again is not None
    assert others == [None, None]


def test_the_line_of_the_user() -> None:
    with pytest.warns(UserWarning, match="not attached") as caught:
        early_head(2, 3, gamma=0.1, limit=9).loss(torch.ones(1, 2), torch.tensor([1]))
    assert caught[0].filename == __file__


def test_real_and_nested_steps() -> None:
    optimizers = [kind([torch.zeros(1, requires_grad=True)], lr=0.1) for kind in (Asking, Nested)]
    for optimizer in optimizers:
        optimizer.step()
    assert [optimizer.answers for optimizer in optimizers] == [[True], [False]]


def test_the_dummy_step_of_a_checkpoint() -> None:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model = nn.Linear(2, 2)
    optimizer = Asking(model.parameters(), lr=0.1)
    get_optimizer_state_dict(model, optimizer)
    assert optimizer.answers == [False]


def test_modules_of_torch_distributed_are_not_imported() -> None:
    program = """
import sys, torch
from hebbian_softmax import HebbianSoftmax, _torch
assert not _torch.is_sharded(torch.zeros(2))
assert _torch.local_rows(torch.ones(2)).sum() == 2
assert _torch.fsdp_class() is None
assert "torch.distributed.tensor" not in sys.modules
assert "torch.distributed.fsdp" not in sys.modules
assert "torch._dynamo" not in sys.modules
assert "triton" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_class_of_sharded_modules() -> None:
    """Sharded tensors themselves need several processes: see ``tests/distributed/test_training.py``."""
    from torch.distributed.fsdp import FSDPModule, fully_shard

    assert _torch.fsdp_class() in (None, FSDPModule)
    assert "FSDPModule" in inspect.getsource(sys.modules[fully_shard.__module__])


def test_the_first_row_of_a_shard() -> None:
    """Several parts need several processes: see ``tests/distributed/test_rows.py``."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    assert list(inspect.signature(compute_local_shape_and_global_offset).parameters)[:3] == [
        "global_shape",
        "mesh",
        "placements",
    ]


def test_what_modules_override() -> None:
    assert list(inspect.signature(nn.Module._apply).parameters) == ["self", "fn", "recurse"]
    assert list(inspect.signature(nn.Module._load_from_state_dict).parameters)[:3] == ["self", "state_dict", "prefix"]
