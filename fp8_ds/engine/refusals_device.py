"""Recipes that a GPU or a build of torch does not have; docs/refusals.md shows the table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fp8_ds.errors import UnsupportedError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class DeviceRefusal:
    """Requirement of recipes on the GPU, or on the CUDA that torch was built with; `reference` has none.

    `is_able` takes the compute capability and CUDA's version, and says whether they meet it.
    """

    what: str
    reason: str
    remedy: str
    recipes: tuple[str, ...]
    is_able: Callable[[tuple[int, int], tuple[int, int]], bool]


DEVICE_REFUSALS = (
    DeviceRefusal(
        "compute capability below 8.9",
        "its tensor cores have no FP8",
        'Use another GPU, or "fp8": {"linear": {"backend": "reference"}}, which is slow.',
        ("tensorwise", "delayed", "rowwise", "rowwise_with_gw_hp"),
        lambda capability, cuda: capability >= (8, 9),
    ),
    DeviceRefusal(
        "compute capability other than 9.0 with fp8.linear.recipe: blockwise",
        "cuBLASLt multiplies 1x128 and 128x128 blocks on Hopper only",
        'Use "recipe": "rowwise".',
        ("blockwise",),
        lambda capability, cuda: capability == (9, 0),
    ),
    DeviceRefusal(
        "a torch built with CUDA below 12.9 with fp8.linear.recipe: blockwise",
        "cuBLASLt has block scales since then",
        'Install a torch built with CUDA 12.9 or later, or use "recipe": "rowwise".',
        ("blockwise",),
        lambda capability, cuda: cuda >= (12, 9),
    ),
)


def capabilities(device: torch.device) -> tuple[tuple[int, int] | None, tuple[int, int] | None]:
    """Return (compute capability, version of CUDA that torch was built with), each None where there is none."""
    import torch

    if device.type != "cuda" or torch.version.cuda is None:
        return None, None
    major, minor = torch.version.cuda.split(".")[:2]
    return torch.cuda.get_device_capability(device), (int(major), int(minor))


def refuse_device(recipe: str, backend: str, capability: tuple[int, int] | None, cuda: tuple[int, int] | None) -> None:
    """Raise an UnsupportedError if FP8 linears of this recipe do not run on this device.

    Args:
        recipe, backend: values of the "linear" block.
        capability: compute capability of this rank's GPU; None on CPU, where all recipes run.
        cuda: version that torch was built with; None for a build of another vendor, which is not checked.
    """
    if capability is None or cuda is None or backend == "reference":
        return
    for row in DEVICE_REFUSALS:
        if recipe in row.recipes and not row.is_able(capability, cuda):
            raise UnsupportedError(
                f"fp8.linear.recipe: {recipe} with compute capability {capability[0]}.{capability[1]} and CUDA "
                f"{cuda[0]}.{cuda[1]}: {row.reason}. {row.remedy}"
            )
