"""Safetensors in Hugging Face's layout, written a shard at a time: what `convert` makes of masters."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from fp8_ds.checkpoint import folders
from fp8_ds.checkpoint.from_safetensors import INDEX
from fp8_ds.checkpoint.manifest import write_text

_SHARD_BYTES = 5 * 10**9


def write_safetensors(
    tensors: Iterator[tuple[str, Tensor]], out: Path, model: Path | None
) -> tuple[list[str], int, int]:
    """In Hugging Face's layout; killed on the way, `out` has none, or an index of some that are missing.

    Args:
        model: a folder whose configurations and tokenizer go along.

    Returns:
        (files written, number of tensors, their bytes).
    """
    from safetensors.torch import save_file

    place: dict[str, str] = {}
    shard: dict[str, Tensor] = {}
    shards: list[Path] = []
    num_bytes = held = 0

    def flush() -> None:
        out.mkdir(parents=True, exist_ok=True)
        path = out / f"shard-{len(shards)}{folders.INCOMPLETE}"
        with folders.as_file_errors(path):
            save_file(shard, path, metadata={"format": "pt"})
        shards.append(path)
        shard.clear()

    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if shard and held + size > _SHARD_BYTES:
            flush()
            held = 0
        shard[name] = tensor.contiguous()
        held += size
        num_bytes += size
        place[name] = str(len(shards))
    if shard:
        flush()
    names = _names(len(shards))
    files = list(names)
    if len(names) > 1:
        index = {"metadata": {"total_size": num_bytes}, "weight_map": {k: names[int(v)] for k, v in place.items()}}
        write_text(out / INDEX, json.dumps(index, indent=1, sort_keys=True))
        files.append(INDEX)
    for path, name in zip(shards, names, strict=True):
        path.rename(out / name)
    files += _copy_model_files(model, out)
    return files, len(place), num_bytes


def _names(number: int) -> list[str]:
    """As transformers names shards."""
    if number == 1:
        return ["model.safetensors"]
    return [f"model-{i + 1:05d}-of-{number:05d}.safetensors" for i in range(number)]


def model_files(model: Path) -> list[Path]:
    """Configurations and tokenizer files in `model`; no weights, no index of weights."""
    found = sorted([*model.glob("*.json"), *model.glob("*.model"), *model.glob("*.txt"), *model.glob("*.jinja")])
    return [file for file in found if not file.name.endswith(".index.json") and file.name != "trainer_state.json"]


def _copy_model_files(model: Path | None, out: Path) -> list[str]:
    files = [] if model is None else model_files(model)
    for file in files:
        shutil.copyfile(file, out / file.name)
    return [file.name for file in files]
