"""What a linear of fp8_ds is told by Megatron, and its weight's bytes; its numbers are in
tests/distributed/test_megatron.py."""

from __future__ import annotations

import copy
import pickle

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


def recipe(pattern: str) -> RecipeConfig:
    """A --te-precision-config-file with one matcher."""
    matcher = {"config": "bf16", "type": "glob", "pattern": pattern, "enabled": True}
    return RecipeConfig.from_config_dict({"configs": {"bf16": {"training_recipe": {}}}, "matchers": {"a": matcher}})


@pytest.mark.parametrize("cls", [Fp8ColumnParallelLinear, Fp8RowParallelLinear])
def test_a_precision_config_for_linears_is_refused(cls: type) -> None:
    """It is Transformer Engine's, and would have no effect."""
    linear, name = cls.__new__(cls), "decoder.layers.0.mlp.linear_fc1"
    with pytest.raises(UnsupportedError, match=rf"--te-precision-config-file: .* got config bf16 for {name}"):
        linear.finish_init(get_quant_config_or_none(name, recipe("*linear_fc1")))
    for other in (recipe("*core_attention"), None):
        linear.finish_init(get_quant_config_or_none(name, other))


def test_a_write_that_autograd_sees_and_another_storage_are_noticed_and_copies_have_no_cache() -> None:
    weight = nn.Parameter(torch.randn(32, 16))
    step = weight._fp8 = StepWeight(weight, TensorwiseRecipe(LinearConfig()))  # type: ignore[attr-defined]
    first = step.data.float() * step.scale_inv
    assert step.data is step.data
    with torch.no_grad():
        weight.mul_(2)
    torch.testing.assert_close(step.data.float() * step.scale_inv, 2 * first)
    weight.data = -weight.data
    torch.testing.assert_close(step.data.float() * step.scale_inv, -2 * first)
    assert getattr(copy.deepcopy(weight), "_fp8", None) is None
    assert getattr(pickle.loads(pickle.dumps(weight)), "_fp8", None) is None
