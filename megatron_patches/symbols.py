"""One symbol of Megatron, and those that we call, mirror or override in subclasses without replacing them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["wrap", "swap", "rely"]
Part = Literal["core", "training"]


@dataclass(frozen=True)
class Patch:
    """One symbol.

    Attributes:
        module, name: where it is, `name` dotted within the module.
        parameters: names it must accept, in this order from the start ("self" included).
        kind: "wrap" (what replaces it calls the stock one), "swap" (replaced by another), "rely" (subclassed, called,
            or mirrored; not replaced).
        why: what we do there.
        tried_first: the less invasive way that does not do, for what is replaced.
        versions: of Megatron that have it.
    """

    module: str
    name: str
    parameters: tuple[str, ...]
    kind: Kind
    why: str
    tried_first: str = ""
    versions: str = ""

    @property
    def path(self) -> str:
        return f"{self.module}.{self.name}"

    @property
    def part(self) -> Part:
        """megatron.training is in clones only (and in wheels from 0.17)."""
        return "training" if self.module.startswith("megatron.training") else "core"


def _methods(
    module: str, owner: str, why: str, methods: dict[str, tuple[str, ...]], versions: str = ""
) -> tuple[Patch, ...]:
    """Rows of one class; `methods` by name with what they take after self or cls."""
    return tuple(
        Patch(module, f"{owner}.{name}", taken, "rely", why, versions=versions) for name, taken in methods.items()
    )


_LAYERS = "megatron.core.tensor_parallel.layers"
_SPECS = "megatron.core.models.gpt.gpt_layer_specs"
_OPTIMIZER = "megatron.core.optimizer"
_SELF = ("self",)
_ATTENTION_CALL = ("self", "query", "key", "value", "attention_mask")

RELIED = (
    Patch(_LAYERS, "ColumnParallelLinear._forward_impl", ("self", "input", "weight"), "rely", "linear.py: FP8 GEMMs"),
    Patch(_LAYERS, "ColumnParallelLinear.forward", ("self", "input_", "weight"), "rely", "linear.py: calls the former"),
    Patch(_LAYERS, "RowParallelLinear._forward_impl", ("self", "input", "weight"), "rely", "linear.py: FP8 GEMMs"),
    Patch(_LAYERS, "RowParallelLinear.forward", ("self", "input_"), "rely", "linear.py: mirrored with a FP8 gather"),
    Patch(
        "megatron.core.fp8_utils",
        "is_first_last_bf16_layer",
        ("config", "layer_no"),
        "rely",
        "--first-last-layers-bf16 for layers without Transformer Engine and for attention",
    ),
    Patch(
        "megatron.core.transformer.transformer_layer",
        "TransformerLayer.__init__",
        ("self", "config", "submodules", "layer_number"),
        "rely",
        "layer_specs.py: a layer that knows which of its linears stay bf16",
    ),
    Patch(_SPECS, "get_gpt_layer_local_spec", (), "rely", "layer_specs.py: linears and attention replaced in a copy"),
    Patch(
        _SPECS,
        "get_gpt_layer_with_transformer_engine_spec",
        (),
        "rely",
        "layer_specs.py: attention replaced in a copy",
    ),
    Patch(
        _SPECS,
        "get_gpt_decoder_block_spec",
        ("config", "use_transformer_engine"),
        "rely",
        "layer_specs.py: MoE; replaced in copies of its layer specs",
    ),
    Patch(
        "megatron.core.pipeline_parallel.schedules",
        "set_current_microbatch",
        ("model", "microbatch_id"),
        "rely",
        "weights.py: layers are told which micro-batch comes next",
    ),
    Patch(
        "megatron.core.pipeline_parallel.schedules",
        "forward_step",
        ("forward_step_func", "data_iterator", "model"),
        "rely",
        "weights.py: calls the former before each forward",
    ),
    Patch(
        "megatron.core.transformer.torch_norm",
        "WrappedTorchNorm.__new__",
        ("cls", "config", "hidden_size", "eps"),
        "rely",
        "norm.py: makes the norm",
    ),
    *_methods(
        "megatron.core.transformer.dot_product_attention",
        "DotProductAttention",
        "attention.py: subclassed; what ours does not compute is left to it",
        {
            "__init__": ("self", "config", "layer_number", "attn_mask_type", "attention_type"),
            "forward": _ATTENTION_CALL,
        },
    ),
    Patch(
        "megatron.core.transformer.utils",
        "is_layer_window_attention",
        ("window_size", "window_attn_skip_freq", "layer_number"),
        "rely",
        "attention.py: which layers have a window",
    ),
    *_methods(
        f"{_OPTIMIZER}.distrib_optimizer",
        "DistributedOptimizer",
        "optimizer_sharded.py: overridden or called in a subclass",
        {
            "__init__": ("self", "optimizer", "config", "grad_scaler", "init_state_fn", "model_chunks"),
            "_build_model_and_main_param_groups": (
                "gbuf_ranges",
                "param_gbuf_map",
                "opt_group_ranges",
                "config",
            ),
            "_get_model_param_range_map": ("self", "param"),
            "_copy_model_grads_to_main_grads": _SELF,
            "_copy_main_params_to_model_params": _SELF,
            "_copy_model_params_to_main_params": ("self", "state_dict"),
            "_build_model_param_to_state_dict_param_map": ("self", "state_dict"),
            "_get_main_param_and_optimizer_states": ("self", "model_param"),
            "_set_main_param_and_optimizer_states": ("self", "model_param", "tensors"),
            "state_dict": _SELF,
            "load_state_dict": ("self", "state_dict"),
            "load_parameter_state_from_dp_zero": ("self", "state_dict", "update_legacy_format"),
            "sharded_state_dict": ("self", "model_sharded_state_dict", "is_loading"),
        },
    ),
    Patch(
        f"{_OPTIMIZER}.distrib_optimizer",
        "HAVE_APEX_OR_TE",
        (),
        "rely",
        "optimizer_adam.py: where stock Adam counts its steps",
    ),
    *_methods(
        f"{_OPTIMIZER}.optimizer",
        "MixedPrecisionOptimizer",
        "optimizer_classes.py: mirrored without float32 parameters",
        {
            "__init__": ("self", "optimizer", "config", "grad_scaler", "init_state_fn"),
            "prepare_grads": _SELF,
            "step_with_ready_grads": _SELF,
            "reload_model_params": ("self", "state_dict"),
        },
    ),
    *_methods(
        f"{_OPTIMIZER}.optimizer",
        "Float16OptimizerWithFloat16Params",
        "optimizer_classes.py: overridden in a subclass",
        {
            "__init__": ("self", "optimizer", "config", "grad_scaler", "init_state_fn"),
            "_collect_main_grad_data_for_unscaling": _SELF,
            "_copy_model_grads_to_main_grads": _SELF,
            "_copy_main_params_to_model_params": _SELF,
            "_copy_model_params_to_main_params": ("self", "state_dict"),
            "state_dict": ("self", "is_loading"),
            "load_state_dict": ("self", "state_dict"),
        },
    ),
    *_methods(
        f"{_OPTIMIZER}.optimizer",
        "ChainedOptimizer",
        "optimizer_classes.py: a norm that is infinite or NaN skips the step",
        {"step": _SELF, "get_grad_norm": _SELF, "step_with_ready_grads": _SELF},
    ),
    Patch(f"{_OPTIMIZER}.optimizer", "MegatronOptimizer.get_parameters", _SELF, "rely", "optimizer_classes.py: called"),
    Patch("megatron.core.fp8_utils", "is_float8tensor", ("tensor",), "rely", "optimizer_sharded.py: which are FP8"),
    Patch(
        "megatron.core.fp8_utils",
        "post_all_gather_processing",
        ("model_params",),
        "rely",
        "optimizer_fp8.py: Transformer Engine learns of new bytes",
    ),
    Patch(
        _LAYERS,
        "copy_tensor_model_parallel_attributes",
        ("destination_tensor", "source_tensor"),
        "rely",
        "optimizer_sharded.py: norms ask shards for them",
    ),
    *(
        Patch(
            module,
            name,
            ("destination", "source"),
            "rely",
            "optimizer_sharded.py: shards without a tensor of stock's get the same attributes",
            versions=">=0.19",
        )
        for module, name in (
            (_LAYERS, "copy_gtp_attributes"),
            (f"{_OPTIMIZER}.optimizer", "copy_optimizer_param_metadata"),
        )
    ),
    Patch(
        "megatron.core.distributed.distributed_data_parallel",
        "DistributedDataParallel.start_param_sync",
        ("self", "unused", "force_sync"),
        "rely",
        "optimizer_sharded.py: weights are gathered after a checkpoint has been loaded",
    ),
)
