"""Layer specs: Megatron's own, copied, with our attention and, without Transformer Engine, our linears in their slots.

`--spec megatron_patches.layer_specs gpt` under Megatron's own pretrain_gpt.py; `gpt_fa3_fp8` and others name the
attention. These objects are made when this module is imported, from the arguments that Megatron has parsed by then.
Elsewhere call the functions.
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
from megatron.core.models.gpt import gpt_layer_specs as megatron_specs
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
from megatron_patches.attention import AttentionSettings, attention_class, current_device, left_to_host
from megatron_patches.linear import Fp8ColumnParallelLinear, Fp8RowParallelLinear, MegatronFp8Linear
from megatron_patches.norm import SequenceParallelNorm
from megatron_patches.recipes import OTHER_ATTENTION, Fp8Settings, settings
from megatron_patches.refusals import (
    alternates,
    refuse_bf16_alone,
    refuse_everywhere,
    refuse_final_norm,
    refuse_other_layers,
    refuse_recomputation,
    require_engine,
)

_PREDICTS_BESIDE_SPEC = Version("0.17")
_SPEC_OPTIONS = (
    *("moe_grouped_gemm", "qk_layernorm", "multi_latent_attention", "moe_use_legacy_grouped_gemm", "qk_l2_norm"),
    *("use_te_activation_func", "mla_down_proj_fusion", "use_grouped_gemm_for_dense_mlp"),
)
"""Fields of a TransformerConfig that Megatron's functions take by the same name, in one version or another."""


class MegatronFp8Layer:
    """Mix-in before a transformer layer: tells the linears of fp8_ds in it when a step begins, and honours
    --first-last-layers-bf16, for which Megatron uses a context of Transformer Engine's.

    Attributes:
        step_linears: those linears; empty until they are built.
    """

    step_linears: tuple[MegatronFp8Linear, ...] = ()
    _microbatch: int | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        layer: Any = self
        self.step_linears = tuple(module for module in layer.modules() if isinstance(module, MegatronFp8Linear))
        if is_first_last_bf16_layer(layer.config, layer.layer_number - 1):
            for linear in self.step_linears:
                linear.keep_bf16("--first-last-layers-bf16")

    @property
    def current_microbatch(self) -> int:
        """Micro-batch of the step, from 0, as Megatron's schedules set it before each forward.

        Raises:
            AttributeError: it was not set, as in Megatron's own layers.
        """
        if self._microbatch is None:
            raise AttributeError("current_microbatch")
        return self._microbatch

    @current_microbatch.setter
    def current_microbatch(self, number: int) -> None:
        self._microbatch = number
        for linear in self.step_linears:
            linear.begin_microbatch(number)


@functools.cache
def _layer_class(host: type) -> type:
    return type(f"Fp8{host.__name__}", (MegatronFp8Layer, host), {"__module__": __name__})


def _rewritten(spec: Any, change: Callable[[str, Any], Any], name: str = "") -> Any:
    """Copy a spec, with nodes replaced where `change(name of the slot, node)` returns another value.

    A spec is a ModuleSpec, a dataclass of submodules, a list, a functools.partial, or a leaf. Children of a replaced
    node are not visited.
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


def _with_slots(spec: Any, replace: Callable[[str, Any], Any], refusal: str) -> Any:
    """Rewrite a spec, except MLA, which keeps its own attention and linears.

    Raises:
        UnsupportedError: nothing was replaced in a stage that has layers; its text is `refusal`.
    """
    count = 0

    def change(name: str, node: Any) -> Any:
        nonlocal count
        if isinstance(node, ModuleSpec) and isinstance(node.module, type) and issubclass(node.module, MLASelfAttention):
            return copy.copy(node)
        changed = replace(name, node)
        count += changed is not node
        return changed

    found = _rewritten(spec, change)
    has_layers = not isinstance(spec, TransformerBlockSubmodules) or spec.layer_specs
    if not count and has_layers:
        raise UnsupportedError(refusal)
    return found


def with_attention(spec: Any, settings: AttentionSettings) -> Any:
    """Return a copy of a layer or block spec whose attention is `fp8_ds.attention`."""

    def replace(name: str, node: Any) -> Any:
        if name != "core_attention":
            return node
        host = node.module if isinstance(node, ModuleSpec) else node
        params = {**(node.params if isinstance(node, ModuleSpec) else {}), "fp8_attention": settings}
        return ModuleSpec(module=attention_class(host), params=params)

    return _with_slots(
        spec,
        replace,
        "--fp8-attention-backend: expected a layer spec with a core_attention that is not MLA's, got none. Leave out "
        f"--fp8-attention-backend {settings.backend}.",
    )


def with_fp8_linears(spec: Any, settings: Fp8Settings) -> Any:
    """Return a copy of a local layer or block spec whose linears are computed by fp8_ds, experts' included."""
    ours = {ColumnParallelLinear: Fp8ColumnParallelLinear, RowParallelLinear: Fp8RowParallelLinear}

    def replace(name: str, node: Any) -> Any:
        is_linear = isinstance(node, type) and node in ours
        return ModuleSpec(module=ours[node], params={"fp8": settings}) if is_linear else node

    return _with_slots(
        spec,
        replace,
        "--transformer-impl: expected local with FP8 linears of fp8_ds, got a spec without Megatron's own linears. "
        "Pass --transformer-impl local.",
    )


