"""FP8 model folders of servers become bf16 weights or float32 masters by bytes times scales, or are refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from fp8_ds.checkpoint import model_folder
from fp8_ds.checkpoint.folders import TENSORS
from fp8_ds.cli.app import app
from fp8_ds.errors import CheckpointError, Fp8DsError, UnsupportedError
from fp8_ds.tools.convert import convert, kind_of

FP8 = torch.float8_e4m3fn
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
ROWS = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False},
            "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
        }
    },
}
SHAPE = (200, 300)


def weight_of(seed: int = 0, shape: tuple[int, int] = SHAPE) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul_(100).to(FP8)


def scales_of(*grid: int) -> Tensor:
    return torch.rand(grid, generator=torch.Generator().manual_seed(1)) / 64


NORM = torch.ones(300, dtype=torch.bfloat16)
TWO = {"a.weight": weight_of(), "a.weight_scale_inv": scales_of(2, 3), "norm.weight": NORM}
BY_ROW = {"a.weight": weight_of(), "a.weight_scale": scales_of(200, 1), "norm.weight": NORM}


def write(folder: Path, quantization: Any, **files: dict[str, Tensor]) -> Path:
    folder.mkdir()
    for name, tensors in files.items():
        save_file(tensors, folder / f"{name}.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": quantization}))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def expected(tensors: dict[str, Tensor]) -> Tensor:
    """Element by element, of 128 x 128 blocks or rows."""
    weight, scale = tensors["a.weight"].float(), next(one for name, one in tensors.items() if "scale" in name).float()
    rows, cols = torch.arange(weight.shape[0]), torch.arange(weight.shape[1])
    if scale.shape[1] == 1:
        return weight * scale[rows[:, None], 0]
    return weight * scale[rows[:, None] // 128, cols[None] // 128]


@pytest.mark.parametrize(("quantization", "tensors"), [(BLOCKS, TWO), (ROWS, BY_ROW)], ids=["blocks", "rows"])
def test_weights_are_bytes_times_scales_in_bf16_and_masters_in_float32(
    tmp_path: Path, quantization: dict[str, Any], tensors: dict[str, Tensor]
) -> None:
    """Scales lie in another file than their weights; a scale of activations is left out."""
    scales = {name: tensor for name, tensor in tensors.items() if "scale" in name} | {"a.input_scale": torch.ones(1)}
    weights = {name: tensor for name, tensor in tensors.items() if "scale" not in name}
    source = write(tmp_path / "model", quantization, one=weights, two=scales)
    assert kind_of(source) == "fp8"
    found = convert(source, tmp_path / "bf16", "safetensors")
    assert found["source"] == "fp8" and found["num_tensors"] == 2
    written = load_file(tmp_path / "bf16" / "model.safetensors")
    assert written.keys() == {"a.weight", "norm.weight"}
    assert torch.equal(written["a.weight"], expected(tensors).bfloat16())
    assert torch.equal(written["norm.weight"], NORM)
    assert json.loads((tmp_path / "bf16" / "config.json").read_text()) == {"model_type": "llama"}
    assert (tmp_path / "bf16" / "tokenizer.json").exists() and kind_of(tmp_path / "bf16") == "safetensors"
    convert(source, tmp_path / "start", "universal", stage=2)
    master = torch.load(tmp_path / "start" / "zero" / "a.weight" / TENSORS[0])["param"]
    assert master.dtype == torch.float32 and torch.equal(master, expected(tensors))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu], ids=str)
def test_scales_may_be_exponents_of_powers_of_two(tmp_path: Path, dtype: torch.dtype) -> None:
    exponents = torch.tensor([[120, 127, 130], [0, 100, 119]], dtype=torch.uint8)
    source = write(tmp_path / "model", BLOCKS, model=TWO | {"a.weight_scale_inv": exponents.view(dtype)})
    convert(source, tmp_path / "start", "universal", stage=2)
    master = torch.load(tmp_path / "start" / "zero" / "a.weight" / TENSORS[0])["param"]
    powers = torch.exp2(exponents.double() - 127).float()
    assert torch.equal(master, expected({"a.weight": TWO["a.weight"], "scale": powers}))


def test_a_group_may_be_named_by_its_preset(tmp_path: Path) -> None:
    preset = ROWS | {"config_groups": {"FP8_DYNAMIC": ["Linear"]}}
    assert kind_of(write(tmp_path / "model", preset, model=BY_ROW)) == "fp8"
    with pytest.raises(UnsupportedError, match=r"config_groups\.FP8\.weights"):
        kind_of(write(tmp_path / "other", ROWS | {"config_groups": {"FP8": ["Linear"]}}, model=BY_ROW))


def test_transformers_reads_the_same_values(tmp_path: Path) -> None:
    """It de-quantises a folder of blocks itself; its own model class has the names."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**sizes, **heads)
    source = tmp_path / "model"
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(source)
    tensors = load_file(source / "model.safetensors")
    for name in [name for name in tensors if "_proj" in name]:
        rows, cols = tensors[name].shape
        tensors[name] = weight_of(len(tensors), (rows, cols))
        tensors[f"{name}_scale_inv"] = scales_of(rows // 128, cols // 128)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    given = json.loads((source / "config.json").read_text())
    block = BLOCKS | {"modules_to_not_convert": ["lm_head"]}
    (source / "config.json").write_text(json.dumps(given | {"quantization_config": block}))
    answer = CliRunner().invoke(app, ["convert", str(source), str(tmp_path / "bf16"), "--to", "bf16", "--json"])
    assert answer.exit_code == 0, answer.output
    ours = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "bf16", dtype=torch.bfloat16)
    read = transformers.FineGrainedFP8Config(dequantize=True)
    theirs = transformers.LlamaForCausalLM.from_pretrained(source, quantization_config=read, dtype=torch.bfloat16)
    weights = theirs.state_dict()
    assert ours.state_dict().keys() == weights.keys()
    for name, weight in ours.state_dict().items():
        assert torch.equal(weight, weights[name]), name


