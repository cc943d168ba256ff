"""The first and last layers of a model's stacks, which may stay in bf16: `linear.num_layers_at_start_in_bf16`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import nn

from fp8_ds.config import LinearConfig
from fp8_ds.errors import ConfigError

AT_START, AT_END = "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"


def stacks(model: nn.Module, is_linear: Callable[[nn.Module], bool]) -> Iterator[nn.ModuleList]:
    """The outermost lists of layers: each entry has linears in it, and is none itself (a list of heads is no stack).

    An encoder and a decoder are a stack each; a layer's list of experts is inside of one.
    """
    for module in model.children():
        if isinstance(module, nn.ModuleList) and len(module) and all(_has_linear(entry, is_linear) for entry in module):
            yield module
        else:
            yield from stacks(module, is_linear)


def _has_linear(layer: nn.Module, is_linear: Callable[[nn.Module], bool]) -> bool:
    return not is_linear(layer) and any(map(is_linear, layer.modules()))


def at_ends(
    model: nn.Module, linear_config: LinearConfig, is_linear: Callable[[nn.Module], bool]
) -> dict[nn.Module, str]:
    """Linears of the first and last layers of each stack that the configuration leaves in bf16, and the key that does.

    Raises:
        ConfigError: it asks for some, and the model has no stack.
    """
    num_first, num_last = linear_config.num_layers_at_start_in_bf16, linear_config.num_layers_at_end_in_bf16
    if not num_first and not num_last:
        return {}
    found = list(stacks(model, is_linear))
    if not found:
        raise ConfigError(
            f"fp8.linear.{AT_START if num_first else AT_END}: expected a model that holds its layers in an "
            f"nn.ModuleList, got a {type(model).__name__} without. Remove the key, and name layers that shall stay in "
            'bf16 in "linear.filter_fqns".'
        )
    ends: dict[nn.Module, str] = {}
    for layers in found:
        for key, entries in (
            (AT_END, layers[len(layers) - min(num_last, len(layers)) :]),
            (AT_START, layers[:num_first]),
        ):
            for layer in entries:
                ends.update((module, key) for module in layer.modules() if is_linear(module))
    return ends
