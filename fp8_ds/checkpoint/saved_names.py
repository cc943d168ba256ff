"""Names of a model's tensors in its saved files, by transformers' own mapping.

transformers 5 keeps some tensors in another form than their files do: of a layer's experts two stacks, for matrices of
each expert in the files. It says by model type how one becomes the other, and save_pretrained goes back. Both ways are
gone here with one tensor of the model in memory at a time.

Source: transformers 5.24, conversion_mapping.py `get_model_conversion_mapping`; core_model_loading.py
`revert_weight_conversion` and `convert_and_load_state_dict_in_model`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp8_ds.errors import CheckpointError, UnsupportedError

_WIDTH = 200


class SavedNames:
    """Names and shapes that the tensors of a model have in its saved files.

    Args:
        model: a model of transformers, of which names, shapes and the configuration are read; it may be on the meta
            device. None: files have the model's own names.
        reason: for errors, why there is no model.

    Attributes:
        shapes: of the model's tensors, by name; empty without a model.
    """

    def __init__(self, model: Any = None, reason: str = "no model of transformers") -> None:
        self.model, self.reason = model, reason
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._loads: list[Any] = []
        self._saves: list[Any] = []
        if model is not None:
            self.shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
            self._loads, kept = _mapping_of(model)
            self._saves = [transform.reverse_transform() for transform in reversed(kept)]

    @classmethod
    def of_folder(cls, folder: Path) -> SavedNames:
        """Read config.json in `folder`. Nothing is downloaded, no code of the folder is executed, no weight is made."""
        try:
            import transformers

            config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            name = next(iter(getattr(config, "architectures", None) or ()), None)
            found = getattr(transformers, name, None) if name else None
            with torch.device("meta"):
                return cls(found(config) if found else transformers.AutoModelForCausalLM.from_config(config))
        except Exception as error:  # transformers has no class for what it cannot read in a configuration
            what = " ".join(str(error).split())[:_WIDTH]
            return cls(None, f"{folder} of which transformers makes no model ({type(error).__name__}: {what})")

    @classmethod
    def of_module(cls, module: Any) -> SavedNames:
        """Read the class and configuration of a model of transformers; any other module has its own names."""
        made = transformers_class(module)
        if not hasattr(module, "base_model_prefix"):
            return cls(None, f"a {type(module).__name__}, which is no model of transformers")
        try:
            with torch.device("meta"):
                return cls(made(copy.deepcopy(module.config)))
        except Exception as error:  # a class of the user's own, with other arguments
            return cls(None, f"a {type(module).__name__}, which its configuration alone does not make ({error})")

    def is_kept(self, name: str) -> bool:
        """Whether the files hold the tensor in one piece, as it is."""
        return not any(_matched(transform, name) for transform in self._saves if hasattr(transform, "operations"))

    def saved(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Return what the files hold of the model's `tensor`, which may be on the meta device: views or copies.

        Raises:
            UnsupportedError: the model has no such tensor, or the files hold it together with others.
        """
        if not self._saves:
            return {name: tensor}
        if self.shapes.get(name) != tuple(tensor.shape):
            got = f"{name} {list(tensor.shape)}, which is {list(self.shapes.get(name, ())) or 'not there'}"
            raise UnsupportedError(
                f"convert: expected the tensors of the model in --model, got {got}. Name the folder of the model that "
                "was trained; one in a module of your own has other names."
            )
        found = {name: tensor}
        for transform in self._saves:
            if hasattr(transform, "operations") and (match := _matched(transform, name)):
                found = self._split(copy.deepcopy(transform), name, tensor, *match)
                break
        return {_renamed(self._saves, key): part for key, part in found.items()}

    def _split(self, transform: Any, name: str, tensor: Tensor, key: str, pattern: str) -> dict[str, Tensor]:
        if len(transform.source_patterns) > 1:
            raise UnsupportedError(
                f"convert: expected weights that the model's files hold one by one, got {name}, which they join with "
                "others. Convert to safetensors, and save it by save_pretrained."
            )
        transform.add_tensor(key, name, pattern, tensor)
        return self._run(transform, key)

    def _run(self, transform: Any, key: str) -> dict[str, Tensor]:
        found = transform.convert(key, model=self.model, config=self.model.config)
        return {name: part[0] if isinstance(part, list) else part for name, part in found.items()}

    def loaded(self, files: Mapping[str, Callable[[], Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of files as the model holds them, those that it does not know as they are.

        Args:
            files: functions that read a tensor, by the names in the files.

        Raises:
            CheckpointError: parts of a tensor are missing or of other shapes.
        """
        made: dict[str, Any] = {}
        for name in self._in_order(files):
            target, transform, pattern = self._target(name)
            if target not in self.shapes:
                yield name, files[name]()
            elif transform is None:
                yield target, files[name]()
            else:
                made.setdefault(target, copy.deepcopy(transform)).add_tensor(target, name, pattern, files[name])
        while made:
            target = next(iter(made))
            try:
                parts = self._run(made.pop(target), target)
            except (RuntimeError, TypeError, ValueError) as error:
                raise CheckpointError(
                    f"{target}: expected parts that fit, got: {error}. Copy the model again."
                ) from error
            for name, tensor in parts.items():
                if self.shapes.get(name) != tuple(tensor.shape):
                    raise CheckpointError(
                        f"{name}: expected {list(self.shapes.get(name, ()))}, as config.json says, got parts that make "
                        f"{list(tensor.shape)}. Copy the model again."
                    )
                yield name, tensor

    def _in_order(self, files: Mapping[str, Any]) -> list[str]:
        """Return the names, experts by their numbers."""
        if not self._loads:
            return list(files)
        from transformers.core_model_loading import dot_natural_key

        return sorted(files, key=dot_natural_key)

    def _target(self, name: str) -> tuple[str, Any, str]:
        """Return the name that the file's `name` has in the model, and how it is converted: transform and pattern."""
        if self.model is None or name in self.shapes:
            return name, None, ""
        key, found, pattern = _renamed(self._loads, name), None, ""
        for transform in self._loads:
            if hasattr(transform, "operations") and (match := _matched(transform, key)):
                (key, pattern), found = match, transform
                break
        prefix = f"{self.model.base_model_prefix}."
        if key not in self.shapes:
            key = key.removeprefix(prefix) if key.startswith(prefix) else prefix + key
        return key, found, pattern


def transformers_class(module: Any) -> type[Any]:
    """Return the class of transformers that `module` is of, or derived from; its own if there is none."""
    return next(
        (found for found in type(module).__mro__ if found.__module__.startswith("transformers.models.")), type(module)
    )


def _mapping_of(model: Any) -> tuple[list[Any], list[Any]]:
    """Return transforms that load, and those of them that save_pretrained undoes."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:  # before transformers 5 files are as the model is
        return [], []
    kept = get_model_conversion_mapping(model, add_legacy=False)
    # A prefix is undone only if it was there on loading, which a configuration does not say.
    kept = [transform for transform in kept if type(transform).__name__ != "PrefixChange"]
    return get_model_conversion_mapping(model), kept


def _matched(transform: Any, name: str) -> tuple[str, str] | None:
    """Return (name after it, its pattern) if `transform` applies to `name`."""
    key, pattern = transform.rename_source_key(name)
    return None if pattern is None else (key, pattern)


def _renamed(transforms: list[Any], name: str) -> str:
    for transform in transforms:
        if not hasattr(transform, "operations"):
            name = transform.rename_source_key(name)[0]
    return name
