"""What transformers loads of an FP8 folder is compared with codes times scales, and a difference has a name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.inputs import per_tile

from fp8_ds.checkpoint.fp8_folder import with_quantization
from fp8_ds.checkpoint.saved_names import SavedNames
from fp8_ds.checkpoint.serving import Export, export_of
from fp8_ds.checkpoint.verify import makes_plain_models, refuse_to_verify, verify
from fp8_ds.config import Fp8Config
from fp8_ds.errors import CheckpointError, ConfigError, Fp8DsError, UnsupportedError
from fp8_ds.nn.plan.plan import LayerPlan, Plan

transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.conversion_mapping")
PACKAGES = {"fp8-block": "accelerate", "compressed-tensors": "compressed_tensors"}
DOWN = "model.layers.0.mlp.down_proj"


def export(folder: Path, form: str, intermediate: int = 256) -> Export:
    """Of a Llama of one layer, whose linears are all in FP8 but the head; its configuration is in `folder`."""
    sizes = {"vocab_size": 96, "hidden_size": 256, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**sizes, intermediate_size=intermediate, max_position_embeddings=64)
    config.save_pretrained(folder)
    names = SavedNames.of_folder(folder)
    linears = {name: shape for name, shape in names.shapes.items() if name.endswith("_proj.weight")}
    rows = (LayerPlan(name.removesuffix(".weight"), *shape, True, "eligible") for name, shape in linears.items())
    fp8 = Fp8Config.from_block({"enabled": True, "preset": None}).to_state()
    state = {"config": fp8, "plan": Plan(tuple(rows)).to_state(), "scale_inv": {}, "precision": None}
    return export_of(state, names.shapes, form, names)


def written(folder: Path, form: str) -> Path:
    made, generator = export(folder, form), torch.Generator().manual_seed(0)
    masters = {
        name: per_tile(*shape, generator) if len(shape) == 2 else torch.ones(shape)
        for name, shape in made.names.shapes.items()
    }
    save_file(
        dict(made.tensors((name, [master]) for name, master in masters.items())),
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    text = with_quantization(folder / "config.json", made.quantization_config())
    assert text is not None
    (folder / "config.json").write_text(text)
    return folder


@pytest.mark.parametrize("form", PACKAGES)
def test_a_folder_that_transformers_reads_as_we_do_is_verified_and_a_scale_that_it_does_not_is_named(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(PACKAGES[form])
    if not makes_plain_models(form):
        pytest.skip(f"transformers {transformers.__version__} keeps scales of {form}")
    folder = written(tmp_path, form)
    assert "all of 12 tensors" in verify(folder)
    from fp8_ds.checkpoint import fp8_folder

    value = fp8_folder._value

    def other(files: Any, name: str, *more: Any) -> torch.Tensor:
        read = value(files, name, *more)
        if name == f"{DOWN}.weight":
            read[-1, -1] *= 1 + 2**-7
        return read

    monkeypatch.setattr(fp8_folder, "_value", other)
    with pytest.raises(CheckpointError, match=rf"other values in {DOWN}\.weight"):
        verify(folder)


@pytest.mark.parametrize("change", ["more", "less"])
def test_tensors_that_transformers_does_not_find_or_does_not_know_are_named(change: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    folder = written(tmp_path, "fp8-block")
    tensors = load_file(folder / "model.safetensors")
    tensors = {"model.norm.bias": torch.ones(256), **tensors} if change == "more" else tensors
    if change == "less":
        del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.norm\."):
        verify(folder)


def test_a_folder_that_transformers_cannot_load_is_an_error_of_ours(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    folder = written(tmp_path, "fp8-block")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_size": 128}))
    with pytest.raises(CheckpointError, match="--verify"):
        verify(folder)


@pytest.mark.parametrize(
    ("form", "intermediate", "package", "error", "said"),
    [
        ("fp8-block", 256, "", None, ""),
        ("fp8-block", 64, "", None, ""),  # one block, of which the loader finds the size
        ("fp8-block", 192, "", UnsupportedError, r"gate_proj\.weight \[192, 256\]"),
        ("compressed-tensors", 192, "", None, ""),
        ("fp8-block", 256, "accelerate", ConfigError, "expected accelerate"),
        ("compressed-tensors", 256, "compressed_tensors", ConfigError, "expected compressed-tensors"),
    ],
)
def test_what_cannot_be_verified_is_refused_before_anything_is_written(
    form: str,
    intermediate: int,
    package: str,
    error: type[Fp8DsError] | None,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from fp8_ds.checkpoint import verify as module

    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None if name == package else name)
    made = export(tmp_path, form, intermediate)
    if error is None and not makes_plain_models(form):
        error, said = ConfigError, "plain model"
    if error is None:
        refuse_to_verify(made)
    else:
        with pytest.raises(error, match=said):
            refuse_to_verify(made)
