"""Fp8Linear: an nn.Linear whose three GEMMs run in FP8, around the same Parameter objects.

Shape suffixes: T tokens (all leading dims), I input features, O output features.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from fp8_ds.errors import ConfigError
from fp8_ds.nn.linear.recipe import Fp8Weight, Kept, Quantized, Recipe, as_matrix, copied_scales
from fp8_ds.ops._register import once_differentiable

_INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_AS_A_LEAF = "torch.nn"
"""Name of the Python module by which `torch.fx` knows a layer that it calls and does not trace into, as nn.Linear. With
"torch.nn.modules" torch.compile would take the layer for one whose attributes do not change."""


class KeptWeight(NamedTuple):
    """A weight that is no Parameter, kept for the backward: what `read_weight` gave, and its dtype."""

    as_read: Fp8Weight
    dtype: torch.dtype


def read_weight(weight: Tensor | KeptWeight, recipe: Recipe) -> Fp8Weight:
    """Return the weight's E4M3 bytes [O, I] as they are now (for a layer in bf16: bf16 of its masters).

    It is called in forward and again in backward: under ZeRO-3 the payload is dropped in between and gathered anew.

    Args:
        weight: [O, I]. With a payload holding data: these bytes, no cast. With a payload without data (a stock reader
            has gathered the weight in bf16): the bf16 values by the payload's scales. Without a payload (no ZeRO):
            current scaling, as `recipe` has it. A kept one: as it was read.
        recipe: of the layer.
    """
    if isinstance(weight, KeptWeight):
        return weight.as_read
    weight_fp8 = recipe.read_weight(weight)
    return weight_fp8._replace(data=weight_fp8.data.t()) if recipe.weight_is_transposed else weight_fp8


def linear_output(x_fp8: Quantized, weight: Tensor, bias: Tensor | None, recipe: Recipe, dtype: torch.dtype) -> Tensor:
    """Compute `x W^T + b` in `dtype`, [T, O], from x's rows [T, I]."""
    return recipe.biased_output(x_fp8, read_weight(weight, recipe), bias, dtype)


