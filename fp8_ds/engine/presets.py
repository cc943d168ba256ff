"""Facts of a run that a preset chooses by, what rank 0 says of the choice, and a checkpoint of another choice."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from fp8_ds.config import AttentionConfig, Fp8Config
from fp8_ds.config.ds_config import block_of
from fp8_ds.config.presets import Facts, is_written
from fp8_ds.engine.compat.model import autotp_sizes
from fp8_ds.engine.ranks import say
from fp8_ds.errors import UnsupportedError
from fp8_ds.nn.plan.convert import change_recipes
from fp8_ds.nn.plan.ends import layer_lists, names_in_order
from fp8_ds.nn.plan.plan import Plan, is_layer

_STEPS = "num_training_steps"
"""Name under which transformers' schedules, and the function by which Trainer makes one, keep the number of steps."""
_MISSES = (
    "Trained in FP8 to the end, 31 pairs of runs ended 0.101 % above bf16's held-out loss in the mean; the bound of "
    "docs/parity.md is 0.1 %. With these scales none was measured"
)
_OLD_ENDS = ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
"""Keys of before 2026-11-29, in checkpoints: so many layers at either end are in bf16, with the key as the reason."""
_SAME_WEIGHTS = ("tensorwise", "delayed")
"""Recipes between which a run can change: the scales of weights are those of ZeRO's shards."""
_STARTING: ContextVar[Fp8Config | None] = ContextVar("starting", default=None)


@contextmanager
def starting(config: Fp8Config) -> Iterator[None]:
    """Within it, an engine that is built reads `config` as its block: facts of arguments that it cannot see are in."""
    token = _STARTING.set(config)
    try:
        yield
    finally:
        _STARTING.reset(token)


def config_of_engine(engine: Any) -> Fp8Config:
    """Return the block of an engine that is being built, with its preset's values."""
    if (config := _STARTING.get()) is not None:
        return config
    ds_config = engine._config._param_dict
    return Fp8Config.from_block(ds_config["fp8"], facts_of(ds_config, engine.module, engine.device))


def facts_of(
    config: Mapping[str, Any],
    model: nn.Module | None = None,
    device: torch.device | None = None,
    lr_scheduler: object = None,
) -> Facts:
    """Find out what is known of a run before its engine is built.

    Args:
        config: DeepSpeed's configuration, as `json.load` returns it.
        model: the model; None: nothing is known of it.
        device: the device that it trains on; None: FlashAttention-3 is not looked for.
        lr_scheduler: argument of `deepspeed.initialize`, in which transformers' Trainer leaves its number of steps.
    """
    is_parallel = any(size > 1 for size in autotp_sizes(config).values())
    if model is not None and not is_parallel:
        from fp8_ds.tp.autotp import autotp_linears
        from fp8_ds.tp.linears import contexts_of

        is_parallel = bool(contexts_of(model) or autotp_linears(model))
    return Facts(
        _num_steps(config, lr_scheduler),
        () if model is None else ends_of(model),
        is_parallel,
        has_fa3=model is not None and device is not None and _takes_fa3(model, device),
        head="" if model is None else head_of(model),
    )


def _num_steps(config: Mapping[str, Any], lr_scheduler: object) -> int | Literal["auto"] | None:
    written = block_of(config, "fp8", "schedule").get("total_steps")
    configured = block_of(config, "scheduler", "params").get("total_num_steps")
    for found in (written, configured, _steps_of(lr_scheduler), _steps_of_trainer()):
        if found == "auto" or (isinstance(found, int) and not isinstance(found, bool) and found > 0):
            return found
    return None


def _steps_of(lr_scheduler: object) -> object:
    """Return the number of steps in transformers' schedule, or in the function by which Trainer makes it.

    Source: transformers 5.24, integrations/deepspeed.py `deepspeed_optim_sched` (a closure over the number), and
    optimization.py (`LambdaLR` of a partial with it).
    """
    names = getattr(getattr(lr_scheduler, "__code__", None), "co_freevars", ())
    if _STEPS in names:
        return lr_scheduler.__closure__[names.index(_STEPS)].cell_contents  # type: ignore[attr-defined]
    for function in getattr(lr_scheduler, "lr_lambdas", ()):
        if isinstance(function, partial) and _STEPS in function.keywords:
            return function.keywords[_STEPS]
    return None


