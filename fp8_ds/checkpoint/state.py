"""What we add to a checkpoint, under one key of DeepSpeed's model file: builtin types and tensors only.

Weights are not in it: masters and `module` are in DeepSpeed's own places, and scales follow from masters. They are
saved all the same, so that a tool can read FP8 bytes' scales without masters.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fp8_ds.config import LinearConfig
from fp8_ds.errors import ConfigError
from fp8_ds.nn.convert import Plan
from fp8_ds.nn.stacks import AT_END, AT_START
from fp8_ds.zero.context import Fp8Context

CHECKPOINT_KEY = "fp8_ds"
LEFT_OUT_KEY = "left_out"
_VERSION = 1


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
    master = state["config"].get("optimizer", {}).get("master_format", "fp32")
    return {} if master == "fp32" else dict(state["scale_inv"])


def followed_lr(state: Mapping[str, Any] | None) -> float | None:
    """The learning rate by which the layers of the next step were chosen; None: by none, or it is not known."""
    lr: float | None = ((state or {}).get("precision") or {}).get("lr")
    return lr


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
    if state.get("version") != _VERSION:
        raise ConfigError(
            f"checkpoint[{CHECKPOINT_KEY!r}]: expected version {_VERSION}, got {state.get('version')!r}. "
            "Load it with the fp8_ds that wrote it, or export it with save_16bit_model there."
        )
    plan = Plan.from_state(state["plan"])
    converted = [row.fqn for row in plan.layers if row.converted]
    same_layers = converted == [row.fqn for row in context.plan.layers if row.converted]
    if not same_layers:
        before = set(converted)
        now = {row.fqn for row in context.plan.layers if row.converted}
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
    linear: dict[str, Any] = {"layer_choice": "all", "filter_fqns": patterns}
    linear |= {key: 0 for key in (AT_START, AT_END) if getattr(now, key)}
    in_fp8 = {layer.fqn: layer.num_experts for layer in plan.layers if layer.converted}
    if any(in_fp8.get(row.fqn) for row in current.layers if not row.converted):
        linear["max_experts"] = max(in_fp8.values())
    return f'To go on with the checkpoint\'s layers, start with "linear": {json.dumps(linear)}.'
