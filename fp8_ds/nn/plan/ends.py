"""Lists of a model's layers, and names that count from their end, as in `layers.-1.`."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

from torch import nn

from fp8_ds.errors import ConfigError

_FROM_THE_END = re.compile(r"(^|\.)-\d+(\.|$)")
_NUMBER_LAST = re.compile(r"(^|\.)-\d+$")

IsLinear = Callable[[nn.Module], bool]


def layer_lists(model: nn.Module, is_linear: IsLinear, prefix: str = "") -> dict[str, list[nn.Module]]:
    """Return the layers of each of the outermost lists of modules, by name: entries with linears in them.

    An encoder and a decoder have one each; a layer's list of experts is inside of one. A list of linears is none.
    """
    found: dict[str, list[nn.Module]] = {}
    for name, module in model.named_children():
        entries = _entries(module)
        if any(map(is_linear, entries)):
            entries = []
        layers = [layer for layer in entries if any(map(is_linear, layer.modules()))]
        if layers:
            found[prefix + name] = layers
        else:
            found |= layer_lists(module, is_linear, f"{prefix}{name}.")
    return found


def names_in_order(name: str, module: nn.Module, is_linear: IsLinear) -> list[str]:
    """Return the names of the layers with linears in the list of modules `module`, in order.

    An entry is a stage, as of a Swin, whose own layers are returned, if it is a list of layers, or its first part with
    linears is one. Linears of the same names tell a stage's layers from a layer's parts, as those in T5's `layer`.
    """
    found: list[str] = []
    for key, layer in module._modules.items():
        if layer is None or not any(map(is_linear, layer.modules())):
            continue
        own = f"{name}.{key}"
        parts = [(f"{own}.{k}", p) for k, p in layer.named_children() if any(map(is_linear, p.modules()))]
        stage = next((one for one in ((own, layer), *parts[:1]) if _has_like_layers(one[1], is_linear)), None)
        found += [own] if stage is None else names_in_order(*stage, is_linear)
    return found


def _has_like_layers(module: nn.Module, is_linear: IsLinear) -> bool:
    """Whether `module` is a list of modules, none of them a linear, of whose linears some have the same names."""
    entries = [{name for name, part in entry.named_modules() if is_linear(part)} for entry in _entries(module)]
    return bool(entries) and "" not in entries[0] and all(names & entries[0] for names in entries)


def _entries(module: nn.Module) -> list[nn.Module]:
    """Return the entries of an nn.ModuleList, or an nn.ModuleDict with numbers as keys (torchtitan's `layers`)."""
    if isinstance(module, nn.ModuleList):
        return list(module)
    is_numbered = isinstance(module, nn.ModuleDict) and all(key.isdigit() for key in module)
    return list(module.children()) if is_numbered else []


def counts_from_the_end(pattern: str) -> bool:
    """Whether a part of a name in `linear.filter_fqns` has a negative number in it."""
    return _FROM_THE_END.search(pattern) is not None


class NameFilter:
    """Filter of a model's layers by parts of their names, as in `linear.filter_fqns`.

    A whole name of a module with its dot, `layers.1.`, is what is in it, and nothing of `encoder.layers.1.`.

    A negative number counts from the end of the outermost list of modules, and is a whole one: `layers.-1` is all of
    the last layer, and nothing of `layers.-12`.
    """

    def __init__(self, model: nn.Module, patterns: Collection[str]) -> None:
        self._model, self._patterns = model, patterns
        modules = {f"{name}." for name, _ in model.named_modules(remove_duplicate=False) if name}
        self._whole_names = modules.intersection(patterns)
        self._not_found = set(filter(counts_from_the_end, patterns))

    def names(self, fqns: Collection[str]) -> bool:
        """Whether a pattern is in one of a layer's names; a module that is used twice has several."""
        found = {pattern for pattern in self._patterns if any(self._is_in(pattern, fqn) for fqn in fqns)}
        self._not_found -= found
        return bool(found)

    def _is_in(self, pattern: str, fqn: str) -> bool:
        if pattern in self._whole_names:
            return f"{fqn}.".startswith(pattern)
        if not counts_from_the_end(pattern):
            return pattern in fqn
        end = r"(?!\d)" if _NUMBER_LAST.search(pattern) else ""  # digits do not go on where the pattern stops
        return re.search(re.escape(pattern) + end, _name_from_the_end(self._model, fqn)) is not None

    def check_found(self) -> None:
        """Raise ConfigError, after `names` has seen all layers, if a pattern that counts from the end names nothing."""
        if self._not_found:
            raise ConfigError(
                f"fp8.linear.filter_fqns: expected a part of a layer's name, got {min(self._not_found)!r}, which is in "
                'none. Negative numbers count from the end of the outermost nn.ModuleList, as in "layers.-1.mlp": '
                "`fp8-ds plan` shows the names that there are."
            )


def _name_from_the_end(model: nn.Module, fqn: str) -> str:
    """Return `layers.-1.mlp` for `layers.31.mlp`; the same name if it leads through no list of modules."""
    parts, module = fqn.split("."), model
    for k, part in enumerate(parts):
        children = module._modules
        if _entries(module):
            return ".".join([*parts[:k], str(list(children).index(part) - len(children)), *parts[k + 1 :]])
        if (child := children.get(part)) is None:
            break
        module = child
    return fqn
