"""Weights stored in FP8, of linears (nn/linear/stored.py) and of experts, by names: scales beside them, and their ends.

transformers' FP8 experts have weights [E, 2 I, H], gate first, and [E, H, I] in float8_e4m3fn. The scales beside them
multiply 128 x 128 elements of one expert's matrix each, [E, R, C]. Those of a gate and of an up are behind each other
in R, as their files have them, and so are blocks: with an I that is no multiple of 128 none is of both.

Frozen stacks keep both, if each matrix has whole rows of blocks: then a stack is, for scales, the matrix of all rows.

Source: transformers 5.24 integrations/finegrained_fp8.py `FP8Experts`, quantizers/base.py `update_weight_conversions`.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from fp8_ds.nn.linear.payload import TILE
from fp8_ds.nn.linear.stored import (
    StoredScales,
    as_numbers,
    granularity_of_grid,
    is_stored,
    remove_scales,
    serving_parameters,
    stored_scales,
)
from fp8_ds.nn.moe.experts import WEIGHTS, names_beside
from fp8_ds.ops.blockwise import BLOCK

_OF_LINEAR = "weight"
_OWN_SCALES = "_scale_inv"


def stored_names(module: nn.Module) -> list[str]:
    """Return the names of the weights of `module` that are in FP8 with scales beside them."""
    if is_stored(module):
        return [_OF_LINEAR]
    return [name for name in WEIGHTS if name + _OWN_SCALES in names_beside(module, name)]


def scales_of(module: nn.Module, name: str) -> StoredScales | None:
    """Return the scales of the weight `name`; None if it is not stored, or they are of no known granularity."""
    if name not in stored_names(module):
        return None
    if name == _OF_LINEAR:
        return stored_scales(module)
    weight: Any = module._parameters[name]
    scale: Any = module._parameters[name + _OWN_SCALES]
    if weight.dim() != 3 or scale.dim() != 3 or len(scale) != len(weight):
        return None
    rows, cols = weight.shape[1:]
    # Matrices of an expert: gate and up, each with blocks of its own, or one whose blocks go on.
    for num in (2, 1) if name == WEIGHTS[0] else (1,):
        shape = (rows // num, cols)
        grid = (scale.shape[1] // num, scale.shape[2])
        if scale.shape[1] % num == 0 and granularity_of_grid(grid, shape) == TILE:
            numbers = as_numbers(scale.detach()).reshape(-1, scale.shape[2])
            return StoredScales(numbers, TILE, shape, tuple(parameters_beside(module, name)))
    return None


def why_not_frozen(module: nn.Module, name: str) -> str | None:
    """Say why the frozen experts' weight `name`, which came in FP8, cannot keep its bytes and scales; None: it can."""
    stored = scales_of(module, name)
    if stored is None or stored.shape[0] % BLOCK:
        return f"frozen, and its FP8 folder has blocks of less than {BLOCK} rows"
    return None


def parameters_beside(module: nn.Module, name: str) -> list[Any]:
    """Return the Parameters of scales beside the stored weight `name`: its own, and those of activations."""
    if name == _OF_LINEAR:
        return serving_parameters(module)
    return [module._parameters[one] for one in names_beside(module, name)]


def remove_beside(module: nn.Module, name: str) -> None:
    """Remove the scales beside the stored weight `name`."""
    if name == _OF_LINEAR:
        remove_scales(module)
        return
    for one in names_beside(module, name):
        del module._parameters[one]
