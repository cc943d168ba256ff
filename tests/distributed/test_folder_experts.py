"""Mixtures of experts from FP8 folders: their own experts come back, and masters are codes times scales."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import test_folder_model as base
import torch
import training
from support import fp8_folders
from support.fp8_folders import EXPERTS, load, stacked, tensors_of, values

from fp8_ds.errors import UnsupportedError

transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.integrations.finegrained_fp8")
pytestmark = pytest.mark.distributed

STACKS = ("gate_up_proj", "down_proj")
SPLIT = {"optimizer": {"states": "fp8", "master": "e4m19"}}


def write(folder: Any, family: str, power_of_two: bool = False, **sizes: int) -> str:
    fp8_folders.write(str(folder), "blocks", EXPERTS[family] | sizes, family, power_of_two)
    return str(folder)


@pytest.mark.parametrize(
    ("stage", "num_ranks", "family", "fp8"),
    [
        (2, 2, "Mixtral", {}),
        (3, 2, "Qwen3Moe", {}),
        (1, 1, "Qwen3Moe", {"linear": {"recipe": "blockwise"}}),
        (3, 2, "Mixtral", SPLIT),
        pytest.param(1, 2, "Mixtral", {"linear": {"recipe": "delayed"}}, marks=pytest.mark.slow),
        pytest.param(2, 1, "Qwen3Moe", {}, marks=pytest.mark.slow),
        pytest.param(3, 1, "Mixtral", {}, marks=pytest.mark.slow),
        pytest.param(3, 2, "Qwen3Moe", {"linear": {"recipe": "rowwise"}}, marks=pytest.mark.slow),
        pytest.param(2, 2, "Qwen3Moe", SPLIT, marks=pytest.mark.slow),
        pytest.param(1, 4, "Qwen3Moe", {}, marks=pytest.mark.slow),
        pytest.param(3, 2, "DeepseekV3", {}, marks=pytest.mark.slow),
    ],
)
def test_masters_are_codes_times_scales_and_train(
    ranks: Any, tmp_path: Path, stage: int, num_ranks: int, family: str, fp8: dict[str, Any]
) -> None:
    """Also where the recipe leaves experts in bf16; a resume goes on with the masters that were saved."""
    folder = write(tmp_path, family, power_of_two="optimizer" in fp8)
    is_rounded = [name for name, value in values(folder).items() if not torch.equal(value, value.bfloat16().float())]
    assert any("experts" in name for name in is_rounded) == ("optimizer" not in fp8)
    in_bf16 = STACKS if fp8.get("linear", {}).get("recipe", "tensorwise") not in ("tensorwise", "delayed") else ()
    ranks(num_ranks).run(base.train_all, folder, stage, fp8, in_bf16)


def is_refused(folder: str) -> None:
    with pytest.raises(UnsupportedError, match=r'no powers of two.*experts\.gate_up_proj.*"states": "fp32"'):
        base.start(folder, 2, SPLIT, load_as=load_with_powers_in_linears)


def load_with_powers_in_linears(folder: str) -> Any:
    model = load(folder)
    for name, p in model.named_parameters():
        if name.endswith("_scale_inv") and "experts" not in name:
            p.data.fill_(2.0**-10)
    return model


def test_split_masters_of_experts_that_would_be_rounded_are_refused(ranks: Any, tmp_path: Path) -> None:
    ranks(1).run(is_refused, write(tmp_path, "Qwen3Moe"))


@pytest.mark.parametrize("family", ["Mixtral", "Qwen3Moe"])
def test_the_first_loss_is_that_of_the_model_transformers_dequantizes(ranks: Any, tmp_path: Path, family: str) -> None:
    for name, power_of_two, bound in (("two", True, 0.0), ("any", False, 0.01)):
        folder = write(tmp_path / name, family, power_of_two)
        own, theirs = ranks(1).run(base.losses_of_both, folder, {})[0]
        assert abs(own - theirs) <= bound, (name, own, theirs)


def save_both(folder: str, stage: int) -> dict[str, Any]:
    engine = base.start(folder, stage, {})
    base.steps(engine, 1)
    state = engine._consolidated_16bit_state_dict() if stage == 3 else engine.module.state_dict()
    if torch.distributed.get_rank() == 0:
        engine.module.save_pretrained(f"{folder}/bf16", state_dict=state)
    engine.save_fp8_pretrained(f"{folder}/fp8", "fp8-block")
    masters = training.full_masters(engine)
    training.destroy(engine)
    return masters


@pytest.mark.parametrize(
    ("family", "stage"), [("Mixtral", 2), ("Qwen3Moe", 3), pytest.param("Mixtral", 3, marks=pytest.mark.slow)]
)
def test_saved_folders_have_the_names_of_the_one_that_was_read(
    ranks: Any, tmp_path: Path, family: str, stage: int
) -> None:
    folder = write(tmp_path, family)
    masters = ranks(2).run(save_both, folder, stage)[0]
    read, bf16, fp8 = tensors_of(folder), tensors_of(f"{folder}/bf16"), tensors_of(f"{folder}/fp8")
    assert fp8.keys() == read.keys() and bf16.keys() == {name for name in read if "_scale" not in name}
    assert all(fp8[name].dtype == read[name].dtype and fp8[name].shape == read[name].shape for name in read)
    for name, value in stacked(bf16).items():
        # Stage 2 shows a reader the FP8 values of a weight, stage 3's state dict is bf16 of masters.
        error = value.float() - masters[name].bfloat16().float()
        assert error.norm() <= (0.0 if stage == 3 else 0.05 * masters[name].norm()), name


def there_and_back(folder: str, fp8: dict[str, Any]) -> None:
    """Out of a training, in again without one, and out."""
    engine = base.start(folder, 2, fp8)
    base.steps(engine, 1)
    engine.save_fp8_pretrained(f"{folder}/first", "fp8-block")
    training.destroy(engine)
    for stage, name, before in ((2, "second", "first"), (3, "third", "second")):
        engine = base.start(f"{folder}/{before}", stage, fp8)
        engine.save_fp8_pretrained(f"{folder}/{name}", "fp8-block")
        training.destroy(engine)


@pytest.mark.parametrize("scales", ["default", "power_of_two"])
def test_what_goes_out_in_and_out_again_has_the_same_bits(ranks: Any, tmp_path: Path, scales: str) -> None:
    """With scales of blocks, of masters, and with one for all experts, of training."""
    is_shared = scales != "default"
    folder = write(tmp_path, "Qwen3Moe", moe_intermediate_size=128 if is_shared else 256)
    ranks(2).run(there_and_back, folder, {"linear": {"weight_scales": scales}} if is_shared else {})
    first, second, third = (tensors_of(f"{folder}/{name}") for name in ("first", "second", "third"))
    of_experts = {float(x) for n, t in first.items() if ".experts." in n and "_scale" in n for x in t.view(-1)}
    assert (len(of_experts) > 2) == (scales == "default")
    assert first.keys() == second.keys() == third.keys()
    for name, tensor in first.items():
        assert torch.equal(second[name].view(torch.uint8), tensor.view(torch.uint8)), name
        assert torch.equal(third[name].view(torch.uint8), tensor.view(torch.uint8)), name


def write_compressed(folder: Path) -> None:
    fp8_folders.write(str(folder), "rows", EXPERTS["Qwen3Moe"], "Qwen3Moe")
    common = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": common | {"strategy": "channel", "dynamic": False},
        "input_activations": common | {"strategy": "token", "dynamic": True},
    }
    quantized = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "config_groups": {"group_0": group},
    }
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantized}))


def train_compressed(folder: str) -> None:
    expected, engine = values(folder), base.start(folder, 2, {}, load_as=lambda folder: load(folder, torch.float32))
    masters = training.full_masters(engine)
    for name, value in expected.items():
        assert torch.equal(masters[name], value.bfloat16().float() if ".experts." in name else value), name
    base.steps(engine, 1)
    training.destroy(engine)


def test_experts_of_compressed_tensors_start_from_bf16_and_linears_from_codes_times_scales(
    ranks: Any, tmp_path: Path
) -> None:
    """By its own package: transformers de-quantises these experts as it loads them, in the model's dtype."""
    pytest.importorskip("compressed_tensors")
    write_compressed(tmp_path)
    ranks(1).run(train_compressed, str(tmp_path))
