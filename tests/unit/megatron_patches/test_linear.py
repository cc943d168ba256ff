"""What a linear of fp8_ds is told by Megatron; its numbers are in tests/distributed/test_megatron.py."""

from __future__ import annotations

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install megatron-core==0.16.1")

from megatron.core.quantization.quant_config import RecipeConfig
from megatron.core.quantization.utils import get_quant_config_or_none

from fp8_ds.errors import UnsupportedError
from megatron_patches.linear import Fp8ColumnParallelLinear, Fp8RowParallelLinear


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
