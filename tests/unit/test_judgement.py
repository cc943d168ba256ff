"""`fp8-ds doctor --config` says what a start then does: refuse, train in bf16, or train in FP8."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8_ds import diagnosis, judgement
from fp8_ds.config import LinearConfig
from fp8_ds.diagnosis import Check
from fp8_ds.engine import initialize as starting
from fp8_ds.errors import Fp8DsError
from fp8_ds.judgement import judge

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

    monkeypatch.setattr(starting, "_apply_patches", lambda: None)
    return bool(starting.initialize(stock, (), {"model": torch.nn.Linear(16, 16), "config": config}))


@pytest.mark.parametrize(
    ("fp8", "more", "word"),
    [
        ({"monitor": {"every": 10}}, {}, 'enabled, got "deepspeed" and none of these, on rank 0, which writes.'),
        ({"monitor": {"every": 10, "sink": "/"}}, {}, "fp8.monitor.sink: expected a path that can be written"),
        ({"schedule": {"bf16_last_fraction": 0.1}}, {}, "fp8.schedule.total_steps"),
        ({"schedule": {"bf16_last_fraction": 0.1}}, {"scheduler": {"type": "OneCycle"}}, "fp8.schedule.total_steps"),
        ({"attention": {"backend": "fa3"}}, {}, "fp8.attention.backend"),
        ({"attention": {"backend": "cudnn"}}, {}, 'attn_implementation="sdpa"'),
        ({"activations": {"cross_entropy": "liger"}}, {}, "fp8.activations.cross_entropy"),
        ({"optimizer": {"master": "e4m19"}}, {}, "fp8.optimizer.master"),
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
    verdict = judge(config, script)
    assert verdict.on == "no" and not verdict.used
    assert word in str(caught.value)
    (reason,) = verdict.reasons
    assert word in reason
    for part in (reason.removeprefix("It is refused at start: "), *verdict.remedies):
        assert part in str(caught.value)


def test_each_refusal_is_a_reason_with_its_remedy(script: Path) -> None:
    config = {**STOCK, "fp16": {"enabled": True}, "zero_optimization": {"stage": 0}, "fp8": {"enabled": True}}
    verdict = judge(config, script)
    assert [reason.split(": ")[1] for reason in verdict.reasons] == ["zero_optimization.stage", "fp16.enabled"]
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
    assert starts(config, monkeypatch) and judge(config, script).on == "yes"


@pytest.mark.parametrize("block", [None, {"enabled": False}])
def test_what_starts_in_bf16_is_off(monkeypatch: pytest.MonkeyPatch, script: Path, block: Any) -> None:
    config = {**STOCK, "fp8": block}
    assert not starts(config, monkeypatch) and judge(config, script).on == "no"


def test_a_schedule_that_leaves_no_step_in_fp8_is_off(script: Path) -> None:
    schedule = {"bf16_until_step": 60, "bf16_last_fraction": 0.5, "total_steps": 100}
    verdict = judge({**STOCK, "fp8": {"enabled": True, "schedule": schedule}}, script)
    assert verdict.on == "no" and "every layer into bf16 in every step" in verdict.reasons[0] and verdict.remedies
    for more in ({"bf16_until_step": 49}, {"layers": {"up": "fp8"}}):
        assert judge({**STOCK, "fp8": {"enabled": True, "schedule": schedule | more}}, script).on == "yes"


@pytest.mark.parametrize("name", ["torch", "deepspeed", "seams", "triton"])
def test_a_run_that_lacks_what_all_runs_need_is_off(script: Path, name: str) -> None:
    found = [Check("python", "ok", "3.12"), Check(name, "missing", "not there", "pip install it")]
    verdict = judge({**STOCK, "fp8": {"enabled": True}}, script, found)
    assert verdict.on == "no" and verdict.reasons == (f"{name}: not there.",)
    assert verdict.remedies == (f"{name}: pip install it.",)
    without_gpu = [Check("GPU", "missing", "none"), Check("CUDA", "missing", "a CPU build")]
    assert judge({**STOCK, "fp8": {"enabled": True}}, script, without_gpu).on == "yes"


@pytest.mark.parametrize(
    ("source", "on"),
    [
        ("import fp8_ds", "yes"),
        ("import deepspeed\nfrom fp8_ds import Fp8Config\ndeepspeed.initialize()", "yes"),
        ("try:\n    import fp8_ds\nexcept ImportError:\n    pass", "yes"),
        ("import os\nos.environ['A'] = '1'\nif __name__ == '__main__':\n    import fp8_ds\n    main()", "yes"),
        ("def main():\n    deepspeed.initialize()\nimport fp8_ds\nmain()", "yes"),
        ("import fp8_ds_other", "no"),
        ("from .fp8_ds import x", "no"),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import fp8_ds", "no"),
        ("import typing\nif typing.TYPE_CHECKING:\n    import fp8_ds\nelse:\n    x = 1", "no"),
        ("if False:\n    import fp8_ds", "no"),
        ("if not TYPE_CHECKING:\n    import fp8_ds", "if"),
        ("if args.fp8:\n    import fp8_ds", "if"),
        ("def main():\n    import fp8_ds\nmain()", "if"),
        ("import deepspeed\nengine = deepspeed.initialize()[0]\nimport fp8_ds", "if"),
        ("def build():\n    return initialize()\ndef main():\n    build()\nmain()\nimport fp8_ds", "if"),
        ("trainer.train()\nimport fp8_ds", "if"),
    ],
)
def test_only_an_import_that_runs_before_initialize_counts(tmp_path: Path, source: str, on: str) -> None:
    path = tmp_path / "train.py"
    path.write_text(source)
    assert judge({**STOCK, "fp8": {"enabled": True}}, path).on == on


def test_how_products_accumulate_is_said_where_they_run_on_tensor_cores() -> None:
    gpu = torch.device("cuda")
    said = judgement._gemms(LinearConfig(fast_accumulation="output_and_grad_input"), gpu)
    assert said == "torch, on tensor cores; fast accumulation of output, grad_input"
    assert judgement._gemms(LinearConfig(recipe="blockwise"), gpu).endswith("; no fast accumulation")


def test_what_will_be_used_is_said(script: Path) -> None:
    used = judge({**STOCK, "fp8": {"enabled": True}}, script).used
    assert used == {
        "recipe": "tensorwise, output gradients in e5m2",
        "GEMM backend": "torch, on this CPU",
        "optimizer states": "fp32 moments, fp32 masters, ZeRO stage 2",
        "optimizer": "AdamW, of torch",
        "activations": "the model's own",
        "attention": "the model's own",
    }
    fp8 = {
        "enabled": True,
        "linear": {"recipe": "rowwise", "backend": "reference"},
        "optimizer": {"states": "fp8", "master": "e4m11"},
        "activations": {"fused": True, "nonlinear": "fp8"},
        "attention": {"backend": "fa3_fp8_emulated"},
    }
    without_optimizer = {key: value for key, value in STOCK.items() if key != "optimizer"}
    assert judge({**without_optimizer, "fp8": fp8}, script).used == {
        "recipe": "rowwise, output gradients in e5m2",
        "GEMM backend": "reference, which is slow",
        "optimizer states": "fp8 moments, e4m11 masters, ZeRO stage 2",
        "optimizer": "the one that the script gives to deepspeed.initialize, computed by fp8_ds on FP8 states",
        "activations": "fused SwiGLUs and norms, kept in fp8",
        "attention": "fa3_fp8_emulated",
    }


@pytest.mark.parametrize(
    ("named", "clipping", "holds"),
    [({}, "exact", True), ({"gradient_clipping": 0}, "exact", False), ({}, "delayed_norm", False)],
)
def test_release_is_said_to_be_in_the_backward_only_where_it_is(
    script: Path, monkeypatch: pytest.MonkeyPatch, named: dict[str, Any], clipping: str, holds: bool
) -> None:
    monkeypatch.setattr("deepspeed.runtime.constants.GRADIENT_CLIPPING_DEFAULT", 1.0)  # before 0.19.3 it was 0
    optimizer = {"states": "fp8", "release": True, "release_clipping": clipping}
    said = judge({**STOCK, **named, "fp8": {"enabled": True, "optimizer": optimizer}}, script).used["optimizer"]
    assert said.endswith("the gradients, for they are clipped at 1") == holds
    assert said.endswith(", in the backward (release)") == (not holds)


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
    verdict = judge({**config, **sizes, "fp8": {"enabled": True}}, script, world=world)
    assert verdict.on == on
    if "auto" not in sizes.values():
        assert stock_refuses(sizes, 8) == (on == "no")
    assert any("DeepSpeed needs train_batch_size or" in reason for reason in verdict.reasons) == (on == "no")
    assert any('Add "train_micro_batch_size_per_gpu"' in remedy for remedy in verdict.remedies) == (on == "no")


# --- what DeepSpeed cannot read ---


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tensor_parallel": None}, "tensor_parallel: expected an object, got null."),
        ({"tensor_parallel": 5}, "tensor_parallel: expected an object, got 5."),
        ({"tensor_parallel": {"autotp_size": None}}, "tensor_parallel.autotp_size: expected an integer, got null."),
        ({"optimizer": "AdamW"}, 'optimizer: expected an object, got "AdamW". Write "optimizer": {"type": "AdamW", '),
        ({"optimizer": None}, "optimizer: expected an object, got null."),
        ({"optimizer": {"type": 5}}, "optimizer.type: expected a name, got 5."),
        ({"scheduler": 5}, "scheduler: expected an object, got 5."),
        ({"bf16": True}, 'bf16: expected an object, got true. Write "bf16": {"enabled": true}'),
        ({"zero_optimization": 2}, "zero_optimization: expected an object, got 2."),
        ({"zero_optimization": {"stage": "two"}}, 'zero_optimization.stage: expected 1, 2 or 3, got "two".'),
        ({"zero_optimization": {"stage": None}}, "zero_optimization.stage: expected 1, 2 or 3, got null."),
        ({"zero_optimization": {"stage": 2.5}}, "zero_optimization.stage: expected 1, 2 or 3, got 2.5."),
        ({"train_micro_batch_size_per_gpu": 0}, "train_micro_batch_size_per_gpu: expected an integer from 1 on"),
        ({"train_micro_batch_size_per_gpu": "x"}, 'integer from 1 on, or "auto", got "x". Write the number.'),
        ({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 0}, "train_micro_batch_size_per_gpu: expected an"),
        ({"train_batch_size": 8.5}, "train_batch_size: expected an integer from 1 on"),
        ({"train_batch_size": -8}, "train_batch_size: expected an integer from 1 on"),
        ({"train_batch_size": 8, "gradient_accumulation_steps": 0}, "gradient_accumulation_steps: expected an integer"),
        ({"gradient_accumulation_steps": "x"}, 'gradient_accumulation_steps: expected an integer from 1 on, or "auto"'),
        ({"gradient_clipping": "1.0"}, 'gradient_clipping: expected a number or "auto", got "1.0". Write the number.'),
        ({"optimizer": {"type": "AdamW", "params": {"lr": "1e-4"}}}, "optimizer.params.lr: expected a number"),
        ({"optimizer": {"type": "AdamWW"}}, 'got "AdamWW". Did you mean "adamw"?'),
        ({"optimizer": {"type": "FancyOpt"}}, 'got "FancyOpt". Write "AdamW".'),
        ({"optimizer": {"type": "SGD"}}, 'got "SGD". Use "AdamW", or set "zero_allow_untested_optimizer": true.'),
    ],
)
@pytest.mark.parametrize("world", [None, 2])
def test_what_deepspeed_cannot_read_is_off_and_says_what_was_got(
    script: Path, changes: dict[str, Any], reason: str, world: int | None
) -> None:
    verdict = judge({**STOCK, **changes, "fp8": {"enabled": True}}, script, world=world)
    assert verdict.on == "no" and len(verdict.reasons) == 1 and reason in verdict.reasons[0]


VALUES = (None, True, 5, "x", [], {})
BLOCK_VALUES = {
    "zero_optimization": (*VALUES, {"stage": "two"}, {"stage": "2"}, {"stage": 2.0}, {"stage": 2.5}, {"stage": 7}),
    **dict.fromkeys(("bf16", "bfloat16", "fp16", "data_types"), VALUES),
    "tensor_parallel": (*VALUES, {"autotp_size": None}, {"autotp_size": "2"}, {"autotp_size": 0}, {"autotp_size": "x"}),
    "optimizer": VALUES,
    "scheduler": VALUES,
}


def test_deepspeeds_own_readers_stop_at_the_same_blocks() -> None:
    from deepspeed.runtime import config as stock
    from deepspeed.runtime.precision_config import get_bfloat16_config, get_float16_config
    from deepspeed.runtime.tensor_parallel import get_tensor_parallel_config
    from deepspeed.runtime.zero.config import get_zero_config

    readers: dict[str, Any] = {
        "zero_optimization": get_zero_config,
        "bf16": get_bfloat16_config,
        "bfloat16": get_bfloat16_config,
        "fp16": get_float16_config,
        "data_types": lambda config: stock.get_data_types_params(config).get("grad_accum_dtype"),
        "tensor_parallel": get_tensor_parallel_config,
        "optimizer": stock.get_optimizer_name,
        "scheduler": stock.get_scheduler_name,
    }
    for key, values in BLOCK_VALUES.items():
        for value in values:
            try:
                readers[key]({key: value})
                is_read = True
            except Exception:  # TypeError, AttributeError, pydantic's: whatever the user would see
                is_read = False
            assert (judgement.malformed({key: value}) is None) == is_read, (key, value)


# --- so many ranks ---


def stock_refuses(sizes: dict[str, Any], ranks: int) -> bool:
    """DeepSpeed's own arithmetic, without its process group."""
    from deepspeed.runtime.config import DeepSpeedConfig

    bare = object.__new__(DeepSpeedConfig)
    for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        setattr(bare, key, sizes.get(key))
    bare.world_size = ranks
    try:
        bare._configure_train_batch_size()
    except (AssertionError, ZeroDivisionError):
        return True
    return not (bare.train_micro_batch_size_per_gpu and bare.gradient_accumulation_steps)


