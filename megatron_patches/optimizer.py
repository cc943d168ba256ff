"""--fp8-optimizer-states and --fp8-master: FP8 moments and split masters under Megatron's own optimizer classes.

The class from which Megatron makes Adam is replaced, and its optimizer classes by subclasses (optimizer_classes.py,
optimizer_sharded.py); callers of `get_megatron_optimizer` notice nothing. Bytes of each form: docs/megatron.md.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fp8_ds.errors import ConfigError, UnsupportedError
from fp8_ds.numerics.masters import BF16_8, BY_NAME, E4M11, E4M19
from fp8_ds.numerics.predicted import check_betas
from fp8_ds.optim.adamw import SMALLEST_EPS
from megatron_patches import compat, transposes
from megatron_patches.recipes import cuda_graphs

MASTERS = tuple(fmt.name for fmt in (BF16_8, E4M19, E4M11))
_OPTIMIZER = "megatron.core.optimizer"
_DISTRIBUTED = "megatron.core.distributed"
_AFTER_GATHERS = (f"{_DISTRIBUTED}.param_and_grad_buffer", f"{_DISTRIBUTED}.distributed_data_parallel")
_DTYPES = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")


@dataclass(frozen=True)
class OptimizerStates:
    """Values of --fp8-master, --seed (of the rounding noise) and --fp8-drop-transposes."""

    master: str = "bf16_8"
    seed: int = 0
    drop_transposes: bool = False

    def __post_init__(self) -> None:
        if self.master not in MASTERS:
            raise ConfigError(
                f"--fp8-master: expected one of {', '.join(MASTERS)}, got {self.master!r}. Take one (fp32 is gone: "
                "bf16_8 loads its checkpoints)."
            )

    @property
    def is_fp8(self) -> bool:
        """Whether FP8 weights are the high parts of their masters."""
        return BY_NAME[self.master].is_fp8


_OFF = (
    "use_torch_fsdp2",
    "use_megatron_fsdp",
    "optimizer_cpu_offload",
    "optimizer_cuda_graph",
    "use_layer_wise_distributed_optimizer",
    "rl_offload_optimizer_during_inference",
    "ckpt_convert_update_legacy_dist_opt_format",
)
_OFF_WITH_FP8_WEIGHTS = {
    "use_cpu_initialization": "Masters begin as what Transformer Engine keeps when it makes a weight, before Megatron "
    "draws it on the CPU",
    "log_params_norm": "Megatron takes it of masters of their own, which FP8 weights do not have here",
}
"""Arguments that do not go with FP8 states, and why some do not go with FP8 weights."""


def from_arguments(args: Any) -> OptimizerStates | None:
    """Return the settings in Megatron's parsed arguments; None without --fp8-optimizer-states.

    Raises:
        ConfigError: --fp8-master does not fit the other flags.
        UnsupportedError: a feature that FP8 states do not have.
    """
    gathers_fp8 = bool(getattr(args, "fp8_param_gather", None) or getattr(args, "fp8_param", None))
    drop_transposes = bool(getattr(args, "fp8_drop_transposes", False))
    if drop_transposes and not (gathers_fp8 and args.fp8_optimizer_states):
        raise ConfigError(
            "--fp8-drop-transposes: expected --fp8-param-gather and --fp8-optimizer-states with it, got one of them or "
            "none. It is about FP8 weights: add both, or remove it."
        )
    if not args.fp8_optimizer_states:
        if args.fp8_master is not None:
            raise ConfigError(
                f"--fp8-master: expected it beside --fp8-optimizer-states, got {args.fp8_master} without. Add that "
                "flag, or leave this one out."
            )
        return None
    states = OptimizerStates(args.fp8_master or ("e4m19" if gathers_fp8 else "bf16_8"), args.seed, drop_transposes)
    if states.is_fp8 != gathers_fp8:
        expected = "e4m19 or e4m11 with --fp8-param-gather" if gathers_fp8 else "bf16_8 without --fp8-param-gather"
        raise ConfigError(
            f"--fp8-master: expected {expected}, got {states.master}. FP8 masters are the high part "
            "of weights that are stored in FP8: change one of the two."
        )
    if gathers_fp8 and args.fp8_recipe != "tensorwise":
        raise UnsupportedError(
            "--fp8-recipe: expected tensorwise with --fp8-param-gather and --fp8-optimizer-states, got "
            f"{args.fp8_recipe}. Its weights have one scale, which may be a power of two. Use it, or leave out "
            "--fp8-param-gather."
        )
    for name, reason in _OFF_WITH_FP8_WEIGHTS.items() if gathers_fp8 else ():
        if getattr(args, name, False):
            raise UnsupportedError(
                f"--{name.replace('_', '-')}: expected off with --fp8-param-gather and --fp8-optimizer-states, got on. "
                f"{reason}: turn one of them off."
            )
    if getattr(args, "optimizer", "adam") != "adam":
        raise UnsupportedError(
            f"--optimizer: expected adam with --fp8-optimizer-states, got {args.optimizer}. Use adam."
        )
    _check_numbers(args)
    for name in _OFF:
        if getattr(args, name, None):
            flag = f"--{name.replace('_', '-')}"
            raise UnsupportedError(f"{flag}: expected off with --fp8-optimizer-states, got on. Turn one of them off.")
    if drop_transposes and (graphs := cuda_graphs(args)):
        raise UnsupportedError(
            f"{graphs}: expected off with --fp8-drop-transposes, got on. Graphs read memory that would be freed: turn "
            "one of them off."
        )
    return states


def _check_numbers(args: Any) -> None:
    """Refuse Adam's numbers that leave FP8 states without scales, by their flags and before a model is built."""
    betas, eps = (getattr(args, "adam_beta1", 0.9), getattr(args, "adam_beta2", 0.999)), getattr(args, "adam_eps", 1e-8)
    try:
        check_betas(*betas)
    except ValueError as error:
        raise ConfigError(
            "--adam-beta1, --adam-beta2: expected beta1**2 < beta2, both from 0 to below 1, with "
            f"--fp8-optimizer-states, got {betas[0]} and {betas[1]}. Adam's update has no bound without, and scales "
            "follow from it: lower --adam-beta1, or raise --adam-beta2."
        ) from error
    if not eps >= SMALLEST_EPS:
        raise ConfigError(
            f"--adam-eps: expected {SMALLEST_EPS} or more with --fp8-optimizer-states, got {eps}. They divide by it "
            "where the second moment is 0: raise it."
        )


