"""State that we add to a checkpoint, under one key of DeepSpeed's model file: builtin types and tensors only.

Weights are not in it: masters and `module` are in DeepSpeed's own places.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fp8_ds.errors import ConfigError
from fp8_ds.nn.linear.payload import OF_RECIPE, TENSOR, granularity_of
from fp8_ds.nn.moe.products import MAX_IN_A_LOOP
from fp8_ds.nn.plan.plan import Plan
from fp8_ds.numerics.formats import E4M3
from fp8_ds.numerics.masters import BY_NAME
from fp8_ds.zero.stage import Fp8Context

CHECKPOINT_KEY = "fp8_ds"
LEFT_OUT_KEY = "left_out"
CALLBACKS_KEY = "following"
"""Key in our state: state of monitor, guard and overshoots."""
LATE_KEY = "late_overflow"
"""Key in our state: a skipped last step that the engine does not know of (`bf16.check_grad_overflow` false)."""
BOUND_SUMS_KEY = "bound_sums"
"""Key in our state: sums that bound Adam's update where betas have moved, by parameter group."""
_VERSION = 1
_NEEDED = ("config", "plan", "scale_inv", "history")
_READ_OF_CONFIG = ("linear", "optimizer", "zero", "tensor_parallel", "schedule", "guard")
_LARGEST_SCALE_INV = torch.finfo(torch.float32).max / E4M3.max
"""`scale_inv` of a weight that holds the largest float32 number."""
_WIDTH = 60


def save_state(context: Fp8Context, left_out: Sequence[str] = ()) -> dict[str, Any]:
    """Return the state of `context`, the same on all ranks, on the CPU, for a checkpoint without weights `left_out`."""
    return {
        "version": _VERSION,
        LEFT_OUT_KEY: list(left_out),
        "config": context.config.to_state(),
        "plan": context.plan.to_state(),
        "scale_inv": {name: p._fp8.scale_inv.detach().cpu().clone() for name, p in context.weights.items()},  # type: ignore[attr-defined]
        "history": None if context.history is None else context.history.state_dict(),
        "release": None if context.release is None else context.release.state_dict(),
        "precision": None if context.precision is None else context.precision.state_dict(),
    }


