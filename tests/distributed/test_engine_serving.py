"""FP8 folders and tensors of an engine are those that its checkpoint is converted to; a gather is a byte a weight."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import safetensors.torch
import torch
import training
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param
from safetensors.torch import load_file
from support import fp8_folders
from support.models import Llama
from support.ranks import on_ranks

from fp8_ds.checkpoint import iter_fp8_tensors, model_folder
from fp8_ds.errors import CheckpointError, ConfigError, UnsupportedError
from fp8_ds.tools.convert import convert

pytestmark = pytest.mark.distributed

SIZES = {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2, "max_position_embeddings": 64}
SPLIT = {"optimizer": {"states": "fp8", "master": "e4m19"}}
BF16_LAYER = {"schedule": {"layers": {"layers.0.mlp.down_proj": "bf16"}}}


def trained(stage: int, fp8: dict[str, Any], **sizes: Any) -> Any:
    torch.manual_seed(0)
    engine = training.start(Llama(**{**SIZES, **sizes}).model, training.ds_config(stage, fp8))
    for step in range(2):
        tokens = training.micro_batches(step, torch.distributed.get_world_size())[torch.distributed.get_rank()]
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
    return engine


def export(folder: str, stage: int, fp8: dict[str, Any], form: str | None, family: str = "Llama") -> int:
    """Save a checkpoint and an FP8 folder of an engine, and compare with what it yields; return the bytes gathered."""
    engine = trained(stage, fp8, family=family)
    engine.save_checkpoint(f"{folder}/ckpt")
    engine.save_fp8_pretrained(f"{folder}/live", form)
    saved = load_file(f"{folder}/live/model.safetensors")
    before = engine.fp8.counter.fp8
    num_weights = sum(p._fp8.scale_inv.numel() > 0 for p in engine.fp8.weights.values())
    names = []
    for name, tensor in iter_fp8_tensors(engine, form):
        names.append(name)
        assert stage != 3 or sum(p._fp8.data is not None for p in engine.fp8.weights.values()) <= 1
        assert torch.equal(tensor.cpu().view(torch.uint8), saved[name].view(torch.uint8)), name
    assert sorted(names) == sorted(saved) and num_weights == 14
    gathered = engine.fp8.counter.fp8 - before
    loss = engine(input_ids=(tokens := training.micro_batches(9, 2)[0]), labels=tokens).loss
    engine.backward(loss)
    engine.step()  # nothing is left gathered
    training.destroy(engine)
    return gathered


CASES = [
    (3, {"linear": {"recipe": "delayed"}}, None),
    (2, {"linear": {"recipe": "tensorwise"}}, "fp8-block"),
    (3, {**SPLIT, **BF16_LAYER}, None),
    pytest.param(1, {"linear": {"recipe": "rowwise"}, **BF16_LAYER}, None, marks=pytest.mark.slow),
    pytest.param(2, SPLIT, None, marks=pytest.mark.slow),
    pytest.param(3, {"linear": {"recipe": "blockwise"}}, "compressed-tensors", marks=pytest.mark.slow),
    pytest.param(3, {"schedule": {"bf16_last_fraction": 0.9, "total_steps": 2}}, None, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("stage", "fp8", "form"), CASES, ids=str)
def test_a_folder_of_the_engine_is_that_of_its_checkpoint(
    ranks: Any, tmp_path: Path, stage: int, fp8: dict[str, Any], form: str | None
) -> None:
    gathered = ranks(2).run(export, str(tmp_path), stage, fp8, form)
    convert(tmp_path / "ckpt", tmp_path / "out", "fp8", model=tmp_path / "live", form=form)
    live, converted = (load_file(tmp_path / name / "model.safetensors") for name in ("live", "out"))
    assert live.keys() == converted.keys()
    is_split = fp8.get("optimizer", {}).get("states") == "fp8"
    for name, tensor in live.items():
        assert tensor.dtype == converted[name].dtype, name
        if tensor.dtype == torch.bfloat16 and is_split:  # masters that lie between two values round to the even one
            codes = [one.view(torch.int16).int() for one in (tensor, converted[name])]
            assert (codes[0] - codes[1]).abs().max() <= 1 and (codes[0] != codes[1]).float().mean() < 1 / 32, name
            continue
        assert torch.equal(tensor.view(torch.uint8), converted[name].view(torch.uint8)), name
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("live", "out")]
    assert configs[0] == configs[1]
    in_fp8 = sum(tensor.numel() for tensor in live.values() if tensor.dtype == torch.float8_e4m3fn)
    is_own = form is None and "schedule" not in fp8
    assert set(gathered) == ({in_fp8} if stage == 3 and is_own else {gathered[0]})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "stage", "fp8"),
    [
        (3, 3, {"optimizer": {"states": "fp8", "master": "e4m11"}}),
        (3, 2, {"linear": {"recipe": "rowwise_with_gw_hp"}}),
        (3, 1, {"linear": {"recipe": "blockwise"}}),
        (1, 3, {"linear": {"recipe": "tensorwise"}}),
        (1, 1, {"optimizer": {"states": "fp8", "master": "e4m11"}}),
    ],
    ids=str,
)
def test_qwen3_has_the_same_fp8_bytes_on_any_number_of_ranks(
    ranks: Any, tmp_path: Path, num_ranks: int, stage: int, fp8: dict[str, Any]
) -> None:
    ranks(num_ranks).run(export, str(tmp_path), stage, fp8, None, "Qwen3")
    convert(tmp_path / "ckpt", tmp_path / "out", "fp8", model=tmp_path / "live")
    live, converted = (load_file(tmp_path / name / "model.safetensors") for name in ("live", "out"))
    in_fp8 = [name for name, tensor in live.items() if tensor.dtype == torch.float8_e4m3fn]
    assert live.keys() == converted.keys() and len(in_fp8) == 14
    for name in (name for name in live if name in in_fp8 or "_scale" in name):
        assert torch.equal(live[name].view(torch.uint8), converted[name].view(torch.uint8)), name


@on_ranks(2)
def test_a_save_that_fails_on_the_rank_that_writes_fails_on_all_and_leaves_nothing(folder: str) -> None:
    tmp_path, engine = Path(folder), trained(3, {})
    (tmp_path / "full").mkdir(exist_ok=True)
    (tmp_path / "full" / "file").write_text("a user's")
    with pytest.raises(ConfigError, match="empty folder"):
        engine.save_fp8_pretrained(tmp_path / "full")
    (tmp_path / "file").write_text("a user's")
    with pytest.raises(CheckpointError, match=r"rank 0.*choose another folder"):
        engine.save_fp8_pretrained(tmp_path / "file" / "below")
    with pytest.raises(ConfigError, match="empty folder"):
        engine.save_fp8_pretrained(tmp_path / "file")
    with pytest.raises(CheckpointError, match=r"File name too long|rank 0"):
        engine.save_fp8_pretrained(tmp_path / ("x" * 300))
    engine.module.generation_config.update(do_sample=False, temperature=0.5)
    with pytest.raises(CheckpointError, match=r"GenerationConfig.*Change that"):
        engine.save_fp8_pretrained(tmp_path / "out")
    engine.module.generation_config.update(temperature=1.0)
    calls: list[Any] = []

    def fill_the_disk(*args: Any, **kwargs: Any) -> None:
        calls.append(args)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        save_file(*args, **kwargs)

    save_file = safetensors.torch.save_file
    with (
        patch.object(model_folder, "_SHARD_BYTES", 100_000),
        patch.object(safetensors.torch, "save_file", fill_the_disk),
        pytest.raises(CheckpointError, match="No space left"),
    ):
        engine.save_fp8_pretrained(tmp_path / "out")
    assert len(calls) == (3 if torch.distributed.get_rank() == 0 else 0)
    torch.distributed.barrier()  # rank 0 tidies up after the others have heard
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "full"]
    assert all(p._fp8.data is None for p in engine.fp8.weights.values()) and torch.is_grad_enabled()
    engine.save_fp8_pretrained(tmp_path / "out")
    with pytest.raises(ConfigError, match="form"):
        iter_fp8_tensors(engine, "fp4")
    training.destroy(engine)


@on_ranks(2)
def test_weights_that_are_not_finite_leave_on_no_rank(folder: str) -> None:
    engine = trained(3, {})
    weight = engine.module.model.layers[1].mlp.up_proj.weight
    safe_set_full_fp32_param(weight, safe_get_full_fp32_param(weight).fill_(float("nan")))
    tokens = training.micro_batches(0, 2)[0]
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
    with pytest.raises(CheckpointError, match=r"up_proj\.weight: expected finite"):
        engine.save_fp8_pretrained(f"{folder}/out")
    with pytest.raises(CheckpointError, match=r"up_proj\.weight: expected finite"):
        list(iter_fp8_tensors(engine))
    training.destroy(engine)
    assert not any(Path(folder).iterdir())


@on_ranks(1)
def test_the_configuration_names_the_class_that_was_trained_and_heads_stay_bf16(folder: str) -> None:
    import transformers

    class Own(transformers.LlamaForSequenceClassification):  # type: ignore[misc]
        pass

    config = Llama(**SIZES).model.config
    config.architectures, config.pad_token_id = ["LlamaForCausalLM"], 0
    torch.manual_seed(0)
    engine = training.start(Own(config), training.ds_config(2, {"linear": {"filter_fqns": []}}))
    engine.save_fp8_pretrained(f"{folder}/out")
    written = json.loads(Path(folder, "out", "config.json").read_text())
    assert written["architectures"] == ["LlamaForSequenceClassification"]
    assert engine.module.config.architectures == ["LlamaForCausalLM"]
    assert load_file(f"{folder}/out/model.safetensors")["score.weight"].dtype == torch.bfloat16
    training.destroy(engine)


@on_ranks(1)
def test_what_cannot_be_exported_is_refused_before_anything_is_gathered(folder: str) -> None:
    tmp_path = Path(folder)
    engine = training.build(training.ds_config(2, {}), {})
    with pytest.raises(UnsupportedError, match="transformers"):
        engine.save_fp8_pretrained(tmp_path / "out")
    training.destroy(engine)
    engine = training.build(training.ds_config(2, None), {})
    with pytest.raises(UnsupportedError, match="fp8"):
        iter_fp8_tensors(engine)
    training.destroy(engine)
    assert not (tmp_path / "out").exists()


def there_and_back(folder: str, stage: int, fp8: dict[str, Any], form: str | None) -> None:
    """Of codes the largest is 224 wherever scales are powers of two, so it fits half of each; one is minus zero."""
    torch.manual_seed(0)
    model = Llama(**SIZES).model
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "_proj" in name:
                p.clamp_(-0.05, 0.05)[:, ::128] = (225 + torch.arange(len(p))[:, None] % 7) * 2**-12
                p[1, 1] = -(2**-30)
    engine = training.start(model, training.ds_config(stage, fp8, optimizer={"params": {"lr": 1e-7}}))
    tokens = training.micro_batches(0, 2)[torch.distributed.get_rank()]
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()  # now masters are no bf16 numbers
    engine.save_fp8_pretrained(f"{folder}/out", form)
    training.destroy(engine)
    model = fp8_folders.load(f"{folder}/out", torch.float32)  # in bf16 transformers would round scales of rows
    engine = training.start(model, training.ds_config(stage, fp8))
    engine.save_fp8_pretrained(f"{folder}/again", form)
    training.destroy(engine)


@pytest.mark.parametrize(
    ("stage", "fp8", "form"),
    [
        (3, SPLIT, None),
        (1, {"linear": {"recipe": "blockwise"}}, None),
        (2, {"linear": {"recipe": "tensorwise"}}, "fp8-block"),
        pytest.param(2, {"linear": {"recipe": "rowwise"}}, None, marks=pytest.mark.slow),
        pytest.param(3, {"linear": {"recipe": "rowwise_with_gw_hp"}}, None, marks=pytest.mark.slow),
        pytest.param(3, {"linear": {"recipe": "blockwise"}}, "compressed-tensors", marks=pytest.mark.slow),
        pytest.param(3, {"linear": {"weight_scales": "power_of_two"}}, None, marks=pytest.mark.slow),
        pytest.param(2, SPLIT, "compressed-tensors", marks=pytest.mark.slow),
        pytest.param(2, {"linear": {"recipe": "tensorwise"}}, None, marks=pytest.mark.slow),
        pytest.param(3, {"linear": {"recipe": "delayed"}}, None, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_out_in_and_out_again_gives_the_same_bits(
    ranks: Any, tmp_path: Path, stage: int, fp8: dict[str, Any], form: str | None
) -> None:
    ranks(2).run(there_and_back, str(tmp_path), stage, fp8, form)
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "again"))
    assert first.keys() == second.keys() and sum("_scale" in name for name in first) == 14
    for name, tensor in first.items():
        assert torch.equal(tensor.view(torch.uint8), second[name].view(torch.uint8)), name


def in_and_out(folder: str, stage: int, fp8: dict[str, Any]) -> list[Any]:
    """A folder in, saved before the first step, and out; losses of a run that goes on and of one that resumes."""
    engine = training.start(fp8_folders.load(folder, torch.float32), training.ds_config(stage, fp8))
    before = training.fp8_state(engine)
    with GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
        pass  # nobody writes
    training.assert_fp8_equals(training.fp8_state(engine), before)
    engine.save_checkpoint(f"{folder}/ckpt")
    engine.save_fp8_pretrained(f"{folder}/live")
    losses = []
    for is_resumed in (False, True):
        if is_resumed:
            engine = training.start(fp8_folders.load(folder, torch.float32), training.ds_config(stage, fp8))
            engine.load_checkpoint(f"{folder}/ckpt")
            training.assert_fp8_equals(training.fp8_state(engine), before)
        losses.append([])
        for step in range(2):
            loss = engine(**fp8_folders.batch(step)).loss
            engine.backward(loss)
            engine.step()
            losses[-1].append(float(loss))
        training.destroy(engine)
    return losses


@pytest.mark.parametrize(
    ("stage", "kind", "fp8", "power_of_two"),
    [
        (3, "rows", {"linear": {"recipe": "rowwise"}}, False),
        (2, "blocks", {"linear": {"recipe": "blockwise"}}, True),
        pytest.param(2, "rows", {"linear": {"recipe": "rowwise"}}, False, marks=pytest.mark.slow),
        pytest.param(3, "blocks", {"linear": {"recipe": "blockwise"}}, True, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_until_the_first_step_a_folders_own_bytes_and_scales_are_computed_saved_resumed_and_converted(
    ranks: Any, tmp_path: Path, stage: int, kind: str, fp8: dict[str, Any], power_of_two: bool
) -> None:
    """Of these folders no largest code is 448: scales made of the values are others, and so are bytes."""
    fp8_folders.write(str(tmp_path), kind, fp8_folders.WHOLE, power_of_two=power_of_two)
    going_on, resumed = ranks(2).run(in_and_out, str(tmp_path), stage, fp8)[0]
    assert going_on == resumed
    convert(tmp_path / "ckpt", tmp_path / "out", "fp8", model=tmp_path / "live")
    there, live, converted = (load_file(tmp_path / name / "model.safetensors") for name in ("", "live", "out"))
    assert there.keys() == live.keys() == converted.keys()
    for name, tensor in there.items():
        for other in (live, converted):
            assert torch.equal(tensor.view(torch.uint8), other[name].view(torch.uint8)), name
