"""Settings of linears that are computed by fp8_ds, from Megatron's FP8 flags; unsupported ones are refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from fp8_ds.config import LinearConfig, TensorParallelConfig
from fp8_ds.errors import ConfigError, UnsupportedError
from fp8_ds.nn.linear.recipe import Recipe
from fp8_ds.nn.linear.recipes import RECIPES
from fp8_ds.tp import TensorParallel

OURS = ("rowwise", "rowwise_with_gw_hp")
"""Values of --fp8-recipe that Megatron does not have."""
WITHOUT_TE = ("tensorwise", "blockwise", *OURS)
"""Values of --fp8-recipe that need no Transformer Engine."""
OTHER_ATTENTION = (
    "Use one of these, or leave --fp8-attention-backend out: of Megatron's own attention --attention-backend chooses "
    "the kernel"
)
"""Remedy in refusals of another --fp8-attention-backend."""
GRAD_DTYPES = {"hybrid": "e5m2", "e4m3": "e4m3"}
"""--fp8-format: hybrid is E4M3 forward and E5M2 for gradients."""


@dataclass(eq=False)
class Fp8Settings:
    """Settings of all linears of a model.

    Args:
        linear: recipe, gradient format, GEMM backend.
        tensor_parallel: how activations travel under sequence parallelism.
    """

    linear: LinearConfig
    tensor_parallel: TensorParallelConfig

    def __post_init__(self) -> None:
        self._contexts: dict[tuple[int, bool], TensorParallel] = {}

    @property
    def num_bytes_gathered(self) -> int:
        """Bytes that this rank has gathered in FP8 so far."""
        return sum(tp.num_bytes_gathered for tp in self._contexts.values())

    def recipe(self) -> Recipe:
        """Make the recipe of one layer."""
        return RECIPES[self.linear.recipe](self.linear)

    def context(self, group: dist.ProcessGroup, sequence_parallel: bool) -> TensorParallel:
        """Return one context for all layers of a group: its ranks' agreement is checked once."""
        key = (id(group), sequence_parallel)
        if key not in self._contexts or self._contexts[key].group is not group:
            self._contexts[key] = TensorParallel(group, sequence_parallel, self.tensor_parallel)
        return self._contexts[key]

    def __deepcopy__(self, memo: Any) -> Fp8Settings:
        return self  # specs are copied, and their layers share it


def settings(
    fp8_format: str | None,
    fp8_recipe: str,
    *,
    backend: str = "torch",
    gather: str = "fp8",
) -> Fp8Settings:
    """Make settings from --fp8-format, --fp8-recipe, --fp8-gemm-backend and --fp8-tp-gather.

    Raises:
        ConfigError: FP8 is off, or values do not go together.
        UnsupportedError: the recipe needs Transformer Engine.
    """
    if fp8_format not in GRAD_DTYPES:
        raise ConfigError(
            f"--fp8-format: expected hybrid or e4m3 with FP8 layers, got {fp8_format}. Set it, or use Megatron's spec."
        )
    if fp8_recipe not in WITHOUT_TE:
        raise UnsupportedError(
            f"--fp8-recipe: expected one of {', '.join(WITHOUT_TE)} for layers without Transformer Engine, got "
            f"{fp8_recipe}. Set one of them, or install Transformer Engine and use --transformer-impl "
            "transformer_engine."
        )
    if fp8_recipe == "blockwise" and fp8_format == "hybrid" and backend == "torch":
        raise ConfigError(
            "--fp8-format: expected e4m3 with --fp8-recipe blockwise without Transformer Engine, got hybrid. torch "
            "multiplies blocks in E4M3 only."
        )
    linear = LinearConfig(recipe=fp8_recipe, grad_dtype=GRAD_DTYPES[fp8_format], backend=backend)  # type: ignore[arg-type]
    return Fp8Settings(linear, TensorParallelConfig(gather=gather))  # type: ignore[arg-type]


_NEEDS_TE = "It needs Transformer Engine: remove the flag."
_NOT_TESTED = "Not tested with these layers: remove the flag."
_TES_ATTENTION = "That is Transformer Engine's attention: use --fp8-attention-backend fa3_fp8."
_REFUSED: dict[str, tuple[Any, str, str]] = {
    "gradient_accumulation_fusion": (
        False,
        "--no-gradient-accumulation-fusion",
        "Weight gradients of FP8 GEMMs are added to main_grad by Megatron's hook: add the flag.",
    ),
    "fp8_param": (False, "--fp8-param-gather", "FP8 parameters are Transformer Engine's: remove the flag."),
    "fp8_wgrad": (
        True,
        "--no-fp8-wgrad",
        "Remove the flag; --fp8-recipe rowwise_with_gw_hp has weight gradients in bf16.",
    ),
    "fp8_dot_product_attention": (False, "fp8_dot_product_attention", _TES_ATTENTION),
    "fp8_multi_head_attention": (False, "fp8_multi_head_attention", _TES_ATTENTION),
    "fp4": (None, "--fp4-format", "FP4 is Transformer Engine's: remove the flag."),
    "delay_wgrad_compute": (False, "--delay-wgrad-compute", _NEEDS_TE),
    "tp_comm_overlap": (False, "--tp-comm-overlap", _NEEDS_TE),
    "cpu_offloading": (False, "--cpu-offloading-num-layers", _NEEDS_TE),
    "moe_grouped_gemm": (False, "--moe-grouped-gemm", "Its experts would stay in bf16: remove the flag."),
    "gtp_weight_remat_size": (
        1,
        "--tensor-parallel-num-weight-shards",
        "Its shards of weights are gathered in Megatron's own GEMMs: set it to --tensor-model-parallel-size.",
    ),
    "enable_cuda_graph": (False, "--enable-cuda-graph", _NOT_TESTED),
    "external_cuda_graph": (False, "--external-cuda-graph", _NOT_TESTED),
    "cuda_graph_impl": ("none", "--cuda-graph-impl", _NOT_TESTED),
}
"""Field of a TransformerConfig -> the value that is wanted, its flag, what to do."""


def cuda_graphs(args: Any) -> str | None:
    """Return the flag by which Megatron's layers become CUDA graphs, by version; None if they do not."""
    names = ("cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph")
    found = (name for name in names if getattr(args, name, None) not in (None, False, "none"))
    return next((_REFUSED[name][1] for name in found), None)


def refuse(config: Any) -> None:
    """Raise UnsupportedError if a TransformerConfig asks for what linears without Transformer Engine cannot do."""
    for name, (wanted, flag, remedy) in _REFUSED.items():
        value = getattr(config, name, wanted)
        if value is not None and value != wanted:
            raise UnsupportedError(
                f"{flag}: expected {name}={wanted} with FP8 layers without Transformer Engine, got {value}. {remedy}"
            )
