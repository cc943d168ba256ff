"""Fp8AdamW with each kind of master, its steps, and all that it holds."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from fp8_ds import Fp8AdamW

FORMATS = ("own", "fp32", "bf16_8", "e4m19", "e4m11")
"""Masters of bf16 parameters, but "own": of float32 ones, which are their masters."""


def dtype_of(master: str) -> torch.dtype:
    return torch.float32 if master == "own" else torch.bfloat16


def group_of(params: Any, master: str) -> dict[str, Any]:
    """Return a parameter group whose parameters, of `dtype_of(master)`, have that master."""
    return {"params": list(params), "master": None if master in ("own", "bf16_8") else master}


def step(
    net: nn.Module, optimizer: torch.optim.Optimizer, num: int = 1, first: int = 0, value: float | None = None
) -> None:
    """Make steps with gradients by chance that hang on the step's number, or with all of them `value`."""
    for number in range(first, first + num):
        generator = torch.Generator().manual_seed(number)
        for p in net.parameters():
            grad = torch.randn(p.shape, generator=generator) if value is None else torch.full(p.shape, value)
            p.grad = grad.to(p.dtype)
        optimizer.step()
    optimizer.zero_grad()


def everything(net: nn.Module, optimizer: Fp8AdamW) -> dict[str, Tensor]:
    """Return weights as they are read, and the state, by name."""
    found = {f"weight {name}": p.detach().clone() for name, p in net.named_parameters()}
    for index, entry in copy.deepcopy(optimizer.state_dict()["state"]).items():
        found.update({f"{key} {index}": value for key, value in entry.items()})
    return found


def assert_equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    assert [key for key in left if not torch.equal(left[key], right[key])] == []
