"""One batch over many processes: class sums joined over ranks, rows sharded over ranks.

With DDP every rank holds all rows and sees a part of the batch; with FSDP2 it also holds only a part of the rows.
Either way all ranks first agree on the classes seen and their counts, then on the sums of those classes that are
written (λ > 0), and each rank writes the rows it holds. Every rank takes part in every exchange, even if it has nothing
to add. In a single process nothing of this module takes part in a training step.

With ``shard_rows`` (see ``shared_rows.py``) the ranks of a second group share the rows and see the same batch, so class
sums are joined over the other ranks only.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hebbian_softmax._torch import first_row, fsdp_class, is_sharded
from hebbian_softmax.checks import check_weight
from hebbian_softmax.objectives import needs_whole_matrix
from hebbian_softmax.rule import ClassSums

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    from hebbian_softmax.layer import HebbianSoftmax

_REPLACED = (
    "weight was replaced by a plain tensor after shard_rows, as DistributedDataParallel with device_mesh= does it; "
    'wrap only the rest of the model in DDP, and use fully_shard(head, mesh=mesh["batch"]) for the head'
)


def prepare_fsdp(head: HebbianSoftmax) -> None:
    """Let ``head.loss`` gather the sharded rows: call after ``fully_shard(head)``, before ``head.attach``.

    A head inside a sharded root (``fully_shard(model)`` only, as tied weights need) gathers its rows with the root and
    does not need this.

    >>> from hebbian_softmax import HebbianSoftmax
    >>> from torch.distributed.fsdp import fully_shard
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # under torchrun: no arguments
    >>> head = fully_shard(HebbianSoftmax(8, 100), mesh=dist.init_device_mesh("cpu", (1,)))
    >>> prepare_fsdp(head)
    >>> optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    >>> handle = head.attach(optimizer)
    >>> head.loss(torch.randn(4, 8), torch.tensor([3, 14, 15, 3])).backward()
    >>> optimizer.step()
    >>> head.counts[[3, 14, 15]].tolist()
    [2, 1, 1]
    >>> dist.destroy_process_group()
    """
    from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

    if not isinstance(head, FSDPModule):
        raise TypeError("prepare_fsdp needs a head that fully_shard(head) was called on")
    register_fsdp_forward_method(head, "loss")


def check_rows_at_hand(head: HebbianSoftmax, weight: Tensor, h: Tensor) -> None:
    """Raise an error that names the cause if a loss would be computed with rows that are not all that it needs."""
    if head.row_mesh is not None and is_sharded(h):
        raise TypeError("h must be a plain tensor, equal on all ranks that share the rows, got a DTensor")
    if not is_sharded(weight):
        raise ValueError(_REPLACED)
    if not is_sharded(h) and weight.device_mesh != head.row_mesh:
        raise RuntimeError(
            "head.weight is sharded here; after fully_shard(head) call prepare_fsdp(head), and call loss on a head "
            "sharded with its model within that model's forward"
        )


def weight_to_write(head: HebbianSoftmax) -> nn.Parameter:
    """Return the parameter that the rule writes: all rows, or this rank's shard. Refuse other layouts."""
    sharders = fsdp_modules(head)
    for module in sharders:
        module.reshard()  # a forward without backward leaves a gathered copy of the rows in place of the shard
    weight = check_weight(head)
    if head.row_mesh is not None and not is_sharded(weight):
        raise ValueError(_REPLACED)
    if weight.shape != (head.num_classes, head.in_features):
        raise ValueError(
            f"weight has shape {tuple(weight.shape)}; tied to this head it must have "
            f"{(head.num_classes, head.in_features)}, one row for each class"
        )
    if is_sharded(weight):
        _check_sharding(head, weight, by_fsdp=bool(sharders))
    return weight


