"""What FP8 ZeRO does not support, refused when the configuration is read: on every rank, before any collective.

One row per combination; docs/refusals.md shows the same table (a test compares them).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fp8_ds.errors import UnsupportedError

Config = Mapping[str, Any]


def _block(config: Config, *path: str) -> Mapping[str, Any]:
    for key in path:
        config = config.get(key) or {}
        if not isinstance(config, Mapping):
            return {}
    return config


def _zero(config: Config, key: str) -> Any:
    return _block(config, "zero_optimization").get(key)


def _offloads(key: str) -> Callable[[Config], bool]:
    def found(config: Config) -> bool:
        device = _block(config, "zero_optimization", key).get("device", "none")
        return str(getattr(device, "value", device)) != "none"

    return found


@dataclass(frozen=True)
class Refusal:
    """A configuration that is refused: its key as the user wrote it, when it applies, why, and what to do instead."""

    key: str
    applies: Callable[[Config], bool]
    reason: str
    remedy: str


REFUSALS = (
    Refusal(
        "zero_optimization.stage: 0",
        lambda c: int(_zero(c, "stage") or 0) == 0,
        "without ZeRO there are no sharded masters to quantise from",
        'Set "zero_optimization": {"stage": 1}; on one GPU it costs nothing.',
    ),
    Refusal(
        "fp16.enabled: true",
        lambda c: bool(_block(c, "fp16").get("enabled")),
        "the loss scale of fp16 and FP8 gradient scales contradict each other",
        'Set "bf16": {"enabled": true} and remove "fp16".',
    ),
    Refusal(
        "bf16.enabled: false",
        lambda c: not (_block(c, "bf16") or _block(c, "bfloat16")).get("enabled"),
        "the nominal dtype of FP8 weights, activations and gradients is bf16",
        'Set "bf16": {"enabled": true}.',
    ),
    Refusal(
        "bf16.bf16_master_weights_and_grads: true",
        lambda c: bool(_block(c, "bf16").get("bf16_master_weights_and_grads")),
        "FP8 weights are quantised from fp32 masters",
        'Remove "bf16_master_weights_and_grads".',
    ),
    Refusal(
        "bf16.bf16_optimizer_states: true",
        lambda c: bool(_block(c, "bf16").get("bf16_optimizer_states")),
        "bf16 moments rounded to nearest stall, and are not tested with FP8 weights",
        'Remove "bf16_optimizer_states".',
    ),
    Refusal(
        "zero_optimization.offload_optimizer.device",
        _offloads("offload_optimizer"),
        "masters on the CPU or on NVMe are quantised where the GPU cannot read them (SuperOffload included)",
        'Remove "offload_optimizer"; a higher ZeRO stage or more ranks save memory too.',
    ),
    Refusal(
        "zero_optimization.cpu_offload: true",
        lambda c: bool(_zero(c, "cpu_offload")),
        "masters on the CPU are quantised where the GPU cannot read them",
        'Remove "cpu_offload".',
    ),
    Refusal(
        "zero_optimization.offload_param.device",
        _offloads("offload_param"),
        "FP8 shards live on the device that gathers them",
        'Remove "offload_param"; FP8 shards take half of what bf16 shards take.',
    ),
    Refusal(
        "zero_optimization.offload_optimizer.super_offload: true",
        lambda c: bool(_block(c, "zero_optimization", "offload_optimizer").get("super_offload")),
        "SuperOffload has an optimizer class of its own",
        'Remove "super_offload" and "offload_optimizer".',
    ),
    Refusal(
        "zero_optimization.zenflow",
        lambda c: _zero(c, "zenflow") is not None,
        "ZenFlow has optimizer classes of its own that update selected columns",
        'Remove "zenflow".',
    ),
    Refusal(
        "zero_optimization.zero_hpz_partition_size",
        lambda c: int(_zero(c, "zero_hpz_partition_size") or 1) > 1,
        "the secondary bf16 shards of hpZ would be gathered instead of FP8",
        'Remove "zero_hpz_partition_size"; an FP8 gather already moves half the bytes.',
    ),
    Refusal(
        "zero_optimization.zero_quantized_weights: true",
        lambda c: bool(_zero(c, "zero_quantized_weights")),
        "qwZ and FP8 both decide how weights travel",
        'Remove "zero_quantized_weights": FP8 moves as few bytes, with one scale a weight.',
    ),
    Refusal(
        "zero_optimization.zero_quantized_gradients: true",
        lambda c: bool(_zero(c, "zero_quantized_gradients")),
        "qgZ is not tested with FP8 weights",
        'Remove "zero_quantized_gradients".',
    ),
    Refusal(
        "zero_optimization.zero_quantized_nontrainable_weights: true",
        lambda c: bool(_zero(c, "zero_quantized_nontrainable_weights")),
        "INT8 shards of frozen weights and FP8 both decide how weights are stored",
        'Remove it; "fp8": {"linear": {"frozen": "fp8"}} stores frozen linears in FP8.',
    ),
    Refusal(
        "zero_optimization.mics_shard_size",
        lambda c: int(_zero(c, "mics_shard_size") or -1) > 0,
        "MiCS shards within sub-groups with an optimizer class of its own",
        'Remove "mics_shard_size".',
    ),
    Refusal(
        "zero_optimization.use_all_reduce_for_fetch_params: true",
        lambda c: bool(_zero(c, "use_all_reduce_for_fetch_params") or c.get("use_all_reduce_for_fetch_params")),
        "an all-reduce cannot sum FP8 shards",
        'Remove "use_all_reduce_for_fetch_params".',
    ),
    Refusal(
        "zero_optimization.elastic_checkpoint: true",
        lambda c: bool(_zero(c, "elastic_checkpoint")),
        "elastic checkpoints are deprecated and not tested with FP8",
        'Remove "elastic_checkpoint"; use universal checkpoints to change the world size.',
    ),
    Refusal(
        "data_types.grad_accum_dtype: fp32 with stage 1",
        lambda c: (
            int(_zero(c, "stage") or 0) == 1
            and str(_block(c, "data_types").get("grad_accum_dtype", "")).lower() in ("fp32", "float32", "torch.float32")
        ),
        "DeepSpeed then builds BF16_Optimizer, which is not a ZeRO-1 optimizer",
        'Use "stage": 2, or "grad_accum_dtype": "bf16".',
    ),
    Refusal(
        "torch_autocast.enabled: true",
        lambda c: bool(_block(c, "torch_autocast").get("enabled")),
        "torch_autocast keeps fp32 parameters and chooses modules by exact class",
        'Remove "torch_autocast"; use "bf16": {"enabled": true}.',
    ),
    Refusal(
        "hybrid_engine.enabled: true",
        lambda c: bool(_block(c, "hybrid_engine").get("enabled")),
        "the hybrid engine swaps in inference kernels that read bf16 weights",
        'Remove "hybrid_engine".',
    ),
    Refusal(
        "compile.deepcompile: true",
        lambda c: bool(_block(c, "compile").get("deepcompile")),
        "DeepCompile gathers bf16 shards from C++",
        'Remove "deepcompile"; engine.compile() with torch.compile works.',
    ),
    Refusal(
        "tensor_parallel.autotp_size",
        lambda c: int(_block(c, "tensor_parallel").get("autotp_size") or 0) > 1,
        "AutoTP's layers are not nn.Linear and would stay bf16",
        'Remove "tensor_parallel" in this version.',
    ),
    Refusal(
        "expert_parallel.enabled: true",
        lambda c: bool(_block(c, "expert_parallel").get("enabled")),
        "AutoEP shards experts over groups of their own",
        'Remove "expert_parallel".',
    ),
)


def refuse_config(config: Config) -> None:
    """Nothing happens if FP8 ZeRO supports `config`.

    Raises:
        UnsupportedError: it does not; all reasons at once, each with its key and remedy.
    """
    found = [row for row in REFUSALS if row.applies(config)]
    if found:
        rows = "\n".join(f"  {row.key}: {row.reason}. {row.remedy}" for row in found)
        raise UnsupportedError(f'"fp8" is enabled together with what it does not support:\n{rows}')


def refuse_model(has_moe_layers: bool, parameter_names: list[str]) -> None:
    """Nothing happens if the model has no expert-parallel parameters.

    Args:
        has_moe_layers: what the engine found.
        parameter_names: parameters marked for expert groups (`allreduce = False`).

    Raises:
        UnsupportedError: it has.
    """
    if has_moe_layers or parameter_names:
        some = ", ".join(parameter_names[:3]) or "deepspeed.moe layers"
        raise UnsupportedError(
            f"model: expected no expert-parallel parameters, got {some}. DeepSpeed reduces them over expert groups "
            'with an optimizer group each. Turn "fp8.enabled" off for models with deepspeed.moe layers.'
        )
