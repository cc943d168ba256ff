"""DeepSpeed's own parser judges DeepSpeed's keys: its refusals keep its words, and name the key."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from fp8_ds.config.ds_config import linear_in_training, parsed
from fp8_ds.engine import initialize as starting
from fp8_ds.engine.initialize import refuse_misplaced_block
from fp8_ds.errors import ConfigError
from fp8_ds.tools.doctor.check_config import check_config

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2},
    "fp8": {"enabled": True},
}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tensor_parallel": 5}, "tensor_parallel: expected what DeepSpeed reads, got 5."),
        ({"optimizer": "AdamW"}, 'optimizer: expected what DeepSpeed reads, got "AdamW"'),
        ({"zero_optimization": {"stge": 2}}, "zero_optimization.stge: expected what DeepSpeed reads, got 2."),
        ({"train_micro_batch_size_per_gpu": None}, "train_batch_size or train_micro_batch_size_per_gpu needs to be"),
        ({"gradient_clipping": "1.0"}, "gradient_clipping is '1.0', a string"),
    ],
)
def test_what_deepspeed_stops_at_is_named_with_its_own_words(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed({**CONFIG, **changes})
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("sizes", "ranks", "found"),
    [
        ({}, 8, (16, 2, 1)),
        ({"train_batch_size": 96}, 8, (96, 2, 6)),
        ({"train_batch_size": 96, "gradient_accumulation_steps": 3}, None, (96, 2, 3)),
        ({"train_batch_size": "auto", "gradient_accumulation_steps": "auto"}, 4, (8, 2, 1)),
        ({"train_micro_batch_size_per_gpu": None, "train_batch_size": 8}, 4, (8, 2, 1)),
        ({"tensor_parallel": {"autotp_size": 2}}, 8, (8, 2, 1)),
    ],
)
def test_batch_sizes_are_those_of_so_many_ranks(
    sizes: dict[str, Any], ranks: int | None, found: tuple[int, int, int]
) -> None:
    read = parsed({**CONFIG, **sizes}, ranks)
    assert found == (read.train_batch_size, read.train_micro_batch_size_per_gpu, read.gradient_accumulation_steps)


@pytest.mark.parametrize(
    ("changes", "ranks"),
    [
        ({"train_batch_size": 12, "gradient_accumulation_steps": 3}, 8),
        ({"tensor_parallel": {"autotp_size": 2}}, 9),
    ],
)
def test_ranks_that_batch_sizes_do_not_fit_are_refused(changes: dict[str, Any], ranks: int | None) -> None:
    with pytest.raises(ConfigError, match=r"is not equal to micro_batch|are no multiple of tensor_parallel"):
        parsed({**CONFIG, **changes}, ranks)


def test_a_configuration_is_left_as_it_was() -> None:
    config = {**CONFIG, "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": "auto"}, "steps": {"a": [1]}}
    before = json.dumps(config)
    assert parsed(config).zero_config.stage == 3 and json.dumps(config) == before


@pytest.mark.parametrize(
    ("key", "remedy"),
    [
        ("fp_8", 'Did you mean "fp8"?'),
        ("Float8", 'Did you mean "fp8"?'),
        ("msamp", 'It is MS-AMP\'s: write "fp8" in its place (docs/migrating.md).'),
        ("zero_optimisation", None),
    ],
)
def test_a_block_that_was_meant_as_fp8_is_named(key: str, remedy: str | None) -> None:
    said = f"{key}: expected a key that DeepSpeed reads, got one that it passes over in silence. {remedy}"
    assert starting.other_blocks({"bf16": {}, key: {}}) == ([said] if remedy else [])


@pytest.mark.parametrize(("stage", "is_first", "is_zero3s"), [(2, True, False), (3, True, True), (3, False, False)])
def test_zero_3_puts_its_own_linear_over_a_patch_once_in_a_process(
    monkeypatch: pytest.MonkeyPatch, stage: int, is_first: bool, is_zero3s: bool
) -> None:
    from deepspeed.runtime.zero.linear import zero3_linear_wrap
    from deepspeed.runtime.zero.partition_parameters import InsertPostInitMethodToModuleSubClasses as Zero3

    monkeypatch.setattr(Zero3, "linear_bk", torch.nn.functional.linear, raising=False)
    if is_first:
        monkeypatch.delattr(Zero3, "linear_bk")
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *args: None)
    found = linear_in_training({"zero_optimization": {"stage": stage}})
    assert found is (zero3_linear_wrap if is_zero3s else torch.nn.functional.linear)


ON = {"enabled": True}


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"Fp8": ON, "bf16": ON}, "'Fp8'"),
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
