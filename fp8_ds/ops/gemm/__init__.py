"""Products of FP8 matrices: `a @ b.T` of [M, K] and [N, K], result in high precision.

The three GEMMs of a linear are named by what they make. With tokens T, input features I, output features O:

    output[T, O]      = scaled_mm(x[T, I],           weight[O, I])
    grad_input[T, I]  = scaled_mm(grad_output[T, O], weight[O, I].T)
    grad_weight[O, I] = scaled_mm(grad_output[T, O].T, x[T, I].T)

Fast accumulation keeps partial sums in the tensor core's shorter accumulator (about 14 bits on Hopper). By default
only `output` uses it: errors of a forward GEMM are averaged over the following layers, while those of `grad_weight` are
sums over all tokens that go straight into the weights, and those of `grad_input` pile up from layer to layer. Sources:
for the choice torchao 0.18 `torchao/float8/config.py` (gemm_config_output True, _grad_input and _grad_weight False);
for the 14 bits the DeepSeek-V3 report (arXiv 2412.19437) section 3.3.2. What it costs and gains, measured:
docs/recipes.md, "Fast accumulation".
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fp8_ds.ops._register import register
from fp8_ds.ops.gemm import scaled_mm as torch_backend

GemmBackend = Literal["torch", "reference"]
BACKENDS: tuple[GemmBackend, ...] = ("torch", "reference")
_FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
_OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def scaled_mm_reference(
    a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """Dequantize and multiply in float32, then cast once."""
    # On CUDA, TF32 must be off (torch's default) for this to be a reference.
    a_hp = a.to(torch.float32) * scale_inv_a
    b_hp = b.to(torch.float32) * scale_inv_b
    return (a_hp @ b_hp.t()).to(out_dtype)


def _kernel(
    a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out_dtype: torch.dtype, fast: bool, backend: str
) -> Tensor:
    # The dispatcher skips autocast at our op, not inside it: the reference's float32 product, and the one in which CPU
    # `_scaled_mm` ends, would run in bf16.
    if torch.is_autocast_enabled(a.device.type):
        with torch.autocast(a.device.type, enabled=False):
            return _kernel(a, b, scale_inv_a, scale_inv_b, out_dtype, fast, backend)
    if backend == "reference":
        return scaled_mm_reference(a, b, scale_inv_a, scale_inv_b, out_dtype)
    return torch_backend.scaled_mm(a, b, scale_inv_a, scale_inv_b, out_dtype, fast)


_scaled_mm = register(
    "scaled_mm(Tensor a, Tensor b, Tensor scale_inv_a, Tensor scale_inv_b, ScalarType out_dtype, bool fast, "
    "str backend) -> Tensor",
    _kernel,
    lambda a, b, *rest: _checked(a, b, *rest).new_empty(a.shape[0], b.shape[0], dtype=rest[2]),
)


def check_dtypes(a_fp8: Tensor, b_fp8: Tensor, out_dtype: torch.dtype) -> None:
    """Refuse operands and a result that no product takes."""
    if a_fp8.dtype not in _FP8_DTYPES or b_fp8.dtype not in _FP8_DTYPES or a_fp8.dtype == b_fp8.dtype == _FP8_DTYPES[1]:
        raise ValueError(
            f"a_fp8, b_fp8: expected float8_e4m3fn with float8_e4m3fn or float8_e5m2, got {a_fp8.dtype} and "
            f"{b_fp8.dtype}. Quantise one operand to E4M3."
        )
    if out_dtype not in _OUT_DTYPES:
        raise ValueError(f"out_dtype: expected bfloat16, float16 or float32, got {out_dtype}. Use one of these.")


def check_arguments(a_fp8: Tensor, b_fp8: Tensor, out_dtype: torch.dtype, backend: str) -> None:
    """Refuse operands, result and backend that no product of this package takes."""
    check_dtypes(a_fp8, b_fp8, out_dtype)
    if a_fp8.dim() != 2 or b_fp8.dim() != 2 or a_fp8.shape[1] != b_fp8.shape[1]:
        raise ValueError(
            f"a_fp8, b_fp8: expected [M, K] and [N, K], got {tuple(a_fp8.shape)} and {tuple(b_fp8.shape)}. "
            "Both operands are given with the contracted dim last."
        )
    if backend not in BACKENDS:
        raise ValueError(f"backend: expected one of {BACKENDS}, got {backend!r}. Use one of these.")


def _checked(
    a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out_dtype: torch.dtype, fast: bool, backend: str
) -> Tensor:
    """Return `a` if `scaled_mm` takes the arguments."""
    check_arguments(a, b, out_dtype, backend)
    for name, scale_inv, num_rows in (("a", scale_inv_a, a.shape[0]), ("b", scale_inv_b, b.shape[0])):
        if scale_inv.dtype != torch.float32 or tuple(scale_inv.shape) not in ((), (num_rows, 1)):
            raise ValueError(
                f"scale_inv_{name}: expected float32, 0-dim or {(num_rows, 1)}, got {scale_inv.dtype} "
                f"{tuple(scale_inv.shape)}. Scales per block are those of scaled_mm_blockwise."
            )
    return a


def scaled_mm(
    a_fp8: Tensor,
    b_fp8: Tensor,
    scale_inv_a: Tensor,
    scale_inv_b: Tensor,
    out_dtype: torch.dtype,
    backend: GemmBackend = "torch",
    use_fast_accum: bool = False,
) -> Tensor:
    """Compute `(a_fp8 * scale_inv_a) @ (b_fp8 * scale_inv_b).T`.

    M, K and N may be 0, and need not be multiples of 16 (operands are then padded with zeros). Operands may be
    transposed views; one that is not contiguous is copied once.

    Args:
        a_fp8: float8_e4m3fn or float8_e5m2 [M, K].
        b_fp8: the same [N, K]; at most one of the two is e5m2 (no tensor core multiplies E5M2 by E5M2).
        scale_inv_a: float32, on the operands' device, multiply to leave FP8: 0-dim, or [M, 1] with one per row.
        scale_inv_b: the same for b: 0-dim or [N, 1].
        out_dtype: bfloat16, float16 or float32.
        backend: "torch" is `torch._scaled_mm`; "reference" de-quantises and multiplies in float32.
        use_fast_accum: shorter accumulation, on CUDA only; see the module's text for where.

    Returns:
        `out_dtype` [M, N], contiguous, already out of FP8 (no scale left to apply).

    Raises:
        ValueError: dtypes, shapes or backend other than these; in a graph torch's RuntimeError with the same text.
    """
    arguments = (a_fp8, b_fp8, scale_inv_a, scale_inv_b, out_dtype, use_fast_accum, backend)
    if not torch.compiler.is_dynamo_compiling():  # it would trace all of it, and the op's fake checks the same
        _checked(*arguments)
    elif _is_plain(a_fp8, b_fp8, scale_inv_a, scale_inv_b, backend):
        scales = {"scale_a": scale_inv_a, "scale_b": scale_inv_b}
        product: Tensor = torch._scaled_mm(
            a_fp8, b_fp8.t(), **scales, out_dtype=out_dtype, use_fast_accum=use_fast_accum
        )
        return product
    return _scaled_mm(*arguments)


def _is_plain(a_fp8: Tensor, b_fp8: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, backend: str) -> bool:
    """Whether a graph has torch's own operator, which it calls without Python: on CUDA, with nothing to pad or to copy.

    A scale is not asked for its address, as eager mode does: those of this package are on cuBLASLt's grid
    (`scale_vector`), or memory of their own.
    """
    return (
        a_fp8.is_cuda
        and backend == "torch"
        and scale_inv_a.dim() == scale_inv_b.dim() == 0
        and a_fp8.is_contiguous()
        and b_fp8.is_contiguous()
        and a_fp8.shape[1] == b_fp8.shape[1] > 0
        and a_fp8.shape[1] % torch_backend.ALIGNMENT == b_fp8.shape[0] % torch_backend.ALIGNMENT == 0
        and a_fp8.shape[0] > 0 < b_fp8.shape[0]
    )
