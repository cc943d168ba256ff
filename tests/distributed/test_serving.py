"""FP8 folders for servers hold the bytes that training computes with, and other loaders read the same values."""

from __future__ import annotations

import importlib.util
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import training
from safetensors.torch import load_file
from support.models import Llama
from support.ranks import on_ranks

from fp8_ds.checkpoint.verify import makes_plain_models
from fp8_ds.errors import CheckpointError, ConfigError, UnsupportedError
from fp8_ds.nn.linear.payload import per_element
from fp8_ds.tools.convert import convert, kind_of

pytestmark = pytest.mark.distributed

SIZES = {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2, "max_position_embeddings": 64}
SPLIT = {"optimizer": {"states": "fp8", "master": "e4m19"}}
E4M11 = {"optimizer": {"states": "fp8", "master": "e4m11"}}


def save(folder: str, stage: int, fp8: dict[str, Any]) -> dict[str, Any]:
    """Train a Llama and save it; return its FP8 bytes and scales, and bf16 of its masters, by names of weights."""
    torch.manual_seed(0)
    model = Llama(**SIZES).model
    engine = training.start(model, training.ds_config(stage, fp8))
    for step in range(2):
        tokens = training.micro_batches(step, torch.distributed.get_world_size())[torch.distributed.get_rank()]
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
    state = training.fp8_state(engine)
    masters = {name: master.bfloat16() for name, master in training.full_masters(engine).items()}
    if torch.distributed.get_rank() == 0:
        model.config.save_pretrained(f"{folder}/model")
    engine.save_checkpoint(f"{folder}/ckpt")
    training.destroy(engine)
    return {"fp8": state, "masters": masters}


def save_other(folder: str, kind: str) -> None:
    fp8 = {"frozen": {"linear": {"frozen": "fp8"}}, "conv1d": {}, "stock": None}[kind]
    model = {"frozen": {"frozen": "blocks.1.up"}, "conv1d": {"conv1d": True}, "stock": {}}[kind]
    engine = training.build(training.ds_config(2, fp8), model)
    training.train(engine, 1)
    engine.save_checkpoint(f"{folder}/ckpt")
    training.destroy(engine)
    Path(folder, "config.json").write_text("{}")


def scale_of(form: str) -> str:
    return "weight_scale_inv" if form == "fp8-block" else "weight_scale"


