"""How far a kernel may be from the exact result."""

from __future__ import annotations

import torch

LIMITS = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Relative L2 error against float64."""
DTYPES = list(LIMITS)
_TIMES_TWIN = 2.0
"""A kernel's error is at most this many times its twin's in the same precision."""


def relative_error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    """NaN where either has one, or they differ in shape."""
    if actual.shape != exact.shape:
        return float("nan")
    exact = exact.double()
    difference = (actual.double() - exact).norm()
    return (difference / exact.norm().clamp_min(1e-30)).item()


def check(
    actual: torch.Tensor, twin: torch.Tensor, exact: torch.Tensor, *, negligible: float = 1e-7
) -> None:
    """``twin`` is in the dtype of ``actual``, ``exact`` in float64.

    negligible: a twin's error that is smaller counts as this.
    """
    assert actual.dtype == twin.dtype
    assert exact.dtype == torch.float64
    error, allowed = relative_error(actual, exact), LIMITS[actual.dtype]
    assert error <= allowed, f"relative error {error:.2e}, limit {allowed:.0e}"
    of_twin = max(relative_error(twin, exact), negligible)
    assert error <= _TIMES_TWIN * of_twin, f"relative error {error:.2e}, the twin's {of_twin:.2e}"
