"""What we add to a checkpoint, under one key of DeepSpeed's model file: builtin types and tensors only.

Weights are not in it: masters and `module` are in DeepSpeed's own places, and scales follow from masters. They are
saved all the same, so that a tool can read FP8 bytes' scales without masters.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fp8_ds.config import LinearConfig
from fp8_ds.errors import ConfigError
from fp8_ds.formats import E4M3
from fp8_ds.nn.convert import Plan
from fp8_ds.nn.expert_products import MAX_IN_A_LOOP
from fp8_ds.nn.stacks import AT_END, AT_START
from fp8_ds.optim.masters import BY_NAME
from fp8_ds.scaling import AmaxHistory
from fp8_ds.scaling.granularity import OF_RECIPE, TENSOR
from fp8_ds.zero.context import Fp8Context

CHECKPOINT_KEY = "fp8_ds"
LEFT_OUT_KEY = "left_out"
FOLLOWING_KEY = "following"
"""Within our state: of monitor and guard."""
LATE_KEY = "late_overflow"
"""Likewise: the last step was skipped, and the engine does not know it yet (`bf16.check_grad_overflow` false)."""
BOUND_SUMS_KEY = "bound_sums"
"""Likewise: by parameter group, what bounds Adam's update where betas have moved."""
_VERSION = 1
_NEEDED = ("config", "plan", "scale_inv", "history")
_LARGEST_SCALE_INV = torch.finfo(torch.float32).max / E4M3.max
"""That of the largest number that a weight may hold."""
_WIDTH = 60


def save_state(context: Fp8Context, left_out: Sequence[str] = ()) -> dict[str, Any]:
    """Plan, settings, scales by weight name, amax histories, overrides of precision; the same on all ranks, on the CPU.

    Readable by `torch.load(weights_only=True)`.

    Args:
        context: of the engine that saves.
        left_out: names of the weights that the checkpoint does not have.
    """
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
    """scale_inv by weight name that split masters were stored with when `state` was saved; empty if they were not."""
    if state is None or state.get("version") != _VERSION:
        return {}
    if _master_of(state["config"]) == "fp32":
        return {}
    return {name: value for name, value in state["scale_inv"].items() if _is_power_of_two(value)}  # not frozen ones'


def restore_state(
    context: Fp8Context,
    state: Mapping[str, Any] | None,
    say: Callable[[str], None],
    *,
    module_only: bool = False,
    of_a_stage: bool = False,
) -> None:
    """Take over what `state` says; say what differs. Works for any world size: all of it is global.

    Args:
        context: of the engine that has just loaded its masters.
        state: from `save_state`, or None if the checkpoint was written without FP8.
        say: called with a line for rank 0.
        module_only: the weights are another run's: histories start anew, and all else is this run's own.
        of_a_stage: `state` is of a pipeline stage, which may have had other layers of the model than this one has.

    Raises:
        ConfigError: the state is of an unknown version.
    """
    if state is None:
        say("fp8: the checkpoint was written without fp8_ds; weights are quantised from its masters")
        if context.history is not None:
            context.history.forget()
        return
    _refuse_other_version(state)
    for setting in _settings_that_are_gone(state["config"]):
        say(f"fp8: the checkpoint was trained with {setting}, which is gone: the settings of this run count")
    plan = Plan.from_state(state["plan"])
    same_layers = _converted(plan) == _converted(context.plan)
    if not same_layers:
        before, now = set(_converted(plan)), set(_converted(context.plan))
        if of_a_stage:
            before &= {row.fqn for row in context.plan.layers}
            now &= {row.fqn for row in plan.layers}
        if before != now:
            say(
                "fp8: the layers differ from the checkpoint's: "
                f"{len(now - before)} new in FP8 {sorted(now - before)[:3]}, "
                f"{len(before - now)} back in bf16 {sorted(before - now)[:3]}. "
                f"{_how_to_keep(plan, state['config'], context.plan, context.config.linear)}"
            )
    if module_only:
        if context.history is not None:
            context.history.forget()
        return
    if context.precision is not None:
        context.precision.load_state_dict(state.get("precision"))
    if context.release is not None and state.get("release") is not None:
        context.release.load_state_dict(state["release"])
    history = state["history"]
    if context.history is None:
        return
    if history is None or not same_layers:
        say("fp8: amax histories start anew (the checkpoint has none for these layers)")
        context.history.forget()
        return
    context.history.load_state_dict(history)


