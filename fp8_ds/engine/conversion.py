"""In-place conversion of an engine's model to FP8 layers, after DeepSpeed has cast, moved and broadcast it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from deepspeed import comm as ds_comm
from deepspeed.runtime.pipe.module import PipelineModule
from torch import nn

from fp8_ds.attention.huggingface import attention_modules, describe_implementation, use_backend
from fp8_ds.attention.packages import CUDNN_REMEDY, older_cudnn, prefers_cudnn
from fp8_ds.config import Fp8Config, LinearConfig
from fp8_ds.config.ds_config import linear_in_training
from fp8_ds.engine.compat.model import AUTOTP_PIPELINE, AUTOTP_STAGE_3, capabilities, refuse_device
from fp8_ds.engine.folder_model import take_over
from fp8_ds.engine.liger_loss import prepare_liger_loss
from fp8_ds.engine.presets import config_of_engine, describe
from fp8_ds.engine.ranks import say
from fp8_ds.errors import ConfigError
from fp8_ds.nn.fused.search import fuse_producers
from fp8_ds.nn.plan.convert import apply_plan, fp8_layers, revert
from fp8_ds.nn.plan.plan import ForeignLinears, Plan, make_plan
from fp8_ds.tp.autotp import autotp_linears, set_gathers
from fp8_ds.tp.group import device_of
from fp8_ds.tp.plan import configure as configure_tensor_parallel
from fp8_ds.zero.stage import Fp8Context

_EAGER = 'eager, which holds all scores in memory; load the model with attn_implementation="sdpa" if it has it'
_OWN = "as the model has it"


def refuse_autotp(engine: Any, model: Any) -> None:
    """Refuse AutoTP with a stage or kind of model that FP8 does not support, before the model is sharded."""
    if engine.autotp_size() <= 1:
        return
    if engine.zero_optimization_stage() > 2:
        raise AUTOTP_STAGE_3.error(f"{engine.autotp_size()} ranks and stage {engine.zero_optimization_stage()}")
    if isinstance(model, PipelineModule):
        raise AUTOTP_PIPELINE.error(f"{engine.autotp_size()} ranks")


def convert(engine: Any) -> Fp8Context | None:
    """Convert linears and experts of `engine.module`, and set attention, activations and loss as configured.

    Collective where ranks agree on a plan.

    Returns:
        Context of the engine; None if it has no optimizer, and its model stays as it is.

    Raises:
        ConfigError: nothing can be converted, or a key of the block has nothing to take effect on.
        UnsupportedError: FP8 does not support this device or this model.
    """
    config = config_of_engine(engine)
    if engine.client_optimizer is None and not engine.optimizer_name():
        is_anothers = any(hasattr(p, "_fp8") for p in engine.module.parameters())
        stays = "it computes with the FP8 weights that another engine has made" if is_anothers else "it stays bf16"
        say(f"fp8: off for this engine: it has no optimizer (a reference or inference model); {stays}")
        return None
    module, device = engine.module, engine.device
    is_autotp = engine.autotp_size() > 1
    refuse_device(config.linear.recipe, config.linear.backend, *capabilities(device))
    foreign = autotp_linears(module) if is_autotp else {}
    if config.optimizer.states == "fp8":
        _cast_trainable(module)
    linear = linear_in_training(engine._config._param_dict)
    plan = _agree_on_plan(module, config.linear, config.optimizer.states == "fp8", foreign, device, linear)
    if not is_autotp:
        configure_tensor_parallel(module, config.tensor_parallel, config.linear.recipe)
    history = apply_plan(module, plan, config.linear, device, foreign) if plan.num_converted else None
    weights = {row.weight_name: module.get_parameter(row.weight_name) for row in plan.layers if row.converted}
    for recipe in {layer.fp8_recipe.name for layer in fp8_layers(module).values() if layer.fp8_recipe.is_stored}:
        refuse_device(recipe, config.linear.backend, *capabilities(device))
    stored = take_over(module, weights.keys(), torch.bfloat16)
    check_overflow = bool(getattr(engine._config.bfloat16_config, "check_grad_overflow", True))
    if config.preset is not None:
        say(describe(config))
    say(plan.describe())
    if is_autotp:
        say(set_gathers(module, config.tensor_parallel))
    _surround(engine, config)
    return Fp8Context(config, plan, weights, history, check_overflow=check_overflow, stored=stored)


def _cast_trainable(module: nn.Module) -> None:
    """Cast trainable weights to bf16, the dtype of a split master's upper part, which is the weight outside FP8.

    DeepSpeed has cast them in stages 1 and 2, but not in stage 3 if zero.Init has partitioned some: PEFT's adapters are
    then in float32 (deepspeed 0.19.8, engine.py, `_cast_module_mixed_precision`).
    """
    others = {name: p for name, p in module.named_parameters() if p.requires_grad and p.dtype == torch.float32}
    for p in others.values():
        p.data = p.data.to(torch.bfloat16)
        if hasattr(p, "ds_tensor"):
            p.ds_tensor.data = p.ds_tensor.data.to(torch.bfloat16)
    if others:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        say(f"fp8: {next(iter(others))}{more}: cast from float32 to bf16, the upper part of split masters")


def _surround(engine: Any, config: Fp8Config) -> None:
    """Set attention, activations and loss as the configuration says."""
    module = engine.module
    if config.attention.backend is not None:
        use_backend(module, config.attention.backend, hadamard=config.attention.hadamard)
    say(describe_attention(module, engine.device))
    if config.activations.fused:
        say(fuse_producers(module, config.activations).describe())
    times = config.activations.cross_entropy_chunk_mem_const
    if line := prepare_liger_loss(module, engine.zero_optimization_stage(), times):
        say(line)


def leave_unoptimized(module: Any, context: Fp8Context, optimizer: Any) -> None:
    """Revert trainable weights in no parameter group to bf16: they have no master to be quantised from."""
    optimized = {id(p) for group in optimizer.param_groups for p in group["params"]}
    left = {name for name, p in context.trainable.items() if id(p) not in optimized}
    if not left:
        return
    fqns = [row.fqn for row in context.plan.layers if row.weight_name in left]
    context.plan = revert(module, context.plan, fqns, "in no parameter group")
    for name in left:
        del context.weights[name]
    say(context.plan.describe())


def _agree_on_plan(
    module: Any,
    config: LinearConfig,
    may_be_empty: bool,
    foreign: ForeignLinears,
    device: torch.device,
    linear: Callable[..., Any],
) -> Plan:
    """Plan this rank's module. A pipeline stage may be without linears if another stage has some, and so may a rank
    that AutoTP has left with none (fewer heads than ranks).

    FP8 states need no FP8 linear (`may_be_empty`). Weights that pipeline stages share (`tied_modules`) are never
    converted.
    """
    if isinstance(module, PipelineModule):
        config = config.model_copy(update={"filter_fqns": (*config.filter_fqns, "tied_modules")})
    elif not foreign:
        return make_plan(module, config, may_be_empty, device=device, linear=linear)
    try:
        plan, error = make_plan(module, config, foreign=foreign, device=device, linear=linear), None
    except ConfigError as caught:
        plan, error = Plan(()), caught
    found = torch.tensor([plan.num_converted], device=device_of(None))
    ds_comm.all_reduce(found)
    if error is not None and int(found) == 0 and not may_be_empty:
        raise error
    return plan


def describe_attention(model: nn.Module, device: torch.device) -> str:
    """Name the attention implementations of a Hugging Face model; another model's is "as the model has it".

    The line also names a cuDNN older than torch's, because SDPA then silently leaves cuDNN out.

    Args:
        model: the model, or a module around it.
        device: the one that it trains on.
    """
    try:
        names = dict.fromkeys(config._attn_implementation for _, config in attention_modules(model))
    except Exception:  # properties of other people's modules may raise anything: a line is not worth a failed start
        names = {}
    texts = [_EAGER if name == "eager" else describe_implementation(name) or name for name in names] or [_OWN]
    may_be_sdpa = not names or any(describe_implementation(name) is None for name in names)
    if may_be_sdpa and prefers_cudnn(device) and (older := older_cudnn()):
        texts.append(f"SDPA may not take cuDNN: {older}; {CUDNN_REMEDY}")
    return f"fp8: attention: {'; '.join(texts)}"
