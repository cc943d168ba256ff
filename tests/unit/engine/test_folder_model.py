"""Models as transformers loads FP8 folders become plain ones, and pass DeepSpeed's casts as bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fp8_folders import RAGGED, as_on_a_gpu, codes_and_scales, load, values, write
from torch import nn

from fp8_ds.engine.compat.model import refuse_stored
from fp8_ds.engine.folder_model import as_bytes, drop_scales, make_plain, take_over
from fp8_ds.errors import UnsupportedError

transformers = pytest.importorskip("transformers")


@pytest.fixture(params=["blocks", "rows"])
def folder(request: Any, tmp_path: Path) -> str:
    write(str(tmp_path), request.param, RAGGED)
    return str(tmp_path)


def linears(model: nn.Module, folder: str) -> dict[str, Any]:
    return {name: model.get_submodule(name.removesuffix(".weight")) for name in codes_and_scales(folder)}


def test_linears_become_plain_and_keep_their_parameters(folder: str) -> None:
    model = load(folder)
    assert model.is_quantized
    before = dict(model.named_parameters())
    trainable = {name for name, p in before.items() if p.requires_grad}
    for _ in range(2):
        make_plain(model)
        after = dict(model.named_parameters())
        assert list(after) == list(before) and all(after[name] is before[name] for name in before)
        assert {name for name, p in after.items() if p.requires_grad} == {n for n in trainable if "scale" not in n}
        for module in linears(model, folder).values():
            assert type(module) is nn.Linear
            assert {name for name in vars(module) if not name.startswith("_")} == {
                *("training", "in_features", "out_features"),
            }
        assert not model.is_quantized and not model._forward_pre_hooks and not hasattr(model, "hf_quantizer")
        assert "quantization_config" not in model.config.to_dict()


def test_a_model_of_another_kind_stays_as_it_is() -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4))
    model.hf_quantizer = of_another = object()
    make_plain(model)
    assert model.hf_quantizer is of_another and not hasattr(model, "is_quantized")
    with as_bytes(model):
        assert model[0].weight.dtype == torch.float32
    assert take_over(model, {"0.weight"}, torch.bfloat16) == {}


def test_bytes_and_scales_pass_casts_of_the_model(folder: str) -> None:
    model = load(folder)
    make_plain(model)
    with as_bytes(model):
        model.bfloat16()
    stored = take_over(model, {"model.layers.0.mlp.up_proj.weight"}, torch.bfloat16)
    for name, module in linears(model, folder).items():
        assert torch.equal(stored[id(module.weight)].scale_inv, codes_and_scales(folder)[name][1])
        assert torch.equal(module.weight, values(folder)[name].bfloat16()) and module.weight.requires_grad
        assert list(module._parameters) == ["weight", "bias"]


def test_frozen_weights_of_fp8_layers_keep_their_bytes(folder: str) -> None:
    model = load(folder).requires_grad_(False)
    make_plain(model)
    name = "model.layers.0.mlp.up_proj.weight"
    take_over(model, {name}, torch.bfloat16)
    for other, module in linears(model, folder).items():
        assert module.weight.dtype == (torch.uint8 if other == name else torch.bfloat16)
    assert torch.equal(linears(model, folder)[name].weight, codes_and_scales(folder)[name][0])


def test_scales_leave_an_optimizer_and_groups_without_weights_go(folder: str) -> None:
    model = load(folder)
    scales = [p for name, p in model.named_parameters() if "scale" in name]
    others = [p for name, p in model.named_parameters() if "scale" not in name]
    optimizer = torch.optim.AdamW([{"params": scales[1:]}, {"params": [scales[0], *others]}])
    make_plain(model)
    drop_scales(optimizer, take_over(model, (), torch.bfloat16).values())
    assert len(optimizer.param_groups) == 1
    assert list(map(id, optimizer.param_groups[0]["params"])) == list(map(id, others))


def test_one_scale_for_a_tensor_is_refused(tmp_path: Path) -> None:
    write(str(tmp_path), "blocks", RAGGED)
    config = json.loads((tmp_path / "config.json").read_text())
    model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**config | {"dtype": "bfloat16"}))
    from transformers.integrations.finegrained_fp8 import FP8Linear

    with as_on_a_gpu():
        model.model.layers[0].mlp.up_proj = FP8Linear(128, 300)
    with pytest.raises(UnsupportedError, match=r"got model\.layers\.0\.mlp\.up_proj\.weight of a FP8Linear"):
        refuse_stored(model, {}, is_split=False)
