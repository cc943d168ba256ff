"""FlashAttention-3 under its names and signatures, by stand-ins in plain torch; what is said where it is missing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import fp8_ds.attention as package
from fp8_ds.attention import Packing, attention, flash, packages, reference
from fp8_ds.attention.shapes import Geometry
from fp8_ds.errors import UnsupportedError
from fp8_ds.testing import assert_bitwise

ENDS = torch.tensor([0, 9, 20], dtype=torch.int32)


@pytest.fixture(autouse=True)
def _nothing_installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No FlashAttention, as far as imports tell; a Hopper GPU wherever tensors are."""
    for name in [*packages.FA3_NAMES, *packages._CONFIG_NAMES, "flash_attn_3", "flashattn_hopper"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(package, "require_hopper", lambda device: None)
    packages.find_fa3.cache_clear()
    yield
    packages.find_fa3.cache_clear()


def install(monkeypatch: pytest.MonkeyPatch, name: str, *functions: Any, **attributes: Any) -> None:
    module = ModuleType(name)
    names = ("_flash_attn_forward", "_flash_attn_backward")
    vars(module).update({**dict(zip(names, functions, strict=False)), **attributes})
    if "." in name:
        monkeypatch.setitem(sys.modules, name.split(".")[0], ModuleType(name.split(".")[0]))
    monkeypatch.setitem(sys.modules, name, module)


def geometry_of(scale: float, causal: bool, left: int, right: int, *place: Any) -> Geometry:
    assert causal == (left == -1 and right == 0)
    return Geometry(scale, left, right, None if place[0] is None else Packing(*place))


def new_forward(
    q: Tensor, k: Tensor, v: Tensor, k_new: Any = None, out_: Any = None, cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None, max_seqlen_q: Any = None, max_seqlen_k: Any = None, q_descale: Any = None,
    k_descale: Any = None, v_descale: Any = None, softmax_scale: Any = None, causal: bool = False,
    window_size_left: int = -1, window_size_right: int = -1, num_splits: int = 1,
) -> tuple[Any, ...]:  # fmt: skip
    """The raw forward's signature since 2026."""
    assert num_splits == 1 and k_new is None
    place = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    geometry = geometry_of(softmax_scale, causal, window_size_left, window_size_right, *place)
    descales = None if q_descale is None else torch.stack([q_descale, k_descale, v_descale])
    return (*reference.forward(q, k, v, descales, geometry), torch.tensor([]), torch.tensor([]))


def new_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None, sequed_q: Any = None, max_seqlen_q: Any = None, max_seqlen_k: Any = None,
    dq: Any = None, dk: Any = None, dv: Any = None, softmax_scale: Any = None, is_causal: bool = False,
    window_size_left: int = -1, window_size_right: int = -1,
) -> Tensor:  # fmt: skip
    place = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    geometry = geometry_of(softmax_scale, is_causal, window_size_left, window_size_right, *place)
    for grad, value in zip((dq, dk, dv), reference.backward(dout, q, k, v, out, softmax_lse, geometry), strict=True):
        grad.copy_(value)
    return torch.empty(0)


def old_forward(
    q: Tensor, k: Tensor, v: Tensor, k_new: Any, qv: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: Any,
    max_seqlen_k: Any, q_descale: Any, k_descale: Any, v_descale: Any, softmax_scale: Any, causal: bool,
    window_size: Any = (-1, -1), softcap: float = 0.0,
) -> tuple[Any, ...]:  # fmt: skip
    """That of the tag v2.8.3: hardly a default, the window in one."""
    assert qv is None
    return new_forward(q, k, v, k_new, None, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, q_descale,
                       k_descale, v_descale, softmax_scale, causal, *window_size)  # fmt: skip


def old_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, cu_seqlens_q: Any,
    cu_seqlens_k: Any, sequed_q: Any, max_seqlen_q: Any, max_seqlen_k: Any, dq: Any, dk: Any, dv: Any,
    softmax_scale: Any, causal: bool, window_size: Any = (-1, -1),
) -> Any:  # fmt: skip
    new_backward(dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, None, max_seqlen_q, max_seqlen_k, dq, dk,
                 dv, softmax_scale, causal, *window_size)  # fmt: skip
    return dq, dk, dv, torch.empty(0)


def tensors(is_packed: bool) -> list[Tensor]:
    shapes = [(20, 4, 16), (20, 2, 16), (20, 2, 16), (20, 4, 16)]
    generator = torch.Generator().manual_seed(0)
    found = [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]
    return found if is_packed else [x[None] for x in found]


