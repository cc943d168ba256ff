"""TP-sharded models: their checkpoints, and refusals where DeepSpeed would take a rank's part for the whole."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from deepspeed.checkpoint.constants import (
    PARAMETER_WITH_ROW_PARALLELISM_PATTERNS,
    TP_REPLICATED_PARAMETER_PATTERNS,
    UNIVERSAL_CHECKPOINT_INFO,
    UNIVERSAL_CHECKPOINT_VERSION_KEY,
    UNIVERSAL_CHECKPOINT_VERSION_VALUE,
)
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.runtime.tensor_parallel import init_utils
from deepspeed.utils.bwc import bwc_tensor_model_parallel_group
from torch.nn import Module

from fp8_ds.checkpoint.contents import read_structure
from fp8_ds.config.ds_config import Config, block_of, number
from fp8_ds.errors import ConfigError, UnsupportedError
from fp8_ds.tp.block_inputs import added_parameters
from fp8_ds.tp.linears import contexts_of


def is_cut(module: Module) -> bool:
    """Whether `fp8_ds.tp.parallelize` has sharded the model."""
    return bool(contexts_of(module))


def universal_info(module: Module) -> Mapping[str, Any]:
    """Return the entry of the model file by which ds_to_universal.py joins shards; empty for a whole model.

    It has patterns of parameters that are whole on every rank, and of those that are sharded along their input (dim 1);
    all others are sharded along dim 0. Source: deepspeed/checkpoint/ds_to_universal.py, merge_tp_slices (0.19.8).
    """
    if not is_cut(module):
        return {}
    whole, by_input = [], []
    for name, p in module.named_parameters():
        if p.requires_grad and not getattr(p, "tensor_model_parallel", False):
            whole.append(f"^{re.escape(name)}$")
        elif p.requires_grad and p.partition_dim == 1:  # type: ignore[attr-defined]
            by_input.append(f"^{re.escape(name)}$")
    patterns = {TP_REPLICATED_PARAMETER_PATTERNS: whole, PARAMETER_WITH_ROW_PARALLELISM_PATTERNS: by_input}
    version = {UNIVERSAL_CHECKPOINT_VERSION_KEY: UNIVERSAL_CHECKPOINT_VERSION_VALUE}
    return {UNIVERSAL_CHECKPOINT_INFO: version | patterns}


def lacks_info(module: Module, model_file: Path) -> bool:
    """Whether `module` is TP-sharded, and the universal checkpoint with this model file does not say how.

    DeepSpeed would split all weights along dim 0, without an error where they are sharded along their input. Raises a
    CheckpointError if the file holds more than data.
    """
    is_whole = all(tp.size == 1 for tp in contexts_of(module))
    return not is_whole and UNIVERSAL_CHECKPOINT_INFO not in read_structure(model_file)


def refuse_mpu(model: Module, mpu: Any) -> None:
    """Refuse groups over which ZeRO would average different shards of a weight, or leave out ranks with the same one.

    Args:
        model: any model; for a PipelineModule its own `mpu` counts.
        mpu: the `mpu` that deepspeed.initialize is given.
    """
    if not (contexts := contexts_of(model)):
        return
    own = dist.get_rank()
    if isinstance(model, PipelineModule):
        mpu = model.mpu()
    if _shares_sequences(mpu):
        raise ConfigError(
            "mpu: expected the groups that the model has been cut over, got those of sequence parallelism (Ulysses), "
            "over which ZeRO would average different parts of a weight. Leave out one of the two."
        )
    for tp in contexts:
        cut_over = dist.get_process_group_ranks(tp.group)
        shared, replicas = [own], list(range(dist.get_world_size()))
        if mpu is not None:
            shared = dist.get_process_group_ranks(bwc_tensor_model_parallel_group(mpu))
            replicas = dist.get_process_group_ranks(mpu.get_data_parallel_group())
        if sorted(shared) != sorted(cut_over) or set(replicas) & set(cut_over) != {own}:
            found = "none" if mpu is None else f"ranks {shared} with replicas on ranks {replicas}"
            raise ConfigError(
                f"mpu: expected the groups that the model has been cut over, ranks {cut_over}, got {found}. Give "
                f"deepspeed.initialize those whose tp_group parallelize got: mpu=fp8_ds.tp.ParallelGroups({tp.size})."
            )


def refuse_added_parameters(model: Module) -> None:
    """Refuse Parameters in blocks of a TP-sharded model that `parallelize` has not seen, such as an adapter's: gradient
    and output would differ between ranks."""
    if added := added_parameters(model):
        raise ConfigError(
            f"model: expected in its blocks the Parameters that fp8_ds.tp.parallelize has cut or kept, got {added[0]} "
            f"and {len(added) - 1} more, which came later. Adapters cannot be cut: leave out these, or parallelize."
        )


def _shares_sequences(mpu: Any) -> bool:
    """Whether `mpu` is Ulysses', whose ranks share sequences and hold whole weights. DeepSpeed has the same test."""
    return hasattr(mpu, "initialize_sequence_parallel")