@pytest.mark.parametrize("size", [0, -8, 8, 8.0, 8.5, True, False, "8", "x", [], {}])
def test_deepspeeds_own_arithmetic_stops_at_the_same_sizes(size: Any) -> None:
    is_read = judgement.malformed({"train_batch_size": size}) is None
    try:
        assert is_read == (not stock_refuses({"train_batch_size": size}, 1))
    except TypeError:
        assert not is_read


def test_batch_sizes_fit_where_deepspeeds_own_arithmetic_lets_them() -> None:
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    seen = set()
    for values in itertools.product((None, 6, 8, 16), (None, 1, 2, 3), (None, 1, 2)):
        sizes = {key: value for key, value in zip(keys, values, strict=True) if value is not None}
        if not {"train_batch_size", "train_micro_batch_size_per_gpu"} & set(sizes):
            continue
        for ranks in (1, 2, 3, 8, 16):
            refused = judgement.batch_mismatch(sizes, ranks) is not None
            assert refused == stock_refuses(sizes, ranks), (sizes, ranks)
            seen.add(refused)
    assert seen == {True, False}


def test_bf16_that_trainer_fills_in_is_on_and_said(script: Path) -> None:
    config = {**STOCK, "fp8": {"enabled": True}}
    assert not any("auto" in reason for reason in judge(config, script).reasons)
    verdict = judge({**config, "bf16": {"enabled": "auto"}}, script)
    assert verdict.on == "yes" and any('bf16.enabled is "auto"' in reason for reason in verdict.reasons)
    assert any("--bf16 true" in remedy for remedy in verdict.remedies)
    assert judge({**config, "bf16": {"enabled": False}}, script).on == "no"
    assert judgement.filled_in(config) is config


