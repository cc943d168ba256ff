"""DeepSpeed's AutoTP layers in FP8: retyped in place, with the collectives that DeepSpeed gave them.

`tensor_parallel.autotp_size` and `deepspeed.tp_model_init` replace linears by layers of deepspeed.module_inject.layers,
each with a shard of the weight. The classes differ in how they shard it; each computes one of three things:

    column    all-reduce of grad_input; output = x W^T + b, a rank's features, or those of all ranks (`gather_output`)
    row       output = all-reduce of x W^T, + b
    head      row, of a rank's features of an x that is whole; all-reduce of grad_input

so a class is known by whose `forward` it inherits. Inputs between the layers are replicated and all-reduces are in
bf16, as DeepSpeed has them. A gathered output travels in FP8 (fp8.tensor_parallel.gather). Seams: engine/seams.py.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from deepspeed import comm as ds_comm
from deepspeed.module_inject import layers as ds_layers
from torch import Tensor, nn

from fp8_ds.config import TensorParallelConfig
from fp8_ds.errors import UnsupportedError
from fp8_ds.nn.linear.fp8_linear import _LinearFunction, linear_backward
from fp8_ds.nn.linear.recipe import Recipe, as_matrix, copied_scales
from fp8_ds.nn.plan.plan import ForeignLinears
from fp8_ds.numerics.formats import E4M3
from fp8_ds.ops._register import once_differentiable
from fp8_ds.ops.quantize import quantize_rowwise
from fp8_ds.tp.gather import Gathered, Shard
from fp8_ds.tp.linears import ParallelFp8Linear


class AutoTpFp8Linear(ParallelFp8Linear):
    """Mix-in before one of DeepSpeed's classes; `from_linear` makes it of such a layer.

    Attributes:
        gathers_fp8: whether a gathered output travels in FP8.
    """

    gathers_fp8 = True

    # What the host class has (deepspeed/module_inject/layers.py).
    mp_group: Any
    is_training_mode: Any

    @property
    def in_features(self) -> int:  # type: ignore[override]
        """Features of this rank."""
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:  # type: ignore[override]
        """Features of this rank."""
        return self.weight.shape[0]

    def __deepcopy__(self, memo: dict[int, Any]) -> AutoTpFp8Linear:
        """Copy as DeepSpeed does, which shares the process group and does not ask for `__getstate__`."""
        copied: AutoTpFp8Linear = super().__deepcopy__(memo)  # type: ignore[misc]
        copied.fp8_recipe.copied = copied_scales(self.weight, self.fp8_recipe)
        return copied

    def extra_repr(self) -> str:
        """Return DeepSpeed's text and the recipe's."""
        host: Any = type(self).__bases__[1]
        return f"{host.extra_repr(self)}, {self.fp8_recipe.describe()}"

    def _check_eager(self) -> None:
        """Raise UnsupportedError if DeepCompile's pass has taken this layer's collectives away."""
        if getattr(self, "defer_collectives_to_compiler", False):
            raise UnsupportedError(
                'compile.passes: expected no "autotp" with FP8 layers, got it: the pass does not see into them. '
                "Remove it; engine.compile() with torch.compile works."
            )


class ColumnAutoTpFp8Linear(AutoTpFp8Linear):
    """LinearLayer, classes that inherit its `forward`, and SubParamLinearLayer, in FP8.

    The all-reduce of grad_input runs beside the GEMM of grad_weight, as DeepSpeed has it with `tp_overlap_comm`.
    """

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, input: Tensor) -> Tensor:
        self._check_eager()
        record = torch.is_grad_enabled()
        output: Tensor = _Column.apply(
            self.checked(input, self.weight), self.weight, self.bias, self.fp8_recipe, record, self.mp_group
        )
        return self._gathered(output) if getattr(self, "gather_output", False) else output

    def _gathered(self, output: Tensor) -> Tensor:
        sizes: tuple[int, ...] = self._partition_sizes  # type: ignore[assignment]
        if self.gathers_fp8 and self.mp_group is not None and len(sizes) > 1:
            gathered: Tensor = _GatherOutputs.apply(output, sizes, self.mp_group)
        else:
            gathered = ds_layers.GatherFromTensorParallelRegion.apply(self.mp_group, output, sizes)
        return gathered


class RowAutoTpFp8Linear(AutoTpFp8Linear):
    """LinearAllreduce, classes that inherit its `forward`, and SubParamLinearAllreduce, in FP8."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, input: Tensor) -> Tensor:
        self._check_eager()
        partial = self.product(input, None)
        output: Tensor = ds_layers.RowParallel.apply(self.mp_group, partial, not self.is_training_mode())
        return output if self.bias is None else output + self.bias.to(output.dtype)


class HeadAutoTpFp8Linear(RowAutoTpFp8Linear):
    """LinearAllreduceWithReplicatedInput in FP8."""

    _partition_sizes: tuple[int, ...]
    tp_index: int

    def forward(self, input: Tensor) -> Tensor:
        scatter: Any = ds_layers.ScatterToTensorParallelRegion.apply
        return super().forward(scatter(self.mp_group, input, self._partition_sizes, self.tp_index))