# --- what is wrong with a state, said before anything is taken over ---


def wrong_entries(
    context: Fp8Context, state: Any, *, module_only: bool, with_optimizer: bool, of_other_cuts: bool
) -> list[str]:
    """Describe the entries that `restore_state` and `split_master_scales` cannot take over; empty if there are none.

    Args:
        context: of the engine that is to load; nothing of it is changed.
        state: what a model file holds under `CHECKPOINT_KEY`.
        module_only: as for `restore_state`, which reads less then.
        with_optimizer: the same parameters are trained here as where it was saved.
        of_other_cuts: ranks may have had other parts of the weights than they have here.

    Raises:
        ConfigError: the state, or its layer plan, is of an unknown version.
    """
    if not isinstance(state, Mapping):
        return [_wrong(_at(), "a dict", state)]
    _refuse_other_version(state)
    if missing := [key for key in _NEEDED if key not in state]:
        return [f"{_at()} lacks {', '.join(missing)}"]
    if problem := _wrong_config(state["config"]):
        return [problem]
    if (plan := _plan_in(state)) is None:
        return [_wrong(_at("plan"), "rows of layers", state["plan"])]
    if module_only:
        return []
    linear, master = state["config"].get("linear", {}), _master_of(state["config"])
    granularity = TENSOR if master != "fp32" else OF_RECIPE[linear.get("recipe", "tensorwise")]
    shapes: dict[str, tuple[int, ...]] = {}
    if granularity == TENSOR:
        shapes = {row.weight_name: () for row in plan.layers}
    elif with_optimizer and not of_other_cuts:  # frozen ones have one scale where masters were split at the start
        names = {row.weight_name for row in plan.layers if row.converted} & context.trainable.keys()
        here = {name: context.weights[name] for name in names}
        shapes = {name: granularity.grid(getattr(p, "ds_shape", p.shape)) for name, p in here.items()}
    is_same_plan = _converted(plan) == _converted(context.plan)
    return [
        *_wrong_scales(state["scale_inv"], plan, shapes),
        *_no_powers_of_two(state["scale_inv"], context.trainable if master != "fp32" and with_optimizer else ()),
        *_wrong_history(state["history"], context.history if is_same_plan else None),
        *_wrong_release(state.get("release")),
        *_wrong_precision(state.get("precision")),
        *_wrong_bound_sums(state.get(BOUND_SUMS_KEY, {})),
        *([] if isinstance(late := state.get(LATE_KEY, False), bool) else [_wrong(_at(LATE_KEY), "a bool", late)]),
    ]


def _refuse_other_version(state: Mapping[str, Any]) -> None:
    if state.get("version") != _VERSION:
        raise ConfigError(
            f"checkpoint[{CHECKPOINT_KEY!r}]: expected version {_VERSION}, got {state.get('version')!r}. "
            "Load it with the fp8_ds that wrote it, or export it with save_16bit_model there."
        )


def _at(*keys: object) -> str:
    return "".join([CHECKPOINT_KEY, *(f"[{key!r}]" for key in keys)])


def _wrong(place: str, expected: str, got: Any) -> str:
    return f"{place}: expected {expected}, got {str(got)[:_WIDTH]}"


def _master_of(config: Mapping[str, Any]) -> str:
    return str(config.get("optimizer", {}).get("master_format", "fp32"))


