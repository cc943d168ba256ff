"""Blockwise FP8 GEMM: the reference against float64, and what torch's kernel is handed, held on CPU."""

import pytest
import torch
from support import many_scales

from fp8_ds.numerics.formats import E4M3, E5M2
from fp8_ds.ops.blockwise import num_blocks, quantize_blockwise
from fp8_ds.ops.gemm import BACKENDS, blockwise
from fp8_ds.ops.gemm.blockwise import scaled_mm_blockwise

SHAPES = [(32, 256, 48), (130, 257, 140), (1, 1, 1), (3, 130, 1), (16, 600, 130)]
PAIRS = [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)]
ROWS, SQUARES = (1, 128), (128, 128)


def operands(num_m, num_k, num_n, block_b, fmt_a=E4M3, fmt_b=E4M3):
    a = quantize_blockwise(many_scales("per_tile", num_m, num_k), fmt_a, ROWS, "row")
    b = quantize_blockwise(many_scales("per_tile", num_n, num_k, seed=1), fmt_b, block_b, "row")
    return a.x_fp8, b.x_fp8, a.scale_inv, b.scale_inv


def leave_fp8(x, scale_inv, block):
    out = x.double()
    for i in range(scale_inv.shape[0]):
        for j in range(scale_inv.shape[1]):
            out[i * block[0] : (i + 1) * block[0], j * 128 : (j + 1) * 128] *= scale_inv[i, j].double()
    return out


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("block_b", [ROWS, SQUARES])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("pair", PAIRS, ids=["e4m3", "e5m2 a", "e5m2 b"])
def test_product_on_cpu_is_exact_up_to_accumulation(pair, shape, block_b, backend):
    a, b, scale_inv_a, scale_inv_b = args = operands(*shape, block_b, *pair)
    got = scaled_mm_blockwise(*args, torch.float32, backend)
    a_hp, b_hp = leave_fp8(a, scale_inv_a, ROWS), leave_fp8(b, scale_inv_b, block_b)
    assert got.dtype == torch.float32 and got.shape == (shape[0], shape[2]) and got.is_contiguous()
    assert ((got.double() - a_hp @ b_hp.t()).abs() <= 1e-6 * (a_hp.abs() @ b_hp.abs().t())).all()


def emulated_scaled_mm(a, b, scale_a, recipe_a, scale_b, recipe_b, output_dtype):
    """torch's function with its checks of layout and cuBLAS's, as the module's text states them."""
    one, square = torch.nn.functional.ScalingType.BlockWise1x128, torch.nn.functional.ScalingType.BlockWise128x128
    (num_m, num_k), num_n = a.shape, b.shape[1]
    blocks = num_blocks(num_k)
    assert num_m % 16 == num_n % 16 == num_k % 128 == 0
    assert a.is_contiguous() and b.t().is_contiguous()
    assert recipe_a == one and scale_a.shape == (num_m, blocks) and scale_a.stride() == (1, num_m)
    assert scale_a.data_ptr() % 16 == scale_b.data_ptr() % 16 == 0
    if recipe_b == square:
        padded = -(-blocks // 4) * 4
        assert scale_b.shape == (padded, num_blocks(num_n)) and scale_b.stride() == (1, padded)
        scale_b = scale_b[:blocks].t()
    else:
        assert recipe_b == one and scale_b.shape == (num_n, blocks) and scale_b.stride() == (1, num_n)
    return blockwise.scaled_mm_blockwise_reference(a, b.t(), scale_a, scale_b, output_dtype)


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("block_b", [ROWS, SQUARES])
@pytest.mark.parametrize("shape", [*SHAPES, (16, 512, 256), (0, 128, 16), (16, 0, 16), (16, 128, 0)])
def test_torch_is_handed_what_it_asks_for_and_padding_adds_nothing(shape, block_b, out_dtype, monkeypatch):
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", emulated_scaled_mm)
    args = operands(*shape, block_b)
    got = blockwise._torch_scaled_mm(*args, out_dtype)
    assert got.shape == (shape[0], shape[2]) and got.is_contiguous()
    torch.testing.assert_close(got, blockwise.scaled_mm_blockwise_reference(*args, out_dtype), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("block_b", [ROWS, SQUARES])
def test_scales_and_operands_of_other_strides_are_laid_out_anew(block_b, monkeypatch):
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", emulated_scaled_mm)
    args = a, b, scale_inv_a, scale_inv_b = operands(32, 512, 256, block_b)
    strided = a.t().contiguous().t(), b.t().contiguous().t(), scale_inv_a.contiguous(), scale_inv_b.t().contiguous().t()
    shifted = [torch.empty(t.numel() + 1)[1:].view(t.t().shape).t().copy_(t) for t in (scale_inv_a, scale_inv_b)]
    expected = blockwise.scaled_mm_blockwise_reference(*args, torch.float32)
    assert torch.equal(blockwise._torch_scaled_mm(*strided, torch.float32), expected)
    assert torch.equal(blockwise._torch_scaled_mm(a, b, *shifted, torch.float32), expected)
