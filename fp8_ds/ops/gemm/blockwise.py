"""Products of FP8 matrices with a scale per block: `a @ b.T`, a in 1x128 blocks, b in 1x128 or 128x128 blocks.

Requirements of torch and cuBLASLt on CUDA, and what `_torch_scaled_mm` makes of any operands to meet them:

- NVIDIA compute capability 9.0 and no other; cublasLt >= 12.9. torch `aten/src/ATen/native/cuda/ScaledBlas.cpp`,
  `_check_deepseek_support` (lines 804-820 at 33812ec); cuBLAS documentation 3.1.4, "Scaling Mode Support Overview". No
  fast accumulation (`aten/src/ATen/cuda/CUDABlas.cpp`, `get_scale_mode`).
- Blocks 1x128 by 1x128, 1x128 by 128x128, 128x128 by 1x128; not 128x128 by 128x128 (cuBLAS 3.1.4.5).
- Scales of 1x128 blocks: [M, ceil(K / 128)] with strides (1, M); of b the same with N, not transposed, in the second
  version of the op (`torch.nn.functional.scaled_mm`, torch >= 2.10). ScaledBlas.cpp,
  `_scaled_block1x128_block1x128`.
- Scales of 128x128 blocks of b: [L4, ceil(N / 128)] with strides (1, L4), L4 = ceil(K / 128) rounded up to 4: in
  memory one row of L4 per 128 rows of b. ScaledBlas.cpp, `_scaled_block1x128_block128x128`; silently wrong without the
  padding before pytorch/pytorch#166752. torch 2.13's own fake, `torch/_meta_registrations.py` 7427-7441, floors K / 128
  and N / 128: harmless here, where an op of our own with its own fake surrounds it.
- Scales start at multiples of 16 bytes, M and N are multiples of 4 (cuBLAS 3.1.4.5.1), and all dims of FP8 operands of
  16 ("To use tensor- or block-scaled FP8 kernels", cublasLtMatmul). Padding rows are removed from the result; K is
  padded to whole blocks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8_ds.ops._register import register
from fp8_ds.ops.blockwise import num_blocks
from fp8_ds.ops.blockwise.reference import BLOCK
from fp8_ds.ops.gemm import GemmBackend, check_arguments
from fp8_ds.ops.gemm.scaled_mm import k_major

_ROWS = 16
_SCALE_ROWS = 4


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _per_element(x: Tensor, scale_inv: Tensor) -> Tensor:
    rows = scale_inv if scale_inv.shape[0] == x.shape[0] else scale_inv.repeat_interleave(BLOCK, 0)
    return rows.repeat_interleave(BLOCK, 1)[: x.shape[0], : x.shape[1]]


def scaled_mm_blockwise_reference(
    a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """Dequantize and multiply in float32, then cast once."""
    # On CUDA, TF32 must be off (torch's default) for this to be a reference.
    a_hp = a.to(torch.float32) * _per_element(a, scale_inv_a)
    b_hp = b.to(torch.float32) * _per_element(b, scale_inv_b)
    return (a_hp @ b_hp.t()).to(out_dtype)


def outer_major_scales(scale_inv: Tensor, num_rows: int) -> Tensor:
    """Lay out scales of 1x128 blocks as [num_rows, ceil(K / 128)], strides (1, num_rows); added rows have scale 1."""
    blocks = scale_inv.shape[1]
    if scale_inv.shape[0] == num_rows and scale_inv.stride() == (1, num_rows) and scale_inv.data_ptr() % 16 == 0:
        return scale_inv
    laid_out = torch.ones(blocks, num_rows, dtype=torch.float32, device=scale_inv.device)
    laid_out[:, : scale_inv.shape[0]] = scale_inv.t()
    return laid_out.t()


def square_scales(scale_inv: Tensor) -> Tensor:
    """Lay out scales of 128x128 blocks as [ceil(K / 128) rounded up to 4, ceil(N / 128)], strides (1, size 0)."""
    rows, blocks = scale_inv.shape
    padded = _round_up(blocks, _SCALE_ROWS)
    if padded == blocks and scale_inv.is_contiguous() and scale_inv.data_ptr() % 16 == 0:
        return scale_inv.as_strided((blocks, rows), (1, blocks))
    laid_out = torch.ones(rows, padded, dtype=torch.float32, device=scale_inv.device)
    laid_out[:, :blocks] = scale_inv
    return laid_out.t()


def _torch_scaled_mm(a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out_dtype: torch.dtype) -> Tensor:
    num_m, num_k = a.shape
    num_n = b.shape[0]
    if num_m == 0 or num_n == 0 or num_k == 0:
        return torch.zeros(num_m, num_n, dtype=out_dtype, device=a.device)
    padded_m, padded_n, padded_k = _round_up(num_m, _ROWS), _round_up(num_n, _ROWS), _round_up(num_k, BLOCK)
    is_square = scale_inv_b.shape[0] != num_n
    output = F.scaled_mm(
        k_major(a, padded_m, padded_k),
        k_major(b, padded_n, padded_k).t(),
        outer_major_scales(scale_inv_a, padded_m),
        F.ScalingType.BlockWise1x128,
        square_scales(scale_inv_b) if is_square else outer_major_scales(scale_inv_b, padded_n),
        F.ScalingType.BlockWise128x128 if is_square else F.ScalingType.BlockWise1x128,
        output_dtype=out_dtype,
    )
    return output if (padded_m, padded_n) == (num_m, num_n) else output[:num_m, :num_n].contiguous()


def _kernel(
    a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, out_dtype: torch.dtype, backend: str
) -> Tensor:
    # The dispatcher skips autocast at our op, not inside it, where the reference's float32 product would run in bf16.
    if torch.is_autocast_enabled(a.device.type):
        with torch.autocast(a.device.type, enabled=False):
            return _kernel(a, b, scale_inv_a, scale_inv_b, out_dtype, backend)
    if backend == "reference" or not a.is_cuda:
        return scaled_mm_blockwise_reference(a, b, scale_inv_a, scale_inv_b, out_dtype)
    return _torch_scaled_mm(a, b, scale_inv_a, scale_inv_b, out_dtype)


_scaled_mm = register(
    "scaled_mm_blockwise(Tensor a, Tensor b, Tensor scale_inv_a, Tensor scale_inv_b, ScalarType out_dtype, "
    "str backend) -> Tensor",
    _kernel,
    lambda a, b, scale_inv_a, scale_inv_b, out_dtype, backend: torch.empty(
        a.shape[0], b.shape[0], dtype=out_dtype, device=a.device
    ),
)


def _check_scale(name: str, scale_inv: Tensor, expected: tuple[tuple[int, int], ...]) -> None:
    if scale_inv.dtype != torch.float32 or tuple(scale_inv.shape) not in expected:
        raise ValueError(
            f"{name}: expected float32 {' or '.join(map(str, expected))}, got {scale_inv.dtype} "
            f"{tuple(scale_inv.shape)}. Take operand and scales from the same call of quantize_blockwise."
        )


def scaled_mm_blockwise(
    a_fp8: Tensor,
    b_fp8: Tensor,
    scale_inv_a: Tensor,
    scale_inv_b: Tensor,
    out_dtype: torch.dtype,
    backend: GemmBackend = "torch",
) -> Tensor:
    """Compute `(a_fp8 * scale_inv_a) @ (b_fp8 * scale_inv_b).T`, with scales per block of 128 along K.

    M, K and N are arbitrary, also 0. Nothing is copied where they are multiples of 16, 128 and 16 and the scales come
    from `quantize_blockwise` (those of 128x128 blocks: where ceil(K / 128) is a multiple of 4).

    Args:
        a_fp8: float8_e4m3fn or float8_e5m2 [M, K].
        b_fp8: the same [N, K]; at most one of the two is e5m2.
        scale_inv_a: float32 [M, ceil(K / 128)], any strides.
        scale_inv_b: float32 [N, ceil(K / 128)] (1x128 blocks) or [ceil(N / 128), ceil(K / 128)] (128x128 blocks).
        out_dtype: bfloat16, float16 or float32.
        backend: "torch": `torch.nn.functional.scaled_mm` on CUDA, where it wants compute capability 9.0; torch has no
            blockwise product on CPU, and the reference runs there. "reference": de-quantises, multiplies in float32.

    Returns:
        `out_dtype` [M, N], contiguous.

    Raises:
        ValueError: dtypes, shapes or backend other than these.
        NotImplementedError: by torch, on CUDA devices other than Hopper.
    """
    check_arguments(a_fp8, b_fp8, out_dtype, backend)
    blocks, num_n = num_blocks(a_fp8.shape[1]), b_fp8.shape[0]
    _check_scale("scale_inv_a", scale_inv_a, ((a_fp8.shape[0], blocks),))
    _check_scale("scale_inv_b", scale_inv_b, ((num_n, blocks), (num_blocks(num_n), blocks)))
    return _scaled_mm(a_fp8, b_fp8, scale_inv_a, scale_inv_b, out_dtype, backend)
