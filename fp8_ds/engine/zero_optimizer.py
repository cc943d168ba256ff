"""Retyping of the ZeRO optimizer that DeepSpeed has built, to a class with our mix-ins before its own.

The mix-ins follow from the format of the states, gradient release, and the format that gradients are reduced in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from deepspeed import comm as ds_comm
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from fp8_ds.config import Fp8Config
from fp8_ds.engine import deepspeed_fixes
from fp8_ds.engine.compat.config import no_release
from fp8_ds.engine.ranks import say
from fp8_ds.errors import UnsupportedError
from fp8_ds.optim.zero_adamw import ZeroAdamW
from fp8_ds.zero.building import BuildingHost, building
from fp8_ds.zero.release3 import Fp8ReleaseStage3
from fp8_ds.zero.stage import Fp8Context
from fp8_ds.zero.stage3 import Fp8ReduceStage3, Fp8ZeroStage3
from fp8_ds.zero.stage12 import Fp8ZeroStage12
from fp8_ds.zero.states3 import Fp8StatesStage3

_HOLDS = (
    "fp8: gradient release saves nothing in this run: with gradient_clipping {} (without the key DeepSpeed takes 1.0, "
    'before 0.19.3 it took 0) and fp8.optimizer.release_clipping "exact" reduced gradients are held until the step. '
    '"delayed_norm" holds none (docs/memory.md).'
)
"""The default: deepspeedai/DeepSpeed v0.19.2 and v0.19.3, deepspeed/runtime/constants.py, GRADIENT_CLIPPING_DEFAULT."""


_HOSTS = (DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3)


def _mixins(host: type, config: Fp8Config, gradient_clipping: float) -> list[type]:
    """Return our mix-ins before DeepSpeed's class `host`."""
    if host is DeepSpeedZeroOptimizer:
        return [Fp8ZeroStage12]
    found: type = Fp8ZeroStage3
    if config.optimizer.states != "fp32":
        found = Fp8ReleaseStage3 if config.optimizer.releases(gradient_clipping) else Fp8StatesStage3
    return [Fp8ReduceStage3, found] if config.zero.reduce_scatter == "fp8" else [found]


def build_zero(engine: Any, optimizer: Any, build: Callable[[Any], Any]) -> tuple[Any, type]:
    """Build DeepSpeed's ZeRO optimizer over `optimizer`; return it, not retyped yet, and its class in DeepSpeed.

    With FP8 states a ZeroAdamW takes `optimizer` over first, and becomes `engine.basic_optimizer`.

    Raises:
        ConfigError: gradients cannot be released here.
        UnsupportedError: the class cannot be retyped.
    """
    settings = engine.fp8.config.optimizer
    if settings.states == "fp32":
        zero = build(optimizer)
    else:
        engine.basic_optimizer = optimizer = ZeroAdamW(optimizer, seed=settings.seed)
        releases = settings.releases(engine.gradient_clipping())
        if releases:
            check_release(engine)
        elif settings.release:
            say(_HOLDS.format(engine.gradient_clipping()))
        with building(releases):
            zero = build(optimizer)
    host = next((host for host in _HOSTS if isinstance(zero, BuildingHost) and isinstance(zero, host)), type(zero))
    if host not in _HOSTS:
        raise UnsupportedError(
            f"ZeRO optimizer: expected one of {[h.__name__ for h in _HOSTS]}, got {host.__name__}. Remove the "
            'option that selects it, or turn "fp8.enabled" off.'
        )
    return zero, host


def has_no_purpose(engine: Any) -> bool:
    """Whether FP8 would change nothing: fp32 states, bf16 gradients, no FP8 weight on any rank. Collective."""
    config = engine.fp8.config
    if config.optimizer.states != "fp32" or config.zero.reduce_scatter != "bf16":
        return False
    found = torch.tensor([len(engine.fp8.weights)], device=engine.device)
    if isinstance(engine, PipelineEngine) or engine.autotp_size() > 1:
        ds_comm.all_reduce(found)
    return int(found) == 0


def retype(zero: Any, host: type, context: Fp8Context, gradient_clipping: float) -> None:
    """Make `zero` an FP8 optimizer, its weights stored and gathered in FP8. Collective.

    Args:
        zero: an object of class `host`, or of the subclass that `building` makes of it.
        host: DeepSpeed's class.
        context: the engine's context.
        gradient_clipping: the norm that the engine clips at, 0 for none.
    """
    mixins = _mixins(host, context.config, gradient_clipping)
    mixins += deepspeed_fixes.mixins(host, context.config, gradient_clipping)
    zero.__class__ = type(f"Fp8{host.__name__}", (*mixins, host), {})
    zero.fp8_init(context)
    start_count_anew(context)


def start_count_anew(context: Fp8Context) -> None:
    """Reset the byte counts: what `initialize` or a load gathered belongs to no step."""
    context.counter.end_step()
    context.counter.last = None


def check_release(engine: Any) -> None:
    """Refuse updates during the backward by what DeepSpeed has worked out; `refuse_release` has refused the settings.

    Raises:
        ConfigError: one backward is no step here, or gradients are not bf16.
    """
    steps, dtype = engine.gradient_accumulation_steps(), engine.get_data_types()[1]
    problems = {
        f"gradient_accumulation_steps {steps}": steps > 1,
        "a PipelineModule": isinstance(engine, PipelineEngine),
        f"data_types.grad_accum_dtype {dtype}": dtype != torch.bfloat16,
    }
    if found := [name for name, is_there in problems.items() if is_there]:
        raise no_release(found)


def adam_to_take_over(engine: Any, model_parameters: Any) -> torch.optim.Optimizer:
    """Return torch's Adam or AdamW with the options of the configuration; DeepSpeed builds no kernel for it.

    Raises:
        UnsupportedError: another optimizer is configured, or an option that FP8 states do not have.
    """
    name = (engine.optimizer_name() or "").lower()
    if name not in ("adam", "adamw"):
        raise UnsupportedError(
            f'optimizer.type: expected Adam or AdamW with fp8.optimizer.states "fp8", got {name}. '
            'Use one of these, or "states": "fp32".'
        )
    options = dict(engine.optimizer_params() or {})
    decoupled = options.pop("adam_w_mode", True) or name == "adamw"
    for kernel_choice in ("torch_adam", "fp32_optimizer_states", "foreach", "fused", "set_grad_none"):
        options.pop(kernel_choice, None)
    if not options.pop("bias_correction", True):
        raise UnsupportedError("optimizer.params.bias_correction: expected true with FP8 states, got false.")
    if "betas" in options:
        options["betas"] = tuple(options["betas"])
    return (torch.optim.AdamW if decoupled else torch.optim.Adam)(model_parameters, **options)