def refuse_autotp_size(config: Config, mpu: Any) -> None:
    """Refuse on every rank an AutoTP size that does not divide the number of ranks, or that meets Ulysses' `mpu`.

    DeepSpeed makes as many groups as fit. Ranks that are left over stop with an IndexError, and the others wait.

    Args:
        config: DeepSpeed's configuration, the same on all ranks.
        mpu: the `mpu` that deepspeed.initialize is given, whose groups are not checked here.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    for name, size in _autotp_sizes(config).items():
        if size > 1 and _shares_sequences(mpu):
            raise ConfigError(
                f"{name}: expected none with an mpu of sequence parallelism (Ulysses), got {size}: ZeRO would average "
                "different parts of a weight. Leave out one of the two."
            )
        if mpu is None and (size < 1 or world % size):
            raise ConfigError(
                f"{name}: expected a divisor of the number of ranks, {world}, got {size}. Use such a one, or other "
                "ranks."
            )


def _autotp_sizes(config: Config) -> dict[str, int]:
    """Return the sizes that AutoTP is set to, by the setting that says so; empty if it is off."""
    size = number(block_of(config, "tensor_parallel").get("autotp_size"), 0)
    sizes = {"tensor_parallel.autotp_size": size} if size > 0 else {}
    if (recorded := init_utils._TP_MODEL_INIT_ARGS) is not None:
        sizes["deepspeed.tp_model_init: tp_size"] = recorded["tp_size"]
    return sizes


def refuse_second_cut(model: Module, config: Config) -> None:
    """Refuse AutoTP for a TP-sharded model, because it would take a rank's shards for the whole."""
    for name, size in _autotp_sizes(config).items():
        if size > 1 and is_cut(model):
            raise ConfigError(
                f"{name}: expected none with a model that fp8_ds.tp.parallelize has cut, got {size}. Leave out one of "
                "the two."
            )


def refuse_one_ranks_part(module: Module, autotp_size: int, what: str) -> None:
    """Refuse `what`, a function of DeepSpeed that takes a rank's own parameters for whole ones, where they are not."""
    if is_cut(module):
        raise UnsupportedError(
            f"{what}: expected a whole model, got one that fp8_ds.tp.parallelize has cut; it would hold one rank's "
            "part. Use engine.save_checkpoint and `fp8-ds convert --to universal`, load that without parallelize, and "
            "export there."
        )
    if autotp_size > 1:
        raise UnsupportedError(
            f"{what}: expected a whole model, got tensor_parallel.autotp_size {autotp_size}; it would hold one rank's "
            "part. Call engine._consolidated_16bit_state_dict() on all ranks, as transformers and accelerate do, and "
            "save what it returns on rank 0."
        )