def split_master_scales(state: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return scale_inv of split masters at the save of `state`, by name; empty if masters were not split."""
    if state is None or master_of(state["config"]) == "fp32":
        return {}
    return {name: value for name, value in state["scale_inv"].items() if _is_power_of_two(value)}  # not frozen ones'


def restore_state(
    context: Fp8Context,
    state: Mapping[str, Any] | None,
    say: Callable[[str], None],
    module_only: bool,
    of_a_stage: bool,
) -> None:
    """Take over `state` and say what differs. It is global and works at any world size.

    Args:
        context: context of the engine, which has just loaded its masters.
        state: from `save_state`, in which `wrong_entries` finds nothing; None: the checkpoint was written without FP8.
        say: called with a line for rank 0.
        module_only: whether the weights are another run's: histories start anew, and all else is this run's own.
        of_a_stage: whether `state` is that of a pipeline stage, which may have had other layers than this one.
    """
    history = None
    if state is None:
        say("fp8: the checkpoint was written without fp8_ds; weights are quantised from its masters")
    else:
        for setting in _settings_that_are_gone(state["config"]):
            say(f"fp8: the checkpoint was trained with {setting}, which is gone: the settings of this run count")
        plan = Plan.from_state(state["plan"])
        fixed = {} if context.precision is None else context.precision.schedule.fixed
        if other := _other_layers(plan, context.plan, of_a_stage, [name for name in fixed if fixed[name] == "bf16"]):
            say(f"{other}. {_how_to_keep(plan, state['config'], context.plan)}")
        if not module_only:
            if context.precision is not None:
                context.precision.load_state_dict(state.get("precision"))
            if context.release is not None and state.get("release") is not None:
                context.release.load_state_dict(state["release"])
            history = state["history"] if _converted(plan) == _converted(context.plan) else None
            if context.history is not None and history is None and context.config.linear.recipe == "delayed":
                say("fp8: amax histories start anew (the checkpoint has none for these layers)")
    if context.history is not None:
        context.history.forget() if history is None else context.history.load_state_dict(history)


def _other_layers(there: Plan, here: Plan, of_a_stage: bool, in_bf16: Collection[str]) -> str:
    """Describe how the layers in FP8 differ; empty if they do not. Those `in_bf16` compute so here in every step."""
    before, now = set(_converted(there)), set(_converted(here))
    now -= set(in_bf16) - before
    if of_a_stage:
        before &= {row.fqn for row in here.layers}
        now &= {row.fqn for row in there.layers}
    if before == now:
        return ""
    return (
        f"fp8: the layers differ from the checkpoint's: {len(now - before)} new in FP8 {sorted(now - before)[:3]}, "
        f"{len(before - now)} back in bf16 {sorted(before - now)[:3]}"
    )


def wrong_entries(
    context: Fp8Context, state: Any, module_only: bool, with_optimizer: bool, of_other_shards: bool
) -> list[str]:
    """Describe the entries that `restore_state` and `split_master_scales` cannot take over; empty if there are none.

    Args:
        context: context of the engine that is to load, which is not changed.
        state: content of a model file under `CHECKPOINT_KEY`.
        module_only: see `restore_state`, which reads less then.
        with_optimizer: whether the same parameters are trained here as where it was saved.
        of_other_shards: whether ranks may have had other shards of the weights than they have here.

    Raises:
        ConfigError: the state, or its layer plan, is of an unknown version.
    """
    if not isinstance(state, Mapping):
        return [_wrong(_at(), "a dict", state)]
    if state.get("version") != _VERSION:
        raise ConfigError(
            f"checkpoint[{CHECKPOINT_KEY!r}]: expected version {_VERSION}, got {state.get('version')!r}. "
            "Load it with the fp8_ds that wrote it, or export it with save_16bit_model there."
        )
    if missing := [key for key in _NEEDED if key not in state]:
        return [f"{_at()} lacks {', '.join(missing)}"]
    if problem := _wrong_config(state["config"]):
        return [problem]
    if (plan := _plan_in(state)) is None:
        return [_wrong(_at("plan"), "rows of layers", state["plan"])]
    if module_only:
        return []
    there = {key: form for key, form in _FORMS.items() if key == "scale_inv" or state.get(key) is not None}
    if found := list(_unlike(state, there)):
        return found
    linear, master = state["config"].get("linear", {}), master_of(state["config"])
    granularity = granularity_of(linear.get("recipe", "tensorwise"), is_split=master != "fp32")
    names = {row.weight_name for row in plan.layers if row.converted}
    shapes: dict[tuple[Any, ...], tuple[int, ...]] = {}
    if granularity == TENSOR:
        # Of others, frozen or in bf16 now, scales may be those of an FP8 folder.
        shapes = {("scale_inv", name): () for name in names & context.trainable.keys()}
    elif with_optimizer and not of_other_shards:  # frozen ones have one scale where masters were split at the start
        here = {name: context.weights[name] for name in names & context.trainable.keys()}
        shapes = {("scale_inv", name): granularity.grid(getattr(p, "ds_shape", p.shape)) for name, p in here.items()}
    if context.history is not None and _converted(plan) == _converted(context.plan):
        tensors = [key for key, form in _FORMS["history"].items() if form is Tensor]
        shapes |= {("history", key): tuple(getattr(context.history, key).shape) for key in tensors}
    saved = state["scale_inv"]
    found = [f"{_at('scale_inv')} lacks {name}" for name in sorted(names - saved.keys())]
    found += [f"{_at('scale_inv', name)} is of no weight that is in FP8 by its plan" for name in saved.keys() - names]
    own = context.weights.keys() - context.quantized.keys()  # with scales of their folder, which no load changes
    found += _wrong_numbers({name: value for name, value in saved.items() if name not in own}, shapes, "scale_inv")
    for key in ("history", "release", BOUND_SUMS_KEY):
        found += _wrong_numbers(state.get(key) or {}, shapes, key)
    for name, value in (state.get("precision") or {}).get("overrides", {}).items():
        if value not in ("bf16", "fp8"):
            found.append(_wrong(_at("precision", "overrides", name), '"bf16" or "fp8"', value))
    if not found and master != "fp32" and with_optimizer:
        odd = [name for name in context.trainable if name in saved and not _is_power_of_two(saved[name])]
        found = [_wrong(_at("scale_inv", name), "a power of two", f"{float(saved[name]):g}") for name in odd]
    return found


_FORMS: dict[str, Any] = {
    "scale_inv": {},
    "history": {"amax_history": Tensor, "scale": Tensor, "scale_inv": Tensor, "amax_local": Tensor, "num_updates": int},
    "release": {"last_norm": float},
    "precision": {"overrides": {}},
    BOUND_SUMS_KEY: {},
    LATE_KEY: bool,
}
"""Required form of entries, by key: a class, or the keys that a dict has at least."""


def _unlike(value: Any, form: Any, *at: object) -> Iterator[str]:
    """Describe values of the wrong form, in the state's entry at these keys."""
    if isinstance(form, type):
        if not isinstance(value, form):
            yield _wrong(_at(*at), form.__name__, value)
    elif not isinstance(value, Mapping):
        yield _wrong(_at(*at), "a dict", value)
    else:
        yield from (f"{_at(*at)} lacks {key}" for key in form.keys() - value.keys())
        for key in form.keys() & value.keys():
            yield from _unlike(value[key], form[key], *at, key)


def _wrong_numbers(value: Any, shapes: Mapping[tuple[Any, ...], tuple[int, ...]], *at: object) -> Iterator[str]:
    """Describe numbers and shapes of tensors that no save writes, in the state's entry at these keys."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _wrong_numbers(inner, shapes, *at, key)
        return
    is_weights = at[0] == "scale_inv"
    largest = _LARGEST_SCALE_INV if is_weights else torch.finfo(torch.float32).max
    is_above_0 = is_weights or at[-1] in ("scale", "scale_inv")
    shape = shapes.get(at)
    expected = f"float32{'' if shape is None else f' of shape {shape}'}, {'above' if is_above_0 else 'from'} 0"
    expected += f"{'' if is_above_0 else ' on'} and up to {largest:.3g}"
    if isinstance(value, Tensor) and (value.dtype != torch.float32 or (shape is not None and value.shape != shape)):
        got = f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"
        yield _wrong(_at(*at), expected, got)
    elif not isinstance(value, Tensor if is_weights else Tensor | int | float):
        yield _wrong(_at(*at), expected, f"{type(value).__name__} {value!r}")
    else:
        numbers = torch.as_tensor(value, dtype=torch.float32)
        is_good = (numbers > 0 if is_above_0 else numbers >= 0) & (numbers <= largest)
        if at[-1] == "amax_local":  # of a step that is not over, which may be infinite or NaN
            is_good = ~(numbers < 0)
        if len(bad := numbers[~is_good]):
            yield _wrong(_at(*at), expected, f"{float(bad[0]):g}")


def _at(*keys: object) -> str:
    return "".join([CHECKPOINT_KEY, *(f"[{key!r}]" for key in keys)])


def _wrong(place: str, expected: str, got: Any) -> str:
    return f"{place}: expected {expected}, got {str(got)[:_WIDTH]}"


def _is_power_of_two(value: Tensor) -> bool:
    return value.numel() == 1 and math.frexp(float(value))[0] == 0.5


def _wrong_config(config: Any) -> str:
    if not isinstance(config, Mapping) or not all(isinstance(config.get(key, {}), Mapping) for key in _READ_OF_CONFIG):
        return _wrong(_at("config"), 'an "fp8" block', config)
    if (recipe := config.get("linear", {}).get("recipe", "tensorwise")) not in OF_RECIPE:
        return _wrong(_at("config", "linear", "recipe"), f"one of {', '.join(OF_RECIPE)}", recipe)
    if (master := master_of(config)) not in BY_NAME:
        return _wrong(_at("config", "optimizer", "master_format"), f"one of {', '.join(BY_NAME)}", master)
    return ""


def _plan_in(state: Mapping[str, Any]) -> Plan | None:
    """Return the layer plan; None if it is malformed."""
    try:
        plan = Plan.from_state(state["plan"])
    except (AttributeError, KeyError, TypeError):
        return None
    are_rows = all(isinstance(row.fqn, str) and isinstance(row.converted, bool) for row in plan.layers)
    return plan if are_rows else None


def master_of(config: Mapping[str, Any]) -> str:
    """Return the format of the masters (numerics/masters.py) by the "config" of a state."""
    return str(config.get("optimizer", {}).get("master_format", "fp32"))


def _settings_that_are_gone(config: Mapping[str, Any]) -> list[str]:
    """Name settings of an older version's "fp8" block that this version does not have."""
    optimizer, schedule = config.get("optimizer", {}), config.get("schedule", {})
    step, below_lr = schedule.get("fp32_states_from_step"), schedule.get("bf16_below_lr")
    num_steps = config.get("guard", {}).get("return_after")
    found = {
        'optimizer.master "fp32" beside FP8 states': optimizer.get("states") == "fp8" and master_of(config) == "fp32",
        'optimizer.release_clipping "per_tensor"': optimizer.get("release_clipping") == "per_tensor",
        "zero.keep_bf16_shard true": config.get("zero", {}).get("keep_bf16_shard"),
        f"schedule.fp32_states_from_step {step}": step,
        f"schedule.bf16_below_lr {below_lr}": below_lr,
        f"guard.return_after {num_steps}": num_steps,
        'tensor_parallel.scales "shared"': config.get("tensor_parallel", {}).get("scales") == "shared",
    }
    return [setting for setting, is_set in found.items() if is_set]


def _converted(plan: Plan) -> list[str]:
    return [row.fqn for row in plan.layers if row.converted]


def _how_to_keep(plan: Plan, config: Mapping[str, Any], current: Plan) -> str:
    """Say what to write so that the next start trains the layers of the checkpoint's `plan` in FP8, and no others.

    Layers that only the `current` plan has (experts, where the checkpoint is older) were bf16.
    """
    if plan.num_converted == 0 and config.get("optimizer", {}).get("states") != "fp8":
        return 'The checkpoint has none in FP8: to go on so, set "fp8.enabled" to false.'
    known = {row.fqn for row in plan.layers}
    others = (replace(row, converted=False) for row in current.layers if row.fqn not in known)
    patterns = Plan((*plan.layers, *others)).filter_fqns()
    if patterns is None:
        return "No fp8.linear.filter_fqns names the checkpoint's layers."
    told = f'To go on with the checkpoint\'s layers, start with "linear": {json.dumps({"filter_fqns": patterns})}.'
    experts = {layer.fqn for layer in plan.layers if layer.converted and layer.num_experts > MAX_IN_A_LOOP}
    if any(row.fqn in experts for row in current.layers if not row.converted):
        told += f" More than {MAX_IN_A_LOOP} experts of a layer are in FP8 only where they are computed in one launch."
    return told
