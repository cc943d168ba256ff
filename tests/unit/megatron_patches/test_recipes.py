"""Linears without Transformer Engine: what is refused by the flag's name, and the cached bytes of a weight."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import nn

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install megatron-core==0.16.1")

from megatron.core.quantization.quant_config import RecipeConfig
from megatron.core.quantization.utils import get_quant_config_or_none

from fp8_ds.config import LinearConfig
from fp8_ds.errors import UnsupportedError
from fp8_ds.nn.linear.recipes import TensorwiseRecipe
from megatron_patches.linear import Fp8ColumnParallelLinear, Fp8RowParallelLinear, StepWeight
from megatron_patches.recipes import refuse


def test_a_plain_configuration_passes() -> None:
    refuse(SimpleNamespace(gradient_accumulation_fusion=False, fp8_param=False, cuda_graph_impl="none", fp4=None))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"gradient_accumulation_fusion": True}, "--no-gradient-accumulation-fusion: expected .*=False .*, got True"),
        ({"fp8_param": True}, "--fp8-param-gather"),
        ({"fp8_wgrad": False}, "--no-fp8-wgrad: expected fp8_wgrad=True .* rowwise_with_gw_hp"),
        ({"fp8_dot_product_attention": True}, "--fp8-attention-backend"),
        ({"fp4": "e2m1"}, "--fp4-format"),
        ({"delay_wgrad_compute": True}, "--delay-wgrad-compute"),
        ({"tp_comm_overlap": True}, "--tp-comm-overlap"),
        ({"cpu_offloading": True}, "--cpu-offloading-num-layers"),
        ({"moe_grouped_gemm": True}, "--moe-grouped-gemm: .*experts would stay in bf16"),
        ({"gtp_weight_remat_size": 2}, "--tensor-parallel-num-weight-shards: .*=1 .*, got 2"),
        ({"enable_cuda_graph": True}, "--enable-cuda-graph"),
        ({"cuda_graph_impl": "local"}, "--cuda-graph-impl: expected cuda_graph_impl=none .*, got local"),
    ],
)
def test_is_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        refuse(SimpleNamespace(**values))


@pytest.mark.parametrize("cls", [Fp8ColumnParallelLinear, Fp8RowParallelLinear])
def test_a_precision_config_for_linears_is_refused(cls: type) -> None:
    """It is Transformer Engine's, and would have no effect."""
    linear, name = cls.__new__(cls), "decoder.layers.0.mlp.linear_fc1"

    def configured(pattern: str) -> object:
        matcher = {"config": "bf16", "type": "glob", "pattern": pattern, "enabled": True}
        configs = {"configs": {"bf16": {"training_recipe": {}}}, "matchers": {"a": matcher}}
        return get_quant_config_or_none(name, RecipeConfig.from_config_dict(configs))

    with pytest.raises(UnsupportedError, match=rf"--te-precision-config-file: .* for {name}"):
        linear.finish_init(configured("*linear_fc1"))
    for other in (configured("*core_attention"), None):
        linear.finish_init(other)


def test_writes_and_another_storage_are_noticed_and_copies_of_a_weight_have_no_cache() -> None:
    weight = nn.Parameter(torch.randn(32, 16))
    step = weight._fp8 = StepWeight(weight, TensorwiseRecipe(LinearConfig()))  # type: ignore[attr-defined]
    first = step.data.float() * step.scale_inv
    with torch.no_grad():
        weight.mul_(2)
    torch.testing.assert_close(step.data.float() * step.scale_inv, 2 * first)
    weight.data = -weight.data
    torch.testing.assert_close(step.data.float() * step.scale_inv, -2 * first)
    for other in (copy.deepcopy(weight), pickle.loads(pickle.dumps(weight))):
        assert getattr(other, "_fp8", None) is None
