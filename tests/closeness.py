"""When two floating-point results count as the same: one rule for every test.

A tolerance that was found by trying holds on one processor only: another one sums in another order, with or without
fused multiply-adds, and an ill-conditioned quantity (a sum in which terms cancel, a gradient divided by its own root
mean square) shows it. So the tolerance is measured, by computing the same thing in float64 as well:

    |found − exact|  ≤  FACTOR · max|expected − exact|  +  ULPS · eps · max|exact|

``expected`` is the trusted computation in the precision under test and ``exact`` the same one in float64. The first
term is the error that this precision makes in this very case, the second a few units in the last place of the largest
value, for cases in which ``expected`` happens to be exact. A wrong sign, a forgotten term or a relative error of 1e-3
lies orders of magnitude above both.

Where there is no computation in a lower precision to trust, :func:`assert_exact` compares a float64 result with another
one, or a float32 result with a float64 one, by the second term alone.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

FACTOR = 8.0
"""Multiple of the trusted computation's own error that is allowed: sums in another order have similar errors."""
ULPS, HALF_ULPS = 16.0, 2.0
"""Units in the last place of the largest value that are always allowed; in half precision, where a unit is nearly one
per cent, fewer of them."""


def assert_as_close(
    found: Tensor, expected: Tensor, exact: Tensor, name: str = "", *, ulps: float | None = None
) -> None:
    """Check that ``found`` is as close to ``exact`` (float64) as ``expected``, which has the dtype of ``found``."""
    assert found.shape == expected.shape == exact.shape, f"{name}: {found.shape}, {expected.shape}, {exact.shape}"
    assert found.dtype == expected.dtype, f"{name} has dtype {found.dtype}, not {expected.dtype}"
    if not found.dtype.is_floating_point:
        assert torch.equal(found.cpu(), expected.cpu()), f"{name} is {found.tolist()}, not {expected.tolist()}"
        return
    error = float(_distance(expected, exact, name).max()) if exact.numel() else 0.0
    _check(found, exact, FACTOR * error + _units(ulps, found.dtype) * _ulp(exact, found.dtype), name)


def assert_states_as_close(
    found: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    exact: Mapping[str, Tensor],
    *,
    ulps: float | None = None,
) -> None:
    """Apply :func:`assert_as_close` to every tensor of three state dicts."""
    assert found.keys() == expected.keys() == exact.keys()
    for name in expected:
        assert_as_close(found[name], expected[name], exact[name], name, ulps=ulps)


def assert_exact(
    found: Tensor, exact: Tensor, name: str = "", *, ulps: float | None = None, scale: float | None = None
) -> None:
    """Check that ``found`` is ``exact`` up to ``ulps`` units in the last place of the largest value.

    ``scale`` replaces the largest value where it does not tell the conditioning: where larger terms have cancelled.
    """
    assert found.shape == exact.shape, f"{name}: {tuple(found.shape)}, {tuple(exact.shape)}"
    if not found.dtype.is_floating_point:
        assert torch.equal(found.cpu(), exact.cpu()), f"{name} is {found.tolist()}, not {exact.tolist()}"
        return
    unit = _ulp(exact, found.dtype) if scale is None else scale * _eps(found.dtype)
    _check(found, exact, _units(ulps, found.dtype) * unit, name)


def assert_rounded_once(found: Tensor, exact: Tensor, *, units: float = 0.5) -> None:
    """Check that ``found`` was computed in float32 at least and then rounded to its dtype, by ``units`` at most."""
    dtype = torch.promote_types(found.dtype, torch.float32)
    off = _distance(found, exact, "the result")
    size = exact.detach().double().cpu().abs()
    allowed = units * _eps(found.dtype) * size + ULPS * _ulp(exact, dtype)
    assert bool((off <= allowed).all()), f"off by {float(off.max()):.3g}"


def _check(found: Tensor, exact: Tensor, allowed: float, name: str) -> None:
    distance = _distance(found, exact, name)
    if distance.numel() and float(distance.max()) > allowed:
        raise AssertionError(f"{name} is off by {float(distance.max()):.3g}, where {allowed:.3g} is allowed")


def _distance(found: Tensor, exact: Tensor, name: str) -> Tensor:
    """Return |found − exact|, 0 where both are the same infinity or both NaN."""
    found, exact = found.detach().double().cpu(), exact.detach().double().cpu()
    same = (found == exact) | (found.isnan() & exact.isnan())
    distance = torch.where(same, 0.0, (found - exact).abs())
    assert not distance.isnan().any(), f"{name} is NaN where it should not be, or the other way round"
    return distance


def _ulp(exact: Tensor, dtype: torch.dtype) -> float:
    finite = exact.detach().double().abs().nan_to_num(0.0, 0.0, 0.0)
    return _eps(dtype) * (float(finite.max()) if finite.numel() else 0.0)


def _units(ulps: float | None, dtype: torch.dtype) -> float:
    if ulps is not None:
        return ulps
    return ULPS if torch.finfo(dtype).bits >= 32 else HALF_ULPS


def _eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps
