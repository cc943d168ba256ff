"""Every symbol of DeepSpeed that we override or patch, and every private one that we rely on: why, and its signature.

Public functions that we only call have no row. seam_check.py checks all rows, and compares function bodies with those
of the tested versions, before the first FP8 engine is built.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version

from packaging.version import Version

TESTED_VERSIONS = ("0.18.9", "0.19.0", "0.19.8")
"""DeepSpeed versions that the suite runs against; bodies of their symbols are in seam_hashes.json."""


@dataclass(frozen=True)
class Seam:
    """One symbol of DeepSpeed that fp8_ds overrides, patches or relies on.

    Attributes:
        module, name: where the symbol is; `name` is dotted within the module.
        parameters: names that it must accept, in this order from the start ("self" included).
        kind: "wrap" or "swap" (module attribute replaced), "override" (mix-in method before DeepSpeed's own),
            "closure" (per-parameter attribute replaced), "rely" (called or mirrored, not replaced).
        why: what fp8_ds does there.
        since: first version that has the symbol; older ones do not need the row.
    """

    module: str
    name: str
    parameters: tuple[str, ...]
    kind: str
    why: str
    since: str = ""

    @property
    def path(self) -> str:
        return f"{self.module}.{self.name}"


_ENGINE = "deepspeed.runtime.engine"
_FLOPS = "deepspeed.profiling.flops_profiler.profiler"
_S12 = "deepspeed.runtime.zero.stage_1_and_2"
_S3 = "deepspeed.runtime.zero.stage3"
_PP = "deepspeed.runtime.zero.partition_parameters"
_COORD = "deepspeed.runtime.zero.partitioned_param_coordinator"
_TP = "deepspeed.module_inject.layers"
_Z3 = "DeepSpeedZeroOptimizer_Stage3"


def _methods_of(module: str, owner: str) -> Callable[..., Seam]:
    """Return a function that makes rows of methods of the class `owner`, which has parameters after `self`."""

    def seam(name: str, parameters: tuple[str, ...], why: str, kind: str = "override", since: str = "") -> Seam:
        return Seam(module, f"{owner}.{name}", ("self", *parameters), kind, why, since)

    return seam


_engine = _methods_of(_ENGINE, "DeepSpeedEngine")
_zero12 = _methods_of(_S12, "DeepSpeedZeroOptimizer")
_zero3 = _methods_of(_S3, _Z3)

SEAMS = (
    Seam("deepspeed", "initialize", ("args", "model", "optimizer"), "wrap", "reads the fp8 block"),
    Seam("deepspeed", "DeepSpeedEngine", (), "swap", "our engine during one initialize call"),
    Seam("deepspeed", "PipelineEngine", (), "swap", "our engine during one initialize call"),
    Seam(
        "deepspeed.runtime.tensor_parallel.init_utils",
        "record_tp_model_init_args",
        ("tp_size", "dtype", "tp_group"),
        "rely",
        "keeps the size that deepspeed.tp_model_init was given",
    ),
    _engine("_configure_distributed_model", ("model",), "converts linears"),
    _engine("_configure_zero_optimizer", ("optimizer",), "retypes ZeRO"),
    _engine("__init__", ("args", "model"), "starts what follows a step"),
    _engine("destroy", (), "the last report"),
    _engine("_take_model_step", ("lr_kwargs",), "schedule, monitor, guard"),
    _engine("forward", ("inputs", "kwargs"), "from here on layers stay"),
    _engine("compile", ("backend", "compile_kwargs"), "layers become leaves"),
    Seam(_FLOPS, "FlopsProfiler.start_profile", ("self", "ignore_list"), "override", "counts FP8 layers, too"),
    _engine("_configure_basic_optimizer", ("model_parameters",), "torch's Adam to be taken over by FP8 states"),
    Seam(_ENGINE, "DeepSpeedZeroOptimizer", (), "swap", "FP8 states: one without dense states is built"),
    _engine("save_checkpoint", ("save_dir", "tag", "client_state"), "exports"),
    _engine("_copy_recovery_script", ("save_path",), "errors reach all ranks"),
    _engine(
        "_common_checkpoint_state",
        ("module_state_dict", "zero_optimizer_state", "save_frozen_param"),
        "ranks that share a sequence are no tensor-parallel ones",
        since="0.19.8",
    ),
    _engine("_get_ckpt_name", ("checkpoints_path", "tag"), "own model file", kind="rely"),
    _engine("_get_zero_param_shapes", (), "compared with a checkpoint's", kind="rely"),
    _engine("load_checkpoint", ("load_dir", "tag"), "restores our state"),
    _engine("load_module_state_dict", ("checkpoint",), "masters of a load"),
    _engine("save_16bit_model", ("save_dir",), "bf16 of masters"),
    _engine("_zero3_consolidated_16bit_state_dict", (), "not of one rank"),
    Seam(_S12, "all_gather_dp_groups", ("groups_flat",), "wrap", "asks the owner of an FP8 optimizer's groups"),
    _zero12("step", ("closure",), "marks the gather of a step; Adam: replaced"),
    _zero12("_lazy_init_hp_params_optimizer_state", (), "fp32 states: links moments after our step", kind="rely"),
    _zero12("check_overflow", ("partition_gradients",), "in a step from the norms, launched before the host waits"),
    _zero12("get_grad_norm_direct", ("gradients", "params", "norm_type"), "a norm is not measured twice in a step"),
    _zero12("backward_epilogue", (), "gradients that wait leave CUDA graphs"),
    _zero12("_update_model_bit16_weights", ("group_index",), "done by the gather"),
    _zero12("_link_all_hp_params", (), "fragments without a bf16 copy"),
    _zero12("_restore_from_bit16_weights", (), "masters from FP8 and own bf16"),
    _zero12("allreduce_and_scatter", ("bucket", "communication_data_type"), "in FP8"),
    _zero12(
        "average_tensor",
        ("tensor", "communication_data_type"),
        "divides the bucket, splits it by rank in buffer order, and calls allreduce_and_scatter",
        kind="rely",
    ),
    _zero12("process_gradients", ("param", "i"), "release: into a bucket at once"),
    _zero12("reduce_gradients", ("pipeline_parallel",), "release: last; one rank: none"),
    _zero12("copy_grads_in_partition", ("param",), "release: collects for the update"),
    _zero12("reduce_ipg_grads", ("comm_dtype",), "release: updates; one rank: none"),
    _zero12(
        "independent_gradient_partition_epilogue",
        (),
        "release: replaced, without the flat gradients; one rank: what p.grad holds is accumulated and handed over",
    ),
    _zero12(
        "reduce_ready_partitions_and_remove_grads",
        ("param", "i"),
        "release: fills buckets, empties full ones by reduce_ipg_grads; one rank: none",
    ),
    _zero12("setup_buckets", (), "release: allocates buckets; one rank: none"),
    _zero12("_release_ipg_buffers", (), "release: frees buckets", kind="rely"),
    _zero12("get_flat_partition", (), "FP8 states: reduced gradients in partition order", kind="rely"),
    _zero12("_get_groups_without_padding", ("groups_with_padding",), "dense masters"),
    _zero12("load_state_dict", ("state_dict_list",), "quantises after it"),
    _zero12("offload_states", ("include", "device"), "moves compact buffers"),
    _zero12("reload_states", ("non_blocking",), "moves compact buffers"),
    Seam(
        "deepspeed.utils.tensor_fragment",
        "tensor_fragment.get_hp_fragment",
        ("self", "optim_state_key"),
        "override",
        "FP8 states: de-quantises",
    ),
    Seam(_S3, _Z3, (), "swap", "FP8 states: one without dense states is built"),
    _zero3("initialize_optimizer_states", (), "FP8 states: left out"),
    _zero3("_create_fp32_partitions", (), "split masters: tensors of no size"),
    _zero3("_setup_for_real_optimizer", (), "release: no buffer for gradients"),
    _zero3(
        "_get_fp32_grad_state_partition", ("param", "release_swap_buffers"), "release: there are no gradients to read"
    ),
    _zero3("_rigid_state_dict", (), "FP8 states: dense masters and moments"),
    _zero3(
        "_get_fp32_opt_state_partition",
        ("param", "release_swap_buffers", "optim_state_key"),
        "FP8 states: de-quantises",
    ),
    _zero3("set_full_hp_param", ("value", "param", "optim_state_key"), "quantises"),
    _zero3("set_local_hp_param", ("value", "param", "optim_state_key"), "quantises"),
    _zero3("_pre_step", (), "no stale gradients; begins a step"),
    _zero3("zero_grad", ("set_to_none",), "no stale gradients of dropped micro-batches"),
    _zero3("_partition_all_parameters", (), "Adam: releases weights before a step", kind="rely"),
    _zero3("step", ("closure",), "histories of a skipped step; Adam: replaced"),
    _zero3("_post_step", ("timer_names",), "quantises; gathers persistents by list"),
    _zero3("checkpoint_event_epilogue", (), "likewise, after a save or load", kind="rely"),
    _zero3(
        "create_reduce_and_remove_grad_hooks",
        (),
        "a leaf's hook uses none of its arguments: called by hooks of parameters, once compile() has made leaves",
        kind="rely",
    ),
    _zero3("_reassign_or_swap_out_partitioned_parameters", ("sub_group_id",), "copies only bf16 shards that exist"),
    _zero3("load_state_dict", ("state_dict_list",), "re-quantises"),
    _zero3("_restore_from_bit16_weights", (), "masters from bf16 shards"),
    _zero3(
        f"_{_Z3}__avg_scatter_grads",
        ("params_to_reduce", "communication_data_type"),
        "gradients reduced in FP8; in bf16 split by the next row's",
    ),
    Seam(_S3, "reduce_scatter_coalesced", ("tensors", "group"), "swap", "one launch splits for all ranks"),
    _zero3(
        "partition_grads",
        ("params_to_release", "grad_partitions"),
        "release: the update. Without: adds up partitions, shorter than their buffer, to no stale gradients",
    ),
    _zero3(
        "independent_gradient_partition_epilogue",
        (),
        "FP8 states: its one wait, for `reduce_and_partition_stream`, is the device's and not the host's",
    ),
    _zero3("offload_states", ("include", "device"), "moves FP8 shards"),
    _zero3("reload_states", ("non_blocking",), "moves FP8 shards"),
    _zero3("_set_fp16_partitioned_groups_flat", (), "layout of the bf16 flat buffer", kind="rely"),
    Seam(
        "deepspeed.ops.adam.fused_adam",
        "FusedAdam.step",
        ("self", "closure", "grads", "output_params", "scale", "grad_norms", "grad_scaler"),
        "rely",
        "its states and counts of steps, which our step keeps",
    ),
    Seam(_PP, "Init._convert_to_deepspeed_param", ("self", "param"), "closure", "its three closures are replaced"),
    Seam(_PP, "Init._partition_param", ("self", "param"), "rely", "frees data, writes ds_tensor"),
    Seam(_PP, "free_param", ("param",), "rely", "frees data; mirrored for a weight gathered in FP8"),
    Seam(_PP, "AllGatherCoalescedHandle.wait", ("self", "handle_dependency"), "rely", "the handle protocol"),
    Seam(
        "deepspeed.runtime.zero.parameter_offload",
        "DeepSpeedZeRoOffload._register_deepspeed_module",
        ("self", "module"),
        "rely",
        "its hooks are called by a compiled model, not traced; a leaf's read its flag in each call",
    ),
    Seam(
        _COORD,
        "PartitionedParameterCoordinator._invalidate_trace",
        ("self",),
        "rely",
        "called once compile() has made leaves",
    ),
    Seam(
        _COORD,
        "PartitionedParameterCoordinator._PartitionedParameterCoordinator__params_to_release",
        ("self", "submodule_to_release", "step_id"),
        "rely",
        "its cache is emptied then",
    ),
    Seam(
        _COORD,
        "PartitionedParameterCoordinator._fetch_sub_module_impl",
        ("self", "current_submodule", "forward", "is_leaf"),
        "rely",
        "reads the limit of fetches ahead, 4 of 2 with leaves, and what compile() sets, prefetch bucket and live "
        "weights; waits, where the handle removes its leaf's others",
    ),
    Seam(_COORD, "PartitionedParameterCoordinator.release_sub_module", ("self",), "rely", "releases by partition"),
    _engine("_replace_module_consolidated_state_dict", (), "bf16 of masters"),
    Seam(_TP, "LinearLayer.forward", ("self", "input"), "override", "x W^T in FP8; for all classes that inherit it"),
    Seam(_TP, "LinearAllreduce.forward", ("self", "input"), "override", "likewise"),
    Seam(_TP, "SubParamLinearLayer.forward", ("self", "input"), "override", "likewise"),
    Seam(_TP, "SubParamLinearAllreduce.forward", ("self", "input"), "override", "likewise"),
    Seam(_TP, "LinearAllreduceWithReplicatedInput.forward", ("self", "input"), "override", "likewise", since="0.19.8"),
    Seam(_TP, "RowParallel.forward", ("ctx", "group", "input"), "rely", "all-reduces the output in place"),
    Seam(
        _TP,
        "ScatterToTensorParallelRegion.forward",
        ("ctx", "group", "input", "partition_sizes", "tp_index"),
        "rely",
        "a rank's features of a whole input",
        since="0.19.8",
    ),
    Seam(
        _TP,
        "GatherFromTensorParallelRegion.forward",
        ("ctx", "group", "input", "partition_sizes"),
        "rely",
        "a gathered output in bf16; mirrored in FP8",
        since="0.19.8",
    ),
    Seam(
        "deepspeed.sequence.layer",
        "DistributedAttention.forward",
        ("self", "query", "key", "value", "batch_dim_idx", "rotary_pos_emb"),
        "override",
        "tp/ulysses.py: one exchange of q, k and v in FP8",
    ),
    Seam(
        "deepspeed.runtime.sequence_parallel.ulysses_sp",
        "UlyssesSPAttentionHF._combine_local_sequences",
        ("self", "query", "key", "value"),
        "override",
        "tp/ulysses.py: one exchange of q, k and v in FP8",
    ),
)


def rows() -> list[Seam]:
    """Return the rows that the installed DeepSpeed must have."""
    return [seam for seam in SEAMS if not seam.since or Version(installed_version()) >= Version(seam.since)]


def installed_version() -> str:
    """Return the version of DeepSpeed."""
    return version("deepspeed")