def linear_grads(
    grad: Tensor | Quantized,
    weight: Tensor | KeptWeight,
    recipe: Recipe,
    kept: Kept | Callable[[Tensor | None], Kept] | None,
    *,
    needs_input: bool,
    dtype: torch.dtype,
    send: Callable[[Tensor], None] | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of a linear's input and weight.

    Args:
        grad: grad_output [T, O], contiguous; or its rows, already quantised as `recipe.grad_scaling` says.
        weight: [O, I], see `read_weight`.
        recipe: of the layer.
        kept: from `recipe.kept`; None: the weight's gradient is not wanted. It may be a function that makes it from
            grad_input, if the recipe needs no scale of it to quantise `grad`.
        needs_input: whether the input's gradient is wanted.
        dtype: of the input's gradient.
        send: called with grad_input [T, I] before the weight's gradient is computed, which a collective may overlap.

    Returns:
        (grad_input [T, I], grad_weight as the weight is stored, in its dtype), None for what is not wanted.
    """
    if not needs_input and kept is None:
        return None, None
    grad_input = grad_weight = None
    weight_fp8 = read_weight(weight, recipe) if needs_input else None
    if isinstance(grad, Quantized):
        grad_fp8, grad_TO = grad, None
    else:
        needed: Any = kept if recipe.needs_grad_columns else None
        grad_fp8 = recipe.quantize_grad_output(grad, weight_fp8, needed)
        grad_TO = grad
    if weight_fp8 is not None:
        grad_input = recipe.grad_input(grad_fp8, weight_fp8, dtype)
        if send is not None:
            send(grad_input)
    if kept is not None:
        if not isinstance(kept, tuple):
            kept = kept(grad_input)
        if grad_TO is None:
            grad_fp8 = grad_fp8.with_columns()
        grad_weight = recipe.grad_weight(grad_fp8, grad_TO, kept, weight.dtype)
    return grad_input, grad_weight


def bias_grad(grad_TO: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum grad_output [T, O] over tokens, in float32; return [O] in `dtype`."""
    return grad_TO.sum(dim=0, dtype=torch.float32).to(dtype)


def check_input(input: Tensor, weight: Tensor, num_features: int | None = None) -> None:
    """Refuse an input of another width (ValueError) or dtype (RuntimeError, but under autocast) than the weight's.

    It is called before the autograd function, also because torch 2.11 cannot trace a size that is a symbol when the
    function begins and a number when it ends, as with one graph a linear and linears of several widths.

    Args:
        input, weight: [..., I].
        num_features: I, where the weight is stored otherwise.
    """
    with torch._C.DisableTorchFunctionSubclass():  # a weight's, which would be asked for its shape
        num, dtype = num_features or weight.shape[-1], weight.dtype
    if input.shape[-1] != num:
        raise ValueError(f"input: expected [..., {num}], got {list(input.shape)}.")
    if input.dtype == dtype or input.dtype not in _INPUT_DTYPES or torch.is_autocast_enabled(input.device.type):
        return
    payload = getattr(weight, "_fp8", None)
    name = f"a linear with a weight of shape {list(weight.shape)}" if payload is None else payload.name
    raise RuntimeError(
        f"input of {name}: expected {dtype}, the weight's dtype, got {input.dtype}. Cast it before the layer, or run "
        "the forward under torch.autocast."
    )


def replaced_forward(module: nn.Module, is_known: bool = False) -> str | None:
    """Say what calling `module` runs in place of its class's own forward; None if it runs that.

    A forward is its class's own if it was defined in the class's module, whatever name and docstring it shows, or if
    that of the class `is_known`.
    """
    if "forward" in vars(module):
        return "its forward was replaced"
    owner = next(kind for kind in type(module).__mro__ if "forward" in vars(kind))
    is_own = getattr(vars(owner)["forward"], "__globals__", {}).get("__name__") == owner.__module__
    return None if is_own or is_known else f"{owner.__module__}.{owner.__name__}.forward was replaced"


def convert_in_place(module: nn.Module, cls: type[nn.Module]) -> None:
    """Give `module` the FP8 class `cls`, and let `torch.fx` call it by name. See `convert_back`."""
    module.__class__ = cls
    module.__module__ = _AS_A_LEAF


def convert_back(module: nn.Module, cls: Any) -> None:
    """Give `module` its own class `cls` again."""
    del module.__module__
    module.__class__ = cls


class _LinearFunction(torch.autograd.Function):
    """y = x W^T + b; the backward keeps x in FP8, transposed for grad_weight, and its scale_inv, but no copy of W.

    The tensor core reads operands along the contracted dim, so each of x and grad_output is needed in two layouts. Both
    are written where the cast is made, in one read; of x only the one that backward wants is kept, one byte an element.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe, record: bool) -> Tensor:
        keeps_x = record and ctx.needs_input_grad[1]
        x_fp8 = recipe.quantize_input(x, needs_columns=keeps_x, record=record)
        weight_fp8 = read_weight(weight, recipe)
        output_TO = recipe.biased_output(x_fp8, weight_fp8, bias, x.dtype)
        kept_weight = keep_weight(ctx, weight, weight_fp8, record=record)
        ctx.recipe = recipe
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.x_shape = x.shape
        ctx.save_for_backward(*kept_weight, *(recipe.kept(x, x_fp8) if keeps_x else ()))
        # As F.linear does: a view from inside a Function could not be written in place, as nn.ReLU(inplace=True) does.
        output: Tensor = torch.ops.aten._unsafe_view(output_TO, (*x.shape[:-1], output_TO.shape[-1]))
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        return *linear_backward(ctx, grad_output), None, None


def linear_backward(ctx: Any, grad_output: Tensor, send: Callable[[Tensor], None] | None = None) -> tuple[Any, ...]:
    """Compute gradients of x, weight and bias from what a forward has left on `ctx`; `send` as in `linear_grads`."""
    needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    grad_TO = as_matrix(grad_output)
    weight, kept = weight_and_input(ctx, needs_weight)
    grad_input, grad_weight = linear_grads(
        grad_TO, weight, ctx.recipe, kept, needs_input=needs_input, dtype=grad_output.dtype, send=send
    )
    grad_bias = bias_grad(grad_TO, ctx.bias_dtype) if needs_bias else None
    return None if grad_input is None else grad_input.view(ctx.x_shape), grad_weight, grad_bias


def keep_weight(ctx: Any, weight: Tensor, weight_fp8: Fp8Weight, *, record: bool) -> tuple[Tensor, ...]:
    """Return the tensors to save first, of a linear's weight [O, I], read as `weight_fp8`, for `weight_and_input`."""
    # On ctx and not in save_for_backward: non-reentrant checkpointing gives back saved tensors without their
    # Python attributes, and `weight._fp8` is one. The Parameter outlives the graph anyway. A sum with an adapter
    # (PEFT's `target_parameters`) is none: on ctx it would be held through a checkpoint, which frees what is saved.
    ctx.weight = weight if isinstance(weight, nn.Parameter) else None
    ctx.weight_dtype = weight.dtype if ctx.weight is None else None
    if ctx.weight is None:
        return weight_fp8 if record else ()
    checked = checked_weights((weight, record and ctx.needs_input_grad[0]))
    ctx.num_checked = len(checked)
    return checked


def checked_weights(*weights: tuple[Tensor, bool]) -> tuple[Tensor, ...]:
    """Return weights to save beside those on ctx: autograd raises if one has changed before its backward unpacks them.

    Each comes with whether the backward reads it, as nn.Linear's does for the input's gradient. Weights with a payload
    are left out (see `keep_weight`); it is a ZeRO optimizer or Fp8AdamW that changes them.
    """
    return tuple(w for w, is_read in weights if is_read and type(w) is nn.Parameter and not hasattr(w, "_fp8"))


def weight_and_input(ctx: Any, needs_weight: bool) -> tuple[Tensor | KeptWeight, Kept | None]:
    """Return the weight and, if wanted, the input that a forward has kept, as `linear_grads` takes them."""
    if ctx.weight is not None:
        kept = ctx.saved_tensors[ctx.num_checked :] if needs_weight or ctx.num_checked else ()
        return ctx.weight, kept if needs_weight else None
    data, scale_inv, *kept_x = ctx.saved_tensors
    return KeptWeight(Fp8Weight(data, scale_inv), ctx.weight_dtype), tuple(kept_x) if needs_weight else None


class Fp8Linear(nn.Linear):
    """An nn.Linear computed in FP8; `from_linear` makes it of an existing one.

    The input is bf16, fp16 or fp32 [..., in_features], as the weight is (autocast casts it first); the output has the
    input's dtype. Gradients are in high precision: the input's in its dtype, the weight's in the weight's.

    Attributes:
        fp8_recipe: source of scales, gradient format, GEMM backend.
        weight_suffix: end of the weight's name, after the layer's own.
        is_parallel: whether ranks share its weight's rows or columns, whose gathers move FP8 only.
        mlp_function: given the linears of a SwiGLU MLP whose gate is of this class, returns a function that computes
            them at once, as `nn.fused.swiglu.swiglu_mlp` does, or None.
    """

    fp8_recipe: Recipe
    weight_suffix: ClassVar[str] = ".weight"
    is_parallel: ClassVar[bool] = False
    mlp_function: ClassVar[Callable[[Sequence[Any]], Callable[..., Tensor] | None] | None] = None

    @classmethod
    def from_linear(cls, module: nn.Linear, recipe: Recipe) -> Fp8Linear:
        """Convert `module` to an Fp8Linear in place: same object, same Parameters, hooks and state dict.

        Args:
            module: exactly an nn.Linear.
            recipe: the layer's own (a DelayedRecipe has the slots of one layer).

        Raises:
            ConfigError: `module` is an Fp8Linear already, or of another subclass of nn.Linear; or its forward, or that
                of nn.Linear, was replaced.
        """
        if type(module) is not nn.Linear:
            raise ConfigError(
                f"module: expected an nn.Linear, got {type(module).__name__}. A layer is converted once, and only if "
                "its class is exactly nn.Linear."
            )
        if (reason := replaced_forward(module)) is not None:
            raise ConfigError(
                f"module: expected nn.Linear's own forward, got another: {reason}. Undo that, or leave it in bf16."
            )
        convert_in_place(module, cls)
        assert isinstance(module, Fp8Linear)
        module.fp8_recipe = recipe
        return module

    def forward(self, input: Tensor) -> Tensor:
        if self.fp8_recipe.is_plain and is_bf16_here(self.weight):
            with torch._C.DisableTorchFunctionSubclass():  # the weight itself, and no copy of its values
                return self._stock_forward(input)
        return self.product(input, self.bias)

    def _stock_forward(self, input: Tensor) -> Tensor:
        """Compute as the class that the layer had before it was converted."""
        return nn.Linear.forward(self, input)

    def product(self, input: Tensor, bias: Tensor | None) -> Tensor:
        """Compute `input W^T + bias` in FP8, [..., out_features]."""
        input = self.checked(input, self.weight, self.in_features if self.fp8_recipe.weight_is_transposed else None)
        apply: Any = _LinearFunction.apply  # untyped in torch
        if torch._C._get_tracing_state():
            return self._traced(apply, input, bias)
        output: Tensor = apply(input, self.weight, bias, self.fp8_recipe, torch.is_grad_enabled())
        return output

    def _traced(self, apply: Any, input: Tensor, bias: Tensor | None) -> Tensor:
        """Compute for torch.jit.trace, which compares its graph with one that it makes without gradients."""
        try:
            output: Tensor = apply(input, self.weight, bias, self.fp8_recipe, True)
        except RuntimeError as error:
            if "unordered_map::at" not in str(error):  # as torch 2.13 says it, of any two functions of autograd
                raise
            raise RuntimeError(
                "torch.jit.trace: expected no tensor that two FP8 layers read (gate and up, q, k and v), got one. "
                "Torch cannot trace that: use torch.fx.symbolic_trace or torch.export."
            ) from error
        return output

    @staticmethod
    def checked(input: Tensor, weight: Tensor, num_features: int | None = None) -> Tensor:
        """Return `input` in an active autocast's dtype; raise as `check_input`, and ValueError for a wrong dtype."""
        check_input(input, weight, num_features)
        if input.dtype not in _INPUT_DTYPES:
            raise ValueError(
                f"input: expected bfloat16, float16 or float32, got {input.dtype}. Cast it before the linear."
            )
        if torch.is_autocast_enabled(input.device.type):
            input = input.to(torch.get_autocast_dtype(input.device.type))
        return input

    def revert(self) -> None:
        """Give the layer the class that `from_linear` was given again, with the same Parameters."""
        del self.fp8_recipe
        convert_back(self, nn.Linear)

    def _apply(self, fn: Callable[..., Tensor], recurse: bool = True) -> Fp8Linear:
        super()._apply(fn, recurse)
        self.fp8_recipe.move(self.weight.device)
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies and pickles, whose weight is a Parameter in its nominal dtype."""
        return {**self.__dict__, "copied": copied_scales(self.weight, self.fp8_recipe)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        copied = state.pop("copied", None)
        super().__setstate__(state)
        self.fp8_recipe.copied = copied

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.fp8_recipe.describe()}"


def conv1d_class() -> type[nn.Module] | None:
    """Return transformers' Conv1D; None if nobody has imported it, so that there is no such layer."""
    found: type[nn.Module] | None = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)
    return found


