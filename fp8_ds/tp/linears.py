"""Linears whose weights are sharded over a tensor-parallel group, in high precision and in FP8.

Shape suffixes: S tokens of one rank, T = S n tokens of all n ranks, I input features, O output features.

Column-parallel: a rank has rows of the weight, [O / n, I]; it reads all of x and gives its features of the output.
Row-parallel: a rank has columns of the weight, [O, I / n]; it reads its features of x and gives an addend of the
output.

Ranks bring as many tokens each. Models that `parallelize` has sharded compare them at every forward; called otherwise,
these layers compare the first batch only.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8_ds.errors import ConfigError
from fp8_ds.nn.linear.fp8_linear import (
    Fp8Linear,
    check_input,
    convert_back,
    convert_in_place,
    keep_weight,
    linear_backward,
    linear_grads,
    read_weight,
    weight_and_input,
)
from fp8_ds.nn.linear.recipe import Recipe, as_matrix
from fp8_ds.ops._register import once_differentiable
from fp8_ds.tp.context import TensorParallel, is_tracing, traced_where_possible
from fp8_ds.tp.gather import Gathered
from fp8_ds.tp.mlp import parallel_mlp
from fp8_ds.tp.regions import (
    copy_to_ranks,
    gather_shard,
    gather_tokens,
    gather_tokens_fp8,
    gathered_tokens,
    reduce_tokens,
    reduced_tokens,
    sum_over_ranks,
    summed_over_ranks,
)
from fp8_ds.tp.rules import Rule, TensorRule, rule_of


class ParallelLinear(nn.Linear):
    """A rank's shard of an nn.Linear; `from_full` makes it of a whole one.

    Attributes:
        tp: the group and its settings.
        fp8_class: the class that `apply_plan` gives it.
    """

    tp: TensorParallel
    fp8_class: ClassVar[type[Fp8Linear] | None] = None
    shard_dim: ClassVar[int]

    @classmethod
    def from_full(cls, module: nn.Linear, tp: TensorParallel, unit: int = 1) -> Any:
        """Shard `module` in place: same object, same Parameters, with this rank's part of the numbers.

        Sharded Parameters get `tensor_model_parallel` and `model_parallel`, by which DeepSpeed and Megatron know that
        each rank's part counts in a gradient norm.

        Args:
            module: exactly an nn.Linear, whole, the same on all ranks.
            unit: features that must stay together (a head).

        Raises:
            ConfigError: it cannot be sharded, see `problem`.
        """
        if problem := cls.problem(module, tp.size, unit):
            raise ConfigError(
                f"module: expected an nn.Linear whose dim {cls.shard_dim} divides over {tp.size} ranks, got {problem}. "
                "Use fewer ranks, or leave the layer whole; it is sharded once, before deepspeed.initialize."
            )
        module.__class__ = cls
        assert isinstance(module, ParallelLinear)
        module.tp = tp
        module._shard_parameters()
        tp.sharded_weight = weakref.ref(module.weight)
        return module

    @classmethod
    def problem(cls, module: nn.Module, num_ranks: int, unit: int) -> str:
        """Say why `module` cannot be sharded over so many ranks; empty if it can."""
        if type(module) is not nn.Linear:
            return f"a {type(module).__name__}, not exactly an nn.Linear"
        if hasattr(module.weight, "ds_id"):
            return "partitioned by deepspeed.zero.Init; build the model without it"
        features = module.weight.shape[cls.shard_dim]
        if features % (num_ranks * unit):
            units = f"{features // unit} heads of {unit}" if unit > 1 else f"{features} features"
            return f"{tuple(module.weight.shape)}, {units}"
        return ""

    def _shard_parameters(self) -> None:
        raise NotImplementedError

    def _shard(self, p: Any, dim: int) -> None:
        num = p.shape[dim] // self.tp.size
        p.data = p.data.narrow(dim, self.tp.rank * num, num).clone(memory_format=torch.contiguous_format)
        p.tensor_model_parallel = p.model_parallel = True
        p.partition_dim = dim

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, tp={self.tp.size}, sequence_parallel={self.tp.sequence_parallel}"


def contexts_of(model: nn.Module) -> list[TensorParallel]:
    """Return the contexts of the model's parallel linears, each once; empty if it is not TP-sharded."""
    return list({id(module.tp): module.tp for module in model.modules() if isinstance(module, ParallelLinear)}.values())


class ColumnParallelLinear(ParallelLinear):
    """Linear with a rank's rows of a weight, in high precision.

    With sequence parallelism forward all-gathers x (2 S I (n - 1) bytes received in bf16) and backward reduce-scatters
    its gradient (as many); without, backward all-reduces it. Without `gathers_input` it does neither.

    Attributes:
        gathers_input: whether it is called with a shard of the tokens, or, without sequence parallelism, whether it
            adds up the gradient of its input; false: the module around it does that for all its linears.
    """

    gathers_input = True
    shard_dim = 0

    def _shard_parameters(self) -> None:
        self._shard(self.weight, 0)
        if self.bias is not None:
            self._shard(self.bias, 0)
        self.out_features //= self.tp.size

    def full_input(self, x: Tensor) -> Tensor:
        """Return all tokens of x, in its dtype, with autograd for what this layer does to the gradient."""
        if not self.gathers_input:
            return x
        self.tp.check_first(x, is_full=False, is_replicated=not self.tp.sequence_parallel)
        return gather_tokens(x, self.tp, reduces=True) if self.tp.sequence_parallel else copy_to_ranks(x, self.tp)

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(self.full_input(input), self.weight, self.bias)


