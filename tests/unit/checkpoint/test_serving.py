"""What of a checkpoint's own state becomes an FP8 folder: layers, forms, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

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
    assert dict(export.tensors([("layers.0.mlp.up_proj.weight", torch.ones(128, 384))])).keys() == {
        "layers.0.mlp.up_proj.weight"
    }
    shapes["layers.0.mlp.up_proj.weight"] = (384, 128)
    assert set(export_of(state, shapes, None).others) == {"lm_head"}


def test_masters_that_are_not_finite_are_refused_and_zeros_have_a_scale() -> None:
    export = export_of(state_of(linear={"recipe": "rowwise"}), SHAPES, None)
    master = torch.ones(256, 128)
    master[3] = 0
    _, (name, scale) = export.tensors([("layers.0.attn.q_proj.weight", master)])
    assert name == "layers.0.attn.q_proj.weight_scale" and bool((scale > 0).all())
    with pytest.raises(CheckpointError, match=r"finite masters, got others in .*q_proj"):
        list(export.tensors([("layers.0.attn.q_proj.weight", master.log())]))