def with_sequence_parallel_norms(spec: Any) -> Any:
    """Return a copy of a layer or block spec in which torch's norms take sequence parallelism."""
    return _rewritten(spec, lambda name, node: SequenceParallelNorm if node is WrappedTorchNorm else node)


def _with_layers(spec: Any) -> Any:
    """Return a copy of a layer or block spec with `MegatronFp8Layer` before its layers."""
    found = copy.copy(spec)
    if isinstance(spec, TransformerBlockSubmodules):
        found.layer_specs = [_with_layers(one) for one in spec.layer_specs]
    else:
        found.module = _layer_class(spec.module)
    return found


def _accepted(function: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of `values` that this version's function takes."""
    parameters = inspect.signature(function).parameters
    return {name: value for name, value in values.items() if name in parameters}


def megatron_layer_spec(config: Any, *, use_transformer_engine: bool, vp_stage: int | None = None) -> Any:
    """Return Megatron's own spec: one ModuleSpec, or for MoE one for each layer of this pipeline stage.

    Raises:
        UnsupportedError: Megatron builds these layers only without --spec; or dense and MoE layers alternate, and the
            virtual pipeline stage, to which a spec belongs, is not known.
    """
    patches.check("core")
    refuse_other_layers(config)
    if alternates(config):
        if config.virtual_pipeline_model_parallel_size and vp_stage is None:
            raise UnsupportedError(
                "--num-layers-per-virtual-pipeline-stage: expected none with --spec and --moe-layer-freq "
                f"{config.moe_layer_freq}, got {config.virtual_pipeline_model_parallel_size} stages. Remove one."
            )
        return megatron_specs.get_gpt_decoder_block_spec(
            config,
            use_transformer_engine=use_transformer_engine,
            normalization=config.normalization,
            qk_l2_norm=getattr(config, "qk_l2_norm", False),
            vp_stage=vp_stage,
        )
    values = {
        "num_experts": config.num_moe_experts,
        "normalization": config.normalization,
        "use_te_op_fuser": getattr(config, "use_transformer_engine_op_fuser", False),
        **{name: getattr(config, name, False) for name in _SPEC_OPTIONS},
    }
    kind = "with_transformer_engine" if use_transformer_engine else "local"
    make = getattr(megatron_specs, f"get_gpt_layer_{kind}_spec")
    described = getattr(megatron_specs, f"get_gpt_layer_{kind}_submodules", make)
    return make(**_accepted(described, values))


def layer_spec(
    config: Any,
    *,
    use_transformer_engine: bool,
    fp8: Fp8Settings | None = None,
    attention: AttentionSettings | None = None,
    vp_stage: int | None = None,
) -> Any:
    """Return the spec of a GPT model whose linears are in FP8 as `config` or `fp8` says, with this attention.

    Args:
        config: a TransformerConfig.
        use_transformer_engine: whether linears are its own (as Megatron has them) or those of fp8_ds.
        fp8: settings of the latter; None: as `config` says. Without FP8 in either, linears are Megatron's own.
        attention: its settings; None: Megatron's own.
        vp_stage: the virtual pipeline stage, where Megatron says which.

    Raises:
        ConfigError, UnsupportedError: something in it cannot take effect.
    """
    if use_transformer_engine:
        require_engine(fp8)
    spec = megatron_layer_spec(config, use_transformer_engine=use_transformer_engine, vp_stage=vp_stage)
    if not use_transformer_engine:
        if config.sequence_parallel:
            spec = with_sequence_parallel_norms(spec)
        if config.fp8:
            refuse_recomputation(config)
        if fp8 is None and config.fp8:
            fp8 = settings(config.fp8, config.fp8_recipe)
        if fp8 is not None:
            refuse_everywhere(config, fp8)
            spec = with_fp8_linears(spec, fp8)
    if fp8 is not None or config.fp8:
        refuse_bf16_alone(config)
    if attention is not None:
        spec = with_attention(spec, attention)
        _say_what_stays_megatrons(config, attention)
    return _with_layers(spec)


def _say_what_stays_megatrons(config: Any, attention: AttentionSettings) -> None:
    """Warn on rank 0 if a setting of the model takes layers from the requested backend."""
    reason = left_to_host(config)
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


def later_spec(**options: Any) -> Callable[..., Any]:
    """Return a function that makes a block spec by `layer_spec`, when Megatron builds a stage. Versions after 0.16
    import specs before there are groups, and call a spec that is no ModuleSpec."""

    def spec_of_stage(model_config: Any, vp_stage: int | None = None) -> Any:
        return layer_spec(model_config.transformer, vp_stage=vp_stage, **options)

    return spec_of_stage


def spec_from_arguments(args: Any, backend: str | None = None) -> Any:
    """Return the `layer_spec` of Megatron's parsed arguments, which include ours under the wrapper.

    Args:
        backend: that of attention; None: --fp8-attention-backend.
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
    if attention is not None and has_device and not left_to_host(config):
        require_backend(attention.backend, current_device())  # on pipeline stages without layers, too
    options: dict[str, Any] = {"use_transformer_engine": not local, "fp8": fp8, "attention": attention}
    if alternates(config) and not parallel_state.model_parallel_is_initialized():
        return later_spec(**options)
    return layer_spec(config, **options)


def _objects() -> dict[str, Any]:
    """Return the spec that --spec names, `gpt` or one with a backend of attention, if arguments have been parsed."""
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
