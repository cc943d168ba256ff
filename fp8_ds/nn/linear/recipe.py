"""Recipes by which a linear enters FP8: one object per layer, chosen when the layer is converted.

All recipes are, with T tokens,

    output      = gemm(q_e4m3(x),           weight_fp8)
    grad_input  = gemm(q_grad(grad_output), weight_fp8.T)
    grad_weight = gemm(q_grad(grad_output).T, q_e4m3(x).T)

and differ in which elements of x and grad_output share a scale, and where scales come from. The weight's always come
from its payload. This file: what they have in common,
their operands, and the one quantisation of an input that several layers read. The recipes: recipes.py.
"""

from __future__ import annotations

import math
import weakref
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8_ds.config import Gemm, LinearConfig
from fp8_ds.errors import UnsupportedError
from fp8_ds.nn.linear.payload import OF_RECIPE, TENSOR, CopiedScales, Fp8Payload
from fp8_ds.numerics.formats import BY_NAME, Float8Format
from fp8_ds.numerics.scale import AmaxSlot
from fp8_ds.ops._producer import Scaling
from fp8_ds.ops.gemm import GemmBackend, scaled_mm
from fp8_ds.ops.transpose import transpose

_GRAD_FORMATS = {name: replace(fmt) for name, fmt in BY_NAME.items()}
"""Formats equal to the constants, but other objects. torch.compile (2.11 to 2.13, `make_dupe_guard` in
torch/_dynamo/guards.py) has no guard on what an argument holds if that is also a constant of a module: the graph of a
layer whose gradients are in E4M3 would serve one whose gradients are in E5M2."""


Kept = tuple[Tensor, ...]
"""Tensors of the input that grad_weight needs, saved from forward to backward."""


class Fp8Weight(NamedTuple):
    """A weight as a GEMM reads it: float8_e4m3fn [O, I], and its grid (nn/linear/payload.py) to leave FP8."""

    data: Tensor
    scale_inv: Tensor

    def transposed(self) -> Tensor:
        """Return the bytes as [I, O], the contracted dim of grad_input last."""
        return transpose(self.data) if torch.Tensor.is_contiguous(self.data) else self.data.t()


@dataclass(frozen=True)
class Quantized:
    """A matrix [T, C] in FP8, as it is, transposed, or both.

    Args:
        rows: [T, C], contiguous; None where nobody contracts over C.
        columns: [C, T], contiguous: the transpose, for products that contract over T; None where there is none.
        scale_inv: float32, multiply to leave FP8. One for all (0-dim), one per row ([T, 1]), or one per 1x128 block of
            `rows` ([T, ceil(C / 128)]). Where it is per row, `columns` have the same bytes and scales.
        columns_scale_inv: the scales of `columns` where they were quantised by their own: [C, 1] or
            [C, ceil(T / 128)]. None: `columns` are `rows` transposed, scaled by `scale_inv`.
        slot: of the amax history that gave the scale and has recorded the amax, where there is one.
    """

    rows: Tensor | None
    columns: Tensor | None
    scale_inv: Tensor
    columns_scale_inv: Tensor | None = None
    slot: AmaxSlot | None = None

    def with_columns(self) -> Quantized:
        """Return the matrix with `columns`: the bytes of `rows`, transposed, if they are missing."""
        if self.columns is not None:
            return self
        assert self.rows is not None
        return replace(self, columns=transpose(self.rows))


class InputCache:
    """The last tensor that was quantised, remembered for as long as its memory lives, and no longer.

    A layer that is given the same tensor, unchanged, gets the same FP8 tensors; so it does for an alias of the same
    shape and strides, for ZeRO-3's hooks hand each module one of its own. Anything else is quantised: another tensor,
    one written in place, another stream, a layout that was not made, inference mode, a tensor that autograd has not
    computed (a parameter, a batch, anything without gradients). As for autograd, a write past the version counter
    (`.data`, a collective) is not seen.
    """

    def __init__(self) -> None:
        self._storage: weakref.ref[torch.UntypedStorage] | None = None
        self._key: tuple[object, ...] = ()
        self._quantized: Quantized | None = None

    def store(self, x: Tensor, quantized: Quantized, epoch: object = None) -> None:
        """Give these FP8 tensors to layers that are given this tensor, unchanged, but not in inference mode."""
        if _is_inference(x):
            return
        self._quantized, self._key = quantized, _key(x, epoch)
        self._storage = weakref.ref(x.untyped_storage(), self._forget)

    def find(self, x: Tensor, epoch: object) -> Quantized | None:
        """Return what was stored for this tensor in this epoch; None if it is not the last one, or has changed."""
        if self._storage is None or self._storage() is not x.untyped_storage():
            return None
        return self._quantized if self._key == _key(x, epoch) else None

    def _forget(self, storage: weakref.ref[torch.UntypedStorage]) -> None:
        if storage is self._storage:
            self._storage = self._quantized = None

    def __reduce__(self) -> tuple[type[InputCache], tuple[()]]:
        return InputCache, ()  # copies and pickles of a model start with nothing remembered


