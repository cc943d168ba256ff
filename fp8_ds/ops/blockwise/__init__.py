"""One power-of-two scale per block: 1x128 for activations and gradients, 128x128 for weights (DeepSeek-V3's recipe).

    output[T, O]      = scaled_mm_blockwise(x      1x128 along I, weight   128x128)
    grad_input[T, I]  = scaled_mm_blockwise(grad   1x128 along O, weight.T 128x128)
    grad_weight[O, I] = scaled_mm_blockwise(grad.T 1x128 along T, x.T      1x128 along T)

So x and its gradient are wanted twice, as rows ("row") and transposed ("col"), with blocks along the contracted dim of
each. Powers of two make the change from one to the other exact but for subnormal codes (`transpose_blockwise`), so one
saved layout of x can serve both. Sources: DeepSeek-V3 report (arXiv 2412.19437) section 3.3; for the scaling-aware
transpose FP8-Flow (arXiv 2511.02302).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fp8_ds.numerics.formats import BY_NAME, E4M3, Float8Format
from fp8_ds.ops._register import register_pair
from fp8_ds.ops.blockwise import reference
from fp8_ds.ops.blockwise.reference import BLOCK as BLOCK
from fp8_ds.ops.quantize import KERNEL_DTYPES, Layout, check_layout

BLOCKS = ((1, BLOCK), (BLOCK, BLOCK))
_MAX_OF = {fmt.dtype: fmt.max for fmt in BY_NAME.values() if fmt.dtype is not None}


class BlockwiseQuantized(NamedTuple):
    """A matrix [T, C] in FP8, as it is, transposed, or both; multiply a block by its scale_inv to leave FP8.

    Args:
        x_fp8: [T, C], contiguous.
        scale_inv: float32. Blocks (1, 128): [T, ceil(C / 128)], strides (1, T), cuBLASLt's layout. Blocks (128, 128):
            [ceil(T / 128), ceil(C / 128)], contiguous.
        x_fp8_t: [C, T], contiguous.
        scale_inv_t: the same of the transpose: [C, ceil(T / 128)] with strides (1, C), or
            [ceil(C / 128), ceil(T / 128)].
    """

    x_fp8: Tensor | None
    scale_inv: Tensor | None
    x_fp8_t: Tensor | None
    scale_inv_t: Tensor | None


def num_blocks(size: int) -> int:
    """Number of blocks that `size` elements fill, the last one perhaps in part."""
    return -(-size // BLOCK)


def empty_quantized(x: Tensor, dtype: torch.dtype, block_rows: int, wanted: bool = True) -> tuple[Tensor, Tensor]:
    """Allocate an FP8 tensor of the shape of `x` and its scale_inv, in the layouts that `BlockwiseQuantized` states."""
    if not wanted:
        return x.new_empty(0, dtype=dtype), x.new_empty(0, dtype=torch.float32)
    num_rows, num_cols = x.shape
    x_fp8 = x.new_empty((num_rows, num_cols), dtype=dtype)
    if block_rows == 1:
        return x_fp8, x.new_empty((num_blocks(num_cols), num_rows), dtype=torch.float32).t()
    return x_fp8, x.new_empty((num_blocks(num_rows), num_blocks(num_cols)), dtype=torch.float32)


_quantize = register_pair(
    "quantize_blockwise(Tensor x, ScalarType dtype, float fp8_max, int block_rows, bool row, bool col) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    reference.quantize_blockwise,
    lambda x, dtype, fp8_max, block_rows, row, col: (
        *empty_quantized(x, dtype, block_rows, row),
        *empty_quantized(x.t(), dtype, block_rows, col),
    ),
)
_transpose = register_pair(
    "transpose_blockwise(Tensor x_fp8, Tensor scale_inv, float fp8_max) -> (Tensor, Tensor)",
    reference.transpose_blockwise,
    lambda x_fp8, scale_inv, fp8_max: empty_quantized(x_fp8.t(), x_fp8.dtype, 1),
)
_block_amax = register_pair(
    "block_amax(Tensor x, SymInt start, SymInt num_rows, SymInt num_cols, int block_rows) -> Tensor",
    reference.block_amax,
    lambda x, start, num_rows, num_cols, block_rows: x.new_empty(
        (-(-num_rows // block_rows), num_blocks(num_cols)), dtype=torch.float32
    ),
)

_dequantize = register_pair(
    "dequantize_groupwise(Tensor x_fp8, Tensor scale_inv) -> Tensor",
    reference.dequantize_groupwise,
    lambda x_fp8, scale_inv: torch.empty_like(x_fp8, dtype=torch.bfloat16),
)


def _check_block(block: tuple[int, int]) -> None:
    if tuple(block) not in BLOCKS:
        raise ValueError(
            f"block: expected one of {BLOCKS}, got {block}. These are the blocks that cuBLASLt multiplies."
        )


def _check_hp(name: str, x: Tensor, dim: int) -> None:
    if x.dtype not in KERNEL_DTYPES or x.dim() != dim:
        raise ValueError(
            f"{name}: expected bf16, fp16 or float32 with {dim} dim(s), got {x.dtype} {tuple(x.shape)}. "
            "Flatten the leading dims of an activation to tokens."
        )


def quantize_blockwise(x: Tensor, fmt: Float8Format, block: tuple[int, int], layout: Layout) -> BlockwiseQuantized:
    """Quantize `x` to FP8 with a power-of-two scale per block, from one read of `x`.

    scale is the largest power of two with amax * scale <= fmt.max, at most 2**126; 1 for a block of zeros. A block at a
    ragged end has the amax of what it holds. A block with a NaN or an infinity gets scale_inv NaN.

    Args:
        x: bf16, fp16 or float32 [T, C].
        fmt: E4M3 or E5M2.
        block: (1, 128) or (128, 128).
        layout: "row": [T, C], blocks along C; "col": the transpose [C, T], with its own blocks along T where `block` is
            (1, 128), the same scales transposed where it is (128, 128); "both".

    Returns:
        The layouts asked for; the others are None.
    """
    dtype = fmt.torch_dtype
    _check_block(block)
    check_layout(layout)
    _check_hp("x", x, 2)
    row, col = layout != "col", layout != "row"
    x_fp8, scale_inv, x_fp8_t, scale_inv_t = _quantize(x, dtype, fmt.max, block[0], row, col)
    return BlockwiseQuantized(
        x_fp8 if row else None, scale_inv if row else None, x_fp8_t if col else None, scale_inv_t if col else None
    )


def transpose_blockwise(x_fp8: Tensor, scale_inv: Tensor) -> tuple[Tensor, Tensor]:
    """Transpose codes with 1x128 blocks into codes with 1x128 blocks along their own rows, from the codes alone.

    Within a 128x128 tile all columns take the largest scale_inv of the tile's row blocks that hold anything but zeros.
    Codes are multiplied by the ratio of the scales, a power of two: exact where the result is normal, to nearest even
    where it is subnormal. A tile with a scale_inv of NaN gets NaN throughout.

    SQNR against x, E4M3, beside that of `quantize_blockwise(x, fmt, (1, 128), "col")` (test_blockwise.py): equal to
    0.01 dB over a whole matrix, 31.4 to 31.9 dB for rows, columns or tiles of different ranges. What is lost lies in
    columns far below their neighbours, which here share the tile's scale: with column ranges spread by a factor of 8
    (one sigma) the worst of 512 columns has 11.1 dB instead of 30.8.

    Args:
        x_fp8: float8_e4m3fn or float8_e5m2 [T, C].
        scale_inv: float32 [T, ceil(C / 128)], powers of two or NaN.

    Returns:
        (x_fp8_t [C, T], scale_inv_t [C, ceil(T / 128)]) as `BlockwiseQuantized` states them.
    """
    if x_fp8.dtype not in _MAX_OF or x_fp8.dim() != 2:
        raise ValueError(f"x_fp8: expected FP8 [T, C], got {x_fp8.dtype} {tuple(x_fp8.shape)}. Quantise it first.")
    expected = (x_fp8.shape[0], num_blocks(x_fp8.shape[1]))
    if scale_inv.dtype != torch.float32 or tuple(scale_inv.shape) != expected:
        raise ValueError(
            f"scale_inv: expected float32 {expected} for x_fp8 {tuple(x_fp8.shape)}, got {scale_inv.dtype} "
            f"{tuple(scale_inv.shape)}. 128x128 blocks keep their scales: transpose both the bytes and the scales."
        )
    return _transpose(x_fp8, scale_inv, _MAX_OF[x_fp8.dtype])


def block_amax(x: Tensor, block: tuple[int, int]) -> Tensor:
    """Return the largest magnitude of each block.

    Args:
        x: bf16, fp16 or float32 [R, C].
        block: (1, 128) or (128, 128).

    Returns:
        float32 [ceil(R / block[0]), ceil(C / 128)], contiguous; NaN or infinity where the block holds one.
    """
    _check_hp("x", x, 2)
    return shard_block_amax(x.reshape(-1), 0, (x.shape[0], x.shape[1]), block)


def shard_block_amax(shard: Tensor, start: int, shape: tuple[int, int], block: tuple[int, int]) -> Tensor:
    """Compute `block_amax` of the part of a row-major weight that a ZeRO shard holds; other blocks are 0.

    The maximum over all shards of a weight is the block_amax of the whole, wherever the shards' edges split its blocks:
    flattened, the grids of all weights go into the one vector that ZeRO reduces per step.

    Args:
        shard: bf16, fp16 or float32 [numel], the elements [start, start + numel) of the weight, without padding.
        start: >= 0.
        shape: (R, C) of the weight.
        block: (1, 128) or (128, 128).

    Returns:
        float32 [ceil(R / block[0]), ceil(C / 128)], contiguous.
    """
    _check_block(block)
    _check_hp("shard", shard, 1)
    if start < 0 or start + shard.numel() > shape[0] * shape[1]:
        raise ValueError(
            f"shard: expected elements of [0, {shape[0] * shape[1]}) of a weight {tuple(shape)}, got "
            f"[{start}, {start + shard.numel()}). Remove the padding first."
        )
    return _block_amax(shard, start, shape[0], shape[1], block[0])


def quantize_groupwise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize `x` to E4M3 in 1x128 blocks to be kept: it is multiplied by nothing (COAT, arXiv 2410.19313, section 4).

    COAT's groups have 16 elements and bf16 scales; with powers of two the way back is exact: bf16 holds every code
    times its scale while the product is normal.

    Args:
        x: bf16, fp16 or fp32 [T, C].

    Returns:
        (x_fp8, scale_inv): float8_e4m3fn [T, C], contiguous; float32 [T, ceil(C / 128)], strides (1, T), multiply to
        leave FP8, NaN for a group that holds a NaN or an infinity. 1.03 bytes an element.
    """
    quantized = quantize_blockwise(x, E4M3, (1, BLOCK), "row")
    assert quantized.x_fp8 is not None and quantized.scale_inv is not None
    return quantized.x_fp8, quantized.scale_inv


