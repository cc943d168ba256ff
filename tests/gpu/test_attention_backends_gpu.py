"""Attention backends on a GPU against float64 and the emulation; each skips, by name, where it is not installed."""

from __future__ import annotations

from typing import Any

import pytest
import test_llama
import torch
from torch import Tensor

from fp8_ds.attention import Packing, attention, flash, reference, require_backend
from fp8_ds.attention.packages import find_fa3
from fp8_ds.attention.shapes import Geometry
from fp8_ds.errors import UnsupportedError
from fp8_ds.testing import sqnr_db

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

CUDA = torch.device("cuda")


def need(backend: Any) -> None:
    try:
        require_backend(backend, CUDA)
    except UnsupportedError as error:
        pytest.skip(str(error))


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(CUDA, torch.bfloat16)


def batch(num_q: int, num_k: int, dim: int, num_heads: int = 4, num_kv_heads: int = 2) -> list[Tensor]:
    """q, k, v and the gradient of the output, not contiguous: heads lie between the tokens of two batches."""
    sizes = [(num_q, num_heads), (num_k, num_kv_heads), (num_k, num_kv_heads), (num_q, num_heads)]
    return [normal(n, 2, h, dim, seed=i).transpose(0, 1) for i, (n, h) in enumerate(sizes)]


def run(tensors: list[Tensor], backend: Any, **options: Any) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in tensors[:3]]
    out = attention(*leaves, backend=backend, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, tensors[3])]


def exact(tensors: list[Tensor], **options: Any) -> list[Tensor]:
    return run([x.double() for x in tensors], "reference", **options)


@pytest.mark.parametrize(
    ("options", "lengths", "dim"),
    [
        ({"causal": True}, (300, 300), 64),
        ({"causal": True}, (96, 300), 128),
        ({"causal": False}, (96, 300), 64),
        ({"window": (40, 0)}, (300, 300), 64),
    ],
)
def test_bf16_is_near_float64(options: dict[str, Any], lengths: tuple[int, int], dim: int) -> None:
    need("fa3")
    tensors = batch(*lengths, dim)
    if "window" in options and find_fa3().lacks("LOCAL"):
        with pytest.raises(UnsupportedError, match="window: expected none"):
            run(tensors, "fa3", **options)
        return
    for a, b in zip(exact(tensors, **options), run(tensors, "fa3", **options), strict=True):
        assert sqnr_db(a, b) > 42


@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("causal", [True, False])
def test_fp8_is_near_float64_and_has_the_error_of_the_emulation(causal: bool, dim: int, hadamard: bool) -> None:
    need("fa3_fp8")
    tensors, options = batch(512, 512, dim), {"causal": causal, "hadamard": hadamard}
    ours, emulated = run(tensors, "fa3_fp8", **options), run(tensors, "fa3_fp8_emulated", **options)
    for a, b, c in zip(exact(tensors, causal=causal), ours, emulated, strict=True):
        assert sqnr_db(a, b) > max(20, sqnr_db(a, c) - 1)
        assert sqnr_db(c, b) > sqnr_db(a, b) - 1


@pytest.mark.parametrize("backend", ["fa3", "fa3_fp8"])
def test_packed_sequences_are_the_sequences_apart(backend: Any) -> None:
    need(backend)
    ends = torch.tensor([0, 130, 131, 400, 512], dtype=torch.int32, device=CUDA)
    tensors = [x[0].contiguous() for x in batch(512, 512, 128)]
    if find_fa3().lacks("VARLEN"):
        with pytest.raises(UnsupportedError, match="packing: expected none"):
            run(tensors, backend, causal=True, packing=Packing.of(ends, 269))
        return
    together = run(tensors, backend, causal=True, packing=Packing.of(ends, 269))
    for start, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        apart = run([x[None, start:end] for x in tensors], backend, causal=True)
        for x, y in zip(together, apart, strict=True):
            difference = (x[start:end].double() - y[0].double()).square().mean().sqrt()
            assert difference < 4e-3 * x.double().square().mean().sqrt()


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("causal", [True, False])
def test_stock_backwards_take_the_output_and_log_sum_exp_of_any_forward(causal: bool, dim: int) -> None:
    """Those of the plain reference, in both; what a forward-only build of FlashAttention-3 relies on."""
    q, k, v, grad = batch(320, 320, dim)
    geometry = Geometry(dim**-0.5, right=0 if causal else -1)
    assert flash.cudnn_takes(q, k, geometry)
    out, lse = reference.forward(q, k, v, None, geometry)
    _, *gradients = exact([q, k, v, grad], causal=causal)
    for backward in (flash.cudnn_backward, flash.flash2_backward):
        for a, b in zip(gradients, backward(grad, q, k, v, out, lse, geometry), strict=True):
            assert sqnr_db(a, b) > 42, backward.__name__


def test_fp8_keeps_half_the_bytes_of_q_k_and_v() -> None:
    need("fa3_fp8")
    kept = {}
    for backend in ("fa3", "fa3_fp8"):
        q, k, v, _ = (x.contiguous() for x in batch(2048, 2048, 128))
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        out = attention(q.requires_grad_(), k, v, backend=backend, causal=True)
        kept[backend] = torch.cuda.memory_allocated() - before - out.nbytes
        del out
    lse = 2 * 4 * 2048 * 4
    assert kept["fa3"] <= lse + 4096
    assert kept["fa3_fp8"] <= q.numel() + 2 * k.numel() + lse + 8192


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("backend", ["fa3", "fa3_fp8"])
def test_an_engine_trains_with_it(gpu_ranks: Any, backend: str, stage: int) -> None:
    need(backend)
    if find_fa3().lacks("VARLEN"):
        pytest.skip("packed rows are in the batches, and this FlashAttention-3 is built without VARLEN")
    blocks: list[dict[str, Any]] = [{}, {"attention": {"backend": backend}}]
    (stock, _, name), (ours, _, own) = (
        gpu_ranks(1).run(test_llama.run, stage, fp8, {}, 4, hidden_size=256, intermediate_size=384)[0] for fp8 in blocks
    )
    assert (name, own) == ("sdpa", f"fp8_ds_{backend}")
    assert len(ours) == 4 and ours == pytest.approx(stock, rel=0.02)
