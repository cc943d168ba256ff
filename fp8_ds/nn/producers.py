"""Which modules hand FP8 to the linears after them: the choice, its text, and its application."""

from __future__ import annotations

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
_MLP_NAMES = ("gate_proj", "up_proj", "down_proj")
_NUM_REASONS_SHOWN = 4
_RECOGNISED = "modules with a weight and an eps; modules that return down(silu(gate(x)) * up(x)): docs/activations.md"

_Verdict = Callable[[], None] | str
"""What fuses a module, or why it is left."""


@dataclass(frozen=True)
class ProducerPlan:
    """One RMSNorm or SwiGLU of the model: its name, its kind, and whether it was fused, or why not."""

    fqn: str
    kind: str
    fused: bool
    reason: str


@dataclass(frozen=True)
class Fusion:
    """All RMSNorms and SwiGLUs of a model, in module order."""

    producers: tuple[ProducerPlan, ...]

    def describe(self) -> str:
        """One line: what is fused, and what is left with the reason."""
        counts = [sum(one.fused for one in self.producers if one.kind == kind) for kind in (_NORM, _SWIGLU)]
        if not self.producers:
            return f"fp8: fused nothing: no RMSNorm and no SwiGLU was found ({_RECOGNISED})"
        text = f"fp8: fused {_count(counts[0], _NORM)} and {_count(counts[1], _SWIGLU)}"
        reasons: dict[str, list[str]] = {}
        for one in self.producers:
            if not one.fused:
                reasons.setdefault(one.reason, []).append(one.fqn)
        if not reasons:
            return text
        left = [
            f"{fqns[0]}{f' and {len(fqns) - 1} more' if len(fqns) > 1 else ''} ({reason})"
            for reason, fqns in reasons.items()
        ]
        more = f", and {len(left) - _NUM_REASONS_SHOWN} more reasons" if len(left) > _NUM_REASONS_SHOWN else ""
        return f"{text}; left: {', '.join(left[:_NUM_REASONS_SHOWN])}{more}"


def fuse_producers(model: nn.Module, activations: ActivationsConfig) -> Fusion:
    """RMSNorms and SwiGLUs that FP8 linears read are fused with the cast afterwards; all else is untouched.

    Args:
        model: whose linears are converted; before DeepSpeed has put its hooks on it, one of which would leave a SwiGLU
            alone.
        activations: the "activations" block, with `fused`.

    Returns:
        What was fused, and what was not, with reasons.

    Raises:
        ConfigError: the model is fused already.
    """
    homes: dict[nn.Module, list[tuple[str, nn.Module, str]]] = {}
    verdicts: dict[tuple[str, str], _Verdict] = {}
    for fqn, module in model.named_modules():
        if isinstance(module, FusedModule):
            raise ConfigError(f"model: expected no fused module yet, got one at {fqn!r}. Fuse a model once only.")
        for name, child in module._modules.items():
            if child is not None and is_candidate(child):
                homes.setdefault(child, []).append((f"{fqn}.{name}".lstrip("."), module, name))
        parts = parts_of(module) if _num_linears(module) >= len(_MLP_NAMES) else None
        if isinstance(parts, SwigluParts) or (parts is not None and set(_MLP_NAMES) <= module._modules.keys()):
            verdicts[fqn, _SWIGLU] = _mlp_verdict(module, parts, activations)
    for norm, places in homes.items():
        fqn, parent, name = places[0]
        is_shared = len(places) > 1
        verdicts[fqn, _NORM] = "used in several places" if is_shared else _norm_verdict(norm, parent, name, activations)
    # Classes change only now: the source of a fused module's forward is not the stock one's.
    for verdict in verdicts.values():
        if not isinstance(verdict, str):
            verdict()
    reasons = {key: verdict if isinstance(verdict, str) else "" for key, verdict in verdicts.items()}
    rows = {fqn: ProducerPlan(fqn, kind, not reason, reason) for (fqn, kind), reason in reasons.items()}
    return Fusion(tuple(rows[fqn] for fqn, _ in model.named_modules() if fqn in rows))


def _num_linears(module: nn.Module) -> int:
    return sum(isinstance(child, nn.Linear) for child in module.children())


def _norm_verdict(norm: nn.Module, parent: nn.Module, name: str, activations: ActivationsConfig) -> _Verdict:
    producer = _producer(linears_that_read(parent, name), activations)
    if isinstance(producer, str):
        return producer
    arithmetic = arithmetic_of(norm)
    if isinstance(arithmetic, str):
        return arithmetic
    return partial(FusedRMSNorm.from_norm, norm, *arithmetic, producer)


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


def _count(num: int, kind: str) -> str:
    return f"{num} {kind}{'' if num == 1 else 's'}"