def check_groups(name: str, x_fp8: Tensor, scale_inv: Tensor) -> None:
    """Refuse all but what `quantize_groupwise` returns."""
    if x_fp8.dtype != E4M3.torch_dtype or x_fp8.dim() != 2 or not x_fp8.is_contiguous():
        raise ValueError(
            f"{name}: expected float8_e4m3fn [T, C], contiguous, got {x_fp8.dtype} {tuple(x_fp8.shape)} with strides "
            f"{x_fp8.stride()}. Pass what quantize_groupwise gave."
        )
    expected = (x_fp8.shape[0], num_blocks(x_fp8.shape[1]))
    if scale_inv.dtype != torch.float32 or tuple(scale_inv.shape) != expected:
        raise ValueError(
            f"scale_inv: expected float32 {expected}, got {scale_inv.dtype} {tuple(scale_inv.shape)}. Pass what "
            "quantize_groupwise gave."
        )


def dequantize_groupwise(x_fp8: Tensor, scale_inv: Tensor) -> Tensor:
    """Dequantize by groups: `x_fp8 * scale_inv`, rounded to bf16 (exact for normal numbers of bf16).

    Args:
        x_fp8: float8_e4m3fn [T, C], contiguous.
        scale_inv: float32 [T, ceil(C / 128)], any strides.

    Returns:
        bf16 [T, C], contiguous.

    Raises:
        ValueError: another dtype, shape or layout.
    """
    check_groups("x_fp8", x_fp8, scale_inv)
    return _dequantize(x_fp8, scale_inv)
