"""Choice of the linears that become FP8: the plan, its text, and its application."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass, field, replace
from functools import partial
from types import BuiltinFunctionType, MappingProxyType
from typing import Any

import torch
from torch import nn

from fp8_ds.config import LinearConfig
from fp8_ds.errors import ConfigError
from fp8_ds.nn import experts
from fp8_ds.nn.dataflow import linears_that_read
from fp8_ds.nn.expert_products import why_too_many
from fp8_ds.nn.layers import fp8_layers
from fp8_ds.nn.linear import Fp8Conv1D, Fp8Linear, conv1d_class, is_conv1d, replaced_forward
from fp8_ds.nn.matrices import OtherMatrices, full_shape, is_layer
from fp8_ds.nn.recipe import DelayedRecipe, Recipe, TensorwiseRecipe
from fp8_ds.nn.recipe_fine import BlockwiseRecipe, RowwiseGradWeightHpRecipe, RowwiseRecipe
from fp8_ds.nn.shared import SharedInput
from fp8_ds.nn.stacks import NameFilter, at_ends
from fp8_ds.numerics.formats import BY_NAME, E4M3
from fp8_ds.scaling.delayed import AmaxHistory

_RECIPES: dict[str, type[Recipe]] = {
    recipe.name: recipe for recipe in (TensorwiseRecipe, RowwiseRecipe, RowwiseGradWeightHpRecipe, BlockwiseRecipe)
}
ForeignLinears = Mapping[type[nn.Module], type[Fp8Linear] | None]
"""Classes of linears that are no nn.Linear, each with its FP8 class; None: it stays in high precision."""

INPUT_SLOTS = slice(0, None, 2)
"""Slots of the inputs in the amax history of `apply_plan`; the others are of grad_outputs."""

_ONE_SCALE = ("tensorwise", "delayed")  # for a whole weight
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
    others: OtherMatrices | None = field(default=None, compare=False)
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

    def table(self) -> str:
        """Return one row per linear: name, [out, in], fp8 or bf16, reason."""
        width = max((len(layer.fqn) for layer in self.layers), default=0)
        rows = [
            f"{layer.fqn:<{width}}  {list(layer.shape)}  {'fp8 ' if layer.converted else 'bf16'}  {layer.reason}"
            for layer in self.layers
        ]
        return "\n".join([self.describe(), *rows])

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


def _fp8_class(module: nn.Module, foreign: ForeignLinears) -> type[Fp8Linear] | None:
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


def _verdict(
    module: nn.Module, name: str, left: str | None, uses: Counter[int], config: LinearConfig, foreign: ForeignLinears
) -> tuple[bool, str]:
    """Return (converted, reason) for the weight `name` of `module`; `left` is the reason why it must stay in bf16."""
    weight, is_experts = module._parameters.get(name), experts.is_experts(module)
    if not is_experts and _fp8_class(module, foreign) is None:
        return False, f"a {type(module).__name__}, not exactly nn.Linear"
    if weight is None:
        return False, "weight is no Parameter of its own"
    if left is not None:
        return False, left
    if uses[id(weight)] > 1:
        return False, "tied weight"
    if not weight.is_floating_point() or weight.element_size() < 2:
        return False, f"dtype {str(weight.dtype).removeprefix('torch.')}"
    if 0 in full_shape(weight):
        return False, "empty"
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
    torch's product in it; if no name of it contains one of `filter_fqns`; if it is not in the layers that stay in bf16
    at either end; if it shares its weight with no other module; and if it trains (or `frozen` is "fp8").

    Args:
        model: any nn.Module, also under deepspeed.zero.Init, before conversion.
        linear_config: the "linear" block.
        may_be_empty: whether the plan may convert no linear (something else than linears is in FP8).
        foreign: other classes of linears, by exact class.
        device: the training device, which decides whether many experts are a loop. None: a GPU of compute capability
            9.0, which need not be here.
        linear: the function that linears will call in training as torch.nn.functional.linear. None: the present one.

    Raises:
        ConfigError: no linear is left to convert, or the model is converted already; or as in `at_ends`.
    """
    names: dict[Any, list[str]] = {}
    for fqn, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, Fp8Linear | experts.Fp8Experts):
            raise converted_already(f"{type(module).__name__} at {fqn!r}")
        if is_layer(module, foreign):
            names.setdefault(module, []).append(fqn)
    name_filter = NameFilter(model, linear_config.filter_fqns)
    uses = Counter(id(p) for module in model.modules() for p in module._parameters.values())
    ends = at_ends(model, linear_config, lambda module: is_layer(module, foreign))
    layers: list[LayerPlan] = []
    for module, fqns in names.items():
        rows, replaced = [], _replaced(module, foreign, linear)
        for name, own_fqns, shape in _weights(module, fqns):
            left = "filter_fqns" if name_filter.names(own_fqns) else ends.get(module, replaced)
            converted, reason = _verdict(module, name, left, uses, linear_config, foreign)
            rows.append(LayerPlan(own_fqns[0], shape[-2], shape[-1], converted, reason, *shape[:-2]))
        layers += _without_too_many(rows, linear_config, device)
    name_filter.check_found()
    plan = Plan(tuple(layers), OtherMatrices.of(model, foreign))
    if plan.num_converted == 0 and not may_be_empty:
        raise _nothing_to_convert(plan)
    return plan