def nan_in(scale: Tensor) -> Tensor:
    scale = scale.clone()
    scale[0, 0] = torch.nan
    return scale


def changed(tensors: dict[str, Tensor], **changes: Any) -> dict[str, Tensor]:
    """`tensors` with others in their place, None: without."""
    found = tensors | {name.replace("__", "."): value for name, value in changes.items()}
    return {name: value for name, value in found.items() if value is not None}


def group_of(**weights: Any) -> dict[str, Any]:
    given = ROWS["config_groups"]["group_0"]["weights"]
    return ROWS | {"config_groups": {"group_0": {"weights": {**given, **weights}}}}


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])


def missing_shard(folder: Path) -> None:
    names = {"a.weight": "model.safetensors", "b.weight": "gone.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


BAD: list[tuple[Any, dict[str, Tensor], Callable[[Path], None] | None, type[Exception], str]] = [
    ({"quant_method": "awq"}, TWO, None, UnsupportedError, r'config\.json: expected quant_method .*got "awq"'),
    ("fp8", TWO, None, CheckpointError, r"config\.json: expected an object in quantization_config"),
    (BLOCKS | {"fmt": "e5m2"}, TWO, None, UnsupportedError, r'fmt "e4m3".*got "e5m2"'),
    (BLOCKS | {"weight_block_size": [64, 64]}, TWO, None, UnsupportedError, r"weight_block_size .*\[64, 64\]"),
    (BLOCKS | {"weight_block_size": None}, TWO, None, UnsupportedError, "weight_block_size .*null"),
    (ROWS | {"format": "pack-quantized"}, BY_ROW, None, UnsupportedError, "format .*pack-quantized"),
    (group_of(strategy="tensor"), BY_ROW, None, UnsupportedError, r"group_0\.weights\.strategy .*tensor"),
    (group_of(num_bits=4, type="int"), BY_ROW, None, UnsupportedError, r"weights\.type"),
    (BLOCKS, changed(TWO, a__weight_scale_inv=None), None, CheckpointError, "model.safetensors: .*a.weight_scale_inv"),
    (BLOCKS, changed(TWO, a__weight=None), None, CheckpointError, "a.weight in float8_e4m3fn .*none"),
    (BLOCKS, changed(TWO, a__weight=torch.ones(SHAPE)), None, CheckpointError, "a.weight in float8.*torch.float32"),
    (BLOCKS, changed(TWO, a__weight_scale_inv=scales_of(3, 2)), None, CheckpointError, r"\[2, 3\].*got \[3, 2\]"),
    (ROWS, changed(BY_ROW, a__weight_scale=scales_of(200, 2)), None, CheckpointError, r"\[200, 1\].*got \[200, 2\]"),
    (BLOCKS, changed(TWO, a__weight_scale_inv=nan_in(scales_of(2, 3))), None, CheckpointError, "finite.*a.weight_sc"),
    (BLOCKS, changed(TWO, a__weight_scale_inv=-scales_of(2, 3)), None, CheckpointError, "not negative"),
    (BLOCKS, changed(TWO, a__weight_scale_inv=torch.ones(2, 3).int()), None, CheckpointError, "are numbers"),
    (BLOCKS, changed(TWO, a__weight=torch.ones(SHAPE).to(torch.float8_e5m2)), None, UnsupportedError, "float8_e5m2"),
    (BLOCKS, changed(TWO, b__weight=torch.ones(2).to(torch.float8_e5m2)), None, UnsupportedError, "b.weight in .*e5m2"),
    (BLOCKS, changed(TWO, b__weight=torch.ones(2).to(FP8)), None, UnsupportedError, r"\[out, in\].*b.weight \(2,\)"),
    (BLOCKS, TWO, cut, CheckpointError, r"model\.safetensors: .*damaged"),
    (BLOCKS, TWO, missing_shard, FileNotFoundError, "gone.safetensors"),
    (BLOCKS, TWO, lambda f: (f / "config.json").write_text("{"), CheckpointError, r"config\.json: expected JSON"),
]


@pytest.mark.parametrize(("quantization", "tensors", "damage", "error", "message"), BAD)
@pytest.mark.parametrize("target", ["safetensors", "universal"])
def test_what_cannot_be_read_is_refused_by_file_and_tensor_and_leaves_nothing(
    tmp_path: Path,
    quantization: Any,
    tensors: dict[str, Tensor],
    damage: Callable[[Path], None] | None,
    error: type[Exception],
    message: str,
    target: Any,
) -> None:
    source = write(tmp_path / "model", quantization, model=tensors)
    if damage is not None:
        damage(source)
    with pytest.raises(error, match=message):
        convert(source, tmp_path / "out", target, stage=2 if target == "universal" else None)
    assert not issubclass(error, Fp8DsError) or [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("scale", [None, nan_in(scales_of(2, 3)), scales_of(3, 2)], ids=["none", "nan", "shape"])
def test_a_bad_scale_of_the_last_weight_is_found_before_the_first_file_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scale: Tensor | None
) -> None:
    monkeypatch.setattr(model_folder, "_SHARD_BYTES", 1)
    last = {"z.weight": weight_of()} | ({} if scale is None else {"z.weight_scale_inv": scale})
    source = write(tmp_path / "model", BLOCKS, model=TWO | last)
    with pytest.raises(CheckpointError, match=r"z\.weight"):
        convert(source, tmp_path / "out", "safetensors")
    assert not (tmp_path / "out").exists()


def test_only_single_numbers_are_scales_of_activations(tmp_path: Path) -> None:
    kept = {"a.q_scale": torch.ones(4), "b.k_scale": torch.ones(1, 1)}
    left = {"a.k_scale": torch.ones(()), "a.v_scale": torch.ones(1), "a.input_scale": torch.ones(1)}
    convert(write(tmp_path / "model", BLOCKS, model=TWO | kept | left), tmp_path / "bf16", "safetensors")
    assert load_file(tmp_path / "bf16" / "model.safetensors").keys() == {"a.weight", "norm.weight", *kept}


def test_code_that_the_configuration_names_is_copied_with_what_it_imports_and_nothing_from_elsewhere(
    tmp_path: Path,
) -> None:
    source = write(tmp_path / "model", BLOCKS, model=TWO)
    maps = {"AutoConfig": "configuration_own.C", "AutoModel": ["modeling_own.M", None], "AutoX": "who/other--there.X"}
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"auto_map": maps | {"AutoY": "../outside.Y"}}))
    for name in ("configuration_own", "layers", "tokenization_own", "unused", "there", "../outside"):
        (source / f"{name}.py").write_text("raise SystemExit\n")
    (source / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["tokenization_own.T", null]}}')
    (source / "modeling_own.py").write_text("import torch\nfrom .layers import Layer\nfrom .gone import X\n")
    convert(source, tmp_path / "bf16", "safetensors")
    assert {path.name for path in (tmp_path / "bf16").glob("*.py")} == {
        "configuration_own.py",
        "modeling_own.py",
        "layers.py",
        "tokenization_own.py",
    }
    assert (tmp_path / "bf16" / "modeling_own.py").read_bytes() == (source / "modeling_own.py").read_bytes()
