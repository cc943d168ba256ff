"""Modules that hand FP8 to the linears after them: the choice, its text, and its application."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from fp8_ds.config import ActivationsConfig
from fp8_ds.errors import ConfigError
from fp8_ds.nn.convert import by_reason
from fp8_ds.nn.dataflow import linears_that_read
from fp8_ds.nn.fused import FusedModule, Producer
from fp8_ds.nn.linear import Fp8Linear
from fp8_ds.nn.mlp import FusedSwiglu, parts_of
from fp8_ds.nn.norm import FusedRMSNorm, arithmetic_of, is_candidate

_NORM, _SWIGLU = "norm", "SwiGLU"
_MLP_NAMES = {"gate_proj", "up_proj", "down_proj"}
_NUM_REASONS_SHOWN = 4
_RECOGNISED = "modules with a weight and an eps; modules that return down(silu(gate(x)) * up(x)): docs/activations.md"


@dataclass(frozen=True)
class Fusion:
    """The RMSNorms and SwiGLUs of a model, in module order: kinds of those fused, (name, reason) of those left."""

    fused: list[str]
    left: list[tuple[str, str]]

    def describe(self) -> str:
        """Say in one line what is fused, and what is left with the reason."""
        if not self.fused and not self.left:
            return f"fp8: fused nothing: no RMSNorm and no SwiGLU was found ({_RECOGNISED})"
        counts = [(self.fused.count(kind), kind) for kind in (_NORM, _SWIGLU)]
        text = "fp8: fused " + " and ".join(f"{num} {kind}{'' if num == 1 else 's'}" for num, kind in counts)
        parts = by_reason(self.left)
        if len(parts) > _NUM_REASONS_SHOWN:
            parts[_NUM_REASONS_SHOWN:] = [f"and {len(parts) - _NUM_REASONS_SHOWN} more reasons"]
        return f"{text}; left: {', '.join(parts)}" if parts else text


def fuse_producers(model: nn.Module, activations: ActivationsConfig) -> Fusion:
    """Fuse the RMSNorms and SwiGLUs that FP8 linears read with the cast; all else is untouched.

    Call it before DeepSpeed puts its hooks on the model: a SwiGLU with a hook is left alone.

    Raises:
        ConfigError: the model is fused already.
    """
    places: dict[nn.Module | None, list[tuple[nn.Module, str]]] = defaultdict(list)
    for parent in model.modules():
        for name, child in parent._modules.items():
            places[child].append((parent, name))
    fusion = Fusion([], [])
    changes: list[Callable[[], None]] = []
    for fqn, module in model.named_modules():
        kind: str
        fuse: Any
        found: Any
        if isinstance(module, FusedModule):
            raise ConfigError(f"model: expected no fused module yet, got one at {fqn!r}. Fuse a model once only.")
        if is_candidate(module) and places[module]:
            kind, fuse, readers = _NORM, FusedRMSNorm.from_norm, linears_that_read(*places[module][0])
            found = arithmetic_of(module) if len(places[module]) == 1 else "used in several places"
        else:
            kind, fuse, found = _SWIGLU, FusedSwiglu.from_mlp, parts_of(module)
            if isinstance(found, str) and not module._modules.keys() >= _MLP_NAMES:
                continue
            readers = [] if isinstance(found, str) else [getattr(module, found.down)]
        producer = _producer(readers, activations)
        reason = next((one for one in (found, producer) if isinstance(one, str)), None)
        if reason is None:
            fusion.fused.append(kind)
            changes.append(partial(fuse, module, found, producer))
        else:
            fusion.left.append((fqn, reason))
    for change in changes:  # only now: the source of a fused module's forward is another one
        change()
    return fusion


def _producer(readers: Sequence[nn.Module], activations: ActivationsConfig) -> Producer | str:
    fp8 = [linear for linear in readers if isinstance(linear, Fp8Linear)]
    recipes = sorted({linear.fp8_recipe.name for linear in fp8})
    if not fp8:
        return "no FP8 linear is seen to read it"
    if len(recipes) > 1:
        return f"read by recipes {' and '.join(recipes)}"
    return Producer(tuple(fp8), activations.nonlinear)
