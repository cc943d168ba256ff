from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.pipe.dualpipev import DualPipeVModule
from deepspeed.runtime.pipe.module import PipelineModule
from torch import nn

from fp8_ds.config import LinearConfig
from fp8_ds.config.ds_config import zero_stage
from fp8_ds.engine.compat.config import REFUSALS, refuse_config, refuse_unread_reports
from fp8_ds.engine.compat.model import DEVICE_REFUSALS, MODEL_REFUSALS, refuse_device, refuse_model, refuse_stored
from fp8_ds.errors import ConfigError, UnsupportedError

GOOD: dict[str, Any] = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}, "fp8": {"enabled": True}}
WITH_CSV = GOOD | {"csv_monitor": {"enabled": True}}


def merged(change: dict[str, Any]) -> dict[str, Any]:
    config = copy.deepcopy(GOOD)
    for key, value in change.items():
        both = isinstance(value, dict) and isinstance(config.get(key), dict)
        config[key] = {**config[key], **value} if both else value
    return config


def zero(**keys: Any) -> dict[str, Any]:
    return {"zero_optimization": keys}


def reducing(change: dict[str, Any]) -> dict[str, Any]:
    """`change` with gradients reduced in FP8."""
    return {**change, "fp8": {"zero": {"reduce_scatter": "fp8"}}}


def with_states(kind: str, **params: Any) -> dict[str, Any]:
    """An optimizer of this type with FP8 states."""
    return {"optimizer": {"type": kind, "params": params}, "fp8": {"optimizer": {"states": "fp8"}}}


