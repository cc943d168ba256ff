import json
from pathlib import Path
from typing import Any

import pytest

from fp8_ds.config import Fp8Config

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.json"))


def leaves(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        return [leaf for branch in tree.values() for leaf in leaves(branch)]
    if isinstance(tree, list):
        return [leaf for branch in tree for leaf in leaves(branch)]
    return [tree]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_is_complete(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = json.loads(path.read_text())
    assert "auto" not in leaves(config)
    assert config["bf16"]["enabled"] is True
    assert path.stem.startswith(f"ds_zero{config['zero_optimization']['stage']}_")
    assert ("fp8" in config) == ("_fp8" in path.stem)
    if "fp8" in config:
        fp8 = Fp8Config.from_block(config["fp8"])
        assert fp8.enabled
        fp8.validate_with(config)

    from deepspeed.runtime.config import DeepSpeedConfig

    monkeypatch.setenv("WORLD_SIZE", "1")
    parsed = DeepSpeedConfig(config)
    assert parsed.optimizer_name == "adamw"
    assert parsed.train_batch_size == config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"]


def test_fp8_and_bf16_at_stage_3_differ_in_the_block_only() -> None:
    fp8, bf16 = (json.loads((CONFIGS[0].parent / f"ds_zero3_{kind}.json").read_text()) for kind in ("fp8", "bf16"))
    assert fp8.pop("fp8") == {"enabled": True}
    assert fp8 == bf16
