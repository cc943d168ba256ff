"""Kinds of models and devices that FP8 ZeRO refuses, with the tables that docs/refusals.md shows.

A TP-sharded model is refused where DeepSpeed would take a rank's part for the whole.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from fp8_ds.config.ds_config import Config, block_of, number
from fp8_ds.engine.folder_experts import own_experts
from fp8_ds.engine.folder_model import is_linear_of_folder
from fp8_ds.errors import ConfigError, UnsupportedError
from fp8_ds.nn.linear.stored import LARGEST, SCALE_NAMES, SMALLEST
from fp8_ds.nn.moe.experts import is_stock_experts, names_beside
from fp8_ds.nn.moe.stored import scales_of, stored_names
from fp8_ds.tp.block_inputs import added_parameters
from fp8_ds.tp.linears import contexts_of

if TYPE_CHECKING:
    import torch
    from torch.nn import Module

    from fp8_ds.config import LinearConfig


@dataclass(frozen=True)
class Refusal:
    """A kind of model or device that is refused: its name, why, and what to do instead."""

    what: str
    reason: str
    remedy: str

    def error(self, found: str) -> UnsupportedError:
        return UnsupportedError(f'"fp8" is enabled for {self.what}, got {found}: {self.reason}. {self.remedy}')


EXPERTS = Refusal(
    "a model with expert-parallel parameters (`deepspeed.moe`)",
    "DeepSpeed reduces them over expert groups, with an optimizer group each",
    'Turn "fp8.enabled" off for this model.',
)
STORED_IN_FP8 = Refusal(
    "a model with weights in FP8 that are no linears or experts (as Mixtral's) with a scale for each 128 x 128 "
    "elements, nor linears with one for each row",
    "scales of others (other experts, whole tensors, FP8 kernels) are not read, and DeepSpeed would take codes for "
    "weights",
    "Load it with `dequantize=True` in its `quantization_config`, or what `fp8-ds convert FOLDER OUT --to bf16` makes "
    "of it.",
)
STORED_AND_SHARDED = Refusal(
    "a model from an FP8 folder that is sharded before the engine has it (`zero.Init`, AutoTP, "
    "`fp8_ds.tp.parallelize`, pipeline stages)",
    "scales would have to be sharded with their weights",
    "Load the whole model on each rank, which ZeRO then shards, or load it with `dequantize=True` in its "
    "`quantization_config`.",
)
STORED_WITHOUT_POWERS = Refusal(
    'a trainable model from an FP8 folder whose scales are no powers of two, with "fp8": {"optimizer": {"states": '
    '"fp8"}}',
    "split masters start from bf16 weights, which would round its values",
    'Set "optimizer": {"states": "fp32"}.',
)
DUAL_PIPE = Refusal(
    "a DualPipeVModule",
    "its engine class is not one that FP8 ZeRO extends",
    "Use deepspeed.pipe.PipelineModule with ZeRO stage 1.",
)
AUTOTP_STAGE_3 = Refusal(
    "a model that `deepspeed.tp_model_init` splits, in ZeRO stage 3",
    "AutoTP's shards of ZeRO-3's shards are not tested in FP8 (DeepSpeed itself refuses them before 0.19.8)",
    'Use "stage": 1 or 2, or shard the model by fp8_ds.tp.parallelize.',
)
AUTOTP_PIPELINE = Refusal(
    "a PipelineModule that AutoTP splits",
    "its stages have groups of their own, and DeepSpeed does not test the two together",
    'Remove "tensor_parallel" and `deepspeed.tp_model_init`.',
)
PIPELINE_FROM_THE_END = Refusal(
    "a PipelineModule with negative numbers in `linear.filter_fqns`",
    "a stage has entries of its own, which do not tell where the model ends",
    'Name linears by the number of their entry: `"23."` is all of entry 23, `"0."` that of 10 and 20, too.',
)
COMPILED_WRAPPER = Refusal(
    "a model with modules that `torch.compile(module)` has wrapped, in ZeRO stage 3",
    "DeepSpeed puts the inner module's parameters out of its reach and fails in the first forward, in bf16 as well",
    "Compile in place by `module.compile()`, or all of it by `engine.compile()`.",
)
PARALLEL_SCHEDULE = Refusal(
    "tensor-parallel layers with `schedule`, or `engine.set_layer_precision`",
    "their gathers move FP8 only",
    'Remove "schedule"; layers that shall not be in FP8 go into "linear.filter_fqns".',
)
MODEL_REFUSALS = (
    EXPERTS,
    STORED_IN_FP8,
    STORED_AND_SHARDED,
    STORED_WITHOUT_POWERS,
    DUAL_PIPE,
    AUTOTP_STAGE_3,
    AUTOTP_PIPELINE,
    PIPELINE_FROM_THE_END,
    COMPILED_WRAPPER,
    PARALLEL_SCHEDULE,
)


def refuse_model(model: Any, linear: LinearConfig) -> None:
    """Raise an UnsupportedError for a kind of model that FP8 ZeRO does not support, by its classes and names."""
    import deepspeed
    from deepspeed.runtime.pipe.module import PipelineModule

    from fp8_ds.nn.plan.ends import counts_from_the_end

    if isinstance(model, getattr(deepspeed, "DualPipeVModule", ())):
        raise DUAL_PIPE.error(type(model).__name__)
    from_the_end = list(filter(counts_from_the_end, linear.filter_fqns))
    if isinstance(model, PipelineModule) and from_the_end:
        raise PIPELINE_FROM_THE_END.error(", ".join(map(repr, from_the_end)))
    experts = [name for name, p in model.named_parameters() if getattr(p, "allreduce", True) is False]
    if experts:
        raise EXPERTS.error(", ".join(experts[:3]))


def refuse_stored(model: Any, config: Config, *, is_split: bool) -> None:
    """Refuse weights in FP8 that cannot be trained as their folder has them.

    Args:
        model: any model; one without weights in FP8 passes.
        config: DeepSpeed's configuration.
        is_split: whether masters are split.

    Raises:
        UnsupportedError: one of the rows above.
        ConfigError: a scale is no number that a weight can have.
    """
    from deepspeed.runtime.pipe.module import PipelineModule

    scales = {}
    own = own_experts(model)
    for fqn, module in model.named_modules():
        is_known = module in own or is_stock_experts(module) or is_linear_of_folder(module)
        beside = (*SCALE_NAMES, *(one for name in stored_names(module) for one in names_beside(module, name)))
        for name, p in module._parameters.items():
            if p is None or not p.is_floating_point() or p.element_size() > 1 or name in beside:
                continue
            found = f"{fqn}.{name} of a {type(module).__name__}".lstrip(".")
            if hasattr(p, "ds_id"):
                raise STORED_AND_SHARDED.error(found)
            stored = scales_of(module, name) if is_known else None
            if stored is None:
                raise STORED_IN_FP8.error(found)
            scales[f"{fqn}.{name}".lstrip(".")] = (stored.scale_inv, p.requires_grad)
    if not scales:
        return
    if isinstance(model, PipelineModule) or contexts_of(model) or any(n > 1 for n in autotp_sizes(config).values()):
        raise STORED_AND_SHARDED.error(next(iter(scales)))
    for name, (scale_inv, is_trainable) in scales.items():
        if not bool(((scale_inv == 0) | ((scale_inv >= SMALLEST) & (scale_inv <= LARGEST))).all()):
            raise ConfigError(
                f"model: expected scales of 0 or from 2**-100 to 2**100 for {name}, got "
                f"{float(scale_inv.min()):.3g} to {float(scale_inv.max()):.3g}. Copy the model's folder again."
            )
        if is_split and is_trainable and not bool(((scale_inv.frexp()[0] == 0.5) | (scale_inv == 0)).all()):
            raise STORED_WITHOUT_POWERS.error(f"such scales for {name}")


def refuse_wrapped(model: Any, stage: int) -> None:
    """Refuse modules that `torch.compile` has wrapped: ZeRO-3 does not find their parameters.

    ZeRO-3 takes a wrapper's empty `_parameters`, and the wrapper then sets them in the module inside it.
    Source: deepspeed/runtime/zero/parameter_offload.py `_inject_parameters` (0.19.8), torch/_dynamo/eval_frame.py
    `OptimizedModule.__setattr__`.
    """
    wrapper = getattr(sys.modules.get("torch._dynamo"), "OptimizedModule", None)
    if stage < 3 or wrapper is None:
        return
    wrapped = [name or "the model itself" for name, module in model.named_modules() if isinstance(module, wrapper)]
    if wrapped:
        raise COMPILED_WRAPPER.error(", ".join(wrapped[:3]))


NO_FP8 = Refusal(
    "compute capability below 8.9",
    "its tensor cores have no FP8",
    'Use another GPU, or "fp8": {"linear": {"backend": "reference"}}, which is slow.',
)
NOT_HOPPER = Refusal(
    "compute capability other than 9.0 with fp8.linear.recipe: blockwise",
    "cuBLASLt multiplies 1x128 and 128x128 blocks on Hopper only",
    'Use "recipe": "rowwise".',
)
OLD_CUDA = Refusal(
    "a torch built with CUDA below 12.9 with fp8.linear.recipe: blockwise",
    "cuBLASLt has block scales since then",
    'Install a torch built with CUDA 12.9 or later, or use "recipe": "rowwise".',
)
DEVICE_REFUSALS = (NO_FP8, NOT_HOPPER, OLD_CUDA)


def capabilities(device: torch.device) -> tuple[tuple[int, int] | None, tuple[int, int] | None]:
    """Return (compute capability, version of CUDA that torch was built with), each None where there is none."""
    import torch

    if device.type != "cuda" or torch.version.cuda is None:
        return None, None
    major, minor = torch.version.cuda.split(".")[:2]
    return torch.cuda.get_device_capability(device), (int(major), int(minor))


def refuse_device(recipe: str, backend: str, capability: tuple[int, int] | None, cuda: tuple[int, int] | None) -> None:
    """Raise an UnsupportedError if FP8 linears of this recipe do not run on this device.

    Args:
        recipe, backend: values of the "linear" block.
        capability: compute capability of this rank's GPU; None on CPU, where all recipes run.
        cuda: version that torch was built with; None for a build of another vendor, which is not checked.
    """
    if capability is None or cuda is None or backend == "reference":
        return
    if recipe != "blockwise":
        row = None if capability >= (8, 9) else NO_FP8
    elif capability != (9, 0):
        row = NOT_HOPPER
    else:
        row = None if cuda >= (12, 9) else OLD_CUDA
    if row is not None:
        raise UnsupportedError(
            f"fp8.linear.recipe: {recipe} with compute capability {capability[0]}.{capability[1]} and CUDA "
            f"{cuda[0]}.{cuda[1]}: {row.reason}. {row.remedy}"
        )


def refuse_mpu(model: Module, mpu: Any) -> None:
    """Refuse groups over which ZeRO would average different shards of a weight, or leave out ranks with the same one.

    Args:
        model: any model; for a PipelineModule its own `mpu` counts.
        mpu: the `mpu` that deepspeed.initialize is given.
    """
    from deepspeed.runtime.pipe.module import PipelineModule
    from deepspeed.utils.bwc import bwc_tensor_model_parallel_group

    if not (contexts := contexts_of(model)):
        return
    own = dist.get_rank()
    if isinstance(model, PipelineModule):
        mpu = model.mpu()
    if _shares_sequences(mpu):
        raise ConfigError(
            "mpu: expected the groups that the model is sharded over, got those of sequence parallelism (Ulysses), "
            "over which ZeRO would average different parts of a weight. Leave out one of the two."
        )
    for tp in contexts:
        members = dist.get_process_group_ranks(tp.group)
        shared, replicas = [own], list(range(dist.get_world_size()))
        if mpu is not None:
            shared = dist.get_process_group_ranks(bwc_tensor_model_parallel_group(mpu))
            replicas = dist.get_process_group_ranks(mpu.get_data_parallel_group())
        if sorted(shared) != sorted(members) or set(replicas) & set(members) != {own}:
            found = "none" if mpu is None else f"ranks {shared} with replicas on ranks {replicas}"
            raise ConfigError(
                f"mpu: expected the groups that the model is sharded over, ranks {members}, got {found}. Give "
                f"deepspeed.initialize those whose tp_group parallelize got: mpu=fp8_ds.tp.ParallelGroups({tp.size})."
            )


def refuse_added_parameters(model: Module) -> None:
    """Refuse Parameters in blocks of a TP-sharded model that `parallelize` has not seen, such as an adapter's: gradient
    and output would differ between ranks."""
    if added := added_parameters(model):
        raise ConfigError(
            f"model: expected in its blocks the Parameters that fp8_ds.tp.parallelize has sharded or kept, got "
            f"{added[0]} and {len(added) - 1} more, which came later. Adapters cannot be sharded: leave out these, "
            "or parallelize."
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
    for name, size in autotp_sizes(config).items():
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


def autotp_sizes(config: Config) -> dict[str, int]:
    """Return the sizes that AutoTP is set to, by the setting that says so; empty if it is off."""
    from deepspeed.runtime.tensor_parallel import init_utils

    size = number(block_of(config, "tensor_parallel").get("autotp_size"), 0)
    sizes = {"tensor_parallel.autotp_size": size} if size > 0 else {}
    if (recorded := init_utils._TP_MODEL_INIT_ARGS) is not None:
        sizes["deepspeed.tp_model_init: tp_size"] = recorded["tp_size"]
    return sizes


def refuse_second_sharding(model: Module, config: Config) -> None:
    """Refuse AutoTP for a TP-sharded model, because it would take a rank's shards for the whole."""
    for name, size in autotp_sizes(config).items():
        if size > 1 and contexts_of(model):
            raise ConfigError(
                f"{name}: expected none with a model that fp8_ds.tp.parallelize has sharded, got {size}. Leave out one "
                "of the two."
            )


def refuse_one_ranks_part(module: Module, autotp_size: int, what: str) -> None:
    """Refuse `what`, a function of DeepSpeed that takes a rank's own parameters for whole ones, where they are not."""
    if contexts_of(module):
        raise UnsupportedError(
            f"{what}: expected a whole model, got one that fp8_ds.tp.parallelize has sharded; it would hold one rank's "
            "part. Use engine.save_checkpoint and `fp8-ds convert --to safetensors`, which joins the parts, or "
            "engine.save_fp8_pretrained."
        )
    if autotp_size > 1:
        raise UnsupportedError(
            f"{what}: expected a whole model, got tensor_parallel.autotp_size {autotp_size}; it would hold one rank's "
            "part. Call engine._consolidated_16bit_state_dict() on all ranks, as transformers and accelerate do, and "
            "save what it returns on rank 0."
        )
