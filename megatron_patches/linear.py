"""Megatron-core's own Column- and RowParallelLinear, computed in FP8 by fp8_ds: where there is no Transformer Engine.

Parameters, their initialisation, their attributes, checkpoints and collectives of bf16 are Megatron's. Differences:

    column, sequence parallel      all-gather of the input in FP8 (Megatron: bf16, and again in backward)
    row, sequence parallel         all-gather of grad_output in FP8
    all                            the three GEMMs

A weight's bytes are made once in each step: all micro-batches and their backwards read the same. Megatron's optimizers
write weights through `.data` and through the buffers of DDP, of which autograd's version counter knows nothing. Its
schedules say which micro-batch comes next (`layer.current_microbatch`): before the first of a step weights may have
changed. Under a loop that does not say it, and outside of training, every forward makes the bytes anew.

Shape suffixes as in fp8_ds/tp/linears.py. Megatron's activations are [s, b, h]; tokens are their two leading dims.
"""

from __future__ import annotations

import weakref
from typing import Any, cast

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

from fp8_ds.errors import ConfigError, UnsupportedError
from fp8_ds.nn.linear.fp8_linear import Fp8Linear, _LinearFunction
from fp8_ds.nn.linear.recipe import Fp8Weight, Recipe
from fp8_ds.tp.context import TensorParallel
from fp8_ds.tp.linears import _ColumnFunction, _RowFunction, gather_input
from fp8_ds.tp.regions import copy_to_ranks, gather_tokens
from fp8_ds.tp.rules import Rule, rule_of
from megatron_patches.recipes import Fp8Settings, refuse


def gather_rule(fp8: Fp8Settings, recipe: Recipe) -> Rule | None:
    """Return how operands travel in FP8 under sequence parallelism; None: bf16. Unsupported recipes are refused."""
    if fp8.tensor_parallel.gather == "bf16":
        return None
    try:
        return rule_of(recipe)
    except ConfigError as error:
        raise ConfigError(
            f"--fp8-tp-gather: expected bf16 with --fp8-recipe {recipe.name} and --sequence-parallel, got fp8. Add "
            "--fp8-tp-gather bf16, or set another recipe."
        ) from error


class StepWeight:
    """FP8 weight that recipes read as `p._fp8` (nn/linear/recipe.py): quantised at the first read after `expire`.

    Args:
        weight: [O, I]; held weakly, as it holds this.
        recipe: quantises it.
    """

    def __init__(self, weight: Tensor, recipe: Recipe) -> None:
        self._weight = weakref.ref(weight)
        self._recipe = recipe
        self._made: Fp8Weight | None = None
        self._state: tuple[Any, ...] = ()

    def expire(self) -> None:
        """Drop the bytes: the weight may have changed, without a trace that can be seen from here."""
        self._made = None

    def __reduce__(self) -> Any:
        """Pickle as None: a Parameter is pickled with its attributes, but without this cache."""
        return type(None), ()

    def _current(self) -> Fp8Weight:
        weight = self._weight()
        assert weight is not None, "read from the weight itself"
        state = weight._version, weight.data_ptr(), weight.dtype
        if self._made is None or state != self._state:
            self._made, self._state = self._recipe.quantize_weight(weight.detach()), state
        return self._made

    @property
    def data(self) -> Tensor:
        """float8_e4m3fn [O, I]."""
        return self._current().data

    @property
    def scale_inv(self) -> Tensor:
        """Grid of inverse scales; `data` times it leaves FP8."""
        return self._current().scale_inv