CASES = [
    ({"linear": {"recipe": "tensorwise"}}, 2, "compressed-tensors"),
    pytest.param({"linear": {"recipe": "rowwise"}}, 3, "compressed-tensors", marks=pytest.mark.slow),
    ({"linear": {"recipe": "blockwise"}}, 1, "fp8-block"),
    pytest.param(
        {"linear": {"recipe": "tensorwise", "weight_scales": "power_of_two"}}, 2, "fp8-block", marks=pytest.mark.slow
    ),
    (SPLIT, 3, "fp8-block"),
    pytest.param(E4M11 | {"linear": {"recipe": "delayed"}}, 2, "fp8-block", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("fp8", "stage", "form"), CASES, ids=str)
def test_the_folder_has_the_bytes_of_training_by_default(
    ranks: Any, tmp_path: Path, fp8: dict[str, Any], stage: int, form: str
) -> None:
    trained = ranks(2).run(save, str(tmp_path), stage, fp8)[0]
    can_verify = importlib.util.find_spec("compressed_tensors" if form == "compressed-tensors" else "accelerate")
    can_verify = can_verify if makes_plain_models(form) else None
    found = convert(tmp_path / "ckpt", tmp_path / "out", "fp8", model=tmp_path / "model", verify=can_verify is not None)
    assert can_verify is None or "verified" in found["note"]
    assert found["note"].startswith(f"{form}: 14 linears with the bytes that training computes with; in bf16: lm_head")
    tensors, (rows, cols) = load_file(tmp_path / "out" / "model.safetensors"), (128, 128)
    for name, (codes, scale_inv) in trained["fp8"].items():
        assert torch.equal(tensors[name].view(torch.uint8), codes), name
        scale = tensors[f"{name.removesuffix('weight')}{scale_of(form)}"]
        assert scale.dtype == torch.float32
        assert scale.shape == (
            (codes.shape[0] // rows, codes.shape[1] // cols) if form == "fp8-block" else (len(codes), 1)
        )
        values = codes.view(torch.float8_e4m3fn).float()
        assert torch.equal(values * per_element(scale, codes.shape), values * per_element(scale_inv, codes.shape)), name
    others = trained["masters"].keys() - trained["fp8"].keys()
    assert others and all(torch.equal(tensors[name], trained["masters"][name]) for name in others)
    assert len(tensors) == len(trained["masters"]) + len(trained["fp8"])
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == "bfloat16" and kind_of(tmp_path / "out") == "fp8"
    convert(tmp_path / "out", tmp_path / "bf16", "safetensors")
    read = load_file(tmp_path / "bf16" / "model.safetensors")
    for name, (codes, scale_inv) in trained["fp8"].items():
        values = codes.view(torch.float8_e4m3fn).float() * per_element(scale_inv, codes.shape)
        assert torch.equal(read[name], values.bfloat16()), name


def test_transformers_and_our_converter_read_the_same_weights(ranks: Any, tmp_path: Path) -> None:
    """Blocks that are not training's are quantised by powers of two, which servers do not round again."""
    transformers = pytest.importorskip("transformers")
    trained = ranks(2).run(save, str(tmp_path), 2, {"linear": {"recipe": "tensorwise"}})[0]
    found = convert(tmp_path / "ckpt", tmp_path / "out", "fp8", model=tmp_path / "model", form="fp8-block")
    assert "by powers of two, other bytes than training's, which --format compressed-tensors keeps" in found["note"]
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    scales = [tensor for name, tensor in tensors.items() if name.endswith("_scale_inv")]
    assert len(scales) == 14 and all(torch.equal(scale.log2(), scale.log2().round()) for scale in scales)
    convert(tmp_path / "out", tmp_path / "bf16", "safetensors")
    ours = load_file(tmp_path / "bf16" / "model.safetensors")
    read = transformers.FineGrainedFP8Config(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", quantization_config=read, dtype=torch.bfloat16
    )
    theirs = model.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    for name in trained["fp8"]:
        master = trained["masters"][name].float()
        assert (ours[name].float() - master).abs().max() <= master.abs().max() / 16, name


def test_compressed_tensors_own_loader_reads_the_values_of_training(ranks: Any, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    trained = ranks(1).run(save, str(tmp_path), 2, {"linear": {"recipe": "rowwise"}})[0]
    convert(tmp_path / "ckpt", tmp_path / "out", "fp8", model=tmp_path / "model")
    load = transformers.AutoModelForCausalLM.from_pretrained
    served, about = load(tmp_path / "out", dtype=torch.float32, output_loading_info=True)  # de-quantises when called
    assert not any(about[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert not hasattr(served.lm_head, "quantization_scheme")
    served(torch.arange(8, dtype=torch.int64)[None])
    for name, (codes, scale_inv) in trained["fp8"].items():
        values = codes.view(torch.float8_e4m3fn).float() * per_element(scale_inv, codes.shape)
        assert torch.equal(served.state_dict()[name], values), name
    others = trained["masters"].keys() - trained["fp8"].keys()
    assert others and all(torch.equal(served.state_dict()[name], trained["masters"][name].float()) for name in others)


@pytest.mark.parametrize("kind", ["frozen", pytest.param("conv1d", marks=pytest.mark.slow), "stock"])
def test_what_is_not_exported_yet_is_refused_by_name(ranks: Any, tmp_path: Path, kind: str) -> None:
    said = {
        "frozen": r"frozen weights .*blocks\.1\.up",
        "conv1d": r"Conv1D alone .*blocks\.0\.down",
        "stock": "got one without",
    }[kind]
    ranks(1).run(save_other, str(tmp_path), kind)
    with pytest.raises(UnsupportedError, match=said):
        convert(tmp_path / "ckpt", tmp_path / "out", "fp8", model=tmp_path)
    assert not (tmp_path / "out").exists()


@on_ranks(1)
def test_layers_that_training_held_in_bf16_stay_so_with_what_servers_join() -> None:
    with tempfile.TemporaryDirectory() as folder:
        schedule = {"layers": {"layers.1.self_attn.k_proj": "bf16", "layers.0.mlp.down_proj": "bf16"}}
        save(folder, 2, {"linear": {"recipe": "blockwise"}, "schedule": schedule})
        found = convert(Path(folder, "ckpt"), Path(folder, "out"), "fp8", model=Path(folder, "model"))
        assert found["note"].startswith("fp8-block: 10 linears")
        given = json.loads(Path(folder, "out", "config.json").read_text())["quantization_config"]
        kept = {f"model.layers.1.self_attn.{part}_proj" for part in "qkv"} | {"model.layers.0.mlp.down_proj", "lm_head"}
        assert set(given["modules_to_not_convert"]) == kept
        (Path(folder, "bad")).mkdir()
        Path(folder, "bad", "config.json").write_text("{")
        with pytest.raises(CheckpointError, match=r"bad/config\.json: expected JSON"):
            convert(Path(folder, "ckpt"), Path(folder, "other"), "fp8", model=Path(folder, "bad"))
        with pytest.raises(ConfigError, match="--model"):
            convert(Path(folder, "ckpt"), Path(folder, "other"), "fp8")
        with pytest.raises(UnsupportedError, match="save_checkpoint"):
            convert(Path(folder, "out"), Path(folder, "other"), "fp8", model=Path(folder, "model"))
        with pytest.raises(ConfigError, match="--verify: expected it with fp8"):
            convert(Path(folder, "ckpt"), Path(folder, "other"), "safetensors", verify=True)
        with pytest.raises(ConfigError, match="form: expected one of"):
            convert(Path(folder, "ckpt"), Path(folder, "other"), "fp8", model=Path(folder, "model"), form="nvfp4")
        assert not Path(folder, "other").exists()
