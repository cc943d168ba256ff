"""First weights of regimes 2 and 3 as a file small enough to travel: matrices in one byte a weight.

Two machines do not train the same bits, and pairs start from the same. So that runs of many sessions can share what
they are compared with, the weights are rounded to what the file can hold before any run starts from them: the runs of
the machine that made them, too.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

LARGEST = 127


def encode(weight: Tensor) -> tuple[Tensor, Tensor | None]:
    """Codes, int8, with a float32 scale for each row, of a matrix [rows, columns]; anything else as it is, in bf16."""
    if weight.dim() != 2:
        return weight.detach().to("cpu", torch.bfloat16), None
    weight = weight.detach().float()
    scale = weight.abs().amax(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / LARGEST
    return (weight / scale).round().to("cpu", torch.int8), scale.cpu()


def decode(codes: Tensor, scale: Tensor | None) -> Tensor:
    """What every run starts from, bf16."""
    return codes if scale is None else (codes.float() * scale).bfloat16()


def save(weights: Iterable[tuple[str, Tensor]], path: Path) -> None:
    """Whole or not there. The bytes depend on the weights and on torch's version alone."""
    part = path.with_suffix(".part")
    torch.save({name: encode(weight) for name, weight in weights}, part)
    os.replace(part, path)


def load(path: Path) -> dict[str, Tensor]:
    """By name, bf16."""
    return {name: decode(*encoded) for name, encoded in torch.load(path, weights_only=True).items()}