def test_numbers_that_somebody_has_to_fill_in_are_named(script: Path) -> None:
    params = {"lr": "auto", "betas": "auto", "eps": 1e-8}
    scheduler = {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}}
    config = {**STOCK, **scheduler, "optimizer": {"type": "AdamW", "params": params}, "fp8": {"enabled": True}}
    verdict = judge(config, script)
    (note,) = [reason for reason in verdict.reasons if "auto" in reason]
    assert verdict.on == "yes"
    assert note.startswith(
        'optimizer.params.lr, optimizer.params.betas, scheduler.params.total_num_steps: "auto", which'
    )


@pytest.mark.parametrize("kind", ["Adam", "adamw", "Adagrad", "Lion", "Muon", None])
def test_an_optimizer_that_deepspeed_has_tested_with_zero_is_on(script: Path, kind: str | None) -> None:
    assert judge({**STOCK, "optimizer": {"type": kind}, "fp8": {"enabled": True}}, script).on == "yes"


@pytest.mark.parametrize("kind", ["SGD", "RMSprop"])
def test_one_that_it_has_not_is_on_where_the_configuration_allows_it(script: Path, kind: str) -> None:
    config = {**STOCK, "optimizer": {"type": kind}, "zero_allow_untested_optimizer": True, "fp8": {"enabled": True}}
    assert judge(config, script).on == "yes"


def test_ranks_that_do_not_fit_turn_it_off_and_say_what_would(script: Path) -> None:
    config = {**STOCK, "fp8": {"enabled": True}, "train_batch_size": 12, "gradient_accumulation_steps": 3}
    assert judge(config, script, world=4).on == "yes"
    verdict = judge(config, script, world=8)
    assert (
        verdict.on == "no" and "train_batch_size: expected 1 " in verdict.reasons[0] and "got 12" in verdict.reasons[0]
    )
    assert judge(config, script).on == "yes"
    sizes = {"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2}
    never = judge({**STOCK, "fp8": {"enabled": True}, **sizes}, script)
    assert never.on == "no" and "expected a multiple of 2, " in never.reasons[0]
    assert "expected a multiple of 14, " in str(judgement.batch_mismatch({**sizes, "train_batch_size": 20}, 7))
    auto = {**config, "train_batch_size": "auto"}
    assert judge(auto, script, world=8).on == "yes"
    cut = {**config, "tensor_parallel": {"autotp_size": 2}}
    assert judgement.batch_mismatch(cut, 8) is None
    assert "divisor of 9 ranks" in str(judgement.batch_mismatch(cut, 9))
