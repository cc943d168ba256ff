"""Models named on a command line, built on the meta device: no weights, no download, no GPU."""

from __future__ import annotations

import difflib
import importlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fp8_ds.config.explain import parse_json
from fp8_ds.errors import ConfigError, Fp8DsError, ModelError

_LLAMA: dict[str, Any] = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336}
_LLAMA |= {"num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 500000.0}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama-2b": _LLAMA | {"num_hidden_layers": 8, "vocab_size": 32000},
    "llama-8b": _LLAMA | {"num_hidden_layers": 32, "vocab_size": 128256},
    "llama-70b": _LLAMA
    | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
    | {"vocab_size": 128256},
    "qwen3-8b": {"model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36}
    | {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936},
    "gpt2": {"model_type": "gpt2"},
    "mixtral-8x7b": {"model_type": "mixtral"},
}
"""Configurations by name; transformers' defaults are GPT-2 small and Mixtral 8x7B. llama-2b has 8 layers of llama-8b's
shapes, as docs/speed.md measures it."""

_ATTENTION = "fp8_ds_estimate"
_READS_ITS_MASK = ("mpt",)
"""Types whose attention of their own needs the mask that transformers leaves out for one from the registry."""
_SHOWN = 300
"""Characters of an error of transformers', some of which list all classes that there are."""
_POSITIONS = re.compile(r"wpe|position_embeddings|embed_positions")
_SEQ_LEN = 4096


@dataclass(frozen=True)
class ModelSpec:
    """A model that can be built any number of times.

    Attributes:
        name: as the user wrote it.
        config: of transformers, as a dict; None for a function of the user's.
        settings: entries that replace those of `config`.
        function: builds the module; None for a configuration.
    """

    name: str
    config: Mapping[str, Any] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    function: Callable[[], nn.Module] | None = None

    def build(self) -> nn.Module:
        """Build the module in training mode and bf16, on the meta device.

        Raises:
            ConfigError: transformers does not know the configuration or a setting, or the function returns no module.
            ModelError: the function raised.
        """
        with torch.device("meta"):
            if self.function is None:
                model = self._from_transformers()
            else:
                remedy = "no weight has a value there, and nothing is on a GPU."
                with _users_code(f"{self.name} to build its model on the meta device", remedy):
                    model = self.function()
        if not isinstance(model, nn.Module):
            raise ConfigError(f"model: expected an nn.Module from {self.name}, got {type(model).__name__}. Return one.")
        empty = next((name for name, p in model.named_parameters() if p.numel() == 0), None)
        if empty is not None and self.config is not None:
            raise ConfigError(
                f"model: expected sizes above 0 in the configuration of {self.name}, got a model with nothing in "
                f"{empty}. Correct it."
            )
        return model.to(torch.bfloat16).train()

    def _from_transformers(self) -> nn.Module:
        try:
            from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
        except ImportError as error:
            raise ConfigError(
                f"model: expected transformers to be installed for {self.name}, got none. "
                "Install it (the hf extra), or name a function: module:function."
            ) from error
        AttentionInterface.register(_ATTENTION, _attention)
        try:
            config = AutoConfig.for_model(**self._settled(AutoConfig.for_model(**(self.config or {}))))
            config.use_cache = False
            try:
                if config.model_type not in _READS_ITS_MASK:
                    return AutoModelForCausalLM.from_config(config, attn_implementation=_ATTENTION)
            except KeyError as error:
                if error.args != (_ATTENTION,):
                    raise
            # Its class does not ask the registry (GPT-Neo, Falcon, MPT): what it trains with is its own.
            config._attn_implementation = None
            return AutoModelForCausalLM.from_config(config)
        except ConfigError:
            raise
        except Exception as error:  # transformers has no class for what it finds wrong in a configuration
            what = " ".join(str(error).split())
            what = what if len(what) < _SHOWN else f"{what[:_SHOWN]} ..."
            raise ConfigError(
                f"model: expected the configuration of a causal language model, got {self.name} "
                f"({type(error).__name__}: {what}). Name another, repair it or --set, or name a function: "
                "module:function."
            ) from error

    def _settled(self, config: Any) -> dict[str, Any]:
        """Return the entries with the settings in place, each under the name that `config`, made without them, has."""
        entries = dict(self.config or {})
        for key, value in self.settings.items():
            if key not in entries and not hasattr(config, key):
                near = difflib.get_close_matches(key, sorted({*config.to_dict(), *entries}), n=1)
                raise ConfigError(
                    f"--set: expected a key of {self.name}'s configuration, got {key!r}. "
                    + (f"Did you mean {near[0]}?" if near else "Its class in transformers has no such key.")
                )
            entries[key if key in entries else config.attribute_map.get(key, key)] = value
        return entries


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Run SDPA without a mask, keys and values not repeated: as the fused kernels take them."""
    del module, attention_mask, kwargs
    output = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return output.transpose(1, 2), None


def read_spec(text: str, settings: Sequence[str] = ()) -> ModelSpec:
    """Read the model that `text` names.

    Args:
        text: a name of FAMILIES, a config.json of transformers or its folder, or `module:function`, where the function
            takes no arguments and returns an nn.Module.
        settings: "key=value" pairs that replace entries of the configuration; values are JSON, else strings.

    Raises:
        ConfigError: it is none of these, or a setting is no pair of a key and a value.
        ModelError: the module's own code raised.
        OSError: a file cannot be read.
    """
    if text in FAMILIES:
        return ModelSpec(text, FAMILIES[text], _pairs(settings))
    path = Path(text)
    if path.is_dir():
        path /= "config.json"
    if path.is_file() or path.suffix == ".json":
        try:
            config = parse_json(path.read_text(encoding="utf-8"), object_hook=_plain)
        except ValueError as error:  # of JSON or of UTF-8
            raise ConfigError(f"model: expected JSON in {path}, got {error}. Name a config.json.") from error
        if not isinstance(config, Mapping) or "model_type" not in config:
            raise ConfigError(
                f'model: expected a configuration of transformers with "model_type" in {path}, got none. '
                "Use a config.json as save_pretrained writes it."
            )
        return ModelSpec(text, config, _pairs(settings))
    module, _, function = text.partition(":")
    if module and function:
        if settings:
            raise ConfigError(
                f"--set: expected a model with a configuration, got {text}, a function. Leave --set out, change the "
                "model there."
            )
        return ModelSpec(text, function=_function(module, function))
    raise ConfigError(
        f"model: expected a config.json, its folder, module:function or one of {', '.join(FAMILIES)}, "
        f"got {text!r}. Nothing is downloaded: save the model's configuration with save_pretrained and name its folder."
    )


def _plain(entry: dict[str, Any]) -> Any:
    """Return an object of JSON; if transformers 5 wrote infinity or NaN as one, as in Mamba 2's `time_step_limit`, that
    float."""
    return float(entry["__float__"]) if entry.keys() == {"__float__"} else entry


@contextmanager
def _users_code(expected: str, remedy: str) -> Iterator[None]:
    """Raise ModelError in place of whatever code of the user's raises inside, SystemExit among it."""
    try:
        yield
    except Fp8DsError:
        raise
    except (Exception, SystemExit) as error:
        remedy = f"Its traceback is on standard error: {remedy}"
        if isinstance(error, SystemExit):
            remedy = 'It ends the process: put what a script does when it is started under `if __name__ == "__main__"`.'
        said = f"{type(error).__name__}: {str(error).rstrip('.')}"
        raise ModelError(f"MODEL: expected {expected}, got {said}. {remedy}") from error


def _function(module: str, name: str) -> Callable[[], nn.Module]:
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` has it: modules of the current folder
    expected = f"model: expected a function at {module}:{name}, got"
    with _users_code(f"{module} to be a module that can be imported", "repair the file."):
        try:
            found: Any = getattr(importlib.import_module(module), name, None)
        except ImportError as error:
            remedy = "Start in the folder of the module, or name its full dotted path."
            if error.name is not None and not f"{module}.".startswith(f"{error.name}."):
                remedy = f"{module} needs it: install it, or repair the import."
            raise ConfigError(f"{expected} {error}. {remedy}") from error
    if found is None:
        raise ConfigError(f"{expected} nothing. Name one that {module} has.")
    if isinstance(found, nn.Module) or not callable(found):
        kind = f"an nn.Module, {type(found).__name__}" if isinstance(found, nn.Module) else type(found).__name__
        raise ConfigError(f"{expected} {kind}. Name one that makes and returns a model.")
    function: Callable[[], nn.Module] = found
    return function


def _pairs(settings: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise ConfigError(f"--set: expected key=value, got {setting!r}. Write num_hidden_layers=2, for example.")
        try:
            found[key] = parse_json(value)
        except ValueError:  # an integer of thousands of digits is none either
            found[key] = value
    return found


def sequence_length(model: nn.Module, asked: int | None) -> int:
    """Return tokens of a sequence: `asked`, by default 4096, or as many as a model has learned positions.

    Raises:
        ConfigError: it has fewer than are asked for.
    """
    tables = {
        name: module.num_embeddings
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and _POSITIONS.fullmatch(name.rpartition(".")[2])
    }
    name = min(tables, key=lambda name: tables[name], default=None)
    if name is None or tables[name] >= (asked or _SEQ_LEN):
        return asked or _SEQ_LEN
    if asked is not None:
        raise ConfigError(
            f"--seq: expected at most {tables[name]}, the positions that {name} has, got {asked}. Name fewer tokens, "
            "or give the configuration more positions by --set."
        )
    return tables[name]


def loss_of(model: nn.Module, micro_batch: int, seq_len: int) -> Tensor:
    """Compute the loss of a micro-batch of zeros.

    Args:
        model: takes `input_ids` and `labels` and returns an output with `loss`, as transformers' do; or takes tokens
            [batch, length + 1] and returns the loss.
        micro_batch: sequences.
        seq_len: tokens of a sequence.

    Raises:
        ConfigError: its forward returns something else.
    """
    has_config = hasattr(model, "config")
    tokens = torch.zeros(micro_batch, seq_len if has_config else seq_len + 1, dtype=torch.long)
    if has_config:
        loss: Tensor = model(input_ids=tokens, labels=tokens).loss
        return loss
    found = model(tokens)
    if isinstance(found, Tensor) and found.numel() == 1:
        return found
    what = f"a tensor {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
    raise ConfigError(
        f"model: expected the loss, a scalar, from the forward of {type(model).__name__} on tokens "
        f"{list(tokens.shape)}, got {what}. Name a function whose model returns the loss of tokens [batch, length + 1]."
    )
