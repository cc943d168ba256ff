"""`fp8-ds doctor --config` says what a start then does: refuse, train in bf16, or train in FP8."""

from __future__ import annotations

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
        ({"monitor": {"every": 10}}, {}, 'enabled, got "deepspeed" and none of these, on rank 0, which writes.'),
        ({"monitor": {"every": 10, "sink": "/"}}, {}, "fp8.monitor.sink: expected a path that can be written"),
        ({"schedule": {"bf16_last_fraction": 0.1}}, {}, "fp8.schedule.total_steps"),
        ({"schedule": {"bf16_last_fraction": 0.1}}, {"scheduler": {"type": "WarmupLR"}}, "fp8.schedule.total_steps"),
        ({"attention": {"backend": "fa3"}}, {}, "fp8.attention.backend"),
        ({"activations": {"cross_entropy": "liger"}}, {}, "no such key, which this version has no more"),
        ({"optimizer": {"states": "fp8"}}, {"optimizer": {"type": "SGD"}}, "optimizer.type"),
        ({"linaer": {}}, {}, "Did you mean"),
        ({}, {"fp16": {"enabled": True}}, "fp16.enabled: true"),
        ({}, {"zero_optimization": {"stage": 0}}, "zero_optimization.stage: 0"),
        (RELEASE, {"gradient_accumulation_steps": 2}, "release: expected false with gradient_accumulation_steps 2,"),
        (RELEASE, {"managed_gradient_accumulation": False}, "with managed_gradient_accumulation false, got true"),
        (RELEASE, {"data_types": {"grad_accum_dtype": "fp32"}}, "with data_types.grad_accum_dtype torch.float32, got"),
        (
            RELEASE,
            {"zero_optimization": {"stage": 2, "contiguous_gradients": False}},
            "with zero_optimization.contiguous_gradients false, got true",
        ),
    ],
)
def test_what_a_start_refuses_is_off(
    monkeypatch: pytest.MonkeyPatch, script: Path, fp8: dict[str, Any], more: dict[str, Any], word: str
) -> None:
    config = {**STOCK, **more, "fp8": {"enabled": True, **fp8}}
    with pytest.raises(Fp8DsError) as caught:
        starts(config, monkeypatch)
    verdict = check_config(config, script)
    assert verdict.on == "no" and word in str(caught.value)
    ours = [reason for reason in verdict.reasons if not reason.startswith("DeepSpeed refuses it")]
    assert any(word in reason for reason in ours)
    for part in (*(reason.removeprefix("It is refused at start: ") for reason in ours), *verdict.remedies):
        assert part in str(caught.value)


def test_each_refusal_is_a_reason_with_its_remedy(script: Path) -> None:
    config = {**STOCK, "fp16": {"enabled": True}, "zero_optimization": {"stage": 0}, "fp8": {"enabled": True}}
    verdict = check_config(config, script)
    assert verdict.reasons[0].startswith("DeepSpeed refuses it at start: ")
    assert [reason.split(": ")[1] for reason in verdict.reasons[1:]] == ["zero_optimization.stage", "fp16.enabled"]
    assert ["zero_optimization" in verdict.remedies[0], "bf16" in verdict.remedies[1]] == [True, True]


@pytest.mark.parametrize(
    ("fp8", "more"),
    [
        ({}, {}),
        ({"monitor": {"every": 10, "sink": "health.jsonl"}}, {}),
        ({"monitor": {"every": 10}}, {"csv_monitor": {"enabled": True}}),
        ({"schedule": {"bf16_last_fraction": 0.1, "total_steps": 100}}, {}),
        ({"schedule": {"bf16_last_fraction": 0.1}}, WITH_TOTAL),
        ({"optimizer": {"states": "fp8", "master": "e4m11"}}, {}),
        (RELEASE, {"gradient_accumulation_steps": "auto"}),
        (RELEASE, {"zero_optimization": {"stage": 3, "contiguous_gradients": False}}),
        (RELEASE_HELD, {"gradient_accumulation_steps": 2, "gradient_clipping": 1.0}),
    ],
)
def test_what_starts_is_on(
    monkeypatch: pytest.MonkeyPatch, script: Path, fp8: dict[str, Any], more: dict[str, Any]
) -> None:
    config = {**STOCK, **more, "fp8": {"enabled": True, **fp8}}
    assert starts(config, monkeypatch) and check_config(config, script).on == "yes"