class MegatronFp8Linear:
    """Mix-in before a linear of Megatron's. Configurations that it does not support are refused.

    Attributes:
        fp8_settings: those of the model.
        fp8_recipe: that of this layer; None: Megatron computes it, in bf16.
        tp_rule: how its operand travels in FP8; None: it does not.
        tp: its tensor parallel group; None: one rank.
        bf16_reason: why Megatron computes it.
    """

    fp8_settings: Fp8Settings
    fp8_recipe: Recipe | None
    tp_rule: Rule | None
    tp: TensorParallel | None
    bf16_reason: str = ""
    _keeps_weight = False
    _step_weight: StepWeight | None = None

    def __init__(self, *args: Any, fp8: Fp8Settings, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        layer: Any = self
        refuse(layer.config)
        self.fp8_settings = fp8
        self.fp8_recipe = self.fp8_settings.recipe()
        self.tp_rule, self.tp = None, None
        if layer.explicit_expert_comm or layer.tp_group is None or layer.tp_group.size() == 1:
            return
        self.tp = self.fp8_settings.context(layer.tp_group, layer.sequence_parallel)
        if layer.sequence_parallel:
            self.tp_rule = gather_rule(self.fp8_settings, self.fp8_recipe)

    def finish_init(self, quant_config: Any) -> None:
        """Refuse a --te-precision-config-file that has something for this layer (Megatron's hook)."""
        if quant_config is not None:
            raise UnsupportedError(
                "--te-precision-config-file: expected no matcher that takes in linears of fp8_ds, got config "
                f"{quant_config.config_key} for {quant_config.match_input.module_path}. It is for Transformer "
                "Engine's: match *core_attention alone, or remove the flag."
            )

    def keep_bf16(self, reason: str) -> None:
        """Leave the layer to Megatron from now on."""
        self.fp8_recipe = self.tp_rule = None
        self.bf16_reason = reason

    def begin_microbatch(self, number: int) -> None:
        """Begin micro-batch `number` of a step, from 0, with the next forward; -1 if it is not known."""
        self._keeps_weight = number >= 0
        if number == 0:
            self._expire_weight()

    def _begin_forward(self) -> None:
        """Prepare the weight's bytes of this step for this forward and its backward."""
        layer: Any = self
        self._step_weight = getattr(layer.weight, "_fp8", None)
        if self._step_weight is None:
            assert self.fp8_recipe is not None
            self._step_weight = layer.weight._fp8 = StepWeight(layer.weight, self.fp8_recipe)
        elif not (self._keeps_weight and layer.training):
            self._expire_weight()

    def _expire_weight(self) -> None:
        # Not found by way of `weight`: between steps FSDP2 has a shard there, and the next forward the weight of old.
        if self._step_weight is not None:
            self._step_weight.expire()

    def __repr__(self) -> str:
        recipe, text = self.fp8_recipe, f"bf16 ({self.bf16_reason})"
        if recipe is not None:
            gathers = self.tp_rule is not None and not cast(Any, self).explicit_expert_comm
            gather = ", gather=fp8" if gathers else ""
            text = f"fp8={recipe.name}, grad={recipe.grad_format.name}, backend={recipe.backend}{gather}"
        return f"{super().__repr__()[:-1]}, {text})"

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the output from the operands of Megatron's `forward`; `kwargs` say what to send."""
        if self.fp8_recipe is None:
            host: Any = super()
            return host._forward_impl(input, weight, *args, **kwargs)
        if weight is not cast(Any, self).weight:
            raise ConfigError(
                "weight: expected the layer's own with FP8, got another. Layers whose weight is passed to forward stay "
                "Megatron's own linears."
            )
        self._begin_forward()
        return self.local_output(input, **kwargs)

    def local_output(self, x: Tensor, **kwargs: Any) -> Tensor:
        """Return this rank's output; the class takes what it needs from `kwargs`."""
        raise NotImplementedError

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return `x W^T + bias`, without communication."""
        return _LinearFunction.apply(
            Fp8Linear.checked(x, weight), weight, bias, self.fp8_recipe, torch.is_grad_enabled()
        )


class Fp8ColumnParallelLinear(MegatronFp8Linear, ColumnParallelLinear):
    """ColumnParallelLinear in FP8."""

    def local_output(self, x: Tensor, **kwargs: Any) -> Tensor:
        bias = kwargs["bias"]
        if not kwargs["sequence_parallel"]:
            if kwargs["allreduce_dgrad"]:
                assert self.tp is not None
                self.tp.check_first(x, is_full=False, is_replicated=True)
                x = copy_to_ranks(x, self.tp)
            return self.product(x, self.weight, bias)
        assert self.tp is not None
        shape = (self.tp.size * x.shape[0], *x.shape[1:])
        if self.tp_rule is None:
            self.tp.check_first(x, is_full=False)
            return self.product(gather_tokens(x, self.tp, shape, reduces=True), self.weight, bias)
        nominal, gathered = gather_input(x, self.tp, self.tp_rule, shape)
        return _ColumnFunction.apply(nominal, self.weight, bias, self.tp_rule, gathered, torch.is_grad_enabled())


class Fp8RowParallelLinear(MegatronFp8Linear, RowParallelLinear):
    """RowParallelLinear in FP8."""

    def local_output(self, x: Tensor, **kwargs: Any) -> Tensor:
        """Return this rank's addend."""
        return self.product(x, self.weight, None)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, input_: Tensor) -> Any:
        """Return (output, bias if it is left to the caller); grad_output travels in FP8 if settings say so."""
        # Megatron sets it after it has built a layer, too: --moe-shared-expert-overlap sends on a stream of its own.
        if self.fp8_recipe is None or self.tp is None or self.tp_rule is None or self.explicit_expert_comm:
            return super().forward(input_)
        self._begin_forward()
        x = Fp8Linear.checked(input_, self.weight)
        self.tp.check_first(x, is_full=True)
        own: Tensor = _RowFunction.apply(x, self.weight, self, torch.is_grad_enabled())
        output = own.view(x.shape[0] // self.tp.size, *x.shape[1:-1], own.shape[-1])
        if self.skip_bias_add:
            return output, self.bias
        return (output if self.bias is None else output + self.bias), None