class RowParallelLinear(ParallelLinear):
    """Linear with a rank's columns of a weight, in high precision; the bias is whole, and added once.

    With sequence parallelism forward reduce-scatters the output and backward all-gathers its gradient (2 S O (n - 1)
    bytes received each in bf16); without, forward all-reduces the output.
    """

    shard_dim = 1

    def _shard_parameters(self) -> None:
        self._shard(self.weight, 1)
        self.in_features //= self.tp.size
        if self.bias is not None and self.tp.sequence_parallel:
            sum_gradient(self.bias, self.tp)

    def forward(self, input: Tensor) -> Tensor:
        if self.tp.sequence_parallel:
            self.tp.check_first(input, is_full=True)
        partial = F.linear(input, self.weight)
        output = reduce_tokens(partial, self.tp) if self.tp.sequence_parallel else sum_over_ranks(partial, self.tp)
        return output if self.bias is None else output + self.bias


def sum_gradient(p: Tensor, tp: TensorParallel) -> None:
    """Sum the gradient of `p`, which all ranks have and each uses on its tokens, over ranks from now on.

    It takes one all-reduce in float32 per backward in which `p` trains, frozen now or not, before DeepSpeed's or
    anybody's hooks see the gradient.
    """
    trains = p.requires_grad
    p.requires_grad_()  # torch takes hooks for no other tensor, and keeps them whatever becomes of it
    p.register_hook(lambda grad: summed_over_ranks(tp, grad.float()).to(grad.dtype))
    p.requires_grad_(trains)


class ParallelFp8Linear(Fp8Linear):
    """Mix-in before a class of sharded linears, computed in FP8; `from_linear` makes it.

    Attributes:
        tp_rule: how the operand that is gathered travels in FP8; None: none does.
    """

    is_parallel = True
    tp: TensorParallel
    tp_rule: Rule | None

    @classmethod
    def from_linear(cls, module: nn.Module, recipe: Recipe) -> Any:
        """Convert `module`, of exactly this class's host class, to FP8 in place: same object, Parameters and hooks.

        Raises:
            ConfigError: the recipe does not travel in FP8.
        """
        assert type(module) is cls.__bases__[1]
        gathers = isinstance(module, ParallelLinear) and module.tp.config.gather == "fp8"
        rule = rule_of(recipe) if gathers else None
        convert_in_place(module, cls)
        assert isinstance(module, ParallelFp8Linear)
        module.fp8_recipe, module.tp_rule = recipe, rule
        return module

    def revert(self) -> None:
        del self.fp8_recipe, self.tp_rule
        convert_back(self, type(self).__bases__[1])

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, gather={self.tp.config.gather}"


