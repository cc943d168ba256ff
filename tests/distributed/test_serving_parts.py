"""FP8 folders of tensor-parallel runs are those of the whole model, with the bytes that the ranks compute with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tensor_parallel as tpar
import torch
import torch.distributed as dist
import training
from safetensors.torch import load_file
from support.collectives import count_collectives
from support.models import MIXTRAL_PLAN, Llama
from support.ranks import on_ranks
from test_autotp import lacks, reset
from torch import Tensor

from fp8_ds.checkpoint import iter_fp8_tensors
from fp8_ds.errors import UnsupportedError
from fp8_ds.nn.linear.payload import per_element
from fp8_ds.tools.convert import convert
from fp8_ds.tp import LLAMA, parallelize

pytestmark = pytest.mark.distributed
pytest.importorskip("transformers.integrations.moe")

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
SPLIT = {"optimizer": {"states": "fp8", "master": "e4m11"}}
BY_COLUMNS = ("o_proj", "down_proj")


def engine_of(how: str, stage: int, fp8: dict[str, Any], tp_size: int) -> Any:
    """An engine over a Llama with biases, the ranks' parts in other ranges; `how`: "parallelize", "autotp", "whole"."""
    net = tpar.llama(bias=True, num_layers=2, **SIZES).model
    with torch.no_grad():
        for weight in (p for p in net.parameters() if p.dim() == 2):
            weight[: len(weight) // 2] *= 1 / 4
            weight[:, : weight.shape[1] // 2] *= 1 / 8
    accumulation = tpar.NUM_BATCHES * tp_size // dist.get_world_size()
    config, mpu = training.ds_config(stage, fp8, gradient_accumulation_steps=accumulation), None
    if how == "parallelize":
        mpu = tpar.groups(tp_size)
        parallelize(net, LLAMA, mpu.tp_group)
    elif how == "autotp":
        config["tensor_parallel"] = {"autotp_size": tp_size}
    return training.start(net, config, mpu=mpu)


def saved(folder: str, how: str, stage: int, fp8: dict[str, Any], form: str | None, steps: int) -> dict[str, Any]:
    """Save FP8 folders of an engine before its first step and after `steps`, and a checkpoint beside the latter.

    Returns:
        This rank's bytes and scales, and its masters, by name, at the end; bytes that gathers of parts have delivered.
    """
    tp_size = 1 if how == "whole" else 2
    engine = engine_of(how, stage, fp8, tp_size)
    engine.save_fp8_pretrained(f"{folder}/start", form)
    if steps:
        tpar.train(engine, tp_size, steps, is_huggingface=True)
    engine.save_checkpoint(f"{folder}/ckpt")
    engine.save_fp8_pretrained(f"{folder}/live", form)
    there = load_file(f"{folder}/live/model.safetensors")
    tensors = iter_fp8_tensors(engine, form)
    with count_collectives() as count:
        found = dict(tensors)
    assert found.keys() == there.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor.cpu().view(torch.uint8), there[name].view(torch.uint8)), name
    state, masters = training.fp8_state(engine), training.full_masters(engine)
    training.destroy(engine)
    reset()
    gathered = sum(num for name, num, dtype in count.records if name == "all_gather" and dtype == torch.uint8)
    return {"fp8": state, "masters": masters, "gathered": gathered}


def joined(name: str, parts: list[Tensor], whole: torch.Size) -> Tensor:
    """Join what two ranks have, by what a Llama's layers are."""
    if parts[0].shape == whole:
        return parts[0]
    return torch.cat(parts, 1 if name.split(".")[-2] in BY_COLUMNS else 0)


def layer_of(name: str) -> str:
    return name.split(".")[-2]


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def same_bf16(first: Tensor, second: Tensor, is_split: bool) -> bool:
    """Masters that lie between two values round to the even one in a conversion, of split ones."""
    if not is_split:
        return torch.equal(bits(first), bits(second))
    apart = (first.view(torch.int16).int() - second.view(torch.int16).int()).abs()
    return int(apart.max()) <= 1 and float((apart != 0).float().mean()) < 1 / 16


def config_in(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text())


ROWS, BLOCKS = "compressed-tensors", "fp8-block"
BLOCKWISE = {"linear": {"recipe": "blockwise", "backend": "reference"}}
HELD = {
    ROWS: {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"},
    BLOCKS: {"q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},  # k and v are cut at 64
}
CASES = [
    (2, "parallelize", 3, {"linear": {"recipe": "tensorwise"}}, None, ROWS),
    (2, "autotp", 2, SPLIT, None, BLOCKS),
    (2, "parallelize", 2, BLOCKWISE, None, BLOCKS),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in [
            (4, "parallelize", 3, SPLIT, ROWS, ROWS),
            (4, "parallelize", 1, {"linear": {"recipe": "rowwise"}}, None, ROWS),
            (4, "parallelize", 3, BLOCKWISE, None, BLOCKS),
            (4, "autotp", 2, {"linear": {"recipe": "delayed", "weight_scales": "power_of_two"}}, None, BLOCKS),
            (4, "autotp", 1, {"linear": {"recipe": "rowwise_with_gw_hp"}}, None, ROWS),
            (2, "autotp", 2, BLOCKWISE, None, BLOCKS),
        ]
    ),
]


@pytest.mark.parametrize(("world_size", "how", "stage", "fp8", "form", "made"), CASES, ids=str)
def test_a_folder_of_two_ranks_has_their_bytes_and_is_that_of_their_checkpoint(
    ranks: Any,
    tmp_path: Path,
    world_size: int,
    how: str,
    stage: int,
    fp8: dict[str, Any],
    form: str | None,
    made: str,
) -> None:
    if how == "autotp" and lacks("collect_autotp_universal_checkpoint_info"):
        pytest.skip("this DeepSpeed does not say how AutoTP's parts are joined")
    is_split = "optimizer" in fp8
    own = ranks(world_size).run(saved, str(tmp_path), how, stage, fp8, form, 2)[:2]
    note = convert(tmp_path / "ckpt", tmp_path / "out", "fp8", model=tmp_path / "live", form=form)["note"]
    assert note.startswith(f"{made}: 14 linears, 10 of them with the bytes that training computes with, 4, of whose")
    tensors, converted = (load_file(tmp_path / name / "model.safetensors") for name in ("live", "out"))
    assert tensors.keys() == converted.keys() and config_in(tmp_path / "live") == config_in(tmp_path / "out")
    sent = 0
    for name, tensor in tensors.items():
        is_bf16 = tensor.dtype == torch.bfloat16
        assert tensor.dtype == converted[name].dtype
        assert same_bf16(tensor, converted[name], is_split and is_bf16), name
        if is_bf16 and own[0]["masters"][name].shape != tensor.shape:
            sent += 2 * tensor.numel()
    for name, (part, grid) in own[0]["fp8"].items():
        codes, layer = tensors[name], layer_of(name)
        scale = tensors[f"{name.removesuffix('weight')}{'weight_scale' if made == ROWS else 'weight_scale_inv'}"]
        values = codes.float() * per_element(scale, codes.shape)
        if layer in HELD[made]:
            parts = [rank["fp8"][name] for rank in own]
            theirs = [one.view(codes.dtype).float() * per_element(inv, one.shape) for one, inv in parts]
            assert torch.equal(joined(name, [one for one, _ in parts], codes.shape), bits(codes)), name
            assert torch.equal(joined(name, theirs, codes.shape), values), name
            sent += 2 * (part.numel() + 4 * grid.numel())
        else:
            master = joined(name, [rank["masters"][name] for rank in own], codes.shape)
            assert torch.equal(scale.log2(), scale.log2().round())
            assert (values - master).abs().max() <= master.abs().max() / 16, name
            sent += 4 * codes.numel()
    by_zero = sum(part.numel() for part, _ in own[0]["fp8"].values()) if (world_size, stage) == (4, 3) else 0
    assert sent <= own[0]["gathered"] <= sent + by_zero  # FP8 bytes, like all else that is counted
    if world_size == 2:
        whole_at_start(ranks, tmp_path, stage, fp8, made)


def whole_at_start(ranks: Any, tmp_path: Path, stage: int, fp8: dict[str, Any], form: str) -> None:
    """Compare the folder of before the first step with that of one rank, which has the same weights then."""
    ranks(1).run(saved, str(tmp_path / "whole"), "whole", stage, fp8, form, 0)
    tensors, others = (load_file(tmp_path / name / "start" / "model.safetensors") for name in ("", "whole"))
    assert tensors.keys() == others.keys() and config_in(tmp_path / "start") == config_in(tmp_path / "whole" / "start")
    assert sum(tensor.dtype == torch.bfloat16 for tensor in tensors.values()) == 3 + 2 * 9
    for name, tensor in tensors.items():
        assert (tensor.dtype, tensor.shape) == (others[name].dtype, others[name].shape), name
        if tensor.dtype == torch.bfloat16:
            assert torch.equal(bits(tensor), bits(others[name])), name


@pytest.mark.parametrize(
    ("how", "stage"),
    [
        ("parallelize", 2),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [("autotp", 1), ("parallelize", 3)]),
    ],
)
def test_safetensors_of_a_checkpoint_of_parts_are_bf16_of_the_joined_masters(
    ranks: Any, tmp_path: Path, how: str, stage: int
) -> None:
    own = ranks(2).run(saved, str(tmp_path), how, stage, {}, None, 1)
    convert(tmp_path / "ckpt", tmp_path / "bf16", "safetensors")
    convert(tmp_path / "ckpt", tmp_path / "universal", "universal")
    convert(tmp_path / "universal", tmp_path / "again", "safetensors")
    tensors, again = (load_file(tmp_path / name / "model.safetensors") for name in ("bf16", "again"))
    assert tensors.keys() == again.keys() == own[0]["masters"].keys()
    for name, tensor in tensors.items():
        master = joined(name, [rank["masters"][name] for rank in own], tensor.shape)
        assert torch.equal(tensor, master.bfloat16()) and torch.equal(tensor, again[name]), name


def spec(name: str, kind: str, *shape: Any) -> dict[str, Any]:
    fused = {"shape": list(shape), "partition_dim": 0} if shape else {}
    return {"patterns": [rf".*\\.{name}\\.weight$"], "partition_type": kind, **fused}


FUSED = [
    spec("qkv_proj", "column", [256, 128, 128], -1),
    spec("gate_up_proj", "column", 2, -1),
    spec("(o_proj|down_proj)", "row"),
]
FAMILIES: dict[str, dict[str, Any]] = {
    "Phi3": {"pad_token_id": 0},
    "Qwen3": {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 64},  # 4 and 2 heads, 2 and 1
    "Qwen2": {"tie_word_embeddings": True},
    "Mixtral": {"num_local_experts": 4},
}


def save_family(folder: str, family: str, tp_size: int) -> None:
    torch.manual_seed(0)
    net, mpu = Llama(family, **{**SIZES, **FAMILIES[family]}).model, None
    config = training.ds_config(2, {"linear": {"filter_fqns": []}})
    if tp_size > 1 and family == "Mixtral":
        mpu = tpar.groups(tp_size)
        parallelize(net, MIXTRAL_PLAN, mpu.tp_group)
    elif tp_size > 1:
        config["tensor_parallel"] = {"autotp_size": tp_size}
        if family == "Phi3":
            config["tensor_parallel"]["partition_config"] = {"use_default_specs": False, "layer_specs": FUSED}
    engine = training.start(net, config, mpu=mpu)
    engine.save_checkpoint(f"{folder}/ckpt")
    engine.save_fp8_pretrained(f"{folder}/live")
    training.destroy(engine)
    reset()


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_fused_uneven_tied_and_whole_layers_are_those_of_the_whole_model(
    ranks: Any, tmp_path: Path, family: str
) -> None:
    for tp_size in (2, 1):
        folder = tmp_path / str(tp_size)
        ranks(tp_size).run(save_family, str(folder), family, tp_size)
        convert(folder / "ckpt", folder / "bf16", "safetensors")
        convert(folder / "ckpt", folder / "out", "fp8", model=folder / "live")
    parts, live, out = (load_file(tmp_path / f"2/{name}/model.safetensors") for name in ("bf16", "live", "out"))
    whole, whole_live = (load_file(tmp_path / f"1/{name}/model.safetensors") for name in ("bf16", "live"))
    assert parts.keys() == whole.keys() and live.keys() == whole_live.keys() == out.keys()
    assert all(torch.equal(tensor, whole[name]) for name, tensor in parts.items())
    for name, tensor in live.items():
        assert torch.equal(bits(tensor), bits(out[name])), name
        if tensor.dtype == torch.bfloat16:
            assert torch.equal(tensor, whole_live[name]), name
        elif tensor.dtype == torch.float8_e4m3fn:
            scale = live[f"{name}_scale"]
            error = tensor.float() * scale - whole_live[name].float() * whole_live[f"{name}_scale"]
            assert error.abs().max() <= scale.max() * 448 / 8, name


@on_ranks(2)
def test_parts_that_nothing_says_how_to_join_are_refused_on_all_ranks(folder: str) -> None:
    net = tpar.llama(num_layers=1).model
    net.model.embed_tokens.weight.requires_grad_(False)
    mpu = tpar.groups(2)
    parallelize(net, LLAMA, mpu.tp_group)
    engine = training.start(net, training.ds_config(2, {}), mpu=mpu)
    engine.save_checkpoint(f"{folder}/ckpt")
    with pytest.raises(UnsupportedError, match=r"frozen ones \(model\.embed_tokens"):
        iter_fp8_tensors(engine)
    with pytest.raises(UnsupportedError, match=r"frozen ones \(model\.embed_tokens"):
        convert(Path(folder, "ckpt"), Path(folder, f"bf16-{dist.get_rank()}"), "safetensors")
    with pytest.raises(UnsupportedError, match=r"convert --to safetensors"):
        engine.save_16bit_model(folder)
    net.model.embed_tokens.weight.requires_grad_()
    if dist.get_rank():
        engine.fp8.plan = type(engine.fp8.plan)(engine.fp8.plan.layers[1:])
    with pytest.raises(UnsupportedError, match="q_proj, which is so on some"):
        engine.save_fp8_pretrained(f"{folder}/out")
    training.destroy(engine)
    reset()
