"""The function: its gradients against float64, masks, grouped queries, packed sequences, what it refuses."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8_ds.attention import Packing, attention, heads
from fp8_ds.errors import UnsupportedError
from fp8_ds.testing import assert_bitwise, sqnr_db

MASKS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"window": (5, 3)},
    {"causal": True, "window": (6, -1)},
    {"window": (-1, 2)},
]
ENDS_Q = torch.tensor([0, 17, 18, 50], dtype=torch.int32)
ENDS_K = torch.tensor([0, 9, 30, 62], dtype=torch.int32)
PACKING = Packing(ENDS_Q, ENDS_K, 32, 32)
CPU_BACKENDS = ("reference", "fa3_fp8_emulated")


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def batch(num_q: int = 24, num_k: int = 24, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """q with 4 heads, k and v with 2, and the gradient of the output."""
    shapes = [(2, num_q, 4, 16), (2, num_k, 2, 16), (2, num_k, 2, 16), (2, num_q, 4, 16)]
    return [normal(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes)]


def packed(dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    return [normal(*shape, seed=seed, dtype=dtype) for seed, shape in
            enumerate([(50, 4, 16), (62, 2, 16), (62, 2, 16), (50, 4, 16)])]  # fmt: skip


def run(tensors: list[Tensor], backend: Any, **options: Any) -> list[Tensor]:
    """The output and the gradients of q, k and v."""
    leaves = [x.detach().requires_grad_() for x in tensors[:3]]
    out = attention(*leaves, backend=backend, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, tensors[3])]


def by_hand(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, window: Any = None, scale: float = 0.25
) -> Tensor:
    """float64, a loop over queries: no mask, only the keys that a query sees."""
    out = torch.zeros_like(q)
    left, right = window or (-1, -1)
    right = 0 if causal else right
    num_q, num_k = q.shape[1], k.shape[1]
    for i in range(num_q):
        place = i + num_k - num_q
        first = max(place - left, 0) if left >= 0 else 0
        last = min(place + right + 1, num_k) if right >= 0 else num_k
        if first >= last:
            continue
        for head in range(q.shape[2]):
            kv = head * k.shape[2] // q.shape[2]
            scores = torch.einsum("bd,bsd->bs", q[:, i, head], k[:, first:last, kv]) * scale
            out[:, i, head] = torch.einsum("bs,bsd->bd", scores.softmax(1), v[:, first:last, kv])
    return out


@pytest.mark.parametrize("lengths", [(24, 24), (10, 24), (24, 10)], ids=str)
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_masks_are_those_of_a_loop_over_queries(mask: dict[str, Any], lengths: tuple[int, int]) -> None:
    q, k, v, _ = batch(*lengths, dtype=torch.float64)
    ours = attention(q, k, v, backend="reference", **mask)
    torch.testing.assert_close(ours, by_hand(q, k, v, **mask), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("mask", MASKS[1:4], ids=str)
def test_reference_gradients_are_those_of_finite_differences(mask: dict[str, Any], is_packed: bool) -> None:
    tensors = [x[-7:, :, :4] for x in packed(torch.float64)]
    tensors = tensors if is_packed else [x[None] for x in tensors]
    ends = torch.tensor([0, 3, 7], dtype=torch.int32)
    options = {**mask, "packing": Packing.of(ends, 6)} if is_packed else mask
    leaves = [x.detach().clone().requires_grad_() for x in tensors[:3]]
    assert torch.autograd.gradcheck(lambda *x: attention(*x, backend="reference", **options), leaves, fast_mode=True)


@pytest.mark.parametrize(
    "options", [*MASKS, {"packing": PACKING, "causal": True}, {"causal": True, "hadamard": True}], ids=list
)
def test_fp8_output_and_gradients_are_near_float64(options: dict[str, Any]) -> None:
    """E4M3 has 31.5 dB on numbers that are not small; q, k, v, P and the way through the softmax each add as much."""
    tensors = packed() if "packing" in options else batch()
    mask = {name: value for name, value in options.items() if name != "hadamard"}
    exact = run([x.double() for x in tensors], "reference", **mask)
    for name, a, b in zip(("out", "dq", "dk", "dv"), exact, run(tensors, "fa3_fp8_emulated", **options), strict=True):
        assert sqnr_db(a, b) > 21, name
    for a, b in zip(exact, run(tensors, "reference", **mask), strict=True):
        assert sqnr_db(a, b) > 45


@pytest.mark.parametrize("is_packed", [False, True])
def test_the_backward_is_that_of_exactly_the_values_that_the_forward_saw(is_packed: bool) -> None:
    """Against float64 attention of the de-quantised values: what is left is bf16's rounding and that of P in D."""
    tensors, packing = (packed(), PACKING) if is_packed else (batch(), None)
    _, *ours = run(tensors, "fa3_fp8_emulated", causal=True, packing=packing)
    q, k, v, descales = heads.quantize(*tensors[:3], packing, hadamard=False)
    ends = (None, None) if packing is None else (packing.cu_seqlens_q, packing.cu_seqlens_k)
    places = zip((q, k, v), descales, (ends[0], ends[1], ends[1]), strict=True)
    seen = [heads.dequantize(x, scale_inv, cu_seqlens, 32).double() for x, scale_inv, cu_seqlens in places]
    _, *exact = run([*seen, tensors[3].double()], "reference", causal=True, packing=packing)
    _, *far = run([x.double() for x in tensors], "reference", causal=True, packing=packing)
    for a, b, c in zip(exact, ours, far, strict=True):
        assert sqnr_db(a, b) > max(26.5, sqnr_db(c, b) + 1)
    assert sqnr_db(exact[2], ours[2]) > 45 > sqnr_db(far[2], ours[2]) + 10  # dv has no D in it


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_packed_sequences_are_the_sequences_apart(backend: str) -> None:
    tensors = packed()
    together = run(tensors, backend, causal=True, packing=PACKING)
    for i in range(3):
        rows_q, rows_k = slice(ENDS_Q[i], ENDS_Q[i + 1]), slice(ENDS_K[i], ENDS_K[i + 1])
        rows = (rows_q, rows_k, rows_k, rows_q)
        apart = run([x[None, at] for x, at in zip(tensors, rows, strict=True)], backend, causal=True)
        for x, y, at in zip(together, apart, (rows_q, rows_q, rows_k, rows_k), strict=True):
            torch.testing.assert_close(x[at], y[0], rtol=1e-2, atol=1e-2)