class _ColumnFunction(torch.autograd.Function):
    """y = x W^T + b of a gathered x; backward is any FP8 linear's, and leaves this rank's addend of grad_input."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, rule: Rule, gathered: Gathered, record: bool
    ) -> Tensor:
        ctx.recipe, ctx.x_shape = rule.recipe, x.shape
        ctx.bias_dtype = None if bias is None else bias.dtype
        weight_fp8 = read_weight(weight, rule.recipe)  # before anything is waited for: it may be cast now
        output_TO = rule.output(gathered, weight_fp8, bias, x.dtype)
        kept_weight = keep_weight(ctx, weight, weight_fp8, record=record)
        ctx.save_for_backward(*kept_weight, *(rule.keep_input(gathered) if record and weight.requires_grad else ()))
        return torch.ops.aten._unsafe_view(output_TO, (*x.shape[:-1], output_TO.shape[-1]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        return *linear_backward(ctx, grad_output), None, None, None


class ColumnParallelFp8Linear(ParallelFp8Linear, ColumnParallelLinear):
    """ColumnParallelLinear in FP8; `from_linear` makes it of one.

    With sequence parallelism forward all-gathers E4M3 codes and scales: S I bytes and a scale from each other rank (4
    bytes tensorwise, 4 S rowwise, S I / 32 blockwise). Gradients travel in bf16.
    """

    def forward(self, input: Tensor) -> Tensor:
        return _column_output(input, self.tp, self)

    @staticmethod
    def mlp_function(linears: Sequence[Any]) -> Any:  # type: ignore[override]
        """Return `parallel_mlp` if it computes what gate, up and down give by themselves; else None."""
        if [type(one) for one in linears] != [ColumnParallelFp8Linear, ColumnParallelFp8Linear, RowParallelFp8Linear]:
            return None
        rules = [one.tp_rule for one in linears]
        kinds = {(rule.recipe.grad_format, rule.recipe.backend) for rule in rules if isinstance(rule, TensorRule)}
        are_alike = all(isinstance(rule, TensorRule) for rule in rules) and len(kinds) == 1
        return parallel_mlp if linears[0].tp.sequence_parallel and are_alike else None


@traced_where_possible
def _column_output(x: Tensor, tp: TensorParallel, layer: ColumnParallelFp8Linear) -> Tensor:
    check_input(x, layer.weight)
    gathered, rule = tp.inputs.find(x), layer.tp_rule
    if gathered is None and layer.gathers_input and tp.sequence_parallel and rule is not None:
        x, gathered = gather_input(x, tp, rule)
    if gathered is None:
        return Fp8Linear.forward(layer, layer.full_input(x))
    assert rule is not None
    return _ColumnFunction.apply(x, layer.weight, layer.bias, rule, gathered, torch.is_grad_enabled())


@traced_where_possible
def gather_input(
    x: Tensor, tp: TensorParallel, rule: Rule, shape: tuple[int, ...] | None = None
) -> tuple[Tensor, Gathered]:
    """Quantize this rank's tokens [..., I] by the rule of the layers that will read them, and gather them.

    Returns:
        (nominal tensor of `shape`, what it stands for); see `gather_tokens_fp8`.
    """
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    tp.check_first(x, is_full=False)
    record = torch.is_grad_enabled()
    gathered = gather_shard(rule.send_input(x.detach(), record=record), tp)
    if is_tracing():  # what several layers read is made outside of them, for no graph of one reaches into another's
        rule.rows(gathered)
        if record:
            rule.keep_input(gathered)
    return gather_tokens_fp8(x, tp, gathered, shape), gathered


class _RowFunction(torch.autograd.Function):
    """y = sum over ranks of x W^T; grad_output arrives in FP8."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: RowParallelFp8Linear, record: bool) -> Tensor:
        rule, tp = layer.tp_rule, layer.tp
        keeps_x = record and weight.requires_grad
        recipe = layer.fp8_recipe
        x_fp8 = (rule or recipe).quantize_input(x, needs_columns=keeps_x, record=record)
        weight_fp8 = read_weight(weight, recipe)
        partial_TO = recipe.biased_output(x_fp8, weight_fp8, None, x.dtype)
        ctx.layer, ctx.x_shape = layer, x.shape
        kept_weight = keep_weight(ctx, weight, weight_fp8, record=record)
        ctx.save_for_backward(*kept_weight, *(recipe.kept(x, x_fp8) if keeps_x else ()))
        own = reduced_tokens(tp, partial_TO) if tp.sequence_parallel else summed_over_ranks(tp, partial_TO)
        shape = (1,) if tp.sequence_parallel else x.shape[:-2]
        # A view from inside a Function could not be written in place.
        return torch.ops.aten._unsafe_view.default(own, (*shape, -1, own.shape[-1]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        needs_input, needs_weight = ctx.needs_input_grad[:2]
        layer: RowParallelFp8Linear = ctx.layer
        weight, kept = weight_and_input(ctx, needs_weight)
        rule, tp = layer.tp_rule, layer.tp
        if rule is not None and tp.sequence_parallel:
            shard = rule.send_grad(as_matrix(grad_output))
            gathered = gather_shard(shard, tp)
            weight_fp8 = rule.prepared(read_weight(weight, rule.recipe)) if needs_input else None
            pair: Any = kept  # a rule's recipes keep two tensors of x
            grads = rule.grads(gathered, weight_fp8, pair, (grad_output.dtype, weight.dtype))
        else:
            grad_TO = gathered_tokens(tp, grad_output) if tp.sequence_parallel else as_matrix(grad_output)
            grads = linear_grads(
                grad_TO, weight, layer.fp8_recipe, kept, needs_input=needs_input, dtype=grad_output.dtype
            )
        grad_input = None if grads[0] is None else grads[0].view(ctx.x_shape)
        return grad_input, grads[1], None, None


class RowParallelFp8Linear(ParallelFp8Linear, RowParallelLinear):
    """RowParallelLinear in FP8; `from_linear` makes it of one.

    With sequence parallelism outputs travel in bf16, and backward all-gathers grad_output's codes and scales: S O bytes
    and a scale from each other rank.
    """

    def forward(self, input: Tensor) -> Tensor:
        return _row_output(input, self.tp, self)


@traced_where_possible
def _row_output(x: Tensor, tp: TensorParallel, layer: RowParallelFp8Linear) -> Tensor:
    check_input(x, layer.weight)
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    if tp.sequence_parallel:
        tp.check_first(x, is_full=True)
    output: Tensor = _RowFunction.apply(x, layer.weight, layer, torch.is_grad_enabled())
    return output if layer.bias is None else output + layer.bias.to(output.dtype)


ColumnParallelLinear.fp8_class = ColumnParallelFp8Linear
RowParallelLinear.fp8_class = RowParallelFp8Linear