# Row -> configurations that it refuses, each merged into GOOD.
TRIGGERS: dict[str, list[dict[str, Any]]] = {
    "zero_optimization.stage: 0": [
        zero(stage="0"),
        zero(stage="auto"),
        {"zero_optimization": None},
    ],
    "fp16.enabled: true": [{"fp16": {"enabled": "True"}}],
    "bf16.enabled: false": [
        {"bf16": {"enabled": "auto"}},
        {"bf16": None},
        {"bf16": {"enabled": False}, "bfloat16": {"enabled": True}},
    ],
    "bf16.bf16_master_weights_and_grads: true": [
        {"bf16": None, "bfloat16": {"enabled": True, "bf16_master_weights_and_grads": True}}
    ],
    "bf16.bf16_optimizer_states: true": [{"bf16": {"bf16_optimizer_states": True}}],
    "zero_optimization.offload_optimizer.device": [zero(offload_optimizer={"device": "nvme", "nvme_path": "/x"})],
    "zero_optimization.cpu_offload: true": [zero(cpu_offload=True)],
    "zero_optimization.cpu_offload_param: true": [zero(cpu_offload_param=True)],
    "zero_optimization.offload_param.device": [zero(stage=3, offload_param={"device": "cpu"})],
    "zero_optimization.offload_optimizer.super_offload: true": [
        zero(stage=3, offload_optimizer={"device": "none", "super_offload": True})
    ],
    "zero_optimization.zenflow": [zero(zenflow={"topk_ratio": 0.05})],
    "zero_optimization.zero_hpz_partition_size": [zero(stage=3, zero_hpz_partition_size="8")],
    "zero_optimization.zero_quantized_weights: true": [zero(stage=3, zero_quantized_weights=True)],
    "zero_optimization.zero_quantized_gradients: true": [zero(stage=3, zero_quantized_gradients="true")],
    "zero_optimization.zero_quantized_nontrainable_weights: true": [
        zero(stage=3, zero_quantized_nontrainable_weights=True)
    ],
    "zero_optimization.mics_shard_size": [zero(stage=3, mics_shard_size=2)],
    "zero_optimization.stage3_use_all_reduce_for_fetch_params: true": [
        zero(stage=3, use_all_reduce_for_fetch_params=True)
    ],
    "zero_optimization.elastic_checkpoint: true": [zero(elastic_checkpoint=True)],
    "checkpoint.writer": [{"checkpoint": {"writer": {"decoupled": True}}}],
    "datastates_ckpt": [{"datastates_ckpt": {"config_file": "x"}}, {"datastates_ckpt": {}}],
    "data_types.grad_accum_dtype: fp32 with stage 1": [
        {"zero_optimization": {"stage": 1}, "data_types": {"grad_accum_dtype": dtype}}
        for dtype in ("fp32", "float32", torch.float32)
    ],
    "zero_optimization.reduce_scatter: false with fp8.zero.reduce_scatter: fp8": [
        reducing(zero(stage=3, reduce_scatter="false"))
    ],
    "zero_optimization.contiguous_gradients: false with stage 2 and fp8.zero.reduce_scatter: fp8": [
        reducing(zero(contiguous_gradients=False))
    ],
    "zero_optimization.use_multi_rank_bucket_allreduce: false with stage 2 and fp8.zero.reduce_scatter: fp8": [
        reducing(zero(use_multi_rank_bucket_allreduce=False))
    ],
    "communication_data_type with fp8.zero.reduce_scatter: fp8": [
        reducing({"zero_optimization": {"stage": 3}, "communication_data_type": "bf16"}),
        reducing({"seq_parallel_communication_data_type": "bf16"}),
    ],
    "gradient_predivide_factor with fp8.zero.reduce_scatter: fp8": [
        reducing({"zero_optimization": {"stage": 3}, "gradient_predivide_factor": 2.0})
    ],
    "optimizer.type: Muon with fp8.zero.reduce_scatter: fp8": [
        reducing({"optimizer": {"type": "Muon"}}),
        # Stock refuses it there unless "reduce_scatter" is false, which FP8 reduce-scatters refuse.
        reducing({"zero_optimization": {"stage": 3}, "optimizer": {"type": "Muon"}}),
    ],
    "optimizer.type other than Adam and AdamW with fp8.optimizer.states: fp8": [with_states("Lion")],
    "optimizer.params.amsgrad: true with fp8.optimizer.states: fp8": [with_states("AdamW", amsgrad=True)],
    "optimizer.params.bias_correction: false with fp8.optimizer.states: fp8": [
        with_states("Adam", bias_correction=False)
    ],
    "optimizer.params.betas with fp8.optimizer.states: fp8": [with_states("AdamW", betas=[0.99, 0.9])],
    "torch_autocast.enabled: true": [{"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}],
    "hybrid_engine.enabled: true": [{"hybrid_engine": {"enabled": True}}],
    "compile.deepcompile: true": [{"compile": {"deepcompile": True}}],
    "tensor_parallel.autotp_size with zero_optimization.stage: 3": [
        {"zero_optimization": {"stage": 3}, "tensor_parallel": {"autotp_size": 2}}
    ],
    "expert_parallel.enabled: true": [{"expert_parallel": {"enabled": True}}],
}


def test_every_row_has_a_configuration_that_triggers_it() -> None:
    assert sorted(TRIGGERS) == sorted(row.key for row in REFUSALS)


@pytest.mark.parametrize(
    ("key", "change"), [(key, change) for key, changes in TRIGGERS.items() for change in changes], ids=str
)
def test_a_refused_configuration_names_its_key_alone(key: str, change: dict[str, Any]) -> None:
    row = next(row for row in REFUSALS if row.key == key)
    with pytest.raises(UnsupportedError) as caught:
        refuse_config(merged(change))
    (reason,) = str(caught.value).splitlines()[1:]
    assert reason.startswith(f"  {row.key}: ")


AUTO = {
    "fp16": {"enabled": "auto", "loss_scale": 0},
    "train_batch_size": "auto",
    "gradient_clipping": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
    "data_types": {"grad_accum_dtype": "auto"},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "auto", "super_offload": "auto"},
        "zero_hpz_partition_size": "auto",
        "mics_shard_size": "auto",
        "zenflow": "auto",
        "reduce_bucket_size": "auto",
        "zero_quantized_weights": "auto",
    },
    "hybrid_engine": {"enabled": "auto"},
    "tensor_parallel": {"autotp_size": "auto"},
}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"bf16": None, "bfloat16": {"enabled": True}},
        {"zero_optimization": True},
        zero(stage=1),
        zero(offload_optimizer={"device": "none"}, offload_param={"device": "none"}),
        zero(stage=3, zero_hpz_partition_size=1, mics_shard_size=-1, zero_quantized_weights="false"),
        {"fp16": {"enabled": False}, "hybrid_engine": {"enabled": False}, "torch_autocast": {"enabled": False}},
        {"fp16": None, "compile": {}, "tensor_parallel": {"autotp_size": 1}, "zero_optimization": {"stage": 3}},
        {"tensor_parallel": {"autotp_size": 2}, "zero_optimization": {"stage": 2}},
        {"zero_optimization": {"stage": 2}, "data_types": {"grad_accum_dtype": "fp32"}},
        AUTO,
        reducing({}),
        reducing(zero(reduce_scatter=True, contiguous_gradients="auto", use_multi_rank_bucket_allreduce="true")),
        reducing(zero(stage=3, contiguous_gradients=False, use_multi_rank_bucket_allreduce=False)),
        reducing({"communication_data_type": None, "gradient_predivide_factor": 1.0, "optimizer": {"type": "AdamW"}}),
        zero(reduce_scatter=False, contiguous_gradients=False, use_multi_rank_bucket_allreduce=False),
        {"communication_data_type": "fp32", "gradient_predivide_factor": 2.0, "optimizer": {"type": "Muon"}},
        with_states("adamw", amsgrad="auto"),
        {"fp8": {"optimizer": {"states": "fp8"}}},
    ],
    ids=str,
)
def test_off_values_old_spellings_and_auto_are_not_refused(change: dict[str, Any]) -> None:
    refuse_config(merged(change))