@pytest.mark.parametrize("block", [None, {"enabled": False}])
def test_what_starts_in_bf16_is_off(monkeypatch: pytest.MonkeyPatch, script: Path, block: Any) -> None:
    config = {**STOCK, "fp8": block}
    assert not starts(config, monkeypatch) and check_config(config, script).on == "no"


def test_a_schedule_that_leaves_no_step_in_fp8_is_off(script: Path) -> None:
    schedule = {"bf16_until_step": 60, "bf16_last_fraction": 0.5, "total_steps": 100}
    verdict = check_config({**STOCK, "fp8": {"enabled": True, "schedule": schedule}}, script)
    assert verdict.on == "no" and "every layer into bf16 in every step" in verdict.reasons[0]
    for more in ({"bf16_until_step": 49}, {"layers": {"up": "fp8"}}):
        assert check_config({**STOCK, "fp8": {"enabled": True, "schedule": schedule | more}}, script).on == "yes"


@pytest.mark.parametrize("name", ["torch", "deepspeed", "seams", "triton"])
def test_a_run_that_lacks_what_all_runs_need_is_off(script: Path, name: str) -> None:
    found = [Check("python", "ok", "3.12"), Check(name, "missing", "not there", "pip install it")]
    verdict = check_config({**STOCK, "fp8": {"enabled": True}}, script, found)
    assert verdict.on == "no" and verdict.reasons == (f"{name}: not there.",)
    assert verdict.remedies == (f"{name}: pip install it.",)
    without_gpu = [Check("GPU", "missing", "none"), Check("CUDA", "missing", "a CPU build")]
    assert check_config({**STOCK, "fp8": {"enabled": True}}, script, without_gpu).on == "yes"


@pytest.mark.parametrize(
    ("source", "on"),
    [
        ("import fp8_ds", "yes"),
        ("import os, fp8_ds", "yes"),
        ("import deepspeed\nfrom fp8_ds import Fp8Config\ndeepspeed.initialize()", "yes"),
        ("if args.fp8:\n    import fp8_ds as f", "yes"),
        ("try: import fp8_ds.engine\nexcept ImportError: pass", "yes"),
        ("import fp8_ds_other", "no"),
        ("from .fp8_ds import x", "no"),
        ("# import fp8_ds", "no"),
        ("print('import fp8_ds')", "no"),
        ("fp8_ds = 3", "no"),
        ("", "no"),
    ],
)
def test_an_import_is_searched_in_the_text_and_none_is_said(tmp_path: Path, source: str, on: str) -> None:
    path = tmp_path / "train.py"
    path.write_text(source)
    verdict = check_config({**STOCK, "fp8": {"enabled": True}}, path)
    assert verdict.on == on
    assert any(f"no import of fp8_ds was found in {path}" in reason for reason in verdict.reasons) == (on == "no")


