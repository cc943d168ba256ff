"""Flags of FP8 optimizer states: what they mean, and what is refused by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from fp8_ds.errors import ConfigError, UnsupportedError
from megatron_patches import optimizer
from megatron_patches.optimizer import OptimizerStates


def arguments(**values: Any) -> SimpleNamespace:
    found = {"fp8_optimizer_states": True, "fp8_master": None, "seed": 7, "fp8_param_gather": False, "fp8_recipe": None}
    return SimpleNamespace(**{**found, **values})


def test_master_follows_from_how_weights_are_stored() -> None:
    assert optimizer.from_arguments(arguments(fp8_optimizer_states=False)) is None
    assert optimizer.from_arguments(arguments()) == OptimizerStates("bf16_8", 7)
    gathers = arguments(fp8_param_gather=True, fp8_recipe="tensorwise")
    assert optimizer.from_arguments(gathers) == OptimizerStates("e4m19", 7)
    gathers.fp8_drop_transposes = True
    assert optimizer.from_arguments(gathers) == OptimizerStates("e4m19", 7, drop_transposes=True)
    for name in ("use_cpu_initialization", "log_params_norm"):
        assert optimizer.from_arguments(arguments(**{name: True})) == OptimizerStates("bf16_8", 7)


GATHERED = {"fp8_param_gather": True, "fp8_recipe": "tensorwise"}
DROPS = {"fp8_drop_transposes": True}


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"fp8_optimizer_states": False, "fp8_master": "bf16_8"}, ConfigError, "--fp8-master"),
        ({"fp8_master": "e4m19"}, ConfigError, "--fp8-master: expected bf16_8 without --fp8-param-gather"),
        ({"fp8_master": "fp32"}, ConfigError, "expected one of bf16_8, e4m19, e4m11, got 'fp32'"),
        ({"fp8_master": "bf16_8", "fp8_param_gather": True}, ConfigError, "--fp8-master: expected e4m19 or e4m11"),
        ({**GATHERED, "fp8_recipe": "delayed"}, UnsupportedError, "--fp8-recipe: .* got delayed"),
        ({**GATHERED, "fp8_recipe": "blockwise"}, UnsupportedError, "--fp8-recipe: .* got blockwise"),
        ({**GATHERED, "use_cpu_initialization": True}, UnsupportedError, "--use-cpu-initialization"),
        ({**GATHERED, "log_params_norm": True}, UnsupportedError, "--log-params-norm"),
        (DROPS, ConfigError, "--fp8-drop-transposes"),
        ({**DROPS, "fp8_optimizer_states": False, "fp8_param_gather": True}, ConfigError, "--fp8-drop-transposes"),
        ({**DROPS, **GATHERED, "cuda_graph_impl": "local"}, UnsupportedError, "--cuda-graph-impl"),
        ({"optimizer": "muon"}, UnsupportedError, "--optimizer: expected adam .* got muon"),
        ({"adam_beta1": 0.99, "adam_beta2": 0.95}, ConfigError, "--adam-beta1, --adam-beta2: .* got 0.99 and 0.95"),
        ({"adam_beta2": 1.0}, ConfigError, "--adam-beta1, --adam-beta2: .* got 0.9 and 1.0"),
        ({"adam_eps": 0.0}, ConfigError, "--adam-eps: expected .* got 0.0"),
        ({"use_torch_fsdp2": True}, UnsupportedError, "--use-torch-fsdp2"),
        ({"use_megatron_fsdp": True}, UnsupportedError, "--use-megatron-fsdp"),
        ({"optimizer_cpu_offload": True}, UnsupportedError, "--optimizer-cpu-offload"),
        ({"optimizer_cuda_graph": True}, UnsupportedError, "--optimizer-cuda-graph"),
        ({"rl_offload_optimizer_during_inference": True}, UnsupportedError, "--rl-offload-optimizer-during-inference"),
    ],
)
def test_flags_that_cannot_take_effect_are_refused(values: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        optimizer.from_arguments(arguments(**values))


class Chunk(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, dtype=dtype))
        self.config = SimpleNamespace(fp8_param=False)


def config(**values: Any) -> SimpleNamespace:
    found: dict[str, Any] = {"bf16": True, "fp16": False, "use_distributed_optimizer": True}
    found |= dict.fromkeys(("exp_avg_dtype", "exp_avg_sq_dtype", "main_params_dtype"), torch.float32)
    return SimpleNamespace(**found | values)


def test_what_is_supported_is_not_refused() -> None:
    optimizer.refuse(config(exp_avg_dtype=torch.uint8), [Chunk(), Chunk(torch.float32)], OptimizerStates())


@pytest.mark.parametrize(
    ("values", "chunk", "master", "message"),
    [
        ({"bf16": False, "fp16": True}, {}, "bf16_8", "--bf16: expected on .* got --fp16"),
        ({"bf16": False}, {}, "bf16_8", "--bf16: expected on .* got neither"),
        ({"exp_avg_sq_dtype": torch.bfloat16}, {}, "bf16_8", "--exp-avg-sq-dtype: expected fp8"),
        ({"main_params_dtype": torch.float16}, {}, "bf16_8", "--main-params-dtype: expected it left out"),
        ({}, {"dtype": torch.float16}, "bf16_8", "parameters: expected bf16 or float32, got torch.float16"),
        ({}, {}, "e4m19", "--fp8-master: expected bf16_8 where no weight is stored in FP8, got e4m19"),
    ],
)
def test_megatron_features_are_refused_by_name(
    values: dict[str, Any], chunk: dict[str, Any], master: str, message: str
) -> None:
    with pytest.raises((UnsupportedError, ConfigError), match=message):
        optimizer.refuse(config(**values), [Chunk(**chunk)], OptimizerStates(master))


def test_precision_aware_needs_no_transformer_engine() -> None:
    """Stock Megatron without it raises, or stumbles over its version."""
    from megatron.core.optimizer import OptimizerConfig

    from megatron_patches import compat

    if compat.transformer_engine().found:
        pytest.skip("Transformer Engine is here")
    values: dict[str, Any] = {"optimizer": "adam", "bf16": True, "use_distributed_optimizer": True}
    values |= {"use_precision_aware_optimizer": True, "main_grads_dtype": torch.bfloat16, "exp_avg_dtype": torch.uint8}
    with pytest.raises((RuntimeError, TypeError)):
        OptimizerConfig(**values)
    made = OptimizerConfig.__new__(OptimizerConfig)
    check = optimizer._without_fused_adam(OptimizerConfig.__post_init__)
    for name, field in OptimizerConfig.__dataclass_fields__.items():
        setattr(made, name, values.get(name, field.default))
    check(made)
    assert {name: getattr(made, name) for name in values} == values


def test_saved_groups_have_what_fused_adam_reads_of_loaded_ones() -> None:
    """torch's load_state_dict leaves nothing of the groups that were there; `step` of Transformer Engine 2.11's
    optimizers/fused_adam.py and of Apex's raises KeyError for what is missing.
    """
    from megatron_patches.optimizer_adam import MegatronFp8AdamW

    ours = MegatronFp8AdamW([nn.Parameter(torch.ones(4))], betas=(0.8, 0.9), weight_decay=0.1)
    stock = torch.optim.Adam([nn.Parameter(torch.ones(4))])
    stock.load_state_dict(ours.state_dict())
    (group,) = stock.param_groups
    read = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay", "bias_correction")}
    assert read == {"lr": 1e-3, "betas": (0.8, 0.9), "eps": 1e-8, "weight_decay": 0.1, "bias_correction": True}
