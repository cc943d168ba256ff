"""Every symbol of DeepSpeed that we override or patch, and every private one that we rely on: why, and its signature.

Public functions that we only call have no row. seam_check.py checks all rows, and compares function bodies with those
of the tested versions, before the first FP8 engine is built.
"""

from __future__ import annotations

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
_Z12 = "DeepSpeedZeroOptimizer"
_Z3 = "DeepSpeedZeroOptimizer_Stage3"

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
    Seam(_ENGINE, "DeepSpeedEngine._configure_distributed_model", ("self", "model"), "override", "converts linears"),
    Seam(_ENGINE, "DeepSpeedEngine._configure_zero_optimizer", ("self", "optimizer"), "override", "retypes ZeRO"),
    Seam(_ENGINE, "DeepSpeedEngine.__init__", ("self", "args", "model"), "override", "starts what follows a step"),
    Seam(_ENGINE, "DeepSpeedEngine.destroy", ("self",), "override", "the last report"),
    Seam(_ENGINE, "DeepSpeedEngine._take_model_step", ("self", "lr_kwargs"), "override", "schedule, monitor, guard"),
    Seam(_ENGINE, "DeepSpeedEngine.forward", ("self", "inputs", "kwargs"), "override", "from here on layers stay"),
    Seam(_ENGINE, "DeepSpeedEngine.compile", ("self", "backend", "compile_kwargs"), "override", "a hint on leaves"),
    Seam(_FLOPS, "FlopsProfiler.start_profile", ("self", "ignore_list"), "override", "counts FP8 layers, too"),
    Seam(
        _ENGINE,
        "DeepSpeedEngine._configure_basic_optimizer",
        ("self", "model_parameters"),
        "override",
        "torch's Adam to be taken over by FP8 states",
    ),
    Seam(_ENGINE, "DeepSpeedZeroOptimizer", (), "swap", "FP8 states: one without dense states is built"),
    Seam(
        _ENGINE, "DeepSpeedEngine.save_checkpoint", ("self", "save_dir", "tag", "client_state"), "override", "exports"
    ),
    Seam(_ENGINE, "DeepSpeedEngine._copy_recovery_script", ("self", "save_path"), "override", "errors reach all ranks"),
    Seam(
        _ENGINE,
        "DeepSpeedEngine._common_checkpoint_state",
        ("self", "module_state_dict", "zero_optimizer_state", "save_frozen_param"),
        "override",
        "ranks that share a sequence are no tensor-parallel ones",
        since="0.19.8",
    ),
    Seam(_ENGINE, "DeepSpeedEngine._get_ckpt_name", ("self", "checkpoints_path", "tag"), "rely", "own model file"),
    Seam(_ENGINE, "DeepSpeedEngine._get_zero_param_shapes", ("self",), "rely", "compared with a checkpoint's"),
    Seam(_ENGINE, "DeepSpeedEngine.load_checkpoint", ("self", "load_dir", "tag"), "override", "restores our state"),
    Seam(_ENGINE, "DeepSpeedEngine.load_module_state_dict", ("self", "checkpoint"), "override", "masters of a load"),
    Seam(_ENGINE, "DeepSpeedEngine.save_16bit_model", ("self", "save_dir"), "override", "bf16 of masters"),
    Seam(_ENGINE, "DeepSpeedEngine._zero3_consolidated_16bit_state_dict", ("self",), "override", "not of one rank"),
    Seam(_S12, "all_gather_dp_groups", ("groups_flat",), "wrap", "asks the owner of an FP8 optimizer's groups"),
    Seam(_S12, f"{_Z12}.step", ("self", "closure"), "override", "marks the gather of a step; FP8 states: replaced"),
    Seam(
        _S12,
        f"{_Z12}.check_overflow",
        ("self", "partition_gradients"),
        "override",
        "in a step from the norms, launched before the host waits",
    ),
    Seam(
        _S12,
        f"{_Z12}.get_grad_norm_direct",
        ("self", "gradients", "params", "norm_type"),
        "override",
        "a norm is not measured twice in a step",
    ),
    Seam(_S12, f"{_Z12}.backward_epilogue", ("self",), "override", "gradients that wait leave CUDA graphs"),
    Seam(_S12, f"{_Z12}._update_model_bit16_weights", ("self", "group_index"), "override", "done by the gather"),
    Seam(_S12, f"{_Z12}._link_all_hp_params", ("self",), "override", "fragments without a bf16 copy"),
    Seam(_S12, f"{_Z12}._restore_from_bit16_weights", ("self",), "override", "masters from FP8 and own bf16"),
    Seam(_S12, f"{_Z12}.allreduce_and_scatter", ("self", "bucket", "communication_data_type"), "override", "in FP8"),
    Seam(
        _S12,
        f"{_Z12}.average_tensor",
        ("self", "tensor", "communication_data_type"),
        "rely",
        "divides the bucket, splits it by rank in buffer order, and calls allreduce_and_scatter",
    ),
    Seam(_S12, f"{_Z12}.process_gradients", ("self", "param", "i"), "override", "release: into a bucket at once"),
    Seam(_S12, f"{_Z12}.reduce_gradients", ("self", "pipeline_parallel"), "override", "release: last; one rank: none"),
    Seam(_S12, f"{_Z12}.copy_grads_in_partition", ("self", "param"), "override", "release: collects for the update"),
    Seam(_S12, f"{_Z12}.reduce_ipg_grads", ("self", "comm_dtype"), "override", "release: updates; one rank: none"),
    Seam(
        _S12,
        f"{_Z12}.independent_gradient_partition_epilogue",
        ("self",),
        "override",
        "release: replaced, without the flat gradients; one rank: what p.grad holds is accumulated and handed over",
    ),
    Seam(
        _S12,
        f"{_Z12}.reduce_ready_partitions_and_remove_grads",
        ("self", "param", "i"),
        "override",
        "release: fills buckets, empties full ones by reduce_ipg_grads; one rank: none",
    ),
    Seam(_S12, f"{_Z12}.setup_buckets", ("self",), "override", "release: allocates buckets; one rank: none"),
    Seam(_S12, f"{_Z12}._release_ipg_buffers", ("self",), "rely", "release: frees buckets"),
    Seam(_S12, f"{_Z12}.get_flat_partition", ("self",), "rely", "FP8 states: reduced gradients in partition order"),
    Seam(_S12, f"{_Z12}._get_groups_without_padding", ("self", "groups_with_padding"), "override", "dense masters"),
    Seam(_S12, f"{_Z12}.load_state_dict", ("self", "state_dict_list"), "override", "quantises after it"),
    Seam(_S12, f"{_Z12}.offload_states", ("self", "include", "device"), "override", "moves compact buffers"),
    Seam(_S12, f"{_Z12}.reload_states", ("self", "non_blocking"), "override", "moves compact buffers"),
    Seam(
        "deepspeed.utils.tensor_fragment",
        "tensor_fragment.get_hp_fragment",
        ("self", "optim_state_key"),
        "override",
        "FP8 states: de-quantises",
    ),
    Seam(_S3, _Z3, (), "swap", "FP8 states: one without dense states is built"),
    Seam(_S3, f"{_Z3}.initialize_optimizer_states", ("self",), "override", "FP8 states: left out"),
    Seam(_S3, f"{_Z3}._create_fp32_partitions", ("self",), "override", "split masters: tensors of no size"),
    Seam(_S3, f"{_Z3}._setup_for_real_optimizer", ("self",), "override", "release: no buffer for gradients"),
    Seam(
        _S3,
        f"{_Z3}._get_fp32_grad_state_partition",
        ("self", "param", "release_swap_buffers"),
        "override",
        "release: there are no gradients to read",
    ),
    Seam(_S3, f"{_Z3}._rigid_state_dict", ("self",), "override", "FP8 states: dense masters and moments"),
    Seam(
        _S3,
        f"{_Z3}._get_fp32_opt_state_partition",
        ("self", "param", "release_swap_buffers", "optim_state_key"),
        "override",
        "FP8 states: de-quantises",
    ),
    Seam(_S3, f"{_Z3}.set_full_hp_param", ("self", "value", "param", "optim_state_key"), "override", "quantises"),
    Seam(_S3, f"{_Z3}.set_local_hp_param", ("self", "value", "param", "optim_state_key"), "override", "quantises"),
    Seam(_S3, f"{_Z3}._pre_step", ("self",), "override", "no stale gradients; begins a step"),
    Seam(_S3, f"{_Z3}.zero_grad", ("self", "set_to_none"), "override", "no stale gradients of dropped micro-batches"),
    Seam(_S3, f"{_Z3}._partition_all_parameters", ("self",), "rely", "FP8 states: releases weights before a step"),
    Seam(_S3, f"{_Z3}.step", ("self", "closure"), "override", "histories of a skipped step; FP8 states: replaced"),
    Seam(_S3, f"{_Z3}._post_step", ("self", "timer_names"), "override", "quantises; gathers persistents by list"),
    Seam(_S3, f"{_Z3}.checkpoint_event_epilogue", ("self",), "rely", "likewise, after a save or load"),
    Seam(
        _S3,
        f"{_Z3}._reassign_or_swap_out_partitioned_parameters",
        ("self", "sub_group_id"),
        "override",
        "copies only bf16 shards that exist",
    ),
    Seam(_S3, f"{_Z3}.load_state_dict", ("self", "state_dict_list"), "override", "re-quantises"),
    Seam(_S3, f"{_Z3}._restore_from_bit16_weights", ("self",), "override", "masters from bf16 shards"),
    Seam(
        _S3,
        f"{_Z3}._{_Z3}__avg_scatter_grads",
        ("self", "params_to_reduce", "communication_data_type"),
        "override",
        "gradients reduced in FP8; in bf16 split by the next row's",
    ),
    Seam(_S3, "reduce_scatter_coalesced", ("tensors", "group"), "swap", "one launch splits for all ranks"),
    Seam(
        _S3,
        f"{_Z3}.partition_grads",
        ("self", "params_to_release", "grad_partitions"),
        "override",
        "release: the update. Without: adds up partitions, shorter than their buffer, to no stale gradients",
    ),
    Seam(
        _S3,
        f"{_Z3}.independent_gradient_partition_epilogue",
        ("self",),
        "override",
        "FP8 states: its one wait, for `reduce_and_partition_stream`, is the device's and not the host's",
    ),
    Seam(_S3, f"{_Z3}.offload_states", ("self", "include", "device"), "override", "moves FP8 shards"),
    Seam(_S3, f"{_Z3}.reload_states", ("self", "non_blocking"), "override", "moves FP8 shards"),
    Seam(_S3, f"{_Z3}._set_fp16_partitioned_groups_flat", ("self",), "rely", "layout of the bf16 flat buffer"),
    Seam(_PP, "Init._convert_to_deepspeed_param", ("self", "param"), "closure", "its three closures are replaced"),
    Seam(_PP, "Init._partition_param", ("self", "param"), "rely", "frees data, writes ds_tensor"),
    Seam(_PP, "free_param", ("param",), "rely", "frees data; mirrored for a weight gathered in FP8"),
    Seam(_PP, "AllGatherCoalescedHandle.wait", ("self", "handle_dependency"), "rely", "the handle protocol"),
    Seam(
        "deepspeed.runtime.zero.parameter_offload",
        "DeepSpeedZeRoOffload._register_deepspeed_module",
        ("self", "module"),
        "rely",
        "its hooks are called by a compiled model, not traced",
    ),
    Seam(
        _COORD,
        "PartitionedParameterCoordinator._fetch_sub_module_impl",
        ("self", "current_submodule", "forward", "is_leaf"),
        "rely",
        "reads the limit of fetches ahead, 4 of 2 with leaves; waits, where the handle removes its leaf's others",
    ),
    Seam(_COORD, "PartitionedParameterCoordinator.release_sub_module", ("self",), "rely", "releases by partition"),
    Seam(_ENGINE, "DeepSpeedEngine._replace_module_consolidated_state_dict", ("self",), "override", "bf16 of masters"),
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