def _settings_that_are_gone(config: Mapping[str, Any]) -> list[str]:
    """Name what an older version's "fp8" block asked for and this one cannot do."""
    optimizer, schedule = config.get("optimizer", {}), config.get("schedule", {})
    step, below_lr = schedule.get("fp32_states_from_step"), schedule.get("bf16_below_lr")
    num_steps = config.get("guard", {}).get("return_after")
    found = {
        'optimizer.master "fp32" beside FP8 states': optimizer.get("states") == "fp8" and _master_of(config) == "fp32",
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


def _is_number(value: Any, kind: type = float) -> bool:
    """Whether `value` is a number of `kind` from 0 on; infinity is one."""
    kinds = (int,) if kind is int else (int, float)
    return isinstance(value, kinds) and not isinstance(value, bool) and value >= 0


def _is_power_of_two(value: Tensor) -> bool:
    return value.numel() == 1 and math.frexp(float(value))[0] == 0.5


def _wrong_config(config: Any) -> str:
    if not isinstance(config, Mapping) or not all(
        isinstance(config.get(k, {}), Mapping)
        for k in ("linear", "optimizer", "zero", "tensor_parallel", "schedule", "guard")
    ):
        return _wrong(_at("config"), 'an "fp8" block', config)
    if (recipe := config.get("linear", {}).get("recipe", "tensorwise")) not in OF_RECIPE:
        return _wrong(_at("config", "linear", "recipe"), f"one of {', '.join(OF_RECIPE)}", recipe)
    if (master := _master_of(config)) not in BY_NAME:
        return _wrong(_at("config", "optimizer", "master_format"), f"one of {', '.join(BY_NAME)}", master)
    return ""


def _plan_in(state: Mapping[str, Any]) -> Plan | None:
    """The layer plan; None if it is none."""
    try:
        plan = Plan.from_state(state["plan"])
    except (AttributeError, KeyError, TypeError):
        return None
    is_plan = all(
        isinstance(row.fqn, str)
        and isinstance(row.converted, bool)
        and all(_is_number(size, int) for size in (row.out_features, row.in_features, row.num_experts))
        for row in plan.layers
    )
    return plan if is_plan else None


def _wrong_tensor(
    place: str, value: Any, shape: tuple[int, ...] | None, expected: str, is_good: Callable[[Tensor], Tensor]
) -> Iterator[str]:
    """Args: shape: that it must have; None: any. is_good: which elements are as `expected` says."""
    shown = f"float32{'' if shape is None else f' of shape {shape}'}, {expected}"
    if not isinstance(value, Tensor):
        yield _wrong(place, shown, f"{type(value).__name__} {value!r}")
    elif value.dtype != torch.float32 or (shape is not None and value.shape != shape):
        yield _wrong(place, shown, f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}")
    elif len(bad := value[~is_good(value)]):
        yield _wrong(place, shown, f"{float(bad[0]):g}")


def _wrong_scales(saved: Any, plan: Plan, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    """Args: shapes: by weight, where they are known."""
    if not isinstance(saved, Mapping):
        yield _wrong(_at("scale_inv"), "a dict by weights", saved)
        return
    names = [row.weight_name for row in plan.layers if row.converted]
    yield from (f"{_at('scale_inv')} lacks {name}" for name in names if name not in saved)
    yield from (f"{_at('scale_inv', name)} is of no weight that is in FP8 by its plan" for name in saved.keys() - names)
    for name in (name for name in names if name in saved):
        yield from _wrong_tensor(
            _at("scale_inv", name),
            saved[name],
            shapes.get(name),
            f"above 0 and up to {_LARGEST_SCALE_INV:.3g}",
            lambda x: (x > 0) & (x <= _LARGEST_SCALE_INV),
        )


def _no_powers_of_two(saved: Any, names: Iterable[str]) -> Iterator[str]:
    """Name the scales of split masters, of the weights `names`, that are no powers of two."""
    for name in (name for name in names if isinstance(saved, Mapping) and isinstance(saved.get(name), Tensor)):
        if not _is_power_of_two(saved[name]) and 0 < float(saved[name].sum()) <= _LARGEST_SCALE_INV:
            yield _wrong(_at("scale_inv", name), "a power of two", f"{float(saved[name].sum()):g}")


def _wrong_history(saved: Any, here: AmaxHistory | None) -> Iterator[str]:
    """Args: here: the histories that take them over; None: none do."""
    if saved is None:
        return
    if not isinstance(saved, Mapping):
        yield _wrong(_at("history"), "a dict or None", saved)
        return
    good: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
        "amax_history": ("finite, from 0 on", lambda x: (x >= 0) & (x < math.inf)),
        "scale": ("finite, above 0", lambda x: (x > 0) & (x < math.inf)),
        "scale_inv": ("finite, above 0", lambda x: (x > 0) & (x < math.inf)),
        "amax_local": ("from 0 on", lambda x: ~(x < 0)),  # of a step that is not over, which may be infinite or NaN
    }
    for key, (expected, is_good) in good.items():
        if key not in saved:
            yield f"{_at('history')} lacks {key}"
            continue
        shape = None if here is None else tuple(getattr(here, key).shape)
        yield from _wrong_tensor(_at("history", key), saved[key], shape, expected, is_good)
    if not _is_number(saved.get("num_updates"), int):
        yield _wrong(_at("history", "num_updates"), "a count", saved.get("num_updates"))


def _wrong_release(saved: Any) -> Iterator[str]:
    if saved is None:
        return
    if not isinstance(saved, Mapping):
        yield _wrong(_at("release"), "a dict or None", saved)
        return
    if not _is_number(saved.get("last_norm")):
        yield _wrong(_at("release", "last_norm"), "a norm", saved.get("last_norm"))


def _wrong_bound_sums(saved: Any) -> Iterator[str]:
    if not isinstance(saved, Mapping):
        yield _wrong(_at(BOUND_SUMS_KEY), "a dict by parameter groups", saved)
        return
    for group, value in saved.items():
        if not (_is_number(group, int) and _is_number(value) and value < math.inf):
            yield _wrong(_at(BOUND_SUMS_KEY, group), "a finite number >= 0 of a parameter group", value)


def _wrong_precision(saved: Any) -> Iterator[str]:
    if saved is None:
        return
    if not isinstance(saved, Mapping) or not isinstance(saved.get("overrides"), Mapping):
        yield _wrong(_at("precision"), 'a dict with "overrides"', saved)
        return
    if not isinstance(stays := saved.get("stays", {}), Mapping):  # early checkpoints have none
        yield _wrong(_at("precision", "stays"), "a dict", stays)
        return
    for name, value in saved["overrides"].items():
        if value not in ("bf16", "fp8"):
            yield _wrong(_at("precision", "overrides", name), '"bf16" or "fp8"', value)
    for name, stay in stays.items():
        counts = stay[:2] if isinstance(stay, tuple | list) and len(stay) == 3 else ()
        if not (counts and all(_is_number(count, int) for count in counts) and isinstance(stay[2], bool)):
            yield _wrong(_at("precision", "stays", name), "(length, until, is_over)", stay)


def _how_to_keep(plan: Plan, config: Mapping[str, Any], current: Plan, now: LinearConfig) -> str:
    """What to write so that the next start trains the layers of `plan` in FP8, and no others.

    Args:
        plan: of the checkpoint.
        config: the "fp8" block it was trained with.
        current: this run's plan. What only this one has a row of (experts, in checkpoints from before them) was bf16.
        now: what it was made by.
    """
    if plan.num_converted == 0 and config.get("optimizer", {}).get("states") != "fp8":
        return 'The checkpoint has none in FP8: to go on so, set "fp8.enabled" to false.'
    known = {row.fqn for row in plan.layers}
    others = (replace(row, converted=False) for row in current.layers if row.fqn not in known)
    patterns = Plan((*plan.layers, *others)).filter_fqns()
    if patterns is None:
        return "No fp8.linear.filter_fqns names the checkpoint's layers."
    linear: dict[str, Any] = {"filter_fqns": patterns}
    linear |= {key: 0 for key in (AT_START, AT_END) if getattr(now, key)}
    told = f'To go on with the checkpoint\'s layers, start with "linear": {json.dumps(linear)}.'
    experts = {layer.fqn for layer in plan.layers if layer.converted and layer.num_experts > MAX_IN_A_LOOP}
    if any(row.fqn in experts for row in current.layers if not row.converted):
        told += f" More than {MAX_IN_A_LOOP} experts of a layer are in FP8 only where they are computed in one launch."
    return told