def _check_sharding(head: HebbianSoftmax, weight: DTensor, by_fsdp: bool) -> None:
    from torch.distributed.tensor import Shard

    placements, mesh = weight.placements, weight.device_mesh
    if head.row_mesh is None:
        known = by_fsdp and placements == (Shard(0),)
    elif not by_fsdp:
        known = placements == (Shard(0),) and mesh == head.row_mesh
    else:  # torch stripes the rows of a rank that shares them: the first placement is a _StridedShard
        known = mesh.ndim == 2 and getattr(placements[0], "dim", None) == 0 and placements[1] == Shard(0)
    if not known:
        raise ValueError(
            f"weight is laid out as {placements} on a {mesh.ndim}-D mesh{'' if by_fsdp else ', not by fully_shard'}; "
            "the rule works with fully_shard on a 1-D mesh, which gives (Shard(dim=0),), with shard_rows(head, mesh), "
            "and with fully_shard on a 1-D mesh after shard_rows"
        )
    if needs_whole_matrix(head.objective):
        raise ValueError(
            f"objective {head.objective!r} looks at rows of other classes, which a sharded weight does not have "
            'at hand; use objective="l2" or "ip" with FSDP and shard_rows, or any objective with DDP'
        )
    if head.row_mesh is not None and by_fsdp and _leaves_a_rank_without_rows(weight.shape[0], head.row_mesh.size()):
        raise ValueError(
            f"{weight.shape[0]} classes leave one of {head.row_mesh.size()} ranks without rows, which fully_shard does "
            "not take; share the rows among fewer ranks"
        )


