"""FP8 folders of mixtures: each expert has its own tensors, by the names of the model's own files."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import training
from safetensors.torch import load_file
from support.models import Llama
from torch import Tensor

from fp8_ds.checkpoint.verify import makes_plain_models
from fp8_ds.nn.linear.payload import per_element
from fp8_ds.tools.convert import convert

pytestmark = pytest.mark.distributed
transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.integrations.moe")

NUM_EXPERTS, HIDDEN, INTER = 3, 128, 256
SIZES = {"hidden_size": HIDDEN, "num_hidden_layers": 1, "num_experts_per_tok": 2, "num_key_value_heads": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": NUM_EXPERTS, "intermediate_size": INTER},
    "Qwen3Moe": {"num_experts": NUM_EXPERTS, "moe_intermediate_size": INTER, "head_dim": 32},
}
BLOCKS = {"linear": {"weight_scales": "power_of_two"}}
STACKS = ("model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj")


def save(folder: str, family: str, stage: int, fp8: dict[str, Any]) -> dict[str, Any]:
    """Train a mixture and save it; return its FP8 bytes and scales, and its masters, by names of weights.

    Experts of a layer and their blocks differ in range, by powers of two and not.
    """
    torch.manual_seed(0)
    model = Llama(family, **SIZES, **FAMILIES[family]).model
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(STACKS):
                p.mul_(torch.tensor([1.0, 0.3, 8.0])[:, None, None])[:, :128, :128].mul_(0.1)
    engine = training.start(model, training.ds_config(stage, fp8))
    tokens = training.micro_batches(0, torch.distributed.get_world_size())[torch.distributed.get_rank()]
    engine.backward(engine(input_ids=tokens, labels=tokens, use_cache=False).loss)
    engine.step()
    found = {"fp8": training.fp8_state(engine), "masters": training.full_masters(engine)}
    if torch.distributed.get_rank() == 0:
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(f"{folder}/model")
    engine.save_checkpoint(f"{folder}/ckpt")
    engine.save_fp8_pretrained(f"{folder}/live")
    training.destroy(engine)
    return found


def expert_names(family: str, name: str, expert: int) -> list[str]:
    """Names in the model's files of the matrices of an expert that the stack `name` holds, in its order."""
    if family == "Mixtral":
        prefix, parts = f"model.layers.0.block_sparse_moe.experts.{expert}", (("w1", "w3"), ("w2",))
    else:
        prefix, parts = f"model.layers.0.mlp.experts.{expert}", (("gate_proj", "up_proj"), ("down_proj",))
    return [f"{prefix}.{part}.weight" for part in parts[name.endswith("down_proj")]]


