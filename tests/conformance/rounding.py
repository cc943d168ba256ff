"""Comparisons that forgive FP8's rounding and nothing else, for tests that compare FP8 arithmetic with bf16's.

The runner copies this file beside the shim. A comparison is made as upstream wrote it first. Where only its tolerance
is missed, a floating-point tensor still passes if its relative L2 error is at most one step of E4M3. Shapes, dtypes,
NaN and infinities are compared as before, and so is what upstream wants exactly equal (rtol and atol 0).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

# Neighbouring E4M3 numbers are 1/16 to 1/8 of their value apart (three mantissa bits: fp8_ds/numerics/formats.py).
MAX_RELATIVE_ERROR = 1 / 8


def relative_l2_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """||actual - expected|| / ||expected|| in float64 over the finite elements; inf if only `expected` is all zero."""
    actual, expected = actual.detach().double(), expected.detach().double()
    finite = torch.isfinite(actual) & torch.isfinite(expected)
    difference = torch.linalg.vector_norm((actual - expected)[finite]).item()
    norm = torch.linalg.vector_norm(expected[finite]).item()
    if norm == 0:
        return 0.0 if difference == 0 else float("inf")
    return difference / norm


def can_forgive(actual: Any, expected: Any, rtol: Any, atol: Any) -> bool:
    """Whether FP8's rounding could be why two values differ: floating-point tensors that need not be equal exactly."""
    for value in (actual, expected):
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return False
    return actual.shape == expected.shape and not (rtol == 0 and atol == 0)


def forgiving_assert_close(
    strict: Callable[..., None], record: Callable[[dict[str, Any]], None]
) -> Callable[..., None]:
    """`torch.testing.assert_close` that forgives; `record` gets the error of each comparison that `strict` fails."""

    @functools.wraps(strict)
    def assert_close(actual: Any, expected: Any, **kwargs: Any) -> None:
        try:
            strict(actual, expected, **kwargs)
        except AssertionError as error:
            if not can_forgive(actual, expected, kwargs.get("rtol"), kwargs.get("atol")):
                raise
            # Any finite difference passes this one: what it still refuses are dtypes, devices, NaN and infinities.
            strict(actual, expected, **kwargs | {"rtol": 0.0, "atol": float("inf")})
            relative_error = relative_l2_error(actual, expected)
            record({"relative_error": relative_error})
            if relative_error > MAX_RELATIVE_ERROR:
                message = f"Relative L2 error {relative_error:.3f} is above {MAX_RELATIVE_ERROR}."
                raise AssertionError(message) from error

    return assert_close


def forgiving_allclose(strict: Callable[..., bool], record: Callable[[dict[str, Any]], None]) -> Callable[..., bool]:
    """`torch.allclose` that forgives; `record` gets the error of each comparison that `strict` fails."""

    @functools.wraps(strict)
    def allclose(actual: Any, expected: Any, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False) -> bool:
        if strict(actual, expected, rtol=rtol, atol=atol, equal_nan=equal_nan):
            return True
        if not can_forgive(actual, expected, rtol, atol):
            return False
        if not strict(actual, expected, rtol=0.0, atol=float("inf"), equal_nan=equal_nan):
            return False
        relative_error = relative_l2_error(actual, expected)
        record({"relative_error": relative_error})
        return relative_error <= MAX_RELATIVE_ERROR

    return allclose
