"""The device of the tests of kernels: CUDA, or a CPU where Triton interprets (see support/interpreted.py)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from support.producers import assert_same

pytest.importorskip("triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"

KERNEL = [
    pytest.mark.gpu,
    pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs CUDA or the interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, of NaN and infinities
]
"""The marks of a file whose tests run on both."""


def with_cuda_sizes(both: Sequence[Any], cuda: Sequence[Any]) -> list[Any]:
    """Cases of both devices, and behind them, on CUDA alone, those that take the interpreter minutes."""
    return [*both, *([] if INTERPRETED else cuda)]


def to_device(*args: Any) -> list[Any]:
    """Return the arguments with tensors on the device. A view with gaps has none there: view what has moved instead."""
    return [arg.to(DEVICE) if isinstance(arg, Tensor) else arg for arg in args]


def assert_all_same(expected: Any, got: Any) -> None:
    """`assert_same` of a result or of each of a sequence, wherever it is."""
    if isinstance(expected, Tensor):
        expected, got = [expected], [got]
    for a, b in zip(expected, got, strict=True):
        assert_same(a, b)


def check(reference: Any, kernels: Any, name: str, *args: Any) -> None:
    """The function `name` of both modules gives the same bits, of CPU tensors and of the same on the device."""
    assert_all_same(getattr(reference, name)(*args), getattr(kernels, name)(*to_device(*args)))