@pytest.mark.parametrize("value", [True, 1, "1", {"stage": 1}, {"stage": "1"}])
def test_stage_is_read_as_deepspeed_reads_it(value: Any) -> None:
    stage = value if isinstance(value, (bool, dict)) else {"stage": value}
    assert zero_stage({"zero_optimization": stage}) == 1


class Pipeline(PipelineModule):  # type: ignore[misc]
    def __init__(self) -> None:
        nn.Module.__init__(self)


def with_experts() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    refuse_model(model, LinearConfig())
    model[1].weight.allreduce = False  # type: ignore[assignment]
    return model


@pytest.mark.parametrize(
    ("build", "config", "said"),
    [
        (with_experts, {}, r"expert-parallel.*got 1\.weight"),
        (lambda: DualPipeVModule.__new__(DualPipeVModule), {}, "DualPipeVModule"),
        # A stage does not know a layer by its place from the last.
        (Pipeline, {"filter_fqns": ("lm_head", "23.-1", "layers.-1.mlp")}, r"got '23\.-1', 'layers\.-1\.mlp'"),
    ],
)
def test_a_model_that_cannot_be_in_fp8_is_refused(build: Any, config: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedError, match=said):
        refuse_model(build(), LinearConfig(**config))
    refuse_model(Pipeline(), LinearConfig(filter_fqns=("lm_head", "23.mlp")))


def stored_in_fp8(change: str) -> nn.Module:
    """A linear of an FP8 folder by rows, changed in one point."""
    linear: Any = nn.Linear(4, 6)
    kind = torch.float8_e5m2 if change == "dtype" else torch.float8_e4m3fn
    linear.weight = nn.Parameter(torch.ones(6, 4).to(kind), requires_grad=False)
    scale = {"none": None, "one": torch.ones(()), "columns": torch.ones(1, 4)}.get(change, torch.full((6, 1), 0.5))
    if scale is not None:
        scale.view(-1)[-1] = {"nan": torch.nan, "negative": -1.0, "huge": 2.0**101, "other": 0.75}.get(change, 0.5)
        linear.weight_scale = nn.Parameter(scale)
    if change == "zero_point":
        linear.weight_zero_point = nn.Parameter(torch.zeros(6, 1))
    if change == "class":
        linear.__class__ = type("Other", (nn.Linear,), {})
    if change == "trains":
        linear.weight.requires_grad_()
    if change == "init":
        linear.weight.ds_id = 0
    return nn.Sequential(linear)


@pytest.mark.parametrize("change", ["dtype", "none", "one", "columns", "zero_point", "class", "init"])
def test_fp8_weights_whose_scales_are_not_known_are_refused_by_name(change: str) -> None:
    said = "sharded before the engine has it" if change == "init" else "128 x 128 elements"
    with pytest.raises(UnsupportedError, match=rf"{said}.*got 0\.weight of a (Linear|Other).*dequantize=True"):
        refuse_stored(stored_in_fp8(change), {}, is_split=False)


def test_a_linear_of_an_fp8_folder_is_not_refused() -> None:
    refuse_stored(nn.Linear(4, 4), {}, is_split=True)
    for change in ("", "trains"):
        refuse_stored(stored_in_fp8(change), {}, is_split=True)
    refuse_stored(stored_in_fp8("other"), {}, is_split=True)  # frozen, it has no master