def _without_too_many(rows: list[LayerPlan], config: LinearConfig, device: torch.device | None) -> list[LayerPlan]:
    """Return the rows of one module, with experts in bf16 if they are too many."""
    features = [size for row in rows for size in row.shape[-2:]]
    is_whole = all(row.converted for row in rows)
    reason = why_too_many(rows[0].num_experts, features, config, device, is_whole=is_whole)
    return [replace(row, converted=False, reason=reason) if reason and row.converted else row for row in rows]


def converted_already(found: str) -> ConfigError:
    return ConfigError(
        f"model: expected one that no engine has converted, got {found}. Build it anew for another engine, and load "
        "into it what `engine.save_16bit_model` of the first has written, after a barrier: bf16 of its masters."
    )


def _weights(module: Any, fqns: list[str]) -> Iterator[tuple[str, list[str], tuple[int, ...]]]:
    """Yield each weight that has a row: its name in `module`, all names of the row, and the shape in the row."""
    if not experts.is_experts(module):
        yield "weight", fqns, _features(module)
        return
    for name in experts.WEIGHTS:
        yield name, [f"{fqn}.{name}".lstrip(".") for fqn in fqns], tuple(full_shape(module._parameters[name]))


def by_reason(left: Iterable[tuple[str, str]]) -> list[str]:
    """Return one text per reason, `a.b and 2 more (its forward was replaced)`, of (name, reason) pairs."""
    names: dict[str, list[str]] = {}
    for fqn, reason in left:
        names.setdefault(reason, []).append(fqn)
    more = {reason: f" and {len(fqns) - 1} more" if len(fqns) > 1 else "" for reason, fqns in names.items()}
    return [f"{fqns[0]}{more[reason]} ({reason})" for reason, fqns in names.items()]


def _nothing_to_convert(plan: Plan) -> ConfigError:
    found = ", ".join(by_reason((layer.fqn, layer.reason) for layer in plan.layers)) or "no nn.Linear at all"
    advice = "Shorten"
    if plan.others is not None and plan.others.kinds:
        found += f"; {plan.others.describe()}, not nn.Linear"
        advice = (
            "Only linears, and experts as Mixtral's, are computed in FP8: use a model of these, put nn.Linear in place "
            f'of {plan.others.kinds[0][0]}, or set "optimizer.states" to "fp8", which needs no linear. Else shorten'
        )
    return ConfigError(
        f"fp8: expected at least one linear to convert, got none of {len(plan.layers)}: {found}. {advice} "
        f'"linear.filter_fqns", set "linear.frozen" to "fp8" for frozen weights, untie shared weights, '
        'wrap forwards after the conversion, undo what replaces a function for all of them, or turn "fp8.enabled" off.'
    )


