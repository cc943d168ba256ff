"""Small FP8 folders as servers read them, whose scales differ between blocks or rows, and models loaded from them.

Mixtures of experts have a tensor for each matrix of each expert in their files, and stacks of them in their models.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

FP8 = torch.float8_e4m3fn
VOCABULARY = 64
RAGGED = {"hidden_size": 128, "intermediate_size": 300, "num_attention_heads": 2, "num_key_value_heads": 1}
WHOLE = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2}
"""Sizes of models: of the first, blocks are cut."""
_OF_EXPERTS = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "num_experts_per_tok": 2}
EXPERTS = {
    "Mixtral": _OF_EXPERTS | {"num_local_experts": 4, "intermediate_size": 256},
    "Qwen3Moe": _OF_EXPERTS | {"num_experts": 4, "moe_intermediate_size": 128, "intermediate_size": 256},
    "DeepseekV3": _OF_EXPERTS
    | {"n_routed_experts": 4, "moe_intermediate_size": 128, "intermediate_size": 256, "first_k_dense_replace": 0}
    | {"n_group": 1, "topk_group": 1, "num_key_value_heads": 2, "q_lora_rank": 128, "kv_lora_rank": 128}
    | {"qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64},
}
"""Sizes of mixtures, by family."""
_EXPERT = re.compile(r"(.*)\.(?:block_sparse_moe|mlp)\.experts\.(\d+)\.(w1|w2|w3|gate_proj|up_proj|down_proj)\.weight")
_BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}


def write(folder: str, kind: str, sizes: dict[str, int], family: str = "Llama", power_of_two: bool = False) -> None:
    """Write a folder of random codes.

    Args:
        kind: "blocks" or "rows": what shares a scale, and the format.
        power_of_two: whether scales are powers of two.
    """
    import transformers
    from safetensors.torch import save_file

    more = {"num_hidden_layers": 1, "vocab_size": VOCABULARY, "max_position_embeddings": 64, "head_dim": 64}
    config = getattr(transformers, f"{family}Config")(**sizes, **more, tie_word_embeddings=False)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).bfloat16()
    model.save_pretrained(folder)
    tensors, generator = tensors_of(folder), torch.Generator().manual_seed(1)
    for name in [name for name in tensors if "_proj" in name or ".experts." in name]:
        rows, cols = tensors[name].shape
        grid = (-(-rows // 128), -(-cols // 128)) if kind == "blocks" else (rows, 1)
        scale = torch.exp2(torch.randint(-13, -9, grid, generator=generator).float())
        scale *= 1 if power_of_two else torch.rand(grid, generator=generator) + 0.5
        codes = (torch.randn(rows, cols, generator=generator) * 100).clamp(-448, 448).to(FP8)
        tensors |= {name: codes, f"{name}_scale_inv" if kind == "blocks" else f"{name}_scale": scale}
    save_file(tensors, Path(folder, "model.safetensors"))
    path = Path(folder, "config.json")
    if kind == "blocks":
        given = _BLOCKS | {"modules_to_not_convert": ["lm_head"]}
        path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": given}))


def tensors_of(folder: str) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    found: dict[str, Tensor] = load_file(Path(folder, "model.safetensors"))
    return found


def codes_and_scales(folder: str) -> dict[str, tuple[Tensor, Tensor]]:
    """name -> (codes as uint8, float32 grid) of each FP8 weight."""
    tensors = tensors_of(folder)
    scale = {name.partition("_scale")[0]: tensor for name, tensor in tensors.items() if "_scale" in name}
    return {name: (tensors[name].view(torch.uint8), scale[name]) for name in scale}


def values(folder: str) -> dict[str, Tensor]:
    """name in the model -> codes times scales, float32, element by element; of experts the stacks."""
    found = {}
    for name, (codes, scale) in codes_and_scales(folder).items():
        row, col = torch.arange(codes.shape[0])[:, None], torch.arange(codes.shape[1])[None]
        is_row = scale.shape == (len(codes), 1)
        found[name] = codes.view(FP8).float() * (scale[row, 0] if is_row else scale[row // 128, col // 128])
    return stacked(found)


def stored_in_model(folder: str) -> dict[str, tuple[Tensor, Tensor]]:
    """`codes_and_scales` by names in the model; of experts the stacks, with grids one behind the other."""
    found = codes_and_scales(folder)
    codes, scales = (stacked({name: one[i] for name, one in found.items()}) for i in (0, 1))
    return {name: (codes[name], scale.flatten(0, -2)) for name, scale in scales.items()}


def stacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by the names of Mixtral's and Qwen3-MoE's models, [E, 2 I, H] and [E, H, I], of those in their files."""
    found = {}
    parts: dict[str, dict[tuple[int, str], Tensor]] = {}
    for name, tensor in tensors.items():
        if expert := _EXPERT.fullmatch(name):
            layer, number, part = expert.groups()
            part = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}.get(part, part)
            parts.setdefault(f"{layer}.mlp.experts.", {})[int(number), part] = tensor
        else:
            found[name.replace(".block_sparse_moe.", ".mlp.")] = tensor
    for prefix, matrices in parts.items():
        numbers = sorted({number for number, _ in matrices})
        gate_up = [torch.cat([matrices[e, "gate_proj"], matrices[e, "up_proj"]]) for e in numbers]
        found[f"{prefix}gate_up_proj"] = torch.stack(gate_up)
        found[f"{prefix}down_proj"] = torch.stack([matrices[e, "down_proj"] for e in numbers])
    return found


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Let transformers keep blocks in FP8, as it does where there is a GPU."""
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    with mock.patch.object(FineGrainedFP8HfQuantizer, "validate_environment", lambda *args, **kwargs: None):
        yield


def is_quantized(folder: str) -> bool:
    """Whether transformers' own quantizer reads the folder: blocks, or rows with compressed-tensors."""
    return "quantization_config" in json.loads(Path(folder, "config.json").read_text())


def load(folder: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    """The model as transformers loads the folder on a GPU; compressed-tensors, which need not be here, by hand."""
    import transformers

    with as_on_a_gpu():
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    if not is_quantized(folder):
        _compress(model, codes_and_scales(folder))
    return model


def _compress(model: Any, stored: dict[str, tuple[Tensor, Tensor]]) -> None:
    """Make of `model` what transformers 5.24 and compressed-tensors 0.20 leave of it (`run_compressed=False`)."""

    def decompress(*args: Any) -> None:
        raise AssertionError("a bf16 model is made here")

    model.ct_decompress_hook = model.register_forward_pre_hook(decompress)
    model.hf_quantizer, model.is_quantized, model.quantization_method = object(), True, "compressed-tensors"
    model.config.quantization_config = {"quant_method": "compressed-tensors"}
    for name, (codes, scale) in stored.items():
        module: Any = model.get_submodule(name.removesuffix(".weight"))
        module.weight = nn.Parameter(codes.view(FP8).clone())
        module.weight_scale = nn.Parameter(scale.clone())
        module.input_scale = nn.Parameter(torch.ones(1))
        module.quantization_scheme, module.quantization_status = object(), "compressed"
        module.forward = decompress


def batch(step: int = 0) -> dict[str, Tensor]:
    tokens = torch.randint(0, VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(step))
    return {"input_ids": tokens, "labels": tokens}