def _leaves_a_rank_without_rows(classes: int, ranks: int) -> bool:
    return -(-classes // ranks) * (ranks - 1) >= classes


def fsdp_modules(head: nn.Module) -> list[FSDPModule]:
    """Return the modules given to ``fully_shard`` that ``head`` is part of."""
    kind = fsdp_class()
    if kind is None:
        return []
    if isinstance(head, kind):
        return [head]
    return [module for module in live_modules() if isinstance(module, kind) and head in module.modules()]


def live_modules() -> Iterator[nn.Module]:
    """Iterate over every module of this process: a module does not know the modules that it is part of."""
    # type(), not isinstance(): the latter would wake lazy proxies and trip over dead ones.
    return (candidate for candidate in gc.get_objects() if issubclass(type(candidate), nn.Module))


def wrapped_by_ddp(weight: Tensor) -> bool:
    """Return whether ``weight`` is a parameter of a model inside DistributedDataParallel."""
    if not (dist.is_available() and dist.is_initialized()):
        return False
    wrappers = [module for module in live_modules() if isinstance(module, nn.parallel.DistributedDataParallel)]
    return any(parameter is weight for wrapper in wrappers for parameter in wrapper.parameters())


def own_rows(weight: DTensor) -> tuple[Tensor, int]:
    """Return the rows that this rank holds and the class of the first."""
    return weight.to_local(), first_row(weight)


def check_group(head: HebbianSoftmax, weight: Tensor, process_group: dist.ProcessGroup | None) -> None:
    """Refuse a group that this rank, or a shard of the rows, is not part of; say where a group is needed."""
    if process_group is None:
        _check_alone(head, weight)
        return
    given: object = process_group
    outside = given is dist.GroupMember.NON_GROUP_MEMBER  # what new_group returns to other ranks (torch 2.11)
    if not outside and not isinstance(process_group, dist.ProcessGroup):
        raise TypeError(f"process_group must be a process group of torch.distributed, got {process_group!r}")
    if outside or dist.get_rank(process_group) < 0:
        raise ValueError(f"process_group does not have this rank, {dist.get_rank()}; attach with a group that does")
    if not is_sharded(weight):
        return
    ranks, own = dist.get_process_group_ranks(process_group), resolve_group(head, weight, None)
    if own is not None and sorted(ranks) != sorted(dist.get_process_group_ranks(own)):
        shards = dist.get_process_group_ranks(own)
        raise ValueError(f"process_group has ranks {ranks}, but the rows are sharded over {shards}; leave it None")
    sharers = [] if head.row_mesh is None else dist.get_process_group_ranks(head.row_mesh.get_group())
    if set(ranks) & set(sharers) - {dist.get_rank()}:
        raise ValueError(
            f"process_group has ranks {ranks}, of which some share the rows of this one ({sharers}) and see the same "
            "batch; give the group of the ranks that see other parts of the batch"
        )


def _check_alone(head: HebbianSoftmax, weight: Tensor) -> None:
    """Refuse a head whose rows a part of the ranks share, if nobody has said whether the others share the batch."""
    if head.row_mesh is None or not is_sharded(weight) or weight.device_mesh.ndim > 1:
        return
    if head.row_mesh.size() < dist.get_world_size():
        raise ValueError(
            f"the rows are shared by {head.row_mesh.size()} of {dist.get_world_size()} ranks; say what the others do: "
            'call fully_shard(head, mesh=mesh["batch"]) before attach, or attach with the process_group of the ranks '
            "that share the batch with this one"
        )


def resolve_group(
    head: HebbianSoftmax, weight: Tensor, process_group: dist.ProcessGroup | None
) -> dist.ProcessGroup | None:
    """Return the group whose ranks form one batch: the given one, that of FSDP's shards, or the default.

    Returns None where this process is alone in its group, or where there is no group.
    """
    group = process_group
    if group is None and is_sharded(weight):
        mesh = weight.device_mesh
        group = None if mesh == head.row_mesh else mesh.get_group(0)  # FSDP's dimension is the first
    elif group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    return None if group is None or dist.get_world_size(group) == 1 else group


def group_of_batch(head: HebbianSoftmax, weight: Tensor) -> dist.ProcessGroup | None:
    """Return the group whose ranks form the batch of a call without an optimizer's step; None in a single process."""
    if head.attachment is not None:
        return head.attachment.group()
    return resolve_group(head, weight, None) if is_sharded(weight) else None


def groups_of_shards(weight: DTensor) -> list[dist.ProcessGroup]:
    """Return the groups over which the rows are spread: one, or with ``shard_rows`` and FSDP2 both two."""
    mesh = weight.device_mesh
    return [mesh.get_group(dim) for dim in range(mesh.ndim) if mesh.size(dim) > 1]


def join_counts(sums: ClassSums, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Return the classes seen by any rank (ascending), the occurrences of each, and the non-finite activations."""
    mine = torch.stack([sums.nonfinite.new_tensor(sums.classes.numel()), sums.nonfinite])
    sizes = _all_gather(mine, group)
    longest = int(sizes[:, 0].max())
    if longest == 0:
        return sums.classes, sums.n, sizes[:, 1].sum()
    padded = mine.new_zeros(2, longest)  # count 0 marks padding
    padded[0, : sums.classes.numel()] = sums.classes
    padded[1, : sums.n.numel()] = sums.n
    seen = _all_gather(padded, group)
    real = seen[:, 1] > 0
    classes, owner = torch.unique(seen[:, 0][real], return_inverse=True)
    n = torch.zeros_like(classes).index_add_(0, owner, seen[:, 1][real])
    return classes, n, sizes[:, 1].sum()


def join_sums(sums: ClassSums, classes: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Return the summed activations of ``classes`` (some of those seen), the sum of all, and the summed norms."""
    mine = torch.isin(sums.classes, classes)
    features = sums.rows.shape[1]
    wire = sums.rows.new_zeros(classes.numel() * features + features + 1)
    by_class = wire[: classes.numel() * features].view(-1, features)
    by_class[torch.searchsorted(classes, sums.classes[mine])] = sums.of(mine)
    wire[-features - 1 : -1] = sums.total
    wire[-1] = sums.norms
    dist.all_reduce(wire, group=group)
    return by_class, wire[-features - 1 : -1], wire[-1]


def sum_over_shards(value: Tensor, weight: DTensor) -> Tensor:
    """Add up what each rank has computed from its own rows, in place."""
    for group in groups_of_shards(weight):
        dist.all_reduce(value, group=group)
    return value


def check_same_batch(mesh: DeviceMesh, classes: Tensor, n: Tensor) -> None:
    """Raise an error if the ranks that share rows were given different targets: their losses mean nothing then."""
    checksum = (classes * 0x9E3779B1 + n * 0x85EBCA77).sum()
    extremes = torch.stack([checksum, ~checksum])
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group=mesh.get_group())
    if int(extremes[0]) != ~int(extremes[1]):
        raise RuntimeError(
            "the ranks that share the rows were given different targets, and must see the same batches; choose batches "
            'by the rank in the other mesh dimension, mesh["batch"].get_local_rank()'
        )


def join_activations(h: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the activations (N, features) of all ranks, in the order of the ranks, of which some may have none."""
    sizes = _all_gather(torch.tensor([h.shape[0]], device=h.device), group).squeeze(1).tolist()
    padded = h.new_zeros(max(sizes), h.shape[1])
    padded[: h.shape[0]] = h
    return torch.cat([part[:size] for part, size in zip(_all_gather(padded, group), sizes, strict=True)])


def _all_gather(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return torch.stack(parts)
