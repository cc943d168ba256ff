"""The plan: which linears and experts' weights become FP8, its text, and the matrices that it leaves out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import astuple, dataclass, field, replace
from types import BuiltinFunctionType, MappingProxyType
from typing import Any

import torch
from torch import nn

from fp8_ds.config import LinearConfig
from fp8_ds.errors import ConfigError
from fp8_ds.nn.fused.search import by_reason
from fp8_ds.nn.linear.fp8_linear import Fp8Conv1D, Fp8Linear, conv1d_class, full_shape, is_conv1d, replaced_forward
from fp8_ds.nn.moe import experts, products
from fp8_ds.nn.moe.experts import is_experts, why_not
from fp8_ds.nn.moe.stored import stored_names, why_not_frozen
from fp8_ds.nn.plan.ends import NameFilter

ForeignLinears = Mapping[type[nn.Module], type[Fp8Linear] | None]
"""Classes of linears that are no nn.Linear, each with its FP8 class; None: it stays in high precision."""

_ONE_SCALE = ("tensorwise", "delayed")  # for a whole weight
_NOT_EXACTLY = ", not exactly nn.Linear"
_NUM_NAMES_SHOWN = 4
_STATE_VERSION = 1


@dataclass(frozen=True)
class LayerPlan:
    """One linear of the model: its name, its full (unsharded) weight shape, and what becomes of it, with the reason.

    It can also be one weight of a layer's experts, named as the parameter; the features are those of one expert.
    """

    fqn: str
    out_features: int
    in_features: int
    converted: bool
    reason: str
    num_experts: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """(out_features, in_features); for experts (num_experts, out_features, in_features)."""
        features = self.out_features, self.in_features
        return (self.num_experts, *features) if self.num_experts else features

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def weight_name(self) -> str:
        return self.fqn if self.num_experts else f"{self.fqn}.weight"


@dataclass(frozen=True)
class Plan:
    """All linears of a model in module order; the same on every rank, and kept in the checkpoint."""

    layers: tuple[LayerPlan, ...]
    others: OtherWeights | None = field(default=None, compare=False)
    """Matrices that are no linears, for the text alone; None in a plan from a checkpoint."""

    @property
    def num_converted(self) -> int:
        return sum(layer.converted for layer in self.layers)

    def describe(self) -> str:
        """Say in one line how many linears are FP8, their share of linear and of all weights, what is not and why."""
        numel = sum(layer.numel for layer in self.layers)
        numel_fp8 = sum(layer.numel for layer in self.layers if layer.converted)
        share = 100.0 * numel_fp8 / max(numel, 1)
        has_experts = any(layer.num_experts for layer in self.layers)
        what, whose = ("linears and weights of experts", "these") if has_experts else ("linears", "linear weights")
        text = f"fp8: {self.num_converted} of {len(self.layers)} {what}, {share:.1f} % of {whose}"
        others = self.others if self.others is not None and self.others.kinds else None
        if others is not None:
            text += f", {others.percent_of_model(numel_fp8):.1f} % of all weights"
        left = [layer for layer in self.layers if not layer.converted]
        if left:
            names = ", ".join(f"{layer.fqn} ({layer.reason})" for layer in left[:_NUM_NAMES_SHOWN])
            more = f", and {len(left) - _NUM_NAMES_SHOWN} more" if len(left) > _NUM_NAMES_SHOWN else ""
            text += f"; bf16: {names}{more}"
        if others is not None:
            share = others.percent_of_model(others.numel)
            text += f"; bf16, not nn.Linear: {others.describe()} ({share:.1f} % of all weights)"
        return text

    def filter_fqns(self) -> list[str] | None:
        """Return the shortest name endings that, as `linear.filter_fqns`, leave just this plan's bf16 layers in bf16.

        The result is None if no endings do: the name of a bf16 layer is part of the name of an FP8 layer.
        """
        in_fp8 = [layer.fqn for layer in self.layers if layer.converted]
        patterns: list[str] = []
        for layer in self.layers:
            if layer.converted or any(pattern in layer.fqn for pattern in patterns):
                continue
            parts = layer.fqn.split(".")
            endings = (".".join(parts[-length:]) for length in range(1, len(parts) + 1))
            found = next((end for end in endings if not any(end in fqn for fqn in in_fp8)), None)
            if found is None:
                return None
            patterns.append(found)
        return patterns

    def to_state(self) -> dict[str, Any]:
        """Return the plan in builtin types, readable by `torch.load(weights_only=True)`."""
        rows = [list(astuple(e))[: 6 if e.num_experts else 5] for e in self.layers]
        return {"version": _STATE_VERSION, "layers": rows}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Plan:
        """Read a plan that `to_state` wrote."""
        if state.get("version") != _STATE_VERSION:
            raise ConfigError(
                f"layer plan: expected version {_STATE_VERSION}, got {state.get('version')!r}. "
                "Load the checkpoint with the fp8_ds that wrote it."
            )
        return cls(tuple(LayerPlan(*row) for row in state["layers"]))


def fp8_class_of(module: nn.Module, foreign: ForeignLinears) -> type[Fp8Linear] | None:
    """Return the FP8 class for `module`, by its exact class or, if tensor-parallel, its `fp8_class`; else None."""
    if type(module) in foreign:
        return foreign[type(module)]
    if type(module) is conv1d_class():
        return Fp8Conv1D
    return Fp8Linear if type(module) is nn.Linear else vars(type(module)).get("fp8_class")


def _features(module: Any) -> tuple[int, ...]:
    """Return (out_features, in_features) of a linear, in either layout of its weight."""
    weight = module._parameters.get("weight")
    if weight is None:
        return module.out_features, module.in_features
    shape = full_shape(weight)
    return shape[::-1] if is_conv1d(module) else shape


def _replaced(module: nn.Module, foreign: ForeignLinears, linear: Callable[..., Any] | None) -> str | None:
    """Say what has replaced the forward of `module`, or the product in it; None if nothing has.

    DeepSpeed's own products do not count: ZeRO-3's, which stays for good, and that of its flops profiler.
    """
    if (reason := replaced_forward(module, experts.is_experts(module))) is not None:
        return reason
    product: Any
    name, product = "torch.nn.functional.linear", linear or torch.nn.functional.linear
    if type(module) in foreign:
        name, product = "torch.matmul", torch.matmul
    elif is_conv1d(module):
        name, product = "torch.addmm", torch.addmm
    defined_in = getattr(product, "__globals__", {}).get("__name__", "")
    is_stock = isinstance(product, BuiltinFunctionType) or defined_in.startswith("deepspeed.")
    return None if is_stock else f"{name} was replaced"


def _decide(
    module: nn.Module, name: str, left: str | None, uses: Counter[int], config: LinearConfig, foreign: ForeignLinears
) -> tuple[bool, str]:
    """Return (converted, reason) for the weight `name` of `module`; `left` is the reason why it must stay in bf16."""
    weight, is_experts = module._parameters.get(name), experts.is_experts(module)
    if not is_experts and fp8_class_of(module, foreign) is None:
        return False, f"a {type(module).__name__}{_NOT_EXACTLY}"
    if weight is None:
        return False, "weight is no Parameter of its own"
    if left is not None:
        return False, left
    if uses[id(weight)] > 1:
        return False, "tied weight"
    is_number = weight.is_floating_point() and weight.element_size() >= 2
    is_stored = name in stored_names(module)
    if not is_number and not is_stored:
        return False, f"dtype {str(weight.dtype).removeprefix('torch.')}"
    if 0 in full_shape(weight):
        return False, "empty"
    if _is_frozen_stack(module, name, config):
        reason = why_not_frozen(module, name)
        return reason is None, reason or "frozen"
    if (is_experts or is_conv1d(module)) and config.recipe not in _ONE_SCALE:
        return False, f"{'experts' if is_experts else 'a Conv1D'}, which can be {' or '.join(_ONE_SCALE)}"
    if is_experts and foreign:
        return False, "experts under AutoTP"
    if not weight.requires_grad:
        return config.frozen == "fp8", "frozen"
    return True, "eligible"


def make_plan(
    model: nn.Module,
    linear_config: LinearConfig,
    may_be_empty: bool = False,
    foreign: ForeignLinears = MappingProxyType({}),
    device: torch.device | None = None,
    linear: Callable[..., Any] | None = None,
) -> Plan:
    """Decide which linears and experts' weights of the model become FP8.

    Ranks with like devices decide alike: by names, classes, shapes and the device's kernels. A layer is converted if it
    is exactly an nn.Linear, transformers' Conv1D or a weight of experts as Mixtral's, with its class's forward and
    torch's product in it; if no name of it contains one of `filter_fqns`; if it shares its weight with no other module;
    and if it trains (or `frozen` is "fp8").

    Args:
        model: any nn.Module, also under deepspeed.zero.Init, before conversion.
        linear_config: the "linear" block.
        may_be_empty: whether the plan may convert no linear (something else than linears is in FP8).
        foreign: other classes of linears, by exact class.
        device: the training device, which decides whether many experts are a loop. None: a GPU of compute capability
            9.0, which need not be here.
        linear: the function that linears will call in training as torch.nn.functional.linear. None: the present one.

    Raises:
        ConfigError: no linear is left to convert, or the model is converted already.
    """
    names: dict[Any, list[str]] = {}
    for fqn, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, Fp8Linear | experts.Fp8Experts):
            raise converted_already(f"{type(module).__name__} at {fqn!r}")
        if is_layer(module, foreign):
            names.setdefault(module, []).append(fqn)
    name_filter = NameFilter(model, linear_config.filter_fqns)
    uses = Counter(id(p) for module in model.modules() for p in module._parameters.values())
    layers: list[LayerPlan] = []
    for module, fqns in names.items():
        rows, replaced = [], _replaced(module, foreign, linear)
        for name, own_fqns, shape in weights_of(module, fqns):
            left = "filter_fqns" if name_filter.names(own_fqns) else replaced
            converted, reason = _decide(module, name, left, uses, linear_config, foreign)
            rows.append(LayerPlan(own_fqns[0], shape[-2], shape[-1], converted, reason, *shape[:-2]))
        layers += _without_too_many(module, rows, linear_config, device)
    name_filter.check_found()
    plan = Plan(tuple(layers), OtherWeights.of(model, foreign))
    if plan.num_converted == 0 and not may_be_empty:
        raise _nothing_to_convert(plan)
    return plan


def _is_frozen_stack(module: Any, name: str, config: LinearConfig) -> bool:
    """Whether it is an experts' weight of an FP8 folder that is to keep its bytes, whatever the recipe of the rest."""
    is_stored = experts.is_experts(module) and name in stored_names(module)
    return is_stored and config.frozen == "fp8" and not module._parameters[name].requires_grad


