"""Row of one symbol of Megatron, and rows of those that we call, mirror or override without replacing them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

Kind = Literal["wrap", "swap", "rely"]
Part = Literal["core", "training"]


@dataclass(frozen=True)
class Patch:
    """Row of one symbol.

    Attributes:
        module, name: where it is, `name` dotted within the module.
        parameters: names it must accept, in this order from the start ("self" included).
        kind: "wrap" (what replaces it calls the original), "swap" (replaced by another), "rely" (subclassed, called,
            or mirrored; not replaced).
        why: what we do there.
        tried_first: for replaced symbols, a less invasive way, and why it does not do.
        versions: those of Megatron that have it.
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
        """Part of Megatron; megatron.training is in clones only (and in wheels from 0.17)."""
        return "training" if self.module.startswith("megatron.training") else "core"


def parse(text: str) -> tuple[Patch, ...]:
    """Parse rows from lines by indentation: a module and its versions; why (and what was tried first); symbols, with
    the parameters that are checked, and their kind where that is not "rely"."""
    found: list[Patch] = []
    module = versions = why = tried_first = ""
    for line in text.strip().splitlines():
        if line.startswith("    "):
            symbol, _, parameters = line.strip().rstrip(")").partition("(")
            *kinds, name = symbol.split(" ")
            names = tuple(parameters.split(", ")) if parameters else ()
            kind = cast(Kind, kinds[0] if kinds else "rely")
            found.append(Patch(module, name, names, kind, why, tried_first, versions))
        elif line.startswith("  tried first: "):
            tried_first = line.removeprefix("  tried first: ")
        elif line.startswith("  "):
            why, tried_first = line.strip(), ""
        else:
            module, _, versions = line.partition(" ")
    return tuple(found)


RELIED = parse("""
megatron.core.tensor_parallel.layers
  linear.py: FP8 GEMMs
    ColumnParallelLinear._forward_impl(self, input, weight)
    RowParallelLinear._forward_impl(self, input, weight)
  linear.py: calls the former
    ColumnParallelLinear.forward(self, input_, weight)
  linear.py: mirrored with a FP8 gather
    RowParallelLinear.forward(self, input_)
  optimizer_sharded.py: norms ask shards for them
    copy_tensor_model_parallel_attributes(destination_tensor, source_tensor)
megatron.core.fp8_utils
  --first-last-layers-bf16 for layers without Transformer Engine and for attention
    is_first_last_bf16_layer(config, layer_no)
  optimizer_sharded.py: which are FP8
    is_float8tensor(tensor)
  optimizer_fp8.py: Transformer Engine learns of new bytes
    post_all_gather_processing(model_params)
megatron.core.transformer.transformer_layer
  layer_specs.py: a layer that knows which of its linears stay bf16
    TransformerLayer.__init__(self, config, submodules, layer_number)
megatron.core.models.gpt.gpt_layer_specs
  layer_specs.py: linears and attention replaced in a copy
    get_gpt_layer_local_spec
  layer_specs.py: attention replaced in a copy
    get_gpt_layer_with_transformer_engine_spec
  layer_specs.py: MoE; replaced in copies of its layer specs
    get_gpt_decoder_block_spec(config, use_transformer_engine)
megatron.core.pipeline_parallel.schedules
  layer_specs.py: layers are told which micro-batch comes next
    set_current_microbatch(model, microbatch_id)
  layer_specs.py: calls the former before each forward
    forward_step(forward_step_func, data_iterator, model)
megatron.core.transformer.torch_norm
  norm.py: makes the norm
    WrappedTorchNorm.__new__(cls, config, hidden_size, eps)
megatron.core.transformer.dot_product_attention
  attention.py: subclassed; what ours does not compute is left to it
    DotProductAttention.__init__(self, config, layer_number, attn_mask_type, attention_type)
    DotProductAttention.forward(self, query, key, value, attention_mask)
megatron.core.transformer.utils
  attention.py: which layers have a window
    is_layer_window_attention(window_size, window_attn_skip_freq, layer_number)
megatron.core.optimizer.distrib_optimizer
  optimizer_sharded.py: overridden or called in a subclass
    DistributedOptimizer.__init__(self, optimizer, config, grad_scaler, init_state_fn, model_chunks)
    DistributedOptimizer._build_model_and_main_param_groups(gbuf_ranges, param_gbuf_map, opt_group_ranges, config)
    DistributedOptimizer._get_model_param_range_map(self, param)
    DistributedOptimizer._copy_model_grads_to_main_grads(self)
    DistributedOptimizer._copy_main_params_to_model_params(self)
    DistributedOptimizer._copy_model_params_to_main_params(self, state_dict)
    DistributedOptimizer._build_model_param_to_state_dict_param_map(self, state_dict)
    DistributedOptimizer._get_main_param_and_optimizer_states(self, model_param)
    DistributedOptimizer._set_main_param_and_optimizer_states(self, model_param, tensors)
    DistributedOptimizer.state_dict(self)
    DistributedOptimizer.load_state_dict(self, state_dict)
    DistributedOptimizer.load_parameter_state_from_dp_zero(self, state_dict, update_legacy_format)
    DistributedOptimizer.sharded_state_dict(self, model_sharded_state_dict, is_loading)
  optimizer_adam.py: where Megatron's own Adam counts its steps
    HAVE_APEX_OR_TE
megatron.core.optimizer.optimizer
  optimizer_classes.py: mirrored without float32 parameters
    MixedPrecisionOptimizer.__init__(self, optimizer, config, grad_scaler, init_state_fn)
    MixedPrecisionOptimizer.prepare_grads(self)
    MixedPrecisionOptimizer.step_with_ready_grads(self)
    MixedPrecisionOptimizer.reload_model_params(self, state_dict)
  optimizer_classes.py: overridden in a subclass
    Float16OptimizerWithFloat16Params.__init__(self, optimizer, config, grad_scaler, init_state_fn)
    Float16OptimizerWithFloat16Params._collect_main_grad_data_for_unscaling(self)
    Float16OptimizerWithFloat16Params._copy_model_grads_to_main_grads(self)
    Float16OptimizerWithFloat16Params._copy_main_params_to_model_params(self)
    Float16OptimizerWithFloat16Params._copy_model_params_to_main_params(self, state_dict)
    Float16OptimizerWithFloat16Params.state_dict(self, is_loading)
    Float16OptimizerWithFloat16Params.load_state_dict(self, state_dict)
  optimizer_classes.py: a norm that is infinite or NaN skips the step
    ChainedOptimizer.step(self)
    ChainedOptimizer.get_grad_norm(self)
    ChainedOptimizer.step_with_ready_grads(self)
  optimizer_classes.py: called
    MegatronOptimizer.get_parameters(self)
megatron.core.tensor_parallel.layers >=0.19
  optimizer_sharded.py: shards without a tensor of Megatron's get the same attributes
    copy_gtp_attributes(destination, source)
megatron.core.optimizer.optimizer >=0.19
  optimizer_sharded.py: shards without a tensor of Megatron's get the same attributes
    copy_optimizer_param_metadata(destination, source)
megatron.core.distributed.distributed_data_parallel
  optimizer_sharded.py: weights are gathered after a checkpoint has been loaded
    DistributedDataParallel.start_param_sync(self, unused, force_sync)
""")