def test_fp8_keeps_one_byte_an_element_of_q_k_and_v() -> None:
    q, k, v, _ = batch()
    kept: dict[int, Tensor] = {}

    def pack(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        attention(q.requires_grad_(), k, v, backend="fa3_fp8_emulated")
    total = sum(x.untyped_storage().nbytes() for x in kept.values())
    assert total == q.numel() + 2 * k.numel() + q.numel() * 2 + 2 * 4 * 24 * 4 + 3 * 2 * 2 * 4


def test_a_query_that_sees_nothing_has_no_gradient() -> None:
    q, k, v, grad = batch(24, 10)
    for backend in ("reference", "fa3_fp8_emulated"):
        out, dq, dk, dv = run([q, k, v, grad], backend, causal=True)
        assert (out[:, :14] == 0).all() and (dq[:, :14] == 0).all()
        assert all(x.isfinite().all() for x in (dq, dk, dv))


def test_a_number_that_is_not_finite_is_not_hidden() -> None:
    q, k, v, _ = batch()
    q[1, 3, 0, 0] = float("nan")
    out = attention(q, k, v, backend="fa3_fp8_emulated")
    assert out[1, :, :2].isnan().all() and out[0].isfinite().all() and out[1, :, 2:].isfinite().all()


@pytest.mark.parametrize(("is_packed", "hadamard"), [(False, True), (True, False)])
def test_it_compiles_without_a_graph_break_to_the_same_bits(is_packed: bool, hadamard: bool) -> None:
    tensors, packing = (packed(), PACKING) if is_packed else (batch(), None)

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, backend="fa3_fp8_emulated", causal=True, packing=packing, hadamard=hadamard)

    compiled = torch.compile(forward, backend="aot_eager", fullgraph=True)
    results = []
    for function in (forward, compiled):
        leaves = [x.detach().requires_grad_() for x in tensors[:3]]
        out = function(*leaves)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, tensors[3])])
    for x, y in zip(*results, strict=True):
        assert_bitwise(x, y)


