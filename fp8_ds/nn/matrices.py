"""Matrices of a model that are no linears, nor experts as Mixtral's: other experts, routers. They stay in bf16."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fp8_ds.nn.experts import is_experts, why_not
from fp8_ds.nn.linear import is_conv1d

_NUM_KINDS_SHOWN = 4


@dataclass(frozen=True)
class OtherMatrices:
    """Matrices that a plan leaves in bf16 without a row: classes and numbers of the modules that hold them, those of
    most weights first; the number of elements in them, and in all parameters."""

    kinds: tuple[tuple[str, int], ...]
    numel: int
    numel_model: int

    @classmethod
    def of(cls, model: nn.Module, foreign: Collection[type[nn.Module]] = ()) -> OtherMatrices:
        """Count what `other_matrices` yields for `model`."""
        modules: dict[str, set[int]] = {}
        numels: Counter[str] = Counter()
        seen: set[int] = set()
        for _, module, _, p in other_matrices(model, foreign):
            kind = kind_of(module)
            modules.setdefault(kind, set()).add(id(module))
            numels[kind] += 0 if id(p) in seen else full_shape(p).numel()
            seen.add(id(p))
        kinds = tuple((kind, len(modules[kind])) for kind, _ in numels.most_common())
        return cls(kinds, numels.total(), sum(full_shape(p).numel() for p in model.parameters()))

    def percent_of_model(self, numel: int) -> float:
        return 100.0 * numel / max(self.numel_model, 1)

    def describe(self) -> str:
        """Return a text such as `2 MixtralExperts, 2 MixtralTopKRouter`; empty if there are none."""
        names = [f"{number} {kind}" for kind, number in self.kinds[:_NUM_KINDS_SHOWN]]
        if len(self.kinds) > _NUM_KINDS_SHOWN:
            names.append(f"{sum(number for _, number in self.kinds[_NUM_KINDS_SHOWN:])} more")
        return ", ".join(names)


def other_matrices(
    model: nn.Module, foreign: Collection[type[nn.Module]] = ()
) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """Yield module name, module, parameter name and Parameter of each float matrix, or stack, of other classes.

    Embeddings look up rows and are left out, as are weights tied to one; `foreign` classes are linears.
    """
    embeddings = [module for module in model.modules() if _is_embedding(module)]
    lookups = {id(p) for module in embeddings for p in module.parameters(recurse=False)}
    for fqn, module in model.named_modules():
        if is_layer(module, foreign) or _is_embedding(module):
            continue
        for name, p in module.named_parameters(recurse=False):
            is_matrix = sum(size > 1 for size in full_shape(p)) > 1
            if is_matrix and p.is_floating_point() and id(p) not in lookups:
                yield fqn, module, name, p


def is_layer(module: nn.Module, foreign: Collection[type[nn.Module]] = ()) -> bool:
    """Whether a plan has rows for it: a linear of torch or of a foreign class, a Conv1D, or experts as Mixtral's."""
    is_linear = isinstance(module, nn.Linear) or type(module) in foreign or is_conv1d(module)
    return is_linear or is_experts(module)


def kind_of(module: nn.Module) -> str:
    """Return the class name and, for experts unlike Mixtral's, in what they differ."""
    reason = why_not(module)
    return type(module).__name__ + (f" ({reason})" if reason else "")


def full_shape(p: Any) -> torch.Size:
    """Return the true shape, which deepspeed.zero.Init leaves in ds_shape, beside an empty tensor."""
    return torch.Size(getattr(p, "ds_shape", p.shape))


def _is_embedding(module: nn.Module) -> bool:
    """Whether `module` is an embedding, by class or name: AutoTP and vision models have other classes."""
    return isinstance(module, nn.Embedding) or "Embedding" in type(module).__name__
