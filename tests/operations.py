"""What a computation costs: its operations, its matrix products and the memory that it holds."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.baddbmm)

_EMPTY = (torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.empty_strided, torch.ops.aten.new_empty)


class Watch(TorchDispatchMode):
    """Counts operations and matrix products, and the bytes of the storages that they make."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.most = 0
        """The most bytes that were alive at a time."""
        self.largest = 0
        """The bytes of the largest storage."""
        self.operations = 0
        self.launches = 0
        """Those of the operations that compute something: neither views nor empty tensors."""
        self.products: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        """The shapes of the two factors of each matrix product."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {each.untyped_storage()._cdata for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        self.operations += 1
        if func.overloadpacket in _PRODUCTS:
            left, right = [each for each in args if isinstance(each, Tensor)][-2:]
            self.products.append((tuple(left.shape), tuple(right.shape)))
        out = func(*args, **(kwargs or {}))
        viewed = func.is_view or torch.Tag.inplace_view in func.tags or func.overloadpacket in _EMPTY
        self.launches += not viewed and any(isinstance(each, Tensor) for each in tree_leaves(out))
        for each in tree_leaves(out):
            if isinstance(each, Tensor):
                storage = each.untyped_storage()
                if storage._cdata not in known and storage._cdata not in self.live:
                    self.live[storage._cdata] = storage.nbytes()
                    weakref.finalize(storage, self.live.pop, storage._cdata, None)
                    self.largest = max(self.largest, storage.nbytes())
        self.most = max(self.most, sum(self.live.values()))
        return out
