"""A head whose rows are shared by ranks that see the same batch: its layout, its loss and its logits.

The ranks that share the rows (row ranks) are another group than the ranks that share the batch. Each row rank holds a
contiguous part of the weight and of the bias, as DTensors placed ``Shard(0)``. FSDP2 gives the same placement to rows
that it gathers for every loss; therefore the head notes the mesh of its row ranks as ``head.row_mesh``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hebbian_softmax._torch import is_sharded, local_rows, own_parameter
from hebbian_softmax.checks import check_weight
from hebbian_softmax.distributed import check_rows_at_hand, fsdp_modules, live_modules, wrapped_by_ddp
from hebbian_softmax.loss.api import check_targets, cross_entropy, decisive
from hebbian_softmax.loss.checks import Options
from hebbian_softmax.loss.dtypes import wide
from hebbian_softmax.loss.graphs import outside_of_graphs
from hebbian_softmax.loss.soft import soft_loss
from hebbian_softmax.rows import RowPart

if TYPE_CHECKING:
    from hebbian_softmax.layer import HebbianSoftmax


def shard_rows(head: HebbianSoftmax, mesh: DeviceMesh) -> None:
    """Share the rows of ``head`` among the ranks of a 1-D ``mesh``, which are then given the same batches.

    Call it first: before ``fully_shard``, before the optimizer is made and before ``head.attach``. The weight and the
    bias become DTensors of which each rank holds a contiguous part; a part may be smaller than others, or empty. Counts
    and running values stay whole on every rank. All values are those that the first rank of the mesh has.

    ``mesh`` is a mesh of its own or a dimension of a larger one, such as ``mesh["rows"]`` of
    ``init_device_mesh("cuda", (4, 2), mesh_dim_names=("batch", "rows"))``. The model may then be sharded over the other
    dimension with ``fully_shard(model, mesh=mesh["batch"])``.

    >>> from hebbian_softmax import HebbianSoftmax
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # under torchrun: no arguments
    >>> head = HebbianSoftmax(8, 100)
    >>> shard_rows(head, dist.init_device_mesh("cpu", (1,)))
    >>> optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    >>> handle = head.attach(optimizer)
    >>> head.loss(torch.randn(4, 8), torch.tensor([3, 14, 15, 3])).backward()
    >>> optimizer.step()
    >>> head.counts[[3, 14, 15]].tolist()
    [2, 1, 1]
    >>> dist.destroy_process_group()
    """
    from torch.distributed.tensor import Shard, distribute_tensor

    _check_sharing(head, mesh)
    group = mesh.get_group()
    first = dist.get_process_group_ranks(group)[0]
    with torch.no_grad():
        for name in ("weight", "bias"):
            whole = own_parameter(head, name)
            if whole is not None:
                part = distribute_tensor(whole.detach(), mesh, [Shard(0)])
                setattr(head, name, nn.Parameter(part, requires_grad=whole.requires_grad))
        for buffer in head.buffers():
            if not buffer.is_meta:
                dist.broadcast(buffer, first, group=group)
    head.row_mesh = mesh


def _check_sharing(head: HebbianSoftmax, mesh: DeviceMesh) -> None:
    """Refuse what cannot be shared, and a call that comes too late."""
    if not hasattr(head, "row_mesh"):
        raise TypeError(f"head must be a HebbianSoftmax, got {type(head).__name__}")
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a DeviceMesh, got {type(mesh).__name__}")
    if mesh.ndim != 1:
        raise ValueError(
            f"mesh must have one dimension, the ranks that share the rows, got {mesh.ndim}; give a part of it, such as "
            'mesh["rows"]'
        )
    if mesh.get_coordinate() is None:
        raise ValueError(f"mesh does not have this rank, {dist.get_rank()}; give a mesh that does")
    late = "call shard_rows first, then fully_shard, make the optimizer, and attach"
    if head.row_mesh is not None:
        raise RuntimeError("the rows of this head are shared already; shard_rows can be called once")
    if head.attachment is not None:
        raise RuntimeError(f"head is attached to an optimizer, which would train the old parameters; {late}")
    weight = own_parameter(head, "weight")
    if fsdp_modules(head) or (weight is not None and is_sharded(weight)):
        raise RuntimeError(f"weight is sharded already; {late}")
    if weight is None or not weight.is_meta:
        weight = check_weight(head)
        if weight.device.type != mesh.device_type:
            raise ValueError(
                f"mesh is of {mesh.device_type} devices and the head on {weight.device}; move the head first"
            )
    if wrapped_by_ddp(weight):
        raise RuntimeError(f"head is inside DistributedDataParallel, which does not take DTensors; {late}")
    sharers = [each for each in live_modules() if each is not head and own_parameter(each, "weight") is weight]
    if sharers:
        raise ValueError(
            f"weight is shared with {type(sharers[0]).__name__}, which would keep the whole matrix; shared rows cannot "
            "be tied, so give the head a weight of its own"
        )


@outside_of_graphs()
def shared_loss(
    h: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, options: Options, copy: Tensor | None
) -> Tensor:
    """Return the loss of activations (N, features) that all row ranks have alike; it is the same on all of them.

    ``copy`` is that of the rows of this rank. For probabilities as targets the logits of all classes are gathered: the
    probabilities are as many.
    """
    part, rows = RowPart.of(weight), local_rows(weight)
    own_bias = None if bias is None else local_rows(bias)
    soft = targets.is_floating_point()
    with part.agreement(h) as alike:
        alike += decisive(h, rows, own_bias), options.decisive(), soft
        if not soft:
            check_targets(targets, options, part.total)
    if not soft:
        return cross_entropy(h, rows, targets, own_bias, options, zero_if_empty=True, copy=copy, part=part)
    logits = _logits(h, weight, bias)
    return soft_loss(logits.to(wide(logits.dtype)), targets, options)


@outside_of_graphs()
def gathered_logits(head: HebbianSoftmax, h: Tensor) -> Tensor:
    """Return the logits of all classes, (..., classes), for activations that all row ranks have alike.

    Each rank computes those of its rows and gets the others. In the backward pass, where all ranks have the same
    gradient of the logits, each takes that of its own, and the gradients of the activations are added up.
    """
    check_rows_at_hand(head, head.weight, h)
    return _logits(h, head.weight, head.bias)


def _logits(h: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    assert is_sharded(weight)
    mesh = weight.device_mesh
    shared = DTensor.from_local(h, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])
    part = F.linear(shared, weight.to_local(), None if bias is None else local_rows(bias))
    shape = torch.Size((*part.shape[:-1], weight.shape[0]))
    stride = torch.empty(shape, device="meta").stride()
    placed = DTensor.from_local(part, mesh, [Shard(part.dim() - 1)], run_check=False, shape=shape, stride=stride)
    return placed.full_tensor().clone()  # a view would lose FSDP's hooks when it is changed in place


@outside_of_graphs()
def same_dropout(head: HebbianSoftmax, h: Tensor) -> Tensor:
    """Return ``F.dropout`` of activations with the mask of the first row rank on all of them."""
    if not head.training or head.dropout == 0:
        return h
    assert head.row_mesh is not None
    kept, group = F.dropout(torch.ones_like(h), head.dropout).ne(0).byte(), head.row_mesh.get_group()
    dist.broadcast(kept, dist.get_process_group_ranks(group)[0], group=group)
    return h * kept * (0 if head.dropout == 1 else 1 / (1 - head.dropout))