def _is_inference(x: Tensor) -> bool:
    """Whether x has no version counter, or FP8 tensors made now could not be kept for a backward."""
    return x.is_inference() or torch.is_inference_mode_enabled()


def _is_computed(x: Tensor) -> bool:
    """Whether autograd has just computed x. A parameter, a buffer, a batch may be written past their version counters:
    by an optimizer step into the buffer that a parameter views, by a collective."""
    base = x._base if x._is_view() else x
    return x.grad_fn is not None and base is not None and base.grad_fn is not None


def _key(x: Tensor, epoch: object) -> tuple[object, ...]:
    """Return what must be unchanged: elements, their version, the stream that computes with them, and the epoch."""
    stream = torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0
    return x.storage_offset(), x.shape, x.stride(), x.dtype, x._version, stream, epoch


class Recipe(ABC):
    """The three GEMMs of one linear, from and to high precision.

    Attributes:
        input_cache: of all layers of a model: an input that several of them read is quantised once. None: each for
            itself.
        needs_grad_columns: whether `grad_weight` multiplies the quantised grad_output.
        is_fp8: whether its GEMMs run in FP8.
        is_plain: whether the layer stays in bf16 for good, and computes as the class that it had before does.
        weight_is_transposed: whether the layer's weight is stored [I, O], and its gradient, too (`Fp8Conv1D`).
        is_stored: whether the weight is frozen and keeps the bytes and scales of its FP8 folder.
        copied: scales that quantise the weight in a layer of a copied model (`copied_scales`); else None.
    """

    name: str
    needs_grad_columns = True
    is_fp8 = True
    is_plain = False
    weight_is_transposed = False
    is_stored = False
    copied: CopiedScales | None = None

    def __init__(self, linear_config: LinearConfig, input_cache: InputCache | None = None) -> None:
        self.grad_format: Float8Format = _GRAD_FORMATS[linear_config.grad_dtype]
        self.backend: GemmBackend = linear_config.backend
        self.fast_gemms = linear_config.fast_gemms
        self.linear_config = linear_config
        self.input_cache = input_cache

    def describe(self) -> str:
        """Return the text for `print(model)`."""
        fast = "+".join(self.fast_gemms) or "none"
        return f"fp8={self.name}, grad={self.grad_format.name}, backend={self.backend}, fast={fast}"

    def product(
        self, gemm: Gemm, a_fp8: Tensor, b_fp8: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """Call `scaled_mm` by this layer's backend, with the accumulation that it has for `gemm`."""
        fast = gemm in self.fast_gemms
        return scaled_mm(a_fp8, b_fp8, scale_inv_a, scale_inv_b, dtype, self.backend, use_fast_accum=fast)

    def read_weight(self, weight: Tensor) -> Fp8Weight:
        """Read the weight, see nn/linear/fp8_linear.py."""
        payload: Fp8Payload | None = getattr(weight, "_fp8", None)
        if payload is None:
            if self.copied is not None and self.copied.fit(weight):
                return Fp8Weight(*self.copied.quantize(weight.detach()))
            return self.quantize_weight(weight.detach())
        if (data := payload.data) is not None:
            return Fp8Weight(data, payload.scale_inv)
        # The Parameter subclass of a payload answers readers with de-quantised values; here the stored ones are wanted.
        refuse_released(weight)
        with torch._C.DisableTorchFunctionSubclass():
            return Fp8Weight(payload.quantize(weight.detach()), payload.scale_inv)

    def quantize_input(self, x: Tensor, *, needs_columns: bool, record: bool) -> Quantized:
        """Quantize the layer's input [..., I] to E4M3 [T, I]: rows for the output, columns for grad_weight.

        `record`: whether this is a training forward.
        """
        cache = self.input_cache
        if cache is None or torch.compiler.is_compiling() or _is_inference(x):  # a trace removes repetitions itself
            return self._quantize_input(x, needs_columns, record)
        epoch = self._epoch(record)
        known = cache.find(x, epoch)
        if known is None and not _is_computed(x):
            return self._quantize_input(x, needs_columns, record)
        if known is not None and (known.columns is not None or not needs_columns):
            return known
        x_fp8 = self._quantize_input(x, needs_columns, record) if known is None else self._complete(known)
        cache.store(x, x_fp8, epoch)
        return x_fp8

    def offer(self, x: Tensor, x_fp8: Quantized, *, record: bool) -> None:
        """Give layers that read `x` what its producer has quantised, as `producer_scaling` says."""
        if self.input_cache is not None:
            self.input_cache.store(x, x_fp8, self._epoch(record))

    def adopt(self, x: Tensor, x_fp8: Quantized, *, record: bool) -> Quantized:
        """Return the input `x` as another layer with this kind of recipe, or a producer, has quantised it."""
        return x_fp8

    def producer_scaling(self) -> Scaling | None:
        """Return how a fused producer of this layer's input quantises it; None: it leaves that to the layer."""
        return None

    def scaling_without_hp(self) -> Scaling | None:
        """Return `producer_scaling` for a producer that writes no bf16; None: the layer has to see bf16."""
        return self.producer_scaling()

    def grad_scaling(self) -> Scaling | None:
        """Return how a fused producer of grad_output quantises it to `grad_format`; None: the layer does that."""
        return None

    def kept(self, x: Tensor, x_fp8: Quantized) -> Kept:
        """Return what grad_weight needs of the input."""
        assert x_fp8.columns is not None
        return x_fp8.columns, x_fp8.scale_inv

    @abstractmethod
    def quantize_weight(self, weight: Tensor) -> Fp8Weight:
        """Quantize a weight [O, I] without a payload (no ZeRO), by current scaling."""

    @abstractmethod
    def _quantize_input(self, x: Tensor, needs_columns: bool, record: bool) -> Quantized: ...

    def _complete(self, x_fp8: Quantized) -> Quantized:
        return x_fp8.with_columns()

    def _epoch(self, record: bool) -> object:
        """Return the epoch; inputs quantised in another one are quantised again."""
        return None

    @abstractmethod
    def quantize_grad_output(self, grad_TO: Tensor, weight: Fp8Weight | None, kept: Kept | None) -> Quantized:
        """Quantize grad_output [T, O], contiguous, to the configured gradient format.

        Args:
            weight: what grad_input multiplies its rows with; None if it is not wanted.
            kept: what grad_weight multiplies its columns with; None if it is not wanted.
        """

    def output(self, x_fp8: Quantized, weight: Fp8Weight, dtype: torch.dtype) -> Tensor:
        """Compute the output, [T, O], by one scale for all or one for each row of either operand."""
        assert x_fp8.rows is not None
        return self.product("output", x_fp8.rows, weight.data, x_fp8.scale_inv, weight.scale_inv, dtype)

    def biased_output(self, x_fp8: Quantized, weight: Fp8Weight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Compute `output` with `bias` [O] added."""
        output_TO = self.output(x_fp8, weight, dtype)
        return output_TO if bias is None else output_TO + bias.to(dtype)

    @abstractmethod
    def grad_input(self, grad_fp8: Quantized, weight: Fp8Weight, dtype: torch.dtype) -> Tensor:
        """Compute grad_input, [T, I]."""

    @property
    def unobserved(self) -> Recipe:
        """Recipe for products of single experts, whose operands a monitor has counted by `observe_operands`."""
        return self

    def move(self, device: torch.device) -> None:  # noqa: B027  # most have nothing to move
        """Follow the layer's weight to `device`, with what a copy has beside it."""

    def observe_operands(self, x_fp8: Quantized, weight: Fp8Weight) -> None:  # noqa: B027  # most have nothing to do
        """Let a monitor count the codes of all experts' input and weight, which `unobserved.output` multiplies."""

    def grad_rows(self, grad_fp8: Quantized) -> Tensor:
        """Return codes [T, O] of grad_output for a `grad_input` that is not the recipe's own; the monitor sees them."""
        assert grad_fp8.rows is not None
        return grad_fp8.rows

    @abstractmethod
    def grad_weight(self, grad_fp8: Quantized, grad_TO: Tensor | None, kept: Kept, dtype: torch.dtype) -> Tensor:
        """Compute grad_weight, [O, I] or as the weight is stored; without grad_TO if a producer has quantised it."""


def copied_scales(weight: Any, recipe: Recipe) -> CopiedScales | None:
    """Return `copied` for a copy of an engine's layer, or of a copy; None: it is in bf16, or its weight is not here."""
    payload: Fp8Payload | None = getattr(weight, "_fp8", None)
    if payload is None:
        return recipe.copied
    if not recipe.is_fp8 or weight.numel() == 0:
        return None
    granularity = TENSOR if payload.scale.dim() == 0 else OF_RECIPE[recipe.name]
    return CopiedScales.of(weight.detach(), granularity, payload.scale, payload.scale_inv)


def refuse_released(weight: Any) -> None:
    """Raise UnsupportedError if `weight`, which has a payload, is gathered neither in FP8 nor in bf16."""
    if weight.numel() == 0:
        raise UnsupportedError(
            f"{weight._fp8.name}: expected a weight that is gathered, got one that ZeRO-3 has released. It is there "
            "from a call of its module on, for that forward and one backward of it: call the module and not its "
            '`forward`, and in place of `retain_graph=True` add the losses up for one backward. Or set "stage" to 2.'
        )


def as_matrix(x: Tensor) -> Tensor:
    """Return [..., C] as [T, C], contiguous."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1]).contiguous()
