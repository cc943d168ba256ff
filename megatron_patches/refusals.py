"""Refusals of a layer spec of ours: settings of Megatron's under which another model would be trained, or none.

Each function raises ConfigError or UnsupportedError, on all ranks alike, before layers are built.
"""

from __future__ import annotations

from typing import Any

from megatron.core.transformer import transformer_block
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from fp8_ds.errors import ConfigError, UnsupportedError
from megatron_patches import compat
from megatron_patches.linear import gather_rule
from megatron_patches.recipes import Fp8Settings, refuse


def alternates(config: Any) -> bool:
    """Whether dense layers and layers of experts need a spec each."""
    return bool(config.num_moe_experts) and config.moe_layer_freq not in (1, [1] * config.num_layers)


# Field of a TransformerConfig, and its flag: layers that gpt_builders.py makes by another function.
_OTHER_LAYERS = {
    "experimental_attention_variant": "--experimental-attention-variant",
    "heterogeneous_layers_config_path": "--heterogeneous-layers-config-path",
    "use_kitchen": "--kitchen-config-file, --kitchen-recipe-number",
    "use_kitchen_attention": "--use-kitchen-attention",
    "transformer_impl": "--transformer-impl",
}


def refuse_other_layers(config: Any) -> None:
    for name, flag in _OTHER_LAYERS.items():
        value = getattr(config, name, None)
        if value and (name != "transformer_impl" or value == "inference_optimized"):
            raise UnsupportedError(
                f"{flag}: expected it left out with a layer spec of megatron_patches, got {value}. Another model would "
                "be trained: remove it, or leave out --fp8-attention-backend, --spec and --fp8-format."
            )


def require_engine(fp8: Fp8Settings | None) -> None:
    if fp8 is not None:
        raise ConfigError(
            f"--fp8-recipe: expected one of Megatron's with --transformer-impl transformer_engine, got "
            f"{fp8.linear.recipe}. Pass --transformer-impl local."
        )
    engine = compat.transformer_engine()
    if not engine.found:
        raise UnsupportedError(
            f"--transformer-impl: expected Transformer Engine, got none ({engine.detail}). Install it, or pass "
            "--transformer-impl local, with which FP8 linears are those of fp8_ds."
        )


def refuse_recomputation(config: Any) -> None:
    """Refuse to recompute more than attention's core: where its config says FP8, Megatron uses Transformer Engine."""
    granularity = config.recompute_granularity
    others = sorted(set(config.recompute_modules or ()) - {"core_attn"}) if granularity == "selective" else []
    flag, expected, got = "--recompute-granularity", "selective or none", granularity
    if others:
        flag, expected, got = "--recompute-modules", "core_attn alone", " ".join(others)
    if others or granularity == "full":
        raise UnsupportedError(
            f"{flag}: expected {expected} with --fp8-format and without Transformer Engine, got {got}. Megatron "
            "recomputes FP8 layers by it: use `-m megatron_patches.pretrain_gpt`, which can."
        )


def refuse_everywhere(config: Any, fp8: Fp8Settings) -> None:
    """Refuse what linears refuse when they are built: a pipeline stage without any would leave others waiting."""
    refuse(config)
    if config.sequence_parallel and config.tensor_model_parallel_size > 1 and not config.multi_latent_attention:
        gather_rule(fp8, fp8.recipe())


def refuse_final_norm(config: Any) -> None:
    """Refuse torch's norm after the last layer under sequence parallelism, for a spec of one layer has no slot for it;
    also on pipeline stages without it."""
    if config.sequence_parallel and transformer_block.LayerNormImpl is WrappedTorchNorm and not alternates(config):
        raise UnsupportedError(
            "--sequence-parallel: expected off with --spec of megatron_patches, where neither Transformer Engine nor "
            "Apex is installed, got on. Megatron's last norm would be torch's, which it refuses then: use `-m "
            "megatron_patches.pretrain_gpt`, which replaces it, or install Apex."
        )


def refuse_bf16_alone(config: Any) -> None:
    """Refuse --first-last-layers-bf16 that leaves no layer in FP8."""
    first, last = config.num_layers_at_start_in_bf16, config.num_layers_at_end_in_bf16
    if config.first_last_layers_bf16 and (min(first, last) < 0 or first + last >= config.num_layers):
        raise ConfigError(
            f"--first-last-layers-bf16: expected fewer than {config.num_layers} layers in bf16, and no negative number "
            f"of them, got {first} at the start and {last} at the end. No layer would be in FP8: change "
            "--num-layers-at-start-in-bf16 and --num-layers-at-end-in-bf16, or remove --fp8-format."
        )
