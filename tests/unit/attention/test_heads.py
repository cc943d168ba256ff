"""Queries, keys and values in E4M3 and back: exactness of the way back, scales by head, edges."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fp8_ds.attention import heads
from fp8_ds.attention.heads.reference import rotate
from fp8_ds.attention.shapes import Packing
from fp8_ds.testing import assert_bitwise, sqnr_db


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def test_scales_are_powers_of_two_that_take_each_head_group_to_the_top_of_e4m3() -> None:
    q, k, v = normal(2, 50, 4, 16), normal(2, 30, 2, 16, seed=1), normal(2, 30, 2, 16, seed=2)
    q = q * torch.tensor([1.0, 8.0, 1e-3, 1e-4]).bfloat16()[:, None]
    descales = heads.quantize(q, k, v, None, hadamard=False)[3]
    assert descales.shape == (3, 2, 2)
    assert (torch.frexp(descales)[0] == 0.5).all()
    amax = q.float().abs().amax(1).view(2, 2, 2, 16).amax((2, 3))
    assert ((amax / descales[0] > 224) & (amax / descales[0] <= 448)).all()


def test_the_way_back_is_exact() -> None:
    """What comes back is bf16 without rounding, so once more through FP8 changes nothing."""
    q, k, v = (normal(2, 40, 4, 32, seed=seed) * 37.0 for seed in range(3))
    q_fp8, _, _, descales = heads.quantize(q, k, v, None, hadamard=False)
    back = heads.dequantize(q_fp8, descales[0], None, 0)
    assert_bitwise(back.double(), q_fp8.double() * descales[0].double()[:, None, :, None])
    assert sqnr_db(q, back) > 31
    again = heads.quantize(back, k, v, None, hadamard=False)
    assert_bitwise(heads.dequantize(again[0], again[3][0], None, 0), back)


def test_packed_sequences_have_the_codes_that_they_have_alone() -> None:
    q, k, v = (normal(90, 4, 16, seed=seed) for seed in range(3))
    q[:20] *= 100
    ends = torch.tensor([0, 20, 20, 61, 90], dtype=torch.int32)
    packed = heads.quantize(q, k, v, Packing.of(ends, 41), hadamard=False)
    for i, (start, end) in enumerate(zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)):
        if start == end:
            assert (packed[3][:, i] == 1).all()
            continue
        alone = heads.quantize(*(x[None, start:end] for x in (q, k, v)), None, hadamard=False)
        for x, y in zip(packed[:3], alone[:3], strict=True):
            assert_bitwise(x[start:end].view(torch.uint8), y[0].view(torch.uint8))
        assert_bitwise(packed[3][:, i], alone[3][:, 0])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_head_that_is_not_finite_leaves_fp8_as_nan(bad: float) -> None:
    q, k, v = (normal(1, 8, 2, 16, seed=seed) for seed in range(3))
    k[0, 3, 1, 2] = bad
    _, k_fp8, _, descales = heads.quantize(q, k, v, None, hadamard=False)
    back = heads.dequantize(k_fp8, descales[1], None, 0)
    assert back[:, :, 1].isnan().all() and back[:, :, 0].isfinite().all()


@pytest.mark.parametrize("dim", [16, 32, 64, 128])
def test_the_rotation_keeps_scores_exactly_and_spreads_an_outlier(dim: int) -> None:
    q, k = (torch.randn(30, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(i)) for i in range(2))
    q[:, 3] *= 100
    turned_q, turned_k = rotate(q, is_query=True), rotate(k, is_query=False)
    torch.testing.assert_close(turned_q @ turned_k.t(), q @ k.t(), rtol=1e-13, atol=1e-10)
    flatness = [x.abs().amax() / x.square().mean().sqrt() for x in (q, turned_q)]
    assert flatness[1] < flatness[0] / 2 or dim == 16
    shared = torch.ones(1, dim)
    assert rotate(shared, is_query=True).abs().amax() < 0.7 * dim**0.5


@pytest.mark.parametrize("packed", [False, True])
def test_ops_trace_with_fakes(packed: bool) -> None:
    ends = torch.tensor([0, 20, 40], dtype=torch.int32)
    x = [normal(40, 4, 16, seed=seed) if packed else normal(2, 20, 4, 16, seed=seed) for seed in range(3)]
    place: tuple[Any, ...] = (ends, ends, 20, 20) if packed else (None, None, 0, 0)
    checks = ("test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.fp8_ds.attention_quantize.default, (*x, *place, True), test_utils=checks)
    codes = heads.quantize(*x, Packing(*place) if packed else None, hadamard=False)
    arguments = (codes[0], codes[3][0], place[0], place[2])
    torch.library.opcheck(torch.ops.fp8_ds.attention_dequantize.default, arguments, test_utils=checks)
