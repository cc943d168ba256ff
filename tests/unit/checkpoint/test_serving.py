"""What of a checkpoint's own state becomes an FP8 folder: layers, forms, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp8_ds.checkpoint.saved_names import SavedNames
from fp8_ds.checkpoint.serving import export_of
from fp8_ds.config import Fp8Config
from fp8_ds.errors import CheckpointError, UnsupportedError
from fp8_ds.nn.plan.plan import LayerPlan, Plan

LINEARS = {
    **{f"layers.0.attn.{part}_proj": (256, 128) for part in "qkvo"},
    "layers.0.mlp.gate_proj": (384, 128),
    "layers.0.mlp.up_proj": (384, 128),
    "lm_head": (128, 128),
}


def state_of(precision: dict[str, Any] | None = None, experts: int = 0, **block: Any) -> dict[str, Any]:
    """As `save_state` makes it, of linears that are all in FP8."""
    rows = [LayerPlan(name, *shape, True, "eligible") for name, shape in LINEARS.items()]
    if experts:
        rows.append(LayerPlan("layers.0.mlp.experts.gate_up_proj", 384, 128, False, "experts", experts))
    config = Fp8Config.from_block({"enabled": True, "preset": None, **block}).to_state()
    return {"config": config, "plan": Plan(tuple(rows)).to_state(), "scale_inv": {}, "precision": precision}


SHAPES = {f"{name}.weight": shape for name, shape in LINEARS.items()}


def test_a_head_stays_bf16_whatever_training_did_and_is_named() -> None:
    export = export_of(state_of(), SHAPES, None)
    assert "lm_head.weight" not in export.layers and export.others == ("lm_head",)
    assert export.quantization_config()["ignore"] == ["lm_head"] and export.form == "compressed-tensors"


@pytest.mark.parametrize(
    ("precision", "kept"),
    [
        ({"plain": ["layers.0.attn.o_proj"], "overrides": {}}, {"layers.0.attn.o_proj"}),
        ({"overrides": {"layers.0.mlp.up_proj": "bf16"}}, {"layers.0.mlp.up_proj", "layers.0.mlp.gate_proj"}),
        ({"overrides": {"layers.0.attn.o_proj": "fp8"}, "plain": ["layers.0.attn.o_proj"]}, set()),
        ({"overrides": {}, "stays": {"layers.0.attn.o_proj": (1, 9, False)}}, {"layers.0.attn.o_proj"}),
        ({"overrides": {}, "in_bf16": list(LINEARS)}, set()),  # the bf16 steps at the end
    ],
)
def test_layers_that_are_in_bf16_for_what_they_are_stay_so(precision: dict[str, Any], kept: set[str]) -> None:
    assert set(export_of(state_of(precision), SHAPES, None).others) == kept | {"lm_head"}


@pytest.mark.parametrize(
    ("state", "shapes", "said"),
    [
        (state_of(experts=4), SHAPES, r"--model: .*experts\.gate_up_proj"),
        (state_of(), SHAPES | {"layers.0.mlp.experts.w": (4, 8, 8)}, r"--model: .*experts\.w"),
        (state_of(), SHAPES | {"layers.0.mlp.up_proj.weight": (192, 128)}, r"a part .*up_proj: \[192, 128\]"),
        (state_of(), {name: shape[::-1] for name, shape in SHAPES.items()}, "Conv1D alone .*k_proj"),
        (state_of(), {name: SHAPES[name] for name in list(SHAPES)[1:]}, "frozen weights .*q_proj"),
        (state_of({"overrides": dict.fromkeys(LINEARS, "bf16")}), SHAPES, "expected a linear in FP8"),
    ],
)
def test_what_is_not_written_yet_is_refused(state: dict[str, Any], shapes: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedError, match=said):
        export_of(state, shapes, None)


def test_a_conv1d_stays_bf16_with_square_weights_that_could_be_one_and_is_named() -> None:
    state, shapes = state_of(), SHAPES | {"layers.0.mlp.up_proj.weight": (128, 384)}
    rows = [*state["plan"]["layers"], ["layers.0.square", 128, 128, True, "eligible"]]
    state["plan"]["layers"] = rows
    shapes |= {"layers.0.square.weight": (128, 128)}
    export = export_of(state, shapes, None)
    left = {"layers.0.mlp.up_proj", "layers.0.mlp.gate_proj", "layers.0.square", "lm_head"}
    assert set(export.others) == set(export.quantization_config()["ignore"]) == left
    assert dict(export.tensors([("layers.0.mlp.up_proj.weight", [torch.ones(128, 384)])])).keys() == {
        "layers.0.mlp.up_proj.weight"
    }
    shapes["layers.0.mlp.up_proj.weight"] = (384, 128)
    assert set(export_of(state, shapes, None).others) == {"lm_head"}


def mixtral(**in_bf16: bool) -> Any:
    """Export of a Mixtral of one layer that training has in FP8, but for what is named."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("transformers.conversion_mapping")
    sizes = {"vocab_size": 96, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2}
    with torch.device("meta"):
        config = transformers.MixtralConfig(**sizes, num_hidden_layers=1, num_key_value_heads=2, num_local_experts=2)
        names = SavedNames(transformers.MixtralForCausalLM(config))
    experts = "model.layers.0.mlp.experts"
    rows = [
        LayerPlan("model.layers.0.self_attn.o_proj", 128, 128, True, "eligible"),
        LayerPlan(f"{experts}.gate_up_proj", 512, 128, not in_bf16.get("gate_up"), "", 2),
        LayerPlan(f"{experts}.down_proj", 128, 256, not in_bf16.get("down"), "", 2),
    ]
    state = state_of(linear={"weight_scales": "power_of_two"}) | {"plan": Plan(tuple(rows)).to_state()}
    return export_of(state, names.shapes, None, names)


@pytest.mark.parametrize("left", [[], ["gate_up"], ["down"], ["gate_up", "down"]], ids=str)
def test_experts_of_a_layer_are_in_fp8_all_or_none_and_the_router_never(left: list[str]) -> None:
    experts = "model.layers.0.block_sparse_moe.experts"
    matrices = {f"{experts}.{number}.{part}" for number in range(2) for part in ("w1", "w2", "w3")}
    export = mixtral(**dict.fromkeys(left, True))
    listed = set(export.quantization_config()["modules_to_not_convert"])
    assert listed == {"model.layers.0.block_sparse_moe.gate"} | (matrices if left else set())
    stacks = {f"model.layers.0.mlp.experts.{part}_proj" for part in ("gate_up", "down")}
    assert set(export.others) == (stacks if left else set())
    in_fp8 = {name.removesuffix(".weight") for name in export.matrices}
    assert in_fp8 == {"model.layers.0.self_attn.o_proj"} | (set() if left else matrices)
    master = torch.ones(2, 512, 128)
    found = dict(export.tensors([("model.layers.0.mlp.experts.gate_up_proj", [master])]))
    assert len(found) == (4 if left else 8) and all(name.startswith(experts) for name in found)


def test_masters_that_are_not_finite_are_refused_and_zeros_have_a_scale() -> None:
    export = export_of(state_of(linear={"recipe": "rowwise"}), SHAPES, None)
    master = torch.ones(256, 128)
    master[3] = 0
    _, (name, scale) = export.tensors([("layers.0.attn.q_proj.weight", [master])])
    assert name == "layers.0.attn.q_proj.weight_scale" and bool((scale > 0).all())
    with pytest.raises(CheckpointError, match=r"q_proj.*expected finite"):
        list(export.tensors([("layers.0.attn.q_proj.weight", [master.log()])]))