def run(backend: Any, is_packed: bool, **options: Any) -> list[Tensor]:
    *leaves, grad = tensors(is_packed)
    leaves = [x.requires_grad_() for x in leaves]
    packing = Packing.of(ENDS, 11) if is_packed else None
    out = attention(*leaves, backend=backend, packing=packing, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


@pytest.mark.parametrize(
    ("options", "is_packed"),
    [({}, False), ({"causal": True}, False), ({"causal": True}, True), ({"causal": True, "window": (4, 0)}, True)],
)
@pytest.mark.parametrize("functions", [(new_forward, new_backward), (old_forward, old_backward)], ids=["new", "old"])
def test_every_release_gets_its_arguments(
    monkeypatch: pytest.MonkeyPatch, functions: Any, is_packed: bool, options: dict[str, Any]
) -> None:
    install(monkeypatch, "flash_attn_interface", *functions)
    for backend, same in (("fa3", "reference"), ("fa3_fp8", "fa3_fp8_emulated")):
        for x, y in zip(run(backend, is_packed, **options), run(same, is_packed, **options), strict=True):
            assert_bitwise(x, y)


def test_what_a_build_lacks_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = {f"FLASHATTENTION_DISABLE_{name}": True for name in ("BACKWARD", "LOCAL", "FP8", "FP16", "VARLEN")}
    install(monkeypatch, "flash_attn_interface", new_forward, new_backward)
    install(monkeypatch, "flash_attn_config", CONFIG={"build_flags": flags})
    assert packages.find_fa3().backward is None
    assert "forward only" in package.describe_backend("fa3") and "without fp8, fp16" in package.describe_backend("fa3")
    q, k, v, _ = tensors(False)
    for said, options in (
        ("window: expected none", {"backend": "fa3", "window": (3, 0)}),
        ("expected a FlashAttention-3 built with FP8", {"backend": "fa3_fp8"}),
    ):
        with pytest.raises(UnsupportedError, match=said):
            attention(q, k, v, **options)
    with pytest.raises(UnsupportedError, match="packing: expected none"):
        attention(*(x[0] for x in (q, k, v)), backend="fa3", packing=Packing.of(ENDS, 11))
    with pytest.raises(UnsupportedError, match=r"q: expected bfloat16 .* got torch\.float16"):
        attention(q.half(), k.half(), v.half(), backend="fa3")
    with pytest.raises(UnsupportedError, match="head dim: expected a multiple of 8 up to 256, got 12"):
        attention(q[..., :12], k[..., :12], v[..., :12], backend="fa3")


@pytest.mark.parametrize("name", packages.FA3_NAMES)
def test_it_is_found_under_each_name_or_the_command_is_said(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"(?s){name}: not installed.*pip install fa3-fwd"):
        attention(*tensors(False)[:3], backend="fa3")
    packages.find_fa3.cache_clear()
    install(monkeypatch, name, new_forward, new_backward)
    fa3 = packages.find_fa3()
    assert fa3.module == name and (fa3.backward is None) == (name == "fa3_fwd_interface")


# --- builds without a backward: torch's own, by its names and shapes (meta tensors) ---

FLASH, CUDNN = "_flash_attention_backward", "_scaled_dot_product_cudnn_attention_backward"


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments that torch's backward was called with, by name."""
    install(monkeypatch, "fa3_fwd_interface", new_forward)
    calls: list[dict[str, Any]] = []
    for name in (FLASH, CUDNN):
        expected = [one.name for one in getattr(torch.ops.aten, name).default._schema.arguments]

        def spy(*arguments: Any, expected: list[str] = expected, **options: Any) -> tuple[Any, ...]:
            calls.append(dict(zip(expected, arguments, strict=False)) | options)
            return arguments[1:4]

        monkeypatch.setattr(torch.ops.aten, name, spy)
    return calls


@pytest.mark.parametrize(("name", "is_packed"), [(CUDNN, False), (FLASH, False), (FLASH, True)])
def test_a_backward_of_torch_has_the_shapes_of_its_operands(name: str, is_packed: bool) -> None:
    q, k, v, grad = (x.to("meta") for x in tensors(is_packed))
    geometry = Geometry(0.25, right=0, packing=Packing.of(ENDS.to("meta"), 11) if is_packed else None)
    lse = torch.empty(reference.lse_shape(q, geometry), device="meta")
    function = flash.cudnn_backward if name == CUDNN else flash.flash2_backward
    for x, y in zip(function(grad, q, k, v, q, lse, geometry), (q, k, v), strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype and x.is_contiguous()


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_forward_only_build_takes_torchs_backward(
    seen: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, is_packed: bool
) -> None:
    monkeypatch.setattr(flash, "cudnn_takes", lambda q, k, geometry: False)
    run("fa3", is_packed, causal=True)
    (named,) = seen
    assert named["is_causal"] is True and named["scale"] == 0.25 and named["dropout_p"] == 0
    assert (named["window_size_left"], named["window_size_right"]) == (-1, 0)
    assert (named["max_q"], named["max_k"]) == ((11, 11) if is_packed else (20, 20))
    assert (named["cum_seq_q"] is ENDS) == is_packed
    q, k, v, grad = (x[None, :n] for x, n in zip(tensors(True), (20, 5, 5, 20), strict=True))
    attention(q.requires_grad_(), k, v, backend="fa3", causal=True).backward(grad)
    lse = seen[-1]["logsumexp"]  # an unseen row's -infinity arrives as +infinity
    assert (lse[0, :, :15] == float("inf")).all() and lse[0, :, 15:].isfinite().all()


def test_a_forward_only_build_takes_cudnns_backward_where_there_is_one(seen: list[dict[str, Any]]) -> None:
    run("fa3_fp8", False, causal=True)
    (named,) = seen
    assert named["query"].shape == (1, 4, 20, 16) and named["logsumexp"].shape == (1, 4, 20, 1)
    assert named["is_causal"] is True and named["scale"] == 0.25 and named["dropout_p"] == 0
    assert (named["max_q"], named["max_k"]) == (20, 20)
    for num_k, dim, geometry, takes in (
        (20, 128, Geometry(1.0), True),
        (20, 128, Geometry(1.0, right=0), True),
        (20, 192, Geometry(1.0), False),
        (30, 128, Geometry(1.0, right=0), False),
        (20, 128, Geometry(1.0, 4, 0), False),
        (20, 128, Geometry(1.0, packing=Packing.of(ENDS, 11)), False),
    ):
        assert flash.cudnn_takes(torch.empty(1, 20, 4, dim), torch.empty(1, num_k, 4, dim), geometry) is takes
