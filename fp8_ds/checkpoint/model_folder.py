"""Model folders in Hugging Face's layout: safetensors, read a tensor and written a shard at a time."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp8_ds.checkpoint import folders
from fp8_ds.checkpoint.folders import beside, refuse_paths, refuse_special, write_text
from fp8_ds.config.explain import parse_json
from fp8_ds.errors import CheckpointError, ConfigError

INDEX = "model.safetensors.index.json"
_SHARD_BYTES = 5 * 10**9
_WIDTH = 60
_WITH_CODE = ("config.json", "tokenizer_config.json")
_RELATIVE_IMPORT = re.compile(r"^\s*from\s+\.(\w+)", re.MULTILINE)


class TensorFiles:
    """Tensors of the files that the index of a model folder lists, or of all its safetensors if it has none.

    Args:
        source: the folder. Its files stay open.

    Raises:
        CheckpointError: a file is damaged, holds a tensor that another has, or the index names one that none has.
        OSError: a file that the index names is not there.
    """

    def __init__(self, source: Path) -> None:
        from safetensors import safe_open

        index = source / INDEX
        listed = _weight_map(index) if os.path.lexists(index) else {}
        paths = sorted({source / name for name in listed.values()} or source.glob("*.safetensors"))
        refuse_special(paths)
        self._found: dict[str, tuple[Path, Any]] = {}
        for path in paths:
            with _named(path):
                file = safe_open(path, framework="pt")
                names = file.keys()
            if twice := sorted(self._found.keys() & names):
                raise CheckpointError(f"{path}: expected tensors once, got {twice[0]} again. Leave one of the files.")
            self._found |= dict.fromkeys(names, (path, file))
        if missing := sorted(listed.keys() - self._found.keys()):
            raise CheckpointError(
                f"{index}: expected tensors that are in the files, got {missing[:3]}. Copy the model again."
            )

    @property
    def names(self) -> list[str]:
        return list(self._found)

    def path(self, name: str) -> Path:
        return self._found[name][0]

    def read(self, name: str) -> Tensor:
        path, file = self._found[name]
        with _named(path):
            tensor: Tensor = file.get_tensor(name)
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        path, file = self._found[name]
        with _named(path):
            return tuple(file.get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype | None:
        """Return the dtype of a tensor; None if there is no such."""
        if name not in self._found:
            return None
        path, file = self._found[name]
        with _named(path):
            part = file.get_slice(name)
            return part[:0].dtype if part.get_shape() else self.read(name).dtype


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Raise a CheckpointError that names `path` if it is no whole safetensors file."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        raise CheckpointError(f"{path}: expected safetensors, got a damaged file ({error}). Copy it again.") from error


def readers(source: Path) -> dict[str, Callable[[], Tensor]]:
    """Return functions that read the tensors of a model folder, by name. It raises as TensorFiles does."""
    files = TensorFiles(source)
    return {name: partial(files.read, name) for name in files.names}


def _weight_map(index: Path) -> dict[str, str]:
    refuse_special([index])
    text = index.read_text()
    try:
        listed: dict[str, str] = parse_json(text)["weight_map"]
        refuse_paths(listed.values(), index)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        said = f'{index}: expected JSON with "weight_map", names of files by names of tensors, got {text[:_WIDTH]!r}'
        raise CheckpointError(f"{said}. Copy the model again.") from error
    return listed


def write_tensors(
    tensors: Iterable[tuple[str, Tensor]], out: Path, write_beside: Callable[[], None] = lambda: None
) -> tuple[int, int]:
    """Write `tensors` into `out`, and return how many and their bytes.

    `write_beside` is called before the files get their names: without the configuration FP8 weights would mean nothing.

    After an error `out` has none of them; after a kill on the way none, or an index of some that are missing.
    """
    from safetensors.torch import save_file

    parts: list[Path] = []
    sizes: list[dict[str, int]] = []
    names: list[str] = []
    try:
        for shard in _shards(tensors):
            out.mkdir(parents=True, exist_ok=True)
            parts.append(beside(out / f"shard-{len(parts)}", folders.INCOMPLETE))
            with folders.as_file_errors(parts[-1]):
                save_file(shard, parts[-1], metadata={"format": "pt"})
            sizes.append({name: tensor.nbytes for name, tensor in shard.items()})
        names, num_bytes = ["model.safetensors"], sum(sum(shard.values()) for shard in sizes)
        if len(parts) > 1:
            names = [f"model-{i:05d}-of-{len(parts):05d}.safetensors" for i in range(1, len(parts) + 1)]
            weight_map = {name: file for file, shard in zip(names, sizes, strict=True) for name in shard}
            index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
            write_text(out / INDEX, json.dumps(index, indent=1, sort_keys=True))
        write_beside()
        for path, name in zip(parts, names, strict=True):
            path.rename(out / name)
    except Exception:
        for path in (*parts, *(out / name for name in names), out / INDEX):
            path.unlink(missing_ok=True)
        raise
    return sum(map(len, sizes)), num_bytes


def _shards(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Yield `tensors` in groups of at most _SHARD_BYTES, each in memory until the next is asked for."""
    shard: dict[str, Tensor] = {}
    num_bytes = 0
    for name, tensor in tensors:
        if shard and num_bytes + tensor.nbytes > _SHARD_BYTES:
            yield shard
            shard.clear()
            num_bytes = 0
        shard[name] = tensor.contiguous()
        num_bytes += tensor.nbytes
    yield shard


def configuration_files(model: Path) -> list[Path]:
    """Return the configurations and tokenizer files in `model`, and its own code: no weights, no index of weights.

    The code are the files that `auto_map` in the model's and the tokenizer's configuration names, and those that they
    import from beside them.
    """
    if not (model / "config.json").is_file():
        raise ConfigError(f"--model: expected a folder with config.json, got {model}. Name the model's folder.")
    found = sorted(path for end in ("json", "model", "txt", "jinja") for path in model.glob(f"*.{end}"))
    files = [path for path in found if not path.name.endswith((".index.json", "trainer_state.json"))]
    refuse_special(files)
    return files + _code_files(model)


def _code_files(model: Path) -> list[Path]:
    modules: list[str] = []
    for file in _WITH_CODE:
        try:
            named = parse_json((model / file).read_text())["auto_map"].values()
        except (AttributeError, FileNotFoundError, KeyError, TypeError, ValueError):  # it names none
            continue
        texts = [text for value in named for text in (value if isinstance(value, list) else [value]) if text]
        modules += [str(text).rpartition(".")[0] for text in texts]
    found: dict[str, Path] = {}
    while modules:
        module = modules.pop()
        path = model / f"{module}.py"
        # Another repository's has "--" in its name.
        if module not in found and re.fullmatch(r"\w+", module) and os.path.lexists(path):
            refuse_special([path])
            found[module] = path
            modules += _RELATIVE_IMPORT.findall(path.read_text())
    return sorted(found.values())