def refuse(config: Any, model_chunks: Sequence[Any], states: OptimizerStates) -> None:
    """Refuse parameters, and settings known after Megatron's validation, that FP8 states do not support.

    Args:
        config: OptimizerConfig.
        model_chunks: wrapped by Megatron's DistributedDataParallel.

    Raises:
        ConfigError, UnsupportedError: something is not supported; all ranks raise.
    """
    beside = "with --fp8-optimizer-states"
    if not config.bf16:
        got = "--fp16" if config.fp16 else "neither --bf16 nor --fp16"
        raise UnsupportedError(f"--bf16: expected on {beside}, got {got}. Train in bf16.")
    for name in ("exp_avg_dtype", "exp_avg_sq_dtype"):
        dtype = getattr(config, name)
        if dtype not in (torch.float32, torch.uint8):
            flag = "--" + name.replace("_", "-")
            raise UnsupportedError(f"{flag}: expected fp8, or left out, {beside}, got {dtype}. Moments are FP8.")
    if config.main_params_dtype != torch.float32:
        raise UnsupportedError(
            f"--main-params-dtype: expected it left out {beside}, got {config.main_params_dtype}. Use --fp8-master."
        )
    from megatron.core.fp8_utils import is_float8tensor

    params = [p for chunk in model_chunks for p in chunk.parameters() if p.requires_grad]
    num_fp8 = sum(map(is_float8tensor, params))
    if num_fp8 and not states.is_fp8:
        raise ConfigError(
            f"--fp8-master: expected e4m19 or e4m11 where weights are stored in FP8, got {states.master} and {num_fp8} "
            "of them. Change it, or leave out --fp8-param-gather."
        )
    # A stage may have layers of --first-last-layers-bf16 alone, where others have FP8 weights.
    if states.is_fp8 and not num_fp8 and not all(chunk.config.fp8_param for chunk in model_chunks):
        raise ConfigError(
            f"--fp8-master: expected bf16_8 where no weight is stored in FP8, got {states.master}. FP8 weights "
            "need Transformer Engine and --fp8-param-gather."
        )
    if num_fp8 and not config.use_distributed_optimizer:
        raise UnsupportedError(
            "--use-distributed-optimizer: expected on where weights are stored in FP8, got off. Turn it on."
        )
    for p in params:
        if p.dtype not in (torch.float32, torch.bfloat16):
            raise UnsupportedError(f"parameters: expected bf16 or float32, got {p.dtype} of shape {tuple(p.shape)}.")