def _without_too_many(
    module: Any, rows: list[LayerPlan], config: LinearConfig, device: torch.device | None
) -> list[LayerPlan]:
    """Return the rows of `module`, with experts in bf16 if they would be a loop of more than `MAX_IN_A_LOOP`.

    Frozen ones that keep the bytes of an FP8 folder are so for their memory, and always a loop.
    """
    if rows[0].num_experts <= products.MAX_IN_A_LOOP:
        return rows
    features = [size for row in rows for size in row.shape[-2:]]
    can_be_fp8 = all(row.converted for row in rows) and config.backend == "torch"
    if can_be_fp8 and products.can_be_one_launch(features, device):
        return rows
    reason = f"more than {products.MAX_IN_A_LOOP} experts, which would be a loop"
    frozen = {row.fqn for row in rows if _is_frozen_stack(module, row.fqn.rpartition(".")[2], config)}
    return [
        replace(row, converted=False, reason=reason) if row.converted and row.fqn not in frozen else row for row in rows
    ]


def converted_already(found: str) -> ConfigError:
    return ConfigError(
        f"model: expected one that no engine has converted, got {found}. Build it anew for another engine, and load "
        "into it what `engine.save_16bit_model` of the first has written, after a barrier: bf16 of its masters."
    )


def weights_of(module: Any, fqns: list[str]) -> Iterator[tuple[str, list[str], tuple[int, ...]]]:
    """Yield each weight that has a row: its name in `module`, all names of the row, and the shape in the row."""
    if not experts.is_experts(module):
        yield "weight", fqns, _features(module)
        return
    for name in experts.WEIGHTS:
        yield name, [f"{fqn}.{name}".lstrip(".") for fqn in fqns], tuple(full_shape(module._parameters[name]))