@pytest.mark.parametrize(
    ("sizes", "on"),
    [
        ({"train_batch_size": 8}, "yes"),
        ({"train_micro_batch_size_per_gpu": 8}, "yes"),
        ({"train_micro_batch_size_per_gpu": "auto"}, "yes"),
        ({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": None}, "yes"),
        ({}, "no"),
        ({"gradient_accumulation_steps": 8}, "no"),
        ({"train_micro_batch_size_per_gpu": None}, "no"),
    ],
)
@pytest.mark.parametrize("world", [None, 8])
def test_without_a_batch_size_it_is_off_for_deepspeed_does_not_start(
    script: Path, sizes: dict[str, Any], on: str, world: int | None
) -> None:
    config = {name: value for name, value in STOCK.items() if name != "train_micro_batch_size_per_gpu"}
    verdict = check_config({**config, **sizes, "fp8": {"enabled": True}}, script, world=world)
    assert verdict.on == on
    assert any("needs to be provided" in reason for reason in verdict.reasons) == (on == "no")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9]}}}, "optimizer.params: expected what"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": "1e-4"}}}, "optimizer.params: expected what"),
        ({"optimizer": {"type": "AdamW", "params": [1]}}, "optimizer: expected what DeepSpeed reads"),
        ({"optimizer": {"type": "AdamWW"}, "zero_allow_untested_optimizer": True}, 'tested with ZeRO, got "AdamWW"'),
        ({"optimizer": {"type": "SGD"}}, 'expected one that DeepSpeed has tested with ZeRO, got "SGD". Use "AdamW"; '),
        ({"scheduler": {"type": "WarmupCosine", "params": {}}}, "scheduler WarmupCosine: expected what"),
        ({"scheduler": {"type": "OneCycle", "params": {}}}, "scheduler OneCycle: expected what"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup": 3}}}, "scheduler WarmupLR: expected what"),
        ({"zero_optimization": {"stge": 2}}, "zero_optimization.stge: expected what DeepSpeed reads"),
        ({"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2}, "train_batch_size is not equal to"),
    ],
)
@pytest.mark.parametrize("world", [None, 2])
def test_what_deepspeed_cannot_start_with_is_off(
    script: Path, changes: dict[str, Any], reason: str, world: int | None
) -> None:
    verdict = check_config({**STOCK, **changes, "fp8": {"enabled": True}}, script, world=world)
    assert verdict.on == "no" and verdict.reasons[0].startswith("DeepSpeed refuses it at start: ")
    assert reason in verdict.reasons[0]


def test_bf16_that_trainer_fills_in_is_on_and_said(script: Path) -> None:
    config = {**STOCK, "fp8": {"enabled": True}}
    assert not any("auto" in reason for reason in check_config(config, script).reasons)
    verdict = check_config({**config, "bf16": {"enabled": "auto"}}, script)
    assert verdict.on == "yes" and any("bf16 by `--bf16 true`" in reason for reason in verdict.reasons)
    assert check_config({**config, "bf16": {"enabled": False}}, script).on == "no"


def test_numbers_that_somebody_has_to_fill_in_are_said_to_be_there(script: Path) -> None:
    params = {"lr": "auto", "betas": "auto", "eps": 1e-8}
    scheduler = {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}}
    config = {**STOCK, **scheduler, "optimizer": {"type": "AdamW", "params": params}, "fp8": {"enabled": True}}
    verdict = check_config(config, script)
    assert verdict.on == "yes" and any(reason.startswith('"auto" is filled in') for reason in verdict.reasons)


@pytest.mark.parametrize("kind", ["Adam", "adamw", "Adagrad", "Lion", "Muon", None])
def test_an_optimizer_that_deepspeed_has_tested_with_zero_is_on(script: Path, kind: str | None) -> None:
    assert check_config({**STOCK, "optimizer": {"type": kind}, "fp8": {"enabled": True}}, script).on == "yes"


def test_one_that_it_has_not_is_on_where_the_configuration_allows_it(script: Path) -> None:
    config = {**STOCK, "optimizer": {"type": "SGD"}, "zero_allow_untested_optimizer": True, "fp8": {"enabled": True}}
    assert check_config(config, script).on == "yes"


def test_ranks_that_do_not_fit_turn_it_off(script: Path) -> None:
    config = {**STOCK, "fp8": {"enabled": True}, "train_batch_size": 12, "gradient_accumulation_steps": 3}
    assert check_config(config, script, world=4).on == check_config(config, script).on == "yes"
    assert check_config(config, script, world=8).on == "no"
    assert check_config({**config, "train_batch_size": "auto"}, script, world=8).on == "yes"


def test_a_block_of_another_name_is_a_reason() -> None:
    assert check_config({**STOCK, "msamp": {"enabled": True}}).reasons[0].startswith("msamp: ")
