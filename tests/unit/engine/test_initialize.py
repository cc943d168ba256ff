from __future__ import annotations

from typing import Any

import pytest

from fp8_ds.engine.initialize import refuse_misplaced_block
from fp8_ds.errors import ConfigError
from fp8_ds.tools.doctor.check_config import check_config

ON = {"enabled": True}


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"FP8": ON}, "'FP8'"),
        ({"Fp8": ON, "bf16": ON}, "'Fp8'"),
        ({"bf16": {**ON, "fp8": ON}}, "\"fp8\" in 'bf16'"),
        ({"zero_optimization": {"stage": 3, "fp8": ON}}, "\"fp8\" in 'zero_optimization'"),
    ],
)
def test_a_block_that_deepspeed_would_pass_over_is_named(config: dict[str, Any], found: str) -> None:
    with pytest.raises(ConfigError, match=r'expected "fp8" at the top level') as caught:
        refuse_misplaced_block(config)
    assert found in str(caught.value)
    assert check_config(config).on == "no" and any(found in reason for reason in check_config(config).reasons)


@pytest.mark.parametrize("config", [{}, {"fp8": ON}, {"fp8": ON, "FP8": ON}, {"bf16": ON, "steps_per_print": 1}])
def test_other_configurations_pass(config: dict[str, Any]) -> None:
    refuse_misplaced_block(config)
