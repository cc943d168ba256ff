"""Layer specs: Megatron's own, copied, with our attention and, without Transformer Engine, our linears in their slots.

`--spec megatron_patches.layer_specs gpt` under the stock pretrain_gpt.py; `gpt_fa3_fp8` and others name the attention.
These objects are made when this module is imported, from the arguments that Megatron has parsed by then. Elsewhere
call the functions.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import logging
import sys
from collections.abc import Callable
from typing import Any, cast

from megatron.core import parallel_state
from megatron.core.fp8_utils import is_first_last_bf16_layer
from megatron.core.models.gpt import gpt_layer_specs as stock_specs
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.utils import log_single_rank
from packaging.version import Version

from fp8_ds.attention import BACKENDS, require_backend
from fp8_ds.errors import ConfigError, UnsupportedError
from megatron_patches import compat, patches
from megatron_patches.arguments import check_masks, check_recipe, settings_from
from megatron_patches.attention import AttentionSettings, attention_class, current_device, left_to_stock
from megatron_patches.linear import Fp8ColumnParallelLinear, Fp8RowParallelLinear, MegatronFp8Linear
from megatron_patches.norm import SequenceParallelNorm
from megatron_patches.recipes import OTHER_ATTENTION, Fp8Settings, settings_of
from megatron_patches.refusals import (
    alternates,
    refuse_bf16_alone,
    refuse_everywhere,
    refuse_final_norm,
    refuse_other_layers,
    refuse_recomputation,
    require_engine,
)
from megatron_patches.registry import LayerRegistry
from megatron_patches.weights import StepWeights

_PREDICTS_BESIDE_SPEC = Version("0.17")


class RegisteredLayer(StepWeights):
    """Mix-in before a transformer layer: it is in the registry, and the linears of fp8_ds in it honour
    --first-last-layers-bf16, which Megatron does by a context of Transformer Engine's."""

    def __init__(self, *args: Any, registry: LayerRegistry, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        layer: Any = self
        registry.add(layer)
        self.step_linears = tuple(module for module in layer.modules() if isinstance(module, MegatronFp8Linear))
        if is_first_last_bf16_layer(layer.config, layer.layer_number - 1):
            for linear in self.step_linears:
                linear.keep_bf16("--first-last-layers-bf16")


@functools.cache
def _layer_class(stock: type) -> type:
    return type(f"Fp8{stock.__name__}", (RegisteredLayer, stock), {"__module__": __name__})


def _rewritten(spec: Any, change: Callable[[str, Any], Any], name: str = "") -> Any:
    """A copy of a spec in which `change(name of the slot, what is there)` has replaced what it gives another value for.

    Args:
        spec: a ModuleSpec, a dataclass of submodules, a list of specs, a functools.partial, or a leaf.
        change: for every node; children of what it replaces are not visited.
        name: of the slot of `spec`.
    """
    changed = change(name, spec)
    if changed is not spec:
        return changed
    if isinstance(spec, functools.partial):
        keywords = {key: _rewritten(value, change, key) for key, value in spec.keywords.items()}
        return functools.partial(_rewritten(spec.func, change, name), *spec.args, **keywords)
    if isinstance(spec, list):
        return [_rewritten(one, change, name) for one in spec]
    if not dataclasses.is_dataclass(spec) or isinstance(spec, type):
        return spec
    found = copy.copy(spec)
    for field in dataclasses.fields(spec):
        if isinstance(spec, ModuleSpec) and field.name != "submodules":
            continue
        value = getattr(spec, field.name)
        setattr(found, field.name, _rewritten(value, change, field.name))
    return found


def _is_empty(spec: Any) -> bool:
    """Whether it is of a pipeline stage without layers."""
    return isinstance(spec, TransformerBlockSubmodules) and not spec.layer_specs


def with_attention(spec: Any, settings: AttentionSettings) -> Any:
    """A copy of a layer or block spec whose attention is `fp8_ds.attention`; MLA keeps its own.

    Raises:
        UnsupportedError: there is no attention in it that could be replaced.
    """
    count = 0

    def change(name: str, node: Any) -> Any:
        nonlocal count
        if isinstance(node, ModuleSpec) and isinstance(node.module, type) and issubclass(node.module, MLASelfAttention):
            return copy.copy(node)
        if name != "core_attention":
            return node
        count += 1
        stock = node.module if isinstance(node, ModuleSpec) else node
        params = {**(node.params if isinstance(node, ModuleSpec) else {}), "fp8_attention": settings}
        return ModuleSpec(module=attention_class(stock), params=params)

    found = _rewritten(spec, change)
    if not count and not _is_empty(spec):
        raise UnsupportedError(
            f"--fp8-attention-backend: expected a layer spec with a core_attention that is not MLA's, got none. Leave "
            f"out --fp8-attention-backend {settings.backend}."
        )
    return found


def with_fp8_linears(spec: Any, settings: Fp8Settings) -> Any:
    """A copy of a local layer or block spec whose linears are computed by fp8_ds, experts' included.

    The linears of MLA stay Megatron's.

    Raises:
        UnsupportedError: there is no linear in it that could be replaced.
    """
    count = 0
    replaced = {ColumnParallelLinear: Fp8ColumnParallelLinear, RowParallelLinear: Fp8RowParallelLinear}

    def change(name: str, node: Any) -> Any:
        nonlocal count
        if isinstance(node, ModuleSpec) and isinstance(node.module, type) and issubclass(node.module, MLASelfAttention):
            return copy.copy(node)
        if not isinstance(node, type) or node not in replaced:
            return node
        count += 1
        return ModuleSpec(module=replaced[node], params={"fp8": settings})

    found = _rewritten(spec, change)
    if not count and not _is_empty(spec):
        raise UnsupportedError(
            "--transformer-impl: expected local with FP8 linears of fp8_ds, got a spec without Megatron's own linears. "
            "Pass --transformer-impl local."
        )
    return found


def with_sequence_parallel_norms(spec: Any) -> Any:
    """A copy of a layer or block spec in which torch's norms take sequence parallelism."""
    return _rewritten(spec, lambda name, node: SequenceParallelNorm if node is WrappedTorchNorm else node)


def with_registry(spec: Any, registry: LayerRegistry) -> Any:
    """A copy of a layer or block spec whose layers enter themselves into `registry`."""
    found = copy.copy(spec)
    if isinstance(spec, TransformerBlockSubmodules):
        found.layer_specs = [with_registry(one, registry) for one in spec.layer_specs]
    else:
        found.module = _layer_class(spec.module)
        found.params = {**spec.params, "registry": registry}
    return found


def registry_of(spec: Any) -> LayerRegistry | None:
    """That of a spec made here with at least one layer; None: of another."""
    if isinstance(spec, LaterSpec):
        return spec.registry
    layers = spec.layer_specs if isinstance(spec, TransformerBlockSubmodules) else [spec]
    return next((layer.params["registry"] for layer in layers if "registry" in getattr(layer, "params", {})), None)


def _accepted(function: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Those of `values` that this version's function takes."""
    parameters = inspect.signature(function).parameters
    return {name: value for name, value in values.items() if name in parameters}


def stock_layer_spec(config: Any, *, use_transformer_engine: bool, vp_stage: int | None = None) -> Any:
    """What Megatron builds its layers from: one ModuleSpec, or for MoE one for each layer of this pipeline stage.

    Args:
        config: a TransformerConfig.
        use_transformer_engine: --transformer-impl.
        vp_stage: the virtual pipeline stage, where Megatron says which.

    Raises:
        UnsupportedError: Megatron builds these layers only where it has no --spec; or dense and MoE layers alternate,
            and a virtual pipeline stage is not known: a spec is of one.
    """
    patches.check("core")
    refuse_other_layers(config)
    if alternates(config):
        if config.virtual_pipeline_model_parallel_size and vp_stage is None:
            raise UnsupportedError(
                "--num-layers-per-virtual-pipeline-stage: expected none with --spec and --moe-layer-freq "
                f"{config.moe_layer_freq}, got {config.virtual_pipeline_model_parallel_size} stages. Remove one."
            )
        return stock_specs.get_gpt_decoder_block_spec(
            config,
            use_transformer_engine=use_transformer_engine,
            normalization=config.normalization,
            qk_l2_norm=getattr(config, "qk_l2_norm", False),
            vp_stage=vp_stage,
        )
    values = {
        "num_experts": config.num_moe_experts,
        "moe_grouped_gemm": config.moe_grouped_gemm,
        "qk_layernorm": config.qk_layernorm,
        "multi_latent_attention": config.multi_latent_attention,
        "moe_use_legacy_grouped_gemm": getattr(config, "moe_use_legacy_grouped_gemm", False),
        "normalization": config.normalization,
        "qk_l2_norm": getattr(config, "qk_l2_norm", False),
        "use_te_activation_func": getattr(config, "use_te_activation_func", False),
        "use_te_op_fuser": getattr(config, "use_transformer_engine_op_fuser", False),
        "mla_down_proj_fusion": getattr(config, "mla_down_proj_fusion", False),
        "use_grouped_gemm_for_dense_mlp": getattr(config, "use_grouped_gemm_for_dense_mlp", False),
    }
    kind = "with_transformer_engine" if use_transformer_engine else "local"
    make = getattr(stock_specs, f"get_gpt_layer_{kind}_spec")
    described = getattr(stock_specs, f"get_gpt_layer_{kind}_submodules", make)
    return make(**_accepted(described, values))


def layer_spec(
    config: Any,
    *,
    use_transformer_engine: bool,
    fp8: Fp8Settings | None = None,
    attention: AttentionSettings | None = None,
    registry: LayerRegistry | None = None,
    vp_stage: int | None = None,
) -> Any:
    """The spec of a GPT model whose linears are in FP8 as `config` or `fp8` says, with this attention.

    Args:
        config: a TransformerConfig.
        use_transformer_engine: its linears (as Megatron has them) or those of fp8_ds.
        fp8: settings of the latter; None: as `config` says. Without FP8 in either, linears are stock.
        attention: None: stock.
        registry: layers enter themselves into it; None: into a new one.
        vp_stage: see `stock_layer_spec`.

    Raises:
        ConfigError, UnsupportedError: something in it cannot take effect.
    """
    if use_transformer_engine:
        require_engine(fp8)
    spec = stock_layer_spec(config, use_transformer_engine=use_transformer_engine, vp_stage=vp_stage)
    if not use_transformer_engine:
        if config.sequence_parallel:
            spec = with_sequence_parallel_norms(spec)
        if config.fp8:
            refuse_recomputation(config)
        if fp8 is None and config.fp8:
            fp8 = settings_of(config)
        if fp8 is not None:
            refuse_everywhere(config, fp8)
            spec = with_fp8_linears(spec, fp8)
    if fp8 is not None or config.fp8:
        refuse_bf16_alone(config)
    if attention is not None:
        spec = with_attention(spec, attention)
        _say_what_stays_stock(config, attention)
    registry = registry or LayerRegistry()
    registry.fp8 = fp8
    return with_registry(spec, registry)


def _say_what_stays_stock(config: Any, attention: AttentionSettings) -> None:
    """On rank 0, where a setting of the model takes layers from the backend that was asked for."""
    reason = left_to_stock(config)
    text = ""
    if reason:
        text = (
            f"all layers keep Megatron's own attention ({reason}). Turn that off (--attention-dropout 0 for dropout, "
            "whose default is 0.1), or leave the backend out."
        )
    elif getattr(config, "mtp_num_layers", None):
        text = "layers of multi-token prediction keep Megatron's own attention, which builds them without a layer spec."
    if text:
        log_single_rank(logging.getLogger(__name__), logging.WARNING, f"attention backend {attention.backend}: {text}")


class LaterSpec:
    """A block spec that is made when Megatron builds a stage: versions after 0.16 import specs before there are groups,
    and call what is no ModuleSpec.

    Args:
        options: of `layer_spec`.

    Attributes:
        registry: of all stages.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self.registry = LayerRegistry()

    def __call__(self, model_config: Any, vp_stage: int | None = None) -> Any:
        return layer_spec(model_config.transformer, registry=self.registry, vp_stage=vp_stage, **self._options)


def spec_from_arguments(args: Any, backend: str | None = None) -> Any:
    """`layer_spec` of Megatron's parsed arguments, ours among them where the wrapper has added them.

    Args:
        args: of `megatron.training.get_args()`.
        backend: of attention; None: --fp8-attention-backend.

    Raises:
        ConfigError, UnsupportedError: something in them cannot take effect.
    """
    from megatron.training.arguments import core_transformer_config_from_args

    local = args.transformer_impl == "local"
    fp8 = settings_from(args)
    if local and (fp8 is not None or args.fp8) and getattr(args, "mtp_num_layers", None):
        raise UnsupportedError(
            f"--mtp-num-layers: expected none with FP8 layers without Transformer Engine, got {args.mtp_num_layers}. "
            "Their linears would stay bf16: remove it."
        )
    if getattr(args, "mtp_num_layers", None) and compat.version() < _PREDICTS_BESIDE_SPEC:
        raise UnsupportedError(
            f"--mtp-num-layers: expected none with a layer spec in Megatron {compat.version()}, got "
            f'{args.mtp_num_layers}. Its gpt_builders.py builds such layers only without one ("use_te" has no value): '
            "leave out --spec and --fp8-attention-backend, or check out core_v0.19.0."
        )
    backend = backend or getattr(args, "fp8_attention_backend", None)
    check_masks(args, backend)
    check_recipe(args)
    attention = None
    if backend is not None:
        attention = AttentionSettings(cast(Any, backend), getattr(args, "fp8_attention_hadamard", False))
    config = core_transformer_config_from_args(args)
    if local:
        refuse_final_norm(config)
    has_device = parallel_state.model_parallel_is_initialized()  # Megatron has chosen this rank's by then
    if attention is not None and has_device and not left_to_stock(config):
        require_backend(attention.backend, current_device())  # on pipeline stages without layers, too
    options: dict[str, Any] = {"use_transformer_engine": not local, "fp8": fp8, "attention": attention}
    if alternates(config) and not parallel_state.model_parallel_is_initialized():
        return LaterSpec(**options)
    return layer_spec(config, **options)


def _objects() -> dict[str, Any]:
    """`gpt`, and one for each backend of attention, if Megatron has parsed its arguments."""
    variables = sys.modules.get("megatron.training.global_vars")
    args = getattr(variables, "_GLOBAL_ARGS", None)
    if args is None or args.spec is None or args.spec[0] != __name__:
        return {}
    wanted = args.spec[1]
    backends = {"gpt": None, **{f"gpt_{backend}": backend for backend in BACKENDS}}
    if wanted not in backends:
        raise ConfigError(
            f"--spec {__name__}: expected one of {', '.join(backends)}, got {wanted}. The end of the name is the "
            f"backend of attention. {OTHER_ATTENTION}."
        )
    return {wanted: spec_from_arguments(args, backends[wanted])}


globals().update(_objects())