def test_scales_that_split_masters_cannot_hold_or_no_weight_can_have_are_refused() -> None:
    model = stored_in_fp8("other").requires_grad_()
    refuse_stored(model, {}, is_split=False)
    with pytest.raises(UnsupportedError, match=r'no powers of two.*0\.weight.*"states": "fp32"'):
        refuse_stored(model, {}, is_split=True)
    for change in ("nan", "negative", "huge"):
        with pytest.raises(ConfigError, match=r"scales of 0 or from .* for 0\.weight"):
            refuse_stored(stored_in_fp8(change), {}, is_split=False)


def test_a_model_of_an_fp8_folder_is_not_sharded_by_autotp() -> None:
    with pytest.raises(UnsupportedError, match="AutoTP"):
        refuse_stored(stored_in_fp8(""), {"tensor_parallel": {"autotp_size": 2}}, is_split=False)


def test_a_pipeline_that_autotp_splits_is_refused() -> None:
    from fp8_ds.engine.engine import Fp8PipelineEngine

    engine = Fp8PipelineEngine.__new__(Fp8PipelineEngine)
    vars(engine).update(autotp_size=lambda: 2, zero_optimization_stage=lambda: 1)
    with pytest.raises(UnsupportedError, match="PipelineModule that AutoTP splits"):
        engine._configure_distributed_model(PipelineModule.__new__(PipelineModule))


@pytest.mark.parametrize(
    ("recipe", "capability", "cuda", "row"),
    [
        ("tensorwise", (8, 6), (13, 0), 0),
        ("rowwise", (8, 0), (12, 8), 0),
        ("blockwise", (10, 0), (13, 0), 1),
        ("blockwise", (8, 9), (12, 9), 1),
        ("blockwise", (9, 0), (12, 8), 2),
    ],
)
def test_a_gpu_that_cannot_run_the_recipe_is_refused(
    recipe: str, capability: tuple[int, int], cuda: tuple[int, int], row: int
) -> None:
    with pytest.raises(UnsupportedError) as caught:
        refuse_device(recipe, "torch", capability, cuda)
    assert str(caught.value).startswith("fp8.linear.recipe: ") and DEVICE_REFUSALS[row].reason in str(caught.value)
    for backend, other in (("reference", (capability, cuda)), ("torch", ((9, 0), (12, 9))), ("torch", (None, None))):
        refuse_device(recipe, backend, *other)


def markdown_tables() -> list[str]:
    """The rows as docs/refusals.md shows them; what release is refused with, only the page says in rows."""
    keys = [(f"`{row.key}`", row.reason, row.remedy) for row in REFUSALS]
    others = {"Model": MODEL_REFUSALS, "GPU": DEVICE_REFUSALS}
    tables = {"Key": keys} | {name: [(r.what, r.reason, r.remedy) for r in rows] for name, rows in others.items()}
    return [
        "\n".join([f"| {name} | Why | Instead |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)])
        for name, rows in tables.items()
    ]


def test_the_page_shows_exactly_the_rows() -> None:
    """`python tests/unit/engine/test_compat.py` prints them."""
    page = (Path(__file__).parents[3] / "docs/refusals.md").read_text()
    shown = [block for block in page.strip().split("\n\n") if block.startswith("|")]
    assert [table for table in shown if not table.startswith("| With release |")] == markdown_tables()


@pytest.mark.parametrize("sink", ["", "file/health.jsonl", "file/a/health.jsonl", "/proc/fp8_ds/health.jsonl"])
def test_a_sink_that_cannot_be_written_is_refused_by_the_rank_that_writes(tmp_path: Path, sink: str) -> None:
    (tmp_path / "file").touch()
    path = str(tmp_path / sink)
    for sinks in ([path], ["deepspeed", path]):
        with pytest.raises(ConfigError, match=f'fp8.monitor.sink: .* got "{path}" '):
            refuse_unread_reports(sinks, WITH_CSV, 0)
    refuse_unread_reports([path], WITH_CSV, 1)  # its host may have no such folder, and it writes nothing there
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_sink_that_can_be_written_is_left_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "old.jsonl").write_text("a line\n")
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.chdir(tmp_path)
    refuse_unread_reports(["old.jsonl", "new.jsonl", "a/b/new.jsonl", "pipe", "/dev/null", "deepspeed"], WITH_CSV, 0)
    assert (tmp_path / "old.jsonl").read_text() == "a line\n"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["old.jsonl", "pipe"]
    with pytest.raises(ConfigError, match='got "deepspeed" and none of these'):
        refuse_unread_reports(["new.jsonl", "deepspeed"], GOOD, 0)


if __name__ == "__main__":
    print("\n\n".join(markdown_tables()))
