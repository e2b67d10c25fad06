"""Calls that torch.compile leaves out of its graphs, because ranks exchange something in them."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch

from hebbian_softmax.rows import RowPart

_F = TypeVar("_F", bound=Callable[..., Any])


def outside_of_graphs(function: _F) -> _F:
    """Keep torch.compile out of a function where it is called with ``rows``: its exchanges are no part of a graph."""

    @wraps(function)
    def called(*arguments: Any, rows: RowPart | None = None, **options: Any) -> Any:
        if rows is not None and torch.compiler.is_compiling():
            from hebbian_softmax.loss.uncompiled import call

            return call(function, *arguments, rows=rows, **options)
        return function(*arguments, rows=rows, **options)

    return cast(_F, called)
