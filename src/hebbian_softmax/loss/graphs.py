"""Calls that torch.compile leaves out of its graphs, because ranks exchange something in them."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch

_F = TypeVar("_F", bound=Callable[..., Any])


def outside_of_graphs(only_with: str | None = None) -> Callable[[_F], _F]:
    """Return a decorator that keeps torch.compile out of a function, since exchanges are no part of a graph.

    With ``only_with``, that is done where this keyword argument of the function is given and not None.
    """

    def decorated(function: _F) -> _F:
        @wraps(function)
        def called(*arguments: Any, **options: Any) -> Any:
            exchanges = only_with is None or options.get(only_with) is not None
            if exchanges and torch.compiler.is_compiling():
                from hebbian_softmax.loss.uncompiled import call

                return call(function, *arguments, **options)
            return function(*arguments, **options)

        return cast(_F, called)

    return decorated
