"""FP8 GEMM: both backends against float64, and the rules of CUDA held on CPU."""

import sys
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fp8_ds.numerics.formats import E4M3, E5M2
from fp8_ds.ops.gemm import BACKENDS, scaled_mm
from fp8_ds.ops.quantize import quantize_tensorwise
from fp8_ds.testing import assert_bitwise

SHAPES = [(32, 64, 48), (17, 33, 5), (1, 16, 16), (3, 1, 1), (16, 250, 7)]
PAIRS = [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)]


def operands(num_m, num_k, num_n, fmt_a=E4M3, fmt_b=E4M3):
    generator = torch.Generator().manual_seed(num_m * 1000 + num_k)
    a, scale_inv_a = quantize_tensorwise(torch.randn(num_m, num_k, generator=generator), fmt_a)
    b, scale_inv_b = quantize_tensorwise(torch.randn(num_n, num_k, generator=generator) * 3, fmt_b)
    return a, b, scale_inv_a, scale_inv_b


def truth(a, b, scale_inv_a, scale_inv_b):
    return (a.double() * scale_inv_a.double()) @ (b.double() * scale_inv_b.double()).t()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("fmt_a", "fmt_b"), PAIRS)
@pytest.mark.parametrize(("shape", "out_dtype"), zip(SHAPES, [torch.float32, torch.bfloat16] * 3, strict=False))
def test_product_is_exact_up_to_accumulation_and_output_rounding(backend, fmt_a, fmt_b, shape, out_dtype):
    args = operands(*shape, fmt_a, fmt_b)
    got = scaled_mm(*args, out_dtype, backend)
    expected = truth(*args)
    assert got.dtype == out_dtype and got.shape == (shape[0], shape[2]) and got.is_contiguous()
    tolerance = 2.0**-8 if out_dtype == torch.bfloat16 else 1e-6
    magnitude = truth(args[0].float().abs(), args[1].float().abs(), *args[2:])
    assert ((got.double() - expected).abs() <= tolerance * magnitude).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_transposed_views_are_read_as_matrices_not_as_memory(backend):
    a, b, scale_inv_a, scale_inv_b = operands(20, 36, 28)
    a_view, b_view = a.t().contiguous().t(), b.t().contiguous().t()
    assert not a_view.is_contiguous() and not b_view.is_contiguous()
    got = scaled_mm(a_view, b_view, scale_inv_a, scale_inv_b, torch.float32, backend)
    assert_bitwise(got, scaled_mm(a, b, scale_inv_a, scale_inv_b, torch.float32, backend))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(0, 16, 16), (16, 0, 16), (16, 16, 0), (0, 0, 0)])
def test_empty_operands_give_zeros(monkeypatch, backend, shape):
    num_m, num_k, num_n = shape
    # CUDA refuses these, the CPU gives unset memory for K = 0 (zeros, on a lucky day).
    monkeypatch.setattr(torch, "_scaled_mm", lambda *args, **kwargs: pytest.fail("reached _scaled_mm"))
    a, b = torch.empty(num_m, num_k, dtype=E4M3.dtype), torch.empty(num_n, num_k, dtype=E4M3.dtype)
    got = scaled_mm(a, b, torch.ones(()), torch.ones(()), torch.float32, backend)
    assert torch.equal(got, torch.zeros(num_m, num_n))


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_does_not_reach_inside(backend):
    args = operands(16, 64, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = scaled_mm(*args, torch.float32, backend)
    assert_bitwise(got, scaled_mm(*args, torch.float32, backend))


@pytest.mark.parametrize("shape", SHAPES)
def test_torch_backend_keeps_the_rules_of_cuda(monkeypatch, shape):
    """CPU accepts any size and layout; what cuBLASLt wants is checked here at the call."""
    calls = []
    original = torch._scaled_mm

    def strict(mat1, mat2, **kwargs):
        assert mat1.stride() == (mat1.shape[1], 1)
        assert mat2.stride() == (1, mat2.shape[0])
        assert mat1.shape[1] % 16 == 0 and mat2.shape[1] % 16 == 0
        assert kwargs["scale_a"].numel() == kwargs["scale_b"].numel() == 1
        calls.append(kwargs["use_fast_accum"])
        return original(mat1, mat2, **kwargs)

    monkeypatch.setattr(torch, "_scaled_mm", strict)
    a, b, scale_inv_a, scale_inv_b = operands(*shape)
    scaled_mm(a, b, scale_inv_a, scale_inv_b, torch.float32, "torch", use_fast_accum=True)
    scaled_mm(a.t().contiguous().t(), b, scale_inv_a, scale_inv_b, torch.float32, "torch")
    assert calls == [True, False]


def test_on_a_cpu_no_product_goes_to_onednn_and_its_flag_is_as_before(monkeypatch):
    """Where there is AMX oneDNN takes seconds for a product of E4M3 that takes milliseconds otherwise."""
    seen = []

    def refused(*args, **kwargs):
        seen.append(torch._C._get_mkldnn_enabled())
        raise RuntimeError("of the product")

    monkeypatch.setattr(torch, "_scaled_mm", refused)
    assert torch._C._get_mkldnn_enabled()
    with pytest.raises(RuntimeError, match="of the product"):
        scaled_mm(*operands(16, 32, 16), torch.float32, "torch")
    assert seen == [False] and torch._C._get_mkldnn_enabled()


@pytest.mark.parametrize("has_rows", [False, True])
def test_row_scales_on_a_cpu_that_takes_them_and_on_one_that_does_not(monkeypatch, has_rows):
    """torch 2.11's CPUs take one scale an operand."""
    a, b, scale_inv_a, scale_inv_b = operands(16, 32, 48)
    row_a, row_b = scale_inv_a * torch.linspace(1, 3, 16)[:, None], scale_inv_b.expand(48, 1).contiguous()
    module = sys.modules["fp8_ds.ops.gemm.scaled_mm"]
    monkeypatch.setattr(module, "_CPU_HAS_ROWS", module._CPU_HAS_ROWS and has_rows)
    got = scaled_mm(a, b, row_a, row_b, torch.float32, "torch")
    torch.testing.assert_close(got.double(), truth(a, b, row_a, scale_inv_b), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("num_n", "is_padded"), [(32, False), (24, True)])
def test_a_graph_on_cuda_has_torchs_own_product_where_nothing_is_padded(num_n: int, is_padded: bool) -> None:
    found: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        found.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    with FakeTensorMode():
        a, b = (torch.empty(rows, 32, dtype=E4M3.torch_dtype, device="cuda") for rows in (64, num_n))
        scale = torch.empty((), dtype=torch.float32, device="cuda")
        product = torch.compile(scaled_mm, backend=backend)(a, b, scale, scale, torch.bfloat16)
    assert (product.shape, product.dtype, product.is_cuda) == ((64, num_n), torch.bfloat16, True)
    ours, torchs = (any(name in target for target in found) for name in ("fp8_ds.scaled_mm", "method _scaled_mm"))
    assert (ours, torchs) == (is_padded, not is_padded)