def apply_plan(
    model: nn.Module,
    plan: Plan,
    linear_config: LinearConfig,
    device: torch.device | str,
    foreign: ForeignLinears = MappingProxyType({}),
) -> AmaxHistory | None:
    """Convert the plan's FP8 layers in place, each to an Fp8Linear or a weight of Fp8Experts.

    All of them are converted, or none; the rest of the model is untouched.

    Args:
        model, linear_config, foreign: as given to `make_plan`.
        plan: from `make_plan` or `Plan.from_state`.
        device: where the amax history lives, the device of training.

    Returns:
        The amax history for recipe "delayed": slot 2 i for the i-th converted layer's input, 2 i + 1 for its
        grad_output. None for the other recipes.

    Raises:
        ConfigError: a layer of the plan is missing, is of another shape, has a forward of its own, or is converted
            already; nothing is changed.
    """
    modules: dict[str, Any] = dict(model.named_modules(remove_duplicate=False))
    converters = [_converter(modules, layer, foreign) for layer in plan.layers if layer.converted]
    shared = SharedInput()
    if linear_config.recipe != "delayed":
        for convert in converters:
            convert(_RECIPES[linear_config.recipe](linear_config, shared))
        return None
    fp8_max = [E4M3.max, BY_NAME[linear_config.grad_dtype].max] * len(converters)
    names = [f"{layer.fqn} {kind}" for layer in plan.layers if layer.converted for kind in ("input", "grad_output")]
    history = AmaxHistory(len(fp8_max), fp8_max, device=device, names=names)
    for i, convert in enumerate(converters):
        convert(DelayedRecipe(linear_config, history, 2 * i, 2 * i + 1, shared))
    _name_leaders(model)
    return history


def _converter(modules: Mapping[str, Any], layer: LayerPlan, foreign: ForeignLinears) -> Callable[[Recipe], object]:
    """Return the function that puts `layer` into FP8, given its recipe; raise as `apply_plan` does."""
    owner, _, name = layer.weight_name.rpartition(".")
    module = modules.get(owner)
    convert: Callable[[Recipe], object] | None = None
    if module is not None and layer.num_experts and experts.is_stock_experts(module):
        convert = partial(experts.Fp8Experts.take, module, name)
    elif module is not None and not layer.num_experts and (fp8_class := _fp8_class(module, foreign)) is not None:
        convert = partial(fp8_class.from_linear, module)
    if convert is None:
        found = "nothing" if module is None else f"a {type(module).__name__}"
        what = "experts" if layer.num_experts else "an nn.Linear"
        raise ConfigError(
            f"layer plan: expected {what} at {layer.fqn!r}, got {found}. Apply a plan once, to its own model."
        )
    shape = next((shape for own, _, shape in _weights(module, [owner]) if own == name), ())
    if shape != layer.shape:
        raise ConfigError(
            f"layer plan: expected {layer.fqn!r} of shape {layer.shape}, got {shape}. Use the plan of this model."
        )
    assert module is not None
    if (reason := replaced_forward(module, experts.is_experts(module))) is not None:
        raise ConfigError(
            f"layer plan: expected {layer.fqn!r} with its class's forward, got one that was replaced ({reason}). "
            "Wrap it after the conversion."
        )
    return convert


def _name_leaders(model: nn.Module) -> None:
    """Give layers with delayed scales that read one module's output the first of them as `leader`, others none."""
    recipes = [layer.fp8_recipe for layer in fp8_layers(model).values()]
    all_delayed = [recipe for recipe in recipes if isinstance(recipe, DelayedRecipe)]
    for recipe in all_delayed:
        recipe.leader = None
    if not all_delayed:
        return
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child is None or isinstance(child, nn.Linear):
                continue
            readers = [one.fp8_recipe for one in linears_that_read(parent, name) if isinstance(one, Fp8Linear)]
            delayed = [recipe for recipe in readers if isinstance(recipe, DelayedRecipe)]
            if len(delayed) > 1:
                for recipe in delayed:
                    recipe.leader = delayed[0].slot_x


def revert(model: nn.Module, plan: Plan, fqns: Collection[str], reason: str) -> Plan:
    """Make the layers `fqns` nn.Linear again, or experts in bf16, with the same Parameters, before training.

    Returns:
        The applied plan with these layers in bf16 for that reason."""
    layers = fp8_layers(model)
    for fqn in fqns:
        layers[fqn].revert()
    _name_leaders(model)  # none whose amax nobody records any more
    rows = (replace(row, converted=False, reason=reason) if row.fqn in fqns else row for row in plan.layers)
    return replace(plan, layers=tuple(rows))