Q, K, V, _ = batch()
Q_PACKED, K_PACKED, V_PACKED, _ = packed()


def packing(ends_q: list[int] | Tensor = ENDS_Q, ends_k: list[int] | Tensor = ENDS_K) -> dict[str, Any]:
    ends = [one if isinstance(one, Tensor) else torch.tensor(one, dtype=torch.int32) for one in (ends_q, ends_k)]
    return {"packing": Packing(*ends, 32, 32)}


REFUSED: list[tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any], str]] = [
    ((Q, K, V), {"backend": "fa4"}, "backend: .* got 'fa4'"),
    ((Q, K, V), {"backend": "cudnn"}, "backend: .* got 'cudnn'"),
    ((Q, K, V), {"dropout": 0.1}, "dropout: expected 0.0, got 0.1"),
    ((Q, K, V), {"bias": torch.zeros(24, 24)}, "bias: expected None"),
    ((Q, K, V), {"hadamard": True}, "hadamard: expected false"),
    ((Q, K, V), {"window": (-2, 0)}, "window: expected two numbers"),
    ((Q, K, V), packing(), r"q: expected \[tokens, heads, dim\]"),
    ((Q, K, V), {"backend": "fa3_fp8"}, "FlashAttention-3: expected a Hopper GPU"),
    ((Q, K[..., :8], V), {}, "k and v: expected one shape"),
    ((Q, K[:, :, :1], V), {}, "k and v: expected one shape"),
    ((Q[:, :, :3], K, V), {}, "heads that divides q's 3, got 2"),
    ((Q, K.float(), V), {}, "k: expected"),
    ((Q[..., :12], K[..., :12], V[..., :12]), {"backend": CPU_BACKENDS[1], "hadamard": True}, "power of two .* got 12"),
]
# Tokens after the last sequence would come out as whatever was in memory.
ENDINGS: list[tuple[tuple[Tensor, Tensor], dict[str, Any], str]] = [
    ((K_PACKED, V_PACKED), packing(ends_k=ENDS_K.long()), r"packing.cu_seqlens_k: expected int32"),
    ((K_PACKED, V_PACKED), packing([0, 17, 18, 49]), r"packing.cu_seqlens_q: .* 50, got \[.*, 49\]"),
    ((K_PACKED, V_PACKED), packing(ends_k=[0, 9, 30, 61]), r"packing.cu_seqlens_k: .* 62, got \[.*, 61\]"),
    ((K_PACKED[:-1], V_PACKED[:-1]), packing(), r"packing.cu_seqlens_k: .* 61, got \[.*, 62\]"),
    ((K_PACKED, V_PACKED), {"packing": Packing.of(ENDS_Q, 32)}, r"packing.cu_seqlens_k: .* 62, got \[.*, 50\]"),
    *(((K_PACKED, V_PACKED), packing(ends), r"packing\.cu_seqlens_q: expected numbers that rise from 0")
      for ends in ([3, 17, 18, 50], [0, 18, 17, 50], [0, 17, 60, 50])),
]  # fmt: skip


@pytest.mark.parametrize(
    ("qkv", "options", "said"),
    [
        *REFUSED,
        *(
            ((Q_PACKED, *kv), {**options, "backend": backend}, said)
            for (kv, options, said), backend in itertools.product(ENDINGS, CPU_BACKENDS)
        ),
    ],
)
def test_what_it_does_not_do_is_refused_by_name(qkv: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedError, match=f"(?s){said}"):
        attention(*qkv, **{"backend": "reference", **options})


@pytest.mark.parametrize("backend", ["reference", "fa3_fp8_emulated"])
def test_a_gradient_of_the_gradient_is_an_error_and_not_a_number(backend: Any) -> None:
    q, k, v = (x.float().requires_grad_() for x in batch()[:3])
    (grad,) = torch.autograd.grad(attention(q, k, v, backend=backend).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="expected its graph to be differentiated once"):
        grad.square().sum().backward()
