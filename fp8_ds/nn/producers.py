"""Which modules hand FP8 to the linears after them: the choice, its text, and its application."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import nn

from fp8_ds.config import ActivationsConfig
from fp8_ds.errors import ConfigError
from fp8_ds.nn.dataflow import linears_that_read
from fp8_ds.nn.fused import FusedModule, Producer
from fp8_ds.nn.linear import Fp8Linear
from fp8_ds.nn.mlp import FusedSwiglu, SwigluParts, parts_of
from fp8_ds.nn.norm import FusedRMSNorm, arithmetic_of, is_candidate

_NORM, _SWIGLU = "norm", "SwiGLU"
_MLP_NAMES = {"gate_proj", "up_proj", "down_proj"}
_NUM_REASONS_SHOWN = 4
_RECOGNISED = "modules with a weight and an eps; modules that return down(silu(gate(x)) * up(x)): docs/activations.md"

_Verdict = Callable[[], None] | str
"""What fuses a module, or why it is left."""


@dataclass(frozen=True)
class ProducerPlan:
    """One RMSNorm or SwiGLU of the model: its name, its kind, and why it was not fused, or ""."""

    fqn: str
    kind: str
    reason: str

    @property
    def fused(self) -> bool:
        return not self.reason


@dataclass(frozen=True)
class Fusion:
    """All RMSNorms and SwiGLUs of a model, in module order."""

    producers: tuple[ProducerPlan, ...]

    def describe(self) -> str:
        """One line: what is fused, and what is left with the reason."""
        if not self.producers:
            return f"fp8: fused nothing: no RMSNorm and no SwiGLU was found ({_RECOGNISED})"
        fused = [one.kind for one in self.producers if one.fused]
        counts = [(fused.count(kind), kind) for kind in (_NORM, _SWIGLU)]
        text = "fp8: fused " + " and ".join(f"{num} {kind}{'' if num == 1 else 's'}" for num, kind in counts)
        left: dict[str, list[str]] = defaultdict(list)
        for one in self.producers:
            if not one.fused:
                left[one.reason].append(one.fqn)
        more = {reason: f" and {len(fqns) - 1} more" if len(fqns) > 1 else "" for reason, fqns in left.items()}
        parts = [f"{fqns[0]}{more[reason]} ({reason})" for reason, fqns in left.items()]
        if len(parts) > _NUM_REASONS_SHOWN:
            parts[_NUM_REASONS_SHOWN:] = [f"and {len(parts) - _NUM_REASONS_SHOWN} more reasons"]
        return f"{text}; left: {', '.join(parts)}" if parts else text


def fuse_producers(model: nn.Module, activations: ActivationsConfig) -> Fusion:
    """Fuse the RMSNorms and SwiGLUs that FP8 linears read with the cast; all else is untouched.

    Args:
        model: whose linears are converted; before DeepSpeed has put its hooks on it, one of which would leave a SwiGLU
            alone.
        activations: the "activations" block, with `fused`.

    Returns:
        What was fused, and what was not, with reasons.

    Raises:
        ConfigError: the model is fused already.
    """
    places: dict[nn.Module, list[tuple[nn.Module, str]]] = defaultdict(list)
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child is not None:
                places[child].append((parent, name))
    verdicts: list[tuple[str, str, _Verdict]] = []
    for fqn, module in model.named_modules():
        if isinstance(module, FusedModule):
            raise ConfigError(f"model: expected no fused module yet, got one at {fqn!r}. Fuse a model once only.")
        if is_candidate(module) and places[module]:
            verdicts.append((fqn, _NORM, _norm_verdict(module, places[module], activations)))
        parts = parts_of(module)
        if isinstance(parts, SwigluParts) or module._modules.keys() >= _MLP_NAMES:
            verdicts.append((fqn, _SWIGLU, _mlp_verdict(module, parts, activations)))
    for _, _, verdict in verdicts:  # classes change only now: the source of a fused module's forward is another one
        if not isinstance(verdict, str):
            verdict()
    rows = [(fqn, kind, verdict if isinstance(verdict, str) else "") for fqn, kind, verdict in verdicts]
    return Fusion(tuple(ProducerPlan(*row) for row in rows))


def _norm_verdict(norm: nn.Module, places: list[tuple[nn.Module, str]], activations: ActivationsConfig) -> _Verdict:
    if len(places) > 1:
        return "used in several places"
    producer = _producer(linears_that_read(*places[0]), activations)
    if isinstance(producer, str):
        return producer
    arithmetic = arithmetic_of(norm)
    return arithmetic if isinstance(arithmetic, str) else partial(FusedRMSNorm.from_norm, norm, *arithmetic, producer)


def _mlp_verdict(mlp: nn.Module, parts: SwigluParts | str, activations: ActivationsConfig) -> _Verdict:
    if isinstance(parts, str):
        return parts
    producer = _producer([mlp.get_submodule(parts.down)], activations)
    return producer if isinstance(producer, str) else partial(FusedSwiglu.from_mlp, mlp, parts, producer)


def _producer(readers: Sequence[nn.Module], activations: ActivationsConfig) -> Producer | str:
    fp8 = [linear for linear in readers if isinstance(linear, Fp8Linear)]
    recipes = sorted({linear.fp8_recipe.name for linear in fp8})
    if not fp8:
        return "no FP8 linear is seen to read it"
    if len(recipes) > 1:
        return f"read by recipes {' and '.join(recipes)}"
    return Producer(tuple(fp8), activations.nonlinear)