def replacements(states: OptimizerStates) -> dict[str, Callable[[Any], Any]]:
    """Return what makes Megatron build optimizers with FP8 states, for `patches.apply`."""
    from megatron_patches import optimizer_adam, optimizer_classes, optimizer_sharded

    adam = functools.partial(optimizer_adam.MegatronFp8AdamW, master=states.master, seed=states.seed)
    found: dict[str, Callable[[Any], Any]] = {
        f"{_OPTIMIZER}.Adam": lambda original: adam,
        f"{_OPTIMIZER}.USING_PYTORCH_OPTIMIZER": lambda original: False,
        f"{_OPTIMIZER}.distrib_optimizer.Adam": lambda original: optimizer_adam.MegatronFp8AdamW,
        f"{_OPTIMIZER}.DistributedOptimizer": lambda original: optimizer_sharded.Fp8DistributedOptimizer,
        f"{_OPTIMIZER}.Float16OptimizerWithFloat16Params": lambda original: optimizer_classes.Fp8Float16Optimizer,
        f"{_OPTIMIZER}.ChainedOptimizer": lambda original: optimizer_classes.Fp8ChainedOptimizer,
        f"{_OPTIMIZER}._get_megatron_optimizer_based_on_param_groups": lambda original: _checked(original, states),
        f"{_OPTIMIZER}.optimizer_config.OptimizerConfig.__post_init__": _without_fused_adam,
    }
    if states.drop_transposes:
        found |= {f"{module}.post_all_gather_processing": transposes.without_ours for module in _AFTER_GATHERS}
    return found


def _checked(original: Callable[..., Any], states: OptimizerStates) -> Callable[..., Any]:
    """Wrap Megatron's builder of one optimizer, to refuse what does not work and to say who owns the masters."""

    @functools.wraps(original)
    def build(config: Any, model_chunks: Any, *args: Any, **kwargs: Any) -> Any:
        refuse(config, model_chunks, states)
        config = copy.copy(config)
        config.use_precision_aware_optimizer = False  # what it asks of FusedAdam
        # Megatron derives it from flags that suppose FusedAdam. True: the optimizer owns masters and writes weights.
        config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
        if states.drop_transposes:
            transposes.drop_all(model_chunks)
        return original(config, model_chunks, *args, **kwargs)

    return build


def _without_fused_adam(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wrap Megatron's check of its configuration: --use-precision-aware-optimizer needs no Transformer Engine."""

    @functools.wraps(original)
    def check(self: Any) -> None:
        if not self.use_precision_aware_optimizer or compat.transformer_engine().found:
            original(self)
            return
        asked = {name: getattr(self, name) for name in ("use_precision_aware_optimizer", *_DTYPES)}
        self.use_precision_aware_optimizer = False
        for name in _DTYPES:
            setattr(self, name, torch.float32)
        original(self)
        for name, value in asked.items():
            setattr(self, name, value)

    return check
