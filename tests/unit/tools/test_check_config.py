"""`fp8-ds doctor --config` says what a start then does: refuse, train in bf16, or train in FP8."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8_ds.engine import initialize as starting
from fp8_ds.errors import Fp8DsError
from fp8_ds.tools.doctor import diagnosis
from fp8_ds.tools.doctor.check_config import check_config
from fp8_ds.tools.doctor.diagnosis import Check

if torch.cuda.is_available():
    pytest.skip("is about a machine without a GPU", allow_module_level=True)

STOCK: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
}
WITH_TOTAL = {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 100}}}


@pytest.fixture(autouse=True)
def _without_autoload(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "autoload_check", lambda: Check("autoload", "optional", "off"))


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text("import deepspeed\nimport fp8_ds\ndeepspeed.initialize()\n")
    return path


RELEASE_HELD = {"optimizer": {"states": "fp8", "release": True}}
RELEASE = {"optimizer": {**RELEASE_HELD["optimizer"], "release_clipping": "delayed_norm"}}


def starts(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether our initialize lets stock's begin, with our engines in its place."""
    import deepspeed

    def stock(model: Any = None, config: Any = None) -> bool:
        return "fp8_ds" in deepspeed.DeepSpeedEngine.__module__

    monkeypatch.setattr(starting, "apply_patches", lambda: None)
    return bool(starting.initialize(stock, (), {"model": torch.nn.Linear(16, 16), "config": config}))


@pytest.mark.parametrize(
    ("fp8", "more", "word"),
    [
        ({"monitor": {"every": 10}}, {}, "fp8.monitor.sink: "),
        ({"monitor": {"every": 10, "sink": "/"}}, {}, "fp8.monitor.sink: "),
        ({"schedule": {"bf16_last_fraction": 0.1}}, {}, "fp8.schedule.total_steps"),
        ({"attention": {"backend": "fa3"}}, {}, "fp8.attention.backend"),
        ({"linaer": {}}, {}, "fp8.linaer: "),
        ({}, {"fp16": {"enabled": True}}, "fp16.enabled: true"),
        ({}, {"zero_optimization": {"stage": 0}}, "zero_optimization.stage: 0"),
        (RELEASE, {"gradient_accumulation_steps": 2}, "fp8.optimizer.release: "),
        ({}, {}, None),
        ({"monitor": {"every": 10, "sink": "health.jsonl"}}, {}, None),
        ({"monitor": {"every": 10}}, {"csv_monitor": {"enabled": True}}, None),
        ({"schedule": {"bf16_last_fraction": 0.1, "total_steps": 100}}, {}, None),
        ({"schedule": {"bf16_last_fraction": 0.1}}, WITH_TOTAL, None),
        ({"optimizer": {"states": "fp8", "master": "e4m11"}}, {}, None),
        (RELEASE, {"gradient_accumulation_steps": "auto"}, None),
        (RELEASE, {"zero_optimization": {"stage": 3, "contiguous_gradients": False}}, None),
        (RELEASE_HELD, {"gradient_accumulation_steps": 2, "gradient_clipping": 1.0}, None),
    ],
)
def test_it_is_on_where_a_start_starts_and_off_where_it_refuses(
    monkeypatch: pytest.MonkeyPatch, script: Path, fp8: dict[str, Any], more: dict[str, Any], word: str | None
) -> None:
    config = {**STOCK, **more, "fp8": {"enabled": True, **fp8}}
    verdict = check_config(config, script)
    if word is None:
        assert starts(config, monkeypatch) and verdict.on == "yes"
        return
    with pytest.raises(Fp8DsError, match=re.escape(word)):
        starts(config, monkeypatch)
    assert verdict.on == "no" and any(word in reason for reason in verdict.reasons)


def test_a_schedule_that_leaves_no_step_in_fp8_is_off(script: Path) -> None:
    schedule = {"bf16_until_step": 60, "bf16_last_fraction": 0.5, "total_steps": 100}
    verdict = check_config({**STOCK, "fp8": {"enabled": True, "schedule": schedule}}, script)
    assert verdict.on == "no" and "fp8.schedule" in verdict.reasons[0]
    for more in ({"bf16_until_step": 49}, {"layers": {"up": "fp8"}}):
        assert check_config({**STOCK, "fp8": {"enabled": True, "schedule": schedule | more}}, script).on == "yes"


@pytest.mark.parametrize("name", ["torch", "deepspeed", "seams", "triton"])
def test_a_run_that_lacks_what_all_runs_need_is_off(script: Path, name: str) -> None:
    found = [Check("python", "ok", "3.12"), Check(name, "missing", "not there", "pip install it")]
    verdict = check_config({**STOCK, "fp8": {"enabled": True}}, script, found)
    assert verdict.on == "no" and name in verdict.reasons[0] and "pip install it" in verdict.remedies[0]
    without_gpu = [Check("GPU", "missing", "none"), Check("CUDA", "missing", "a CPU build")]
    assert check_config({**STOCK, "fp8": {"enabled": True}}, script, without_gpu).on == "yes"


@pytest.mark.parametrize(
    ("source", "on"),
    [
        ("import deepspeed\nfrom fp8_ds import Fp8Config\ndeepspeed.initialize()", "yes"),
        ("if args.fp8:\n    import fp8_ds as f", "yes"),
        ("import fp8_ds_other", "no"),
        ("from .fp8_ds import x", "no"),
        ("# import fp8_ds", "no"),
    ],
)
def test_an_import_is_searched_in_the_text(tmp_path: Path, source: str, on: str) -> None:
    path = tmp_path / "train.py"
    path.write_text(source)
    assert check_config({**STOCK, "fp8": {"enabled": True}}, path).on == on


@pytest.mark.parametrize(
    ("changes", "world", "key"),
    [
        ({"optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9]}}}, None, "optimizer.params"),
        ({"optimizer": {"type": "SGD"}}, None, "optimizer.type"),
        ({"optimizer": {"type": "AdamWW"}, "zero_allow_untested_optimizer": True}, None, "optimizer.type"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup": 3}}}, None, "scheduler WarmupLR"),
        ({"zero_optimization": {"stge": 2}}, None, "zero_optimization.stge"),
        ({"train_micro_batch_size_per_gpu": None}, None, "train_batch_size"),
        ({"train_batch_size": 12, "gradient_accumulation_steps": 3}, 8, "train_batch_size"),
        ({"train_batch_size": 12, "gradient_accumulation_steps": 3}, 4, None),
        ({"optimizer": {"type": "SGD"}, "zero_allow_untested_optimizer": True}, None, None),
        ({"optimizer": {"type": "Lion"}}, None, None),
        ({"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}}, None, None),
        ({"bf16": {"enabled": False}}, None, "bf16"),
        ({"bf16": {"enabled": "auto"}}, None, None),  # Trainer fills it in
    ],
)
def test_what_deepspeed_cannot_start_with_is_off(
    script: Path, changes: dict[str, Any], world: int | None, key: str | None
) -> None:
    verdict = check_config({**STOCK, **changes, "fp8": {"enabled": True}}, script, world=world)
    assert verdict.on == ("yes" if key is None else "no")
    assert key is None or key in verdict.reasons[0]


def test_a_block_of_another_name_is_a_reason() -> None:
    assert check_config({**STOCK, "msamp": {"enabled": True}}).reasons[0].startswith("msamp: ")