class _Column(torch.autograd.Function):
    """y = x W^T + b, whose grad_input is summed over the ranks while grad_weight is computed."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe, record: bool, group: Any
    ) -> Tensor:
        ctx.group = group
        return _LinearFunction.forward(ctx, x, weight, bias, recipe, record)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        works: list[Any] = []

        def send(grad_input: Tensor) -> None:
            if ctx.group is not None:
                works.append(ds_comm.all_reduce(grad_input, group=ctx.group, async_op=True))

        grads = linear_backward(ctx, grad_output, send)
        for work in works:
            work.wait()
        return *grads, None, None, None


class _GatherOutputs(torch.autograd.Function):
    """All channels [..., C] on all ranks, for readers that are the same everywhere; gradients are this rank's channels.

    Collective: one all-gather of E4M3 codes, as wide as the widest of `sizes`, and 4 bytes a token.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: tuple[int, ...], group: dist.ProcessGroup) -> Tensor:
        rank, widest = dist.get_rank(group), max(sizes)
        ctx.first, ctx.size = sum(sizes[:rank]), sizes[rank]
        rows = as_matrix(x)
        if ctx.size < widest:
            rows = torch.nn.functional.pad(rows, (0, widest - ctx.size))
        gathered = Gathered(group, Shard(*quantize_rowwise(rows, E4M3)))
        num_tokens = rows.shape[0]
        scale_inv = gathered.scale_inv.view(len(sizes), num_tokens, 1)
        values = (gathered.codes.view(len(sizes), num_tokens, widest).float() * scale_inv).to(x.dtype)
        full = torch.cat([values[i, :, :size] for i, size in enumerate(sizes)], dim=1)
        return full.view(*x.shape[:-1], sum(sizes))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.narrow(-1, ctx.first, ctx.size).contiguous(), None, None


_BY_FORWARD = {
    "LinearLayer": ColumnAutoTpFp8Linear,
    "SubParamLinearLayer": ColumnAutoTpFp8Linear,
    "LinearAllreduce": RowAutoTpFp8Linear,
    "SubParamLinearAllreduce": RowAutoTpFp8Linear,
    "LinearAllreduceWithReplicatedInput": HeadAutoTpFp8Linear,
}
_LINEARS = tuple(getattr(ds_layers, name) for name in _BY_FORWARD if hasattr(ds_layers, name))  # not all before 0.19.8


@functools.cache
def fp8_class(host: Any) -> type[AutoTpFp8Linear] | None:
    """Return the FP8 class of exactly this class, the same one each time; None: it has a `forward` of its own."""
    owner = next(kind for kind in host.__mro__ if "forward" in vars(kind))
    mixin = _BY_FORWARD.get(owner.__name__) if owner.__module__ == ds_layers.__name__ else None
    if mixin is None:
        return None
    return type(f"Fp8{host.__name__}", (mixin, host), {"__module__": __name__})


def autotp_linears(model: nn.Module) -> ForeignLinears:
    """Return the classes of AutoTP's linears in `model`, each with its FP8 class or None."""
    linears = (module for module in model.modules() if isinstance(module, _LINEARS) and hasattr(module, "weight"))
    kinds: set[Any] = {type(module) for module in linears}
    return {kind: fp8_class(kind) for kind in kinds}


def set_gathers(model: nn.Module, config: TensorParallelConfig) -> str:
    """Make FP8 layers that gather their outputs do it as `config` says from now on.

    Returns:
        One line on how the model's FP8 layers communicate.
    """
    converted = [module for module in model.modules() if isinstance(module, AutoTpFp8Linear)]
    for module in converted:
        module.gathers_fp8 = config.gather == "fp8"
    counts = Counter(type(module).__bases__[1].__name__ for module in converted)
    kinds = ", ".join(f"{count} {name}" for name, count in counts.items()) or "none"
    gathering = sum(bool(getattr(module, "gather_output", False)) for module in converted)
    gathers = f"; {gathering} gathered in {config.gather}" if gathering else ""
    return f"fp8: AutoTP layers in FP8: {kinds}; outputs and gradients are all-reduced in bf16{gathers}"


@contextmanager
def as_plain_weights(params: Iterable[Any]) -> Iterator[None]:
    """Make FP8 weights of ZeRO 1 or 2 bf16 tensors with the values that readers get; on exit each is what it was.

    DeepSpeed's gather of shards writes whole weights over them, and splits these into new tensors.
    """
    before: list[tuple[Any, Tensor, Any, Tensor | None]] = []
    for p in params:
        payload = getattr(p, "_fp8", None)
        if payload is None:
            before.append((p, p.data, None, None))
            continue
        values = p.data
        before.append((p, payload.nominal(p.shape), payload, payload.data.detach()))
        payload.data = payload.export = None
        with torch._C.DisableTorchFunctionSubclass():
            p.data = values
    try:
        yield
    finally:
        for p, data, payload, codes in before:
            with torch._C.DisableTorchFunctionSubclass():
                p.data = data
            if payload is not None:
                payload.data = codes