def is_conv1d(module: nn.Module) -> bool:
    """Whether `module` is exactly a Conv1D, or one in FP8."""
    return type(module) in (conv1d_class(), Fp8Conv1D)


class Fp8Conv1D(Fp8Linear):
    """transformers' Conv1D, the linear of GPT-2, in FP8: its weight and the gradient are [I, O], input features first.

    One scale for the whole weight suits either layout, and so does a GEMM. Scales of rows or blocks would be those of
    input features, along which `output` contracts: layers with such recipes stay in bf16.
    """

    @classmethod
    def from_linear(cls, module: nn.Module, recipe: Recipe) -> Fp8Conv1D:
        """Convert a Conv1D in place; the recipe, with one scale for the weight, then reads it as it is stored."""
        weight: Any = module.weight
        convert_in_place(module, cls)
        assert isinstance(module, Fp8Conv1D)
        module.in_features, module.out_features = full_shape(weight)
        module.fp8_recipe = recipe
        recipe.weight_is_transposed = True
        return module

    def _stock_forward(self, input: Tensor) -> Tensor:
        stock: Any = conv1d_class()
        output: Tensor = stock.forward(self, input)
        return output

    def revert(self) -> None:
        del self.fp8_recipe, self.in_features, self.out_features
        convert_back(self, conv1d_class())


def is_bf16_here(weight: Any) -> bool:
    """Whether the weight's own data is bf16, and so in the backward: no payload, ZeRO-1/2 has `Fp8Payload.hp`, or
    ZeRO-3 has gathered it in bf16, as it does for a layer that is plain."""
    payload = getattr(weight, "_fp8", None)
    if payload is None or payload.hp is not None:
        return True
    return payload.data is None and hasattr(weight, "ds_id") and weight.numel() > 0


def full_shape(p: Any) -> torch.Size:
    """Return the true shape, which deepspeed.zero.Init leaves in ds_shape, beside an empty tensor."""
    return torch.Size(getattr(p, "ds_shape", p.shape))