def per_expert(family: str, stacks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Matrices of experts by their names in files, of stacks by their names in the model."""
    found = {}
    for name in STACKS:
        for expert, matrices in enumerate(stacks[name]):
            names = expert_names(family, name, expert)
            found |= dict(zip(names, matrices.chunk(len(names)), strict=True))
    return found


CASES = [
    ("Mixtral", BLOCKS, 3, "fp8-block"),
    ("Qwen3Moe", {}, 2, "compressed-tensors"),
    pytest.param(
        "Mixtral", {"optimizer": {"states": "fp8", "master": "e4m11"}}, 2, "fp8-block", marks=pytest.mark.slow
    ),
    pytest.param("Qwen3Moe", {"linear": {"recipe": "delayed"}}, 1, "compressed-tensors", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("family", "fp8", "stage", "form"), CASES, ids=str)
def test_each_expert_has_the_bytes_of_training_and_loads_as_trained(
    ranks: Any, tmp_path: Path, family: str, fp8: dict[str, Any], stage: int, form: str
) -> None:
    trained = ranks(2).run(save, str(tmp_path), family, stage, fp8)[0]
    can_verify = importlib.util.find_spec("compressed_tensors" if form == "compressed-tensors" else "accelerate")
    can_verify = can_verify if makes_plain_models(form) else None
    found = convert(tmp_path / "ckpt", tmp_path / "out", "fp8", model=tmp_path / "model", verify=can_verify is not None)
    assert can_verify is None or "verified" in found["note"]
    assert found["note"].startswith(
        f"{form}: 6 linears and weights of experts with the bytes that training computes with"
    )
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    live = load_file(tmp_path / "live" / "model.safetensors")
    is_split = "optimizer" in fp8  # then other values than FP8 weights' are those that training computes with
    assert live.keys() == tensors.keys()
    for name, tensor in live.items():
        in_fp8 = tensor.dtype == torch.float8_e4m3fn or "_scale" in name
        assert torch.equal(tensor.view(torch.uint8), tensors[name].view(torch.uint8)) or (is_split and not in_fp8), name
    end = "weight_scale_inv" if form == "fp8-block" else "weight_scale"
    codes = per_expert(family, {name: trained["fp8"][name][0] for name in STACKS})
    scales = {
        part: trained["fp8"][name][1] for name in STACKS for e in range(3) for part in expert_names(family, name, e)
    }
    for name, expected in codes.items():
        scale = tensors[f"{name.removesuffix('weight')}{end}"]
        assert torch.equal(tensors[name].view(torch.uint8), expected), name
        grid = (len(expected) // 128, expected.shape[1] // 128) if form == "fp8-block" else (len(expected), 1)
        assert torch.equal(scale, scales[name].expand(grid)), name
    layer = "model.layers.0.block_sparse_moe" if family == "Mixtral" else "model.layers.0.mlp"
    assert tensors[f"{layer}.gate.weight"].dtype == torch.bfloat16
    given = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert set(given["modules_to_not_convert" if form == "fp8-block" else "ignore"]) == {"lm_head", f"{layer}.gate"}
    others = [name for name in tensors if not name.endswith(end) and ".experts." not in name]
    assert len(tensors) == 2 * len(codes) + 4 + len(others) and not any(name in tensors for name in STACKS)

    convert(tmp_path / "out", tmp_path / "bf16", "safetensors")
    names = load_file(tmp_path / "bf16" / "model.safetensors").keys()
    assert names == {name for name in tensors if not name.endswith(end)}
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "bf16", dtype=torch.bfloat16)
    convert(tmp_path / "out", tmp_path / "universal", "universal", stage=2)
    for name, (payload, scale_inv) in trained["fp8"].items():
        values = payload.view(torch.float8_e4m3fn).float() * per_element(scale_inv, payload.shape)
        assert torch.equal(model.state_dict()[name], values.bfloat16()), name
        content = torch.load(tmp_path / "universal" / "zero" / name / "fp32.pt", weights_only=True)
        assert torch.equal(content["param"], values), name
    written = {path.name for path in (tmp_path / "universal" / "zero").iterdir() if path.is_dir()}
    assert written == set(trained["masters"]), written ^ set(trained["masters"])


def test_experts_in_blocks_that_are_not_trainings_have_scales_of_their_own(ranks: Any, tmp_path: Path) -> None:
    """transformers' own loader reads what ours does."""
    trained = ranks(2).run(save, str(tmp_path), "Mixtral", 2, {})[0]
    convert(tmp_path / "ckpt", tmp_path / "out", "fp8", model=tmp_path / "model", form="fp8-block")
    convert(tmp_path / "out", tmp_path / "bf16", "safetensors")
    ours = load_file(tmp_path / "bf16" / "model.safetensors")
    masters = per_expert("Mixtral", {name: trained["masters"][name] for name in STACKS})
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    for name, master in masters.items():
        scale = tensors[f"{name}_scale_inv"]
        assert torch.equal(scale.log2(), scale.log2().round()), name
        assert name.endswith("w3.weight") or scale.unique().numel() == 2, name  # the first blocks are smaller
        assert ((ours[name].float() - master).abs() <= master.abs() / 16 + per_element(scale, master.shape) / 512).all()
    read = transformers.FineGrainedFP8Config(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", quantization_config=read, dtype=torch.bfloat16
    )
    theirs = per_expert("Mixtral", {name: model.state_dict()[name] for name in STACKS})
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("family", ["Mixtral", pytest.param("Qwen3Moe", marks=pytest.mark.slow)])
def test_experts_that_stayed_bf16_leave_as_such_by_names_that_servers_look_up(
    ranks: Any, tmp_path: Path, family: str
) -> None:
    trained = ranks(2).run(save, str(tmp_path), family, 2, {"linear": {"recipe": "rowwise"}})[0]
    found = convert(tmp_path / "ckpt", tmp_path / "out", "fp8", model=tmp_path / "model")
    assert found["note"].endswith(f"in bf16: {', '.join(STACKS)}, lm_head")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    experts = per_expert(family, {name: trained["masters"][name].bfloat16() for name in STACKS})
    assert all(torch.equal(tensors[name], expected) for name, expected in experts.items())
    given = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    layer = "model.layers.0.block_sparse_moe" if family == "Mixtral" else "model.layers.0.mlp"
    asked_for = {f"{layer}.experts.0.{part}_proj" for part in ("gate", "up", "down")}  # by vLLM, of any family
    assert set(given) == {name.removesuffix(".weight") for name in experts} | asked_for | {"lm_head", f"{layer}.gate"}
    assert len(given) == len(set(given))