def _nothing_to_convert(plan: Plan) -> ConfigError:
    found = ", ".join(by_reason((layer.fqn, layer.reason) for layer in plan.layers)) or "no nn.Linear at all"
    advice = "Shorten"
    kinds = [layer.reason.removesuffix(_NOT_EXACTLY) for layer in plan.layers if layer.reason.endswith(_NOT_EXACTLY)]
    if plan.others is not None and plan.others.kinds:
        found += f"; {plan.others.describe()}, not nn.Linear"
        kinds.append(plan.others.kinds[0][0])
    if kinds:
        advice = (
            "Only linears, and experts as Mixtral's, are computed in FP8: use a model of these, put nn.Linear in place "
            f'of {kinds[0]}, or set "optimizer.states" to "fp8", which needs no linear. Else shorten'
        )
    return ConfigError(
        f"fp8: expected at least one linear to convert, got none of {len(plan.layers)}: {found}. {advice} "
        f'"linear.filter_fqns", set "linear.frozen" to "fp8" for frozen weights, untie shared weights, '
        'wrap forwards after the conversion, undo what replaces a function for all of them, or turn "fp8.enabled" off.'
    )


_NUM_KINDS_SHOWN = 4


@dataclass(frozen=True)
class OtherWeights:
    """Matrices that a plan leaves in bf16 without a row: classes and numbers of the modules that hold them, those of
    most weights first; the number of elements in them, and in all parameters."""

    kinds: tuple[tuple[str, int], ...]
    numel: int
    numel_model: int

    @classmethod
    def of(cls, model: nn.Module, foreign: Collection[type[nn.Module]] = ()) -> OtherWeights:
        """Count what `other_weights` yields for `model`."""
        modules: dict[str, set[int]] = {}
        numels: Counter[str] = Counter()
        seen: set[int] = set()
        for _, module, _, p in other_weights(model, foreign):
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


def other_weights(
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


def _is_embedding(module: nn.Module) -> bool:
    """Whether `module` is an embedding, by class or name: AutoTP and vision models have other classes."""
    return isinstance(module, nn.Embedding) or "Embedding" in type(module).__name__
