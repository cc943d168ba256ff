"""Wrapper of `deepspeed.initialize`: it finds whether FP8 is wanted and possible, and swaps the engine classes."""

from __future__ import annotations

import base64
import difflib
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8_ds.config import Fp8Config
from fp8_ds.engine.patches import apply_patches
from fp8_ds.errors import ConfigError, Fp8DsError
from fp8_ds.log import logger

if TYPE_CHECKING:
    import torch

    from fp8_ds.engine.rank_agreement import Start


def initialize(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call DeepSpeed's `initialize`, with our engines where the configuration has `"fp8": {"enabled": true}`.

    Raises:
        ConfigError: the block is wrong, or ranks differ in block, packages or model; on every rank, before any group
            or weight is touched.
        UnsupportedError: the configuration asks for what FP8 ZeRO does not support. A rank that is refused alone says
            so to the others, which raise a ConfigError.
        SeamError: the installed DeepSpeed lacks a symbol we override.
    """
    config = _resolve_config(original, args, kwargs)
    if not isinstance(config, dict):
        return original(*args, **kwargs)
    arguments = inspect.signature(original).bind_partial(*args, **kwargs).arguments
    mine: Start | Fp8DsError | None = None
    fp8: Fp8Config | None = None
    if config.get("fp8") is not None:
        try:
            fp8 = _read_block(config, arguments)
            mine = None if fp8 is None else _accept(fp8, config, arguments)
        except Fp8DsError as refusal:
            mine = refusal
    if mine is None:
        _leave_to_deepspeed(config, arguments)
        return original(*args, **kwargs)
    from fp8_ds.engine.compat.model import refuse_autotp_size
    from fp8_ds.engine.presets import starting
    from fp8_ds.engine.rank_agreement import start_alike

    start_alike(mine, arguments)
    refuse_autotp_size(config, arguments.get("mpu"))  # now ranks are counted, and have the same configuration
    assert fp8 is not None  # or `start_alike` has raised
    with starting(fp8), _our_engines():
        return original(*args, **kwargs)


def _leave_to_deepspeed(config: dict[str, Any], arguments: Mapping[str, Any]) -> None:
    """Tell the other ranks that FP8 is off on this one.

    Raises:
        ConfigError: `config` has a block that DeepSpeed would pass over; another rank has FP8 on; or an optimizer shall
            train the model of an engine with FP8.
    """
    from fp8_ds.config.ds_config import has_optimizer
    from fp8_ds.engine.rank_agreement import is_one_of_many, own_rank, take_side

    model = arguments.get("model")
    # Without a model DeepSpeed raises, before it makes a group.
    mixed = take_side(False, arguments) if model is not None and is_one_of_many(arguments) else None
    refuse_misplaced_block(config)
    if "fp8" not in config and own_rank() == 0:
        for line in other_blocks(config):  # no refusal: another library may run
            logger.warning(line)
    if mixed is not None:
        raise mixed
    if has_optimizer(config, arguments.get("optimizer")):  # Lightning's engine for validate and test has none
        parameters = dict(getattr(model, "named_parameters", dict)())
        if name := next((name for name, p in parameters.items() if hasattr(p, "_fp8")), None):
            from fp8_ds.nn.plan.plan import converted_already

            raise converted_already(f"{name} in FP8")


def other_blocks(config: Mapping[str, Any]) -> list[str]:
    """Return a line for each top-level key that is another FP8 library's block, or "fp8" misspelled."""
    remedies = {"msamp": 'It is MS-AMP\'s: write "fp8" in its place (docs/migrating.md).'}
    keys = (str(key) for key in config if key != "fp8")
    # "fp_8" and "f8" are alike, "fp16" is not.
    return [
        f"{key}: expected a key that DeepSpeed reads, got one that it passes over in silence. "
        + remedies.get(key.lower(), 'Did you mean "fp8"?')
        for key in keys
        if key.lower() in ("msamp", "float8") or difflib.get_close_matches(key.lower(), ["fp8"], cutoff=0.7)
    ]


def refuse_misplaced_block(config: Mapping[str, Any]) -> None:
    """Refuse a block that is meant as "fp8", but written otherwise or inside another: DeepSpeed would pass over it."""
    if "fp8" in config:
        return
    found = [repr(key) for key in config if key.lower() == "fp8"]
    found += [f'"fp8" in {key!r}' for key, value in config.items() if isinstance(value, dict) and "fp8" in value]
    if found:
        raise ConfigError(f'fp8: expected "fp8" at the top level of the configuration, got {found[0]}. Move it there.')


def _read_block(config: dict[str, Any], arguments: Mapping[str, Any]) -> Fp8Config | None:
    """Return the block with the values of its preset; None if FP8 is off. Raises an Fp8DsError as `initialize` does."""
    block = config["fp8"]
    if not isinstance(block, dict) or block.get("enabled") is not True:  # refused, or off: nothing to look at
        fp8 = Fp8Config.from_block(block)
        return fp8 if fp8.enabled else None
    import torch
    from deepspeed.accelerator import get_accelerator

    from fp8_ds.engine.presets import facts_of

    model = arguments.get("model")
    device = torch.device(get_accelerator().device_name())
    known = model if isinstance(model, torch.nn.Module) else None
    return Fp8Config.from_block(block, facts_of(config, known, device, arguments.get("lr_scheduler")))


def _accept(fp8: Fp8Config, config: dict[str, Any], arguments: Mapping[str, Any]) -> Start:
    """Return this rank's start. Raises an Fp8DsError of this rank alone, as `initialize` does."""
    import torch
    from deepspeed.accelerator import get_accelerator

    from fp8_ds.config.ds_config import has_optimizer
    from fp8_ds.engine.compat.config import refuse_start
    from fp8_ds.engine.folder_model import make_plain
    from fp8_ds.engine.rank_agreement import own_rank, start_of_rank

    model, mpu = arguments.get("model"), arguments.get("mpu")
    trains = has_optimizer(config, arguments.get("optimizer"))
    if trains:
        device = torch.device(get_accelerator().device_name())
        refuse_start(fp8, config, device, own_rank())
        if model is not None:  # else DeepSpeed says so
            _refuse_model(fp8, config, model, mpu, device)
            make_plain(model)
    # Without an optimizer: as it is, whatever stage and model. TRL has reference models in stage 0 beside stage 1 or 2.
    apply_patches()
    return start_of_rank(fp8, config, model, mpu, trains=trains)


def _refuse_model(fp8: Fp8Config, config: dict[str, Any], model: Any, mpu: Any, device: torch.device) -> None:
    """Raise an Fp8DsError, of this rank alone, if this model cannot be trained with this configuration."""
    from fp8_ds.attention.huggingface import refuse_attention_of
    from fp8_ds.config.ds_config import zero_stage
    from fp8_ds.engine.compat.model import (
        refuse_added_parameters,
        refuse_model,
        refuse_mpu,
        refuse_second_sharding,
        refuse_stored,
        refuse_wrapped,
    )
    from fp8_ds.engine.liger_loss import check_chunks

    refuse_model(model, fp8.linear)
    refuse_stored(model, config, is_split=fp8.optimizer.states == "fp8")
    refuse_wrapped(model, zero_stage(config))
    refuse_second_sharding(model, config)
    refuse_added_parameters(model)
    refuse_mpu(model, mpu)
    refuse_attention_of(model, fp8.attention)
    check_chunks(model, fp8.activations.cross_entropy_chunk_mem_const)


def _resolve_config(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the configuration as a dict, from wherever the caller put it, or a value that DeepSpeed will refuse."""
    bound = inspect.signature(original).bind_partial(*args, **kwargs).arguments
    client_args = bound.get("args")
    candidates = [
        bound.get("config"),
        bound.get("config_params"),
        getattr(client_args, "deepspeed_config", None),
        getattr(client_args, "deepscale_config", None),
    ]
    config = next((candidate for candidate in candidates if candidate is not None), None)
    return _read(config) if isinstance(config, str) else config


def _read(config: str) -> Any:
    """Read a string as DeepSpeed does: the path of an HJSON file, or HJSON in base64; None if it is neither."""
    import hjson

    if os.path.exists(config):
        return hjson.loads(Path(config).read_text())
    try:
        return hjson.loads(base64.urlsafe_b64decode(config).decode())
    except ValueError:
        return None


@contextmanager
def _our_engines() -> Iterator[None]:
    """Swap the engine classes in the module `deepspeed`, where `deepspeed.initialize` looks them up at call time."""
    import deepspeed

    from fp8_ds.engine.engine import Fp8DeepSpeedEngine, Fp8PipelineEngine

    original = deepspeed.DeepSpeedEngine, deepspeed.PipelineEngine
    deepspeed.DeepSpeedEngine, deepspeed.PipelineEngine = Fp8DeepSpeedEngine, Fp8PipelineEngine
    try:
        yield
    finally:
        deepspeed.DeepSpeedEngine, deepspeed.PipelineEngine = original