def _steps_of_trainer() -> object:
    """Return the number of steps of the transformers' Trainer that is calling; None if none is.

    Where the configuration names no optimizer, Trainer makes its schedule after the engine, and gives the number to
    nobody before. It is a local variable of the method that starts the engine.

    Source: transformers 5.24, trainer.py `_prepare_for_training`; 4.57 `_inner_training_loop`.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "transformers.trainer" and "max_steps" in frame.f_locals:
            return frame.f_locals["max_steps"]
        frame = frame.f_back
    return None


def ends_of(model: nn.Module) -> tuple[str, ...]:
    """Return the beginnings of names in the first and last layer of each list of three or more, a stage's layers being
    layers (`names_in_order`); none of a pipeline stage."""
    from deepspeed.runtime.pipe.module import PipelineModule

    if isinstance(model, PipelineModule):
        return ()
    lists = (names_in_order(name, model.get_submodule(name), is_layer) for name in layer_lists(model, is_layer))
    return tuple(f"{name}." for names in lists if len(names) > 2 for name in (names[0], names[-1]))


def head_of(model: nn.Module) -> str:
    """Return the whole name, with a dot behind it, of the linear that transformers' model calls its output embeddings;
    empty if there is none, or if it is an lm_head, which every preset leaves in bf16."""
    find = getattr(model, "get_output_embeddings", None)
    head = find() if callable(find) else None
    names = (name for name, module in model.named_modules() if module is head)
    name = next(names, "") if isinstance(head, nn.Linear) else ""
    return f"{name}." if name and "lm_head" not in name else ""


def _takes_fa3(model: nn.Module, device: torch.device) -> bool:
    """Whether FlashAttention-3 with windows, packed sequences and a backward is here, and takes the model's heads."""
    from fp8_ds.attention.huggingface import attention_modules, refuse_attention_of, refuse_backend
    from fp8_ds.attention.packages import find_fa3

    try:
        refuse_backend("fa3", device)
        refuse_attention_of(model, AttentionConfig(backend="fa3"))
        fa3 = find_fa3()
    except UnsupportedError:
        return False
    if fa3.backward is None or fa3.lacks("LOCAL") or fa3.lacks("VARLEN"):
        return False
    # With another implementation than SDPA scores are changed in a way that FlashAttention-3 may not have.
    return all(
        config._attn_implementation == "sdpa" and not getattr(config, "attn_logit_softcapping", None)
        for _, config in attention_modules(model)
    )


def with_schedule(config: Fp8Config, **values: Any) -> Fp8Config:
    """Return `config` with these values in its "schedule" block."""
    return config.model_copy(update={"schedule": config.schedule.model_copy(update=values)})


def as_trained(config: Fp8Config, block: Mapping[str, Any], state: Mapping[str, Any], step: int = 0) -> Fp8Config:
    """Return `config` with what a checkpoint was trained with at keys that neither the user nor `"preset"` writes.

    These are recipe, gradients and accumulation, and the steps and layers in bf16; the number of steps is this run's.

    Args:
        config: the engine's, with its preset's values.
        block: the "fp8" block as the user wrote it.
        state: what the checkpoint has of us (fp8_ds/checkpoint/state.py).
        step: of the checkpoint. Where this run's number of steps is not known, the checkpoint's counts up to its end.
    """
    if config.preset is None or "preset" in block:
        return config
    saved: Mapping[str, Any] = state["config"]
    recipe, saved_recipe = config.linear.recipe, saved.get("linear", {}).get("recipe", config.linear.recipe)
    can_change = recipe in _SAME_WEIGHTS and (saved_recipe in _SAME_WEIGHTS or is_written(block, "linear", "recipe"))
    if recipe != saved_recipe and not can_change:
        return config
    linear = {
        key: value
        for key in ("recipe", "grad_dtype", "fast_accumulation")
        if not is_written(block, "linear", key) and (value := saved.get("linear", {}).get(key)) is not None
    }
    schedule = {
        key: value
        for key in ("bf16_last_fraction", "total_steps", "layers")
        if not is_written(block, "schedule", key) and (value := saved.get("schedule", {}).get(key)) is not None
    }
    ends = [key for key in _OLD_ENDS if saved.get("linear", {}).get(key)]
    if ends and "layers" in schedule:
        rows = Plan.from_state(state["plan"]).layers
        schedule["layers"] = schedule["layers"] | {row.fqn: "bf16" for row in rows if row.reason in ends}
    planned = schedule.get("total_steps")
    if config.schedule.total_steps is not None:
        schedule["total_steps"] = config.schedule.total_steps
    elif isinstance(planned, int) and step >= planned:  # past the end that was planned: what this run would do
        schedule = {}
    if not schedule.get("bf16_last_fraction", config.schedule.bf16_last_fraction):
        schedule["total_steps"] = None
    return with_schedule(config, **schedule).model_copy(update={"linear": config.linear.model_copy(update=linear)})


def go_on_as_trained(engine: Any, state: Mapping[str, Any] | None) -> None:
    """Give an engine that has loaded a checkpoint the settings that it was trained with, see `as_trained`. Collective.

    Args:
        state: what the checkpoint has of us; None: nothing.
    """
    context = engine.fp8
    if state is None or context is None:
        return
    if context.started_with is None:
        context.started_with = context.config
    config = as_trained(context.started_with, engine._config._param_dict["fp8"], state, engine.global_steps)
    if config == context.config:
        return
    change = partial(change_recipes, engine.module, config.linear, context.history)
    context.precision.change(config.schedule, change if config.linear != context.config.linear else lambda: None)
    if engine.is_compiled:
        torch._dynamo.reset()  # graphs have the recipes in them, and no guard on what no run changes otherwise
    before, context.config = context.config.model_dump(mode="json"), config
    kept = {
        section: changed
        for section, values in config.model_dump(mode="json", include={"linear", "schedule"}).items()
        if (changed := {key: value for key, value in values.items() if value != before[section][key]})
    }
    say(
        f"fp8: this run goes on with the settings of its checkpoint, {json.dumps(kept)}, and not with those of the "
        f'preset "{config.preset}"; write the preset to change to it'
    )


def resolved(config: Fp8Config) -> dict[str, Any]:
    """Return the block with the values of its preset written out, and no key that has its default."""
    return {"enabled": config.enabled, "preset": None} | config.model_dump(
        mode="json", exclude_defaults=True, exclude={"enabled", "preset"}
    )


def describe(config: Fp8Config) -> str:
    """Return the line that says what the preset, and what the user has written over it, come to."""
    line = f'fp8: preset "{config.preset}" is {json.dumps(resolved(config))}'
    return f"{line}. {_MISSES}" if config.preset == "serve" else line
