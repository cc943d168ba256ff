"""A configuration for Trainer becomes one that DeepSpeed starts with alone, as Trainer itself makes it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from fp8_ds.parity.filled import filled

EXAMPLE = json.loads((Path(__file__).parents[3] / "examples/huggingface/ds_zero3_fp8.json").read_text())
AUTOMATIC: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto", "loss_scale": 0},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
}


def test_it_is_what_trainer_makes_of_it(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from transformers import TrainingArguments
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    given = copy.deepcopy(AUTOMATIC)
    arguments = TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=6, learning_rate=2e-4, use_cpu=True, bf16=True
    )
    theirs = HfTrainerDeepSpeedConfig(copy.deepcopy(AUTOMATIC))
    theirs.trainer_config_process(arguments)
    ours, _ = filled(given, 6, 2e-4)
    assert given == AUTOMATIC
    assert ours | {"train_batch_size": 6} == theirs.config


def test_the_example_gets_an_optimizer_and_what_nobody_named_is_said() -> None:
    found, said = filled(EXAMPLE, 4, 1e-3)
    assert found["optimizer"] == {
        "type": "AdamW",
        "params": {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0},
    }
    assert found["train_micro_batch_size_per_gpu"] == 4 and found["fp8"] == EXAMPLE["fp8"]
    assert ", ".join(said) == (
        "gradient_accumulation_steps 1, gradient_clipping 1.0, optimizer AdamW, betas [0.9, 0.999], eps 1e-08, "
        "weight_decay 0.0"
    )


def test_options_go_before_the_configuration_and_without_them_it_is_as_it_was() -> None:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "Lion", "params": {"lr": 1.0, "betas": [0, 1]}},
    }
    assert filled(config, None, None) == (config, [])
    found, said = filled(config, 8, 0.5)
    assert found["train_micro_batch_size_per_gpu"] == 8 and said == []
    assert found["optimizer"] == {"type": "Lion", "params": {"lr": 0.5, "betas": [0, 1]}}
    bare = {"optimizer": {"type": "AdamW"}}
    assert filled(bare, None, None) == (bare, [])


def test_what_only_an_option_can_say_stays_automatic() -> None:
    found, _ = filled(AUTOMATIC, None, None)
    assert found["train_micro_batch_size_per_gpu"] == found["optimizer"]["params"]["lr"] == "auto"
    assert "optimizer" not in filled(EXAMPLE, None, None)[0]
